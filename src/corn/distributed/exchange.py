"""Exchange of messages: one to and from every neighbour per mixing round, all at the same time.

Every message is checked here: one that breaks a rule costs its sender the link to this agent.

An agent that has sent nothing for a third of the time-out sends a *heartbeat*, and its neighbours
keep waiting; after n + 1 time-outs without anything else it is lost too. In a mixing round those
that wait for its neighbours must not lose patience first: heartbeats carry the signed waits of all
agents behind their sender, and each of them is worth a time-out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from corn.distributed.membership import Membership
from corn.distributed.messages import (
    Header,
    ProtocolError,
    check_header,
    decode_message,
    decode_piece,
    encode_piece,
    is_piece,
    is_sane,
)
from corn.transport import Dropout, Link, LinkError, Traffic

_HEARTBEATS_PER_TIMEOUT = 3
# Bounded, as a neighbour that hangs would otherwise keep this agent from ending.
_SECONDS_TO_PART = 2.0


class Received(NamedTuple):
    """A message of a neighbour."""

    header: Header
    parameters: Tensor


class StepStopped(Exception):  # noqa: N818 - an outcome, not an error
    """The step cannot be completed: ``dropouts`` are lost, or a neighbour calls for a recovery."""

    def __init__(self, dropouts: Mapping[int, LinkError] | None = None) -> None:
        self.dropouts = dropouts or {}
        super().__init__()


@final
class Exchange:
    """Messages to and from all neighbours, in two halves between which an agent can compute.

    Messages have numbers of ``dtype``: integers of sums, or floats of models. ``on_send`` gets
    every message, for audits. ``check_call`` raises ``ProtocolError`` for a false call for a
    recovery.
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        membership: Membership,
        *,
        dtype: torch.dtype,
        timeout: float,
    ) -> None:
        self._links = dict(links)
        self.membership = membership
        self.timeout = timeout
        self.dtype = dtype
        self.on_send: Callable[[Header, Tensor], None] = lambda *_: None
        self.check_call: Callable[[Header], None] = lambda _: None
        self._own: Header | None = None
        self._check: Callable[[Header], None] = lambda _: None
        # In a mixing round: the neighbour that this agent waits for, and the message's number.
        self._awaited: tuple[int, int] | None = None
        self._put_back: dict[int, Received] = {}
        self._closed: dict[int, Traffic] = {}
        # The lock keeps heartbeats from being sent over a link that is being closed.
        self._lock = threading.RLock()
        self._began = self._last_sent = time.monotonic()
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._send_heartbeats, daemon=True)
        self._heart.start()

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Neighbours that are still linked."""
        return tuple(sorted(self._links))

    @property
    def patience(self) -> float:
        """Seconds after which a neighbour is lost that sends nothing but heartbeats."""
        # A chain of agents that wait for each other ends after n time-outs at the latest.
        return self.timeout * (self.membership.num_agents + 1)

    @property
    def traffic(self) -> dict[int, Traffic]:
        """Traffic over each link so far, broken ones included."""
        found = dict(self._closed)
        for peer, link in self._links.items():
            found[peer] = found.get(peer, Traffic()).add(link.traffic)
        return found

    def start(self, header: Header, parameters: Tensor) -> None:
        """Begin to send to every neighbour; links receive all the time."""
        self._own = header
        self._check = self.expect(header)
        self.send(self.neighbours, header, parameters)
        self._began = self._last_sent = time.monotonic()

    def finish(self, number: int = 0) -> dict[int, Tensor]:
        """Return the parameters of every neighbour; ``number`` is the round's, over all steps.

        Raise ``StepStopped`` if neighbours were lost, or one calls for a recovery.
        """
        received: dict[int, Tensor] = {}
        dropouts: dict[int, LinkError] = {}
        is_called = False
        for peer in self.neighbours:
            try:
                # The silence of all counts from the same moment: lost ones cost one time-out.
                self._awaited = peer, number
                deadline = self._began + self.patience
                found = self.receive(peer, self._check, since=self._began, deadline=deadline)
                if found.header.attempt:
                    self.put_back(peer, found)
                    self.membership.merge(found.header.news)
                    is_called = True
                    break
                received[peer] = found.parameters
                # A neighbour reads all the time. One that does not would fill this agent's memory.
                self._links[peer].wait_sent(self.patience)
            except LinkError as error:
                dropouts[peer] = error
                received.pop(peer, None)
                self.drop(peer)
            finally:
                self._awaited = None
        if dropouts or is_called:
            raise StepStopped(dropouts)
        return received

    def send(self, peers: Iterable[int], header: Header, values: Tensor) -> None:
        """Begin to send a message to some neighbours."""
        self.on_send(header, values)
        self.send_piece(peers, header, values, 0)

    def send_piece(self, peers: Iterable[int], header: Header, values: Tensor, number: int) -> None:
        """Begin to send a piece of a message to some neighbours: the first with the header."""
        message = _write(encode_piece(number) if number else header.encode(), values)
        # Without a new time of the last message: the other neighbours still need heartbeats.
        with self._lock:
            for peer in peers:
                self._links[peer].send(memoryview(message))

    def receive(
        self,
        peer: int,
        check: Callable[[Header], None],
        *,
        deadline: float,
        since: float | None = None,
    ) -> Received:
        """Return a neighbour's next message, or first piece of a sum, or raise ``LinkError``.

        ``check`` raises ``ProtocolError`` unless its header may come now. Silence counts ``since``
        a time, by default from now; heartbeats extend the wait until ``deadline``.
        """
        if peer in self._put_back:
            found = self._put_back.pop(peer)
            check(found.header)
            return found
        data = self._read(peer, since, deadline)
        while is_piece(data) and not self.dtype.is_floating_point:
            data = self._read(peer, since, deadline)
        return self._decode(peer, data, check)

    def receive_piece(
        self, peer: int, number: int, like: Tensor, *, deadline: float
    ) -> Tensor | Received:
        """Return the next piece of a neighbour's sum, or a message in its place."""
        data = self._read(peer, None, deadline)
        if is_piece(data):
            return decode_piece(data, number, like, sender=peer)
        return self._decode(peer, data, self.expect(None))

    def _read(self, peer: int, since: float | None, deadline: float) -> memoryview:
        while True:
            limit = deadline - time.monotonic()
            # What has arrived is read even now, but not for ever.
            if limit < -self.timeout:
                raise LinkError(f"agent {peer} does not come to an end", Dropout.STALLED)
            try:
                return self._links[peer].receive(self.timeout, limit=limit, since=since)
            except LinkError as error:
                later = self._extend(deadline)
                if error.dropout is not Dropout.STALLED or later <= deadline:
                    raise
                deadline = later

    def _extend(self, deadline: float) -> float:
        """Return when the wait of a mixing round ends, or this deadline outside of one."""
        if self._awaited is None:
            return deadline
        self._gather_waits()
        num_waits = self.membership.count_waits(*self._awaited)
        return self._began + self.patience + self.timeout * num_waits

    def _gather_waits(self) -> None:
        """Read for whom neighbours wait, from their last heartbeats."""
        with self._lock:
            for peer, link in self._links.items():
                # Whoever sends something else is lost as soon as one that says nothing.
                with suppress(ProtocolError):
                    if len(link.note):
                        self.membership.merge_waits(self._parse(peer, link.note)[0].news)

    def _parse(self, peer: int, data: memoryview) -> tuple[Header, Tensor]:
        n = self.membership.num_agents
        return decode_message(data, num_agents=n, sender=peer, dtype=self.dtype)

    def _decode(self, peer: int, data: memoryview, check: Callable[[Header], None]) -> Received:
        header, values = self._parse(peer, data)
        check(header)
        self.membership.check(header)
        is_model = values.dtype.is_floating_point
        # A recovery sends whole sums.
        if values.nbytes != header.payload_bytes and (header.attempt or is_model):
            raise ProtocolError(f"agent {peer} sent a part of a message")
        # Integers of exact sums have no meaning on their own: only the total can be checked.
        if is_model and not is_sane(values):
            raise ProtocolError(f"agent {peer} sent a model that is not finite, or absurdly large")
        return Received(header, values)

    def put_back(self, peer: int, message: Received) -> None:
        """Let the next ``receive`` return a message once more."""
        self._put_back[peer] = message

    def finish_sending(self, seconds: float) -> None:
        """Wait until all messages have left, at most so long for each link."""
        for link in list(self._links.values()):
            with suppress(LinkError):  # the neighbour is gone, or takes no messages
                link.wait_sent(seconds)

    def add(self, peer: int, link: Link) -> None:
        """Exchange messages with one more neighbour from the next round on."""
        with self._lock:
            self._links[peer] = link

    def drop(self, peer: int) -> None:
        """Close the link to a neighbour that is known to be lost."""
        with self._lock:
            # Traffic of closed links is kept, as results report all that was sent.
            if peer in self._links:
                self._closed[peer] = self.traffic[peer]
                link = self._links.pop(peer)
                self._put_back.pop(peer, None)
                link.close()

    def stop_heartbeats(self) -> None:
        """Send no more heartbeats, so that this agent's silence counts."""
        self._ended.set()
        self._heart.join()

    def close(self) -> None:
        """Close all links, once the neighbours have read the last messages."""
        self.stop_heartbeats()
        # All part before any is closed: agents that parted one by one could wait in a circle.
        for link in self._links.values():
            link.part()
        deadline = time.monotonic() + _SECONDS_TO_PART
        for link in self._links.values():
            link.close(max(deadline - time.monotonic(), 0.0))
        for peer in self.neighbours:
            self.drop(peer)

    def expect(self, own: Header | None) -> Callable[[Header], None]:
        """Return a check that a header is one like the own, if any, or a call for a recovery."""

        def check(header: Header) -> None:
            if header.attempt:
                self.check_call(header)
            elif own is None:
                raise ProtocolError(f"agent {header.sender} sent no more of its sum")
            else:
                check_header(header, own)

        return check

    def _make_note(self) -> bytes:
        """Return for whom this agent waits in a mixing round; nothing outside of one."""
        awaited = self._awaited  # once, as the agent's own thread changes it
        if awaited is None or self._own is None:
            return b""
        self._gather_waits()
        news = self.membership.say_waits(*awaited)
        return replace(self._own, payload_bytes=0, news=news).encode()

    def _send_heartbeats(self) -> None:
        # A thread of its own, as the agent may compute or wait for longer than the time-out.
        pause = self.timeout / _HEARTBEATS_PER_TIMEOUT
        while not self._ended.wait(pause / 2):
            with self._lock:
                # Messages are signs of life too. Heartbeats fill the gaps only.
                if time.monotonic() - self._last_sent < pause:
                    continue
                note = self._make_note()
                for link in self._links.values():
                    link.send_heartbeat(note)
                self._last_sent = time.monotonic()


def _write(start: bytes, values: Tensor) -> bytearray:
    """Return bytes to send, with a copy of the numbers: links read it while the agent computes."""
    message = bytearray(len(start) + values.nbytes)
    message[: len(start)] = start
    if len(values):
        torch.frombuffer(message, dtype=values.dtype, offset=len(start)).copy_(values)
    return message
