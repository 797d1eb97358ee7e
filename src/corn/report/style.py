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
    "corn one-step": "CorN, designed for one step",
    "corn eavesdropper": "CorN, no insider",
}
OWN_COLOUR = "#882255"
"""The colour of mechanisms of the user's own."""

INK = "#333333"
PALE = "#BBBBBB"
LINK = MECHANISM_COLOURS["corn"]

FIGURE_SUFFIXES = (".png", ".svg", ".pdf")


def check_figure_name(path: Path) -> None:
    """Raise unless the suffix of a file name is that of a format for figures."""
    if path.suffix not in FIGURE_SUFFIXES:
        raise FileFormatError(f"{path}: a figure's name must end in {', '.join(FIGURE_SUFFIXES)}")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of its suffix; create the directory if it is missing."""
    check_figure_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
