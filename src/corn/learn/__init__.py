"""Learning: DSGD with clipped, noisy gradients, batched over agents, mechanisms and seeds.

- ``train``: your own model, loss and per-agent data sets.
- ``make_workload``, ``tune``, ``run_sweep``: the paper's tasks, many runs at once.
- ``Method``: which noise is added to what; ``Trial``: with which step size.

Names are imported when first used: torch takes seconds, which ``corn graph`` need not wait for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corn.learn.batches import AgentData as AgentData
    from corn.learn.comparison import make_methods as make_methods
    from corn.learn.comparison import select_measured as select_measured
    from corn.learn.comparison import summarize_methods as summarize_methods
    from corn.learn.method import Method as Method
    from corn.learn.method import Trial as Trial
    from corn.learn.metrics import COLUMNS as COLUMNS
    from corn.learn.metrics import PRIVATE_COLUMNS as PRIVATE_COLUMNS
    from corn.learn.metrics import SHARED_COLUMNS as SHARED_COLUMNS
    from corn.learn.metrics import Row as Row
    from corn.learn.names import METHOD_NAMES as METHOD_NAMES
    from corn.learn.names import MODELS as MODELS
    from corn.learn.names import WORKLOADS as WORKLOADS
    from corn.learn.partition import PartitionSpec as PartitionSpec
    from corn.learn.partition import partition_dirichlet as partition_dirichlet
    from corn.learn.partition import partition_iid as partition_iid
    from corn.learn.partition import partition_shards as partition_shards
    from corn.learn.problem import TrainingProblem as TrainingProblem
    from corn.learn.result import Result as Result
    from corn.learn.schedule import Constant as Constant
    from corn.learn.schedule import Cosine as Cosine
    from corn.learn.schedule import InverseSqrt as InverseSqrt
    from corn.learn.schedule import Schedule as Schedule
    from corn.learn.schedule import make_schedule as make_schedule
    from corn.learn.settings import SweepSettings as SweepSettings
    from corn.learn.simulation import Simulation as Simulation
    from corn.learn.sweep import run_sweep as run_sweep
    from corn.learn.training import load_parameters as load_parameters
    from corn.learn.training import planned_rounds as planned_rounds
    from corn.learn.training import train as train
    from corn.learn.tuning import STEP_SIZES as STEP_SIZES
    from corn.learn.tuning import Tuning as Tuning
    from corn.learn.tuning import make_grid as make_grid
    from corn.learn.tuning import read_tuning as read_tuning
    from corn.learn.tuning import tune as tune
    from corn.learn.workloads import Workload as Workload
    from corn.learn.workloads import make_workload as make_workload
    from corn.learn.writers import require_writers as require_writers
    from corn.learn.writers import write_table as write_table
    from corn.learn.writers import write_tensorboard as write_tensorboard

_HOMES = {
    "AgentData": "corn.learn.batches",
    "make_methods": "corn.learn.comparison",
    "select_measured": "corn.learn.comparison",
    "summarize_methods": "corn.learn.comparison",
    "Method": "corn.learn.method",
    "Trial": "corn.learn.method",
    "COLUMNS": "corn.learn.metrics",
    "PRIVATE_COLUMNS": "corn.learn.metrics",
    "SHARED_COLUMNS": "corn.learn.metrics",
    "Row": "corn.learn.metrics",
    "METHOD_NAMES": "corn.learn.names",
    "MODELS": "corn.learn.names",
    "WORKLOADS": "corn.learn.names",
    "PartitionSpec": "corn.learn.partition",
    "partition_dirichlet": "corn.learn.partition",
    "partition_iid": "corn.learn.partition",
    "partition_shards": "corn.learn.partition",
    "TrainingProblem": "corn.learn.problem",
    "Result": "corn.learn.result",
    "Constant": "corn.learn.schedule",
    "Cosine": "corn.learn.schedule",
    "InverseSqrt": "corn.learn.schedule",
    "Schedule": "corn.learn.schedule",
    "make_schedule": "corn.learn.schedule",
    "SweepSettings": "corn.learn.settings",
    "Simulation": "corn.learn.simulation",
    "run_sweep": "corn.learn.sweep",
    "load_parameters": "corn.learn.training",
    "planned_rounds": "corn.learn.training",
    "train": "corn.learn.training",
    "STEP_SIZES": "corn.learn.tuning",
    "Tuning": "corn.learn.tuning",
    "make_grid": "corn.learn.tuning",
    "read_tuning": "corn.learn.tuning",
    "tune": "corn.learn.tuning",
    "Workload": "corn.learn.workloads",
    "make_workload": "corn.learn.workloads",
    "require_writers": "corn.learn.writers",
    "write_table": "corn.learn.writers",
    "write_tensorboard": "corn.learn.writers",
}

__all__ = sorted(_HOMES)  # one list of names is enough


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
