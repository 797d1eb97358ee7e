"""Experiments: the figures of the paper, what goes past them, and a check of what is said of them.

- ``reproduce``: compute the figures asked for; interrupted, it goes on where it stopped.
- ``FULL`` and ``QUICK``: the paper's settings, and a few minutes' worth of them.
- ``Claim``: a statement about the results, and whether it holds.
"""

from corn.experiments.claims import Claim, check_claims, check_panel
from corn.experiments.figures import FIGURES, make_studies
from corn.experiments.methods import METHODS, PAPER_METHODS, MethodSpec
from corn.experiments.reproduction import Reproduction, list_cells, reproduce
from corn.experiments.scale import FULL, QUICK, Scale, Training
from corn.experiments.store import CellStore
from corn.experiments.studies import Panel, Point

__all__ = [
    "FIGURES",
    "FULL",
    "METHODS",
    "PAPER_METHODS",
    "QUICK",
    "CellStore",
    "Claim",
    "MethodSpec",
    "Panel",
    "Point",
    "Reproduction",
    "Scale",
    "Training",
    "check_claims",
    "check_panel",
    "list_cells",
    "make_studies",
    "reproduce",
]
