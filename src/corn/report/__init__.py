"""Figures, tables and pages.

- ``plot_comparison``, ``plot_training``: the ``--plot`` of one command each.
- ``figure_style``: column width, font size, or a style file of Matplotlib of your own.
- ``save_figure``: write a figure as PNG, SVG or PDF, with fonts that journals accept.
"""

from corn.report.figures import (
    MECHANISM_COLOURS,
    figure_style,
    plot_comparison,
    plot_training,
    save_figure,
)

__all__ = ["MECHANISM_COLOURS", "figure_style", "plot_comparison", "plot_training", "save_figure"]
