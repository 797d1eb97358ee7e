"""The figures of the paper as studies, by name.

Figures 1 and 2 show the noise of designs, Figures 3 to 5 what trained models reach. Panels that the
paper does not have show the noise accumulated over a fifth of the run, and the price of insiders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from corn.checks import require
from corn.covariance import default_objective
from corn.errors import InvalidArgumentError
from corn.experiments.cells import TrainingCell, make_design_cell
from corn.experiments.methods import (
    CORN,
    CORN_ONE_STEP,
    CORN_PAPER,
    DEFAULT_METHODS,
    LDP,
    LDP_PAPER,
    LINK_SEEDS,
    PAIR_SEEDS,
    MethodSpec,
)
from corn.experiments.scale import Scale, Training
from corn.experiments.studies import (
    NoiseEntry,
    NoiseStudy,
    Panel,
    Study,
    TrainingPlace,
    TrainingStudy,
)
from corn.privacy.rounding import write_exactly

# Wherever an ε is printed, its unit, the clipping and the adversary stand next to it.
_UNITS = {
    "agent": "unit: agent (the mini-batch gradient is clipped once)",
    "sample": "unit: sample (each sample's gradient is clipped)",
}
_ADVERSARY = "adversary: eavesdropper, or as named"


def figure1a(scale: Scale) -> list[NoiseStudy]:
    """Return noise against ε."""
    graph = scale.graph(scale.connectivity)
    places = [(epsilon, graph, epsilon) for epsilon in scale.epsilons]
    settings = f"n = {scale.num_agents}, {scale.place}"
    return _figure1(scale, "fig1a", settings, "privacy budget ε of each agent", places)


def figure1b(scale: Scale) -> list[NoiseStudy]:
    """Return noise against the connectivity p."""
    places = [(p, scale.graph(p), scale.epsilon) for p in scale.connectivities]
    settings = f"n = {scale.num_agents}, ε = {write_exactly(scale.epsilon)}"
    return _figure1(scale, "fig1b", settings, "connectivity p", places)


def figure1c(scale: Scale) -> list[NoiseStudy]:
    """Return noise against the number of agents, up to ten times the paper's hundred."""
    # The connectivity stays, so that mean degrees grow with n.
    places = [(float(n), scale.graph(scale.connectivity, n), scale.epsilon) for n in scale.sizes]
    one, two = scale.insider_sizes
    settings = (
        f"{scale.place}, ε = {write_exactly(scale.epsilon)} "
        f"(1 insider: up to n = {one}, 2 insiders: up to n = {two})"
    )
    return _figure1(scale, "fig1c", settings, "number of agents n", places, log_x=True)


def _figure1(
    scale: Scale,
    figure: str,
    settings: str,
    x_label: str,
    places: Iterable[tuple[float, str, float]],
    *,
    log_x: bool = False,
) -> list[NoiseStudy]:
    """Return the panel of the paper and its counterpart for accumulated noise.

    ``places`` are (x, graph, ε).
    """
    # The line without noise would lie at zero, which a logarithmic axis does not have. Designs that
    # count on a cool-down are judged after it, in the figures of training.
    lines = scale.lines("agent")
    methods = [own for own in lines if own.is_private and own not in DEFAULT_METHODS]
    entries = tuple(
        _entry(scale, method, x, graph=graph, epsilon=epsilon)
        for x, graph, epsilon in places
        for method in methods
        if not (figure == "fig1c" and _is_too_large(scale, method, x))
    )
    panel = Panel(
        name=figure,
        figure=figure,
        title=f"{settings}, {_describe_privacy(scale)}",
        x_label=x_label,
        y_label="noise after one mixing step, Tr(W R Wᵀ)",
        log_x=log_x,
        log_y=True,
    )
    return _one_step_and_accumulated(scale, panel, entries)


def _is_too_large(scale: Scale, method: MethodSpec, num_agents: float) -> bool:
    """Return whether a network has too many coalitions for a design against insiders."""
    # There are about n^q / q! coalitions of q insiders, and each is a constraint.
    limits = (float("inf"), *scale.insider_sizes)
    return num_agents > limits[method.max_colluders]


