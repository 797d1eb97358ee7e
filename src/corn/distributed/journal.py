"""Journal of an agent's run: measurements, notes, checkpoints, its state, and the ε spent.

Models are public, and so is everything computed from them and public data. Measurements on the
agent's own data go to its private folder: the promise does not cover them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, final

from torch import Tensor

from corn.distributed.logs import log_event
from corn.distributed.messages import Header
from corn.distributed.results import RunStatus
from corn.distributed.status import STATE_NAME, TRAINING, AgentState, write_state
from corn.distributed.storage import CheckpointFolder, naming_failure
from corn.files import writing_whole
from corn.learn.mechanism import Mechanism, Trial
from corn.learn.metrics import COLUMNS, PARTS, SHARED_COLUMNS, Row, Samples, measure, write_table
from corn.learn.problem import TrainingProblem
from corn.learn.step import StepStatistics
from corn.learn.sweep import Interruption
from corn.learn.trained import MODEL_FILE, ModelPromise, TrainedModel
from corn.noise import ReleaseLedger
from corn.plan import fingerprint
from corn.privacy import PrivacyBudget
from corn.privacy.floats import account_floats
from corn.topology.graphs import add_names
from corn.version import __version__

if TYPE_CHECKING:
    from corn.distributed.agent import AgentRun

_BLOCKS_OF_RELEASES = 20
# The launcher needs a few states per second; a file of which each costs a write needs fewer.
_SECONDS_BETWEEN_STATES = 0.1
_SECONDS_BETWEEN_FILES = 1.0


@dataclass(frozen=True)
class Reports:
    """Callbacks for news of a run while it lasts, and the request to stop it.

    The open ledger, to read, comes before the first release. Messages come with the run's nonce.
    """

    interruption: Interruption | None = None
    on_state: Callable[[AgentState], None] | None = None
    on_message: Callable[[bytes, Header, Tensor], None] | None = None
    on_ledger: Callable[[ReleaseLedger], None] | None = None


def epsilon_after(budget: PrivacyBudget, precision: float, num_releases: int) -> float:
    """Return the ε spent after so many releases with [R⁻¹]_ii of ``precision`` at most."""
    if num_releases == 0:
        return 0.0
    # With the privacy loss by floating point: the ε that is printed must be the one that is proved.
    return float(account_floats([precision], budget, num_steps=num_releases)[0])


def round_up_releases(num_releases: int, num_steps: int) -> int:
    """Return a number of releases rounded up to the end of a twentieth of the plan.

    Accounting of Poisson sampling takes as long as several steps. ε grows with releases, so that of
    more releases is a bound.

    >>> round_up_releases(1, 1000), round_up_releases(999, 1000)
    (50, 1000)
    """
    block = math.ceil(num_steps / _BLOCKS_OF_RELEASES)
    return min(num_steps, block * math.ceil(num_releases / block))


@final
class Journal:
    """Writer of all that an agent keeps of its run, given folders, and reporter of its state."""

    def __init__(
        self,
        run: AgentRun,
        problem: TrainingProblem,
        parts: Mapping[str, Samples],
        on_state: Callable[[AgentState], None] | None = None,
    ) -> None:
        plan, settings = run.plan, run.settings
        budget = plan.budget.of_agent(run.agent)
        self._run = run
        self._plan = plan
        self._problem = problem
        self._parts = parts
        self._on_state = on_state
        self._budget = budget
        # Per instance: a cache on a function would keep every budget alive.
        self._epsilon = cache(partial(epsilon_after, budget, run.ledger.precision))
        # Privacy is counted here, by releases; for the table this run is one without a promise.
        self._trial = Trial(Mechanism.non_private(name=plan.mechanism), settings.schedule)
        self._steps = settings.evaluation_steps(plan)
        # With gossip, agents may be n steps apart, and resume from a step that they have in common.
        self._num_kept = 3 + math.ceil(plan.num_agents / settings.checkpoint_every)
        self._saves = True
        self._step = run.first_step
        self._began = time.monotonic()
        self._last_state = self._last_file = -math.inf
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.private_notes: list[str] = []
        self._fingerprint = fingerprint(plan).hex()  # takes a while for a large plan

    def note(self, text: str) -> None:
        """Record an event that anyone may read."""
        text = add_names(text, self._plan.network.agent_names)
        self.notes.append(text)
        log_event(self._run.agent, "note", text, level=logging.WARNING)

    def note_privately(self, text: str) -> None:
        """Record an event that depends on the agent's data, for its owner alone."""
        self.private_notes.append(text)
        log_event(self._run.agent, "note", text, level=logging.WARNING, is_private=True)

    def record_start(self, step: int, parameters: Tensor, earlier: Sequence[Row] = ()) -> None:
        """Measure before the first step, if asked to; ``earlier`` are rows of a run before."""
        # Later rows are of steps that are run again, under new noise.
        self.rows = [row for row in earlier if int(row["step"]) <= step]
        # A run that resumes has measured this step before it stopped.
        if step in self._steps and step not in {row["step"] for row in self.rows}:
            self._measure(step, parameters, None)
        self._save(step, parameters)
        state = self._report(TRAINING)
        promise = f"{self._budget.describe()}, against {state.adversary}"
        if state.simulation:
            promise = f"simulated: {promise}; {state.simulation}"
        text = f"starts at step {step} of {state.num_steps} with plan {state.plan[:16]}: {promise}"
        log_event(state.agent, "start", text)

    def record_step(self, step: int, parameters: Tensor, statistics: StepStatistics) -> None:
        """Record that ``step`` steps are done: measure, save and report when due."""
        self._step = step
        if step in self._steps:
            self._measure(step, parameters, statistics)
        if step % self._run.settings.checkpoint_every == 0:
            self._save(step, parameters)
            self._last_state = time.monotonic()
            state = self._report(TRAINING)
            log_event(state.agent, "checkpoint", state.describe())
        else:
            self.report_if_due()

    def stop_saving(self) -> None:
        """Save no more checkpoints: the model is not finite, or not that of all agents."""
        self._saves = False

    def report_if_due(self) -> None:
        """Report the state, but not too often; without news the agent would look stalled."""
        now = time.monotonic()
        if now >= self._last_state + _SECONDS_BETWEEN_STATES:
            self._last_state = now
            self._report(TRAINING)

    def record_end(self, step: int, parameters: Tensor, status: RunStatus) -> None:
        """Measure the final model, which replaces a measurement from before a cool-down."""
        self._step = step
        # A cool-down mixes without new gradients: the last step's statistics still hold.
        statistics = None
        if self.rows and self.rows[-1]["step"] == step:
            last = self.rows.pop()
            norms = (last["gradient_norm"], last["fraction_clipped"], last["noise_norm"])
            statistics = StepStatistics(*(parameters.new_full((1, 1), float(n)) for n in norms))
        self._measure(step, parameters, statistics)
        self._save(step, parameters)
        # With names, preprocessing and promise, if its task predicts.
        promise = ModelPromise.of_plan(self._plan, simulation=self._problem.simulation)
        model = TrainedModel.from_problem(self._problem, parameters, promise)
        folders = self._run.folders
        if model is not None and folders is not None and self._saves:
            with naming_failure(folders.shared):
                model.save(folders.shared / MODEL_FILE)
        state = self._report(status.value)
        log_event(state.agent, "end", f"{status}: {state.describe()}")

    @property
    def measured(self) -> Row:
        """The part of the last measurement that others may see."""
        return self._select_shared(self.rows[-1])

    @property
    def _num_releases(self) -> int:
        return self._plan.budget.num_steps - self._run.ledger.remaining

    def _select_shared(self, row: Row) -> Row:
        # This is an allow list by column; scores on private samples are removed in addition.
        public = self._problem.public_parts
        hidden = tuple(f"{part}_" for part in PARTS[1:] if part not in public)
        return {name: math.nan if name.startswith(hidden) else row[name] for name in SHARED_COLUMNS}

    def _measure(self, step: int, parameters: Tensor, statistics: StepStatistics | None) -> None:
        (row,) = measure(
            self._problem.task,
            parameters.view(1, 1, 1, -1),
            (self._trial,),
            seeds=(self._run.settings.seed,),
            step=step,
            parts=self._parts,
            statistics=statistics,
        )
        # By releases, which are more than steps after a restart.
        spent = self._epsilon(self._num_releases)
        promise: Row = {
            "epsilon": spent,
            "epsilon_least": spent,
            "delta": self._budget.promise.delta,
            "unit": self._budget.unit,
            "central_ratio": self._plan.central_ratio,
        }
        self.rows.append(row | promise)
        folders = self._run.folders
        if folders is None:
            return
        with naming_failure(folders.private):
            write_table(self.rows, folders.private / "metrics.csv", is_private=True)
        with naming_failure(folders.shared):
            (folders.shared / "models").mkdir(exist_ok=True)
            with writing_whole(folders.shared / "models" / f"step-{step}.bin") as file:
                file.write_bytes(parameters.numpy().tobytes())
            rows = [self._select_shared(row) for row in self.rows]
            write_table(rows, folders.shared / "metrics.csv", columns=SHARED_COLUMNS)

    def _save(self, step: int, parameters: Tensor) -> None:
        run = self._run
        if run.folders is not None and self._saves:
            CheckpointFolder(run.folders.private, self._plan, run.agent).save(
                step, parameters, self._num_releases, run.stepper.save(), num_kept=self._num_kept
            )

    def _report(self, phase: str) -> AgentState:
        """Return the present state, pass it on, and write it to its file if that is due."""
        row: Row = self.rows[-1] if self.rows else dict.fromkeys(COLUMNS, math.nan)
        # Scores on private samples are not even for the owner's display, training data excepted.
        loss = float(self._select_shared(row)["test_loss"])
        exchange = self._run.exchange
        lost, cut_links = exchange.membership.lost, exchange.membership.cut_links
        now = time.monotonic()
        minutes = (now - self._began) / 60
        run, plan, budget = self._run, self._plan, self._budget
        promise = budget.promise
        planned = exchange.membership.planned_neighbours
        state = AgentState(
            agent=run.agent,
            num_agents=plan.num_agents,
            names=tuple(plan.network.agent_names) if plan.network.has_names else (),
            phase=phase,
            step=self._step,
            num_steps=run.settings.steps_of(plan),
            epsilon=self._epsilon(round_up_releases(self._num_releases, budget.num_steps)),
            promised_epsilon=promise.epsilon,
            delta=promise.delta,
            unit=budget.unit,
            protects=f"{promise.query.protects}; {promise.query.recipe}",
            adversary=plan.threat.describe(),
            simulation=self._problem.simulation,
            releases_left=run.ledger.remaining,
            neighbours=tuple(sorted(set(planned) - lost.keys() - cut_links.keys())),
            lost={str(agent): when for agent, when in lost.items()},
            bytes_sent=sum(each.bytes_sent for each in exchange.traffic.values()),
            steps_per_minute=(self._step - run.first_step) / minutes if minutes else 0.0,
            test_loss=loss if math.isfinite(loss) else None,
            plan=self._fingerprint,
            corn_version=__version__,
            timeout=run.settings.timeout,
            updated=time.time(),
        )
        is_due = phase != TRAINING or now >= self._last_file + _SECONDS_BETWEEN_FILES
        if run.folders is not None and is_due:
            self._last_file = now
            # A full disk ends a run at the next checkpoint, with an error of its own.
            with suppress(OSError):
                write_state(run.folders.private / STATE_NAME, state)
        if self._on_state is not None:
            self._on_state(state)
        return state
