"""Cells, the units of computation of a reproduction, and the store of their results.

A ``DesignCell`` is a covariance for one graph at precision cap 1. The covariance for a budget with
cap b is that divided by b, so one cell serves every ε. A ``TrainingCell`` is a set of mechanisms,
step sizes and seeds of one task on one graph at one ε, trained together on common random numbers.
The random numbers of a seed are the same in every cell.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import joblib
import numpy as np

from corn import learn
from corn.checks import require
from corn.covariance import ONE_STEP, Horizon, ThreatModel, default_objective, design
from corn.errors import CornWarning, MissingExtraError
from corn.learn.datasets import ModelName
from corn.learn.schedule import ScheduleName, make_schedule
from corn.plan.plan import meet_caps
from corn.privacy import Unit
from corn.threads import limit_threads
from corn.topology import Network, choose_cooldown, load_network
from corn.version import __version__
from reproduction.mechanisms import Mechanism, find_rule

CellResult: TypeAlias = dict[str, Any]
"""What a cell computed, and the ``seconds`` that it took."""

_FORMAT = 2
"""Raised when the same configuration gives other results, so that stored ones are not read."""

_LARGEST_STORED_NOISE = 100
"""Agents up to which the decomposition is stored: n² numbers, needed for training only."""

_PARENT_CHECK_SECONDS = 0.5


@dataclass(frozen=True)
class DesignCell:
    """The covariance of one rule on one graph, at precision cap 1.

    Attributes:
        graph: the spec of the graph.
        rule: the rule that correlates noise.
        horizon: the length of the objective that it minimises; 1 is the paper's objective.
        judged_over: the length over which its accumulated noise is measured.
        max_colluders: the largest coalition of insiders that it protects against.
        seeds: the groups of agents that share a seed.
        disagreement_weight: the weight of what a cool-down removes.
        momentum: the momentum that its objective counts on.
    """

    graph: str
    rule: str
    horizon: float
    judged_over: float
    max_colluders: int = 0
    seeds: str = "global"
    disagreement_weight: float = 1.0
    momentum: float = 0.0

    @property
    def cost(self) -> float:
        """A rough estimate of its seconds, for the progress bar and the order of work."""
        # Coalitions grow like n^q/q!, which dominates the time of a design against insiders.
        return 0.05 if self.max_colluders == 0 else 4.0 * self.max_colluders**2

    def compute(self) -> CellResult:
        """Design the covariance; measure its noise after one step and accumulated."""
        W = load_network(self.graph, mixing="gossip").mixing_matrix
        made = design(
            W,
            1.0,
            mechanism=find_rule(self.rule),
            objective=Horizon(self.horizon, self.disagreement_weight, self.momentum),
            threat=ThreatModel(self.max_colluders, self.seeds),
        )
        return {
            # Tr(A R) of symmetric matrices is the sum of their entrywise product.
            "one_step": float((ONE_STEP.matrix(W) * made.covariance).sum()),
            # All designs are judged by one objective, whichever they were made for.
            "accumulated": float((Horizon(self.judged_over).matrix(W) * made.covariance).sum()),
            "status": made.status,
            "gap": made.gap,
            "noise": made.decomposition if len(W) <= _LARGEST_STORED_NOISE else None,
        }


def make_design_cell(mechanism: Mechanism, graph: str, num_steps: int) -> DesignCell:
    """Return the cell of a mechanism's covariance for a run of ``num_steps`` steps."""
    objective = mechanism.objective(num_steps)
    return DesignCell(
        graph=graph,
        rule=mechanism.rule,
        horizon=objective.length,
        judged_over=default_objective(num_steps).length,
        max_colluders=mechanism.max_colluders,
        seeds="pairs" if mechanism.max_colluders else "global",
        disagreement_weight=objective.disagreement_weight,
        momentum=objective.momentum,
    )


