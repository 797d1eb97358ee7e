"""Recovery of exact sums after a loss: survivors agree on what is lost, done and void.

A sum that lacks a release is masked, so the step at which an agent is lost is *void*: nobody
applies it. But the sum may have been complete, and have reached some agents only. So survivors
flood all links with what they know, in rounds, until all know the same: the links that broke and
the highest step that anybody began. An agent with the sum of a step gives it to neighbours that
lack it. In the end a step is applied by all survivors or by none.

No agent is more than one step ahead of another: a step's sum needs the releases of all.

Each attempt has a number. An agent that loses another neighbour on the way begins the next attempt,
and whoever hears of a higher number follows. So does an agent that hears of a broken link or of a
higher step so late that others may not hear of it any more: honest news is never that late, but a
neighbour may withhold its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from corn.distributed.exchange import Exchange, Received
from corn.distributed.membership import Membership
from corn.distributed.messages import Header, ProtocolError
from corn.transport import LinkError


@dataclass(frozen=True)
class Recovered:
    """The common knowledge of all survivors.

    Attributes:
        highest: the highest step that any of them was in, or about to begin.
        has_released: whether any of them had released it.
        total: the sum of this agent's step, which others had; None if it is void, or not needed.
    """

    highest: int
    has_released: bool
    total: Tensor | None = None


class _Restart(Exception):  # noqa: N818 - a signal, not an error
    """Another attempt has begun."""

    def __init__(self, attempt: int, caller: int) -> None:
        self.attempt, self.caller = attempt, caller
        super().__init__()


@final
class Recovery:
    """One agent's part in all recoveries of a run.

    Args:
        exchange: the links to neighbours.
        membership: this agent's knowledge, to which it adds all that it hears.
        num_agents: n, at the start of the run.
        num_links: of the plan.
        note_dropout: called for each neighbour that is lost, before others hear of it.
    """

    def __init__(
        self,
        exchange: Exchange,
        membership: Membership,
        *,
        num_agents: int,
        num_links: int,
        note_dropout: Callable[[int, LinkError], None],
    ) -> None:
        self._exchange, self._membership = exchange, membership
        self._num_agents = num_agents
        # Each end of each link may begin an attempt when it breaks; and each highest step may.
        self._max_restarts = 2 * num_links + 2
        self._note_dropout = note_dropout
        # A chain of all agents, one round before, in which losses may be noticed, and one to tell
        # neighbours the own step.
        self._num_rounds = num_agents + 2
        self.attempt = 0

    def run(
        self,
        step: int,
        before: Tensor | None,
        make_header: Callable[[], Header],
        *,
        has_released: bool,
        payload_bytes: int,
    ) -> Recovered:
        """Return what all survivors know in the end.

        Args:
            step: that this agent is in, or about to begin.
            before: the sum of the step before it; None if that was void, or there was none.
            has_released: whether this agent has released the step.
            make_header: returns a header with all news so far.
            payload_bytes: the size of the sum of this step.

        Raises:
            ProtocolError: attempts never end, as a neighbour begins new ones without a loss.
        """
        self.attempt += 1
        own: list[Tensor] = []
        for _ in range(self._max_restarts):
            try:
                # With the sum of its step, it is where those are that had it before.
                place = (step + 1, False) if own else (step, has_released)
                before = own[0] if own else before
                found = self._flood(place, before, own, make_header, payload_bytes)
                return Recovered(*found, own[0] if own else None)
            except _Restart as restart:
                self.attempt, caller = restart.attempt, restart.caller
        raise ProtocolError(
            f"agent {caller} was the last to call for another recovery of step {step}, after "
            f"{self._max_restarts} of them"
        )

    def _flood(
        self,
        place: tuple[int, bool],
        before: Tensor | None,
        own: list[Tensor],
        make_header: Callable[[], Header],
        payload_bytes: int,
    ) -> tuple[int, bool]:
        """Return the highest step of any survivor, and whether one released it.

        Keep the sum of the own step.
        """
        step, highest = place[0], place
        held = step - 1, before
        steps: dict[int, int] = {}
        for number in range(self._num_rounds):
            header = replace(
                make_header(),
                step=highest[0],
                has_released=highest[1],
                mixing_round=number,
                attempt=self.attempt,
            )
            lacking = [peer for peer, theirs in steps.items() if theirs == held[0]]
            self._send(header, held[1], lacking)
            if held[1] is not None:
                # Once is enough.
                steps = {peer: theirs for peer, theirs in steps.items() if peer not in lacking}
            for peer, found in self._receive_all(number, step, payload_bytes).items():
                known = self._membership.cuts_by(highest[0]).keys(), highest
                if number == 0:
                    steps[peer] = found.header.step
                highest = max(highest, (found.header.step, found.header.has_released))
                self._membership.merge(found.header.news)
                if found.header.payload_bytes and not own:
                    own.append(found.parameters.clone())
                    held = step, own[0]
                # What an honest agent knew in the second round has reached all by round n − 1.
                is_late = number >= self._num_agents
                if is_late and known != (self._membership.cuts_by(highest[0]).keys(), highest):
                    raise _Restart(self.attempt + 1, peer)
        return highest

    def _send(self, header: Header, total: Tensor | None, lacking: list[int]) -> None:
        neighbours = self._exchange.neighbours
        empty = torch.empty(0)
        given = [peer for peer in lacking if peer in neighbours] if total is not None else []
        others = [peer for peer in neighbours if peer not in given]
        self._exchange.send(others, replace(header, payload_bytes=0), empty)
        if total is not None:
            self._exchange.send(given, replace(header, payload_bytes=total.nbytes), total)

    def _receive_all(self, number: int, step: int, payload_bytes: int) -> dict[int, Received]:
        """Return the message of this round of each neighbour that is left."""

        def check(header: Header) -> None:
            self._check(header, number, step, payload_bytes)

        received, began = {}, time.monotonic()
        for peer in self._exchange.neighbours:
            try:
                received[peer] = self._receive(peer, check, began)
            except LinkError as error:
                self._exchange.drop(peer)
                self._note_dropout(peer, error)
                # News of the first round still reaches all in time; later news needs all rounds.
                if number > 0:
                    raise _Restart(self.attempt + 1, peer) from error
        return received

    def _receive(self, peer: int, check: Callable[[Header], None], began: float) -> Received:
        # One limit for all that is skipped: a neighbour could send old messages for ever.
        deadline = began + self._exchange.patience
        while True:
            found = self._exchange.receive(peer, check, since=began, deadline=deadline)
            if found.header.attempt > self.attempt:
                self._membership.merge(found.header.news)
                self._exchange.put_back(peer, found)
                raise _Restart(found.header.attempt, peer)
            # Others were under way: of a sum, or of an attempt that was given up.
            if found.header.attempt == self.attempt:
                return found

    def _check(self, header: Header, number: int, step: int, payload_bytes: int) -> None:
        """Raise ``ProtocolError`` unless a message belongs to this recovery or to one before."""
        who = f"agent {header.sender}"
        # A neighbour sends a message in every attempt, so none can skip one.
        if header.attempt > self.attempt + 1:
            raise ProtocolError(f"{who} called for recovery {header.attempt} of {self.attempt}")
        if header.attempt != self.attempt:
            return
        if header.mixing_round != number:
            raise ProtocolError(
                f"{who} is in round {header.mixing_round} of a recovery, not in round {number}"
            )
        # Neighbours are at most one step apart, and tell their own step first. Later they tell the
        # highest that they heard of.
        if not step - 1 <= header.step <= step + (1 if number == 0 else 2):
            raise ProtocolError(f"{who} is at step {header.step}, and this agent at step {step}")
        if header.payload_bytes not in (0, payload_bytes):
            raise ProtocolError(
                f"{who} passed on a sum of {header.payload_bytes} bytes, not {payload_bytes}"
            )
