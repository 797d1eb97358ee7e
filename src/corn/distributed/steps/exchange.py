"""Exchange of messages: one to and from every neighbour per mixing round, all at the same time.

A message is a header and d parameters. The link seals it, so what arrives is what was sent.

An agent that waits for a slow neighbour is not slow itself. So an agent that has sent nothing for a
third of the time-out sends a *heartbeat*, and its neighbours keep waiting. Only an agent
that sends nothing at all is lost, and its silence does not make its neighbours look lost too. In a
run without trouble there are no heartbeats.

With a deadline, a round does not wait for a late neighbour. Its message is handed over in the round
in which it arrives, together with the own message of the round that it belongs to.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor

from corn.distributed.steps.messages import Header, check_header, decode_message
from corn.transport import Dropout, Link, LinkError, Traffic

SUSPENDED_SHARE = 0.5
"""The share of the time-out after which an agent that was suspended may have been declared lost:
its neighbours' waits before and after the pause are up to half a time-out late."""
MAX_LAG = 8
"""The most messages by which a late neighbour may be behind; for the next one agents wait."""

_HEARTBEATS_PER_TIMEOUT = 3
# Bounded, as a neighbour that hangs would otherwise keep this agent from ending.
_SECONDS_TO_PART = 2.0
# Two messages of a neighbour may have been under way before a pause; a third one shows that it
# still takes this agent for alive.
_PROOF_OF_LIFE = 3


@dataclass(frozen=True)
class Received:
    """A message; a neighbour's parameters are valid until the next exchange begins."""

    header: Header
    parameters: Tensor


class LateMessage(NamedTuple):
    """A neighbour's message of an earlier round, and the own message of that round."""

    own: Received
    theirs: Received


@dataclass(frozen=True)
class Outcome:
    """The end of a mixing round.

    Attributes:
        received: by neighbour.
        late: messages of earlier rounds that arrived in this one, by neighbour, in order.
        missed: the neighbours whose message of this round did not come before the deadline.
        dropouts: the neighbours that are lost, and how.
    """

    received: Mapping[int, Received]
    late: Mapping[int, tuple[LateMessage, ...]] = field(default_factory=dict)
    missed: frozenset[int] = frozenset()
    dropouts: Mapping[int, Dropout] = field(default_factory=dict)

    @property
    def headers(self) -> list[Header]:
        """All headers that arrived, late ones included."""
        late = [one.theirs.header for messages in self.late.values() for one in messages]
        return late + [one.header for one in self.received.values()]


