r"""Design, verification, plan size and simulation for growing networks, with the exponent of each.

Prints a line per size for Erdős–Rényi graphs of mean degree 10, and fits cost ~ n^exponent to the
three largest sizes. Times are CPU seconds: other work on the machine must not count. Each size has
a process of its own, whose largest memory is printed, and which ends after ``--limit`` seconds of
CPU time. Larger sizes are then left out.

A step of a simulation (``--steps``) trains logistic regression on the task ``synthetic`` with
corn, decor, ldp and none against an eavesdropper on a torus.

    python benchmarks/scaling.py --insiders 0,1 --sizes 20,50,100,200,400,1000,2000 \
        --steps 20,100,400,1000,2500,10000 --out costs.json --plot docs/images/scaling.png
    python benchmarks/scaling.py --insiders 2 --sizes 20,50,100,200 --out costs.json

Costs of earlier runs are read from the file of ``--out``, so that one picture shows them all.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from corn import learn
from corn.covariance import ThreatModel, default_objective
from corn.learn.sweep import SweepLoop
from corn.plan import load_plan, make_plan, save_plan, verify_plan
from corn.privacy import PrivacyBudget
from corn.threads import limit_threads
from corn.topology import load_network

Result = TypeVar("Result")
Costs: TypeAlias = dict[str, dict[int, float]]
Measure: TypeAlias = Callable[[int, int], dict[str, float]]

_DEGREE = 10
_STEPS = 12
# Not a cost, or done in another way above some size, so that no single exponent describes it.
_NO_POWER_OF_N = ("value over bound", "design of all, s", "measurement, s")
_PANELS = {
    ", s": "CPU seconds",
    ": plan file, MB": "plan file, MB",
    ": streams": "most streams of an agent",
    ": memory, MB": "memory of the process, MB",
}
_BUDGET = PrivacyBudget(epsilon=10, delta=1e-5, num_steps=1000, clip=0.1)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="50,100,200", help="of plans; empty for none")
    parser.add_argument("--steps", default="", help="sizes of simulated networks")
    parser.add_argument("--insiders", default="0,1")
    parser.add_argument("--limit", type=int, default=600, help="CPU seconds of a size")
    parser.add_argument("--out", type=Path, help="JSON file of all costs, read first if it exists")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    costs: Costs = {}
    if given.out and given.out.exists():
        read = json.loads(given.out.read_text())
        costs = {name: {int(n): v for n, v in column.items()} for name, column in read.items()}
    for insiders in _read_numbers(given.insiders):
        _measure_sizes(
            _measure_plan,
            _read_numbers(given.sizes),
            f"{insiders} insiders",
            insiders,
            given,
            costs,
        )
    _measure_sizes(_simulate, _read_numbers(given.steps), "simulation", 0, given, costs)
    for name, column in costs.items():
        print(f"{name}: {_fit(column)}")
    if given.plot:
        _draw(costs, given.plot)


def _read_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _measure_sizes(
    measure: Measure,
    sizes: list[int],
    what: str,
    insiders: int,
    given: argparse.Namespace,
    costs: Costs,
) -> None:
    for size in sizes:
        row = _run_alone(measure, size, insiders, given.limit)
        if row is None:
            print(f"n = {size}, {what}: stopped after {given.limit} CPU seconds", flush=True)
            return
        _note(row, what, size, costs)
        if given.out:
            given.out.write_text(json.dumps(costs, indent=1))


def _run_alone(measure: Measure, size: int, insiders: int, limit: int) -> dict[str, float] | None:
    """Return the costs that a new process measures, or None if it takes too long."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(measure, size, insiders, limit, sender))
    process.start()
    sender.close()
    try:
        row: dict[str, float] = receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode != -signal.SIGXCPU:
            raise SystemExit(f"n = {size} failed") from None
        return None
    process.join()
    return row


def _report(measure: Measure, size: int, insiders: int, limit: int, sender: Connection) -> None:
    limit_threads()
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    row = measure(size, insiders)
    row["memory, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    sender.send(row)


def _measure_plan(size: int, insiders: int) -> dict[str, float]:
    network = load_network(f"er:n={size},p={min(0.5, _DEGREE / (size - 1)):.6g},seed=3")
    plan, seconds = _time(lambda: make_plan(network, _BUDGET, threat=ThreatModel(insiders)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.corn")
        save_plan(plan, path)
        megabytes = path.stat().st_size / 1e6
        loaded, loading = _time(lambda: load_plan(path))
    verified, checking = _time(lambda: verify_plan(loaded))
    if not verified.passed:
        raise SystemExit(f"n = {size}: {verified.problems[0]}")
    return {
        "plan, s": seconds,
        "load, s": loading,
        "verify, s": checking,
        "plan file, MB": megabytes,
        "streams": float(max(plan.decomposition.count_streams())),
        "value over bound": plan.certificate.value / plan.certificate.lower_bound,
    }


def _simulate(size: int, insiders: int) -> dict[str, float]:
    """Return the costs of a simulation of about ``size`` agents on a torus."""
    rows = max(3, int(size**0.5))
    network = load_network(f"torus:{rows}x{size // rows}", mixing="gossip")
    problem = learn.Workload("synthetic").build(network.num_agents)
    names = ["corn", "decor", "ldp", "none"]
    target, threat = default_objective(_BUDGET.num_steps), ThreatModel(insiders)
    methods, designing = _time(
        lambda: learn.make_mechanisms(names, network, _BUDGET, objective=target, threat=threat)
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
    }


def _note(row: dict[str, float], what: str, size: int, costs: Costs) -> None:
    for name, value in row.items():
        if name not in _NO_POWER_OF_N:
            costs.setdefault(f"{what}: {name}", {})[size] = value
    facts = ", ".join(f"{name} {value:.3g}" for name, value in row.items())
    print(f"n = {size}, {what}: {facts}", flush=True)


def _time(work: Callable[[], Result]) -> tuple[Result, float]:
    start = time.process_time()
    return work(), time.process_time() - start


def _fit(column: dict[int, float]) -> str:
    if len(column) < 2:
        return "no exponent"
    sizes, values = (np.log(part) for part in zip(*sorted(column.items())[-3:], strict=True))
    return f"n^{np.polyfit(sizes, values, 1)[0]:.2f}"


def _draw(costs: Costs, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(14, 8), layout="constrained")
    for axes, (ending, label) in zip(panels.flat, _PANELS.items(), strict=True):
        for name, column in costs.items():
            if name.endswith(ending):
                sizes, values = zip(*sorted(column.items()), strict=True)
                axes.loglog(
                    sizes, values, "o-", label=f"{name.removesuffix(ending)}, {_fit(column)}"
                )
        axes.set_xlabel("agents")
        axes.set_ylabel(label)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
