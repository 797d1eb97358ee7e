"""Results of a run: one record per agent, and one table of measurements from their folders."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from corn.distributed.membership import name_agents
from corn.distributed.requirements import ReleaseTotal
from corn.distributed.settings import RunSettings
from corn.distributed.storage import Folders, read_model, read_rows
from corn.errors import CornError, StoppedByUserError
from corn.learn.mechanism import Mechanism, Trial
from corn.learn.metrics import Result, Row, measure
from corn.learn.problem import SweepSettings, TrainingProblem
from corn.learn.step import StepStatistics
from corn.plan import Plan
from corn.topology.graphs import add_names
from corn.transport import Traffic

# Enough for a score on training data; the whole of a large set would delay the result.
_MAX_TRAIN_SAMPLES = 10_000


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
    """An end before the last step, because of an agent."""

    step: int = 0
    agent: int = 0
    reason: StopReason = StopReason.NONE


NO_STOP = StopNotice()


class RunStatus(StrEnum):
    """The end of a run, of one agent or of all.

    ``complete``: all steps by all agents. ``partial``: all steps, but agents were lost.
    ``interrupted``: fewer than all steps. ``failed``: without a result.
    """

    COMPLETE = "complete"
    PARTIAL = "partial"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


def judge_status(*, all_steps: bool, lost: Collection[int]) -> RunStatus:
    """Return the status of a run that has a result.

    >>> judge_status(all_steps=True, lost=[2]).value
    'partial'
    """
    if not all_steps:
        return RunStatus.INTERRUPTED
    return RunStatus.PARTIAL if lost else RunStatus.COMPLETE


class FailureKind(StrEnum):
    """The reason why an agent has no result."""

    ERROR = "error"
    FOLLOWED = "followed"
    """Another agent refused to start, or the store was gone."""
    LOST = "lost"
    """The others went on without it."""
    INTERRUPTED = "interrupted"
    """A person stopped it before the first step."""
    ENDED = "ended"
    """Its process ended without a report."""
    SUSPENDED = "suspended"
    """Its process was suspended, and ended by the launcher."""


@dataclass(frozen=True)
class Failure:
    """The end of an agent without a result, in a line that begins with the agent's number.

    A private message is for the agent's owner alone, as it may depend on data.
    """

    kind: FailureKind
    message: str = ""
    is_private: bool = False

    def describe_publicly(self, agent: int) -> str:
        """Return the part of the failure that anyone may read."""
        hidden = f"agent {agent}: failed, and reported the reason to its owner"
        return hidden if self.is_private else self.message


def without_agent(text: str) -> str:
    """Return the text of a failure without the agent that it begins with.

    >>> without_agent("agent 3 (Lake): a message of agent 2 (Hill) is damaged")
    'a message of agent 2 (Hill) is damaged'
    """
    return re.sub(r"^agent \d+( \(.*?\))?: ", "", text)


def describe_exit(code: int | None) -> str:
    """Return the meaning of a process's exit code."""
    if code is None or code >= 0:
        return f"ended without a report (exit code {code})"
    # multiprocessing reports the number of a signal with a minus. Real-time signals have no name.
    known = {own.value: own.name for own in signal.Signals}
    return f"ended by {known.get(-code, f'signal {-code}')}"


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
            "stop": describe_stop(self.stop),
            "stop_reason": self.stop.reason.value,
            "lost": {str(agent): step for agent, step in self.lost.items()},
            "cut_links": {str(agent): step for agent, step in self.cut_links.items()},
            "notes": list(self.notes),
            # Heartbeats show how long an agent computed, and so how much data it has.
            "traffic": {
                str(peer): {name: n for name, n in asdict(own).items() if name != "heartbeats"}
                for peer, own in self.traffic.items()
            },
        }


def describe_stop(stop: StopNotice) -> str:
    """Return in a few words why a run ended before its last step; empty if it did not."""
    return {
        StopReason.NONE: "",
        StopReason.INTERRUPTED: "interrupted",
        StopReason.LOSS: f"agent {stop.agent} was lost",
        StopReason.DIVERGED: f"agent {stop.agent}'s model is not finite: try a smaller step size",
        StopReason.BUDGET_SPENT: "the release ledgers allow no more steps",
        StopReason.VOID_SUMS: "the sums of several steps were void: an agent sends wrong messages",
    }[stop.reason]


def require_done(
    results: Collection[AgentResult], num_steps: int, *, was_interrupted: bool = False
) -> None:
    """Raise if a run was stopped before its last step, by a person or by its agents.

    A run that lost agents and went on, or that a ledger ended, did what it was asked to.
    ``was_interrupted`` marks a stop that a person requested here, even if it came too late.
    """
    stops = {own.stop for own in results}
    kept = "results so far are written; --resume continues from the newest checkpoint"
    if was_interrupted or any(stop.reason is StopReason.INTERRUPTED for stop in stops):
        raise StoppedByUserError(f"interrupted after step {num_steps}; {kept}")
    done = (StopReason.NONE, StopReason.BUDGET_SPENT)
    if forced := {describe_stop(stop) for stop in stops if stop.reason not in done}:
        why = "; ".join(sorted(forced))
        raise CornError(f"stopped after {num_steps} steps: {why}; {kept}")


