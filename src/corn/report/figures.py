"""Figures: mechanisms compared, a training run, and the style that all figures share.

There is one colour, marker and name per mechanism, and lines are labelled at their ends.
``corn.mplstyle`` beside this file has sizes and fonts; users give their own by `figure_style`.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.offsetbox import AnnotationBbox, DrawingArea, HPacker, TextArea
from matplotlib.ticker import MaxNLocator
from scipy.optimize import isotonic_regression

from corn.checks import require_choice
from corn.errors import FileFormatError, make_printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    # `corn.learn` needs torch, whose import takes longer than to draw a figure.
    from corn.learn.metrics import Row


# The name, the colour and the marker of each mechanism. Okabe and Ito's palette: its colours stay
# distinct under the common kinds of colour blindness.
_STYLES = {
    "corn": ("CorN", "#0072B2", "D"),
    "decor": ("DECOR", "#E69F00", "s"),
    "ldp": ("LDP", "#D55E00", "o"),
    "zero-sum": ("zero-sum", "#CC79A7", "P"),
    "central": ("trusted server", "#009E73", "*"),
    "none": ("no noise", "#7F7F7F", ""),
}
MECHANISM_COLOURS = {key: colour for key, (_, colour, _) in _STYLES.items()}
SHORT_NAMES = {key: name for key, (name, _, _) in _STYLES.items()}
OWN_COLOUR = "#882255"
"""The colour of mechanisms of the user's own."""
_MORE_COLOURS = (OWN_COLOUR, "#332288", "#44AA99", "#661100", "#999933")
_MORE_MARKERS = ("X", "^", "v", "<", ">", "h")
_DASHED = ("central", "none", "unclipped")
INK = "#333333"
PALE = "#BBBBBB"
FIGURE_SUFFIXES = (".png", ".svg", ".pdf")

# The same hues with a contrast of at least 4.5 to white, which thin letters need.
_TEXT_COLOURS = {
    "#E69F00": "#8A5F00",
    "#D55E00": "#B04E00",
    "#56B4E9": "#1F6F9F",
    "#CC79A7": "#9C4676",
    "#009E73": "#00785A",
    "#7F7F7F": "#666666",
}


def darken(colour: str) -> str:
    """Return the colour of text that names a line of this colour, readable on white.

    >>> darken("#E69F00"), darken("#0072B2")
    ('#8A5F00', '#0072B2')
    """
    return _TEXT_COLOURS.get(colour, colour)


class LineStyle(NamedTuple):
    """The colour, the marker and the dashes of a line."""

    colour: str
    marker: str
    dashes: Any


def choose_styles(names: Iterable[str]) -> dict[str, LineStyle]:
    """Return a style for each mechanism, of which no two share colour and marker.

    >>> choose_styles(["corn", "mine"])["corn"]
    LineStyle(colour='#0072B2', marker='D', dashes='-')
    """
    styles = {}
    more = zip(cycle(_MORE_COLOURS), cycle(_MORE_MARKERS), strict=True)
    for name in names:
        colour, marker = _STYLES[name][1:] if name in _STYLES else next(more)
        styles[name] = LineStyle(colour, marker, "--" if name in _DASHED else "-")
    return styles


_STYLE_FILE = Path(__file__).with_name("corn.mplstyle")


@contextmanager
def figure_style(
    path: Path | str | None = None, *, width: float | None = None, font_size: float | None = None
) -> Iterator[None]:
    """Draw figures with the style of this package, changed by a style file of Matplotlib.

    Args:
        path: a file of settings of Matplotlib, such as a changed copy of ``corn.mplstyle``.
        width: inches of one panel, such as the width of a paper's column.
        font_size: points of the text.

    Raises:
        FileFormatError: the file cannot be read, or has other settings than those of Matplotlib.
    """
    with mpl.rc_context(fname=_STYLE_FILE):
        if path is not None:
            mpl.rcParams.update(_read_style(path))
        if width is not None:
            mpl.rcParams["figure.figsize"] = (width, width / 1.3)
        if font_size is not None:
            mpl.rcParams["font.size"] = font_size
        yield


def _read_style(path: Path | str) -> mpl.RcParams:
    """Return the settings of a style file, all of which Matplotlib must know."""
    # Matplotlib logs what it does not understand, and goes on without it.
    problems: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: problems.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("matplotlib")
    logger.addHandler(listener)
    try:
        settings = mpl.rc_params_from_file(path, use_default_template=False)
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path}: cannot be read as a style: {error}") from error
    finally:
        logger.removeHandler(listener)
    if problems:
        what = " ".join(problems[0].split())
        raise FileFormatError(f"{path}: not a style of Matplotlib: {what}")
    return settings


