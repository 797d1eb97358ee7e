"""Pictures of the concepts page, drawn from designs and runs of this package."""

from collections.abc import Sequence

import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

import corn
from corn.report.figures import INK, MECHANISM_COLOURS, PALE

CORN, LDP, SERVER = (MECHANISM_COLOURS[name] for name in ("corn", "ldp", "central"))
BUDGET = corn.PrivacyBudget(epsilon=10, delta=1e-5, num_steps=1000, clip=0.1)


def draw_units() -> Figure:
    """Draw what one agent's data is, and which part of it each unit protects."""
    figure, panels = _make_panels(2, height=2.3)
    marked = {"agent": range(40), "sample": [17]}
    titles = {"agent": "unit agent: all data of one agent", "sample": "unit sample: one sample"}
    for axes, (unit, chosen) in zip(panels, marked.items(), strict=True):
        for k in range(40):
            colour = CORN if k in chosen else "#E4E4E4"
            axes.add_patch(Rectangle((k % 10, -(k // 10)), 0.75, 0.7, color=colour))
        axes.set(xlim=(-0.8, 10.6), ylim=(-3.9, 1.3))
        axes.set_title(titles[unit], fontsize=10, loc="left")
        axes.set_axis_off()
    return figure


def draw_cancelling() -> Figure:
    """Draw the noise of eight agents and of their average, independent and joint."""
    figure, panels = _make_panels(2, height=3.0)
    generator = np.random.default_rng(5)
    draws = generator.standard_normal((8, 60))
    ldp = corn.design("ring:8", BUDGET, mechanism="ldp")
    joint = corn.design("ring:8", BUDGET, threat=corn.ThreatModel(0))
    limit = 2.5 * joint.noise_std.max()
    for axes, noise, name in zip(
        panels, (ldp, joint), ("independent", "joint (CorN)"), strict=True
    ):
        values = np.linalg.cholesky(noise.covariance) @ draws
        axes.plot(values.T, color=PALE, linewidth=0.7)
        average = values.mean(axis=0)
        axes.plot(average, color=LDP if noise is ldp else CORN, linewidth=2)
        axes.text(59.5, average[-1], " average", color=INK, va="center", fontsize=9)
        axes.set_title(f"{name} noise, same ε", fontsize=10, loc="left")
        axes.set(xlabel="step", ylim=(-limit, limit), xlim=(0, 70))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("noise of one parameter")
    return figure


def draw_seeds(coalition: Sequence[int] = (0,)) -> Figure:
    """Draw which seeds an insider knows: one for all, those of links, those of pairs."""
    figure, panels = _make_panels(3, height=2.9)
    graph = nx.cycle_graph(6)
    places = nx.circular_layout(graph)
    kinds = {"global": "one seed for all", "edges": "a seed per link", "pairs": "a seed per pair"}
    for axes, (kind, title) in zip(panels, kinds.items(), strict=True):
        groups = corn.ThreatModel(1, kind).seed_groups(graph)
        pairs = [pair for pair in nx.complete_graph(6).edges if _share(pair, groups)]
        known = [pair for pair in pairs if kind == "global" or set(pair) & set(coalition)]
        hidden = [pair for pair in pairs if pair not in known]
        nx.draw_networkx_edges(graph, places, hidden, ax=axes, edge_color=CORN, width=1.8)
        nx.draw_networkx_edges(
            graph, places, known, ax=axes, edge_color=LDP, style="dashed", width=1.2
        )
        colours = [INK if agent in coalition else "white" for agent in graph]
        nodes = nx.draw_networkx_nodes(graph, places, ax=axes, node_color=colours, node_size=230)
        nodes.set_edgecolor(INK)
        axes.set_title(
            f"{title}: {len(hidden)} of {len(pairs)} pairs\nkeep common noise", fontsize=9
        )
        axes.set_axis_off()
        axes.margins(0.15)
    return figure


def _share(pair: tuple[int, int], groups: Sequence[Sequence[int]]) -> bool:
    return any(set(pair) <= set(group) for group in groups)


def draw_horizon() -> Figure:
    """Draw the energy that one step's noise still has after more mixing steps."""
    figure, (axes,) = _make_panels(1, height=3.0)
    network = corn.load_network("er:n=20,p=0.2,seed=1")
    W = network.mixing_matrix
    lines = {
        "LDP": (corn.design(network, BUDGET, mechanism="ldp"), LDP),
        "CorN, designed for one step": (_design(network, corn.Horizon()), "#56B4E9"),
        "CorN, designed for 200 steps": (_design(network, corn.Horizon(200)), CORN),
    }
    steps = np.arange(0, 26)
    unit = float(np.trace(lines["LDP"][0].covariance))
    for name, (noise, colour) in lines.items():
        powers = [np.linalg.matrix_power(W, k) for k in steps]
        energy = [float(np.trace(P @ noise.covariance @ P.T)) / unit for P in powers]
        axes.semilogy(steps, energy, color=colour)
        axes.text(25.4, energy[-1], name, color=INK, va="center", fontsize=9)
    axes.set(xlabel="mixing steps after the release", xlim=(0, 36))
    axes.set_ylabel("noise energy, LDP at first = 1")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _design(network: corn.Network, objective: corn.Horizon) -> corn.Design:
    return corn.design(network, BUDGET, objective=objective, threat=corn.ThreatModel(0))


def draw_files() -> Figure:
    """Draw which files are public, which stay with an agent, and what a run writes."""
    figure, (axes,) = _make_panels(1, height=3.1)
    boxes = {
        "plan.corn\ngraph, promise, noise weights": (0.02, 0.62, SERVER),
        "roster.json\npublic keys of all agents": (0.02, 0.12, SERVER),
        "key, ledger, data\nof one agent": (0.37, 0.37, LDP),
        "shared/\nmodels, test scores, ε": (0.72, 0.62, SERVER),
        "private/\nlosses, checkpoints": (0.72, 0.12, LDP),
    }
    for text, (x, y, colour) in boxes.items():
        style = "round,pad=0.01,rounding_size=0.02"
        axes.add_patch(
            FancyBboxPatch((x, y), 0.26, 0.26, boxstyle=style, fc="white", ec=colour, lw=2)
        )
        axes.text(x + 0.13, y + 0.13, text, ha="center", va="center", fontsize=9, color=INK)
    for y in (0.75, 0.25):
        _point(axes, (0.29, y), (0.36, 0.5))
        _point(axes, (0.64, 0.5), (0.71, y))
    axes.text(0.02, 0.95, "public", color=SERVER, fontsize=10)
    axes.text(0.37, 0.95, "never leaves its owner", color=LDP, fontsize=10)
    axes.set(xlim=(0, 1), ylim=(0.05, 1.02))
    axes.set_axis_off()
    return figure


def _point(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": INK})


def _make_panels(count: int, *, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(7.6, height), layout="constrained", dpi=150)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])
