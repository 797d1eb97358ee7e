"""Style of figures: one colour and one name per mechanism everywhere, and file formats."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from corn.errors import FileFormatError

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
LINK = MECHANISM_COLOURS["corn"]

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
