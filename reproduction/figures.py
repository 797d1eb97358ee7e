"""The figures of the paper as studies: the cells of each panel, and its points and rows.

Figures 1 and 2 show the noise of designs, Figures 3 to 5 what trained models reach. Panels that the
paper does not have show the noise accumulated over a fifth of the run, and the price of insiders.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from scipy import stats

from corn.checks import require
from corn.covariance import ThreatModel, default_objective
from corn.errors import InvalidArgumentError
from corn.learn.schedule import make_schedule
from corn.privacy import Unit
from corn.privacy.rounding import write_exactly
from reproduction.cells import Cell, DesignCell, Results, TrainingCell, make_design_cell
from reproduction.mechanisms import (
    CORN,
    CORN_ONE_STEP,
    CORN_PAPER,
    LDP,
    LDP_PAPER,
    LINK_SEEDS,
    PAIR_SEEDS,
    Mechanism,
)
from reproduction.scale import Scale, Training

Run: TypeAlias = dict[str, Any]

FIGURES = {
    "fig1a": "Noise against the privacy budget",
    "fig1b": "Noise against connectivity",
    "fig1c": "Noise against the number of agents",
    "fig2": "Noise against the number of seed groups, and of insiders",
    "fig3a": "Quadratic optimisation against the privacy budget",
    "fig3b": "Quadratic optimisation against connectivity",
    "fig4a": "Logistic regression against the privacy budget",
    "fig4b": "Logistic regression against connectivity",
    "fig5a": "Image classification against the privacy budget",
    "fig5b": "Image classification against connectivity",
}
"""Every figure with its title."""

# Wherever an ε is printed, its unit, the clipping and the adversary stand next to it.
_UNITS = {
    "agent": "unit: agent (the mini-batch gradient is clipped once)",
    "sample": "unit: sample (each sample's gradient is clipped)",
}
_ADVERSARY = "adversary: eavesdropper, or as named"


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
    """One mechanism at one place of the horizontal axis: one value per seed.

    Attributes:
        mechanism: the line.
        x: the place.
        values: one per seed, in order of seeds; a single one where nothing is random. Empty if
            every step size broke down, or if the chosen one did at a seed that is not a pilot.
        note: the step size chosen, the seeds that chose it, and where it broke down.
        is_open: whether values are missing although a step size that did not run at all seeds
            might have given some.
        against: the adversary that its ε holds against, in words.
    """

    mechanism: Mechanism
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


def confidence_half_width(values: tuple[float, ...], *, confidence: float = 0.95) -> float:
    """Return half of the confidence interval of a mean (Student's t); 0 below two values.

    >>> round(confidence_half_width((1.0, 2.0, 3.0)), 4)
    2.4841
    """
    count = len(values)
    if count < 2:
        return 0.0
    standard_error = float(np.std(values, ddof=1)) / math.sqrt(count)
    return float(stats.t.ppf((1 + confidence) / 2, count - 1)) * standard_error


@dataclass(frozen=True)
class NoiseEntry:
    """One mechanism at one place: its design, ε, and the precision cap that ε implies."""

    mechanism: Mechanism
    x: float
    cell: DesignCell
    epsilon: float
    precision_cap: float

    @property
    def against(self) -> str:
        """The adversary that ε holds against; insiders of the design come first."""
        if self.cell.max_colluders == 0:
            return self.mechanism.against
        return ThreatModel(self.cell.max_colluders, self.cell.seeds).describe()


@dataclass(frozen=True)
class NoiseStudy:
    """The noise energy of designs: Tr(W R Wᵀ) for ``one_step``, Tr(A R) for ``accumulated``."""

    panel: Panel
    column: str
    entries: tuple[NoiseEntry, ...]

    def cells(self, results: Results) -> tuple[Cell, ...]:  # noqa: ARG002
        """Return the cells of the designs."""
        return tuple(entry.cell for entry in self.entries)

    def points(self, results: Results) -> list[Point]:
        """Return the points of the panel."""
        return [
            Point(
                mechanism=entry.mechanism,
                x=entry.x,
                values=(self._energy(entry, results),),
                note=results[entry.cell]["status"],
                against=entry.against,
            )
            for entry in self.entries
        ]

    def runs(self, results: Results) -> list[Run]:
        """Return one row per design."""
        return [
            {
                "panel": self.panel.name,
                "mechanism": entry.mechanism.name,
                "x": entry.x,
                "graph": entry.cell.graph,
                "epsilon": entry.epsilon,
                "unit": self.panel.unit,
                "accounting": entry.mechanism.accounting,
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
        pilots: every mechanism at every step size, one block of seeds each. They choose the step
            size of each mechanism.
        repeats: further blocks of seeds. Each mechanism runs at its chosen step size only, on the
            same random numbers as it would at all of them.
    """

    x: float
    pilots: tuple[TrainingCell, ...]
    repeats: tuple[tuple[int, ...], ...] = ()

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The mechanisms that have this place."""
        return self.pilots[0].mechanisms

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
        # All of them: a step size chosen on some pilots could change when the others arrive.
        if not all(cell in results for cell in self.pilots):
            return self.pilots
        # Once all pilots are known the choice is fixed, so that repeated calls agree.
        return (*self.pilots, *self._repeat(self.choose(results)))

    def choose(self, results: Results) -> dict[str, str]:
        """Return the step size of each mechanism that has one, by name, from the pilots alone."""
        # From pilots alone: seeds that ran at one step size must not take part in the choice.
        runs, count = _join_runs(self.pilots, results), len(self.pilot_seeds)
        best = {one.name: choose_step_size(runs, one.name, count) for one in self.mechanisms}
        return {name: step_size for name, step_size in best.items() if step_size is not None}

    def runs(self, results: Results) -> list[Run]:
        """Return everything that was measured here, pilots first."""
        return _join_runs(self.cells(results), results)

    def describe_pilots(self) -> str:
        """Return which seeds chose step sizes, or an empty string if all of them did."""
        if not self.repeats:
            return ""
        count = len(self.pilot_seeds)
        return f"chosen on {count} pilot seed{'s' * (count > 1)} of {len(self.seeds)}"

    def describe_choice(self, chosen: str | None, broken: Sequence[int]) -> str:
        """Return a step size, how it was chosen, and at which seeds it broke down."""
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
        return {make_schedule(eta, first.schedule).describe(): eta for _, eta in first.trials}

    def _repeat(self, choices: Mapping[str, str]) -> Iterator[TrainingCell]:
        """Yield the cells of the repeats: all mechanisms that have a step size."""
        sizes = self._step_sizes
        trials = tuple(
            (one, sizes[choices[one.name]]) for one in self.mechanisms if one.name in choices
        )
        for seeds in self.repeats if trials else ():
            yield replace(self.pilots[0], trials=trials, seeds=seeds)


def choose_step_size(runs: Sequence[Run], mechanism: str, num_seeds: int) -> str | None:
    """Return the step size with the least mean validation loss, or None if all broke down.

    A step size that broke down at one seed is not eligible. A task without validation samples has a
    single step size.
    """
    losses: dict[str, list[float]] = {}
    for run in runs:
        if run["mechanism"] == mechanism:
            # A constant loss where there are no validation samples: the single step size is chosen.
            losses.setdefault(run["step_size"], []).append(run.get("validation_loss", 0.0))
    # A run that broke down has no row, so that its step size has fewer rows than seeds.
    whole = {size: float(np.mean(each)) for size, each in losses.items() if len(each) == num_seeds}
    return min(whole, key=whole.__getitem__) if whole else None


def _join_runs(cells: Sequence[TrainingCell], results: Results) -> list[Run]:
    return [run for cell in cells for run in results[cell]["runs"]]


@dataclass(frozen=True)
class TrainingStudy:
    """Scores of trained models, each mechanism at its best step size on validation samples."""

    panel: Panel
    column: str
    places: tuple[TrainingPlace, ...]

    def cells(self, results: Results) -> tuple[Cell, ...]:
        """Return the cells known to be needed, given the results so far.

        Results of pilots decide which further cells are needed. Once all cells that this returns
        have results, it returns no others.
        """
        return tuple(cell for place in self.places for cell in place.cells(results))

    def points(self, results: Results) -> list[Point]:
        """Return the points of the panel; without values where a mechanism broke down."""
        points = []
        for place in self.places:
            runs, choices = place.runs(results), place.choose(results)
            for mechanism in place.mechanisms:
                chosen = choices.get(mechanism.name)
                found = {
                    run["seed"]: run[self.column]
                    for run in runs
                    if (run["mechanism"], run["step_size"]) == (mechanism.name, chosen)
                }
                # A mean over the seeds that survived would flatter a mechanism that breaks down.
                broken = [seed for seed in place.seeds if seed not in found]
                points.append(
                    Point(
                        mechanism=mechanism,
                        x=place.x,
                        values=() if broken else tuple(found[seed] for seed in place.seeds),
                        note=place.describe_choice(chosen, broken),
                        is_open=bool(broken) and chosen is not None,
                        against=mechanism.against,
                    )
                )
        return points

    def runs(self, results: Results) -> list[Run]:
        """Return everything that was measured, one row per run."""
        rows = []
        for place in self.places:
            best, first = place.choose(results), place.pilots[0]
            settings = {one.name: _settings_of(one, first) for one in place.mechanisms}
            rows += [
                {
                    "panel": self.panel.name,
                    "x": place.x,
                    **settings[run["mechanism"]],
                    **run,
                    "value": run[self.column],
                    # Rows of all step sizes are written, of which figures show the chosen one.
                    "chosen": run["step_size"] == best.get(run["mechanism"]),
                }
                for run in place.runs(results)
            ]
        return rows


Study: TypeAlias = NoiseStudy | TrainingStudy


def _settings_of(mechanism: Mechanism, cell: TrainingCell) -> Run:
    """Return the columns that make a row readable by itself; no ε where there is no noise."""
    return {
        "task": cell.task,
        "graph": cell.graph,
        "epsilon": cell.epsilon if mechanism.is_private else "",
        "delta": cell.delta if mechanism.is_private else "",
        "unit": cell.unit if mechanism.is_private else "",
        "accounting": mechanism.accounting if mechanism.is_private else "",
        "against": mechanism.against,
        "num_steps": cell.num_steps,
    }


def _make_figure(name: str, scale: Scale) -> Sequence[Study]:
    """Return the panels of one figure."""
    if name == "fig2":
        return _figure2(scale)
    if name.startswith("fig1"):
        return _figure1(scale, panel=name[-1])
    if name.startswith("fig3"):
        return [_train(scale, scale.quadratic, name, "optimality_gap")]
    if name.startswith("fig4"):
        return [_train(scale, scale.regression, name, "test_loss")]
    both = (scale.network, scale.softmax)
    return [_train(scale, training, name, "test_accuracy") for training in both]


def _figure1(scale: Scale, *, panel: str) -> list[NoiseStudy]:
    """Return noise against ε (panel a), the connectivity p (b) or the number of agents (c)."""
    eps, size = f"ε = {write_exactly(scale.epsilon)}", f"n = {scale.num_agents}"
    if panel == "a":
        graph = scale.graph(scale.connectivity)
        places = [(epsilon, graph, epsilon) for epsilon in scale.epsilons]
        settings, x_label = f"{size}, {scale.place}", "privacy budget ε of each agent"
    elif panel == "b":
        places = [(p, scale.graph(p), scale.epsilon) for p in scale.connectivities]
        settings, x_label = f"{size}, {eps}", "connectivity p"
    else:
        # The connectivity stays, so that mean degrees grow with n.
        places = [
            (float(n), scale.graph(scale.connectivity, n), scale.epsilon) for n in scale.sizes
        ]
        one, two = scale.insider_sizes
        settings = f"{scale.place}, {eps} (1 insider: up to n = {one}, 2 insiders: up to n = {two})"
        x_label = "number of agents n"
    # The line without noise would lie at zero, which a logarithmic axis does not have. Designs that
    # count on a cool-down are judged after it, in the figures of training.
    lines = [
        line
        for line in scale.lines("agent")
        if line.is_private and (line.rule == "central" or not line.uses_defaults)
    ]
    # There are about n^q / q! coalitions of q insiders, and each is a constraint.
    largest = (math.inf, *scale.insider_sizes)
    entries = tuple(
        _entry(scale, line, x, graph=graph, epsilon=epsilon)
        for x, graph, epsilon in places
        for line in lines
        if panel != "c" or x <= largest[line.max_colluders]
    )
    return _one_step_and_accumulated(
        scale, f"fig1{panel}", settings, x_label, entries, log_x=panel == "c"
    )


def _figure2(scale: Scale) -> list[NoiseStudy]:
    """Return noise against the number of disjoint seed groups, and against the insiders."""
    entry = partial(_entry, scale, graph=scale.graph(scale.connectivity), epsilon=scale.epsilon)
    # LDP shares no seed: the same design at every m and q, for comparison.
    groups = tuple(
        entry(line, float(m), seeds=f"groups:{m}" if line.rule == "corn" else None)
        for m in range(1, scale.num_agents + 1)
        for line in scale.mechanisms
        # Covariances of the user's have “=” in their rule.
        if line in (LDP_PAPER, CORN_PAPER, LDP, CORN_ONE_STEP, CORN) or "=" in line.rule
    )
    insiders = tuple(
        entry(line, float(q), seeds=seeds, max_colluders=q if seeds else 0)
        for q in range(3)
        for line, seeds in ((LDP, None), (LINK_SEEDS, "edges"), (PAIR_SEEDS, "pairs"))
    )
    settings = f"n = {scale.num_agents}, {scale.place}, ε = {write_exactly(scale.epsilon)}"
    one_step, accumulated = _one_step_and_accumulated(
        scale, "fig2", settings, "number of disjoint seed groups m", groups
    )
    # Insiders are judged by accumulated noise alone, for which these lines are designed.
    colluding = replace(
        accumulated.panel,
        name="fig2-insiders",
        title=accumulated.panel.title.replace(_ADVERSARY, "adversary: eavesdropper and q insiders"),
        x_label="colluding insiders q",
    )
    return [one_step, accumulated, NoiseStudy(colluding, "accumulated", insiders)]


def _entry(
    scale: Scale,
    mechanism: Mechanism,
    x: float,
    *,
    graph: str,
    epsilon: float,
    seeds: str | None = None,
    max_colluders: int = 0,
) -> NoiseEntry:
    """Return a mechanism at one place, for the unit agent and the steps of the regression task.

    ``seeds``, if given, replaces the seed groups and the insiders of the mechanism.
    """
    # The cap depends on T, so that all noise figures share the steps of one task.
    steps = scale.regression.num_steps
    cell = make_design_cell(mechanism, graph, steps)
    if seeds is not None:
        cell = replace(cell, seeds=seeds, max_colluders=max_colluders)
    # Designs are made at cap 1; the cap of ε scales them (``NoiseStudy``).
    cap = mechanism.budget(epsilon, scale.delta, steps, scale.clip).precision_cap
    return NoiseEntry(mechanism=mechanism, x=x, cell=cell, epsilon=epsilon, precision_cap=cap)


def _one_step_and_accumulated(
    scale: Scale,
    figure: str,
    settings: str,
    x_label: str,
    entries: tuple[NoiseEntry, ...],
    *,
    log_x: bool = False,
) -> list[NoiseStudy]:
    """Return the panel of the paper and its counterpart for accumulated noise."""
    steps = scale.regression.num_steps
    panel = Panel(
        name=figure,
        figure=figure,
        title=f"{settings}, T = {steps}, δ = {write_exactly(scale.delta)}, {_UNITS['agent']}, "
        f"{_ADVERSARY}",
        x_label=x_label,
        y_label="noise after one mixing step, Tr(W R Wᵀ)",
        log_x=log_x,
        log_y=True,
    )
    added = replace(
        panel,
        name=f"{figure}-accumulated",
        y_label=f"noise accumulated over {default_objective(steps).length:.0f} steps, Tr(A R)",
        in_paper=False,
    )
    return [NoiseStudy(panel, "one_step", entries), NoiseStudy(added, "accumulated", entries)]


def _train(scale: Scale, training: Training, figure: str, column: str) -> TrainingStudy:
    varies_epsilon = figure.endswith("a")
    if varies_epsilon:
        graph = scale.graph(scale.connectivity)
        places = [_place(scale, training, graph, eps, x=eps) for eps in scale.epsilons]
        settings, x_label = scale.place, "privacy budget ε"
    else:
        places = [
            _place(scale, training, scale.graph(p), scale.epsilon, x=p)
            for p in scale.connectivities
        ]
        settings, x_label = f"ε = {write_exactly(scale.epsilon)}", "connectivity p"
    panel = Panel(
        # Figure 5 has one panel for each unit of privacy: their ε must not share an axis.
        name=f"{figure}-{training.unit}" if figure.startswith("fig5") else figure,
        figure=figure,
        title=f"{_describe_task(training)}, n = {scale.num_agents}, {settings}, "
        f"T = {training.num_steps}, δ = {write_exactly(scale.delta)}, "
        f"{_UNITS[training.unit]}, {_ADVERSARY}",
        x_label=x_label,
        y_label=column.replace("_", " "),
        log_x=varies_epsilon,
        log_y=column == "optimality_gap",
        lower_is_better=column != "test_accuracy",
        is_random=True,
        unit=training.unit,
    )
    return TrainingStudy(panel, column, tuple(places))


def _describe_task(training: Training) -> str:
    if training.task == "quadratic":
        return "quadratic from its minimiser"
    pixels = 64 if training.task == "digits" else 784
    models = {"network": f"{pixels}–32–10 network", "linear": "softmax regression"}
    return f"{training.task}, {models.get(training.model or '', 'logistic regression')}"


def _place(
    scale: Scale, training: Training, graph: str, epsilon: float, *, x: float
) -> TrainingPlace:
    # Numbers as floats, because 3 and 3.0 would give different keys in the store.
    step_sizes = map(float, training.step_sizes)
    first = TrainingCell(
        task=training.task,
        model=training.model,
        unit=training.unit,
        graph=graph,
        epsilon=float(epsilon),
        trials=tuple(product(scale.lines(training.unit), step_sizes)),
        num_steps=training.num_steps,
        schedule=training.schedule,
        seeds=(),
        delta=scale.delta,
        clip=scale.clip,
        batch_size=scale.batch_size,
        partition=scale.partition,
        data_seed=scale.data_seed,
    )
    pilots = tuple(replace(first, seeds=seeds) for seeds in training.pilot_blocks)
    return TrainingPlace(x=x, pilots=pilots, repeats=training.repeat_blocks)


def make_studies(names: Iterable[str], scale: Scale) -> list[Study]:
    """Return the panels with these names: of a figure, of a single panel, or ``all``."""
    wanted = set(names)
    # A fixed graph has neither p nor n to vary, so that the figures about them are left out.
    possible = [name for name in FIGURES if not scale.find_obstacle(name)]
    for name in sorted(wanted):
        # Asked for by name, such a figure is an error; as a part of ``all`` it is left out.
        if name.startswith("fig") and (missing := scale.find_obstacle(name)):
            raise InvalidArgumentError(
                f"graph must contain {missing} for {name}, which varies it, found "
                f"{scale.graph_spec!r}: try er:n={{n}},p={{p}},seed={{seed}}"
            )
    studies = [study for name in possible for study in _make_figure(name, scale)]
    known = {*possible, *(study.panel.name for study in studies), "all"}
    rule = f"all, one of {', '.join(FIGURES)}, or a panel such as fig5a-agent"
    require(wanted <= known, "figure", rule, ", ".join(map(repr, sorted(wanted - known))))
    chosen = [study for study in studies if wanted & {"all", study.panel.figure, study.panel.name}]
    drawn = [study for study in chosen if scale.lines(study.panel.unit)]
    if chosen and not drawn:
        raise InvalidArgumentError(
            f"mechanisms must have a line with unit agent for {', '.join(sorted(wanted))}, found "
            f"{', '.join(one.name for one in scale.mechanisms)}, which have unit sample: try "
            "fig5a-sample"
        )
    return drawn
