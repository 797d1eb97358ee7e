"""Journal of an agent's run: measurements, notes, checkpoints, and the ε spent.

Measurements have the columns of a simulation. Models are public, as every message is, and so is
everything computed from them and public data. The promise does not cover measurements on the
agent's own data: those go to the agent's private folder.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import final

from torch import Tensor

from corn.distributed.keyring import Ledger
from corn.distributed.logs import log_event
from corn.distributed.messages import Header
from corn.distributed.requirements import ReleaseTotal
from corn.distributed.results import RunStatus
from corn.distributed.settings import RunSettings
from corn.distributed.state import AgentState, LocalState, ObservedRounds, StateReporter
from corn.distributed.storage import (
    AgentCheckpoint,
    CheckpointFolder,
    Folders,
    append_private_note,
    write_model,
)
from corn.errors import CornError
from corn.learn.mechanism import Mechanism, Trial
from corn.learn.metrics import (
    COLUMNS,
    PARTS,
    SHARED_COLUMNS,
    Row,
    Samples,
    measure,
    write_table,
)
from corn.learn.step import StepStatistics
from corn.learn.sweep import Interruption
from corn.learn.tasks import Task
from corn.plan import Plan
from corn.privacy import PrivacyBudget
from corn.privacy.floats import account_floats

_BLOCKS_OF_RELEASES = 20
_STATISTICS = ("gradient_norm", "fraction_clipped", "noise_norm")


@dataclass(frozen=True)
class Reports:
    """Callbacks for news of a run while it lasts, and the request to stop it.

    Private notes depend on the agent's data, and so does ``LocalState``. The total of all
    releases is for the agent's owner alone; the open ledger, to read, comes before the first
    release. States come at most ten times a second. Messages come with
    the nonce of the run, for audits; they cost a call per mixing round.
    """

    on_note: Callable[[str], None] | None = None
    interruption: Interruption | None = None
    on_private_note: Callable[[str], None] | None = None
    on_total: Callable[[ReleaseTotal], None] | None = None
    on_state: Callable[[AgentState, LocalState], None] | None = None
    on_message: Callable[[bytes, Header, Tensor], None] | None = None
    on_ledger: Callable[[Ledger], None] | None = None


@dataclass(frozen=True, eq=False)
class EvaluationData:
    """Samples to measure on.

    Attributes:
        task: model and loss.
        parts: samples by ``train`` (the agent's own), ``validation`` and ``test``.
        public_parts: those of ``validation`` and ``test`` that are public; see ``TrainingProblem``.
        private_notes: facts about the agent's data, for its owner.
        simulation: why ε is simulated; see ``TrainingProblem``.
    """

    task: Task
    parts: Mapping[str, Samples]
    public_parts: tuple[str, ...] = ()
    private_notes: tuple[str, ...] = ()
    simulation: str = ""

    def select_shared(self, row: Row) -> Row:
        """Return the part of a measurement that others may see."""
        # This is an allow list by column; scores on private samples are removed in addition.
        hidden = tuple(f"{part}_" for part in PARTS[1:] if part not in self.public_parts)
        return {name: math.nan if name.startswith(hidden) else row[name] for name in SHARED_COLUMNS}


@dataclass(frozen=True)
class ReleaseAccount:
    """The ε that an agent has spent under a plan.

    Attributes:
        budget: the plan's promise to this agent.
        precision: the largest [R⁻¹]_ii of any release, against the worst coalition.
    """

    budget: PrivacyBudget
    precision: float

    def epsilon(self, num_releases: int) -> float:
        """Return ε after so many releases, at the budget's δ."""
        if num_releases == 0:
            return 0.0
        # With the loss by floating point included: the ε that is printed must be the one that is
        # proved.
        return float(account_floats([self.precision], self.budget, num_steps=num_releases)[0])

    def bound_epsilon(self, num_releases: int) -> float:
        """Return ε after at least so many releases: those to the end of a twentieth of the plan.

        Accounting of Poisson sampling takes as long as several steps, so that the ε of every step
        would delay training. This one changes twenty times in a run.
        """
        total = self.budget.num_steps
        block = math.ceil(total / _BLOCKS_OF_RELEASES)
        # Rounded up to a block, as ε grows with releases: the bound is never below the ε spent.
        return self._epsilon_of_block(min(total, block * math.ceil(num_releases / block)))

    @cached_property
    def _epsilon_of_block(self) -> Callable[[int], float]:
        # Per instance: a cache on the method itself would keep every account alive.
        return cache(self.epsilon)


@final
class Journal:
    """Writer of everything that an agent keeps of its run.

    Args:
        plan: what is run.
        settings: how.
        agent: this agent's number.
        data: what to measure on.
        account: what releases cost.
        folders: this agent's; None writes nothing.
        count_releases: returns how many releases the ledger has counted.
        read_memory: returns the average of the agent's releases, if it has momentum.
        count_bytes: returns how many bytes were sent so far.
        reports: callbacks.
    """

    def __init__(
        self,
        plan: Plan,
        settings: RunSettings,
        *,
        agent: int,
        data: EvaluationData,
        account: ReleaseAccount,
        folders: Folders | None,
        count_releases: Callable[[], int],
        read_memory: Callable[[], Tensor | None],
        count_bytes: Callable[[], int],
        reports: Reports,
    ) -> None:
        self._plan, self._agent = plan, agent
        self._settings, self._data, self._account = settings, data, account
        # Privacy is counted here, by releases; for the table this run is one without a promise.
        self._trial = Trial(Mechanism.non_private(name=plan.mechanism), settings.schedule)
        self._central_ratio = plan.central_ratio
        self._steps = settings.evaluation_steps(plan)
        self._folders, self._reports = folders, reports
        self._count_releases = count_releases
        self._read_memory = read_memory
        self._checkpoints = None
        if folders is not None:
            self._checkpoints = CheckpointFolder(
                folders.private, plan, agent, is_rehearsal=settings.is_rehearsal
            )
        # With gossip, agents may be n steps apart, and resume from a step that they have in common.
        self._num_kept = 3 + math.ceil(plan.num_agents / settings.checkpoint_every)
        self._reporter = StateReporter(
            plan,
            settings,
            agent=agent,
            budget=account.budget,
            bound_epsilon=account.bound_epsilon,
            simulation=data.simulation,
            folders=folders,
            count_releases=count_releases,
            count_bytes=count_bytes,
            on_state=reports.on_state,
        )
        self._saves = True
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.private_notes: list[str] = []

    def observe(self, rounds: ObservedRounds) -> None:
        """Read losses and waits from the rounds of training from now on."""
        self._reporter.rounds = rounds

    def note(self, text: str) -> None:
        """Record an event that anyone may read."""
        self.notes.append(text)
        log_event(self._agent, "note", text, level=logging.WARNING)
        if self._reports.on_note:
            self._reports.on_note(text)

    def note_privately(self, text: str) -> None:
        """Record an event that depends on the agent's data, for its owner alone."""
        self.private_notes.append(text)
        log_event(self._agent, "note", text, level=logging.WARNING, is_private=True)
        if self._folders is not None:
            with _naming_unwritable(self._folders.private):
                append_private_note(self._folders.private, text)
        if self._reports.on_private_note:
            self._reports.on_private_note(text)

    def record_start(self, step: int, parameters: Tensor, earlier: Sequence[Row] = ()) -> None:
        """Measure before the first step, if asked to; ``earlier`` are rows of a run before."""
        # Later rows are of steps that are run again, under new noise.
        self.rows = [row for row in earlier if int(row["step"]) <= step]
        # A run that resumes has measured this step before it stopped.
        if step in self._steps and step not in {row["step"] for row in self.rows}:
            self._measure(step, parameters, None)
        self._save(step, parameters)
        self._reporter.report_start(step, self._find_row())

    def record_step(self, step: int, parameters: Tensor, statistics: StepStatistics) -> None:
        """Record that ``step`` steps are done: measure, save and report when due."""
        if step in self._steps:
            self._measure(step, parameters, statistics)
        is_checkpoint = step % self._settings.checkpoint_every == 0
        if is_checkpoint:
            self._save(step, parameters)
        self._reporter.report_step(step, self._find_row, statistics, is_checkpoint=is_checkpoint)

    def record_mixing(self, step: int) -> None:
        """Report that a cool-down goes on; without news the agent would look stalled."""
        self._reporter.report_step(step, self._find_row, None, is_checkpoint=False)

    def stop_saving(self) -> None:
        """Save no more checkpoints: the model is not finite, or not that of all agents."""
        self._saves = False

    def record_end(self, step: int, parameters: Tensor, status: RunStatus) -> None:
        """Measure the final model, which replaces a measurement from before a cool-down."""
        # A cool-down mixes without new gradients: the last step's statistics still hold.
        statistics = None
        if self.rows and self.rows[-1]["step"] == step:
            last = self.rows.pop()
            statistics = StepStatistics(
                *(parameters.new_full((1, 1), float(last[name])) for name in _STATISTICS)
            )
        self._measure(step, parameters, statistics)
        self._save(step, parameters)
        self._reporter.report_end(step, status.value, self._find_row(), statistics)

    @property
    def measured(self) -> Row:
        """The part of the last measurement that others may see."""
        return self._data.select_shared(self.rows[-1])

    def _find_row(self) -> Row:
        """Return the last measurement, without scores on private samples but training data."""
        if not self.rows:
            return dict.fromkeys(COLUMNS, math.nan)
        last = self.rows[-1]
        return last | self._data.select_shared(last)

    def _measure(self, step: int, parameters: Tensor, statistics: StepStatistics | None) -> None:
        (row,) = measure(
            self._data.task,
            parameters.view(1, 1, 1, -1),
            (self._trial,),
            seeds=(self._settings.table_seed,),
            step=step,
            parts=self._data.parts,
            statistics=statistics,
        )
        # By releases, which are more than steps after a restart.
        spent = self._account.epsilon(self._count_releases())
        promise: Row = {"epsilon": spent, "epsilon_least": spent}
        promise |= {"delta": self._account.budget.promise.delta, "unit": self._account.budget.unit}
        promise["central_ratio"] = self._central_ratio
        self.rows.append(row | promise)
        if self._folders is None:
            return
        with _naming_unwritable(self._folders.private):
            write_table(self.rows, self._folders.private / "metrics.csv", is_private=True)
        with _naming_unwritable(self._folders.shared):
            # The shared part of a rehearsal lies in a private folder.
            is_private, folder = self._settings.is_rehearsal, self._folders.shared
            write_model(folder, step, parameters, is_private=is_private)
            rows = [self._data.select_shared(row) for row in self.rows]
            write_table(rows, folder / "metrics.csv", columns=SHARED_COLUMNS, is_private=is_private)

    def _save(self, step: int, parameters: Tensor) -> None:
        if self._checkpoints is not None and self._saves:
            checkpoint = AgentCheckpoint(parameters, self._count_releases(), self._read_memory())
            self._checkpoints.save(step, checkpoint, num_kept=self._num_kept)


@contextmanager
def _naming_unwritable(folder: Path) -> Iterator[None]:
    """Name the folder in a failure to write."""
    try:
        yield
    except OSError as error:
        raise CornError(f"{folder}: cannot be written: {error.strerror}") from error
