"""Studies: the cells that one panel of a figure needs, and the points and rows made of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final

import numpy as np
from scipy import stats

from corn.covariance import ThreatModel
from corn.experiments.cells import Cell, DesignCell, RepeatCell, Results, TrainingCell
from corn.experiments.methods import MethodSpec
from corn.learn.schedule import make_schedule
from corn.privacy import Unit

Run: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """The layout of a panel.

    Attributes:
        name: the stem of its files, such as ``fig5a-agent``.
        figure: the figure of the paper that it belongs to.
        title: settings and, wherever there is an ε, the unit and the adversary.
        x_label, y_label: labels of the axes, with units.
        log_x, log_y: whether the axis is logarithmic. A linear horizontal axis is drawn
            logarithmically all the same where its places would collide.
        lower_is_better: whether a smaller value is the better one.
        in_paper: whether the paper has this panel.
        is_random: whether values differ between seeds.
        unit: the unit of privacy.
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
    """One method at one place of the horizontal axis: one value per seed.

    Attributes:
        method: the line.
        x: the place.
        values: one per seed, in order of seeds; a single one where nothing is random. Empty if
            every step size broke down, or if the chosen one did at a seed that is not a pilot.
        note: the step size chosen, the seeds that chose it, and where it broke down.
        is_open: whether values are missing although a step size that did not run at all seeds
            might have given some.
        against: the adversary that its ε holds against, in words.
    """

    method: MethodSpec
    x: float
    values: tuple[float, ...]
    note: str = ""
    is_open: bool = False
    against: str = ""

    @property
    def mean(self) -> float:
        """The mean over seeds, or NaN without values."""
        return float(np.mean(self.values)) if self.values else math.nan

    @property
    def half_width(self) -> float:
        """Half of the 95 % confidence interval of the mean (Student's t); 0 for one value."""
        return confidence_half_width(self.values)


class Study(Protocol):
    """A panel, the cells that it needs, and the points that they give."""

    @property
    def panel(self) -> Panel:
        """The layout."""

    def cells(self, results: Results) -> tuple[Cell, ...]:
        """Return the cells known to be needed, given the results so far.

        Results of pilots decide which further cells are needed. Once all cells that this returns
        have results, it returns no others.
        """

    def forecast(self, results: Results) -> tuple[Cell, ...]:
        """Return the same, with cells of about the same cost in place of those not known yet."""

    def points(self, results: Results) -> list[Point]:
        """Return the points of the panel."""

    def runs(self, results: Results) -> list[Run]:
        """Return everything that was measured, one row per run."""


@dataclass(frozen=True)
class NoiseEntry:
    """One method at one place: its design, ε, and the precision cap that ε implies."""

    method: MethodSpec
    x: float
    cell: DesignCell
    epsilon: float
    precision_cap: float

    @property
    def against(self) -> str:
        """The adversary that ε holds against; insiders of the design come before the method's."""
        if self.cell.max_colluders == 0:
            return self.method.against
        return ThreatModel(self.cell.max_colluders, self.cell.seeds).describe()


@final
@dataclass(frozen=True)
class NoiseStudy:
    """The noise energy of designs: Tr(W R Wᵀ) for ``one_step``, Tr(A R) for ``accumulated``."""

    panel: Panel
    column: str
    entries: tuple[NoiseEntry, ...]

    def cells(self, results: Results) -> tuple[Cell, ...]:  # noqa: ARG002
        """See ``Study``."""
        return tuple(entry.cell for entry in self.entries)

    def forecast(self, results: Results) -> tuple[Cell, ...]:
        """See ``Study``."""
        return self.cells(results)

    def points(self, results: Results) -> list[Point]:
        """See ``Study``."""
        return [
            Point(
                method=entry.method,
                x=entry.x,
                values=(self._energy(entry, results),),
                note=results[entry.cell]["status"],
                against=entry.against,
            )
            for entry in self.entries
        ]

    def runs(self, results: Results) -> list[Run]:
        """See ``Study``."""
        return [
            {
                "panel": self.panel.name,
                "method": entry.method.name,
                "x": entry.x,
                "graph": entry.cell.graph,
                "epsilon": entry.epsilon,
                "unit": self.panel.unit,
                "accounting": entry.method.accounting,
                "against": entry.against,
                "value": self._energy(entry, results),
                "gap_of_design": results[entry.cell]["gap"],
                "status": results[entry.cell]["status"],
            }
            for entry in self.entries
        ]

    def _energy(self, entry: NoiseEntry, results: Results) -> float:
        # Cells are designed at cap 1, and energy is linear in the covariance R(b) = R(1) / b.
        return float(results[entry.cell][self.column]) / entry.precision_cap


