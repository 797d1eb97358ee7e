"""Links: one connection per edge of the graph, each a gloo group of two.

In gloo a wait that times out breaks every connection of its group. With a group for each link a
fault ends that link and no other, and agents that are not neighbours are not connected at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import PrefixStore, Store

from corn.errors import PublicError

_TAG = 0
_SLACK_BYTES = 1 << 20


class LinkError(PublicError):
    """A broken link: its other end is gone, or closed it."""


@dataclass(frozen=True)
class Traffic:
    """Counts of messages and bytes over one link."""

    messages_sent: int
    messages_received: int
    bytes_sent: int
    heartbeats: int


@final
class Link:
    """Messages to and from one neighbour, which gloo delivers in the order they were sent.

    Args:
        group: a process group of two.
        agent: this end.
        peer: the other end.
        message_bytes: the size of a message.
    """

    def __init__(self, group: Any, *, agent: int, peer: int, message_bytes: int) -> None:
        self.peer, self.message_bytes = peer, message_bytes
        self._group, self._peer_rank = group, int(agent < peer)
        # Gloo ends the process (SIGABRT) when a message exceeds the buffer, so there is room for
        # more than agreed. Pages that are never written cost no memory.
        self.buffer = torch.empty(2 * message_bytes + _SLACK_BYTES, dtype=torch.uint8)
        self._received: Any = None
        self._sent: tuple[Any, Tensor] | None = None
        self._notes: list[tuple[Any, Tensor]] = []
        self._num_notes_before = 0
        self.messages_sent = self.bytes_sent = self.messages_received = 0

    def post_receive(self) -> None:
        """Start to receive the next message."""
        # Wipe the last message's seal, or a shorter message would leave it in place.
        self.buffer[self.message_bytes - 8 : self.message_bytes] = 0
        self._received = self._call(self._group.recv, [self.buffer], self._peer_rank, _TAG)

    def wait_received(self, seconds: float) -> None:
        """Wait for the message; after so many seconds the link is broken for good."""
        self._call(self._received.wait, timedelta(seconds=seconds))
        self.messages_received += 1

    def send(self, message: Tensor) -> None:
        """Start to send; the message must stay as it is until ``wait_sent`` returns."""
        # Gloo reads a message from the caller's memory until it has left, notes included. The
        # receiver takes messages in order: once this one has left, so have the notes before it.
        self._num_notes_before = len(self._notes)
        self._sent = self._start(message), message
        self.messages_sent += 1
        self.bytes_sent += message.numel()

    def send_note(self, message: Tensor) -> None:
        """Send a message for which no neighbour waits; it is received before any later one."""
        self._notes.append((self._start(message), message))

    def wait_sent(self, seconds: float) -> None:
        """Wait until the last message has left, and with it all notes sent before."""
        if self._sent is not None:
            self._call(self._sent[0].wait, timedelta(seconds=seconds))
            self._sent = None
            del self._notes[: self._num_notes_before]
            self._num_notes_before = 0

    def close(self) -> None:
        """Break the link; the other end notices at once."""
        # Gloo has no call to close a connection; it closes with the last reference to its group.
        self._group = self._received = self._sent = None
        self._notes.clear()

    def _start(self, message: Tensor) -> Any:
        return self._call(self._group.send, [message], self._peer_rank, _TAG)

    def _call(self, function: Any, *arguments: object) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:  # gloo raises it whatever went wrong
            raise LinkError(f"the link to agent {self.peer} is broken") from error


def open_links(
    store: Store,
    agent: int,
    neighbours: Iterable[int],
    *,
    message_bytes: int,
    timeout: float,
    address: str,
    topic: str = "link",
) -> dict[int, Link]:
    """Connect to every neighbour, which must do the same; ``address`` is this host's own.

    Raises:
        LinkError: a neighbour did not connect in time.
    """
    device = distributed.ProcessGroupGloo.create_device(hostname=address)
    links = {}
    # All agents open links in the same order, or a cycle of them could wait for each other.
    for low, high in sorted((min(agent, peer), max(agent, peer)) for peer in neighbours):
        peer = high if agent == low else low
        place = PrefixStore(f"{topic}/{low}-{high}", store)
        try:
            group = _make_group(place, int(agent == high), device, timeout)
        except RuntimeError as error:
            raise LinkError(
                f"no connection to its neighbour agent {peer} within {timeout:g} s"
            ) from error
        links[peer] = Link(group, agent=agent, peer=peer, message_bytes=message_bytes)
    return links


def _make_group(store: Store, rank: int, device: Any, timeout: float) -> Any:
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads = [device], 1
    options._timeout = timedelta(seconds=timeout)
    return distributed.ProcessGroupGloo(store, rank, 2, options)