def figure2(scale: Scale) -> list[NoiseStudy]:
    """Return noise against the number of disjoint seed groups, and against the insiders."""
    graph = scale.graph(scale.connectivity)
    entry = partial(_entry, scale, graph=graph, epsilon=scale.epsilon)
    # LDP shares no seed: the same design at every m and q, for comparison.
    groups = tuple(
        entry(method, float(m), seeds=f"groups:{m}" if method.mechanism == "corn" else None)
        for m in range(1, scale.num_agents + 1)
        for method in scale.methods
        # Covariances of the user's own have “=” in the name of their mechanism.
        if method in (LDP_PAPER, CORN_PAPER, LDP, CORN_ONE_STEP, CORN) or "=" in method.mechanism
    )
    insiders = tuple(
        entry(method, float(q), seeds=seeds, max_colluders=q if seeds else 0)
        for q in range(3)
        for method, seeds in ((LDP, None), (LINK_SEEDS, "edges"), (PAIR_SEEDS, "pairs"))
    )
    settings = f"n = {scale.num_agents}, {scale.place}, ε = {write_exactly(scale.epsilon)}"
    panel = Panel(
        name="fig2",
        figure="fig2",
        title=f"{settings}, {_describe_privacy(scale)}",
        x_label="number of disjoint seed groups m",
        y_label="noise after one mixing step, Tr(W R Wᵀ)",
        log_y=True,
    )
    one_step, accumulated = _one_step_and_accumulated(scale, panel, groups)
    # Insiders are judged by accumulated noise alone, for which these lines are designed.
    colluding = replace(
        accumulated.panel,
        name="fig2-insiders",
        title=f"{settings}, {_describe_privacy(scale, 'adversary: eavesdropper and q insiders')}",
        x_label="colluding insiders q",
    )
    return [one_step, accumulated, NoiseStudy(colluding, "accumulated", insiders)]


def _entry(
    scale: Scale,
    method: MethodSpec,
    x: float,
    *,
    graph: str,
    epsilon: float,
    seeds: str | None = None,
    max_colluders: int = 0,
) -> NoiseEntry:
    """Return a method at one place, for the unit agent and the steps of the regression task.

    ``seeds``, if given, replaces the seed groups and the insiders of the method.
    """
    # The cap depends on T, so that all noise figures share the steps of one task.
    steps = scale.regression.num_steps
    cell = make_design_cell(method, graph, steps)
    if seeds is not None:
        cell = replace(cell, seeds=seeds, max_colluders=max_colluders)
    # Designs are made at cap 1; the cap of ε scales them (``NoiseStudy``).
    cap = method.budget(epsilon, scale.delta, steps, scale.clip).precision_cap
    return NoiseEntry(method=method, x=x, cell=cell, epsilon=epsilon, precision_cap=cap)


def _one_step_and_accumulated(
    scale: Scale, panel: Panel, entries: tuple[NoiseEntry, ...]
) -> list[NoiseStudy]:
    length = default_objective(scale.regression.num_steps).length
    added = replace(
        panel,
        name=f"{panel.name}-accumulated",
        y_label=f"noise accumulated over {length:.0f} steps, Tr(A R)",
        in_paper=False,
    )
    return [NoiseStudy(panel, "one_step", entries), NoiseStudy(added, "accumulated", entries)]


def _describe_privacy(scale: Scale, adversary: str = _ADVERSARY) -> str:
    steps = scale.regression.num_steps
    return f"T = {steps}, δ = {write_exactly(scale.delta)}, {_UNITS['agent']}, {adversary}"


def figure3(scale: Scale, *, panel: str) -> list[TrainingStudy]:
    """Return quadratic optimisation against ε (panel a) or connectivity (panel b)."""
    return [_train(scale, scale.quadratic, f"fig3{panel}", "optimality_gap", "optimality gap")]


def figure4(scale: Scale, *, panel: str) -> list[TrainingStudy]:
    """Return logistic regression against ε (panel a) or connectivity (panel b)."""
    return [_train(scale, scale.regression, f"fig4{panel}", "test_loss", "test loss")]