@dataclass(frozen=True)
class TrainingCell:
    """Mechanisms trained with every seed, on one task, one graph and one ε.

    ``trials`` are the pairs of a mechanism and an initial step size. All of them run together,
    because drawing their common batches and random numbers takes the same time for one as for all.
    """

    task: str
    model: ModelName | None
    unit: Unit
    graph: str
    epsilon: float
    trials: tuple[tuple[Mechanism, float], ...]
    num_steps: int
    schedule: ScheduleName
    seeds: tuple[int, ...]
    delta: float
    clip: float
    batch_size: int
    partition: str
    data_seed: int

    @property
    def cost(self) -> float:
        """A rough estimate of its seconds, for the progress bar and the order of work."""
        seconds = {"quadratic": 1e-5, "mnist": 1e-2}.get(self.task, 1e-4)
        return seconds * len(self.trials) * len(self.seeds) * self.num_steps

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The mechanisms, each once."""
        return tuple(dict.fromkeys(mechanism for mechanism, _ in self.trials))

    @property
    def designs(self) -> dict[str, DesignCell]:
        """The design cell of each mechanism that needs one, by the mechanism's name."""
        return {
            mechanism.name: make_design_cell(mechanism, self.graph, self.num_steps)
            for mechanism in self.mechanisms
            # A trusted server's noise is a formula, and no noise needs no design.
            if mechanism.rule not in ("central", "none")
        }

    def compute(self, designs: Mapping[str, CellResult], directory: Path | None) -> CellResult:
        """Train, and return the last measurement of every run.

        Args:
            designs: the result of each cell in ``designs``, by mechanism.
            directory: the data cache.
        """
        network = load_network(self.graph, mixing="gossip")
        problem = learn.Workload(
            self.task,
            model=self.model,
            partition=self.partition,
            seed=self.data_seed,
            directory=directory,
        ).build(network.num_agents)
        # Momentum, cool-down and sampling belong to a sweep, so mechanisms that differ in them are
        # trained apart. Their random numbers are the same: a seed decides them.
        sweeps = [
            self._train(problem, network, trials, designs)
            for uses_defaults in (False, True)
            if (trials := [t for t in self.trials if t[0].uses_defaults == uses_defaults])
        ]
        # Only the quadratic knows its minimum, from which gaps are measured.
        minimum = getattr(problem.task, "minimum", None)
        return {
            "notes": [] if minimum is None else [problem.simulation],
            "runs": [run for result in sweeps for run in _final_runs(result, minimum)],
            "stopped": [
                f"{', '.join(map(str, run))}: {why}"
                for result in sweeps
                for run, why in result.stopped.items()
            ],
        }

    def _train(
        self,
        problem: learn.TrainingProblem,
        network: Network,
        trials: Sequence[tuple[Mechanism, float]],
        designs: Mapping[str, CellResult],
    ) -> learn.Result:
        sizes = problem.data.sizes
        made = {one: self._make_method(one, designs, sizes) for one, _ in trials}
        first = trials[0][0]
        cooldown = choose_cooldown(network, self.num_steps) if first.uses_defaults else 0
        result = learn.run_sweep(
            problem,
            network,
            [learn.Trial(made[one], make_schedule(eta, self.schedule)) for one, eta in trials],
            settings=learn.SweepSettings(
                self.num_steps,
                self.batch_size,
                self.seeds,
                cooldown_steps=cooldown,
                momentum=first.objective(self.num_steps).momentum,
                # Gaps of the quadratic are differences of nearly equal losses.
                dtype="float64" if self.task == "quadratic" else "float32",
            ),
            # Figures show the last models, so that nothing before them is measured.
            evaluate_at=[self.num_steps],
            show_progress=False,
        )
        # A sweep ends early at Ctrl-C and returns what it has. Half a cell must not be stored.
        if result.status == "interrupted":
            raise KeyboardInterrupt
        return result

    def _make_method(
        self, mechanism: Mechanism, designs: Mapping[str, CellResult], sizes: Sequence[int]
    ) -> learn.Mechanism:
        batch_size = self.batch_size if self.unit == "sample" else None
        budget = mechanism.budget(
            *(self.epsilon, self.delta, self.num_steps, self.clip, self.unit, batch_size),
            # From these follows the one sampling rate of all agents.
            sizes=sizes,
        )
        if mechanism.rule == "none":
            return learn.Mechanism.non_private(*budget.queries, name=mechanism.name)
        if mechanism.rule == "central":
            return learn.Mechanism.central(budget, len(sizes), name=mechanism.name)
        # Variances scale with 1/b, and the noise, which is their root, with 1/√b.
        scale = np.full(len(sizes), 1 / math.sqrt(budget.precision_cap))
        shares = designs[mechanism.name]["noise"].rescale(scale)
        # Scaling rounds, and the check of noise that is nearly singular rounds up by more than
        # ``Mechanism.private`` allows, which checks whatever was stored.
        caps = budget.precision_caps(len(sizes))
        shares = meet_caps(shares, caps, mechanism.threat.max_colluders)
        return learn.Mechanism.private(mechanism.name, shares, budget, threat=mechanism.threat)


