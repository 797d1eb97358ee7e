"""Channels: only holders of keys complete a handshake, and no byte of others is believed."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noise.connection import Keypair, NoiseConnection

from corn.errors import CornError
from corn.noise import Roster, generate_identity
from corn.transport import channel as channel_module
from corn.transport.channel import (
    GREETING_BYTES,
    NO_SESSION,
    RECORD_BYTES,
    Channel,
    ChannelClosedError,
    Credentials,
    NoiseHandshake,
    Purpose,
    TamperedError,
    decode_greeting,
    initiate,
    receive_exactly,
    respond,
)
from corn.transport.listener import Listener, UnreachableError, dial

from ..distributed.threads import make_credentials

GREETING = GREETING_BYTES - 48


def test_the_handshake_is_noise_kk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another implementation of Noise completes it, in both roles, and replaces keys as we do."""
    monkeypatch.setattr(channel_module, "REKEY_RECORDS", 2)
    prologue = b"terms"
    for is_initiator in (True, False):
        own, peer = generate_identity(), generate_identity()
        ours = NoiseHandshake(own, peer.public_key, prologue, is_initiator=is_initiator)
        theirs = NoiseConnection.from_name(b"Noise_KK_25519_AESGCM_SHA256")
        theirs.set_prologue(prologue)
        theirs.set_keypair_from_private_bytes(Keypair.STATIC, peer.secret.reveal())
        theirs.set_keypair_from_public_bytes(Keypair.REMOTE_STATIC, own.public_key[:32])
        if is_initiator:
            theirs.set_as_responder()
            theirs.start_handshake()
            theirs.read_message(ours.write())
            ours.read(bytes(theirs.write_message()))
        else:
            theirs.set_as_initiator()
            theirs.start_handshake()
            ours.read(bytes(theirs.write_message()))
            theirs.read_message(ours.write())
        assert theirs.handshake_finished
        left, right = socket.socketpair()
        channel = Channel(left, 1, ours.split())
        channel.send(b"hello")
        sealed = right.recv(1000)
        assert theirs.decrypt(sealed[:24]) == (5).to_bytes(8, "big")
        assert theirs.decrypt(sealed[24:]) == b"hello"
        right.sendall(theirs.encrypt((3).to_bytes(8, "big")) + theirs.encrypt(b"you"))
        assert bytes(channel.receive(max_bytes=10)) == b"you"
        # A message takes two records, so both directions have a new key now.
        channel.send(b"again")
        sealed = right.recv(1000)
        theirs.rekey_inbound_cipher()
        assert theirs.decrypt(sealed[:24]) == (5).to_bytes(8, "big")
        assert theirs.decrypt(sealed[24:]) == b"again"
        theirs.rekey_outbound_cipher()
        right.sendall(theirs.encrypt((3).to_bytes(8, "big")) + theirs.encrypt(b"too"))
        assert bytes(channel.receive(max_bytes=10)) == b"too"
        left.close()
        right.close()


def shake(
    first: Credentials,
    second: Credentials,
    *,
    purposes: tuple[Purpose, Purpose] = (Purpose.LINK, Purpose.LINK),
    sessions: tuple[bytes, bytes] = (NO_SESSION, NO_SESSION),
    meddle: Callable[[int, bytes], bytes] = lambda _, data: data,
) -> tuple[Any, Any]:
    """Return the channel or error of both ends; ``meddle`` may change the bytes between them."""
    left, right = socket.socketpair(), socket.socketpair()
    results: list[Any] = [None, None]

    def initiator() -> None:
        try:
            left[0].settimeout(2)
            results[0] = initiate(left[0], first, second.agent, purposes[0], sessions[0])
        except (TamperedError, ChannelClosedError) as error:
            results[0] = error
            left[0].close()

    def responder() -> None:
        try:
            right[0].settimeout(2)
            data = bytearray(GREETING_BYTES)
            receive_exactly(right[0], memoryview(data))
            greeting = decode_greeting(bytes(data), second.roster)
            results[1] = respond(right[0], greeting, bytes(data[GREETING:]), second, sessions[1])
        except (TamperedError, ChannelClosedError) as error:
            results[1] = error
            right[0].close()

    def relay(source: socket.socket, target: socket.socket, direction: int) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(meddle(direction, data))
        except OSError:
            pass
        finally:
            with suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)
            with suppress(OSError):
                source.shutdown(socket.SHUT_RDWR)

    threads = [
        threading.Thread(target=initiator),
        threading.Thread(target=responder),
        threading.Thread(target=relay, args=(left[1], right[1], 0), daemon=True),
        threading.Thread(target=relay, args=(right[1], left[1], 1), daemon=True),
    ]
    for thread in threads:
        thread.start()
    for thread in threads[:2]:
        thread.join()
    # Relays end with the connections, which the channels own.
    _RELAYED.append((threads[2:], [left[1], right[1]]))
    return results[0], results[1]


