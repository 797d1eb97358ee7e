"""Cells, the units of computation of a reproduction, and the store that keeps their results.

A ``DesignCell`` is a covariance for one graph at precision cap 1. The covariance for a budget with
cap b is that divided by b, so one cell serves every ε. A ``TrainingCell`` is a set of methods, step
sizes and seeds of one task on one graph at one ε, trained together on common random numbers. A
``RepeatCell`` trains each method at one step size of its own. The random numbers of a seed are the
same in every cell.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from corn import learn
from corn.covariance import (
    ONE_STEP,
    Decomposition,
    Horizon,
    ThreatModel,
    default_objective,
    design,
)
from corn.experiments.methods import MethodSpec, find_mechanism
from corn.files import writing_whole
from corn.learn.names import ModelName
from corn.learn.schedule import ScheduleName, make_schedule
from corn.plan.plan import meet_caps
from corn.privacy import Unit
from corn.topology import Network, choose_cooldown, load_network
from corn.version import __version__

CellResult: TypeAlias = dict[str, Any]
"""A result made of the types of JSON."""

_FORMAT, _POISSON_FORMAT = 2, 3
"""Raised when the same configuration gives other results, so that stored ones are not read.

The second is that of training with Poisson sampling.
"""

_LARGEST_STORED_NOISE = 100
"""Agents up to which the decomposition is stored: n² numbers, needed for training only."""


@dataclass(frozen=True)
class DesignCell:
    """The covariance of one mechanism on one graph, at precision cap 1.

    Attributes:
        graph: the spec of the graph.
        mechanism: the rule that correlates noise.
        horizon: the length of the objective that it minimises; 1 is the paper's objective.
        judged_over: the length over which its accumulated noise is measured.
        max_colluders: the largest coalition of insiders that it protects against.
        seeds: the groups of agents that share a seed.
        disagreement_weight: the weight of what a cool-down removes.
        momentum: the momentum that its objective counts on.
    """

    graph: str
    mechanism: str
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
            mechanism=find_mechanism(self.mechanism),
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
            "largest_noise_std": float(made.noise_std.max()),
            "noise": _write_noise(made.decomposition) if len(W) <= _LARGEST_STORED_NOISE else None,
        }


@dataclass(frozen=True)
class TrainingCell:
    """Methods trained at every step size with every seed, on one task, one graph and one ε."""

    task: str
    model: ModelName | None
    unit: Unit
    graph: str
    epsilon: float
    methods: tuple[MethodSpec, ...]
    num_steps: int
    step_sizes: tuple[float, ...]
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
        return seconds * self.num_runs * self.num_steps

    @property
    def num_runs(self) -> int:
        """The number of models that each agent trains."""
        return len(self.methods) * len(self.step_sizes) * len(self.seeds)

    @property
    def designs(self) -> dict[str, DesignCell]:
        """The design cell of each method that needs one, by the method's name."""
        return {
            method.name: make_design_cell(method, self.graph, self.num_steps)
            for method in self.methods
            # A trusted server's noise is a formula, and no noise needs no design.
            if method.mechanism not in ("central", "none")
        }

    def compute(self, designs: Mapping[str, CellResult], directory: Path | None) -> CellResult:
        """Train, and return the last measurement of every run.

        Args:
            designs: the result of each cell in ``designs``, by method.
            directory: the data cache.
        """
        network = load_network(self.graph, mixing="gossip")
        problem = learn.make_workload(
            self.task,
            network.num_agents,
            model=self.model,
            partition=self.partition,
            seed=self.data_seed,
            directory=directory,
            # The result is stored under the name of the task, so that no other data may take its
            # place.
            stand_in=False,
        )
        # Momentum, cool-down and sampling belong to a sweep, so lines that differ in them are
        # trained apart. Their random numbers are the same: a seed decides them.
        sweeps = [
            self._train(problem, network, own, designs)
            for uses_defaults in (False, True)
            if (own := [spec for spec in self.methods if spec.uses_defaults == uses_defaults])
        ]
        # Only the quadratic knows its minimum, from which gaps are measured.
        minimum = getattr(problem.task, "minimum", None)
        return {
            "task": problem.task.describe(),
            "notes": list(problem.notes),
            "agent_samples": list(problem.data.sizes),
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
        specs: Sequence[MethodSpec],
        designs: Mapping[str, CellResult],
    ) -> learn.Result:
        methods = [self._make_method(spec, designs, problem.data.sizes) for spec in specs]
        uses_defaults = specs[0].uses_defaults
        result = learn.run_sweep(
            problem,
            network,
            self._make_trials(methods),
            settings=learn.SweepSettings(
                self.num_steps,
                self.batch_size,
                self.seeds,
                cooldown_steps=choose_cooldown(network, self.num_steps) if uses_defaults else 0,
                momentum=specs[0].objective(self.num_steps).momentum,
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

    def _make_trials(self, methods: Sequence[learn.Method]) -> list[learn.Trial]:
        return learn.make_grid(methods, step_sizes=self.step_sizes, schedule=self.schedule)

    def _make_method(
        self, spec: MethodSpec, designs: Mapping[str, CellResult], sizes: Sequence[int]
    ) -> learn.Method:
        batch_size = self.batch_size if self.unit == "sample" else None
        budget = spec.budget(
            *(self.epsilon, self.delta, self.num_steps, self.clip, self.unit, batch_size),
            # From these follows the one sampling rate of all agents.
            sizes=sizes,
        )
        if spec.mechanism == "none":
            return learn.Method.non_private(*budget.queries, name=spec.name)
        if spec.mechanism == "central":
            return learn.Method.central(budget, len(sizes), name=spec.name)
        shares = _read_noise(designs[spec.name]["noise"], budget.precision_cap)
        # Scaling rounds, and the check of noise that is nearly singular rounds up by more than
        # ``Method.private`` allows, which checks whatever was stored.
        caps = budget.precision_caps(len(sizes))
        shares = meet_caps(shares, caps, spec.threat.max_colluders)
        return learn.Method.private(spec.name, shares, budget, threat=spec.threat)


@dataclass(frozen=True)
class RepeatCell(TrainingCell):
    """Methods trained at one step size each: ``step_sizes`` has one for each method.

    All methods run together, because drawing their common batches and random numbers takes the
    same time for one method as for all.
    """

    @property
    def num_runs(self) -> int:
        """See ``TrainingCell``."""
        return len(self.methods) * len(self.seeds)

    def _make_trials(self, methods: Sequence[learn.Method]) -> list[learn.Trial]:
        names = [spec.name for spec in self.methods]
        sizes = dict(zip(names, self.step_sizes, strict=True))
        return [
            learn.Trial(method, make_schedule(sizes[method.name], self.schedule))
            for method in methods
        ]


Cell: TypeAlias = DesignCell | TrainingCell
Results: TypeAlias = Mapping[Cell, CellResult]


def make_design_cell(method: MethodSpec, graph: str, num_steps: int) -> DesignCell:
    """Return the cell of a method's covariance for a run of ``num_steps`` steps."""
    objective = method.objective(num_steps)
    return DesignCell(
        graph=graph,
        mechanism=method.mechanism,
        horizon=objective.length,
        judged_over=default_objective(num_steps).length,
        max_colluders=method.max_colluders,
        seeds="pairs" if method.max_colluders else "global",
        disagreement_weight=objective.disagreement_weight,
        momentum=objective.momentum,
    )


def configuration_of(cell: Cell) -> dict[str, Any]:
    """Return everything that decides a cell's result, in the types of JSON."""
    is_poisson = (
        isinstance(cell, TrainingCell)
        and cell.unit == "sample"
        and any(method.uses_defaults for method in cell.methods)
    )
    number = _POISSON_FORMAT if is_poisson else _FORMAT
    facts = {"format": number, "kind": type(cell).__name__, **asdict(cell)}
    # Another word in a legend changes no result.
    for method in facts.get("methods", ()):
        del method["label"]
    # Through JSON and back, so that tuples equal the lists of a stored configuration.
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    return plain


def key_of(cell: Cell) -> str:
    """Return a file name for a cell, which differs from that of any other configuration."""
    facts = json.dumps(configuration_of(cell), sort_keys=True)
    # 96 bits: no two of even millions of cells share a name.
    return hashlib.sha256(facts.encode()).hexdigest()[:24]


@dataclass(frozen=True)
class CellStore:
    """Results of cells in a directory, one JSON file each.

    A file that is incomplete, of another configuration or of another version counts as absent.
    """

    directory: Path

    def load(self, cell: Cell) -> CellResult | None:
        """Return the result of a cell, or None if it is absent."""
        record = self._read(cell)
        return None if record is None else record["result"]

    def seconds(self, cell: Cell) -> float:
        """Return the time that a cell took to compute, or 0 if it is absent."""
        record = self._read(cell)
        return 0.0 if record is None else float(record["seconds"])

    def save(self, cell: Cell, result: CellResult, *, seconds: float) -> None:
        """Store a result; no other process ever reads half of it."""
        record = {
            "corn_version": __version__,
            "configuration": configuration_of(cell),
            "seconds": round(seconds, 3),
            "result": result,
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        with writing_whole(self._path(cell)) as partial:
            partial.write_text(json.dumps(record), encoding="utf-8")

    def _path(self, cell: Cell) -> Path:
        return self.directory / f"{key_of(cell)}.json"

    def _read(self, cell: Cell) -> dict[str, Any] | None:
        try:
            record = json.loads(self._path(cell).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        # The configuration is compared too: a file may have been renamed or edited by hand.
        is_valid = (
            isinstance(record, dict)
            and record.get("corn_version") == __version__
            and record.get("configuration") == configuration_of(cell)
            and isinstance(record.get("result"), dict)
            and isinstance(record.get("seconds"), float | int)
        )
        return record if is_valid else None


def _write_noise(noise: Decomposition) -> dict[str, Any]:
    return {
        "private_variance": noise.private_variance.tolist(),
        "seed_groups": [list(group) for group in noise.seed_groups],
        "factors": [factor.tolist() for factor in noise.factors],
    }


def _read_noise(noise: Mapping[str, Any], precision_cap: float) -> Decomposition:
    """Scale the stored noise, designed at cap 1, to another cap: R(b) = R(1) / b."""
    return Decomposition(
        np.array(noise["private_variance"]) / precision_cap,
        tuple(tuple(group) for group in noise["seed_groups"]),
        # Variances scale with 1/b, and factors, which are their roots, with 1/√b.
        tuple(np.array(factor) / math.sqrt(precision_cap) for factor in noise["factors"]),
    )


def _final_runs(result: learn.Result, minimum: float | None) -> list[dict[str, Any]]:
    """Return the last measurement of each run that did not break down, without empty columns."""
    runs = []
    for row in result.last_rows:
        if (row["contender"], row["step_size"], row["seed"]) in result.stopped:
            continue
        run: dict[str, Any] = {"method": row["contender"]}
        for name in ("step_size", "seed", "validation_loss", "test_loss", "test_accuracy"):
            value = row[name]
            if not (isinstance(value, float) and math.isnan(value)):
                run[name] = value
        if minimum is not None:
            run["optimality_gap"] = float(row["train_loss"]) - minimum
        runs.append(run)
    return runs
