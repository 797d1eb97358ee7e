"""Learning: DSGD with clipped, noisy gradients, batched over agents, mechanisms and seeds."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corn.learn.batches import AgentData as AgentData
    from corn.learn.consortium import load_consortium as load_consortium
    from corn.learn.datasets import Dataset as Dataset
    from corn.learn.datasets import load_dataset as load_dataset
    from corn.learn.file_data import FileWorkload as FileWorkload
    from corn.learn.file_data import parse_bounds as parse_bounds
    from corn.learn.mechanism import Mechanism as Mechanism
    from corn.learn.mechanism import Trial as Trial
    from corn.learn.mechanism import make_mechanisms as make_mechanisms
    from corn.learn.metrics import COLUMNS as COLUMNS
    from corn.learn.metrics import PRIVATE_COLUMNS as PRIVATE_COLUMNS
    from corn.learn.metrics import SHARED_COLUMNS as SHARED_COLUMNS
    from corn.learn.metrics import TRACED as TRACED
    from corn.learn.metrics import Result as Result
    from corn.learn.metrics import Row as Row
    from corn.learn.metrics import write_table as write_table
    from corn.learn.partition import partition_samples as partition_samples
    from corn.learn.problem import SweepSettings as SweepSettings
    from corn.learn.problem import TrainingProblem as TrainingProblem
    from corn.learn.problem import make_problem as make_problem
    from corn.learn.schedule import Constant as Constant
    from corn.learn.schedule import Cosine as Cosine
    from corn.learn.schedule import InverseSqrt as InverseSqrt
    from corn.learn.schedule import make_schedule as make_schedule
    from corn.learn.simulation import Simulation as Simulation
    from corn.learn.sweep import run_sweep as run_sweep
    from corn.learn.trained import ModelPromise as ModelPromise
    from corn.learn.trained import TrainedModel as TrainedModel
    from corn.learn.trained import load_model as load_model
    from corn.learn.trained import predict_table as predict_table
    from corn.learn.training import compare as compare
    from corn.learn.training import load_parameters as load_parameters
    from corn.learn.training import train as train
    from corn.learn.tuning import Comparison as Comparison
    from corn.learn.tuning import TuningPrice as TuningPrice
    from corn.learn.tuning import price_tuning as price_tuning
    from corn.learn.tuning import tune as tune
    from corn.learn.update import Clipping as Clipping
    from corn.learn.update import LocalRule as LocalRule
    from corn.learn.update import MixingRule as MixingRule
    from corn.learn.workloads import Workload as Workload

# Importing torch takes seconds, so a name is loaded when it is first used.
_NAMES = {
    "batches": "AgentData",
    "consortium": "load_consortium",
    "datasets": "Dataset load_dataset",
    "mechanism": "Trial Mechanism make_mechanisms",
    "metrics": "COLUMNS PRIVATE_COLUMNS Result Row SHARED_COLUMNS TRACED write_table",
    "file_data": "FileWorkload parse_bounds",
    "partition": "partition_samples",
    "problem": "SweepSettings TrainingProblem make_problem",
    "schedule": "Constant Cosine InverseSqrt make_schedule",
    "simulation": "Simulation",
    "sweep": "run_sweep",
    "training": "compare load_parameters train",
    "trained": "ModelPromise TrainedModel load_model predict_table",
    "tuning": "Comparison TuningPrice price_tuning tune",
    "update": "Clipping LocalRule MixingRule",
    "workloads": "Workload",
}
_MODULES = {name: f"corn.learn.{module}" for module, own in _NAMES.items() for name in own.split()}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
