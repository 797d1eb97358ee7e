"""How long designs against insiders take, in units of one batch of inversions they are made of.

    .venv/bin/python benchmarks/insider_speed.py [--large]

Prints time, certified gap and coalitions for pair seeds. ``--large`` adds 100 and 200 agents
(minutes).
"""

from __future__ import annotations

import argparse
import math
import resource
import time

import numpy as np

from corn.covariance import Design, Horizon, ThreatModel, design
from corn.threads import limit_threads
from corn.topology import load_network
from measuring import best_seconds

CASES = [
    ("er:n=7,p=0.5,seed=1", 1),
    ("er:n=20,p=0.2,seed=1", 1),
    ("er:n=20,p=0.2,seed=1", 2),
    ("er:n=30,p=0.15,seed=1", 1),
]
LARGE = [("er:n=100,p=0.06,seed=1", 1), ("er:n=200,p=0.05,seed=1", 1)]


def timed_design(graph: str, colluders: int) -> tuple[Design, float]:
    network = load_network(graph, mixing="gossip")
    start = time.perf_counter()
    result = design(
        network,
        1.0,
        objective=Horizon(1000),
        threat=ThreatModel(colluders, "pairs"),
    )
    return result, time.perf_counter() - start


def inversion_seconds(num_coalitions: int, num_agents: int) -> float:
    """One batch of inverses of the coalitions' matrices: what an evaluation cannot do without."""
    batch = np.repeat(2 * np.eye(num_agents)[None], num_coalitions, axis=0)
    return best_seconds({"": lambda: np.linalg.inv(batch)}, 5, time.perf_counter)[""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="also 100 and 200 agents: minutes")
    large = parser.parse_args().large
    limit_threads()
    print("| graph | insiders | coalitions | seconds | gap | evaluations | per evaluation |")
    print("|---|---|---|---|---|---|---|")
    for graph, colluders in CASES + (LARGE if large else []):
        result, seconds = timed_design(graph, colluders)
        count = math.comb(result.num_agents, colluders)
        unit = inversion_seconds(count, result.num_agents)
        ratio = seconds / result.iterations / unit
        print(
            f"| {graph} | {colluders} | {count} | {seconds:.2f} | "
            f"{result.gap:.1e} | {result.iterations} | {ratio:.1f} × inverses |"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"\npeak memory {peak:.2f} GB")


if __name__ == "__main__":
    main()
