"""Design, verification, plan size and simulation for growing networks, with the exponent of each.

Prints a line per size for Erdős–Rényi graphs of mean degree 10, and fits cost ~ n^exponent to the
three largest sizes. Times are CPU seconds: other work on the machine must not count. A size that
takes longer than ``--limit`` is the last one.

A step of a simulation (``--steps``) trains logistic regression on the task ``synthetic`` with
corn, decor, ldp and none against an eavesdropper on a torus. Each size has a process of its own,
whose largest memory is printed.

    python benchmarks/scaling.py --sizes 50,100,200,400 --plot docs/images/scaling.png
    python benchmarks/scaling.py --sizes "" --steps 20,100,400,1000,2500,10000
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import numpy as np

from corn import learn
from corn.covariance import ThreatModel, default_objective
from corn.learn.sweep import SweepLoop
from corn.plan import Plan, load_plan, make_plan, save_plan, verify_plan
from corn.privacy import PrivacyBudget
from corn.threads import limit_threads
from corn.topology import load_network

Result = TypeVar("Result")

_DEGREE = 10
_STEPS = 12
# Done in another way above some size, so that no single exponent describes them.
_CHANGES = ("design of all, s", "measurement, s")
_BUDGET = PrivacyBudget(epsilon=10, delta=1e-5, num_steps=1000, clip=0.1)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="50,100,200", help="of plans; empty for none")
    parser.add_argument("--steps", default="", help="sizes of simulated networks")
    parser.add_argument("--insiders", default="0,1")
    parser.add_argument("--limit", type=float, default=600, help="seconds")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    limit_threads()
    sizes = [int(size) for size in given.sizes.split(",") if size]
    costs: dict[str, dict[int, float]] = {}
    for insiders in map(int, given.insiders.split(",")):
        for size in sizes:
            slowest = _measure(size, insiders, costs)
            if slowest > given.limit:
                print(f"stopped after n = {size} with {insiders} insiders: {slowest:.0f} s")
                break
    for size in (int(size) for size in given.steps.split(",") if size):
        # A new process, so that its largest memory is that of this size.
        with get_context("spawn").Pool(1) as pool:
            row = pool.apply(_simulate, (size,))
        _note(row, "simulation", size, costs)
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
    _note(row, f"{insiders} insiders", size, costs, about=f", {_describe(plan)}")
    return max(seconds, checking)


def _simulate(size: int) -> dict[str, float]:
    """Return the costs of a simulation of about ``size`` agents on a torus."""
    limit_threads()
    rows = max(3, int(size**0.5))
    network = load_network(f"torus:{rows}x{size // rows}")
    problem = learn.make_workload("synthetic", network.num_agents)
    names = ["corn", "decor", "ldp", "none"]
    target = default_objective(_BUDGET.num_steps)
    methods, designing = _time(
        lambda: learn.make_methods(names, network, _BUDGET, objective=target, threat=ThreatModel(0))
    )
    trials = [learn.Trial(method, learn.make_schedule(0.1, "constant")) for method in methods]
    settings = learn.SweepSettings(num_steps=_STEPS, batch_size=16, seeds=(0,))
    loop, measuring = _time(
        lambda: SweepLoop(problem, network, trials, settings=settings, evaluate_at=[0])
    )
    loop.advance()  # the first step makes what later ones reuse
    _, seconds = _time(lambda: [loop.advance() for _ in range(_STEPS - 2)])
    return {
        "design of all, s": designing,
        "step, s": seconds / (_STEPS - 2),
        "measurement, s": measuring,
        "memory, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def _note(
    row: dict[str, float],
    what: str,
    size: int,
    costs: dict[str, dict[int, float]],
    *,
    about: str = "",
) -> None:
    for name, value in row.items():
        if name not in _CHANGES:
            costs.setdefault(f"{what}: {name}", {})[size] = value
    facts = ", ".join(f"{name} {value:.3g}" for name, value in row.items())
    print(f"n = {size}, {what}{about}: {facts}", flush=True)


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
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1))
    figure.savefig(path, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