def check_figure_name(path: Path) -> None:
    """Raise unless the suffix of a file name is that of a format for figures."""
    if path.suffix not in FIGURE_SUFFIXES:
        raise FileFormatError(f"{path}: a figure's name must end in {', '.join(FIGURE_SUFFIXES)}")


def save_figure(figure: Figure, path: Path | str) -> None:
    """Write a figure in the format of its suffix; create the directory if it is missing."""
    path = Path(path)
    check_figure_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Type 42 keeps letters as letters of a font. Journals refuse Type 3, Matplotlib's default.
    with mpl.rc_context({"pdf.fonttype": 42, "ps.fonttype": 42}):
        figure.savefig(path, dpi=160)


_LINE_HEIGHT = 1.3  # of the font's size
_AXES_SHARE = 0.8  # of the figure's height, which the layout gives to the axes


class LineEnd(NamedTuple):
    """A line's name, the height at which it ends, and its style."""

    text: str
    y: float
    colour: str
    marker: str = ""
    dashes: Any = "-"
    is_open: bool = False


def label_ends(axes: Axes, ends: Sequence[LineEnd], *, font_size: float | None = None) -> None:
    """Write the name of each line to the right of the axes, next to where the line ends.

    A piece of the line with its marker stands before the name, so that it can be told in black and
    white. The limits of the axes must have been set. Names that would overlap are moved apart.
    """
    font_size = mpl.rcParams["font.size"] if font_size is None else font_size
    figure_height = axes.get_figure(root=True).get_figheight()  # type: ignore[union-attr]
    # Points are 1/72 inch. The layout has not run yet, so that the height of the axes is estimated.
    distance = font_size * _LINE_HEIGHT / (72 * figure_height * _AXES_SHARE)
    # Through display coordinates, so that logarithmic axes are accounted for.
    to_fraction = axes.transData + axes.transAxes.inverted()
    left = axes.get_xlim()[0]
    wanted = [float(to_fraction.transform((left, end.y))[1]) for end in ends]
    for end, height in zip(ends, spread_apart(wanted, distance), strict=True):
        at = [0.7 * font_size, 1.7 * font_size, 2.7 * font_size]
        sample = Line2D(at, [0, 0, 0], color=end.colour, linestyle=end.dashes, marker=end.marker)
        sample.set(markevery=[1], markerfacecolor="white" if end.is_open else end.colour)
        # In points from the edge of the axes, whatever their size.
        key = DrawingArea(3 * font_size, 0)
        key.add_artist(sample)
        text_style = {"color": darken(end.colour), "fontsize": font_size, "parse_math": False}
        name = TextArea(end.text, textprops=text_style)
        packed = HPacker(children=[key, name], pad=0, sep=1, align="center")
        place: dict[str, Any] = {"xycoords": "axes fraction", "box_alignment": (0, 0.5), "pad": 0}
        box = AnnotationBbox(packed, (1, height), frameon=False, annotation_clip=False, **place)
        axes.add_artist(box)


def spread_apart(wanted: Sequence[float], distance: float) -> list[float]:
    """Return heights in the same order, near the wanted ones in [0, 1] and ``distance`` apart.

    >>> [round(height, 2) for height in spread_apart([0.5, 0.51, 0.9], 0.1)]
    [0.46, 0.56, 0.9]
    """
    order = np.argsort(wanted, kind="stable")
    offsets = distance * np.arange(len(order))
    # Of all heights that are at least a distance apart, those nearest to the wanted ones.
    clipped = np.clip(np.asarray(wanted, dtype=np.float64)[order], 0.0, 1.0)
    result = np.empty(len(order))
    result[order] = isotonic_regression(clipped - offsets).x + offsets
    return [float(height) for height in result]


_MEASURE_LABELS = {
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
    "train_loss": "train loss",
    "optimality_gap": "optimality gap",
    "consensus_distance": "disagreement",
}


