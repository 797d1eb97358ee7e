"""Figures of networks: who is linked, with which weights, and how fast that mixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from corn.arrays import FloatArray
from corn.errors import make_printable
from corn.report.style import INK, LINK, PALE
from corn.topology import Graph, Network, Spectrum, name_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WEIGHTS = LinearSegmentedColormap.from_list("weights", ["#FFFFFF", "#9CC6E3", LINK, "#00304D"])
_MOST_LABELS, _MAX_QUOTED = 60, 60


def plot_network(network: Network, gossip_matrix: FloatArray, measured: Spectrum) -> Figure:
    """The graph, what a step of mixing does, and the singular values of that, side by side.

    ``gossip_matrix`` is the network's mixing matrix, or what several rounds of it amount to.
    """
    figure = Figure(figsize=(13, 4.4), layout=ConstrainedLayoutEngine(wspace=0.06))
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.15, 1, 1))
    draw_graph(left, network)
    _draw_weights(middle, figure, gossip_matrix)
    middle.set_title(f"mixing weights of a step ({network.weights})", fontsize=10)
    _draw_spectrum(right, measured)
    return figure


def draw_graph(axes: Axes, network: Network) -> None:
    """Draw agents and links; the more an agent keeps for itself, the darker it is."""
    graph = network.graph
    n = network.num_agents
    places = _place(graph)
    size = float(np.clip(5200 / n, 12, 420))
    # Arrow heads are drawn one by one, which is slow; only directed links need them.
    arrows = {"arrows": True, "arrowsize": 9, "node_size": size} if graph.is_directed() else {}
    width = float(np.clip(30 / n, 0.3, 1.4))
    nx.draw_networkx_edges(graph, places, ax=axes, edge_color=PALE, width=width, **arrows)
    shade = np.diag(network.mixing_matrix)
    nodes = nx.draw_networkx_nodes(
        graph, places, ax=axes, node_color=shade, cmap=_WEIGHTS, vmin=0, vmax=1, node_size=size
    )
    nodes.set_edgecolor(INK)
    if n <= _MOST_LABELS:
        for agent, (x, y) in places.items():
            ink = "white" if shade[agent] > 0.5 else INK
            name = make_printable(name_of(graph, agent), limit=_MAX_QUOTED)
            centred: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "color": ink}
            axes.annotate(name, (x, y), parse_math=False, **centred)  # $ is not mathematics here
    source = make_printable(network.source, limit=_MAX_QUOTED)
    counts = f"{n} agents, {graph.number_of_edges()} links"
    axes.set_title(f"{source}\n{counts}", fontsize=10, parse_math=False)
    axes.set_axis_off()
    axes.margins(0.08)


def _place(graph: Graph) -> dict[int, tuple[float, float]]:
    n = len(graph)
    if 3 <= n <= 60 and all(degree == 2 for _, degree in graph.degree):
        return dict(nx.circular_layout(graph))
    if n <= 120:
        return dict(nx.kamada_kawai_layout(graph.to_undirected()))
    return dict(nx.spring_layout(graph, seed=1, iterations=60))


def _draw_weights(axes: Axes, figure: Figure, gossip_matrix: FloatArray) -> None:
    image = axes.imshow(gossip_matrix, cmap=_WEIGHTS, vmin=min(0.0, float(gossip_matrix.min())))
    axes.set(xlabel="weight on agent j", ylabel="agent i")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axes, shrink=0.8)


def _draw_spectrum(axes: Axes, measured: Spectrum) -> None:
    values = measured.singular_values
    axes.vlines(range(1, len(values) + 1), 0, values, color=PALE, linewidth=1)
    axes.plot(range(1, len(values) + 1), values, "o", color=LINK, markersize=4)
    axes.set(xlabel="index", ylabel="singular value of W", ylim=(0, 1.05))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(
        f"σ₂ = {measured.second_singular_value:.4f}, spectral gap {measured.spectral_gap:.4f}\n"
        f"{1 - measured.accuracy:.0%} agreement after {measured.mixing_time} steps",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
