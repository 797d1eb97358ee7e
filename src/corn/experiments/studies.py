"""Studies: what one panel of a figure needs computed, and what it shows of the results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final

import numpy as np
from scipy import stats

from corn.experiments.cells import Cell, CellResult, DesignCell, TrainingCell
from corn.experiments.methods import Method
from corn.privacy import Unit

Results: TypeAlias = Mapping[Cell, CellResult]
Run: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """How a panel looks.

    Attributes:
        name: of its files, such as ``fig5a-agent``.
        figure: the figure of the paper it belongs to.
        title: settings and, wherever there is an ε, the unit and the adversary.
        x_label, y_label: of the axes, with units.
        log_x, log_y: whether the range needs a logarithmic scale.
        lower_is_better: which way is good.
        in_paper: whether the paper has this panel at all.
        is_random: whether values differ between seeds.
        unit: whose data is protected.
    """

    name: str
    figure: str
    title: str
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    lower_is_better: bool = True
    in_paper: bool = True
    is_random: bool = False
    unit: Unit = "agent"


@dataclass(frozen=True)
class Point:
    """One method at one place of the horizontal axis: a value for each seed.

    Attributes:
        method: which line.
        x: where.
        values: one for each seed, in their order; a single one where nothing is random; none
            where every step size broke down.
        note: such as the step size chosen.
    """

    method: Method
    x: float
    values: tuple[float, ...]
    note: str = ""

    @property
    def mean(self) -> float:
        """The mean over seeds; NaN if there is none."""
        return float(np.mean(self.values)) if self.values else math.nan

    @property
    def half_width(self) -> float:
        """Half of the 95 % confidence interval of the mean (Student's t); 0 for one value."""
        return confidence_half_width(self.values)


class Study(Protocol):
    """A panel, its cells, and how they become points."""

    @property
    def panel(self) -> Panel:
        """How it looks."""

    @property
    def cells(self) -> tuple[Cell, ...]:
        """What must be computed."""

    def points(self, results: Results) -> list[Point]:
        """What is drawn."""

    def runs(self, results: Results) -> list[Run]:
        """Everything that was measured, one row each."""


@dataclass(frozen=True)
class NoiseSpot:
    """A method at one place: its covariance, ε, and the cap that it sets."""

    method: Method
    x: float
    cell: DesignCell
    epsilon: float
    precision_cap: float


@final
@dataclass(frozen=True)
class NoiseStudy:
    """Noise energy of designs: Tr(W R Wᵀ) for ``one_step``, Tr(A_h R) for ``accumulated``."""

    panel: Panel
    column: str
    spots: tuple[NoiseSpot, ...]

    @property
    def cells(self) -> tuple[Cell, ...]:
        """See ``Study``."""
        return tuple(spot.cell for spot in self.spots)

    def points(self, results: Results) -> list[Point]:
        """See ``Study``."""
        return [
            Point(
                spot.method,
                spot.x,
                (results[spot.cell][self.column] / spot.precision_cap,),
                results[spot.cell]["status"],
            )
            for spot in self.spots
        ]

    def runs(self, results: Results) -> list[Run]:
        """See ``Study``."""
        return [
            {
                "panel": self.panel.name,
                "method": spot.method.name,
                "x": spot.x,
                "graph": spot.cell.graph,
                "epsilon": spot.epsilon,
                "unit": self.panel.unit,
                "accounting": spot.method.accounting,
                "against": spot.method.against,
                "value": results[spot.cell][self.column] / spot.precision_cap,
                "gap_of_design": results[spot.cell]["gap"],
                "status": results[spot.cell]["status"],
            }
            for spot in self.spots
        ]


@final
@dataclass(frozen=True)
class TrainingStudy:
    """What models reach, each method at the step size that is best on validation samples.

    ``places`` has the cells of each place, a block of seeds each.
    """

    panel: Panel
    column: str
    places: tuple[tuple[float, tuple[TrainingCell, ...]], ...]

    @property
    def cells(self) -> tuple[Cell, ...]:
        """See ``Study``."""
        return tuple(cell for _, cells in self.places for cell in cells)

    def points(self, results: Results) -> list[Point]:
        """See ``Study``; a method whose every step size broke down has a point without values."""
        points = []
        for x, cells in self.places:
            runs = _join_runs(cells, results)
            for method in cells[0].methods:
                chosen = choose_step_size(runs, method.name, _count_seeds(cells))
                values = self._values(runs, method.name, chosen)
                points.append(Point(method, x, values, _describe_choice(chosen, cells[0])))
        return points

    def runs(self, results: Results) -> list[Run]:
        """See ``Study``."""
        rows = []
        for x, cells in self.places:
            runs, first = _join_runs(cells, results), cells[0]
            best = {
                method.name: choose_step_size(runs, method.name, _count_seeds(cells))
                for method in first.methods
            }
            settings = {method.name: _settings_of(method, first) for method in first.methods}
            rows += [
                {
                    "panel": self.panel.name,
                    "x": x,
                    **settings[run["method"]],
                    **run,
                    "value": run[self.column],
                    "chosen": run["step_size"] == best[run["method"]],
                }
                for run in runs
            ]
        return rows

    def _values(self, runs: list[Run], method: str, step_size: str | None) -> tuple[float, ...]:
        chosen = [run for run in runs if (run["method"], run["step_size"]) == (method, step_size)]
        return tuple(run[self.column] for run in sorted(chosen, key=lambda run: run["seed"]))


def _join_runs(cells: Sequence[TrainingCell], results: Results) -> list[Run]:
    return [run for cell in cells for run in results[cell]["runs"]]


def _count_seeds(cells: Sequence[TrainingCell]) -> int:
    return sum(len(cell.seeds) for cell in cells)


def _describe_choice(chosen: str | None, cell: TrainingCell) -> str:
    if chosen is None:
        return "every step size broke down"
    sizes = sorted(cell.step_sizes)
    at_edge = len(sizes) > 1 and chosen in (f"{sizes[0]:g}", f"{sizes[-1]:g}")
    return f"step size {chosen}" + (", the end of the grid" if at_edge else "")


def _settings_of(method: Method, cell: TrainingCell) -> Run:
    """What a row needs to be understood by itself."""
    return {
        "task": cell.task,
        "graph": cell.graph,
        "epsilon": cell.epsilon if method.is_private else "",
        "delta": cell.delta if method.is_private else "",
        "unit": cell.unit if method.is_private else "",
        "accounting": method.accounting if method.is_private else "",
        "against": method.against,
        "num_steps": cell.num_steps,
    }


def choose_step_size(runs: list[Run], method: str, num_seeds: int) -> str | None:
    """The step size with the least mean validation loss; one that broke down once is out.

    Where there is nothing to validate on, there is only one to choose from.
    """
    losses: dict[str, list[float]] = {}
    for run in runs:
        if run["method"] == method:
            losses.setdefault(run["step_size"], []).append(run.get("validation_loss", 0.0))
    whole = {size: float(np.mean(own)) for size, own in losses.items() if len(own) == num_seeds}
    return min(whole, key=whole.__getitem__) if whole else None


def confidence_half_width(values: tuple[float, ...], *, confidence: float = 0.95) -> float:
    """Half of the confidence interval of a mean (Student's t); 0 for fewer than two values.

    >>> round(confidence_half_width((1.0, 2.0, 3.0)), 4)
    2.4841
    """
    count = len(values)
    if count < 2:
        return 0.0
    spread = float(np.std(values, ddof=1)) / math.sqrt(count)
    return float(stats.t.ppf((1 + confidence) / 2, count - 1)) * spread
