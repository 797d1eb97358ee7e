"""One connection per link of the graph: a gloo group of two, so that trouble stays on its link.

In gloo a wait that times out breaks every connection of its group. With a group for each link a
fault ends that link and no other, and agents that are not neighbours are not connected at all.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, final

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import PrefixStore, Store

from corn.errors import CornError, InvalidArgumentError, PublicError

_TAG = 0
_SLACK_BYTES = 1 << 20


class LinkError(PublicError):
    """A link is broken: its other end is gone, or closed it."""


@final
class Link:
    """Messages to and from one neighbour. Gloo keeps the order in which they were sent.

    Args:
        group: a process group of two.
        agent: this end.
        peer: the other end.
        message_bytes: what is received; the buffer has room for more, because gloo ends the
            process when a message exceeds it. Pages that are never written cost no memory.
    """

    def __init__(self, group: Any, *, agent: int, peer: int, message_bytes: int) -> None:
        self.peer, self.message_bytes = peer, message_bytes
        self._group, self._peer_rank = group, int(agent < peer)
        self.buffer = torch.empty(2 * message_bytes + _SLACK_BYTES, dtype=torch.uint8)
        self._received: Any = None
        self._sent: tuple[Any, Tensor] | None = None
        self._notes: list[tuple[Any, Tensor]] = []
        self._num_notes_before = 0
        self.messages_sent = self.bytes_sent = self.messages_received = 0

    def post_receive(self) -> None:
        """Be ready for the next message; the seal of the last one is wiped out."""
        self.buffer[self.message_bytes - 8 : self.message_bytes] = 0
        self._received = self._call(self._group.recv, [self.buffer], self._peer_rank, _TAG)

    def wait_received(self, seconds: float) -> None:
        """Wait for the message posted for; after so many seconds the link is broken for good."""
        self._call(self._received.wait, timedelta(seconds=seconds))
        self.messages_received += 1

    def send(self, message: Tensor) -> None:
        """Start to send; the message must stay as it is until ``wait_sent`` returns."""
        self._num_notes_before = len(self._notes)
        self._sent = self._start(message), message
        self.messages_sent += 1
        self.bytes_sent += message.numel()

    def send_note(self, message: Tensor) -> None:
        """Send something that nobody waits for; the neighbour takes it before a later message."""
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
        self._group = self._received = self._sent = None
        self._notes.clear()

    def _start(self, message: Tensor) -> Any:
        return self._call(self._group.send, [message], self._peer_rank, _TAG)

    def _call(self, function: Any, *arguments: object) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:  # what gloo raises, whatever went wrong
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
    backend: str = "gloo",
) -> dict[int, Link]:
    """Connect to every neighbour, which must do the same; ``address`` is this host's own.

    Raises ``LinkError`` with the neighbour's name if it does not come in time.
    """
    if backend != "gloo":
        raise InvalidArgumentError(
            f"backend must be gloo, found {backend!r}: links over it are not built yet"
        )
    device = distributed.ProcessGroupGloo.create_device(hostname=address)
    links = {}
    # Everyone connects in the same order of links, or two could wait for each other.
    for low, high in sorted((min(agent, peer), max(agent, peer)) for peer in neighbours):
        peer = high if agent == low else low
        place = PrefixStore(f"{topic}/{low}-{high}", store)
        try:
            group = _make_group(place, int(agent == high), device, timeout)
        except RuntimeError as error:
            raise LinkError(
                f"agent {agent}: no connection to its neighbour agent {peer} within {timeout:g} s"
            ) from error
        links[peer] = Link(group, agent=agent, peer=peer, message_bytes=message_bytes)
    return links


def choose_backend(device: str) -> str:
    """Which engine of ``torch.distributed`` moves tensors of a device: gloo, or nccl for GPUs.

    Nccl has not been tried, as that needs two GPUs: so far :func:`open_links` refuses it.
    """
    return "nccl" if device.startswith("cuda") else "gloo"


def find_address(host: str, port: int) -> str:
    """This host's address on the way to another: one that neighbours can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError as error:
            raise CornError(f"{host}: no way to this host: {error.strerror}") from error


def _make_group(store: Store, rank: int, device: Any, timeout: float) -> Any:
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads = [device], 1
    options._timeout = timedelta(seconds=timeout)
    return distributed.ProcessGroupGloo(store, rank, 2, options)
