"""Experiments: the figures of the paper, further methods, and verdicts on claims about them.

- ``reproduce``: compute figures; after an interruption the same call resumes.
- ``FULL`` and ``QUICK``: the paper's settings, and reduced ones that take a few minutes.
- ``Claim``: a statement about the results, and whether it holds.
"""

from corn.experiments.cells import CellStore
from corn.experiments.claims import Claim, check_claims, check_panel
from corn.experiments.figures import FIGURES, make_studies
from corn.experiments.methods import METHODS, PAPER_METHODS, MethodSpec
from corn.experiments.reproduction import Reproduction, list_cells, reproduce
from corn.experiments.scale import FULL, QUICK, Scale, Training
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
