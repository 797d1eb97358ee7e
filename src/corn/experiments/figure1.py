"""Figure 1: the noise left after mixing, against ε, connectivity and number of agents."""

from __future__ import annotations

from collections.abc import Iterable

from corn.experiments.cells import design_cell
from corn.experiments.methods import METHODS, MethodSpec
from corn.experiments.scale import Scale
from corn.experiments.studies import NoiseSpot, NoiseStudy, Panel

ONE_STEP_LABEL = "noise after one mixing step, Tr(W R Wᵀ)"


def figure1a(scale: Scale) -> list[NoiseStudy]:
    """Against ε."""
    graph = scale.graph(scale.connectivity)
    places = [(epsilon, graph, epsilon) for epsilon in scale.epsilons]
    settings = f"n = {scale.num_agents}, p = {scale.connectivity:g}"
    return _studies(scale, "fig1a", settings, "privacy budget ε of each agent", places)


def figure1b(scale: Scale) -> list[NoiseStudy]:
    """Against the connectivity p."""
    places = [(p, scale.graph(p), scale.epsilon) for p in scale.connectivities]
    settings = f"n = {scale.num_agents}, ε = {scale.epsilon:g}"
    return _studies(scale, "fig1b", settings, "connectivity p", places)


def figure1c(scale: Scale) -> list[NoiseStudy]:
    """Against the number of agents, beyond the paper's hundred."""
    places = [(float(n), scale.graph(scale.connectivity, n), scale.epsilon) for n in scale.sizes]
    one, two = scale.insider_sizes
    settings = (
        f"p = {scale.connectivity:g}, ε = {scale.epsilon:g} "
        f"(1 insider: up to n = {one}, 2 insiders: up to n = {two})"
    )
    return _studies(scale, "fig1c", settings, "number of agents n", places, log_x=True)


def precision_cap(scale: Scale, method: MethodSpec, epsilon: float) -> float:
    """B of a method at an ε, for the unit agent and the paper's number of steps."""
    steps = scale.regression.num_steps
    return method.budget(epsilon, scale.delta, steps, scale.clip).precision_cap


def _studies(
    scale: Scale,
    figure: str,
    settings: str,
    x_label: str,
    places: Iterable[tuple[float, str, float]],
    *,
    log_x: bool = False,
) -> list[NoiseStudy]:
    """The panel of the paper, and the same for noise that accumulates over a fifth of the run."""
    steps = scale.regression.num_steps
    spots = tuple(
        NoiseSpot(
            method, x, design_cell(method, graph, steps), eps, precision_cap(scale, method, eps)
        )
        for x, graph, eps in places
        for method in METHODS
        if method.is_private and _is_affordable(scale, method, figure, x)
    )
    title = (
        f"{settings}, T = {steps}, δ = {scale.delta:g}, unit: agent, against an eavesdropper or as "
        "named"
    )
    paper = Panel(figure, figure, title, x_label, ONE_STEP_LABEL, log_x, log_y=True)
    label = f"noise accumulated over {steps // 5} steps, Tr(A R)"
    added = Panel(
        f"{figure}-accumulated", figure, title, x_label, label, log_x, log_y=True, in_paper=False
    )
    return [NoiseStudy(paper, "one_step", spots), NoiseStudy(added, "accumulated", spots)]


def _is_affordable(scale: Scale, method: MethodSpec, figure: str, x: float) -> bool:
    """Coalitions are many in large networks: designs against them stop at a size of the scale."""
    if figure != "fig1c" or method.max_colluders == 0:
        return True
    return x <= scale.insider_sizes[method.max_colluders - 1]
