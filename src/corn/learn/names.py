"""The names by which workloads, models and contenders are asked for; imports nothing heavy."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from corn.covariance import Mechanism

WorkloadName: TypeAlias = Literal["quadratic", "a9a", "mnist", "digits", "breast-cancer"]
ModelName: TypeAlias = Literal["linear", "network", "cnn"]

WORKLOADS: tuple[str, ...] = get_args(WorkloadName)
CONTENDERS: tuple[str, ...] = (*get_args(Mechanism), "unclipped")
MODELS: tuple[str, ...] = get_args(ModelName)
