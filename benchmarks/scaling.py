"""Design, verification and plan size for growing networks, with the exponent of each.

Prints a line per size for Erdős–Rényi graphs of mean degree 10, and fits cost ~ n^exponent to the
three largest sizes. Times are CPU seconds: other work on the machine must not count. A size that
takes longer than ``--limit`` is the last one.

    python benchmarks/scaling.py --sizes 50,100,200,400 --plot docs/images/scaling.png
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from corn.covariance import ThreatModel
from corn.plan import Plan, load_plan, make_plan, save_plan, verify_plan
from corn.privacy import PrivacyBudget
from corn.threads import limit_threads
from corn.topology import load_network

Result = TypeVar("Result")

_DEGREE = 10
_BUDGET = PrivacyBudget(epsilon=10, delta=1e-5, num_steps=1000, clip=0.1)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="50,100,200")
    parser.add_argument("--insiders", default="0,1")
    parser.add_argument("--limit", type=float, default=600, help="seconds")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    limit_threads()
    sizes = [int(size) for size in given.sizes.split(",")]
    costs: dict[str, dict[int, float]] = {}
    for insiders in map(int, given.insiders.split(",")):
        for size in sizes:
            slowest = _measure(size, insiders, costs)
            if slowest > given.limit:
                print(f"stopped after n = {size} with {insiders} insiders: {slowest:.0f} s")
                break
    for name, column in costs.items():
        print(f"{name}: {_fit(column)}")
    if given.plot:
        _draw(costs, given.plot)


def _measure(size: int, insiders: int, costs: dict[str, dict[int, float]]) -> float:
    network = load_network(f"er:n={size},p={_DEGREE / (size - 1):.6g},seed=3")
    threat = ThreatModel(insiders)
    plan, seconds = _time(lambda: make_plan(network, _BUDGET, threat=threat))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.corn")
        save_plan(plan, path)
        megabytes = path.stat().st_size / 1e6
        loaded, loading = _time(lambda: load_plan(path))
    verified, checking = _time(lambda: verify_plan(loaded))
    if not verified.passed:
        raise SystemExit(f"n = {size}: {verified.problems[0]}")
    streams = max(plan.decomposition.count_streams())
    row = {
        "plan, s": seconds,
        "load, s": loading,
        "verify, s": checking,
        "plan file, MB": megabytes,
        "streams": float(streams),
    }
    for name, value in row.items():
        costs.setdefault(f"{insiders} insiders: {name}", {})[size] = value
    facts = ", ".join(f"{name} {value:.3g}" for name, value in row.items())
    print(f"n = {size}, {insiders} insiders, {_describe(plan)}: {facts}", flush=True)
    return max(seconds, checking)


def _describe(plan: Plan) -> str:
    gap = plan.certificate.value / plan.certificate.lower_bound - 1
    return f"{plan.certificate.status}, gap {gap:.1%}"


def _time(work: Callable[[], Result]) -> tuple[Result, float]:
    start = time.process_time()
    return work(), time.process_time() - start


def _fit(column: dict[int, float]) -> str:
    if len(column) < 2:
        return "too few sizes for an exponent"
    sizes, values = (np.log(list(part)[-3:]) for part in (column.keys(), column.values()))
    return f"n^{np.polyfit(sizes, values, 1)[0]:.2f}"


def _draw(costs: dict[str, dict[int, float]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name, column in costs.items():
        if name.endswith(", s"):
            axes.loglog(list(column), list(column.values()), "o-", label=f"{name} {_fit(column)}")
    axes.set_xlabel("agents")
    axes.set_ylabel("CPU seconds")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
