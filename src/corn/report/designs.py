"""Figures of designs: the covariance next to the graph, and mechanisms side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from corn.arrays import FloatArray
from corn.covariance import Design
from corn.report.networks import draw_graph
from corn.report.style import INK, MECHANISM_COLOURS, MECHANISM_NAMES
from corn.topology import Network

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_design(network: Network, design: Design, *, title: str) -> Figure:
    """The graph, the covariance in units of the LDP variance, and the correlations."""
    figure = Figure(figsize=(13, 4.7), layout=ConstrainedLayoutEngine(wspace=0.06))
    figure.suptitle(title, fontsize=10)
    left, middle, right = figure.subplots(1, 3)
    draw_graph(left, network)
    scaled = design.covariance * design.precision_cap
    _draw_matrix(middle, figure, scaled, float(np.abs(scaled).max()) or 1.0)
    middle.set_title("covariance R, LDP variance = 1", fontsize=10)
    std = np.where(design.noise_std > 0, design.noise_std, 1)
    _draw_matrix(right, figure, design.covariance / np.outer(std, std), 1.0)
    right.set_title("correlation", fontsize=10)
    return figure


def plot_comparison(
    values: Mapping[str, Mapping[str, float]], *, objectives: Sequence[str], title: str
) -> Figure:
    """Bars of noise energy relative to LDP, one panel per objective, for mechanisms by name.

    ``values[objective][mechanism]`` is Tr(A R) of that mechanism; ``ldp`` must be among them.
    """
    figure = Figure(figsize=(5.2 * len(objectives) + 1, 4.4), layout="constrained")
    figure.suptitle(textwrap.fill(title, 62 * len(objectives)), fontsize=9)
    for axes, objective in zip(
        figure.subplots(1, len(objectives), squeeze=False)[0], objectives, strict=True
    ):
        _draw_bars(axes, values[objective])
        axes.set_title(objective, fontsize=10)
    return figure


def _draw_bars(axes: Axes, values: Mapping[str, float]) -> None:
    names = list(values)
    ratios = [values[name] / values["ldp"] for name in names]
    colours = [MECHANISM_COLOURS[name.split()[0]] for name in names]
    hatches = ["///" if " " in name else "" for name in names]
    bars = axes.barh(
        range(len(names)), ratios, color=colours, hatch=hatches, edgecolor="white", height=0.7
    )
    axes.bar_label(bars, [f"{ratio:.3g}" for ratio in ratios], padding=3, fontsize=9, color=INK)
    axes.set_yticks(range(len(names)), [MECHANISM_NAMES.get(name, name) for name in names])
    axes.invert_yaxis()
    axes.set(xlabel="noise energy relative to independent noise (LDP)", xlim=(0, 1.18))
    axes.spines[["top", "right"]].set_visible(False)


def _draw_matrix(axes: Axes, figure: Figure, matrix: FloatArray, limit: float) -> None:
    image = axes.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit)
    axes.set(xlabel="agent j", ylabel="agent i")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axes, shrink=0.8)
