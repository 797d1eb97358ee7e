"""A script, not a test: releases steps in child processes and kills them at random moments.

``python ledger_victim.py LEDGER LOG LIMIT KILLS SEED``. Every release is appended to LOG as "nonce
step", after the ledger allowed it; what is in LOG has left the agent.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from corn.noise.ledger import BudgetSpentError, ReleaseLedger
from corn.privacy import PrivacyBudget
from corn.privacy.composition import PlanTerms

PLAN = bytes(32)


def release_until_killed(path: Path, log: Path, limit: int, dice: random.Random) -> None:
    terms = PlanTerms(PrivacyBudget(1, 1e-5, num_steps=limit, clip=0.1), max_colluders=1)
    messages = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while True:
        with ReleaseLedger.open(
            path, plan_fingerprint=PLAN, agent=0, terms=terms, precision=0.01
        ) as ledger:
            step = dice.choice([0, 0, 1000])
            while dice.random() > 0.005:
                ledger.reserve(step)
                os.write(messages, f"{ledger.nonce.hex()} {step}\n".encode())
                step += dice.choice([1, 1, 1, 1, 7])


def wait_for_releases(log: Path, count: int, child: int) -> None:
    """Wait until a child has made this many releases, or all that it may make."""
    goal = size_of(log) + count * len(f"{bytes(32).hex()} 0\n")
    while size_of(log) < goal and is_running(child):
        time.sleep(0.0005)


def size_of(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def is_running(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def main() -> None:
    path, log, limit, kills, seed = sys.argv[1:]
    dice = random.Random(int(seed))
    for kill in range(int(kills)):
        child = os.fork()
        if child == 0:
            try:
                release_until_killed(Path(path), Path(log), int(limit), random.Random(kill))
            except BudgetSpentError:
                os._exit(3)
            finally:
                os._exit(4)
        wait_for_releases(Path(log), dice.choice([0, dice.randrange(300)]), child)
        time.sleep(dice.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status) != 3:
            sys.exit("a child failed")


if __name__ == "__main__":
    main()
