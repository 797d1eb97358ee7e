"""An independent reader of release ledgers, which uses their format and none of CorN's code.

``python ledger_script.py LIMIT FOLDER …``: the folders are copies of the same agents' ledgers after
each of several runs. Exit code 1 and one line if any agent released more than LIMIT steps, or ran
twice under one nonce, so that noise could have been released twice.
"""

import json
import sys
from pathlib import Path

PAGE = 4096


def read(path: Path) -> tuple[int, str, int]:
    """Agent, nonce of the latest run, and how many releases may have been made."""
    data = path.read_bytes()
    lines = [data[at : at + PAGE].split(b"\n")[1] for at in (0, PAGE)]
    entries = [json.loads(line) for line in lines if line.startswith(b"{")]
    if not entries:
        raise SystemExit(f"{path}: no ledger")
    latest = max(entries, key=lambda entry: int(entry["number"]))
    return latest["agent"], latest["nonce"], latest["released"]


def check(limit: int, folders: list[Path]) -> dict[int, list[int]]:
    """Return what every agent had spent after each run."""
    nonces: dict[int, set[str]] = {}
    spent: dict[int, list[int]] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.ledger")):
            agent, nonce, count = read(path)
            if nonce in nonces.setdefault(agent, set()):
                raise SystemExit(f"agent {agent}: two runs under one nonce")
            nonces[agent].add(nonce)
            before = spent.setdefault(agent, [])
            if count > limit or (before and count < before[-1]):
                raise SystemExit(f"agent {agent}: {count} releases after {before}, limit {limit}")
            before.append(count)
    everyone = [nonce for own in nonces.values() for nonce in own]
    if len(set(everyone)) != len(everyone):
        raise SystemExit("two agents brought the same nonce")
    return spent


if __name__ == "__main__":
    for who, counts in check(int(sys.argv[1]), [Path(name) for name in sys.argv[2:]]).items():
        sys.stdout.write(f"agent {who}: {counts}\n")