_RELAYED: list[tuple[list[threading.Thread], list[socket.socket]]] = []


def close(*ends: Any) -> None:
    """Close channels, and what the tests put between their ends."""
    for end in ends:
        if isinstance(end, Channel):
            end.close()
    while _RELAYED:
        threads, sockets = _RELAYED.pop()
        for line in sockets:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for line in sockets:
            line.close()


@pytest.fixture(autouse=True)
def close_everything() -> Iterator[None]:
    yield
    close()


def test_messages_arrive_as_they_were_sent() -> None:
    ends = shake(make_credentials(0, 3), make_credentials(1, 3))
    left, right = ends
    for size in (
        0,
        1,
        1000,
        RECORD_BYTES - 1,
        RECORD_BYTES,
        RECORD_BYTES + 1,
        3 * RECORD_BYTES + 7,
    ):
        message = bytes(range(256)) * (size // 256 + 1)
        thread = threading.Thread(target=left.send, args=(message[:size],))
        thread.start()
        assert right.receive(max_bytes=1 << 24) == message[:size]
        thread.join()
    right.send(b"back")
    assert left.receive(max_bytes=4) == b"back"
    close(*ends)


def test_other_keys_sessions_and_purposes_do_not_connect() -> None:
    own, peer = make_credentials(0, 3), make_credentials(1, 3)
    stranger = generate_identity()
    keys = (stranger.public_key, *own.roster.public_keys[1:])
    forged = Credentials(0, stranger, Roster(keys))
    for first, options in (
        (forged, {}),  # without the key of agent 0
        (own, {"sessions": (b"a" * 32, b"b" * 32)}),
        (make_credentials(0, 2), {}),  # of another roster
    ):
        ends = shake(first, peer, **options)  # type: ignore[arg-type]
        assert all(isinstance(end, TamperedError | ChannelClosedError) for end in ends), ends


def test_a_repeated_first_message_proves_nothing() -> None:
    """An attacker has recorded a handshake, and plays its messages to the responder again."""
    recorded: list[bytes] = []
    own, peer = make_credentials(0, 2), make_credentials(1, 2)

    def record(direction: int, data: bytes) -> bytes:
        if direction == 0:
            recorded.append(data)
        return data

    close(*shake(own, peer, meddle=record))
    attacker, line = socket.socketpair()
    line.settimeout(2)
    attacker.sendall(b"".join(recorded))
    data = bytearray(GREETING_BYTES)
    receive_exactly(line, memoryview(data))
    greeting = decode_greeting(bytes(data), peer.roster)
    with pytest.raises(TamperedError):
        respond(line, greeting, bytes(data[GREETING:]), peer, NO_SESSION)
    attacker.close()
    line.close()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1), st.integers(0, 200), st.integers(1, 255))
