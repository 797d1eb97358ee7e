"""Links: one secure channel per edge of the graph, with a thread to send and one to receive.

A fault ends that link and no other. The roster decides which of two neighbours connects.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

from corn.topology import opens_link
from corn.transport.channel import (
    Channel,
    ChannelClosedError,
    Credentials,
    Dropout,
    LinkError,
    Purpose,
    TamperedError,
)
from corn.transport.listener import Address, Listener, dial

# No other message begins like this.
_HEARTBEAT = b"corn/hbt"
# More messages than a neighbour may be ahead; the network holds back the rest.
_MAX_ARRIVED = 32
# A condition is not woken when another agent refuses at the store, so waits are cut into pieces.
_SECONDS_BETWEEN_CHECKS = 0.2


@dataclass
class Traffic:
    """Counts of what was sent over one link; bytes include all that sealing adds.

    Heartbeats do not count: they show how long an agent computed, and so how much data it has.
    """

    messages_sent: int = 0
    bytes_sent: int = 0

    def add(self, other: Traffic) -> Traffic:
        """Return both counts together."""
        return Traffic(self.messages_sent + other.messages_sent, self.bytes_sent + other.bytes_sent)


@final
class Link:
    """Messages to and from one neighbour, in the order they were sent, of at most ``max_bytes``.

    Heartbeats are never delivered; ``note`` is that of the last one.
    """

    def __init__(self, channel: Channel, *, max_bytes: int) -> None:
        self.peer = channel.peer
        self._channel = channel
        self._max_bytes = max_bytes
        self._arrived: deque[memoryview] = deque()
        self._changed = threading.Condition()
        self._fault: Dropout | None = None
        self._last_heard = time.monotonic()
        self._outbox: queue.SimpleQueue[bytes | memoryview | None] = queue.SimpleQueue()
        # An empty queue does not mean that its last message has left, so both ends are counted.
        self._num_queued = self._num_left = 0
        self._cannot_send = False
        self.traffic = Traffic()
        self.note = memoryview(b"")
        self._receiver = threading.Thread(target=self._receive_all, daemon=True)
        self._receiver.start()
        threading.Thread(target=self._send_all, daemon=True).start()

    def send(self, message: bytes | memoryview) -> None:
        """Start to send a message, which must not change from now on."""
        self._num_queued += 1
        self._outbox.put(message)

    def send_heartbeat(self, note: bytes = b"") -> None:
        """Show the neighbour that this agent is alive, and what it waits for."""
        self.send(_HEARTBEAT + note)

    def receive(
        self, seconds: float, *, limit: float = math.inf, since: float | None = None
    ) -> memoryview:
        """Return the next message, or raise ``LinkError``.

        The neighbour is lost where nothing arrives for so many seconds, which count from ``since``,
        by default from now; or heartbeats alone until the limit.
        """
        began = time.monotonic()
        since = began if since is None else since
        with self._changed:
            # Messages that arrived before a fault are delivered first: a neighbour that finished
            # may close the link before this agent has read its last message.
            while not self._arrived:
                if self._fault is not None:
                    raise LinkError(f"the link to agent {self.peer} is broken", self._fault)
                now = time.monotonic()
                # The neighbour may have had no reason to send anything before this agent waited.
                silent_since = max(since, self._last_heard)
                left = min(silent_since + seconds, began + limit) - now
                if left <= 0:
                    is_silent = now >= silent_since + seconds
                    waited = now - (silent_since if is_silent else began)
                    raise LinkError(
                        f"agent {self.peer} sent no message within {waited:.1f} s",
                        Dropout.SILENT if is_silent else Dropout.STALLED,
                    )
                self._changed.wait(left)
            # The receiver may be waiting for room.
            self._changed.notify_all()
            return self._arrived.popleft()

    def wait_sent(self, seconds: float) -> None:
        """Wait until all messages have left, or raise ``LinkError``."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._num_left == self._num_queued or self._cannot_send, seconds
            )
            # A link may end right after the last message has left.
            if self._num_left < self._num_queued:
                fault = self._fault or (Dropout.CLOSED if self._cannot_send else Dropout.SILENT)
                raise LinkError(f"agent {self.peer} takes no messages", fault)

    def part(self) -> None:
        """Send no more after what is under way; the other end notices once it has read that."""
        self._outbox.put(None)

    def close(self, seconds: float = 0.0) -> None:
        """Break the link, after waiting so many seconds at most for the other end to part too."""
        # Closing a connection with unread bytes makes the system discard those under way.
        if seconds > 0:
            self._receiver.join(seconds)
        self._break(Dropout.CLOSED)

    def _receive_all(self) -> None:
        try:
            while True:
                message = self._channel.receive(max_bytes=self._max_bytes)
                with self._changed:
                    self._last_heard = time.monotonic()
                    if message[: len(_HEARTBEAT)] == _HEARTBEAT:
                        self.note = message[len(_HEARTBEAT) :]
                    else:
                        self._arrived.append(message)
                    self._changed.notify_all()
                    self._changed.wait_for(
                        lambda: len(self._arrived) < _MAX_ARRIVED or self._fault is not None
                    )
        except ChannelClosedError:
            self._break(Dropout.CLOSED)
        except TamperedError:
            self._break(Dropout.TAMPERED)

    def _send_all(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                sent = self._channel.send(message)
                with self._changed:
                    if message[: len(_HEARTBEAT)] != _HEARTBEAT:
                        self.traffic.bytes_sent += sent
                        self.traffic.messages_sent += 1
                    self._num_left += 1
                    self._changed.notify_all()
        except ChannelClosedError:
            pass  # the receiver notices it once it has read what the other end sent before
        # Half closed: the neighbour reads what is under way, and this end can still receive.
        self._channel.finish()
        with self._changed:
            self._cannot_send = True
            self._changed.notify_all()

    def _break(self, fault: Dropout) -> None:
        # The first fault is the cause; closing the channel leads to others.
        with self._changed:
            self._fault = self._fault or fault
            self._changed.notify_all()
        self._channel.close()
        # Wakes the sender, which may be waiting for a message that never comes.
        self._outbox.put(None)


@final
class LinkOpener:
    """Opens channels to other agents for one purpose, and takes those that they open.

    By default they are those of links, whose messages have ``max_bytes`` at most.
    """

    def __init__(
        self,
        listener: Listener,
        credentials: Credentials,
        *,
        session: bytes,
        addresses: Mapping[int, Address],
        max_bytes: int = 0,
        purpose: Purpose = Purpose.LINK,
    ) -> None:
        self._credentials = credentials
        self._session = session
        self._addresses = addresses
        self.max_bytes = max_bytes
        self._purpose = purpose
        # Channels that others have opened, each until it is taken.
        self._waiting: dict[int, Channel] = {}
        self._changed = threading.Condition(threading.RLock())
        self._is_closed = False
        # Agents may connect before this one asks for them.
        listener.handle(purpose, session, self._accept)

    def open_channel(
        self,
        peer: int,
        *,
        timeout: float,
        check: Callable[[], None] = lambda: None,
        connects: bool | None = None,
    ) -> Channel:
        """Return a channel to an agent, which must do the same, or raise ``LinkError``.

        This end ``connects`` or waits for the other end; by default the roster says which.
        """
        own = self._credentials
        if connects is None:
            # Each edge is opened by exactly one end, so two connections never cross.
            connects = opens_link(own.agent, peer, own.roster.accepts)
        if not connects:
            return self._wait(peer, timeout, check)
        # The address is the other agent's own statement, and may be missing.
        address = self._addresses.get(peer)
        if address is None:
            raise LinkError(f"agent {peer} published no address at which it accepts")
        return dial(
            address, own, peer, self._purpose, session=self._session, timeout=timeout, check=check
        )

    @property
    def waiting(self) -> frozenset[int]:
        """The agents that wait here."""
        with self._changed:
            return frozenset(self._waiting)

    def take_all(self) -> list[Channel]:
        """Return the channels of all agents that wait here."""
        with self._changed:
            taken, self._waiting = self._waiting, {}
            return list(taken.values())

    def put_back(self, channel: Channel) -> None:
        """Let an agent wait on, unless it has connected again meanwhile."""
        with self._changed:
            if self._is_closed or self._waiting.setdefault(channel.peer, channel) is not channel:
                channel.close()

    def reject(self, peer: int) -> None:
        """Close the channel of an agent that waits here, if any."""
        with self._changed:
            if peer in self._waiting:
                self._waiting.pop(peer).close()

    def close(self) -> None:
        """Close the channels that nobody took, and those that come."""
        with self._changed:
            self._is_closed = True
            for peer in list(self._waiting):
                self.reject(peer)

    def _wait(self, peer: int, timeout: float, check: Callable[[], None]) -> Channel:
        deadline = time.monotonic() + timeout
        with self._changed:
            while peer not in self._waiting:
                check()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LinkError(f"no connection from agent {peer} within {timeout:g} s")
                self._changed.wait(min(left, _SECONDS_BETWEEN_CHECKS))
            return self._waiting.pop(peer)

    def _accept(self, channel: Channel) -> None:
        with self._changed:
            # An agent that connects again has given up its first connection.
            self.reject(channel.peer)
            self._waiting[channel.peer] = channel
            # The handshake of a connection may end after this was closed.
            if self._is_closed:
                self.reject(channel.peer)
            self._changed.notify_all()


def open_links(
    opener: LinkOpener,
    peers: Iterable[int],
    *,
    timeout: float,
    check: Callable[[], None] = lambda: None,
    connects: bool | None = None,
    needs_all: bool = True,
) -> dict[int, Link]:
    """Connect to agents, which must do the same; see :meth:`LinkOpener.open_channel`."""
    links: dict[int, Link] = {}

    def open_one(peer: int) -> None:
        try:
            channel = opener.open_channel(peer, timeout=timeout, check=check, connects=connects)
            links[peer] = Link(channel, max_bytes=opener.max_bytes)
        except LinkError:
            if needs_all:
                raise

    peers = sorted(peers)
    try:
        # All at the same time: whoever waits for one that is gone still connects to the others,
        # which would otherwise miss this agent too, and name it.
        with ThreadPoolExecutor(max(len(peers), 1)) as pool:
            list(pool.map(open_one, peers))
    except BaseException:
        for link in links.values():
            link.close()
        raise
    return links
