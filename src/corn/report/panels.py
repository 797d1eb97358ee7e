"""Figures of a reproduction: one line for each method, with confidence intervals."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from corn.experiments import MethodSpec, Panel, Point
from corn.report.style import INK, MECHANISM_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = {"paper": "o", "one step": "s", "accumulated": "D", 1: "^", 2: "v"}
_SHIFT = 0.005
_MOST_LABELS = 12
_LABEL_EVERY = 1.25
"""On a logarithmic axis, the least ratio of two places that are both labelled."""


def plot_panel(
    panel: Panel,
    points: Sequence[Point],
    *,
    only_paper: bool = False,
    broken_promises: Collection[float] = (),
) -> Figure:
    """Draw a panel with all its methods, or only those that the paper has.

    On a logarithmic axis "no noise" may lie decades below all others; the legend then says so.
    Where ε varies, points of the paper's methods at ``broken_promises`` are crossed out.
    """
    shown = [
        point
        for point in points
        if (point.method.is_in_paper or not only_paper)
        and math.isfinite(point.mean)
        and (point.mean > 0 or not panel.log_y)
    ]
    figure = Figure(figsize=(6.2, 4.4 if only_paper else 4.9), layout="constrained")
    axes = figure.subplots()
    axes.set_title(textwrap.fill(panel.title, 84), fontsize=8.5, loc="left")
    _set_axes(axes, panel, sorted({point.x for point in shown}))
    if not shown:
        axes.text(0.5, 0.5, "no run finished", transform=axes.transAxes, ha="center")
        return figure
    low, high = _range(panel, shown)
    methods = list(dict.fromkeys(point.method for point in shown))
    for place, method in enumerate(methods):
        own = sorted((point for point in shown if point.method == method), key=lambda p: p.x)
        # A little apart, so that the bars of several methods do not hide each other.
        shift = (place - (len(methods) - 1) / 2) * _SHIFT if panel.is_random else 0.0
        _draw_line(axes, panel, method, own, shift=shift, low=low)
    _cross_out(axes, shown, broken_promises if panel.figure.endswith("a") else ())
    axes.set_ylim(low, high)
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    return figure


def _range(panel: Panel, points: Sequence[Point]) -> tuple[float, float]:
    """Limits of the vertical axis: the means, and intervals up to half their span beyond."""
    seen = [point for point in points if point.method.is_private or not panel.log_y] or points
    scale = np.log if panel.log_y else np.asarray
    means = np.array([point.mean for point in seen])
    half = np.array([point.half_width for point in seen])
    lower = np.where(means > half, means - half, means) if panel.log_y else means - half
    low, high = (float(scale(value)) for value in (means.min(), means.max()))
    span = (high - low) or 0.1
    low = max(float(scale(lower).min()), low - span / 2) - 0.06 * span
    high = min(float(scale(means + half).max()), high + span / 2) + 0.06 * span
    return (math.exp(low), math.exp(high)) if panel.log_y else (low, high)


def _draw_line(
    axes: Axes,
    panel: Panel,
    method: MethodSpec,
    points: Sequence[Point],
    *,
    shift: float,
    low: float,
) -> None:
    colour = MECHANISM_COLOURS[method.mechanism]
    unseen = " (below the axis)" if max(point.mean for point in points) < low else ""
    axes.errorbar(
        [point.x * (1 + shift) if panel.log_x else point.x + shift for point in points],
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
        label=method.label + unseen,
    )


def _cross_out(axes: Axes, points: Sequence[Point], places: Collection[float]) -> None:
    crossed = [p for p in points if p.method.is_in_paper and p.x in places]
    if crossed:
        axes.plot(
            [point.x for point in crossed],
            [point.mean for point in crossed],
            linestyle="",
            marker="x",
            markersize=9,
            color=INK,
            label="really a larger ε",
        )


def _line_style(method: MethodSpec) -> str:
    if method.is_in_paper:
        return ":"
    if method.mechanism in ("central", "none"):
        return "--"
    return "-." if method.max_colluders or method.name == "corn-links" else "-"


def _marker(method: MethodSpec) -> str:
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
    if len(places) > _MOST_LABELS:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
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
