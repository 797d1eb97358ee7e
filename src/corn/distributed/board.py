"""Board of an agent's newest state, which the training thread sets and other threads read."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import final

from corn.distributed.state import FAILED, TRAINING, AgentState, LocalState

STARTING = "starting"
# 720 points of 5 seconds are the last hour.
_SECONDS_BETWEEN_POINTS, _MOST_POINTS = 5.0, 720
# One time-out is the normal price of a lost neighbour.
_TIMEOUTS_OF_A_STALL = 2


@dataclass(frozen=True)
class Snapshot:
    """Everything that the board shows at one moment.

    Attributes:
        agent: the agent's number.
        phase: ``starting``, or that of the state.
        state: the newest; None before training.
        local: the newest; None before training.
        paces: steps per minute over the last hour, as pairs of a time and a pace.
    """

    agent: int
    phase: str = STARTING
    state: AgentState | None = None
    local: LocalState | None = None
    paces: tuple[tuple[float, float], ...] = ()

    @property
    def problem(self) -> str:
        """The reason why the agent is not healthy; empty if it is.

        A neighbour that is lost makes an agent wait for one time-out, so that a stall is longer.
        """
        if self.phase == FAILED:
            return "the agent failed"
        if self.phase == TRAINING and self.state is not None:
            limit = _TIMEOUTS_OF_A_STALL * self.state.timeout
            if self.state.seconds_old() > limit:
                return f"no step for {self.state.seconds_old():.0f} s"
        return ""


@final
class StatusBoard:
    """The newest state of one agent.

    Setting it costs the training thread an assignment. Readers get one snapshot, which does not
    change any more.
    """

    def __init__(self, agent: int) -> None:
        self._points: deque[tuple[float, float]] = deque(maxlen=_MOST_POINTS)
        self.snapshot = Snapshot(agent)

    def update(self, state: AgentState, local: LocalState) -> None:
        """Show a new state."""
        now = time.time()
        if not self._points or now > self._points[-1][0] + _SECONDS_BETWEEN_POINTS:
            self._points.append((now, state.steps_per_minute))
        # One assignment of a frozen record: readers in other threads need no lock.
        self.snapshot = Snapshot(state.agent, state.phase, state, local, tuple(self._points))
