"""Names and defaults of workloads, models and mechanisms, in a module without heavy imports."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from corn.learn.schedule import ScheduleName

WorkloadName: TypeAlias = Literal[
    "quadratic", "a9a", "mnist", "digits", "breast-cancer", "synthetic"
]
ModelName: TypeAlias = Literal["linear", "network", "cnn"]

WORKLOADS: tuple[str, ...] = get_args(WorkloadName)

PAPER_PARTITION = "dirichlet:10"
"""The partition of samples over agents in the paper's experiments."""

USUAL_BATCH_SIZE = 128
"""Samples per mini-batch in the paper's experiments."""


def usual_schedule(workload: str) -> ScheduleName:
    """Return the paper's step-size schedule: 1/√t for the quadratic, constant for data sets."""
    return "inverse-sqrt" if workload == "quadratic" else "constant"
