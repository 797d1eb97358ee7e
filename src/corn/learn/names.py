"""Workloads, models and methods by name, and what is usual for them; imports nothing heavy."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from corn.covariance import MechanismName
from corn.learn.schedule import ScheduleName

WorkloadName: TypeAlias = Literal["quadratic", "a9a", "mnist", "digits", "breast-cancer"]
ModelName: TypeAlias = Literal["linear", "network", "cnn"]

WORKLOADS: tuple[str, ...] = get_args(WorkloadName)
METHOD_NAMES: tuple[str, ...] = (*get_args(MechanismName), "unclipped")
MODELS: tuple[str, ...] = get_args(ModelName)

USUAL_BATCH_SIZE = 128


def usual_schedule(workload: str) -> ScheduleName:
    """How the paper's step sizes go on: with 1/√t for the quadratic, constant for data sets."""
    return "inverse-sqrt" if workload == "quadratic" else "constant"
