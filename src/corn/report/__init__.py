"""Figures, tables and pages.

- ``plot_comparison``, ``plot_training``: the ``--plot`` of one command each.
- ``save_figure``: write a figure as PNG, SVG or PDF.
"""

from corn.report.plots import (
    plot_comparison,
    plot_training,
)
from corn.report.style import MECHANISM_COLOURS, save_figure

__all__ = [
    "MECHANISM_COLOURS",
    "plot_comparison",
    "plot_training",
    "save_figure",
]