@dataclass(frozen=True)
class TrainingPlace:
    """The cells of one place of the horizontal axis.

    Attributes:
        x: the place.
        pilots: every method at every step size, one block of seeds each. They choose the step size
            of each method.
        repeats: further blocks of seeds. Each method runs at its chosen step size only, on the same
            random numbers as it would at all of them.
    """

    x: float
    pilots: tuple[TrainingCell, ...]
    repeats: tuple[tuple[int, ...], ...] = ()

    @property
    def methods(self) -> tuple[MethodSpec, ...]:
        """The lines that have this place."""
        return self.pilots[0].methods

    @property
    def pilot_seeds(self) -> tuple[int, ...]:
        """The seeds that choose step sizes, in order."""
        return tuple(seed for cell in self.pilots for seed in cell.seeds)

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds, in order."""
        return (*self.pilot_seeds, *(seed for block in self.repeats for seed in block))

    def cells(self, results: Results) -> tuple[TrainingCell, ...]:
        """Return the cells known to be needed: repeats once every pilot has a result."""
        if not self._has_pilots(results):
            return self.pilots
        # Once all pilots are known the choice is fixed, so that repeated calls agree.
        return (*self.pilots, *self._repeat(self.choose(results)))

    def forecast(self, results: Results) -> tuple[TrainingCell, ...]:
        """Return the same; before the pilots, as if all methods chose the same step size."""
        if self._has_pilots(results):
            return self.cells(results)
        guess = next(iter(self._step_sizes))
        return (*self.pilots, *self._repeat({method.name: guess for method in self.methods}))

    def choose(self, results: Results) -> dict[str, str]:
        """Return the step size of each method that has one, by its name, from the pilots alone."""
        # From pilots alone: seeds that ran at one step size must not take part in the choice.
        runs, count = self._join_runs(self.pilots, results), len(self.pilot_seeds)
        best = {method.name: choose_step_size(runs, method.name, count) for method in self.methods}
        return {name: step_size for name, step_size in best.items() if step_size is not None}

    def runs(self, results: Results) -> list[Run]:
        """Return everything that was measured here, pilots first."""
        return self._join_runs(self.cells(results), results)

    def describe_pilots(self) -> str:
        """Return which seeds chose step sizes, or an empty string if all of them did."""
        if not self.repeats:
            return ""
        count = len(self.pilot_seeds)
        return f"chosen on {count} pilot seed{'s' * (count > 1)} of {len(self.seeds)}"

    def describe_choice(self, chosen: str | None, broken: Sequence[int]) -> str:
        """Return a method's step size, how it was chosen, and at which seeds it broke down."""
        if chosen is None:
            return "every step size broke down" + (" on the pilot seeds" if self.repeats else "")
        sizes = self._step_sizes
        # A best value at the end of the grid suggests that a better one lies beyond it.
        at_edge = len(sizes) > 1 and sizes[chosen] in (min(sizes.values()), max(sizes.values()))
        parts = [f"step size {chosen}", "the end of the grid" if at_edge else ""]
        seeds = " and ".join(map(str, broken))
        parts += [self.describe_pilots(), f"broke down at seed {seeds}" if broken else ""]
        return ", ".join(filter(None, parts))

    @property
    def _step_sizes(self) -> dict[str, float]:
        """Initial step sizes by their names in runs."""
        first = self.pilots[0]
        return {make_schedule(eta, first.schedule).describe(): eta for eta in first.step_sizes}

    def _has_pilots(self, results: Results) -> bool:
        # All of them: a step size chosen on some pilots could change when the others arrive.
        return all(cell in results for cell in self.pilots)

    def _repeat(self, choices: Mapping[str, str]) -> Iterator[RepeatCell]:
        """Yield the cells of the repeats: all methods that have a step size."""
        methods = tuple(own for own in self.methods if own.name in choices)
        chosen = tuple(self._step_sizes[choices[own.name]] for own in methods)
        same = {**vars(self.pilots[0]), "methods": methods, "step_sizes": chosen}
        for seeds in self.repeats:
            if methods:
                yield RepeatCell(**{**same, "seeds": seeds})

    @staticmethod
    def _join_runs(cells: Sequence[TrainingCell], results: Results) -> list[Run]:
        return [run for cell in cells for run in results[cell]["runs"]]


@final
@dataclass(frozen=True)
class TrainingStudy:
    """Scores of trained models, each method at its best step size on validation samples."""

    panel: Panel
    column: str
    places: tuple[TrainingPlace, ...]

    def cells(self, results: Results) -> tuple[Cell, ...]:
        """See ``Study``."""
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
                found = {
                    run["seed"]: run[self.column]
                    for run in runs
                    if (run["method"], run["step_size"]) == (method.name, chosen)
                }
                # A mean over the seeds that survived would flatter a method that breaks down.
                broken = [seed for seed in place.seeds if seed not in found]
                points.append(
                    Point(
                        method=method,
                        x=place.x,
                        values=() if broken else tuple(found[seed] for seed in place.seeds),
                        note=place.describe_choice(chosen, broken),
                        is_open=bool(broken) and chosen is not None,
                        against=method.against,
                    )
                )
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
                    # Rows of all step sizes are written, of which figures show the chosen one.
                    "chosen": run["step_size"] == best.get(run["method"]),
                }
                for run in place.runs(results)
            ]
        return rows


def choose_step_size(runs: Sequence[Run], method: str, num_seeds: int) -> str | None:
    """Return the step size with the least mean validation loss, or None if all broke down.

    A step size that broke down at one seed is not eligible. A task without validation samples has a
    single step size.
    """
    losses: dict[str, list[float]] = {}
    for run in runs:
        if run["method"] == method:
            # A constant loss where there are no validation samples: the single step size is chosen.
            losses.setdefault(run["step_size"], []).append(run.get("validation_loss", 0.0))
    # A run that broke down has no row, so that its step size has fewer rows than seeds.
    whole = {size: float(np.mean(own)) for size, own in losses.items() if len(own) == num_seeds}
    return min(whole, key=whole.__getitem__) if whole else None


def confidence_half_width(values: tuple[float, ...], *, confidence: float = 0.95) -> float:
    """Return half of the confidence interval of a mean (Student's t); 0 below two values.

    >>> round(confidence_half_width((1.0, 2.0, 3.0)), 4)
    2.4841
    """
    count = len(values)
    if count < 2:
        return 0.0
    # The standard error of the mean.
    spread = float(np.std(values, ddof=1)) / math.sqrt(count)
    return float(stats.t.ppf((1 + confidence) / 2, count - 1)) * spread


def _settings_of(method: MethodSpec, cell: TrainingCell) -> Run:
    """Return the columns that make a row readable by itself; no ε where there is no noise."""
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