def test_a_changed_handshake_does_not_complete(direction: int, place: int, change: int) -> None:
    has_changed: list[bool] = []

    def flip(which: int, data: bytes) -> bytes:
        # The last message of the initiator comes with its first use: only the handshake counts.
        if which != direction or has_changed:
            return data
        has_changed.append(True)
        changed = bytearray(data)
        changed[place % len(changed)] ^= change
        return bytes(changed)

    first, second = shake(make_credentials(0, 2), make_credentials(1, 2), meddle=flip)
    # The responder never gets a channel. The initiator gets none if the answer was changed.
    assert isinstance(second, TamperedError | ChannelClosedError)
    assert not isinstance(first, Channel) or direction == 0
    close(first, second)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["flip", "cut", "repeat", "swap", "insert", "drop"]),
    st.integers(0, 10**6),
    st.integers(1, 255),
)
def test_changed_records_are_never_delivered(how: str, place: int, change: int) -> None:
    """An attacker changes, cuts, repeats, swaps, inserts or omits what is under way."""
    messages = [bytes([number]) * 50 for number in range(4)]
    wire, tap = socket.socketpair()
    sender = Channel(wire, 1, (b"k" * 32, b"l" * 32))
    for message in messages:
        sender.send(message)
    wire.close()
    data = b""
    while part := tap.recv(1 << 16):
        data += part
    tap.close()
    frame = len(data) // 4
    at = place % len(data)
    attacked = {
        "flip": data[:at] + bytes([data[at] ^ change]) + data[at + 1 :],
        "cut": data[:at],
        "repeat": data[:frame] + data,
        "swap": data[frame : 2 * frame] + data[:frame] + data[2 * frame :],
        "insert": data[:at] + bytes([change]) * 30 + data[at:],
        "drop": data[frame:],
    }[how]
    wire, tap = socket.socketpair()
    wire.sendall(attacked)
    wire.close()
    receiver, delivered = Channel(tap, 0, (b"l" * 32, b"k" * 32)), []
    with suppress(TamperedError, ChannelClosedError):
        while True:
            delivered.append(bytes(receiver.receive(max_bytes=100)))
    # What was delivered is a beginning of what was sent.
    assert delivered == messages[: len(delivered)]
    assert len(delivered) < 4 or how in ("cut", "insert")
    # After a fault nothing is read any more.
    with pytest.raises((TamperedError, ChannelClosedError)):
        receiver.receive(max_bytes=100)
    receiver.close()


def test_no_length_of_a_stranger_is_believed() -> None:
    left, right = socket.socketpair()
    channel = Channel(left, 1, (b"k" * 32, b"l" * 32))
    right.sendall(b"\xff" * 24)
    with pytest.raises(TamperedError):
        channel.receive(max_bytes=1 << 30)
    channel.close()
    right.close()


@pytest.fixture
def listener() -> Any:
    own = Listener(("127.0.0.1", 0), make_credentials(0, 3))
    yield own
    own.close()


def test_agents_connect_while_strangers_flood_the_port(listener: Listener) -> None:
    """Silent, garbage and half-finished connections, more than there are places."""
    found: list[Channel] = []
    listener.handle(Purpose.LINK, NO_SESSION, found.append)
    where = ("127.0.0.1", listener.port)
    strangers: list[Any] = []
    for number in range(150):
        stranger = socket.create_connection(where)
        if number % 3 == 1:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        elif number % 3 == 2:
            stranger.sendall(b"CorN\x01\x02")
        strangers.append(stranger)
    for agent in (1, 2):
        channel = dial(
            where, make_credentials(agent, 3), 0, Purpose.LINK, session=NO_SESSION, timeout=20
        )
        channel.send(b"here")
        strangers.append(channel)
    deadline = time.monotonic() + 20
    while len(found) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {channel.peer for channel in found} == {1, 2}
    for channel in found:
        assert bytes(channel.receive(max_bytes=10)) == b"here"
        channel.close()
    for stranger in strangers:
        stranger.close()


