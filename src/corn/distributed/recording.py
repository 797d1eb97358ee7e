"""What an agent keeps of its run: models and public measurements to share, the rest for itself.

Measurements use the columns of a simulation. Models are public, as every message is; so is what
follows from them and public data. The privacy promise does not cover what is measured on the
agent's own data: that goes to the agent's private folder, with its checkpoints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from torch import Tensor

from corn.distributed.checkpoint import Checkpoint, save_checkpoint
from corn.distributed.folders import Folders, append_private_note
from corn.errors import CornError
from corn.files import writing_whole
from corn.learn.method import Method, Trial
from corn.learn.metrics import COLUMNS, SHARED_COLUMNS, Row, Samples, measure, write_table
from corn.learn.schedule import Schedule
from corn.learn.step import StepStatistics
from corn.learn.tasks import Task
from corn.plan import Plan
from corn.privacy import PrivacyBudget
from corn.privacy.floats import account_floats, set_aside

_SECONDS_BETWEEN_REPORTS = 0.1


@dataclass(frozen=True)
class Progress:
    """How far an agent is, for a table that people watch.

    Attributes:
        step: steps done.
        loss: of its model on public test data; NaN without any.
        epsilon: ε spent.
        neighbours: how many are left.
        bytes_sent: so far.
        train_loss: on its own data: private, like
        fraction_clipped: of its gradients.
    """

    step: int
    loss: float
    epsilon: float
    neighbours: int
    bytes_sent: int
    train_loss: float
    fraction_clipped: float


@dataclass(frozen=True, eq=False)
class Measuring:
    """What is measured, and when.

    Attributes:
        task: the model.
        parts: samples by ``train`` (the agent's own), ``validation`` and ``test``.
        steps: when.
        has_public_parts: whether ``validation`` and ``test`` are public; see ``TrainingProblem``.
    """

    task: Task
    parts: Mapping[str, Samples]
    steps: frozenset[int]
    has_public_parts: bool = False

    def share(self, row: Row) -> Row:
        """What others may see of a measurement."""
        hidden = () if self.has_public_parts else ("validation_", "test_")
        return {name: math.nan if name.startswith(hidden) else row[name] for name in SHARED_COLUMNS}


@dataclass(frozen=True)
class Account:
    """What an agent spends: by its own precision against the worst coalition, exactly."""

    budget: PrivacyBudget
    precision: float

    def capped(self) -> Account:
        """The most that any plan under this budget spends, for when not all releases are known."""
        return replace(self, precision=max(self.precision, set_aside(self.budget).precision_cap))

    def unprotected(self) -> Account:
        """A rehearsal's: its noise is public."""
        return replace(self, precision=math.inf)

    def epsilon(self, num_releases: int) -> float:
        """ε after so many releases, at the budget's δ."""
        if num_releases == 0:
            return 0.0
        return float(account_floats([self.precision], self.budget, num_steps=num_releases)[0])


def make_trial(plan: Plan, schedule: Schedule) -> Trial:
    """The plan as a method, by the name of its mechanism, as a simulation has it."""
    return Trial(Method.from_plan(plan), schedule)


@final
class Recorder:
    """Writes what an agent keeps; see :class:`corn.distributed.loop.Watcher`.

    Args:
        agent: whose.
        name: of the mechanism, for the table.
        schedule: step sizes.
        account: what releases cost.
        measuring: what to measure.
        seed: of the run, for the table.
        folders: this agent's, where to write; None writes nothing.
        checkpoint_every: steps between checkpoints.
        plan_fingerprint: what checkpoints belong to.
        count_releases: how many releases the ledger has counted.
        describe_traffic: neighbours left and bytes sent so far.
        on_progress: called with the progress, a few times a second.
        on_note: called with every note that others may read.
        on_private_note: called with every other note.
        is_rehearsal: whether checkpoints are a rehearsal's.
        num_kept: how many checkpoints are kept.
    """

    def __init__(
        self,
        agent: int,
        name: str,
        schedule: Schedule,
        account: Account,
        measuring: Measuring,
        *,
        seed: int,
        folders: Folders | None,
        checkpoint_every: int,
        plan_fingerprint: bytes,
        count_releases: Callable[[], int],
        describe_traffic: Callable[[], tuple[int, int]],
        on_progress: Callable[[Progress], None] | None = None,
        on_note: Callable[[str], None] | None = None,
        on_private_note: Callable[[str], None] | None = None,
        is_rehearsal: bool = False,
        num_kept: int = 3,
    ) -> None:
        # Privacy is counted here, by releases; for the table this run is one without a promise.
        self._trial = Trial(Method.non_private(name=name), schedule)
        self._agent, self._account, self._measuring, self._seed = agent, account, measuring, seed
        self._folders, self._every, self._plan = folders, checkpoint_every, plan_fingerprint
        self._count_releases, self._describe_traffic = count_releases, describe_traffic
        self._on_progress, self._on_note = on_progress, on_note
        self._on_private_note = on_private_note
        self._last_report, self._is_rehearsal, self._has_diverged = 0.0, is_rehearsal, False
        self._num_kept = num_kept
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.private_notes: list[str] = []

    def note(self, text: str) -> None:
        """See ``Watcher``."""
        self.notes.append(text)
        if self._on_note:
            self._on_note(text)

    def note_privately(self, text: str) -> None:
        """See ``Watcher``."""
        self.private_notes.append(text)
        if self._folders is not None:
            with _naming_unwritable(self._folders.private):
                append_private_note(self._folders.private, text)
        if self._on_private_note:
            self._on_private_note(text)

    def see_start(self, step: int, parameters: Tensor, earlier: Sequence[Row] = ()) -> None:
        """Measure before the first step, if asked to; ``earlier`` was measured by a run before."""
        self.rows = [row for row in earlier if int(row["step"]) <= step]
        if step in self._measuring.steps and step not in {row["step"] for row in self.rows}:
            self._measure(step, parameters, None)
        self._save(step, parameters)

    def see_step(self, step: int, parameters: Tensor, statistics: StepStatistics) -> None:
        """See ``Watcher``."""
        if step in self._measuring.steps:
            self._measure(step, parameters, statistics)
        if step % self._every == 0:
            self._save(step, parameters)
        if self._on_progress and time.monotonic() > self._last_report + _SECONDS_BETWEEN_REPORTS:
            self._last_report = time.monotonic()
            self._on_progress(self._progress(step, statistics))

    def see_divergence(self) -> None:
        """See ``Watcher``."""
        self._has_diverged = True

    def see_end(self, step: int, parameters: Tensor) -> None:
        """The run is over, after a cool-down perhaps: what was measured before it is replaced."""
        statistics = None
        if self.rows and self.rows[-1]["step"] == step:
            last = self.rows.pop()
            names = ("gradient_norm", "fraction_clipped", "noise_norm")
            statistics = StepStatistics(
                *(parameters.new_full((1, 1), float(last[name])) for name in names)
            )
        self._measure(step, parameters, statistics)
        self._save(step, parameters)
        if self._on_progress and statistics is not None:
            self._on_progress(self._progress(step, statistics))

    def _measure(self, step: int, parameters: Tensor, statistics: StepStatistics | None) -> None:
        (row,) = measure(
            self._measuring.task,
            parameters.view(1, 1, 1, -1),
            (self._trial,),
            seeds=(self._seed,),
            step=step,
            parts=self._measuring.parts,
            statistics=statistics,
        )
        # By releases, which are more than steps after a restart.
        spent = self._account.epsilon(self._count_releases())
        promise: Row = {"epsilon": spent, "epsilon_least": spent}
        promise |= {"delta": self._account.budget.delta, "unit": self._account.budget.unit}
        self.rows.append(row | promise)
        if self._folders is not None:
            with _naming_unwritable(self._folders.private):
                write_table(self.rows, self._folders.private / "metrics.csv", is_private=True)
            with _naming_unwritable(self._folders.shared):
                self._share(self._folders.shared, step, parameters)

    def _share(self, folder: Path, step: int, parameters: Tensor) -> None:
        """Write the model, from which results are merged, and the measurements for others."""
        # What a rehearsal would share lies in a private folder.
        is_private = self._is_rehearsal
        (folder / "models").mkdir(exist_ok=True)
        with writing_whole(
            folder / "models" / f"step-{step}.bin", is_private=is_private
        ) as partial:
            partial.write_bytes(parameters.numpy().tobytes())
        rows = [self._measuring.share(row) for row in self.rows]
        write_table(rows, folder / "metrics.csv", columns=SHARED_COLUMNS, is_private=is_private)

    def _save(self, step: int, parameters: Tensor) -> None:
        # From a model that diverged no run would go on.
        if self._folders is not None and not self._has_diverged:
            save_checkpoint(
                self._folders.private,
                plan_fingerprint=self._plan,
                agent=self._agent,
                step=step,
                checkpoint=Checkpoint(parameters, self._count_releases()),
                is_rehearsal=self._is_rehearsal,
                num_kept=self._num_kept,
            )

    def _progress(self, step: int, statistics: StepStatistics) -> Progress:
        last: Row = self.rows[-1] if self.rows else dict.fromkeys(COLUMNS, math.nan)
        return Progress(
            step,
            float(self._measuring.share(last)["test_loss"]),
            float(last["epsilon"]) if self.rows else 0.0,
            *self._describe_traffic(),
            float(last["train_loss"]),
            float(statistics.fraction_clipped),
        )


@contextmanager
def _naming_unwritable(folder: Path) -> Iterator[None]:
    """Let a failure to write say where."""
    try:
        yield
    except OSError as error:
        raise CornError(f"{folder}: cannot be written: {error.strerror}") from error
