"""Covariance design: which joint noise the agents draw, and how far from the best it can be."""

from corn.covariance.closed_form import CirculantDesign, design_circulant
from corn.covariance.decomposition import Decomposition
from corn.covariance.design import MECHANISMS, design
from corn.covariance.exposure import Exposure, expose
from corn.covariance.feasibility import invert_covariance, is_private
from corn.covariance.groups import find_communities, split_agents
from corn.covariance.objective import ONE_STEP, FiniteRun, GivenObjective, Horizon, Objective
from corn.covariance.sdp import SdpSettings
from corn.covariance.solution import Design, Mechanism, Status
from corn.covariance.threat import EAVESDROPPER, ThreatModel

__all__ = [
    "EAVESDROPPER",
    "MECHANISMS",
    "ONE_STEP",
    "CirculantDesign",
    "Decomposition",
    "Design",
    "Exposure",
    "FiniteRun",
    "GivenObjective",
    "Horizon",
    "Mechanism",
    "Objective",
    "SdpSettings",
    "Status",
    "ThreatModel",
    "design",
    "design_circulant",
    "expose",
    "find_communities",
    "invert_covariance",
    "is_private",
    "split_agents",
]
