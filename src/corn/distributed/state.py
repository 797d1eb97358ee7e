"""State of a running agent, which is reported to its file, its log, the launcher and the server.

The file is in the private folder: it has times, and how long steps take shows how much data an
agent has.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol, final

from corn.distributed.logs import log_event
from corn.distributed.settings import RunSettings
from corn.distributed.storage import Folders
from corn.errors import FileFormatError, InvalidArgumentError
from corn.files import writing_whole
from corn.learn.metrics import Row
from corn.learn.step import StepStatistics
from corn.noise.ledger import is_open
from corn.parsing import build, read_json
from corn.plan import Plan, fingerprint
from corn.privacy import PrivacyBudget
from corn.privacy.rounding import round_up, write_exactly
from corn.version import __version__

STATE_NAME, LOCK_NAME = "state.json", "running"
TRAINING, FAILED = "training", "failed"
_SECONDS_OF_PACE = 60.0
# A live table needs a few states per second; a file of which each costs a write needs fewer.
_SECONDS_BETWEEN_STATES = 0.1
_SECONDS_BETWEEN_FILES = 1.0


@dataclass(frozen=True)
class AgentState:
    """The state of an agent at a moment, for its operator.

    Attributes:
        agent: its number.
        num_agents: n.
        phase: ``training``, ``failed``, or the status with which the agent ended.
        step: steps done.
        num_steps: steps to do.
        epsilon: ε spent, at most; None in a rehearsal, which protects nothing.
        promised_epsilon: of the plan, for this agent.
        delta: of both.
        unit: ``agent`` or ``sample``.
        protects: the unit and the clipping, in words.
        adversary: against whom ε holds.
        simulation: why ε is simulated, see ``TrainingProblem``; empty if it is a promise.
        releases_left: by the ledger.
        neighbours: those that the agent is still linked to.
        lost: agents that were lost, and the step at which each loss was noticed.
        bytes_sent: so far.
        steps_per_minute: over the last minute; 0 before there are two steps.
        test_loss: of the agent's model on public data; None without any.
        plan: the plan's fingerprint in hexadecimal.
        corn_version: of the agent.
        timeout: seconds without news after which the state is stale.
        updated: when the state was written, in seconds since 1970.
    """

    agent: int
    num_agents: int
    phase: str
    step: int
    num_steps: int
    epsilon: float | None
    promised_epsilon: float
    delta: float
    unit: str
    protects: str
    adversary: str
    simulation: str
    releases_left: int
    neighbours: tuple[int, ...]
    lost: Mapping[str, int]
    bytes_sent: int
    steps_per_minute: float
    test_loss: float | None
    plan: str
    corn_version: str
    timeout: float
    updated: float

    def seconds_old(self) -> float:
        """Return the seconds since the state was written."""
        return max(0.0, time.time() - self.updated)


@dataclass(frozen=True)
class LocalState:
    """Private numbers, which depend on data without noise; they are not in the agent's file.

    Attributes:
        seconds_waited: for messages of neighbours, which depends on how fast those compute.
        train_loss: of the agent's model on its own data.
        gradient_norm: of the last step.
        fraction_clipped: of the gradients of the last step.
    """

    seconds_waited: float
    train_loss: float
    gradient_norm: float
    fraction_clipped: float


@final
class Pace:
    """The number of steps per minute, over the last minute."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def measure(self, step: int, now: float) -> float:
        """Return the steps per minute up to now, and remember this step.

        >>> pace = Pace()
        >>> pace.measure(0, now=10.0), pace.measure(20, now=40.0)
        (0.0, 40.0)
        """
        self._seen.append((now, step))
        # The second point decides: the first may be older than a minute, so that slow runs still
        # have a pace.
        while len(self._seen) > 2 and self._seen[1][0] < now - _SECONDS_OF_PACE:
            self._seen.popleft()
        began, first = self._seen[0]
        return 60 * (step - first) / (now - began) if now > began else 0.0


