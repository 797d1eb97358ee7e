"""One message to and from every neighbour, all at the same time; who fails to send is a dropout.

An agent that waits for a slow neighbour is not slow itself. So whoever has sent nothing for a third
of the time-out sends a short *wait* message, which tells its neighbours to go on waiting: only an
agent that sends nothing at all is given up, and the fault does not spread. In a run without trouble
there are no such messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, final

import torch
from torch import Tensor

from corn.distributed.header import (
    SEAL_BYTES,
    Header,
    check_header,
    decode_header,
    header_bytes,
)
from corn.distributed.links import Link, LinkError
from corn.distributed.membership import NEVER

_BEATS_PER_TIMEOUT = 3
SUSPICIOUS_SHARE = 0.5
"""Of the time-out: who stood still for longer may have been given up, as the waits before and after
a pause come up to half a time-out late."""
_PROOF_OF_LIFE = 3


@dataclass(frozen=True)
class Received:
    """A neighbour's message; the parameters are valid until the next exchange begins."""

    header: Header
    parameters: Tensor


@dataclass(frozen=True)
class Dropout:
    """A neighbour that is gone, and how that was noticed."""

    reason: str


@dataclass(frozen=True)
class Traffic:
    """What went over one link: parameters and nothing else, but for waits."""

    messages_sent: int
    messages_received: int
    bytes_sent: int
    waits: int


