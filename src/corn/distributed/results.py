"""Result of one agent of a run, and how it ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from corn.distributed.requirements import ReleaseTotal
from corn.errors import CornError, StoppedByUserError
from corn.learn.metrics import Row
from corn.transport import Traffic


class StopReason(StrEnum):
    """The reason for an end before the last step."""

    NONE = "none"
    INTERRUPTED = "interrupted"
    LOSS = "loss"
    DIVERGED = "diverged"
    BUDGET_SPENT = "budget spent"
    VOID_SUMS = "void sums"


@dataclass(frozen=True)
class StopNotice:
    """An end before the last step, because of an agent; its notes say more."""

    step: int = 0
    agent: int = 0
    reason: StopReason = StopReason.NONE

    def __str__(self) -> str:
        """Return the reason and the agent; empty without one."""
        return "" if self.reason is StopReason.NONE else f"{self.reason} (agent {self.agent})"


NO_STOP = StopNotice()


class RunStatus(StrEnum):
    """The end of a run, of one agent or of all."""

    COMPLETE = "complete"
    PARTIAL = "partial"  # all steps, but agents were lost
    INTERRUPTED = "interrupted"  # fewer than all steps
    FAILED = "failed"  # without a result


def judge_status(*, all_steps: bool, lost: Collection[int]) -> RunStatus:
    """Return the status of a run that has a result."""
    if not all_steps:
        return RunStatus.INTERRUPTED
    return RunStatus.PARTIAL if lost else RunStatus.COMPLETE


# ``followed``: another agent refused to start, or the store was gone. ``interrupted``: a person
# stopped it before the first step. ``ended``: its process ended without a report. ``suspended``:
# the launcher ended its suspended process.
FailureKind: TypeAlias = Literal["error", "followed", "interrupted", "ended", "suspended"]


@dataclass(frozen=True)
class Failure:
    """The end of an agent without a result, in a line that begins with the agent's number.

    A private message is for the agent's owner alone, as it may depend on data.
    """

    kind: FailureKind
    message: str = ""
    is_private: bool = False


@dataclass(frozen=True, eq=False)
class AgentResult:
    """The result of one agent, which did ``num_steps`` steps of the run, from ``first_step`` on.

    Attributes:
        lost: agents lost on the way, and the step at which each loss was first noticed.
        cut_links: neighbours that took part to the end though the link to them broke, and the step.
        parameters: the model, shape (d,). Empty in a report to the launcher, which reads files.
        rows: measurements, in the columns of a simulation; for the agent's owner, and empty in a
            report to the launcher.
        measured: the part of the last measurement that others may see.
        private_notes: for the owner, as is ``total``, of all releases of the agent's data.
        simulation: why ε is simulated, see ``TrainingProblem``; empty if it is a promise.
    """

    agent: int
    status: RunStatus
    first_step: int = 0
    num_steps: int = 0
    stop: StopNotice = NO_STOP
    lost: Mapping[int, int] = field(default_factory=dict)
    cut_links: Mapping[int, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    traffic: Mapping[int, Traffic] = field(default_factory=dict, repr=False)
    failure: Failure | None = None
    parameters: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    rows: tuple[Row, ...] = field(default=(), repr=False)
    measured: Row = field(default_factory=dict, repr=False)
    private_notes: tuple[str, ...] = field(default=(), repr=False)
    total: ReleaseTotal | None = field(default=None, repr=False)
    simulation: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the public part, as plain data."""
        return {
            "agent": self.agent,
            "first_step": self.first_step,
            "num_steps": self.num_steps,
            "status": self.status.value,
            "stop": str(self.stop),
            "stop_reason": self.stop.reason.value,
            "lost": {str(agent): step for agent, step in self.lost.items()},
            "cut_links": {str(agent): step for agent, step in self.cut_links.items()},
            "notes": list(self.notes),
            "traffic": {str(peer): asdict(own) for peer, own in self.traffic.items()},
        }


def require_done(
    results: Collection[AgentResult], num_steps: int, *, was_interrupted: bool = False
) -> None:
    """Raise if a run was stopped before its last step, by a person or by its agents.

    ``was_interrupted`` marks a stop that a person requested here, even if it came too late.
    """
    stops = {own.stop for own in results}
    kept = "results so far are written; --resume continues from the newest checkpoint"
    if was_interrupted or any(stop.reason is StopReason.INTERRUPTED for stop in stops):
        raise StoppedByUserError(f"interrupted after step {num_steps}; {kept}")
    done = (StopReason.NONE, StopReason.BUDGET_SPENT)
    if forced := {str(stop) for stop in stops if stop.reason not in done}:
        why = "; ".join(sorted(forced))
        raise CornError(f"stopped after {num_steps} steps: {why}; {kept}")
