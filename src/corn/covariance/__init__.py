"""Covariance design: the joint noise of all agents, and a bound on how much better it could be."""

from corn.covariance.baselines import (
    Decor,
    Ldp,
    OwnMechanism,
    ZeroSum,
)
from corn.covariance.decomposition import Decomposition, expose
from corn.covariance.design import (
    MECHANISMS,
    Corn,
    Mechanism,
    MechanismLike,
    design,
    read_mechanism,
    read_mechanisms,
)
from corn.covariance.objective import (
    ONE_STEP,
    FiniteRun,
    GivenObjective,
    Horizon,
    Objective,
    ObjectiveLike,
    default_objective,
)
from corn.covariance.problem import Design, DesignProblem, MechanismName
from corn.covariance.threat import (
    DEFAULT_THREAT,
    EAVESDROPPER,
    SeedGroups,
    ThreatModel,
)

__all__ = [
    "DEFAULT_THREAT",
    "EAVESDROPPER",
    "MECHANISMS",
    "ONE_STEP",
    "Corn",
    "Decomposition",
    "Decor",
    "Design",
    "DesignProblem",
    "FiniteRun",
    "GivenObjective",
    "Horizon",
    "Ldp",
    "Mechanism",
    "MechanismLike",
    "MechanismName",
    "Objective",
    "ObjectiveLike",
    "OwnMechanism",
    "SeedGroups",
    "ThreatModel",
    "ZeroSum",
    "default_objective",
    "design",
    "expose",
    "read_mechanism",
    "read_mechanisms",
]