def _final_runs(result: learn.Result, minimum: float | None) -> Iterator[dict[str, Any]]:
    """Yield the last measurement of each run that did not break down, without empty columns."""
    for row in result.last_rows:
        if (row["mechanism"], row["step_size"], row["seed"]) in result.stopped:
            continue
        run: dict[str, Any] = {"mechanism": row["mechanism"]}
        for name in ("step_size", "seed", "validation_loss", "test_loss", "test_accuracy"):
            value = row[name]
            if not (isinstance(value, float) and math.isnan(value)):
                run[name] = value
        if minimum is not None:
            run["optimality_gap"] = float(row["train_loss"]) - minimum
        yield run


Cell: TypeAlias = DesignCell | TrainingCell
Results: TypeAlias = Mapping[Cell, CellResult]


def configuration_of(cell: Cell) -> str:
    """Return everything that decides a cell's result, as text."""
    facts = {"format": _FORMAT, "version": __version__, "kind": type(cell).__name__, **asdict(cell)}
    # Another word in a figure changes no result.
    for mechanism, _ in facts.get("trials", ()):
        del mechanism["label"]
    return json.dumps(facts, sort_keys=True)


class CellStore:
    """Results of cells in a directory, kept by ``joblib.Memory`` under their configuration.

    Only this process writes there. Workers, which may be other machines, return their results.
    """

    def __init__(self, directory: Path) -> None:
        self._recall = joblib.Memory(directory, verbose=0).cache(_recall, ignore=["result"])

    def load(self, cell: Cell) -> CellResult | None:
        """Return the result of a cell, or None if it is absent or its file is damaged."""
        try:
            result: CellResult = self._recall(configuration_of(cell), None)
        except LookupError:
            return None
        return result

    def save(self, cell: Cell, result: CellResult) -> None:
        """Store a result; no other process ever reads half of it."""
        self._recall(configuration_of(cell), result)


# joblib discards all results of a function whose source changes, and the cells of the full scale
# take hours. So what it caches is not the computation, but this function, which has no reason to
# change: ``_FORMAT`` and the version of CorN decide whether results are read again.
def _recall(configuration: str, result: CellResult | None) -> CellResult:
    if result is None:
        raise LookupError(configuration)
    return result


def compute_cells(
    cells: Iterable[Cell],
    store: CellStore,
    *,
    jobs: int = -1,
    cluster: str | None = None,
    directory: Path | None = None,
    on_done: Callable[[Cell, bool], None] | None = None,
) -> dict[Cell, CellResult]:
    """Return the results of cells and of the designs that training needs.

    Those that the store lacks are computed, and stored as they are finished.

    Args:
        cells: the cells.
        store: the store of results.
        jobs: the number of processes, of one compute thread each; −1 is one per core.
        cluster: ``dask``, with ``:address`` for a running cluster; None is this machine.
        directory: the data cache.
        on_done: called in this process with each cell, and whether it was computed.
    """
    results: dict[Cell, CellResult] = {}

    def finish(cell: Cell, result: CellResult, *, is_new: bool) -> None:
        results[cell] = result
        if on_done:
            on_done(cell, is_new)

    # Designs first: trainings need their results.
    stages = split_cells(cells)
    with _open_cluster(cluster):
        for stage in stages:
            missing: list[Cell] = []
            for cell in stage:
                if (stored := store.load(cell)) is None:
                    missing.append(cell)
                else:
                    finish(cell, stored, is_new=False)
            # The longest first, so that no core is left with a long one at the end.
            missing.sort(key=lambda cell: -cell.cost)
            tasks = [
                joblib.delayed(_compute)(cell, _pick_designs(cell, results), directory, os.getpid())
                for cell in missing
            ]
            parallel = joblib.Parallel(n_jobs=jobs, batch_size=1, return_as="generator_unordered")
            with _abandoning(parallel(tasks)) as outcomes:
                for cell, result in outcomes:
                    store.save(cell, result)
                    finish(cell, result, is_new=True)
    # In the order of the cells, so that reports do not depend on which worker was faster.
    return {cell: results[cell] for stage in stages for cell in stage}


