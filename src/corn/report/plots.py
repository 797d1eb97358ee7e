"""Plots of single results: a network, mechanisms compared, a training run."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from corn.checks import FloatArray
from corn.errors import make_printable
from corn.report.style import (
    INK,
    LINK,
    MECHANISM_COLOURS,
    MECHANISM_NAMES,
    OWN_COLOUR,
    PALE,
    SHORT_NAMES,
    LineEnd,
    label_ends,
)
from corn.topology import Graph, Network, Spectrum, name_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    # `corn.learn` needs torch, whose import takes longer than to draw a graph.
    from corn.learn.metrics import Row


def place_agents(graph: Graph) -> dict[int, tuple[float, float]]:
    """Return coordinates: rings as circles, small graphs by distance, large ones by springs."""
    n = len(graph)
    if 3 <= n <= 60 and all(degree == 2 for _, degree in graph.degree):
        return dict(nx.circular_layout(graph))
    # Kamada–Kawai shows structure best, but needs all shortest paths: cubic in n.
    if n <= 120:
        return dict(nx.kamada_kawai_layout(graph.to_undirected()))
    # A fixed seed: the same network gets the same picture each time.
    return dict(nx.spring_layout(graph, seed=1, iterations=60))


_WEIGHT_COLOURS = LinearSegmentedColormap.from_list(
    "weights", ["#FFFFFF", "#9CC6E3", LINK, "#00304D"]
)
_MAX_NAMED_AGENTS = 60
_MAX_QUOTED = 60
_TITLE_LETTERS = 50
"""Letters of a 9-point title that fit above one panel of 5 inches."""

_MEASURE_LABELS = {
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
    "train_loss": "train loss",
    "optimality_gap": "optimality gap",
    "consensus_distance": "disagreement",
}


def plot_network(network: Network, gossip_matrix: FloatArray, measured: Spectrum) -> Figure:
    """Draw the graph, the mixing weights of one step and their singular values side by side.

    ``gossip_matrix`` is the network's mixing matrix, or the product of several rounds of it.
    """
    figure = Figure(figsize=(13, 4.4), layout=ConstrainedLayoutEngine(wspace=0.06))
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.15, 1, 1))
    _draw_graph(left, network)
    # Chebyshev rounds may have negative weights; white is zero otherwise.
    lowest = min(0.0, float(gossip_matrix.min()))
    _draw_matrix(middle, gossip_matrix, cmap=_WEIGHT_COLOURS, vmin=lowest)
    middle.set(xlabel="weight on agent j")
    middle.set_title(f"mixing weights of a step ({network.weights})", fontsize=10)
    _draw_spectrum(right, measured)
    return figure


def plot_comparison(rows: Sequence[tuple[str, str, float]], *, title: str) -> Figure:
    """Draw a bar for each mechanism: its noise variance in the average over a trusted server's.

    A row has the mechanism, a remark that stands below its name, such as the adversary that its
    noise holds against (bars of different adversaries do not compare), and the ratio.
    """
    figure = Figure(figsize=(6.4, 1.2 + 0.55 * len(rows)), layout="constrained")
    figure.suptitle(textwrap.fill(title, _TITLE_LETTERS), fontsize=9, parse_math=False)
    axes = figure.subplots()
    ratios = [ratio for _, _, ratio in rows]
    colours = [MECHANISM_COLOURS.get(name, OWN_COLOUR) for name, _, _ in rows]
    bars = axes.barh(range(len(rows)), ratios, color=colours, height=0.7)
    axes.bar_label(bars, [f"{ratio:.3g}" for ratio in ratios], padding=3, fontsize=9, color=INK)
    labels = [f"{MECHANISM_NAMES.get(name, name)}\n{remark}".strip() for name, remark, _ in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set(
        xlabel="noise variance of the average over a trusted server's",
        # Room for the numbers beside the bars.
        xlim=(0, 1.15 * max(1.0, *ratios)),
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_training(
    rows: Sequence[Row],
    step_sizes: Mapping[str, str],
    agent_samples: Sequence[int] | None,
    *,
    title: str,
) -> Figure:
    """Draw each method at its step size, averaged over runs, and the samples of each agent.

    If ``agent_samples`` is None, the distance of models from their average takes its place. Bands
    are plus and minus one standard deviation over runs, if there are several.
    """
    scores = list(_MEASURE_LABELS)[:-1]
    measured = [name for name in scores if any(row.get(name) is not None for row in rows)][:2]
    num_panels = len(measured) + 1
    figure = Figure(figsize=(5 * num_panels, 4.3), layout="constrained")
    figure.suptitle(textwrap.fill(title, _TITLE_LETTERS * num_panels), fontsize=9, parse_math=False)
    *panels, last = figure.subplots(1, num_panels, squeeze=False)[0]
    for axes, column in zip(panels, measured, strict=True):
        _draw_runs(axes, rows, step_sizes, column)
    if agent_samples is None:
        _draw_runs(last, rows, step_sizes, "consensus_distance")
    else:
        last.bar(range(len(agent_samples)), agent_samples, color=INK)
        last.set(xlabel="agent", ylabel="training samples")
        last.set_title("training samples of each agent", fontsize=10)
        last.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (*panels, last):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_graph(axes: Axes, network: Network) -> None:
    """Draw agents and links; an agent is darker the larger its weight on its own model."""
    graph, n = network.graph, network.num_agents
    places = place_agents(graph)
    # Sizes are areas in square points: they shrink with n, so that agents cover equally much.
    size = float(np.clip(5200 / n, 12, 420))
    # Arrow heads are drawn one by one, which is slow; only directed links need them.
    arrows = {"arrows": True, "arrowsize": 9, "node_size": size} if graph.is_directed() else {}
    width = float(np.clip(30 / n, 0.3, 1.4))
    nx.draw_networkx_edges(graph, places, ax=axes, edge_color=PALE, width=width, **arrows)
    shade = np.diag(network.mixing_matrix)
    colours: dict[str, Any] = {"node_color": shade, "cmap": _WEIGHT_COLOURS, "vmin": 0, "vmax": 1}
    nodes = nx.draw_networkx_nodes(graph, places, ax=axes, node_size=size, **colours)
    nodes.set_edgecolor(INK)
    # Names and sources come from the user: a $ in one would start mathematics, which may not parse.
    if n <= _MAX_NAMED_AGENTS:
        centred: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}
        for agent, place in places.items():
            name = make_printable(name_of(graph, agent), limit=_MAX_QUOTED)
            ink = "white" if shade[agent] > 0.5 else INK
            axes.annotate(name, place, parse_math=False, color=ink, **centred)
    source = make_printable(network.source, limit=_MAX_QUOTED)
    counts = f"{n} agents, {graph.number_of_edges()} links"
    axes.set_title(f"{source}\n{counts}", fontsize=10, parse_math=False)
    axes.set_axis_off()
    axes.margins(0.08)


def _draw_matrix(axes: Axes, matrix: FloatArray, **colours: Any) -> None:
    image = axes.imshow(matrix, **colours)
    axes.set(xlabel="agent j", ylabel="agent i")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.figure.colorbar(image, ax=axes, shrink=0.8)


def _draw_spectrum(axes: Axes, measured: Spectrum) -> None:
    values = measured.singular_values
    indices = range(1, len(values) + 1)
    axes.vlines(indices, 0, values, color=PALE, linewidth=1)
    axes.plot(indices, values, "o", color=LINK, markersize=4)
    axes.set(xlabel="index", ylabel="singular value of W", ylim=(0, 1.05))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(
        f"σ₂ = {measured.second_singular_value:.4f}, spectral gap {measured.spectral_gap:.4f}\n"
        f"{1 - measured.accuracy:.0%} agreement after {measured.mixing_time} steps",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)


def _draw_runs(axes: Axes, rows: Sequence[Row], step_sizes: Mapping[str, str], column: str) -> None:
    """Draw mean and standard deviation over runs of one measure against the step."""
    ends = []
    for name, step_size in step_sizes.items():
        values: dict[int, list[float]] = {}
        for row in rows:
            if (row["mechanism"], row["step_size"]) == (name, step_size):
                values.setdefault(int(row["step"]), []).append(float(row[column]))
        steps = sorted(values)
        means = np.array([np.mean(values[step]) for step in steps])
        stds = np.array([np.std(values[step]) for step in steps])
        colour = MECHANISM_COLOURS.get(name, OWN_COLOUR)
        style = "--" if name in ("none", "unclipped", "central") else "-"
        axes.plot(steps, means, style, color=colour)
        ends.append(LineEnd(SHORT_NAMES.get(name, name), float(means[-1]), colour))
        axes.fill_between(steps, means - stds, means + stds, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="step", ylabel=_MEASURE_LABELS[column])
    # Lines end at the right edge, next to their names.
    axes.margins(x=0)
    # Fixed, because labels are placed by these limits.
    axes.set_ylim(axes.get_ylim())
    label_ends(axes, ends, font_size=8.5)
