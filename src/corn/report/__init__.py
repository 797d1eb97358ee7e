"""Figures and tables for people."""

from corn.report.designs import plot_comparison, plot_design
from corn.report.networks import plot_network
from corn.report.privacy import plot_privacy
from corn.report.style import MECHANISM_COLOURS, MECHANISM_NAMES, save_figure

__all__ = [
    "MECHANISM_COLOURS",
    "MECHANISM_NAMES",
    "plot_comparison",
    "plot_design",
    "plot_network",
    "plot_privacy",
    "save_figure",
]