def split_cells(cells: Iterable[Cell]) -> tuple[list[DesignCell], list[TrainingCell]]:
    """Return designs, including those that training needs, and trainings, each cell once."""
    wanted = list(dict.fromkeys(cells))
    trainings = [cell for cell in wanted if isinstance(cell, TrainingCell)]
    designs = [cell for cell in wanted if isinstance(cell, DesignCell)]
    for training in trainings:
        designs.extend(training.designs.values())
    return list(dict.fromkeys(designs)), trainings


def _pick_designs(cell: Cell, results: Results) -> dict[str, CellResult]:
    """Return the results of the designs that a training cell needs, by mechanism."""
    needed = cell.designs if isinstance(cell, TrainingCell) else {}
    return {name: results[design_cell] for name, design_cell in needed.items()}


def _compute(
    cell: Cell, designs: dict[str, CellResult], directory: Path | None, parent: int
) -> tuple[Cell, CellResult]:
    """Compute one cell in a worker.

    The worker may be another machine: everything that it needs is an argument.
    """
    # As many processes as cores run at once; more threads would compete for them.
    limit_threads()
    _end_with_parent(parent)
    start = time.perf_counter()
    with warnings.catch_warnings():
        # Warnings about sparse graphs and the paper's constant concern what the figures study.
        warnings.simplefilter("ignore", CornWarning)
        if isinstance(cell, DesignCell):
            result = cell.compute()
        else:
            result = cell.compute(designs, directory)
    return cell, {**result, "seconds": time.perf_counter() - start}


@functools.cache
def _end_with_parent(parent: int) -> None:
    """End this process soon after the process ``parent`` has ended, if this is a worker of it.

    A process that is killed cannot stop its workers. They would go on with their cells, which take
    up to a quarter of an hour, for a result that nobody reads.
    """
    # Not the main process itself, nor a worker of a cluster, whose parent is another process. The
    # parent may have ended while this worker was still importing, so its id does not tell.
    if not multiprocessing.current_process().name.startswith("LokyProcess"):
        return

    def watch() -> None:
        # An orphan is adopted by another process, so that its parent's id changes.
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_SECONDS)
        # Not sys.exit, which would end this thread only. There is nothing to clean up: files are
        # written by the parent.
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


@contextmanager
def _abandoning(
    outcomes: Generator[tuple[Cell, CellResult]],
) -> Iterator[Iterator[tuple[Cell, CellResult]]]:
    """Stop the workers at the end of the block, however it ends.

    Without this an exception raised between two outcomes, such as KeyboardInterrupt while one is
    stored, keeps the generator alive in its traceback, and the interpreter waits at its exit until
    the workers have finished their cells.
    """
    try:
        yield outcomes
    finally:
        with warnings.catch_warnings():
            # joblib warns about tasks that were cancelled, which is the purpose here.
            warnings.simplefilter("ignore", UserWarning)
            outcomes.close()


@contextmanager
def _open_cluster(cluster: str | None) -> Iterator[None]:
    """Let joblib send tasks to Dask inside a ``with`` block."""
    if cluster is None:
        yield
        return
    kind, _, address = cluster.partition(":")
    require(kind == "dask", "cluster", "dask, with :ADDRESS for a running cluster", repr(cluster))
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as error:
        raise MissingExtraError("running on dask", extra="dask") from error
    # A running cluster has its own number of threads.
    settings = {} if address else {"threads_per_worker": 1}
    with distributed.Client(address or None, **settings), joblib.parallel_config(backend="dask"):
        yield