def figure5(scale: Scale, *, panel: str) -> list[TrainingStudy]:
    """Return image classification for both units of privacy."""
    return [
        _train(scale, training, f"fig5{panel}", "test_accuracy", "test accuracy")
        for training in (scale.network, scale.softmax)
    ]


def _train(scale: Scale, training: Training, figure: str, column: str, label: str) -> TrainingStudy:
    varies_epsilon = figure.endswith("a")
    if varies_epsilon:
        graph = scale.graph(scale.connectivity)
        places = [_place(scale, training, graph, eps, x=eps) for eps in scale.epsilons]
        settings, x_label = scale.place, "privacy budget ε"
    else:
        graphs = {p: scale.graph(p) for p in scale.connectivities}
        places = [_place(scale, training, own, scale.epsilon, x=p) for p, own in graphs.items()]
        settings, x_label = f"ε = {write_exactly(scale.epsilon)}", "connectivity p"
    panel = Panel(
        # Figure 5 has one panel for each unit of privacy: their ε must not share an axis.
        name=f"{figure}-{training.unit}" if figure.startswith("fig5") else figure,
        figure=figure,
        title=f"{_describe_task(training)}, n = {scale.num_agents}, {settings}, "
        f"T = {training.num_steps}, δ = {write_exactly(scale.delta)}, "
        f"{_UNITS[training.unit]}, {_ADVERSARY}",
        x_label=x_label,
        y_label=label,
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
    pilots = tuple(
        TrainingCell(
            task=training.task,
            model=training.model,
            unit=training.unit,
            graph=graph,
            # As floats, because 3 and 3.0 would give different keys in the store.
            epsilon=float(epsilon),
            methods=scale.lines(training.unit),
            num_steps=training.num_steps,
            step_sizes=tuple(map(float, training.step_sizes)),
            schedule=training.schedule,
            seeds=seeds,
            delta=scale.delta,
            clip=scale.clip,
            batch_size=scale.batch_size,
            partition=scale.partition,
            data_seed=scale.data_seed,
        )
        for seeds in training.pilot_blocks
    )
    return TrainingPlace(x=x, pilots=pilots, repeats=training.repeat_blocks)


FIGURES: dict[str, Callable[[Scale], Sequence[Study]]] = {
    "fig1a": figure1a,
    "fig1b": figure1b,
    "fig1c": figure1c,
    "fig2": figure2,
    "fig3a": partial(figure3, panel="a"),
    "fig3b": partial(figure3, panel="b"),
    "fig4a": partial(figure4, panel="a"),
    "fig4b": partial(figure4, panel="b"),
    "fig5a": partial(figure5, panel="a"),
    "fig5b": partial(figure5, panel="b"),
}


def make_studies(names: Sequence[str], scale: Scale) -> list[Study]:
    """Return the panels with these names: of a figure, of a single panel, or ``all``."""
    # A fixed graph has neither p nor n to vary, so that the figures about them are left out.
    possible = {name: make for name, make in FIGURES.items() if not scale.find_obstacle(name)}
    studies = [study for make in possible.values() for study in make(scale)]
    for name in names:
        # Asked for by name, such a figure is an error; as a part of ``all`` it is left out.
        if name.startswith("fig") and (missing := scale.find_obstacle(name)):
            raise InvalidArgumentError(
                f"graph must contain {missing} for {name}, which varies it, found "
                f"{scale.graph_spec!r}: try er:n={{n}},p={{p}},seed={{seed}}"
            )
    known = {*possible, *(study.panel.name for study in studies), "all"}
    rule = f"all, one of {', '.join(FIGURES)}, or a panel such as fig5a-agent"
    for name in names:
        require(name in known, "figure", rule, repr(name))
    chosen = [
        study
        for study in studies
        if "all" in names or not {study.panel.figure, study.panel.name}.isdisjoint(names)
    ]
    drawn = [study for study in chosen if scale.lines(study.panel.unit)]
    if chosen and not drawn:
        raise InvalidArgumentError(
            f"methods must have a line with unit agent for {', '.join(names)}, found "
            f"{', '.join(own.name for own in scale.methods)}, which have unit sample: try "
            "fig5a-sample"
        )
    return drawn