def raise_common_failure(results: Mapping[int, AgentResult]) -> None:
    """Raise, if no agent has a result, the failure of the first that has a reason of its own.

    Agents that could not start because of another name that agent, or lost the store with it.
    """
    # Where some agents have a result, the losses of the others are described with it.
    failures = {agent: own.failure for agent, own in results.items() if own.failure is not None}
    if len(failures) < len(results):
        return
    if not failures:
        raise CornError("no agent was started")
    # An agent that followed another's refusal has nothing of its own to report.
    causes = {a: own for a, own in failures.items() if own.kind is not FailureKind.FOLLOWED}
    failure = next(iter((causes or failures).values()))
    is_stopped = any(own.kind is FailureKind.INTERRUPTED for own in failures.values())
    raise (StoppedByUserError if is_stopped else CornError)(failure.message)


def find_missed(results: Mapping[int, AgentResult]) -> dict[int, int]:
    """Return the agents that others lost, each with the earliest step."""
    # Agents notice a loss at different steps when the lost one had sent to some and not to others.
    missed: dict[int, int] = {}
    for own in results.values():
        for agent, step in own.lost.items():
            missed[agent] = min(step, missed.get(agent, step))
    return missed


def describe_lost(results: Mapping[int, AgentResult]) -> dict[int, str]:
    """Return why each agent without a result has none, and since when; anyone may read it."""
    missed = find_missed(results)
    lost = {}
    for agent, own in sorted(results.items()):
        if own.failure is not None:
            lost[agent] = own.failure.describe_publicly(agent)
            if agent in missed:
                lost[agent] += f", missed by the others from step {missed[agent]} on"
    return lost


def describe_notes(results: Mapping[int, AgentResult]) -> list[str]:
    """Return how many agents finished, why the rest did not, and each agent's notes, each once."""
    lost = describe_lost(results)
    notes = []
    if lost:
        finished = [agent for agent in results if agent not in lost]
        who = name_agents(finished)
        notes = [f"only {len(finished)} of {len(results)} agents finished: {who}"]
    return [*notes, *lost.values(), *group_notes({a: own.notes for a, own in results.items()})]


def group_notes(notes: Mapping[int, Iterable[str]]) -> list[str]:
    """Return the notes of all agents, each text once with the agents that made it."""
    authors: dict[str, list[int]] = {}
    for agent, texts in notes.items():
        for text in texts:
            authors.setdefault(text, []).append(agent)
    return [f"{name_agents(agents)}: {text}" for text, agents in authors.items()]


def merge_results(
    plan: Plan,
    problem: TrainingProblem,
    results: Mapping[int, AgentResult],
    run: Folders,
    settings: RunSettings,
    *,
    show_private: bool = False,
) -> Result:
    """Measure the models that agents shared on public data, as a simulation would.

    With ``show_private``, measure them on the agents' data and average their private measurements
    too; nothing private is read otherwise. A step is in the table if any agent has measured it, and
    its row is of the agents that have: those that were lost count until then. ε is that of the
    agent that spent most, by its ledger.
    """
    names = plan.network.agent_names
    folders = {agent: run.of_agent(agent) for agent in sorted(results)}
    # Tables list the steps at which there is a model; all models are measured anew here.
    tables = {agent: read_rows(own.shared / "metrics.csv") for agent, own in folders.items()}
    private = [read_rows(own.private / "metrics.csv") for own in folders.values() if show_private]
    steps = sorted({step for table in tables.values() for step in table})
    sweep = SweepSettings(settings.steps_of(plan), dtype=plan.dtype)
    _, parts = problem.place(sweep, max_train_samples=_MAX_TRAIN_SAMPLES)
    # Scores on training data are computed without noise; by default no private sample is read.
    if not show_private:
        parts = {name: part for name, part in parts.items() if name in problem.public_parts}
    trial = Trial(Mechanism.from_plan(plan), settings.schedule)
    size = problem.task.num_parameters
    # Agents that are not there any more have no final model.
    final = torch.full((1, plan.num_agents, size), math.nan, dtype=sweep.torch_dtype)
    rows: list[Row] = []
    for step in steps:
        present = [agent for agent in folders if step in tables[agent]]
        models = torch.stack(
            [read_model(folders[agent].shared, step, plan, size) for agent in present]
        )
        if step == steps[-1]:
            final[0, present] = models
        (row,) = measure(
            problem.task,
            models.view(1, len(present), 1, -1),
            (trial,),
            seeds=(settings.seed,),
            step=step,
            parts=parts,
            statistics=_average([table[step] for table in private if step in table]),
            # The noise was secret, whatever the data was.
            is_simulated=False,
        )
        # ε is by releases, which only each agent's ledger knows.
        spent = [float(tables[agent][step]["epsilon"]) for agent in present]
        rows.append(row | {"epsilon": max(spent), "epsilon_least": min(spent)})
    # An agent that was cut off may have measured a later step than those that stopped.
    last = max(steps, default=0)
    is_interrupted = any(own.status is RunStatus.INTERRUPTED for own in results.values())
    is_complete = last == settings.steps_of(plan) and not is_interrupted
    return Result(
        trials=(trial,),
        seeds=(settings.seed,),
        parameters=final,
        rows=tuple(rows),
        num_steps=last,
        status="complete" if is_complete else "interrupted",
        notes=tuple(add_names(text, names) for text in describe_notes(results)),
        simulation=problem.simulation,
    )


def _average(rows: Sequence[Row]) -> StepStatistics | None:
    if not rows:
        return None
    names = ("gradient_norm", "fraction_clipped", "noise_norm")
    means = (sum(float(row[name]) for row in rows) / len(rows) for name in names)
    return StepStatistics(*(torch.tensor([[mean]]) for mean in means))
