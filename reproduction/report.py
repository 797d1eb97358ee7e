"""The report of a reproduction: figures, tables and one self-contained page."""

from __future__ import annotations

import base64
import csv
import math
import platform
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata, resources
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jinja2
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogFormatterMathtext, NullLocator

from corn.report import save_figure
from corn.report.figures import INK, MECHANISM_COLOURS, OWN_COLOUR, LineEnd, darken, label_ends
from corn.version import __version__
from reproduction.claims import Claim, find_broken_promises
from reproduction.figures import FIGURES, Panel, Point
from reproduction.mechanisms import Mechanism
from reproduction.run import Reproduction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FONT_SIZE = 8.5
_HIGH = 0.75  # of the axes' height, above which there is no room for a name over a point
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

_LIBRARIES = ("numpy", "scipy", "networkx", "torch", "matplotlib")

_SOURCES = {
    "paper": "the paper",
    "expected": "expected from its figures",
    "corn": "this project",
}


def write_report(reproduction: Reproduction, out: Path, *, command: str, timing: str) -> list[Path]:
    """Write all files into ``out`` and return the main ones, the page first.

    ``runs.csv`` has every run, ``points.csv`` every point of a figure, ``claims.csv`` and
    ``claims.md`` every claim with its verdict. ``figures/`` has every panel as PNG, SVG and PDF:
    with the paper's mechanisms, with the main ones of this project, and with all. The page states
    ``command`` and ``timing``.
    """
    out.mkdir(parents=True, exist_ok=True)
    _write_csv(reproduction.runs, out / "runs.csv")
    _write_csv(
        (_point_row(panel, point) for panel, points in reproduction.panels for point in points),
        out / "points.csv",
    )
    _write_csv((asdict(claim) for claim in reproduction.claims), out / "claims.csv")
    (out / "claims.md").write_text(_claims_markdown(reproduction.claims), encoding="utf-8")
    page = out / "report.html"
    drawings = _draw_all(reproduction, out / "figures")
    page.write_text(_render(reproduction, drawings, command, timing), encoding="utf-8")
    return [page, out / "runs.csv", out / "points.csv", out / "claims.csv"]