@final
class Exchange:
    """Messages to and from all neighbours, in two halves between which an agent can compute.

    Args:
        links: one for each neighbour.
        num_agents: n.
        dtype: of the numbers in messages.
        timeout: seconds without a message after which a neighbour is lost.
        senders: the neighbours that send to this agent; by default all.
        receivers: the neighbours to which this agent sends; by default all.

    Attributes:
        on_send: called with every message before it is sent, for audits.
        dtype: of the numbers in messages.
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        *,
        num_agents: int,
        dtype: torch.dtype,
        timeout: float,
        senders: frozenset[int] | None = None,
        receivers: frozenset[int] | None = None,
    ) -> None:
        self._links, self._num_agents, self._timeout = dict(links), num_agents, timeout
        self._senders, self._receivers = senders, receivers
        self.dtype = dtype
        self.on_send: Callable[[Header, Tensor], None] | None = None
        self._own: Received | None = None
        # Own messages for which the neighbour's is still to come, the oldest first.
        self._pending: dict[int, deque[Received]] = {peer: deque() for peer in links}
        self._buffers: list[tuple[Link, memoryview]] = []
        self._put_back: dict[int, Received] = {}
        self._closed: dict[int, Traffic] = {}
        self.num_missed: dict[int, int] = {}
        # The lock keeps heartbeats from being sent over a link that is being closed.
        self._lock, self._last_sent = threading.RLock(), time.monotonic()
        self._last_check = self._last_sent
        # At the start no pause has happened: the count begins where was_suspended is False.
        self._ended, self._exchanges_since_pause = threading.Event(), _PROOF_OF_LIFE
        self._heart = threading.Thread(
            target=self._send_heartbeats, name="corn heartbeat", daemon=True
        )
        self._heart.start()

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Neighbours that are still linked."""
        return tuple(sorted(self._links))

    @property
    def was_suspended(self) -> bool:
        """Whether this process was suspended so long that it may have been declared lost."""
        self._check_clock()  # after a pause this thread may run before the heartbeat's does
        return self._exchanges_since_pause < _PROOF_OF_LIFE

    @property
    def traffic(self) -> dict[int, Traffic]:
        """Traffic over each link so far, broken ones included."""
        now = {peer: link.traffic for peer, link in self._links.items()}
        return {
            peer: _add(self._closed.get(peer), now.get(peer)) for peer in self._closed.keys() | now
        }

    def summarize(self) -> tuple[int, int]:
        """Return how many neighbours are left, and how many bytes were sent."""
        return len(self._links), sum(own.bytes_sent for own in self.traffic.values())

    def start(self, header: Header, parameters: Tensor) -> None:
        """Begin to send to every neighbour; links receive all the time."""
        # Only now, as parameters of the last round point into these buffers until it is mixed.
        self.recycle()
        message, own = self._write(header, parameters)
        self._own = Received(header, own)
        with self._lock:
            for peer in self.neighbours:
                if self._receivers is None or peer in self._receivers:
                    self._links[peer].send(memoryview(message))
                if self._senders is None or peer in self._senders:
                    self._pending[peer].append(self._own)
            self._last_sent = time.monotonic()

    def finish(self, patience: float | None = None) -> Outcome:
        """Wait for every neighbour; those that dropped out are no longer neighbours.

        With ``patience``, neighbours that take longer than so many seconds are left out of this
        round, unless they are as far behind as ``MAX_LAG`` allows.

        Raises:
            ProtocolError: a neighbour's message is not the expected one; the line names it.
        """
        began = time.monotonic()
        deadline = None if patience is None else began + patience
        received: dict[int, Received] = {}
        late: dict[int, tuple[LateMessage, ...]] = {}
        missed, dropouts = set(), {}
        for peer in self.neighbours:
            try:
                pairs = self._catch_up(peer, began, deadline)
                if deadline is None:
                    # A neighbour reads all the time, so this takes no time. But the receiver of a
                    # one-way link that is ahead holds the sender back.
                    self._links[peer].wait_sent(self._timeout * (self._num_agents + 1))
            except LinkError as error:
                dropouts[peer] = error.dropout
                self.drop(peer)
                continue
            # By identity: a late neighbour may have sent the message of this round right behind
            # older ones.
            if pairs and pairs[-1].own is self._own:
                received[peer] = pairs.pop().theirs
            elif self._pending[peer]:
                missed.add(peer)
                self.num_missed[peer] = self.num_missed.get(peer, 0) + 1
            if pairs:
                late[peer] = tuple(pairs)
        # An exchange with a dropout proves nothing: it may be the others that dropped this agent.
        if not dropouts:
            self.note_exchange()
        return Outcome(received, late, frozenset(missed), dropouts)

    def send(self, peers: Iterable[int], header: Header, values: Tensor) -> None:
        """Begin to send a message to some neighbours, outside of mixing rounds."""
        message, _ = self._write(header, values)
        # Without a new time of the last message: the other neighbours still need heartbeats.
        with self._lock:
            for peer in peers:
                self._links[peer].send(memoryview(message))

    def receive(self, peer: int, *, since: float | None = None) -> Received:
        """Return the next message of a neighbour, whose numbers are valid until ``recycle``.

        Silence counts from ``since`` on the monotonic clock; by default from now.

        Raises:
            LinkError: the neighbour is lost.
        """
        if peer in self._put_back:
            return self._put_back.pop(peer)
        link = self._links[peer]
        # See ``_catch_up`` for the limit.
        limit = self._timeout * (self._num_agents + 1)
        data = link.receive(self._timeout, limit=limit, since=since)
        self._buffers.append((link, data))
        return Received(
            *decode_message(data, num_agents=self._num_agents, sender=peer, dtype=self.dtype)
        )

    def put_back(self, peer: int, message: Received) -> None:
        """Let the next ``receive`` return a message once more."""
        self._put_back[peer] = message

    def recycle(self) -> None:
        """Give back the memory of all messages that were received."""
        for link, buffer in self._buffers:
            link.recycle(buffer)
        self._buffers = []

    def note_exchange(self) -> None:
        """Note that all neighbours of a step have answered: they take this agent for alive."""
        with self._lock:
            self._exchanges_since_pause += 1

    def add(self, peer: int, link: Link) -> None:
        """Exchange messages with one more neighbour from the next round on."""
        with self._lock:
            self._links[peer] = link
            self._pending[peer] = deque()

    def drop(self, peer: int) -> None:
        """Close the link to a neighbour that is known to be lost."""
        with self._lock:
            # Traffic of closed links is kept, as results report all that was sent.
            if peer in self._links:
                link = self._links.pop(peer)
                self._closed[peer] = _add(self._closed.get(peer), link.traffic)
                self._pending[peer].clear()
                self._put_back.pop(peer, None)
                link.close()

    def link(self, peer: int) -> Link:
        """Return the link to a neighbour."""
        return self._links[peer]

    def stop_heartbeats(self) -> None:
        """Send no more heartbeats, so that this agent's silence counts."""
        self._ended.set()
        self._heart.join()

    def close(self) -> None:
        """Close all links, once the neighbours have read the last messages."""
        self.stop_heartbeats()
        # All part before any is closed: closing waits for the other end to part, and agents that
        # parted one by one could wait in a circle.
        for link in self._links.values():
            link.part()
        deadline = time.monotonic() + _SECONDS_TO_PART
        for link in self._links.values():
            link.close(max(deadline - time.monotonic(), 0.0))
        for peer in self.neighbours:
            self.drop(peer)

    def _catch_up(self, peer: int, began: float, deadline: float | None) -> list[LateMessage]:
        """Return all messages of a neighbour that this agent still waits for, in order."""
        link, pending, found = self._links[peer], self._pending[peer], []
        while pending:
            # Without a bound on the lag a neighbour could fall behind for ever, and the memory of
            # own messages would grow with it.
            may_skip = deadline is not None and len(pending) <= MAX_LAG
            if may_skip and not link.poll((deadline or 0.0) - time.monotonic()):
                break
            # A chain of agents that wait for each other ends after n time-outs at the latest, so a
            # neighbour that sends heartbeats for longer has a step that never ends.
            # The silence of all neighbours counts from the same moment, so that several lost ones
            # cost one time-out together.
            limit = self._timeout * (self._num_agents + 1)
            data = link.receive(self._timeout, limit=limit, since=began)
            header, parameters = decode_message(
                data, num_agents=self._num_agents, sender=peer, dtype=self.dtype
            )
            own = pending.popleft()
            # Compared with the own message of the same round, which is the oldest without an
            # answer: links keep the order.
            check_header(header, own.header)
            found.append(LateMessage(own, Received(header, parameters)))
            self._buffers.append((link, data))
        return found

    def _write(self, header: Header, values: Tensor) -> tuple[bytearray, Tensor]:
        """Return a message, and the copy of its numbers in it."""
        if self.on_send is not None:
            self.on_send(header, values)
        start = header.encode()
        message = bytearray(len(start) + values.nbytes)
        message[: len(start)] = start
        if not len(values):
            return message, values
        # A copy: links read it while the agent computes, and late neighbours need it even later.
        own = torch.frombuffer(message, dtype=self.dtype, offset=len(start))
        own.copy_(values)
        return message, own

    def _check_clock(self) -> None:
        """Notice that this process was suspended, as the clock was not checked for so long."""
        with self._lock:
            self._last_check, before = time.monotonic(), self._last_check
            if self._last_check - before > SUSPENDED_SHARE * self._timeout:
                self._exchanges_since_pause = 0

    def _send_heartbeats(self) -> None:
        # A thread of its own, as the agent may compute or wait for longer than the time-out.
        pause = self._timeout / _HEARTBEATS_PER_TIMEOUT
        while not self._ended.wait(pause / 2):
            self._check_clock()
            with self._lock:
                # Messages are signs of life too. Heartbeats fill the gaps only.
                if time.monotonic() - self._last_sent < pause:
                    continue
                for link in self._links.values():
                    link.send_heartbeat()
                self._last_sent = time.monotonic()


def _add(first: Traffic | None, second: Traffic | None) -> Traffic:
    both = [one for one in (first, second) if one is not None]
    return Traffic(
        messages_sent=sum(one.messages_sent for one in both),
        messages_received=sum(one.messages_received for one in both),
        bytes_sent=sum(one.bytes_sent for one in both),
        heartbeats=sum(one.heartbeats for one in both),
    )
