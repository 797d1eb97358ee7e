"""Strangers at a port do not displace agents whose handshakes are under way."""

import queue
import socket
from collections.abc import Iterator

import pytest

from corn.transport import NO_SESSION, Channel, Listener, Purpose
from corn.transport.channel import HANDSHAKE_BYTES, Greeting, begin_handshake
from tests.distributed.threads import make_credentials

LOCALHOST = "127.0.0.1"


@pytest.fixture
def opened() -> Iterator[tuple[Listener, "queue.Queue[Channel]"]]:
    listener = Listener((LOCALHOST, 0), make_credentials(0, 2))
    arrived: queue.Queue[Channel] = queue.Queue()
    listener.handle(Purpose.LINK, NO_SESSION, arrived.put)
    yield listener, arrived
    listener.close()


def flood(listener: Listener, source: str) -> list[socket.socket]:
    """Open more connections than the listener has places, and send nothing."""
    strangers = [
        socket.create_connection((LOCALHOST, listener.port), timeout=20, source_address=(source, 0))
        for _ in range(150)
    ]
    # All but 64 lose their places. Until then the flood may still wait to be accepted.
    for evicted in strangers[:80]:
        assert evicted.recv(1) == b""
    return strangers


@pytest.mark.parametrize(
    ("is_proved", "source"), [(True, LOCALHOST), (False, "127.0.0.2"), (True, "127.0.0.2")]
)
def test_a_flood_of_strangers_does_not_displace_an_agent(
    opened: tuple[Listener, "queue.Queue[Channel]"], is_proved: bool, source: str
) -> None:
    """Before its proof if they come from another address, and after its proof in any case."""
    listener, arrived = opened
    credentials = make_credentials(1, 2)
    greeting = Greeting(Purpose.LINK, 1, 0)
    handshake = begin_handshake(credentials, greeting, NO_SESSION, is_initiator=True)
    first = greeting.encode() + handshake.write()
    with socket.create_connection((LOCALHOST, listener.port), timeout=20) as connection:
        if is_proved:
            connection.sendall(first)
            connection.recv(1, socket.MSG_PEEK)
        strangers = flood(listener, source)
        if not is_proved:
            connection.sendall(first)
        handshake.read(connection.recv(HANDSHAKE_BYTES, socket.MSG_WAITALL))
        Channel(connection, 0, handshake.split()).send(b"")
        channel = arrived.get(timeout=20)
        channel.close()
        assert channel.peer == 1
        for stranger in strangers:
            stranger.close()