def _draw_all(reproduction: Reproduction, directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Save every drawing, and return the drawings of each figure as the page needs them."""
    broken = find_broken_promises(reproduction.scale)
    drawings: dict[str, list[dict[str, Any]]] = {}
    for panel, points in reproduction.panels:
        for name, lines, caption in _list_versions(panel, points):
            figure = plot_panel(panel, points, lines=lines, broken_promises=broken)
            drawn = directory / f"{name}.svg"
            save_figure(figure, drawn)
            save_figure(figure, drawn.with_suffix(".png"))
            save_figure(figure, drawn.with_suffix(".pdf"))
            axes = f"{panel.y_label} against {panel.x_label}"
            drawings.setdefault(panel.figure, []).append(
                {
                    "source": _embed(drawn),
                    "caption": f"{axes}, unit: {panel.unit}; {caption}",
                    "text": f"{axes}, {panel.title}; {caption}",
                    # All lines together are hard to read, so that the page shows them on request.
                    "is_folded": lines == "all",
                }
            )
    return drawings


def _list_versions(panel: Panel, points: Sequence[Point]) -> Iterator[tuple[str, Lines, str]]:
    """Yield the file name, the lines and the caption of each drawing of a panel."""
    if panel.in_paper:
        yield panel.name, "paper", "the paper’s mechanisms"
    mechanisms = [point.mechanism for point in points]
    yield f"{panel.name}-added", "main", "the mechanisms of this project"
    if len(choose_lines(mechanisms, "all")) > len(choose_lines(mechanisms, "main")):
        yield f"{panel.name}-all", "all", "all mechanisms"


def _embed(drawing: Path) -> str:
    """Return an SVG as a data URI, so that the page needs no other file."""
    return "data:image/svg+xml;base64," + base64.b64encode(drawing.read_bytes()).decode("ascii")


def _render(
    reproduction: Reproduction,
    drawings: Mapping[str, Sequence[Mapping[str, Any]]],
    command: str,
    timing: str,
) -> str:
    # Notes and breakdowns quote file names and graphs, hence autoescape.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    source = resources.files("reproduction").joinpath("report.html").read_text("utf-8")
    scale = reproduction.scale
    return environment.from_string(source).render(
        scale=scale,
        command=command,
        timing=timing,
        figures=[
            {"title": f"Figure {name.removeprefix('fig')}. {FIGURES[name]}", "drawings": each}
            for name, each in drawings.items()
        ],
        verdicts=_count_verdicts(reproduction.claims),
        claims=reproduction.claims,
        trainings=[scale.quadratic, scale.regression, scale.network, scale.softmax],
        notes=reproduction.notes,
        breakdowns=reproduction.breakdowns,
        sources=_SOURCES,
        versions={"corn": __version__, "python": platform.python_version()}
        | {name: metadata.version(name) for name in _LIBRARIES},
        machine=platform.platform(),
    )


def _count_verdicts(claims: Sequence[Claim]) -> dict[str, dict[str, int]]:
    """Return how many claims of each source hold, do not hold, or are undecided."""
    # All three verdicts of all sources, so that the page has zeros and no gaps.
    counts = {
        source: dict.fromkeys(("holds", "does not hold", "undecided"), 0) for source in _SOURCES
    }
    for claim in claims:
        counts[claim.source][claim.verdict] += 1
    return counts


def _claims_markdown(claims: Sequence[Claim]) -> str:
    rows = [
        f"| {claim.source} | {claim.panel} | {claim.statement} | {claim.verdict} "
        f"| {claim.evidence} |"
        for claim in claims
    ]
    head = ["| source | panel | statement | verdict | evidence |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def _point_row(panel: Panel, point: Point) -> dict[str, Any]:
    # One seed has no interval. An empty column says so; a 0 would look exact.
    return {
        "panel": panel.name,
        "mechanism": point.mechanism.name,
        "x": point.x,
        "mean": point.mean,
        "half_width_95": "" if panel.is_random and len(point.values) < 2 else point.half_width,
        "num_seeds": len(point.values) if panel.is_random else "",
        "unit": panel.unit,
        "against": point.against,
        "note": point.note,
    }


def _write_csv(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write rows that may have different columns; a column that a row lacks is empty."""
    table = list(rows)
    # Noise studies and trainings have different columns; the order is that of first appearance.
    columns = list(dict.fromkeys(name for row in table for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


@dataclass(frozen=True)
class LineStyle:
    """The colour, dashes and marker of one line; no two lines of a figure share all three."""

    colour: str
    dashes: _Dashes = "-"
    marker: str = ""


# Markers tell mechanisms apart and colours tell variants of CorN apart. Sky blue, purple and wine
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
    "corn-2-insiders": LineStyle("#661100", (0, (6, 1.5, 1.5, 1.5)), "v"),
    "corn-defaults": LineStyle("#000000", "-", "h"),
    "corn-defaults-1-insider": LineStyle("#000000", (0, (6, 1.5)), "h"),
    "corn-pairs": LineStyle(MECHANISM_COLOURS["corn"], "-", "D"),
    "corn-links": LineStyle("#CC79A7", (0, (6, 1.5)), "<"),
    "central": LineStyle(MECHANISM_COLOURS["central"], "--", "*"),
    "none": LineStyle(MECHANISM_COLOURS["none"], "-"),
}


def style_of(mechanism: Mechanism) -> LineStyle:
    """Return the style of a mechanism; one without an entry gets the colour of its rule."""
    colour = MECHANISM_COLOURS.get(mechanism.rule, OWN_COLOUR)
    return _STYLES.get(mechanism.name, LineStyle(colour, "-", "X"))


def plot_panel(
    panel: Panel,
    points: Sequence[Point],
    *,
    lines: Lines = "all",
    broken_promises: Collection[float] = (),
) -> Figure:
    """Draw a panel with all its lines, those of the paper, or at most six that matter most.

    On a logarithmic axis "no noise" may lie decades below all others; its name then says that
    it is below the axis. Where ε varies, points of the paper at ``broken_promises`` are crossed
    out.
    """
    chosen = choose_lines([point.mechanism for point in points], lines)
    shown = [
        point
        for point in points
        if point.mechanism in chosen
        and math.isfinite(point.mean)
        # A logarithmic axis has no place for zero.
        and (point.mean > 0 or not panel.log_y)
    ]
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    # "δ = 1e-05" stays on one line.
    title = textwrap.fill(panel.title.replace(" = ", "\u00a0=\u00a0"), 88)
    axes.set_title(title, fontsize=_FONT_SIZE, loc="left")
    _set_axes(axes, panel, sorted({point.x for point in shown}))
    if not shown:
        axes.text(0.5, 0.5, "no run finished", transform=axes.transAxes, ha="center")
        return figure
    low, high = _find_limits(panel, shown)
    axes.set_ylim(low, high)
    # Only panels “a” vary ε, in which x is one.
    crossed = broken_promises if panel.figure.endswith("a") else ()
    ends, last_place = [], max(point.x for point in shown)
    for mechanism in dict.fromkeys(point.mechanism for point in shown):
        line = sorted((point for point in shown if point.mechanism == mechanism), key=lambda p: p.x)
        last = line[-1]
        _draw_line(axes, mechanism, line, crossed=crossed)
        name = mechanism.label + (" (below the axis)" if last.mean < low else "")
        style = style_of(mechanism)
        end = LineEnd(
            name,
            max(last.mean, low),
            style.colour,
            style.marker,
            style.dashes,
            is_open=mechanism.is_in_paper,
        )
        if last.x == last_place:
            ends.append(end)
        else:
            _label_point(axes, end, last.x)
    label_ends(axes, ends, font_size=_FONT_SIZE)
    if any(line.get_marker() == "x" for line in axes.lines):
        axes.text(0.99, 0.99, _CROSS_LABEL, transform=axes.transAxes, ha="right", va="top")
    return figure


def choose_lines(mechanisms: Iterable[Mechanism], lines: Lines) -> list[Mechanism]:
    """Return the mechanisms of a panel that are drawn, each once.

    >>> from reproduction.mechanisms import MECHANISMS
    >>> len(MECHANISMS), [mechanism.name for mechanism in choose_lines(MECHANISMS, "main")][:3]
    (13, ['ldp', 'decor', 'corn'])
    """
    distinct = list(dict.fromkeys(mechanisms))
    if lines == "paper":
        return [mechanism for mechanism in distinct if mechanism.is_in_paper]
    if lines == "main" and len(distinct) > _MOST_MAIN:
        names = [mechanism.name for mechanism in distinct]
        main = [name for name in _MAIN if name in names][:_MOST_MAIN]
        return [mechanism for mechanism in distinct if mechanism.name in main]
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
    seen = [point for point in points if point.mechanism.is_private or not panel.log_y] or points
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
    axes: Axes, mechanism: Mechanism, points: Sequence[Point], *, crossed: Collection[float]
) -> None:
    style = style_of(mechanism)
    places, means = [point.x for point in points], np.array([point.mean for point in points])
    axes.plot(
        places,
        means,
        linestyle=style.dashes,
        marker=style.marker,
        markersize=5,
        markerfacecolor="white" if mechanism.is_in_paper else style.colour,
        color=style.colour,
        linewidth=1.5,
    )
    # One value has no interval: a band of width zero would look exact.
    if len(points[0].values) > 1:
        half = np.array([point.half_width for point in points])
        axes.fill_between(
            places, means - half, means + half, color=style.colour, alpha=0.13, linewidth=0
        )
    wrong = [i for i, point in enumerate(points) if mechanism.is_in_paper and point.x in crossed]
    if wrong:
        axes.plot(
            [places[i] for i in wrong],
            means[wrong],
            linestyle="",
            marker="x",
            markersize=9,
            color=INK,
        )


def _label_point(axes: Axes, end: LineEnd, x: float) -> None:
    """Write the name of a line that ends inside the axes, and connect it with that end.

    The limits of the axes must have been set.
    """
    to_fraction = axes.transData + axes.transAxes.inverted()
    is_high = to_fraction.transform((x, end.y))[1] > _HIGH
    axes.annotate(
        end.text,
        (x, end.y),
        # At some distance, because other lines may pass near the end of this one.
        xytext=(0, (-4 if is_high else 3) * _FONT_SIZE),
        textcoords="offset points",
        ha="center",
        va="center",
        color=darken(end.colour),
        fontsize=_FONT_SIZE,
        arrowprops={"arrowstyle": "-", "color": end.colour, "linewidth": 0.8},
        parse_math=False,
    )
