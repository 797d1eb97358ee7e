"""One result from the folders of all agents, in the format of a simulation, by the same measure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from corn.distributed.half_step import torch_type
from corn.distributed.recording import make_variant
from corn.distributed.settings import RunSettings
from corn.distributed.tables import read_rows
from corn.errors import FileFormatError
from corn.learn.metrics import Row, measure
from corn.learn.problem import Problem
from corn.learn.result import Result, SweepStatus
from corn.learn.settings import SweepSettings
from corn.learn.step import StepStatistics
from corn.plan import Plan

_STATISTICS = ("gradient_norm", "fraction_clipped", "noise_norm")


def merge_runs(
    plan: Plan,
    problem: Problem,
    folders: Mapping[int, Path],
    *,
    settings: RunSettings,
    notes: Sequence[str] = (),
) -> Result:
    """Measure the models that agents kept, as a simulation would, and average their own numbers.

    A step counts if an agent that lasted to the end kept it; those that were lost count as long as
    they were there. ε is that of the agent that spent most, by its ledger.
    """
    tables = {agent: read_rows(folder / "metrics.csv") for agent, folder in folders.items()}
    last = max((max(table, default=0) for table in tables.values()), default=0)
    where = SweepSettings(settings.steps_of(plan), dtype=plan.dtype)
    _, parts = problem.place(where, max_train_samples=10_000)
    variant = make_variant(plan, settings.schedule)
    seed = settings.seed if settings.rehearsal_seed is None else settings.rehearsal_seed
    rows: list[Row] = []
    for step in sorted({step for table in tables.values() for step in table if step <= last}):
        present = [agent for agent in sorted(folders) if step in tables[agent]]
        own = [tables[agent][step] for agent in present]
        models = torch.stack([read_model(folders[agent], step, plan) for agent in present])
        (row,) = measure(
            problem.task,
            models.view(1, len(present), 1, -1),
            (variant,),
            seeds=(seed,),
            step=step,
            parts=parts,
            statistics=StepStatistics(*(_mean(own, name) for name in _STATISTICS)),
            is_simulated=False,
        )
        spent = [float(one["epsilon"]) for one in own]
        rows.append(row | {"epsilon": max(spent), "epsilon_least": min(spent)})
    status: SweepStatus = "complete" if last == settings.steps_of(plan) else "interrupted"
    final = _final_models(plan, folders, tables, last, problem.task.num_parameters)
    every = (*problem.notes, *notes)
    return Result(
        (variant,), (seed,), final, tuple(rows), last, status, {}, every, is_simulated=False
    )


def read_model(folder: Path, step: int, plan: Plan) -> Tensor:
    """The model that an agent kept after a step."""
    path = folder / "models" / f"step-{step}.bin"
    try:
        values = np.fromfile(path, dtype=plan.dtype)
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error
    return torch.from_numpy(values)


def _mean(rows: Sequence[Row], name: str) -> Tensor:
    return torch.tensor([[sum(float(row[name]) for row in rows) / len(rows)]])


def _final_models(
    plan: Plan,
    folders: Mapping[int, Path],
    tables: Mapping[int, Mapping[int, Row]],
    last: int,
    num_parameters: int,
) -> Tensor:
    """The models at the end, shape (1, n, d); NaN for agents that are not there any more."""
    final = torch.full((1, plan.num_agents, num_parameters), math.nan, dtype=torch_type(plan))
    for agent, folder in folders.items():
        if last in tables[agent]:
            final[0, agent] = read_model(folder, last, plan)
    return final
