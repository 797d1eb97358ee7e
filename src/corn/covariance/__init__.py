"""Covariance design: which joint noise the agents draw, and how far from the best it can be."""

from corn.covariance.closed_form import CirculantDesign, design_circulant
from corn.covariance.decomposition import Decomposition
from corn.covariance.design import MECHANISMS, design
from corn.covariance.exposure import Exposure, expose
from corn.covariance.feasibility import invert_covariance, is_private
from corn.covariance.groups import find_communities, split_agents
from corn.covariance.objective import (
    ONE_STEP,
    FiniteRun,
    GivenObjective,
    Horizon,
    Objective,
    default_objective,
)
from corn.covariance.sdp import SdpSettings
from corn.covariance.solution import Design, MechanismName, Status
from corn.covariance.threat import DEFAULT_THREAT, EAVESDROPPER, ThreatModel

__all__ = [
    "DEFAULT_THREAT",
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
    "MechanismName",
    "Objective",
    "SdpSettings",
    "Status",
    "ThreatModel",
    "default_objective",
    "design",
    "design_circulant",
    "expose",
    "find_communities",
    "invert_covariance",
    "is_private",
    "split_agents",
]
