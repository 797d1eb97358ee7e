"""Covariance design: the joint noise of all agents, and a bound on how much better it could be."""

from corn.covariance.baselines import (
    Central,
    Decor,
    Ldp,
    NoNoise,
    OwnMechanism,
    ZeroSum,
    read_mechanism,
)
from corn.covariance.decomposition import Decomposition, Exposure, expose
from corn.covariance.design import MECHANISMS, Auto, Corn, Mechanism, Solver, design
from corn.covariance.dual import ClosedForm, Dual
from corn.covariance.feasibility import invert_covariance, is_private
from corn.covariance.first_order import FirstOrder
from corn.covariance.low_rank import LowRank
from corn.covariance.objective import (
    ONE_STEP,
    Horizon,
    default_objective,
)
from corn.covariance.problem import Design, DesignProblem, MechanismName, Status
from corn.covariance.threat import (
    DEFAULT_THREAT,
    EAVESDROPPER,
    SeedGroups,
    ThreatModel,
    split_agents,
)

__all__ = [
    "DEFAULT_THREAT",
    "EAVESDROPPER",
    "MECHANISMS",
    "ONE_STEP",
    "Auto",
    "Central",
    "ClosedForm",
    "Corn",
    "Decomposition",
    "Decor",
    "Design",
    "DesignProblem",
    "Dual",
    "Exposure",
    "FirstOrder",
    "Horizon",
    "Ldp",
    "LowRank",
    "Mechanism",
    "MechanismName",
    "NoNoise",
    "OwnMechanism",
    "SeedGroups",
    "Solver",
    "Status",
    "ThreatModel",
    "ZeroSum",
    "default_objective",
    "design",
    "expose",
    "invert_covariance",
    "is_private",
    "read_mechanism",
    "split_agents",
]
