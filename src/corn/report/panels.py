"""Panels of a reproduction: one line per method, named at its end, with intervals as bands."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogFormatterMathtext, NullLocator

from corn.experiments import MethodSpec, Panel, Point
from corn.report.labels import LineEnd, label_ends, label_point
from corn.report.style import INK, MECHANISM_COLOURS, OWN_COLOUR

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Dashes: TypeAlias = str | tuple[int, tuple[float, ...]]

_CROSS_LABEL = "× exact ε is larger"

Lines: TypeAlias = Literal["paper", "main", "all"]

_MAIN = ("ldp", "decor", "corn", "corn-defaults", "central", "none", "corn-1-insider")
"""The lines that answer a reader's questions, the most important first."""

_MOST_MAIN = 6
"""The number of lines above which a panel becomes hard to read."""

_MOST_PLAIN = 100
"""The ratio of the ends of a logarithmic axis above which its labels are powers of ten."""

_LABEL_DISTANCE = 0.055
"""The least distance of two labelled places, as a part of the axis: a label of four digits."""


@dataclass(frozen=True)
class LineStyle:
    """The colour, dashes and marker of one line; no two lines of a figure share all three."""

    colour: str
    dashes: _Dashes = "-"
    marker: str = ""


# Markers tell mechanisms apart and colours tell variants of CorN apart. Sky blue, purple and indigo
# differ from each other and from the mechanisms' colours under protanopia, deuteranopia and
# tritanopia. Dashes remain in black and white.
_STYLES = {
    "ldp-paper": LineStyle(MECHANISM_COLOURS["ldp"], ":", "o"),
    "decor-paper": LineStyle(MECHANISM_COLOURS["decor"], ":", "s"),
    "corn-paper": LineStyle(MECHANISM_COLOURS["corn"], ":", "D"),
    "ldp-authors": LineStyle(MECHANISM_COLOURS["ldp"], "-.", "o"),
    "decor-authors": LineStyle(MECHANISM_COLOURS["decor"], "-.", "s"),
    "corn-authors": LineStyle(MECHANISM_COLOURS["corn"], "-.", "D"),
    "ldp": LineStyle(MECHANISM_COLOURS["ldp"], "-", "o"),
    "decor": LineStyle(MECHANISM_COLOURS["decor"], "-", "s"),
    "corn": LineStyle(MECHANISM_COLOURS["corn"], "-", "D"),
    "corn-one-step": LineStyle("#56B4E9", "-", "P"),
    "corn-1-insider": LineStyle("#CC79A7", (0, (6, 1.5)), "^"),
    "corn-2-insiders": LineStyle("#332288", (0, (6, 1.5, 1.5, 1.5)), "v"),
    "corn-defaults": LineStyle("#000000", "-", "h"),
    "corn-defaults-1-insider": LineStyle("#000000", (0, (6, 1.5)), "h"),
    "corn-pairs": LineStyle(MECHANISM_COLOURS["corn"], "-", "D"),
    "corn-links": LineStyle("#CC79A7", (0, (6, 1.5)), "<"),
    "central": LineStyle(MECHANISM_COLOURS["central"], "--", "*"),
    "none": LineStyle(MECHANISM_COLOURS["none"], "-"),
}


def style_of(method: MethodSpec) -> LineStyle:
    """Return the style of a method; one without its own gets the colour of its mechanism."""
    colour = MECHANISM_COLOURS.get(method.mechanism, OWN_COLOUR)
    return _STYLES.get(method.name, LineStyle(colour, "-", "X"))


def plot_panel(
    panel: Panel,
    points: Sequence[Point],
    *,
    lines: Lines = "all",
    broken_promises: Collection[float] = (),
) -> Figure:
    """Draw a panel with all its lines, those of the paper, or at most six that matter most.

    On a logarithmic axis "no noise" may lie decades below all others; its name then says that
    it is below the axis. Where ε varies, points of the paper's methods at ``broken_promises`` are
    crossed out.
    """
    chosen = choose_lines([point.method for point in points], lines)
    shown = [
        point
        for point in points
        if point.method in chosen
        and math.isfinite(point.mean)
        # A logarithmic axis has no place for zero.
        and (point.mean > 0 or not panel.log_y)
    ]
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    # "δ = 1e-05" stays on one line.
    title = textwrap.fill(panel.title.replace(" = ", "\u00a0=\u00a0"), 88)
    axes.set_title(title, fontsize=8.5, loc="left")
    _set_axes(axes, panel, sorted({point.x for point in shown}))
    if not shown:
        axes.text(0.5, 0.5, "no run finished", transform=axes.transAxes, ha="center")
        return figure
    low, high = _find_limits(panel, shown)
    axes.set_ylim(low, high)
    # Only panels “a” vary ε, in which x is one.
    crossed = broken_promises if panel.figure.endswith("a") else ()
    ends, last_place = [], max(point.x for point in shown)
    for method in dict.fromkeys(point.method for point in shown):
        own = sorted((point for point in shown if point.method == method), key=lambda p: p.x)
        _draw_line(axes, method, own, crossed=crossed)
        name = method.label + (" (below the axis)" if own[-1].mean < low else "")
        end = LineEnd(name, max(own[-1].mean, low), style_of(method).colour)
        if own[-1].x == last_place:
            ends.append(end)
        else:
            label_point(axes, end, own[-1].x, font_size=8.5)
    label_ends(axes, ends, font_size=8.5)
    if any(line.get_marker() == "x" for line in axes.lines):
        axes.text(0.99, 0.99, _CROSS_LABEL, transform=axes.transAxes, ha="right", va="top")
    return figure


