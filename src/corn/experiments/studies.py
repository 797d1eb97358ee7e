"""Studies: what one panel of a figure needs computed, and what it shows of the results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
from scipy import stats

from corn.experiments.cells import Cell, DesignCell, Results, TrainingCell
from corn.experiments.methods import MethodSpec
from corn.experiments.places import Place, Run
from corn.privacy import Unit


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
            where every step size broke down, or the one chosen did at a further seed.
        note: such as the step size chosen, on which seeds, and where it broke down.
        is_open: without values, but another step size, which did not run, might have had some.
    """

    method: MethodSpec
    x: float
    values: tuple[float, ...]
    note: str = ""
    is_open: bool = False

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

    def cells(self, results: Results) -> tuple[Cell, ...]:
        """What must be computed, as far as these results tell; those of all tell no more."""

    def forecast(self, results: Results) -> tuple[Cell, ...]:
        """The same, with cells of about the same cost in place of those not known yet."""

    def points(self, results: Results) -> list[Point]:
        """What is drawn."""

    def runs(self, results: Results) -> list[Run]:
        """Everything that was measured, one row each."""


@dataclass(frozen=True)
class NoiseSpot:
    """A method at one place: its covariance, ε, and the cap that it sets."""

    method: MethodSpec
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

    def cells(self, results: Results) -> tuple[Cell, ...]:  # noqa: ARG002
        """See ``Study``."""
        return tuple(spot.cell for spot in self.spots)

    def forecast(self, results: Results) -> tuple[Cell, ...]:
        """See ``Study``."""
        return self.cells(results)

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
    """What models reach, each method at the step size that is best on validation samples."""

    panel: Panel
    column: str
    places: tuple[Place, ...]

    def cells(self, results: Results) -> tuple[Cell, ...]:
        """See ``Study``; the pilots' results tell what further seeds run."""
        return tuple(cell for place in self.places for cell in place.cells(results))

    def forecast(self, results: Results) -> tuple[Cell, ...]:
        """See ``Study``."""
        return tuple(cell for place in self.places for cell in place.forecast(results))

    def points(self, results: Results) -> list[Point]:
        """See ``Study``; a method that broke down has a point without values."""
        points = []
        for place in self.places:
            runs, choices = place.runs(results), place.choose(results)
            for method in place.methods:
                chosen = choices.get(method.name)
                found = self._find_values(runs, method.name, chosen)
                broken = [seed for seed in place.seeds if seed not in found]
                values = () if broken else tuple(found[seed] for seed in place.seeds)
                note = place.describe_choice(chosen, broken)
                is_open = bool(broken) and chosen is not None
                points.append(Point(method, place.x, values, note, is_open))
        return points

    def runs(self, results: Results) -> list[Run]:
        """See ``Study``."""
        rows = []
        for place in self.places:
            best, first = place.choose(results), place.pilots[0]
            settings = {method.name: _settings_of(method, first) for method in place.methods}
            rows += [
                {
                    "panel": self.panel.name,
                    "x": place.x,
                    **settings[run["method"]],
                    **run,
                    "value": run[self.column],
                    "chosen": run["step_size"] == best.get(run["method"]),
                }
                for run in place.runs(results)
            ]
        return rows

    def _find_values(
        self, runs: Sequence[Run], method: str, step_size: str | None
    ) -> dict[int, float]:
        """What a method reached at a step size, by seed."""
        return {
            run["seed"]: run[self.column]
            for run in runs
            if (run["method"], run["step_size"]) == (method, step_size)
        }


def _settings_of(method: MethodSpec, cell: TrainingCell) -> Run:
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
