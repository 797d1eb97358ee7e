"""Exchange of messages: one to and from every neighbour per mixing round, all at the same time.

A message is one buffer: a header, d parameters, and a seal of eight bytes. Gloo accepts a message
that is shorter than the buffer without an error, so only the seal shows that all of it arrived.

An agent that waits for a slow neighbour is not slow itself. So an agent that has sent nothing for a
third of the time-out sends a short *heartbeat*, upon which its neighbours keep waiting. Only an
agent that sends nothing at all is lost, and its silence does not make its neighbours look lost too.
In a run without trouble there are no heartbeats.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import final

import torch
from torch import Tensor

from corn.distributed.links import Link, LinkError, Traffic
from corn.errors import PublicError

NEVER = 2**32 - 1
"""The step at which no loss was noticed, and after which no run stops."""
PREFIX_BYTES = 8
SEAL_BYTES = 8
SUSPENDED_SHARE = 0.5
"""The share of the time-out after which an agent that was suspended may have been declared lost:
its neighbours' waits before and after the pause are up to half a time-out late."""

_MAGIC = b"corn/msg"
_FIXED = struct.Struct("<8s8s8sIIIIQBBHI")
_ALIGNMENT = 64
_HEARTBEATS_PER_TIMEOUT = 3
# Two messages of a neighbour may have been under way before a pause; a third one shows that it
# still takes this agent for alive.
_PROOF_OF_LIFE = 3


class StopReason(StrEnum):
    """The reason for an end before the last step. Headers carry the position in this list."""

    NONE = "none"
    INTERRUPTED = "interrupted"
    LOSS = "loss"
    DIVERGED = "diverged"
    BUDGET_SPENT = "budget spent"


_REASONS = tuple(StopReason)


@dataclass(frozen=True, order=True)
class StopNotice:
    """Announcement that all stop after ``step`` steps, because of ``agent``; the least counts."""

    step: int = NEVER
    agent: int = 0
    reason: StopReason = StopReason.NONE


NO_STOP = StopNotice()


class ProtocolError(PublicError):
    """A message that is not the neighbour's message of this step: the run cannot be trusted."""


@dataclass(frozen=True)
class Header:
    """The description of a message, and what its sender knows of losses.

    Attributes:
        plan: the first 8 bytes of the fingerprint of the plan in force.
        next_plan: those of the plan that replaces it at the next step; zeros if none does.
        sender: the agent.
        step: from 0.
        mixing_round: of the step, from 0.
        degree: number of neighbours to which the sender is still linked.
        payload_bytes: the size of the parameters.
        noticed: for each agent the step at which its loss was noticed (see ``Membership``).
        stop: the earliest stop that the sender knows of.
        is_heartbeat: whether it carries no parameters, and shows only that its sender is alive.
    """

    plan: bytes
    next_plan: bytes
    sender: int
    step: int
    mixing_round: int
    degree: int
    payload_bytes: int
    noticed: tuple[int, ...]
    stop: StopNotice = NO_STOP
    is_heartbeat: bool = False

    def encode(self) -> bytes:
        """Return the header as bytes, ``header_bytes`` of them."""
        fixed = _FIXED.pack(
            _MAGIC,
            self.plan,
            self.next_plan,
            self.sender,
            self.step,
            self.mixing_round,
            self.degree,
            self.payload_bytes,
            int(self.is_heartbeat),
            _REASONS.index(self.stop.reason),  # by position: a name has no fixed size
            self.stop.agent,
            self.stop.step,
        )
        body = fixed + struct.pack(f"<{len(self.noticed)}I", *self.noticed)
        return body.ljust(header_bytes(len(self.noticed)), b"\0")

    @property
    def seal(self) -> bytes:
        """The last bytes of the message; never zero."""
        # Links zero the seal's place before they receive. A seal of zeros would seem to be there.
        return struct.pack("<II", self.step + 1, self.mixing_round + 1)


def header_bytes(num_agents: int) -> int:
    """Return the size of a header, a few bytes per agent, rounded up to align the parameters.

    >>> header_bytes(20)
    192
    """
    size = _FIXED.size + 4 * num_agents
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def message_bytes(num_agents: int, payload_bytes: int) -> int:
    """Return the size of a message: header, parameters and seal."""
    return header_bytes(num_agents) + payload_bytes + SEAL_BYTES


