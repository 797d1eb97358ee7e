"""Figure 2: the price of sharing seeds among fewer agents, and of insiders who know them."""

from __future__ import annotations

from corn.experiments.cells import DesignCell, design_cell
from corn.experiments.figure1 import ONE_STEP_LABEL, precision_cap
from corn.experiments.methods import CORN, CORN_ONE_STEP, CORN_PAPER, LDP, LDP_PAPER, MethodSpec
from corn.experiments.scale import Scale
from corn.experiments.studies import NoiseSpot, NoiseStudy, Panel

PAIR_SEEDS = MethodSpec("corn-pairs", "CorN, a seed for each pair", "corn", accumulates=True)
LINK_SEEDS = MethodSpec("corn-links", "CorN, a seed for each link", "corn", accumulates=True)


def figure2(scale: Scale) -> list[NoiseStudy]:
    """Disjoint groups as in the paper; next to it overlapping seeds against insiders."""
    steps = scale.regression.num_steps
    settings = (
        f"n = {scale.num_agents}, p = {scale.connectivity:g}, ε = {scale.epsilon:g}, "
        f"T = {steps}, δ = {scale.delta:g}, unit: agent, against an eavesdropper or as named"
    )
    accumulated = f"noise accumulated over {steps // 5} steps, Tr(A R)"
    groups = "number of disjoint seed groups m"
    disjoint = _disjoint_spots(scale)
    return [
        NoiseStudy(
            Panel("fig2", "fig2", settings, groups, ONE_STEP_LABEL, log_y=True),
            "one_step",
            disjoint,
        ),
        NoiseStudy(
            Panel(
                "fig2-accumulated",
                "fig2",
                settings,
                groups,
                accumulated,
                log_y=True,
                in_paper=False,
            ),
            "accumulated",
            disjoint,
        ),
        NoiseStudy(
            Panel(
                "fig2-insiders",
                "fig2",
                settings,
                "colluding insiders q",
                accumulated,
                log_y=True,
                in_paper=False,
            ),
            "accumulated",
            _insider_spots(scale),
        ),
    ]


def _disjoint_spots(scale: Scale) -> tuple[NoiseSpot, ...]:
    steps, graph = scale.regression.num_steps, scale.graph(scale.connectivity)
    spots = []
    for m in range(1, scale.num_agents + 1):
        for method in (LDP_PAPER, CORN_PAPER, LDP, CORN_ONE_STEP, CORN):
            cell = design_cell(method, graph, steps)
            if method.mechanism == "corn":
                horizon = method.objective(steps).length
                cell = DesignCell(graph, "corn", horizon, cell.judged_over, 0, f"groups:{m}")
            cap = precision_cap(scale, method, scale.epsilon)
            spots.append(NoiseSpot(method, float(m), cell, scale.epsilon, cap))
    return tuple(spots)


def _insider_spots(scale: Scale) -> tuple[NoiseSpot, ...]:
    steps, graph = scale.regression.num_steps, scale.graph(scale.connectivity)
    spots = []
    for q in range(3):
        for method, seeds in ((LDP, ""), (LINK_SEEDS, "edges"), (PAIR_SEEDS, "pairs")):
            cell = design_cell(method, graph, steps)
            if seeds:
                cell = DesignCell(graph, "corn", cell.horizon, cell.judged_over, q, seeds)
            cap = precision_cap(scale, method, scale.epsilon)
            spots.append(NoiseSpot(method, float(q), cell, scale.epsilon, cap))
    return tuple(spots)