class Exchange(Protocol):
    """How messages get to neighbours and back, in two halves between which an agent can work."""

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Who is still linked."""

    @property
    def was_suspended(self) -> bool:
        """Whether this process stood still for so long that others may have given it up."""

    def start(self, header: Header, parameters: Tensor) -> None:
        """Begin to send to and receive from every neighbour."""

    def finish(self) -> Mapping[int, Received | Dropout]:
        """Wait for every neighbour; those who dropped out are no longer neighbours."""

    def drop(self, peer: int) -> None:
        """Close the link to a neighbour that is known to be lost."""


@final
class LinkExchange:
    """Exchanges over :mod:`corn.distributed.links`.

    Args:
        links: one for each neighbour.
        agent: whose.
        num_agents: n, which sets the size of headers.
        num_parameters: d.
        dtype: of the parameters.
        timeout: seconds of silence after which a neighbour is given up.
        senders: who of the neighbours sends to this agent; by default all.
        receivers: to whom this agent sends; by default all.
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        *,
        agent: int,
        num_agents: int,
        num_parameters: int,
        dtype: torch.dtype,
        timeout: float,
        senders: frozenset[int] | None = None,
        receivers: frozenset[int] | None = None,
    ) -> None:
        self._links, self._num_agents, self._timeout = dict(links), num_agents, timeout
        self._senders = frozenset(links) if senders is None else senders
        self._receivers = frozenset(links) if receivers is None else receivers
        self._payload = slice(
            header_bytes(num_agents), header_bytes(num_agents) + num_parameters * dtype.itemsize
        )
        self._dtype = dtype
        self._message = torch.zeros(self._payload.stop + SEAL_BYTES, dtype=torch.uint8)
        silence = tuple([NEVER] * num_agents)
        self._own = Header(bytes(8), bytes(8), agent, 0, 0, 0, 0, silence)
        self._has_begun = False
        self._dropouts: dict[int, Dropout] = {}
        self._closed: dict[int, Traffic] = {}
        self._waits = dict.fromkeys(links, 0)
        self._lock, self._last_sent = threading.RLock(), time.monotonic()
        self._last_look = self._last_sent
        self._ended, self._exchanges_since_pause = threading.Event(), _PROOF_OF_LIFE
        self._beat = threading.Thread(target=self._send_waits, daemon=True)
        self._beat.start()

    @property
    def neighbours(self) -> tuple[int, ...]:
        """See ``Exchange``."""
        return tuple(sorted(self._links))

    @property
    def was_suspended(self) -> bool:
        """See ``Exchange``.

        Two messages of a neighbour may have been on their way before the pause; a third shows that
        it still takes this agent for alive.
        """
        self._look_at_clock()  # it may be asked before the other thread has woken up
        return self._exchanges_since_pause < _PROOF_OF_LIFE

    @property
    def traffic(self) -> dict[int, Traffic]:
        """What went over each link so far, broken ones included."""
        return self._closed | {peer: self._count(peer) for peer in self._links}

    def summarize(self) -> tuple[int, int]:
        """How many neighbours are left, and how many bytes were sent."""
        return len(self._links), sum(own.bytes_sent for own in self.traffic.values())

    def start(self, header: Header, parameters: Tensor) -> None:
        """See ``Exchange``."""
        self._own, self._dropouts, self._has_begun = header, {}, True
        self._message[: self._payload.start] = _as_bytes(header.encode())
        self._message[self._payload].view(self._dtype).copy_(parameters)
        self._message[self._payload.stop :] = _as_bytes(header.seal)
        with self._lock:
            for peer in self.neighbours:
                if peer in self._senders:
                    self._try(peer, Link.post_receive)
            for peer in self.neighbours:
                if peer in self._receivers:
                    self._try(peer, lambda link: link.send(self._message))
            self._last_sent = time.monotonic()

    def finish(self) -> Mapping[int, Received | Dropout]:
        """See ``Exchange``.

        Raises:
            ProtocolError: a neighbour's message is not this step's, in one line that names it.
        """
        received: dict[int, Received | Dropout] = {}
        for peer in self.neighbours:
            if peer in self._senders and (found := self._receive(peer)) is not None:
                received[peer] = found
        for peer in self.neighbours:
            # Who has sent its message was ready for this one before, so this takes no time; where
            # a link is one-way, its end may itself be waiting for somebody.
            patience = self._timeout * (1 if peer in self._senders else self._num_agents + 1)
            self._try(peer, partial(Link.wait_sent, seconds=patience))
        with self._lock:
            self._exchanges_since_pause += not self._dropouts
        return received | self._dropouts

    def drop(self, peer: int) -> None:
        """See ``Exchange``."""
        with self._lock:
            if peer in self._links:
                self._closed[peer] = self._count(peer)
                self._links.pop(peer).close()

    def link(self, peer: int) -> Link:
        """The link to a neighbour."""
        return self._links[peer]

    def stop_beating(self) -> None:
        """Send no more waits: from now on this agent's silence counts."""
        self._ended.set()
        self._beat.join()

    def close(self) -> None:
        """Close all links."""
        self.stop_beating()
        for peer in self.neighbours:
            self.drop(peer)

    def _receive(self, peer: int) -> Received | None:
        link = self._links[peer]
        # A chain of agents that wait for each other ends after n time-outs at the latest.
        for _ in range(_BEATS_PER_TIMEOUT * (self._num_agents + 1)):
            if not self._try(peer, partial(Link.wait_received, seconds=self._timeout)):
                return None
            header = self._decode(link)
            if not header.is_wait:
                seal = link.buffer[self._payload.stop : self._payload.stop + SEAL_BYTES]
                check_header(header, self._own, bytes(seal.numpy()))
                return Received(header, link.buffer[self._payload].view(self._dtype))
            self._waits[peer] += 1
            if not self._try(peer, Link.post_receive):
                return None
        self._dropouts[peer] = Dropout(f"agent {peer} is alive, but its step does not end")
        self.drop(peer)
        return None

    def _decode(self, link: Link) -> Header:
        data = bytes(link.buffer[: self._payload.start].numpy())
        return decode_header(data, num_agents=self._num_agents, sender=link.peer)

    def _try(self, peer: int, action: Callable[[Link], None]) -> bool:
        """Do something with a link; if that breaks it, note the dropout."""
        began = time.monotonic()
        try:
            action(self._links[peer])
        except LinkError:
            silent = time.monotonic() - began >= 0.9 * self._timeout
            self._dropouts[peer] = Dropout(
                f"agent {peer} sent nothing for {self._timeout:g} s (time-out)"
                if silent
                else f"agent {peer} closed its connection"
            )
            self.drop(peer)
            return False
        return True

    def _count(self, peer: int) -> Traffic:
        link, waits = self._links[peer], self._waits[peer]
        return Traffic(link.messages_sent, link.messages_received - waits, link.bytes_sent, waits)

    def _look_at_clock(self) -> None:
        """Notice that this process stood still, as nobody has looked for so long."""
        with self._lock:
            self._last_look, before = time.monotonic(), self._last_look
            if self._last_look - before > SUSPICIOUS_SHARE * self._timeout:
                self._exchanges_since_pause = 0

    def _send_waits(self) -> None:
        """Run beside the agent: a wait whenever nothing was sent for a third of the time-out."""
        pause = self._timeout / _BEATS_PER_TIMEOUT
        while not self._ended.wait(pause / 2):
            self._look_at_clock()
            with self._lock:
                if not self._has_begun or time.monotonic() - self._last_sent < pause:
                    continue
                wait = _as_bytes(replace(self._own, is_wait=True).encode())
                for peer in set(self._links) & self._receivers:
                    _send_quietly(self._links[peer], wait)
                self._last_sent = time.monotonic()


def _send_quietly(link: Link, message: Tensor) -> None:
    try:
        link.send_note(message)
    except LinkError:
        return  # the agent itself finds out when it needs the link


def _as_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
