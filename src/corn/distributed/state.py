"""State of a running agent: a small file for its operator, by ``corn status`` and a status server.

The file is in the private folder: it has times, and how long steps take shows how much data an
agent has.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, final

from corn.distributed.storage import Folders
from corn.errors import FileFormatError, InvalidArgumentError
from corn.files import writing_whole
from corn.noise.ledger_file import is_open
from corn.parsing import build, read_json
from corn.privacy.rounding import round_up, write_exactly

STATE_NAME, LOCK_NAME = "state.json", "running"
TRAINING, FAILED = "training", "failed"
_SECONDS_OF_PACE = 60.0


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
