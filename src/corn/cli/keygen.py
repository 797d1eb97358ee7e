"""``corn keygen`` and ``corn roster``: private keys for each agent, public keys for all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corn.cli.options import JsonOption
from corn.cli.output import print_json, print_note
from corn.errors import FileFormatError
from corn.files import require_private
from corn.noise import Roster, generate_identity, rotate_key, save_identity, save_roster

KEYGEN_EXAMPLE = "corn keygen --agent 3 --keys keys"
ROSTER_EXAMPLE = "corn roster --keys keys --out roster.json"


def keygen(
    keys: Annotated[Path, typer.Option(help="Folder for the key files.")],
    agent: Annotated[int | None, typer.Option(min=0, help="Number of the agent.")] = None,
    agents: Annotated[
        int | None,
        typer.Option(min=1, help="Number of agents N, for a run on one machine: keys 0 … N−1."),
    ] = None,
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate",
            help="Replace the agent's key, and sign the new one with the old one in roster.json of "
            "the folder, which the other agents then accept.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Generate an agent's private key (mode 0600, never printed) and its public key."""
    if (agent is None) == (agents is None):
        raise typer.BadParameter("give either --agent or --agents")
    if rotate:
        # The old key signs the new one, and only its owner has it.
        if agent is None:
            raise typer.BadParameter("--rotate needs --agent: each owner replaces its own key")
        roster = rotate_key(keys, agent)
        print_note(
            f"replaced {keys / f'agent-{agent}.key'}; the old key is kept with the ending .old, "
            "copy roster.json to all agents"
        )
        _print_fingerprint(roster, "agents that know the old roster accept it")
        if json:
            print_json({"keys": str(keys), "fingerprint": roster.fingerprint.hex()})
        return
    # Private keys are in it, so others should not even see their names.
    keys.mkdir(parents=True, exist_ok=True, mode=0o700)
    # mkdir leaves the mode of a folder that exists: one that others can read is refused.
    require_private(keys)
    numbers = range(agents) if agents is not None else [agent or 0]
    # All names are checked before the first key is written, so that a failure leaves no new keys.
    for number in numbers:
        if (keys / f"agent-{number}.key").exists():
            raise FileFormatError(
                f"{keys / f'agent-{number}.key'}: exists; keys are never overwritten"
            )
    public_keys = {}
    for number in numbers:
        identity = generate_identity()
        save_identity(identity, keys / f"agent-{number}.key")
        public = keys / f"agent-{number}.pub"
        # After the private key: a public key without its private one would enter a roster for
        # nothing.
        public.write_text(identity.public_key.hex() + "\n", encoding="ascii")
        public_keys[str(number)] = identity.public_key.hex()
    # One line for any number of agents.
    first, last = (keys / f"agent-{number}" for number in (numbers[0], numbers[-1]))
    if first == last:
        print_note(f"wrote {first}.key (keep it secret) and {first}.pub (share it)")
    else:
        print_note(
            f"wrote {first}.key to {last}.key (keep them secret) and {first}.pub to {last}.pub "
            "(share them)"
        )
    if json:
        print_json({"keys": str(keys), "public_keys": public_keys})


def roster(
    keys: Annotated[Path, typer.Option(help="Folder with the public keys agent-0.pub, …")],
    out: Annotated[Path, typer.Option(help="File for the roster.")],
    json: JsonOption = False,
) -> None:
    """Collect the public keys of all agents into one file, the roster."""
    # By number: by name, agent-10 would come before agent-2, and agents would get others' keys.
    found = sorted(keys.glob("agent-*.pub"), key=lambda path: _number(path))
    # All of them, without gaps: a missing key would shift the agents after it.
    if [_number(path) for path in found] != list(range(len(found))) or not found:
        names = ", ".join(path.name for path in found) or "none"
        raise FileFormatError(
            f"{keys}: must contain public keys agent-0.pub, agent-1.pub, …, found {names}"
        )
    made = Roster(tuple(_read_public_key(path) for path in found))
    save_roster(made, out)
    print_note(f"wrote {out} with {len(found)} public keys")
    _print_fingerprint(made, "compare it with the owners of all agents before the first run")
    if json:
        print_json(
            {
                "roster": str(out),
                "fingerprint": made.fingerprint.hex(),
                "public_keys": [key.hex() for key in made.public_keys],
            }
        )


def _print_fingerprint(made: Roster, advice: str) -> None:
    """Print the fingerprint of a roster in groups that people can read out to each other."""
    digits = made.fingerprint.hex()
    # All 256 bits, as a shortened fingerprint could be matched by a search.
    groups = " ".join(digits[at : at + 4] for at in range(0, len(digits), 4))
    print_note(f"fingerprint {groups}: {advice}")


def _number(path: Path) -> int:
    number = path.stem.removeprefix("agent-")
    if not number.isdecimal():
        raise FileFormatError(f"{path}: a public key's file must be named agent-NUMBER.pub")
    return int(number)


def _read_public_key(path: Path) -> bytes:
    try:
        return bytes.fromhex(path.read_text(encoding="ascii").strip())
    except ValueError as error:
        raise FileFormatError(f"{path}: not a public key in hexadecimal") from error