def decode_header(data: bytes, *, num_agents: int, sender: int) -> Header:
    """Read a header that came from ``sender``; raise ``ProtocolError`` for anything else."""
    fields = _FIXED.unpack_from(data)
    magic, plan, next_plan, found, step, mixing_round, degree, size, kind, why, who, stop = fields
    # Every field comes from another machine: positions must be in range before they are used.
    is_sound = kind < 2 and why < len(_REASONS) and who < num_agents
    if magic != _MAGIC or not is_sound:
        raise ProtocolError(f"agent {sender} sent bytes that are not a message of CorN")
    if found != sender:
        raise ProtocolError(f"agent {sender}'s link carries a message of agent {found}")
    return Header(
        plan=plan,
        next_plan=next_plan,
        sender=found,
        step=step,
        mixing_round=mixing_round,
        degree=degree,
        payload_bytes=size,
        noticed=struct.unpack_from(f"<{num_agents}I", data, _FIXED.size),
        stop=StopNotice(stop, who, _REASONS[why]),
        is_heartbeat=bool(kind),
    )


def check_header(found: Header, own: Header, seal: bytes) -> None:
    """Raise ``ProtocolError`` unless a message belongs to the same step of the same run."""
    who = f"agent {found.sender}"
    if found.plan != own.plan:
        raise ProtocolError(f"{who} runs another plan ({found.plan.hex()}, not {own.plan.hex()})")
    # A model of another step would be mixed without an error, and agents would drift apart.
    if (found.step, found.mixing_round) != (own.step, own.mixing_round):
        raise ProtocolError(
            f"{who} is at step {found.step}, round {found.mixing_round}, not at step {own.step}, "
            f"round {own.mixing_round}"
        )
    if found.payload_bytes != own.payload_bytes:
        raise ProtocolError(
            f"{who} sent {found.payload_bytes} bytes of parameters, not {own.payload_bytes}"
        )
    if seal != own.seal:
        raise ProtocolError(f"{who} sent a message that was cut short")


@dataclass(frozen=True)
class Received:
    """A neighbour's message; the parameters are valid until the next exchange begins."""

    header: Header
    parameters: Tensor


class Dropout(StrEnum):
    """The way in which the loss of a neighbour was noticed."""

    CLOSED = "closed"
    SILENT = "silent"
    STALLED = "stalled"


