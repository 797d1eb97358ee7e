"""Figures and tables for people."""

from corn.report.networks import plot_network
from corn.report.style import MECHANISM_COLOURS, save_figure

__all__ = ["MECHANISM_COLOURS", "plot_network", "save_figure"]
