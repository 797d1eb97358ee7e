"""One result from the folders of all agents, in the format of a simulation, by the same measure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from corn.distributed.folders import Folders
from corn.distributed.half_step import torch_type
from corn.distributed.recording import make_trial
from corn.distributed.settings import RunSettings
from corn.distributed.tables import read_rows
from corn.errors import FileFormatError
from corn.learn.metrics import PARTS, Row, measure
from corn.learn.problem import TrainingProblem
from corn.learn.result import Result, SweepStatus
from corn.learn.settings import SweepSettings
from corn.learn.step import StepStatistics
from corn.plan import Plan

_STATISTICS = ("gradient_norm", "fraction_clipped", "noise_norm")


def merge_runs(
    plan: Plan,
    problem: TrainingProblem,
    folders: Mapping[int, Folders],
    *,
    settings: RunSettings,
    notes: Sequence[str] = (),
    show_private: bool = False,
) -> Result:
    """Measure the models that agents shared on public data, as a simulation would.

    With ``show_private`` measure them on the agents' data and average what agents keep to
    themselves, too; nothing private is read otherwise. A step counts if an agent that lasted to the
    end kept it; those that were lost count as long as they were there. ε is that of the agent that
    spent most, by its ledger.
    """
    tables = {agent: read_rows(own.shared / "metrics.csv") for agent, own in folders.items()}
    private = {
        agent: read_rows(own.private / "metrics.csv")
        for agent, own in folders.items()
        if show_private
    }
    last = max((max(table, default=0) for table in tables.values()), default=0)
    where = SweepSettings(settings.steps_of(plan), dtype=plan.dtype)
    _, parts = problem.place(where, max_train_samples=10_000)
    if not show_private:
        public = PARTS[1:] if problem.has_public_parts else ()
        parts = {name: part for name, part in parts.items() if name in public}
    trial = make_trial(plan, settings.schedule)
    seed = settings.seed if settings.rehearsal_seed is None else settings.rehearsal_seed
    rows: list[Row] = []
    for step in sorted({step for table in tables.values() for step in table if step <= last}):
        present = [agent for agent in sorted(folders) if step in tables[agent]]
        own = [tables[agent][step] for agent in present]
        models = torch.stack([read_model(folders[agent].shared, step, plan) for agent in present])
        (row,) = measure(
            problem.task,
            models.view(1, len(present), 1, -1),
            (trial,),
            seeds=(seed,),
            step=step,
            parts=parts,
            statistics=_average([table[step] for table in private.values() if step in table]),
            is_simulated=False,
        )
        spent = [float(one["epsilon"]) for one in own]
        rows.append(row | {"epsilon": max(spent), "epsilon_least": min(spent)})
    status: SweepStatus = "complete" if last == settings.steps_of(plan) else "interrupted"
    final = _final_models(plan, folders, tables, last, problem.task.num_parameters)
    every = (*problem.notes, *notes)
    return Result(
        (trial,), (seed,), final, tuple(rows), last, status, {}, every, is_simulated=False
    )


def read_model(folder: Path, step: int, plan: Plan) -> Tensor:
    """The model that an agent shared after a step."""
    path = folder / "models" / f"step-{step}.bin"
    try:
        values = np.fromfile(path, dtype=plan.dtype)
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error
    return torch.from_numpy(values)


def _average(rows: Sequence[Row]) -> StepStatistics | None:
    if not rows:
        return None
    means = (sum(float(row[name]) for row in rows) / len(rows) for name in _STATISTICS)
    return StepStatistics(*(torch.tensor([[mean]]) for mean in means))


def _final_models(
    plan: Plan,
    folders: Mapping[int, Folders],
    tables: Mapping[int, Mapping[int, Row]],
    last: int,
    num_parameters: int,
) -> Tensor:
    """The models at the end, shape (1, n, d); NaN for agents that are not there any more."""
    final = torch.full((1, plan.num_agents, num_parameters), math.nan, dtype=torch_type(plan))
    for agent, own in folders.items():
        if last in tables[agent]:
            final[0, agent] = read_model(own.shared, last, plan)
    return final
