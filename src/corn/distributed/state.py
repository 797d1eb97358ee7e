"""State of a running agent, which its file, its log, the launcher and the status server show.

The file is in the private folder: it has times, and how long steps take shows how much data an
agent has.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, final

from corn.distributed.storage import Folders
from corn.errors import FileFormatError, InvalidArgumentError
from corn.files import writing_whole
from corn.noise.ledger import is_open
from corn.parsing import build, read_json
from corn.privacy.rounding import round_up, write_exactly

STATE_NAME, LOCK_NAME = "state.json", "running"
TRAINING, FAILED = "training", "failed"
# One time-out is the normal price of a lost neighbour.
_TIMEOUTS_UNTIL_STALE = 2


@dataclass(frozen=True)
class AgentState:
    """The state of an agent at a moment; others may read it.

    Attributes:
        phase: ``training``, ``failed``, or the status with which the agent ended.
        epsilon: the ε spent, at most; ``delta`` is that of the promise, too.
        protects: the unit and the clipping, in words.
        simulation: why ε is simulated, see ``TrainingProblem``; empty if it is a promise.
        releases_left: the releases that the ledger still allows.
        neighbours: those that the agent is still linked to.
        lost: agents that were lost, and the step at which each loss was noticed.
        steps_per_minute: over the last minute; 0 before there are two steps.
        test_loss: of the agent's model on public data; None without any.
        plan: the plan's fingerprint in hexadecimal.
        timeout: seconds without a message after which a neighbour is lost.
        updated: when the state was written, in seconds since 1970.
    """

    agent: int
    num_agents: int
    phase: str
    step: int
    num_steps: int
    epsilon: float
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

    def describe(self) -> str:
        """Return the state in one line, with the unit and the adversary of ε."""
        loss = "" if self.test_loss is None else f"test loss {self.test_loss:.4g}, "
        lost = f"lost {', '.join(self.lost)}, " if self.lost else ""
        return (
            f"step {self.step} of {self.num_steps}, {loss}{lost}neighbours "
            f"{', '.join(map(str, self.neighbours)) or 'none'}, "
            f"{self.bytes_sent / 1e6:.3g} MB sent, {self.steps_per_minute:.0f} steps per minute, "
            f"{'simulated ' if self.simulation else ''}ε spent at most "
            f"{round_up(self.epsilon)} of {write_exactly(self.promised_epsilon)} "
            f"(δ = {write_exactly(self.delta)}, for {self.protects}; against {self.adversary})"
        )


@dataclass(frozen=True)
class PrivateState:
    """Numbers that depend on data without noise, for the agent's owner; they are not in its file.

    Norm and fraction are those of the last step. Waits depend on how fast neighbours compute.
    """

    seconds_waited: float
    train_loss: float
    gradient_norm: float
    fraction_clipped: float


@final
class StateFile:
    """The state of one agent in its private folder, and a lock that shows whether it runs.

    The kernel releases the lock when the process ends, however it ends, so that the state of a
    killed agent is recognised.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATE_NAME
        lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, mode=0o600)
        self.close = weakref.finalize(self, os.close, lock)
        # A second process of the same agent has no ledger, and does not come so far.
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, state: AgentState) -> None:
        """Replace the state."""
        write_state(self._path, state)


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


def has_ended(folder: Path) -> bool:
    """Return whether the process of an agent is gone for certain, by its private folder."""
    try:
        return not is_open(folder / LOCK_NAME)
    except FileFormatError:
        return False


class Condition(NamedTuple):
    """The condition of an agent in words, and whether its operator must act."""

    text: str
    needs_action: bool = False


def judge_condition(state: AgentState, *, is_gone: bool) -> Condition:
    """Return the phase of an agent, or that its state is stale."""
    if state.phase != TRAINING:
        return Condition(state.phase, needs_action=state.phase == FAILED)
    age = max(0.0, time.time() - state.updated)
    if is_gone:
        return Condition(f"stale: process gone, last news {age:.0f} s ago", needs_action=True)
    if age > _TIMEOUTS_UNTIL_STALE * state.timeout:
        return Condition(f"stale: no news for {age:.0f} s", needs_action=True)
    return Condition(TRAINING)