def choose_lines(methods: Iterable[MethodSpec], lines: Lines) -> list[MethodSpec]:
    """Return the methods of a panel that are drawn, each once.

    >>> from corn.experiments import METHODS
    >>> len(METHODS), [method.name for method in choose_lines(METHODS, "main")][:3]
    (13, ['ldp', 'decor', 'corn'])
    """
    distinct = list(dict.fromkeys(methods))
    if lines == "paper":
        return [method for method in distinct if method.is_in_paper]
    if lines == "main" and len(distinct) > _MOST_MAIN:
        names = [method.name for method in distinct]
        main = [name for name in _MAIN if name in names][:_MOST_MAIN]
        return [method for method in distinct if method.name in main]
    return distinct


def _set_axes(axes: Axes, panel: Panel, places: Sequence[float]) -> None:
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    is_log = panel.log_x or is_spread(places)
    if is_log:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_LogTicks())
        axes.yaxis.set_minor_formatter(_LogTicks())
    axes.xaxis.set_major_locator(FixedLocator(thin_labels(places, is_log=is_log)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(visible=True, which="major", alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


class _LogTicks(LogFormatterMathtext):
    """Labels of a logarithmic axis: powers of ten over many decades, plain numbers over few."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        # An empty text leaves out a tick that would be too close to others.
        text = str(super().__call__(x, pos))
        low, high = self.axis.get_view_interval()  # type: ignore[union-attr]
        is_plain = high < _MOST_PLAIN * low and low >= 1e-3 and high < 1e6
        return f"{x:,.6g}" if text and is_plain else text


def is_spread(places: Sequence[float]) -> bool:
    """Return whether increasing places need a logarithmic axis: decades apart, not evenly spaced.

    >>> is_spread([0.5, 1, 2, 5, 20]), is_spread([0.2, 0.4, 0.6, 0.8, 1.0]), is_spread(range(1, 21))
    (True, False, False)
    """
    if len(places) < 3 or places[0] <= 0 or places[-1] < 10 * places[0]:
        return False
    # Evenly spaced places do not collide on a linear axis, however far apart they are.
    gaps = [right - left for left, right in pairwise(places)]
    return max(gaps) > 2 * min(gaps)


def thin_labels(places: Sequence[float], *, is_log: bool) -> list[float]:
    """Return the increasing places that are labelled: far enough apart not to touch.

    >>> thin_labels([10, 20, 80, 82, 100], is_log=False)
    [10, 20, 80, 100]
    """
    positions = np.log(places) if is_log else np.asarray(places, dtype=float)
    least = _LABEL_DISTANCE * float(np.ptp(positions)) if len(places) else 0.0
    kept: list[int] = []
    for index, position in enumerate(positions):
        if not kept or position - positions[kept[-1]] >= least:
            kept.append(index)
    return [places[index] for index in kept]


def _find_limits(panel: Panel, points: Sequence[Point]) -> tuple[float, float]:
    """Return the limits of the vertical axis.

    They include all means. Intervals extend them by at most half the span of the means: with two
    seeds an interval may be ten times as wide, and would flatten all lines.
    """
    # The quadratic starts at its minimiser: without noise its gap is decades below all others, and
    # an axis that included it would press them together.
    seen = [point for point in points if point.method.is_private or not panel.log_y] or points
    scale = np.log if panel.log_y else np.asarray
    means = np.array([point.mean for point in seen])
    half = np.array([point.half_width for point in seen])
    # On a logarithmic axis an interval that reaches zero would end at −∞.
    lower = np.where(means > half, means - half, means) if panel.log_y else means - half
    low, high = (float(scale(value)) for value in (means.min(), means.max()))
    # All means may be equal, as those of a line with one place.
    span = (high - low) or 0.1
    low = max(float(scale(lower).min()), low - span / 2) - 0.06 * span
    high = min(float(scale(means + half).max()), high + span / 2) + 0.06 * span
    if panel.log_y:
        return math.exp(low), math.exp(high)
    # Losses are not negative, and accuracies lie between 0 and 1: so does the axis.
    return max(low, 0.0), high if panel.lower_is_better else min(high, 1.0)


def _draw_line(
    axes: Axes, method: MethodSpec, points: Sequence[Point], *, crossed: Collection[float]
) -> None:
    style = style_of(method)
    places, means = [point.x for point in points], np.array([point.mean for point in points])
    axes.plot(
        places,
        means,
        linestyle=style.dashes,
        marker=style.marker,
        markersize=5,
        markerfacecolor="white" if method.is_in_paper else style.colour,
        color=style.colour,
        linewidth=1.5,
    )
    # One value has no interval: a band of width zero would look exact.
    if len(points[0].values) > 1:
        half = np.array([point.half_width for point in points])
        axes.fill_between(
            places, means - half, means + half, color=style.colour, alpha=0.13, linewidth=0
        )
    wrong = [i for i, point in enumerate(points) if method.is_in_paper and point.x in crossed]
    if wrong:
        axes.plot(
            [places[i] for i in wrong],
            means[wrong],
            linestyle="",
            marker="x",
            markersize=9,
            color=INK,
        )
