"""The store: the place where agents leave entries for each other before the first step.

One agent, or its launcher, hosts it, for agents of the roster only. It cannot change or invent
entries, as agents sign them (:mod:`corn.distributed.rendezvous`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

from corn.errors import PublicError
from corn.noise.stream import decode_fields, encode_fields
from corn.transport.channel import (
    NO_SESSION,
    Channel,
    ChannelClosedError,
    Credentials,
    Purpose,
    TamperedError,
)
from corn.transport.listener import Address, Listener, UnreachableError

# Limits for a damaged or malicious agent: it must not fill the host's memory.
_MAX_WORD_BYTES = 1 << 21
_MAX_REQUEST_BYTES = 1 << 22
_MAX_BYTES_PER_AGENT = _MAX_ANSWER_BYTES = 1 << 26
_LONGEST_WAIT = 0.5
_MAX_ATTEMPTS = 3
_SECONDS_TO_RECONNECT = 3.0
_MISSING, _PRESENT = b"0", b"1"


class StoreLostError(PublicError):
    """The store is gone, with the process that hosted it."""

    def __init__(self) -> None:
        super().__init__("the rendezvous store is gone")


class MemoryStore:
    """A store in this process: entries by key. An entry is written once and never changes."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, entry: bytes) -> bytes:
        """Write an entry, unless the key has one already; return the entry that it has."""
        with self._changed:
            # The first entry counts. A repeated request finds its own entry and succeeds.
            found = self._entries.setdefault(key, entry)
            self._changed.notify_all()
            return found

    def get(self, keys: Sequence[str], seconds: float = 0.0) -> list[bytes | None]:
        """Return the entries of keys, None where there is none.

        Wait until all are there, but no longer than so many seconds, and half a second at most.
        """
        # Bounded, so that a client notices a signal, and a host the end of a client.
        deadline = time.monotonic() + min(seconds, _LONGEST_WAIT)
        with self._changed:
            while not all(key in self._entries for key in keys):
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            return [self._entries.get(key) for key in keys]


@final
class StoreHost:
    """A store that other processes reach: its ``entries``, and the ``listener`` for them.

    The credentials are those of the roster's ``store_host``, which may use the port for its links.
    """

    def __init__(self, address: Address, credentials: Credentials) -> None:
        self.entries = MemoryStore()
        self._used: dict[int, int] = {}
        self.listener = Listener(address, credentials)
        # Agents agree on the session by way of the store, so its channels cannot be bound to one.
        # Words are, by their signatures.
        self.listener.handle(Purpose.STORE, NO_SESSION, self._serve)

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return self.listener.port

    def close(self) -> None:
        """End the store; agents that still need it notice."""
        self.listener.close()

    def _serve(self, channel: Channel) -> None:
        """Answer one agent's requests until it leaves."""
        with suppress(ChannelClosedError, TamperedError):
            while True:
                request = decode_fields(bytes(channel.receive(max_bytes=_MAX_REQUEST_BYTES)))
                answer = self._answer(channel.peer, request or [])
                if answer is None:  # not a request of this version
                    break
                channel.send(answer)
        channel.close()

    def _answer(self, peer: int, request: list[bytes]) -> bytes | None:
        if len(request) == 3 and request[0] == b"set":
            key = request[1].decode(errors="replace")
            # The handshake proves the peer, and an honest one writes under its own number only.
            if not self._may_write(peer, key, len(request[2])):
                return None
            return self.entries.set(key, request[2])
        if len(request) >= 2 and request[0] == b"get" and request[1].isdigit():
            keys = [field.decode(errors="replace") for field in request[2:]]
            # Nine digits at most: int() raises beyond a limit.
            found = self.entries.get(keys, int(request[1][:9]) / 1000)
            # A short request could ask for one long entry a million times.
            if sum(len(entry or b"") for entry in found) > _MAX_ANSWER_BYTES:
                return None
            parts = [_MISSING if entry is None else _PRESENT + entry for entry in found]
            return encode_fields(*parts)
        return None

    def _may_write(self, peer: int, key: str, size: int) -> bool:
        """Return whether an agent writes under its own number, and not too much."""
        # Signatures protect readers from false entries, and this the places of other agents.
        # Counted before the check, so that refused entries use up the limit too.
        self._used[peer] = self._used.get(peer, 0) + size + len(key)
        topic, _, writer = key.partition("/")
        is_own = writer.partition("/")[0] == str(peer)
        is_small = size <= _MAX_WORD_BYTES and self._used[peer] <= _MAX_BYTES_PER_AGENT
        return bool(topic) and is_own and is_small


@final
class RemoteStore:
    """A store that another process hosts, at the other end of a channel.

    A connection that somebody cuts or disturbs is opened again, and the request repeated: an entry
    is written once. The first connection may take ``wait`` seconds, an answer ``timeout``.
    """

    def __init__(self, connect: Callable[[float], Channel], *, timeout: float, wait: float) -> None:
        self._connect = connect
        self._timeout = timeout
        self._lock = threading.Lock()
        self._channel = self._open(wait)

    def set(self, key: str, entry: bytes) -> bytes:
        """See ``MemoryStore``."""
        return bytes(self._ask(encode_fields("set", key, entry)))

    def get(self, keys: Sequence[str], seconds: float = 0.0) -> list[bytes | None]:
        """See ``MemoryStore``."""
        milliseconds = int(1000 * min(seconds, _LONGEST_WAIT))
        found = decode_fields(self._ask(encode_fields("get", milliseconds, *keys)))
        # The host is not trusted. An answer of another shape is treated as a loss, not indexed.
        if found is None or len(found) != len(keys):
            raise StoreLostError
        return [part[1:] if part[:1] == _PRESENT else None for part in found]

    def close(self) -> None:
        """Leave the store."""
        self._channel.close()

    def _ask(self, request: bytes) -> bytes:
        with self._lock:
            # The lock is held across attempts: an answer belongs to the request that was sent last.
            try:
                for _ in range(_MAX_ATTEMPTS - 1):
                    with suppress(ChannelClosedError, TamperedError):
                        return self._ask_once(request)
                    # A host that is gone should not keep agents waiting.
                    self._channel = self._open(min(self._timeout, _SECONDS_TO_RECONNECT))
                return self._ask_once(request)
            except (ChannelClosedError, TamperedError, UnreachableError) as error:
                raise StoreLostError from error

    def _ask_once(self, request: bytes) -> bytes:
        try:
            self._channel.send(request)
            return bytes(self._channel.receive(max_bytes=_MAX_ANSWER_BYTES))
        except BaseException:
            # The answer may still come, and would be taken for that of the next request.
            self._channel.close()
            raise

    def _open(self, seconds: float) -> Channel:
        channel = self._connect(seconds)
        # A host that is suspended must not hang an agent.
        channel.set_timeout(self._timeout + _LONGEST_WAIT)
        return channel