@final
class Exchange:
    """Messages to and from all neighbours, in two halves between which an agent can compute.

    Args:
        links: one for each neighbour.
        agent: this agent's number.
        num_agents: n, which sets the size of headers.
        num_parameters: d.
        dtype: of the parameters.
        timeout: seconds without a message after which a neighbour is lost.
        senders: the neighbours that send to this agent; by default all.
        receivers: the neighbours to which this agent sends; by default all.
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
        begin = header_bytes(num_agents)
        self._payload = slice(begin, begin + num_parameters * dtype.itemsize)
        self._dtype = dtype
        self._message = torch.zeros(self._payload.stop + SEAL_BYTES, dtype=torch.uint8)
        unknown = tuple([NEVER] * num_agents)
        nothing = bytes(PREFIX_BYTES)
        # Heartbeats repeat the last header. Before the first message there is none to repeat.
        self._own = Header(nothing, nothing, agent, 0, 0, 0, 0, unknown)
        self._has_begun = False
        self._dropouts: dict[int, Dropout] = {}
        self._closed: dict[int, Traffic] = {}
        self._heartbeats = dict.fromkeys(links, 0)
        # The lock keeps heartbeats from being sent between the parts of an exchange, or over a
        # link that is being closed.
        self._lock, self._last_sent = threading.RLock(), time.monotonic()
        self._last_check = self._last_sent
        self._ended, self._exchanges_since_pause = threading.Event(), _PROOF_OF_LIFE
        self._heart = threading.Thread(target=self._send_heartbeats, daemon=True)
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
        return self._closed | {peer: self._count(peer) for peer in self._links}

    def summarize(self) -> tuple[int, int]:
        """Return how many neighbours are left, and how many bytes were sent."""
        return len(self._links), sum(own.bytes_sent for own in self.traffic.values())

    def start(self, header: Header, parameters: Tensor) -> None:
        """Begin to send to and receive from every neighbour."""
        self._own, self._dropouts, self._has_begun = header, {}, True
        self._message[: self._payload.start] = _as_bytes(header.encode())
        # A copy, which stays as it is until ``finish``: gloo reads it while the agent computes.
        self._message[self._payload].view(self._dtype).copy_(parameters)
        self._message[self._payload.stop :] = _as_bytes(header.seal)
        with self._lock:
            # Receives are posted first: then a neighbour's send can complete at once.
            for peer in self.neighbours:
                if peer in self._senders:
                    self._try(peer, Link.post_receive)
            for peer in self.neighbours:
                if peer in self._receivers:
                    self._try(peer, lambda link: link.send(self._message))
            self._last_sent = time.monotonic()

    def finish(self) -> Mapping[int, Received | Dropout]:
        """Wait for every neighbour; those that dropped out are no longer neighbours.

        Raises:
            ProtocolError: a neighbour's message is not this step's, in one line that names it.
        """
        received: dict[int, Received | Dropout] = {}
        for peer in self.neighbours:
            if peer in self._senders and (found := self._receive(peer)) is not None:
                received[peer] = found
        for peer in self.neighbours:
            # A neighbour that has sent its message had posted its receive before, so this takes no
            # time. The receiver of a one-way link may itself be waiting for another agent.
            patience = self._timeout * (1 if peer in self._senders else self._num_agents + 1)
            self._try(peer, partial(Link.wait_sent, seconds=patience))
        # An exchange with a dropout proves nothing: it may be the others that dropped this agent.
        with self._lock:
            self._exchanges_since_pause += not self._dropouts
        return received | self._dropouts

    def drop(self, peer: int) -> None:
        """Close the link to a neighbour that is known to be lost."""
        with self._lock:
            # Traffic of closed links is kept, as results report all that was sent.
            if peer in self._links:
                self._closed[peer] = self._count(peer)
                self._links.pop(peer).close()

    def link(self, peer: int) -> Link:
        """Return the link to a neighbour."""
        return self._links[peer]

    def stop_heartbeats(self) -> None:
        """Send no more heartbeats, so that this agent's silence counts."""
        self._ended.set()
        self._heart.join()

    def close(self) -> None:
        """Close all links."""
        self.stop_heartbeats()
        for peer in self.neighbours:
            self.drop(peer)

    def _receive(self, peer: int) -> Received | None:
        link = self._links[peer]
        # A chain of agents that wait for each other ends after n time-outs at the latest, so more
        # heartbeats than that come from an agent whose step never ends.
        for _ in range(_HEARTBEATS_PER_TIMEOUT * (self._num_agents + 1)):
            if not self._try(peer, partial(Link.wait_received, seconds=self._timeout)):
                return None
            data = bytes(link.buffer[: self._payload.start].numpy())
            header = decode_header(data, num_agents=self._num_agents, sender=peer)
            # Heartbeats are not checked further: one may be left over from the step before.
            if not header.is_heartbeat:
                seal = link.buffer[self._payload.stop : self._payload.stop + SEAL_BYTES]
                check_header(header, self._own, bytes(seal.numpy()))
                return Received(header, link.buffer[self._payload].view(self._dtype))
            self._heartbeats[peer] += 1
            if not self._try(peer, Link.post_receive):
                return None
        self._dropouts[peer] = Dropout.STALLED
        self.drop(peer)
        return None

    def _try(self, peer: int, action: Callable[[Link], None]) -> bool:
        """Use a link, and note a dropout if that breaks it."""
        began = time.monotonic()
        try:
            action(self._links[peer])
        except LinkError:
            # Gloo raises the same error for a time-out and for a closed connection.
            is_silent = time.monotonic() - began >= 0.9 * self._timeout
            self._dropouts[peer] = Dropout.SILENT if is_silent else Dropout.CLOSED
            self.drop(peer)
            return False
        return True

    def _count(self, peer: int) -> Traffic:
        link, beats = self._links[peer], self._heartbeats[peer]
        return Traffic(
            messages_sent=link.messages_sent,
            messages_received=link.messages_received - beats,
            bytes_sent=link.bytes_sent,
            heartbeats=beats,
        )

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
                if not self._has_begun or time.monotonic() - self._last_sent < pause:
                    continue
                beat = _as_bytes(replace(self._own, is_heartbeat=True).encode())
                for peer in set(self._links) & self._receivers:
                    try:
                        self._links[peer].send_note(beat)
                    except LinkError:
                        continue  # the next exchange notices it
                self._last_sent = time.monotonic()


def _as_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