def test_a_flood_starts_no_more_threads_than_there_are_places(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that end slowly, as under a flood that keeps the machine busy."""
    go_on = threading.Event()
    monkeypatch.setattr("corn.transport.listener.receive_exactly", lambda *_: go_on.wait(20))
    before = threading.active_count()
    strangers = []
    for _ in range(200):
        strangers.append(socket.create_connection(("127.0.0.1", listener.port)))
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        assert threading.active_count() - before <= 128
        time.sleep(0.01)
    go_on.set()
    for stranger in strangers:
        stranger.close()


def trickle(line: socket.socket, data: bytes) -> float:
    """Send a byte per second until the other end hangs up; return the seconds it took.

    All bytes take far longer than any pause of the machine that a test may meet.
    """
    began = time.monotonic()
    line.settimeout(0.001)
    for place in range(len(data)):
        with suppress(TimeoutError):
            if line.recv(1) == b"":
                break
        with suppress(BrokenPipeError, ConnectionResetError):
            line.sendall(data[place : place + 1])
        time.sleep(1)
    return time.monotonic() - began


def test_a_stranger_that_sends_byte_by_byte_loses_its_place(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corn.transport.listener._SECONDS_TO_GREET", 0.5)
    listener.handle(Purpose.LINK, NO_SESSION, lambda channel: channel.close())
    where = ("127.0.0.1", listener.port)
    with socket.create_connection(where) as stranger, suppress(ConnectionResetError):
        assert trickle(stranger, bytes(GREETING_BYTES)) < 15


def test_a_first_message_of_somebody_else_holds_no_place(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of a valid greeting, after which one byte comes at a time."""
    monkeypatch.setattr("corn.transport.listener._SECONDS_TO_GREET", 0.5)
    listener.handle(Purpose.LINK, NO_SESSION, lambda channel: channel.close())
    own = make_credentials(1, 3)
    left, right = socket.socketpair()
    left.settimeout(0.1)
    with pytest.raises(ChannelClosedError):
        initiate(left, own, 0, Purpose.LINK, NO_SESSION)
    copy = right.recv(GREETING_BYTES)
    left.close()
    right.close()
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(copy)
        assert len(stranger.recv(48)) == 48
        with suppress(ConnectionResetError):
            assert trickle(stranger, bytes(23)) < 15


def test_a_port_that_answers_byte_by_byte_is_not_waited_for_beyond_the_time_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    line, _ = server.accept()
                    with line, suppress(OSError):
                        trickle(line, bytes(47))

        threading.Thread(target=answer, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(UnreachableError):
            dial(
                server.getsockname(),
                make_credentials(1, 3),
                0,
                Purpose.LINK,
                session=NO_SESSION,
                timeout=1,
            )
        assert time.monotonic() - began < 15
        server.shutdown(socket.SHUT_RDWR)


def test_a_message_that_comes_byte_by_byte_is_not_waited_for_beyond_the_time_out() -> None:
    left, right = socket.socketpair()
    channel, peer = (
        Channel(left, 1, (b"k" * 32, b"l" * 32)),
        Channel(right, 0, (b"l" * 32, b"k" * 32)),
    )
    peer.send(b"")
    channel.set_timeout(0.5)
    assert bytes(channel.receive(max_bytes=0)) == b""
    sender = threading.Thread(target=trickle, args=(right, bytes(23)))
    sender.start()
    began = time.monotonic()
    with pytest.raises(ChannelClosedError):
        channel.receive(max_bytes=100)
    assert time.monotonic() - began < 15
    channel.close()
    sender.join()
    peer.close()


def test_a_port_stays_open_when_no_thread_is_left(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener.handle(Purpose.LINK, NO_SESSION, lambda channel: channel.close())
    where = ("127.0.0.1", listener.port)
    with monkeypatch.context() as patch:

        def fail(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", fail)
        with socket.create_connection(where, 5) as stranger, suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    channel = dial(where, make_credentials(1, 3), 0, Purpose.LINK, session=NO_SESSION, timeout=10)
    channel.close()


def test_a_place_where_nothing_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = free.getsockname()
    with pytest.raises(UnreachableError, match="nothing listened at") as caught:
        dial(where, make_credentials(1, 3), 0, Purpose.LINK, session=NO_SESSION, timeout=0.3)
    assert not caught.value.is_listening


@pytest.mark.parametrize("where", [("a..b", 29500), ("x" * 70, 29500), ("127.0.0.1", 10**19)])
def test_an_address_that_cannot_exist_is_one_line(where: tuple[str, int]) -> None:
    with pytest.raises(UnreachableError, match="nothing listened at"):
        dial(where, make_credentials(1, 3), 0, Purpose.LINK, session=NO_SESSION, timeout=0.05)
    with pytest.raises(CornError, match="cannot listen there"):
        Listener(where, make_credentials(1, 3))
