"""One open port per agent: connections of agents are handed over, those of strangers are closed.

A stranger can connect and send anything. It costs one of a few places for some seconds, and reaches
nothing beyond the handshake of :mod:`corn.transport.channel`. When all places are taken, the
address with the most connections without proof of a key loses its oldest. An agent of the roster
has a few connections for each purpose, and loses the oldest if it opens more.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import final

from corn.errors import CornError
from corn.parsing import format_address
from corn.transport.channel import (
    GREETING_BYTES,
    HANDSHAKE_BYTES,
    Channel,
    ChannelClosedError,
    Credentials,
    Greeting,
    LinkError,
    Purpose,
    TamperedError,
    decode_greeting,
    initiate,
    receive_exactly,
    respond,
)

Address = tuple[str, int]
_MAX_PORT = (1 << 16) - 1
Handler = Callable[[Channel], None]

# Enough for a machine under load, and so little that strangers do not hold places.
_SECONDS_TO_GREET = 5.0
_MAX_GREETING = 64
_BACKLOG = 256
# Of one agent for one purpose: it needs one, and another after a cut that this end has not noticed.
_MAX_SERVED = 4
# Doubles between attempts: agents that start together connect in milliseconds, and one that waits
# for a machine to boot costs it little.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
# The system retries an unanswered SYN for minutes. A new attempt notices a host that came up
# meanwhile, and gives check() its turn.
_SECONDS_TO_CONNECT = 2.0


class UnreachableError(LinkError):
    """No channel to an agent could be opened in time.

    A program ``is_listening`` at its address without a proof of the agent's key.
    """

    def __init__(self, address: Address, peer: int, timeout: float, *, is_listening: bool) -> None:
        self.is_listening = is_listening
        where = format_address(address)
        super().__init__(
            f"the program at {where} did not prove the key of agent {peer} within {timeout:g} s: "
            "another program holds the port, or rosters, runs or versions differ"
            if is_listening
            else f"nothing listened at {where} within {timeout:g} s, where agent {peer} should be"
        )


@final
class Listener:
    """The port at which other agents reach this one; none without an address.

    Connections for a purpose without a handler are closed. A handler runs in the thread of its
    connection, and owns the channel.
    """

    def __init__(self, address: Address | None, credentials: Credentials) -> None:
        try:
            self._socket = None if address is None else open_port(address)
        # UnicodeError is for names that no host can have.
        except (OSError, UnicodeError) as error:
            where = "" if address is None else format_address(address)
            raise CornError(
                f"{where}: cannot listen there: the port is taken, or the address is not this "
                "machine's: name another with --listen ADDRESS:PORT"
            ) from error
        self._credentials = credentials
        # Replaced as a whole and never changed in place, so that threads read it without the lock.
        self._handlers: Mapping[Purpose, tuple[bytes, Handler]] = {}
        # The address of each connection whose handshake is under way, the oldest first.
        self._greeting: dict[socket.socket, str] = {}
        self._proved: set[socket.socket] = set()
        self._served: dict[tuple[Purpose, int], list[Channel]] = {}
        # Threads of connections that lost their places need a moment to end, also in a flood.
        self._threads = threading.Semaphore(2 * _MAX_GREETING)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        if self._socket is not None:
            threading.Thread(target=self._accept, args=(self._socket,), daemon=True).start()

    @property
    def port(self) -> int:
        """The port that it listens at; 0 for none."""
        return 0 if self._socket is None else int(self._socket.getsockname()[1])

    def handle(self, purpose: Purpose, session: bytes, handler: Handler) -> None:
        """Hand over channels of a purpose and session to a handler from now on."""
        with self._lock:
            self._handlers = {**self._handlers, purpose: (session, handler)}

    def close(self) -> None:
        """Listen no more, and end the handlers that still run. Other channels stay open."""
        with self._lock:
            self._closed.set()
            for served in self._served.values():
                for channel in served:
                    channel.close()
            for connection in self._greeting:
                _close(connection)
        # A thread that waits in accept does not notice a close, but it notices a shutdown.
        if self._socket is not None:
            _close(self._socket)

    def _accept(self, listening: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = listening.accept()
            except OSError:
                # The listener is closed, or this process has too many open files for a moment.
                time.sleep(_FIRST_PAUSE)
                continue
            with self._lock:
                if self._closed.is_set():
                    _close(connection)
                    return
                if len(self._greeting) >= _MAX_GREETING:
                    evicted = self._choose_evicted()
                    del self._greeting[evicted]
                    self._proved.discard(evicted)
                    _close(evicted)
                self._greeting[connection] = _name_source(connection)
            # Not under the lock: a thread that ends needs the lock to give back its place.
            self._threads.acquire()
            try:
                threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()
            except RuntimeError:
                # The system has no thread left. The port stays open for later.
                self._forget(connection)
                _close(connection)

    def _choose_evicted(self) -> socket.socket:
        """Return the connection that loses its place, while the lock is held."""
        # An agent proves its key with its first bytes, and then waits for one round trip, in which
        # a flood must not evict it. Copies of first messages count as proved too.
        unproved = [one for one in self._greeting if one not in self._proved]
        candidates = unproved or list(self._greeting)
        counts = Counter(self._greeting[one] for one in candidates)
        # An address evicts its own connections, of which the oldest goes: agents greet at once.
        return max(candidates, key=lambda one: counts[self._greeting[one]])

    def _welcome(self, connection: socket.socket) -> None:
        """Complete the handshake of a connection, and hand it over."""
        try:
            greeting, handler, channel = self._shake_hands(connection)
        except (OSError, KeyError, TamperedError, ChannelClosedError):
            # A stranger, or an agent of another run. A flood of log entries would fill the disk.
            _close(connection)
            return
        finally:
            self._forget(connection)
        # After the place is free: a handler may keep its channel for the whole run. An agent that
        # opens too many connections loses the oldest.
        with self._lock:
            served = self._served.setdefault((greeting.purpose, channel.peer), [])
            served.append(channel)
            surplus = served[:-_MAX_SERVED]
            del served[:-_MAX_SERVED]
        for oldest in surplus:
            oldest.close()
        handler(channel)
        with self._lock:
            if channel in served:
                served.remove(channel)

    def _shake_hands(self, connection: socket.socket) -> tuple[Greeting, Handler, Channel]:
        deadline = time.monotonic() + _SECONDS_TO_GREET
        connection.settimeout(_SECONDS_TO_GREET)
        # A handshake and a step wait for small messages, which Nagle's algorithm would hold back.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = bytearray(GREETING_BYTES)
        receive_exactly(connection, memoryview(data), deadline)
        own = self._credentials
        greeting = decode_greeting(bytes(data), own.roster)
        # The session is that of this end: the handshake of an agent of another run fails.
        session, handler = self._handlers[greeting.purpose]

        def note_proof() -> None:
            with self._lock:
                if connection in self._greeting:
                    self._proved.add(connection)

        first = bytes(data[-HANDSHAKE_BYTES:])
        channel = respond(connection, greeting, first, own, session, deadline, note_proof)
        return greeting, handler, channel

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._greeting.pop(connection, None)
            self._proved.discard(connection)
        self._threads.release()


def dial(
    address: Address,
    credentials: Credentials,
    peer: int,
    purpose: Purpose,
    *,
    session: bytes,
    timeout: float,
    check: Callable[[], None] = lambda: None,
) -> Channel:
    """Open a channel to an agent, or raise ``UnreachableError``; ``check`` may end the attempts."""
    deadline = time.monotonic() + timeout
    pause = _FIRST_PAUSE
    is_listening = False
    while True:
        check()
        left = deadline - time.monotonic()
        connection = None
        try:
            _check_port(address)
            seconds = max(min(left, _SECONDS_TO_CONNECT), 0.1)
            connection = socket.create_connection(address, timeout=seconds)
            # The system may lend a free port of this machine to the socket that connects to it.
            if connection.getsockname() == connection.getpeername():
                raise ConnectionRefusedError
            is_listening = True
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            now = time.monotonic()
            seconds = max(min(deadline - now, _SECONDS_TO_GREET), 0.1)
            connection.settimeout(seconds)
            return initiate(connection, credentials, peer, purpose, session, now + seconds)
        # UnicodeError is for names with a label that is empty or too long.
        except (OSError, UnicodeError, TamperedError, ChannelClosedError):
            # The other end may not be ready, or somebody disturbed this attempt: try again.
            if connection is not None:
                _close(connection)
        if time.monotonic() + pause > deadline:
            raise UnreachableError(address, peer, timeout, is_listening=is_listening)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def open_port(address: Address) -> socket.socket:
    """Return a socket that listens at an address, of IPv4 or IPv6; raise ``OSError``."""
    _check_port(address)
    # The name of a host may stand for an IPv6 address only. An empty one means all addresses.
    family = socket.AF_INET
    if address[0]:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server(address, family=family, backlog=_BACKLOG)


def _name_source(connection: socket.socket) -> str:
    """Return the network that a connection comes from: an IPv4 address, or a /64 of IPv6."""
    try:
        host = str(connection.getpeername()[0]).partition("%")[0]
        address = ipaddress.ip_address(host)
    except (OSError, ValueError):
        return ""
    # One site has a whole /64, and could use a new address for each connection.
    return host if address.version == 4 else str(ipaddress.ip_network((host, 64), strict=False))


def _check_port(address: Address) -> None:
    # Addresses of other agents can contain any number. For those beyond 65535 Python raises an
    # OverflowError and leaves a socket open.
    if not 0 <= address[1] <= _MAX_PORT:
        raise OSError(f"ports end at {_MAX_PORT}")


def _close(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
