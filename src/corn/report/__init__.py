"""Figures, tables and pages."""

from corn.report.figures import (
    MECHANISM_COLOURS,
    figure_style,
    plot_comparison,
    plot_training,
    save_figure,
)

__all__ = ["MECHANISM_COLOURS", "figure_style", "plot_comparison", "plot_training", "save_figure"]