@final
class StateFile:
    """The state of one agent in its private folder, and a lock that shows whether it runs.

    The kernel releases the lock when the process ends, however it ends, so that the state of a
    killed agent is recognised.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATE_NAME
        lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, mode=0o600)
        self._release = weakref.finalize(self, os.close, lock)
        # A second process of the same agent has no ledger, and does not come so far.
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, state: AgentState) -> None:
        """Replace the state."""
        write_state(self._path, state)

    def close(self) -> None:
        """Release the lock."""
        self._release()


def write_state(path: Path, state: AgentState) -> None:
    """Replace the state of an agent; a reader sees the old or the new one."""
    with writing_whole(path, is_private=True) as partial:
        partial.write_text(json.dumps(asdict(state), allow_nan=False) + "\n", encoding="utf-8")


def read_state(path: Path) -> AgentState:
    """Read the state of an agent."""
    document = read_json(path, kind="the state of an agent")
    try:
        state: AgentState = build(AgentState, document, "the state")
    except InvalidArgumentError as error:
        raise FileFormatError(f"{path}: not the state of an agent: {error}") from error
    return state


def read_states(out: Path) -> dict[int, tuple[AgentState, Path]]:
    """Return the state and the private folder of all agents of a run that have written one."""
    paths = Folders.of_run(out).private.glob(f"agent-*/{STATE_NAME}")
    states = [(read_state(path), path.parent) for path in paths]
    return {own.agent: (own, folder) for own, folder in sorted(states, key=lambda s: s[0].agent)}


def has_ended(folder: Path) -> bool | None:
    """Return whether the process of an agent is gone, by its private folder; None if unknown."""
    try:
        return not is_open(folder / LOCK_NAME)
    except FileFormatError:
        return None


class Condition(NamedTuple):
    """The condition of an agent in words, and whether its operator must act."""

    text: str
    needs_action: bool = False


def judge_condition(state: AgentState, *, is_gone: bool | None) -> Condition:
    """Return the phase of an agent, or that its state is stale."""
    if state.phase != TRAINING:
        return Condition(state.phase, needs_action=state.phase == FAILED)
    if is_gone:
        return Condition(f"stale: process gone, last news {state.seconds_old():.0f} s ago", True)
    if state.seconds_old() > state.timeout:
        return Condition(f"stale: no news for {state.seconds_old():.0f} s", True)
    return Condition(TRAINING)


def describe_state(state: AgentState) -> str:
    """Return the state in one line, with the unit and the adversary of ε."""
    loss = "" if state.test_loss is None else f"test loss {state.test_loss:.4g}, "
    spent = "no privacy (rehearsal)"
    if state.epsilon is not None:
        spent = (
            f"{'simulated ' if state.simulation else ''}ε spent at most "
            f"{round_up(state.epsilon)} of {write_exactly(state.promised_epsilon)} "
            f"(δ = {write_exactly(state.delta)}, for {state.protects}; against {state.adversary})"
        )
    lost = f"lost {', '.join(state.lost)}, " if state.lost else ""
    linked = "1 neighbour" if len(state.neighbours) == 1 else f"{len(state.neighbours)} neighbours"
    return (
        f"step {state.step} of {state.num_steps}, {loss}{linked}, {lost}"
        f"{state.bytes_sent / 1e6:.3g} MB sent, {state.steps_per_minute:.0f} steps per minute, "
        f"{spent}"
    )


class ObservedRounds(Protocol):
    """The part of ``TrainingRounds`` that is reported."""

    seconds_waited: float

    @property
    def lost(self) -> Mapping[int, int]:
        """The lost agents, and the step at which each loss was first noticed."""

    @property
    def cut_links(self) -> Mapping[int, int]:
        """Neighbours that still take part though the link to them broke, and since when."""


@final
class StateReporter:
    """Reporter of one agent's state.

    Args:
        plan: what is run.
        settings: how.
        agent: this agent's number.
        budget: the plan's promise to this agent.
        bound_epsilon: returns an upper bound of ε after a number of releases.
        simulation: why ε is simulated; empty if it is a promise.
        folders: this agent's; None writes no file.
        count_releases: returns how many releases the ledger has counted.
        count_bytes: returns how many bytes were sent so far.
        on_state: called with every state.
    """

    def __init__(
        self,
        plan: Plan,
        settings: RunSettings,
        *,
        agent: int,
        budget: PrivacyBudget,
        bound_epsilon: Callable[[int], float],
        simulation: str = "",
        folders: Folders | None,
        count_releases: Callable[[], int],
        count_bytes: Callable[[], int],
        on_state: Callable[[AgentState, LocalState], None] | None,
    ) -> None:
        self._budget, self._settings, self._bound_epsilon = budget, settings, bound_epsilon
        self._count_releases, self._count_bytes = count_releases, count_bytes
        self._on_state, self._pace = on_state, Pace()
        self._last_state = self._last_file = -math.inf
        graph = plan.network.graph
        senders = graph.predecessors(agent) if graph.is_directed() else ()
        self._linked = frozenset(graph.neighbors(agent)).union(senders)
        self.rounds: ObservedRounds | None = None
        self._file = None
        if folders is not None:
            self._file = StateFile(folders.private)
        # Computed once: the fingerprint of a large plan takes a while.
        self._first = AgentState(
            agent=agent,
            num_agents=plan.num_agents,
            phase=TRAINING,
            step=0,
            num_steps=settings.steps_of(plan),
            epsilon=None,
            promised_epsilon=budget.promise.epsilon,
            delta=budget.promise.delta,
            unit=budget.unit,
            protects=f"{budget.promise.query.protects}; {budget.promise.query.recipe}",
            adversary=plan.threat.describe(),
            simulation=simulation,
            releases_left=budget.num_steps,
            neighbours=(),
            lost={},
            bytes_sent=0,
            steps_per_minute=0.0,
            test_loss=None,
            plan=fingerprint(plan).hex(),
            corn_version=__version__,
            timeout=settings.timeout,
            updated=0.0,
        )

    def report_start(self, step: int, row: Row) -> None:
        """Report that training starts or continues, with the promise in full."""
        state = self.report(step, TRAINING, row)
        promise = f"{'simulated: ' if state.simulation else ''}{self._budget.describe()}"
        if self._settings.is_rehearsal:
            promise = "rehearsal, which protects nothing"
        text = (
            f"starts at step {step} of {state.num_steps} with plan {state.plan[:16]}: {promise}, "
            f"against {state.adversary}{f'; {state.simulation}' if state.simulation else ''}"
        )
        log_event(state.agent, "start", text, fields=asdict(state))

    def report_step(
        self,
        step: int,
        find_row: Callable[[], Row],
        statistics: StepStatistics | None,
        *,
        is_checkpoint: bool,
    ) -> None:
        """Report a step unless another one was just reported, and log it if it is a checkpoint.

        ``find_row`` returns the last measurement, and is called only if it is needed.
        """
        now = time.monotonic()
        if not is_checkpoint and now < self._last_state + _SECONDS_BETWEEN_STATES:
            return
        self._last_state = now
        state = self.report(step, TRAINING, find_row(), statistics)
        if is_checkpoint:
            log_event(state.agent, "checkpoint", describe_state(state), fields=asdict(state))

    def report_end(
        self, step: int, phase: str, row: Row, statistics: StepStatistics | None
    ) -> None:
        """Report the last state, and log it."""
        state = self.report(step, phase, row, statistics)
        log_event(state.agent, "end", f"{phase}: {describe_state(state)}", fields=asdict(state))
        if self._file is not None:
            self._file.close()

    def report(
        self, step: int, phase: str, row: Row, statistics: StepStatistics | None = None
    ) -> AgentState:
        """Return the present state, pass it on, and write it to its file if that is due.

        ``row`` is the last measurement, in which private columns are used for ``LocalState`` only.
        """
        releases, loss = self._count_releases(), float(row["test_loss"])
        is_rehearsal, rounds = self._settings.is_rehearsal, self.rounds
        lost = {} if rounds is None else rounds.lost
        cut_links = {} if rounds is None else rounds.cut_links
        now = time.monotonic()
        state = replace(
            self._first,
            phase=phase,
            step=step,
            # No number at all: a rehearsal's ε is infinite, and JSON has no infinity.
            epsilon=None if is_rehearsal else self._bound_epsilon(releases),
            releases_left=self._budget.num_steps - releases,
            neighbours=tuple(sorted(self._linked - lost.keys() - cut_links.keys())),
            lost={str(agent): when for agent, when in lost.items()},
            bytes_sent=self._count_bytes(),
            steps_per_minute=self._pace.measure(step, now),
            test_loss=loss if math.isfinite(loss) else None,
            updated=time.time(),
        )
        is_due = phase != TRAINING or now >= self._last_file + _SECONDS_BETWEEN_FILES
        if self._file is not None and is_due:
            self._last_file = now
            # A full disk ends a run at the next checkpoint, with an error of its own.
            with suppress(OSError):
                self._file.write(state)
        if self._on_state is not None:
            self._on_state(state, self._collect_local(row, statistics))
        return state

    def _collect_local(self, row: Row, statistics: StepStatistics | None) -> LocalState:
        waited = 0.0 if self.rounds is None else self.rounds.seconds_waited
        norm, clipped = math.nan, math.nan
        if statistics is not None:
            norm, clipped = float(statistics.gradient_norm), float(statistics.fraction_clipped)
        return LocalState(waited, float(row["train_loss"]), norm, clipped)
