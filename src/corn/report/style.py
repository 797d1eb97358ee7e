"""Style of figures: one colour and one name per mechanism, direct labels, file formats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from corn.errors import FileFormatError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette: its colours stay distinct under the common kinds of colour blindness.
MECHANISM_COLOURS = {
    "corn": "#0072B2",
    "decor": "#E69F00",
    "ldp": "#D55E00",
    "zero-sum": "#CC79A7",
    "central": "#009E73",
    "none": "#7F7F7F",
}
MECHANISM_NAMES = {
    "corn": "CorN",
    "decor": "DECOR (pairwise)",
    "zero-sum": "zero-sum + local",
    "ldp": "LDP (independent)",
    "central": "central DP (trusted server)",
    "none": "no noise",
}
SHORT_NAMES = {
    "corn": "CorN",
    "decor": "DECOR",
    "zero-sum": "zero-sum",
    "ldp": "LDP",
    "central": "trusted server",
    "none": "no noise",
}
"""Names for the ends of lines, where there is little room."""
OWN_COLOUR = "#882255"
"""The colour of mechanisms of the user's own."""

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


def check_figure_name(path: Path) -> None:
    """Raise unless the suffix of a file name is that of a format for figures."""
    if path.suffix not in FIGURE_SUFFIXES:
        raise FileFormatError(f"{path}: a figure's name must end in {', '.join(FIGURE_SUFFIXES)}")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of its suffix; create the directory if it is missing."""
    check_figure_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


_LINE_HEIGHT = 1.3  # of the font's size
_AXES_SHARE = 0.8  # of the figure's height, which the layout gives to the axes


class LineEnd(NamedTuple):
    """A line's name, the height at which it ends, and its colour."""

    text: str
    y: float
    colour: str
    is_strong: bool = False


def label_ends(axes: Axes, ends: Sequence[LineEnd], *, font_size: float = 9.0) -> None:
    """Write the name of each line to the right of the axes, next to where the line ends.

    The limits of the axes must have been set. Names that would overlap are moved apart.
    """
    figure_height = axes.get_figure(root=True).get_figheight()  # type: ignore[union-attr]
    # Points are 1/72 inch. The layout has not run yet, so that the height of the axes is estimated.
    distance = font_size * _LINE_HEIGHT / (72 * figure_height * _AXES_SHARE)
    # Through display coordinates, so that logarithmic axes are accounted for.
    to_fraction = axes.transData + axes.transAxes.inverted()
    left = axes.get_xlim()[0]
    wanted = [float(to_fraction.transform((left, end.y))[1]) for end in ends]
    for end, height in zip(ends, spread_apart(wanted, distance), strict=True):
        axes.annotate(
            end.text,
            (1.015, height),
            xycoords="axes fraction",
            va="center",
            color=darken(end.colour),
            fontsize=font_size,
            fontweight="bold" if end.is_strong else "normal",
            parse_math=False,
        )


def spread_apart(wanted: Sequence[float], distance: float) -> list[float]:
    """Return heights in the same order, near the wanted ones in [0, 1] and ``distance`` apart.

    >>> [round(height, 2) for height in spread_apart([0.5, 0.51, 0.9], 0.1)]
    [0.46, 0.56, 0.9]
    """
    order = np.argsort(wanted, kind="stable")
    # Groups of labels that touch each other move as one, centred on where they want to be.
    groups: list[tuple[float, int]] = []
    for height in np.clip(np.asarray(wanted, dtype=np.float64)[order], 0.0, 1.0):
        centre, count = float(height), 1
        # A group of k labels takes k distances. A merged group may touch the one before it in turn.
        while groups and centre - groups[-1][0] < distance * (count + groups[-1][1]) / 2:
            other, size = groups.pop()
            centre = (centre * count + other * size) / (count + size)
            count += size
        groups.append((centre, count))
    placed = [
        centre + distance * (k - (count - 1) / 2) for centre, count in groups for k in range(count)
    ]
    result = [0.0] * len(placed)
    for place, height in zip(order, placed, strict=True):
        # Back to the caller's order.
        result[place] = height
    return result
