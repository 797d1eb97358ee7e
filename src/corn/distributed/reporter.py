"""Reporter of an agent's state while it trains: to its file, its log, and the status server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Protocol, final

from corn.distributed.logs import log_event
from corn.distributed.settings import RunSettings
from corn.distributed.state import (
    TRAINING,
    AgentState,
    LocalState,
    Pace,
    StateFile,
    describe_state,
)
from corn.distributed.storage import Folders
from corn.learn.metrics import Row
from corn.learn.step import StepStatistics
from corn.plan import Plan, fingerprint
from corn.privacy import PrivacyBudget
from corn.version import __version__

_SECONDS_BETWEEN_STATES = 1.0


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
        summarize_traffic: returns neighbours left and bytes sent so far.
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
        summarize_traffic: Callable[[], tuple[int, int]],
        on_state: Callable[[AgentState, LocalState], None] | None,
    ) -> None:
        self._budget, self._settings, self._bound_epsilon = budget, settings, bound_epsilon
        self._count_releases, self._summarize_traffic = count_releases, summarize_traffic
        self._on_state, self._pace, self._last = on_state, Pace(), 0.0
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
        """Report a step if a second has passed, and log it if it is a checkpoint.

        ``find_row`` returns the last measurement, and is called only if it is needed.
        """
        now = time.monotonic()
        if not is_checkpoint and now < self._last + _SECONDS_BETWEEN_STATES:
            return
        self._last = now
        state = self.report(step, TRAINING, find_row(), statistics)
        if is_checkpoint:
            log_event(state.agent, "checkpoint", describe_state(state), fields=asdict(state))

    def report_end(self, step: int, phase: str, row: Row) -> None:
        """Report the last state, and log it."""
        state = self.report(step, phase, row)
        log_event(state.agent, "end", f"{phase}: {describe_state(state)}", fields=asdict(state))
        if self._file is not None:
            self._file.close()

    def report(
        self, step: int, phase: str, row: Row, statistics: StepStatistics | None = None
    ) -> AgentState:
        """Return the present state, write it to its file, and pass it on.

        ``row`` is the last measurement, in which private columns are used for ``LocalState`` only.
        """
        releases, loss = self._count_releases(), float(row["test_loss"])
        is_rehearsal, rounds = self._settings.is_rehearsal, self.rounds
        lost = {} if rounds is None else rounds.lost
        cut_links = {} if rounds is None else rounds.cut_links
        state = replace(
            self._first,
            phase=phase,
            step=step,
            # No number at all: a rehearsal's ε is infinite, and JSON has no infinity.
            epsilon=None if is_rehearsal else self._bound_epsilon(releases),
            releases_left=self._budget.num_steps - releases,
            neighbours=tuple(sorted(self._linked - lost.keys() - cut_links.keys())),
            lost={str(agent): when for agent, when in lost.items()},
            bytes_sent=self._summarize_traffic()[1],
            steps_per_minute=self._pace.measure(step, time.monotonic()),
            test_loss=loss if math.isfinite(loss) else None,
            updated=time.time(),
        )
        if self._file is not None:
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
