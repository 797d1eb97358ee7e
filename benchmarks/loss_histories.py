"""Random histories of losses and returns: does any break what must hold?

Run ``python benchmarks/loss_histories.py [--histories N] [--processes N] [--first-seed N]``. In
each, agents are killed, suspended, cut off and started again at random, and return to the run: in
threads of one process, and in as many histories as ``--processes`` says in processes of their own.
``tests/oracles/loss_histories.py`` has the faults and the checks. Exit code 1 if any check fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from corn.threads import limit_threads

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.oracles.loss_histories import run_history, run_processes_history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--histories", type=int, default=170, help="with agents in threads")
    parser.add_argument("--processes", type=int, default=30, help="with agents in processes")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--mixing", choices=["sum", "gossip"], default="sum", help="in threads")
    options = parser.parse_args()
    limit_threads()
    events, broken, began = Counter[str](), [], time.monotonic()
    for number in range(options.histories + options.processes):
        seed = options.first_seed + number
        with tempfile.TemporaryDirectory() as folder:
            if number < options.histories:
                record = run_history(seed, Path(folder), options.mixing)
            else:
                record = run_processes_history(seed, Path(folder))
        events.update(record.events)
        broken += [f"seed {seed}: {problem}" for problem in record.problems]
        for problem in record.problems:
            print(f"seed {seed}: {problem}", flush=True)
        if number % 10 == 9:
            print(f"{number + 1}: {dict(events)}", flush=True)
    total = options.histories + options.processes
    print(f"{total} histories in {time.monotonic() - began:.0f} s: {dict(sorted(events.items()))}")
    print(f"{len(broken)} violations")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
