"""Cells: the smallest pieces of the matrix that are computed, and kept by their configuration.

A ``DesignCell`` is a covariance for one graph at precision cap 1; every budget's covariance is that
divided by its cap, so that one cell serves all ε. A ``TrainingCell`` is methods, step sizes and
seeds of one task on one graph at one ε, run together on common random numbers: those of a seed are
the same in every cell.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from corn import learn
from corn.covariance import Decomposition, Horizon, MechanismName, ThreatModel, design
from corn.experiments.methods import MethodSpec
from corn.learn.names import ModelName
from corn.learn.schedule import ScheduleName
from corn.privacy import Unit
from corn.topology import load_network

CellResult: TypeAlias = dict[str, Any]
"""Plain values, as JSON has them."""

_FORMAT = 2
"""Raised when the same configuration would give another result, so that old ones are not read."""

_LARGEST_KEPT_NOISE = 100
"""Who draws what is kept up to so many agents; beyond, only what figures show of it."""


@dataclass(frozen=True)
class DesignCell:
    """The covariance of one mechanism on one graph, at precision cap 1.

    Attributes:
        graph: a spec.
        mechanism: how noise is correlated.
        horizon: what it is designed for; 1 is the paper's objective.
        judged_over: the horizon over which its accumulated noise is counted.
        max_colluders: insiders it is designed against.
        seeds: who shares a seed.
    """

    graph: str
    mechanism: MechanismName
    horizon: float
    judged_over: float
    max_colluders: int = 0
    seeds: str = "global"

    @property
    def cost(self) -> float:
        """Roughly how many seconds it takes, to share out the progress bar."""
        return 0.05 if self.max_colluders == 0 else 4.0 * self.max_colluders**2

    def compute(self) -> CellResult:
        """Design, and judge by one step and by what accumulates."""
        W = load_network(self.graph).mixing_matrix
        made = design(
            W,
            1.0,
            mechanism=self.mechanism,
            objective=Horizon(self.horizon),
            threat=ThreatModel(self.max_colluders, self.seeds),
        )
        return {
            "one_step": float((Horizon(1.0).matrix(W) * made.covariance).sum()),
            "accumulated": float((Horizon(self.judged_over).matrix(W) * made.covariance).sum()),
            "status": made.status,
            "gap": made.gap,
            "largest_noise_std": float(made.noise_std.max()),
            "noise": _write_noise(made.decomposition) if len(W) <= _LARGEST_KEPT_NOISE else None,
        }


@dataclass(frozen=True)
class TrainingCell:
    """Methods, each at every step size with every seed, of one task on one graph at one ε."""

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
        """Roughly how many seconds it takes, to share out the progress bar."""
        seconds = {"quadratic": 1e-5, "mnist": 1e-2}.get(self.task, 1e-4)
        runs = len(self.methods) * len(self.step_sizes) * len(self.seeds)
        return seconds * runs * self.num_steps

    @property
    def designs(self) -> dict[str, DesignCell]:
        """The covariance that each method needs, by its name."""
        return {
            method.name: design_cell(method, self.graph, self.num_steps)
            for method in self.methods
            if method.mechanism not in ("central", "none")
        }

    def compute(self, designs: Mapping[str, CellResult], directory: Path | None) -> CellResult:
        """Train, and keep the last measurement of every run.

        Args:
            designs: the result of each cell in ``designs``, by method.
            directory: the data cache.
        """
        network = load_network(self.graph)
        problem = learn.make_workload(
            self.task,
            network.num_agents,
            model=self.model,
            partition=self.partition,
            seed=self.data_seed,
            directory=directory,
            stand_in=False,
        )
        methods = [
            self._make_method(method, designs, network.num_agents) for method in self.methods
        ]
        result = learn.run_sweep(
            problem,
            network,
            learn.make_grid(methods, step_sizes=self.step_sizes, schedule=self.schedule),
            settings=learn.SweepSettings(
                self.num_steps,
                self.batch_size,
                self.seeds,
                dtype="float64" if self.task == "quadratic" else "float32",
            ),
            evaluate_at=[self.num_steps],
            show_progress=False,
        )
        if result.status == "interrupted":
            raise KeyboardInterrupt
        minimum = getattr(problem.task, "minimum", math.nan)
        return {
            "task": problem.task.describe(),
            "notes": list(problem.notes),
            "agent_samples": list(problem.data.sizes),
            "runs": [_final_row(row, minimum) for row in _last_rows(result)],
            "stopped": [f"{', '.join(map(str, r))}: {why}" for r, why in result.stopped.items()],
        }

    def _make_method(
        self, method: MethodSpec, designs: Mapping[str, CellResult], num_agents: int
    ) -> learn.Method:
        batch_size = self.batch_size if self.unit == "sample" else None
        budget = method.budget(
            self.epsilon, self.delta, self.num_steps, self.clip, self.unit, batch_size
        )
        if method.mechanism == "none":
            return learn.Method.non_private(budget.query, name=method.name)
        if method.mechanism == "central":
            return learn.Method.central(budget, num_agents, name=method.name)
        shares = _read_noise(designs[method.name]["noise"], budget.precision_cap)
        return learn.Method.private(method.name, shares, budget, threat=method.threat)


Cell: TypeAlias = DesignCell | TrainingCell
Results: TypeAlias = Mapping[Cell, CellResult]


def design_cell(method: MethodSpec, graph: str, num_steps: int) -> DesignCell:
    """The cell of a method's covariance in a run of so many steps."""
    return DesignCell(
        graph,
        method.mechanism,
        method.objective(num_steps).length,
        max(1.0, num_steps / 5),
        method.max_colluders,
        "pairs" if method.max_colluders else "global",
    )


def configuration_of(cell: Cell) -> dict[str, Any]:
    """All that decides a cell's result, as JSON has it; what legends call a method does not."""
    facts = {"format": _FORMAT, "kind": type(cell).__name__, **asdict(cell)}
    for method in facts.get("methods", ()):
        del method["label"]
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    return plain


def key_of(cell: Cell) -> str:
    """A name for a cell that no other configuration has."""
    facts = json.dumps(configuration_of(cell), sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:24]


def _write_noise(noise: Decomposition) -> dict[str, Any]:
    return {
        "private_variance": noise.private_variance.tolist(),
        "seed_groups": [list(group) for group in noise.seed_groups],
        "factors": [factor.tolist() for factor in noise.factors],
    }


def _read_noise(noise: Mapping[str, Any], precision_cap: float) -> Decomposition:
    """The noise of a design at cap 1, for another cap."""
    return Decomposition(
        np.array(noise["private_variance"]) / precision_cap,
        tuple(tuple(group) for group in noise["seed_groups"]),
        tuple(np.array(factor) / math.sqrt(precision_cap) for factor in noise["factors"]),
    )


def _last_rows(result: learn.Result) -> list[learn.Row]:
    """The last row of each run that did not break down."""
    return [
        row
        for row in result.last_rows
        if (row["contender"], row["step_size"], row["seed"]) not in result.stopped
    ]


def _final_row(row: learn.Row, minimum: float) -> dict[str, Any]:
    kept = {
        name: row[name]
        for name in ("step_size", "seed", "validation_loss", "test_loss", "test_accuracy")
        if not (isinstance(row[name], float) and math.isnan(float(row[name])))
    }
    final: dict[str, Any] = {"method": row["contender"], **kept}
    if not math.isnan(minimum):
        final["optimality_gap"] = float(row["train_loss"]) - minimum
    return final
