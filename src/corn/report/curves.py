"""Figures of a reproduction: one line for each method, with confidence intervals."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from corn.experiments import Method, Panel, Point
from corn.report.style import MECHANISM_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = {"paper": "o", "one step": "s", "accumulated": "D", 1: "^", 2: "v"}
_LABEL_EVERY = 1.25
"""On a logarithmic axis, the least ratio of two places that are both labelled."""


def plot_panel(panel: Panel, points: Sequence[Point], *, only_paper: bool = False) -> Figure:
    """Draw a panel with all its methods, or only those that the paper has.

    The vertical axis spans the means. On a logarithmic one "no noise" may lie decades below all
    others; the legend then says so.
    """
    shown = [point for point in points if point.method.is_in_paper or not only_paper]
    figure = Figure(figsize=(6.2, 4.4 if only_paper else 4.9), layout="constrained")
    axes = figure.subplots()
    low, high = _range(panel, shown)
    for method in dict.fromkeys(point.method for point in shown):
        own = sorted((point for point in shown if point.method == method), key=lambda p: p.x)
        unseen = " (below the axis)" if max(point.mean for point in own) < low else ""
        _draw_line(axes, method, own, label=method.label + unseen)
    _set_axes(axes, panel, sorted({point.x for point in shown}))
    axes.set_ylim(low, high)
    axes.set_title(textwrap.fill(panel.title, 84), fontsize=9, loc="left")
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    return figure


def _range(panel: Panel, points: Sequence[Point]) -> tuple[float, float]:
    """Limits of the vertical axis, a little beyond the means."""
    means = np.array([point.mean for point in points if point.method.is_private or not panel.log_y])
    if panel.log_y:
        margin = (means.max() / means.min()) ** 0.07 * 1.05
        return float(means.min() / margin), float(means.max() * margin)
    margin = 0.07 * float(means.max() - means.min()) or 0.05
    return float(means.min() - margin), float(means.max() + margin)


def _draw_line(axes: Axes, method: Method, points: Sequence[Point], *, label: str) -> None:
    colour = MECHANISM_COLOURS[method.mechanism]
    axes.errorbar(
        [point.x for point in points],
        [point.mean for point in points],
        yerr=[point.half_width for point in points] if len(points[0].values) > 1 else None,
        linestyle=_line_style(method),
        marker=_marker(method),
        markersize=4.5,
        markerfacecolor="white" if method.is_in_paper else colour,
        color=colour,
        linewidth=1.6,
        elinewidth=0.8,
        capsize=2,
        label=label,
    )


def _line_style(method: Method) -> str:
    if method.is_in_paper:
        return ":"
    if method.mechanism in ("central", "none"):
        return "--"
    return "-." if method.max_colluders or method.name == "corn-links" else "-"


def _marker(method: Method) -> str:
    if method.mechanism in ("central", "none"):
        return ""
    if method.is_in_paper:
        return "o"
    return _MARKERS[method.max_colluders or ("accumulated" if method.accumulates else "one step")]


def _set_axes(axes: Axes, panel: Panel, places: Sequence[float]) -> None:
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
    if len(places) <= 12:
        labelled = _thin(places) if panel.log_x else list(places)
        axes.xaxis.set_major_locator(FixedLocator(labelled))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(visible=True, which="major", alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _thin(places: Sequence[float]) -> list[float]:
    """Places far enough from each other on a logarithmic axis for their labels not to touch."""
    kept: list[float] = []
    for place in places:
        if not kept or place >= _LABEL_EVERY * kept[-1]:
            kept.append(place)
    return kept
