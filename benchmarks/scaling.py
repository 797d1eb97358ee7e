r"""Plans, their verification, their files and simulations for growing networks, up to 10⁵ agents.

Prints a line per size for random graphs in which each agent has ten links, against one insider,
and fits cost ~ n^exponent to the three largest sizes. Times are CPU seconds: other work on the
machine must not count. Each size has a process of its own, which ends after ``--limit`` seconds of
CPU time. Larger sizes are then left out.

    python benchmarks/scaling.py --sums 20,100,1000,10000,100000 --gossip 20,50,100,200,400 \
        --steps 100,1000,10000 --out costs.json --plot docs/images/scaling.png

A step of a simulation (``--steps``) trains logistic regression on the task ``synthetic`` with
corn, ldp and none under exact sums. Costs of earlier runs are read from the file of ``--out``, so
that one picture shows them all.
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
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from corn import learn
from corn.covariance import default_objective
from corn.learn.sweep import SweepLoop
from corn.plan import load_plan, make_plan, save_plan, verify_plan
from corn.privacy import PrivacyBudget
from corn.report.figures import INK, MECHANISM_COLOURS, darken, save_figure
from corn.threads import limit_threads
from corn.topology import Mixing, load_network

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = TypeVar("Result")
Row: TypeAlias = dict[str, float]
Costs: TypeAlias = dict[str, dict[str, dict[int, float]]]
"""By what was measured, by the name of the cost, by the number of agents."""

_DEGREE = 10
_STEPS = 12
_BUDGET = PrivacyBudget(epsilon=10, delta=1e-5, num_steps=1000, clip=0.1)
_SUM, _GOSSIP, _SIMULATION = "exact sums", "gossip", "simulation"
_COLOURS = {_SUM: MECHANISM_COLOURS["corn"], _GOSSIP: MECHANISM_COLOURS["ldp"]}


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sums", default="20,100,1000", help="sizes of plans for exact sums")
    parser.add_argument("--gossip", default="20,50,100", help="sizes of plans for gossip")
    parser.add_argument("--steps", default="", help="sizes of simulated networks")
    parser.add_argument("--limit", type=int, default=600, help="CPU seconds of a size")
    parser.add_argument("--out", type=Path, help="JSON file of all costs, read first if it exists")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    costs: Costs = {}
    if given.out and given.out.exists():
        read = json.loads(given.out.read_text())
        costs = {
            what: {name: {int(n): v for n, v in column.items()} for name, column in own.items()}
            for what, own in read.items()
        }
    for what, sizes in ((_SUM, given.sums), (_GOSSIP, given.gossip), (_SIMULATION, given.steps)):
        for size in _read_numbers(sizes):
            row = _run_alone(what, size, given.limit)
            if row is None:
                print(f"n = {size}, {what}: stopped after {given.limit} CPU seconds", flush=True)
                break
            facts = ", ".join(f"{name} {value:.3g}" for name, value in row.items())
            print(f"n = {size}, {what}: {facts}", flush=True)
            for name, value in row.items():
                costs.setdefault(what, {}).setdefault(name, {})[size] = value
            if given.out:
                given.out.write_text(json.dumps(costs, indent=1))
    for what, own in costs.items():
        for name, column in own.items():
            print(f"{what}, {name}: {_fit(column)}")
    if given.plot:
        _draw(costs, given.plot)


def _read_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _run_alone(what: str, size: int, limit: int) -> Row | None:
    """Return the costs that a new process measures, or None if it takes too long."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(what, size, limit, sender))
    process.start()
    sender.close()
    try:
        row: Row = receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode != -signal.SIGXCPU:
            raise SystemExit(f"n = {size} failed") from None
        return None
    process.join()
    return row


def _report(what: str, size: int, limit: int, sender: Connection) -> None:
    limit_threads()
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    mixing: Mixing = "gossip" if what == _GOSSIP else "sum"
    row = _simulate(size) if what == _SIMULATION else _measure_plan(size, mixing)
    row["memory, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    sender.send(row)


def _measure_plan(size: int, mixing: Mixing) -> Row:
    network = load_network(f"regular:n={size},degree={_DEGREE},seed=3", mixing=mixing)
    plan, seconds = _time(lambda: make_plan(network, _BUDGET))
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
        "load and verify, s": loading + checking,
        "plan file, MB": megabytes,
        "value over bound": plan.certificate.value / plan.certificate.lower_bound,
    }


def _simulate(size: int) -> Row:
    """Return the time of a step of all mechanisms."""
    network = load_network(f"regular:n={size},degree={_DEGREE},seed=3")
    problem = learn.Workload("synthetic").build(size)
    methods = learn.make_mechanisms(
        ["corn", "ldp", "none"],
        network,
        _BUDGET,
        objective=default_objective(_BUDGET.num_steps, mixing="sum"),
    )
    trials = [learn.Trial(method, learn.make_schedule(0.1, "constant")) for method in methods]
    settings = learn.SweepSettings(num_steps=_STEPS, batch_size=16, seeds=(0,))
    loop = SweepLoop(problem, network, trials, settings, evaluate_at=[0])
    loop.advance()  # the first step makes what later ones reuse

    def advance() -> None:
        for _ in range(_STEPS - 2):
            loop.advance()

    _, seconds = _time(advance)
    return {"step, s": seconds / (_STEPS - 2)}


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

    figure, panels = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    panels[0].set_title("Plans of exact sums need no search", fontsize=10)
    _draw_lines(panels[0], costs, "plan, s", "CPU seconds to make a plan")
    panels[1].set_title("Anybody can verify a plan", fontsize=10)
    _draw_lines(panels[1], costs, "load and verify, s", "CPU seconds to verify it")
    panels[2].set_title("Simulations grow like the agents", fontsize=10)
    simulated = {_SUM: costs.get(_SIMULATION, {})}
    _draw_lines(panels[2], simulated, "step, s", "CPU seconds of a simulated step")
    save_figure(figure, path)


def _draw_lines(axes: Axes, costs: Costs, name: str, label: str) -> None:
    """Draw one cost over the number of agents, each line with its name."""
    for what, colour in _COLOURS.items():
        column = costs.get(what, {}).get(name)
        if column:
            sizes, values = zip(*sorted(column.items()), strict=True)
            axes.loglog(sizes, values, "o-", color=colour, markersize=4)
            # Above the highest point, as lines end at different sizes.
            highest = int(np.argmax(values))
            axes.annotate(
                what,
                (sizes[highest], values[highest]),
                xytext=(-4, 7),
                textcoords="offset points",
                ha="right",
                color=darken(colour),
            )
    axes.margins(y=0.12)
    axes.set_xlabel("agents", color=INK)
    axes.set_ylabel(label, color=INK)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