def plot_comparison(rows: Sequence[tuple[str, str, float]], *, title: str) -> Figure:
    """Draw a bar for each mechanism: its noise variance in the average over a trusted server's.

    A row has the mechanism, a remark that stands below its name, such as the adversary that its
    noise holds against (bars of different adversaries do not compare), and the ratio.
    """
    width, _ = mpl.rcParams["figure.figsize"]
    font_size = mpl.rcParams["font.size"]
    # Two lines of text for each bar, and the axis below.
    height = (6 + 3.6 * len(rows)) * font_size / 72
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(_wrap(title, width), fontsize=font_size, parse_math=False)
    axes = figure.subplots()
    ratios = [ratio for _, _, ratio in rows]
    styles = choose_styles(name for name, _, _ in rows)
    colours = [styles[name].colour for name, _, _ in rows]
    bars = axes.barh(range(len(rows)), ratios, color=colours, height=0.7)
    axes.bar_label(bars, [f"{ratio:.3g}" for ratio in ratios], padding=3, color=INK)
    labels = [f"{SHORT_NAMES.get(name, name)}\n{remark}".strip() for name, remark, _ in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("noise variance of the average over a trusted server's")
    # Room for the numbers beside the bars.
    axes.set_xlim(0, 1.15 * max(1.0, *ratios))
    return figure


def _wrap(title: str, width: float) -> str:
    # Names of files may hold control characters, for which fonts have no glyph. A letter is about
    # half as wide as it is high.
    letters = int(width * 72 / (0.56 * mpl.rcParams["font.size"]))
    return textwrap.fill(make_printable(title), letters)


def plot_training(
    rows: Sequence[Row],
    step_sizes: Mapping[str, str],
    agent_samples: Mapping[str, int] | None = None,
    *,
    title: str = "",
    cooldown_steps: int = 0,
    measures: Sequence[str] | None = None,
) -> Figure:
    """Draw each mechanism at its step size, averaged over runs, with a panel for each measure.

    ``measures`` are columns of the rows, such as ``test_accuracy``. By default they are the first
    two scores that were measured, and a last panel has the samples of each agent by name, or, if
    ``agent_samples`` is None, the distance of models from their average. Bands are plus and minus
    one standard deviation over runs, if there are several. The last measurement follows
    ``cooldown_steps`` steps that only mix, which are shaded.
    """
    scores = list(_MEASURE_LABELS)[:-1]
    measured = [name for name in scores if any(row.get(name) is not None for row in rows)][:2]
    if measures is not None:
        measured = [require_choice("measures", name, _MEASURE_LABELS) for name in measures]
    elif agent_samples is None:
        measured.append("consensus_distance")
    shows_samples = measures is None and agent_samples is not None
    num_panels = len(measured) + shows_samples
    width, height = mpl.rcParams["figure.figsize"]
    figure = Figure(figsize=(num_panels * width, height), layout="constrained")
    title = _wrap(title, num_panels * width)
    figure.suptitle(title, fontsize=mpl.rcParams["font.size"], parse_math=False)
    panels = figure.subplots(1, num_panels, squeeze=False)[0]
    for axes, column in zip(panels, measured, strict=False):
        _draw_runs(axes, rows, step_sizes, column, cooldown_steps)
    if shows_samples and agent_samples is not None:
        axes = panels[-1]
        axes.bar(range(len(agent_samples)), list(agent_samples.values()), color=INK)
        axes.set(xlabel="agent", ylabel="training samples")
        names = list(agent_samples)
        if names == [str(agent) for agent in range(len(names))]:
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        else:
            axes.set_xticks(range(len(names)), names, rotation=90, parse_math=False)
    return figure


def _draw_runs(
    axes: Axes, rows: Sequence[Row], step_sizes: Mapping[str, str], column: str, cooldown_steps: int
) -> None:
    """Draw mean and standard deviation over runs of one measure against the step."""
    ends = []
    final = max(int(row["step"]) for row in rows)
    for name, style in choose_styles(step_sizes).items():
        values: dict[int, list[float]] = {}
        for row in rows:
            if (row["mechanism"], row["step_size"]) == (name, step_sizes[name]):
                values.setdefault(int(row["step"]), []).append(float(row[column]))
        steps = sorted(values)
        means = np.array([np.mean(values[step]) for step in steps])
        stds = np.array([np.std(values[step]) for step in steps])
        every = max(1, len(steps) // 4)
        # The measurement of the last step is of models after the cool-down.
        places = [step + cooldown_steps if step == final else step for step in steps]
        (line,) = axes.plot(places, means, color=style.colour, linestyle=style.dashes)
        # A few markers tell lines apart; one at every point would hide them.
        line.set(marker=style.marker, markevery=(every // 2, every))
        text = SHORT_NAMES.get(name, name)
        ends.append(LineEnd(text, float(means[-1]), style.colour, style.marker, style.dashes))
        low, high = means - stds, means + stds
        axes.fill_between(places, low, high, color=style.colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="step", ylabel=_MEASURE_LABELS[column])
    # The same in all panels, and none in the cool-down, which has no steps.
    ticks = MaxNLocator(5, integer=True).tick_values(0, final)
    axes.set_xticks([tick for tick in ticks if 0 <= tick <= final])
    axes.yaxis.set_major_locator(MaxNLocator(6))
    if cooldown_steps:
        axes.axvspan(final, final + cooldown_steps, color=PALE, alpha=0.3, linewidth=0)
        text_style: dict[str, Any] = {"ha": "right", "va": "top", "color": INK, "fontsize": "small"}
        units: Any = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        axes.annotate("cool-down", (final, 1), (-2, -2), **units, **text_style)
    # Lines end at the right edge, next to their names.
    axes.margins(x=0)
    # Fixed, because labels are placed by these limits.
    axes.set_ylim(axes.get_ylim())
    label_ends(axes, ends)
