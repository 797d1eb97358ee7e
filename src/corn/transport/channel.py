"""Secure channels: TCP connections whose two ends have proved that they hold keys of the roster.

They begin with ``Noise_KK_25519_AESGCM_SHA256`` (noiseprotocol.org, revision 34), between two
agents that know each other's public key. It gives authentication, forward secrecy by ephemeral
keys, and binding: both ends must have the same roster, purpose, session and agents.

After it every record is sealed with AES-256-GCM, under one key per direction, new for each channel,
and a counter as nonce. A record that was changed, repeated, omitted or invented does not open, and
the channel is broken from then on. The length of a message is sealed too.
"""

from __future__ import annotations

import hashlib
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple, final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from corn.errors import PublicError
from corn.noise import Identity, Roster, check_identity, generate_identity
from corn.noise.keys import AGREEMENT_KEY_BYTES
from corn.noise.stream import encode_fields

TAG_BYTES = 16
HANDSHAKE_BYTES = AGREEMENT_KEY_BYTES + TAG_BYTES
"""The size of each of the two messages: an ephemeral key, and a tag without a payload."""
_PROTOCOL = b"Noise_KK_25519_AESGCM_SHA256"

PROTOCOL_VERSION = 3
"""Agents of different versions do not understand each other, and do not connect."""
NO_SESSION = bytes(32)
"""The session of channels that are opened before agents have agreed on one."""
RECORD_BYTES = 1 << 18
"""The most bytes that are sealed together: they stay in the processor's cache."""
REKEY_RECORDS = 1 << 14
"""Records under one key: at most 2³² bytes, far below the limits of AES-GCM (RFC 8446, 5.5)."""

_MAGIC = b"CorN"
_GREETING = struct.Struct(">4sBBII")
_LENGTH = struct.Struct(">Q")
# settimeout(0) would make a socket non-blocking, and a negative value raises, so a deadline that
# has passed still leaves a millisecond.
_SHORTEST_WAIT = 0.001
GREETING_BYTES = _GREETING.size + HANDSHAKE_BYTES
"""The first bytes of the end that connects: a greeting, and a message of the handshake."""


class Purpose(IntEnum):
    """The purpose of a channel."""

    STORE = 1
    LINK = 2
    REJOIN = 4


class TamperedError(PublicError):
    """Bytes arrived that the other end did not seal: somebody changes what the network carries."""


class ChannelClosedError(PublicError):
    """The other end is gone, or the connection is."""


class Dropout(StrEnum):
    """The way in which the loss of a neighbour was noticed, as notes of a run name it."""

    CLOSED = "closed its connection"
    SILENT = "sent nothing for {seconds:g} s (time-out)"
    STALLED = "is alive, but its step does not end"
    TAMPERED = "is no longer linked, as somebody tampered with the connection"
    MISBEHAVED = "is no longer linked, as it broke the protocol ({error})"
    DIFFERENT = "is no longer linked, as it has another model"


class LinkError(PublicError):
    """The loss of a neighbour or of the link to it; ``dropout`` says how it was noticed."""

    def __init__(self, message: str, dropout: Dropout = Dropout.CLOSED) -> None:
        self.dropout = dropout
        super().__init__(message)


@final
@dataclass(frozen=True, eq=False)
class Credentials:
    """Keys by which an agent proves itself and knows the others."""

    agent: int
    identity: Identity = field(repr=False)
    roster: Roster = field(repr=False)

    def __post_init__(self) -> None:
        check_identity(self.identity, self.agent, roster=self.roster)


class Greeting(NamedTuple):
    """The first bytes of a connection: who wants what. Nothing of it is proved yet."""

    purpose: Purpose
    initiator: int
    responder: int

    def encode(self) -> bytes:
        """Return the greeting as bytes."""
        return _GREETING.pack(_MAGIC, PROTOCOL_VERSION, *self)


def decode_greeting(data: bytes, roster: Roster) -> Greeting:
    """Read the first bytes of a connection; raise ``TamperedError`` for those of a stranger."""
    magic, version, purpose, initiator, responder = _GREETING.unpack(data[: _GREETING.size])
    # The numbers are not proved, so they serve only to look up a key. The handshake that follows
    # uses them in its prologue, where a false one fails.
    is_sound = magic == _MAGIC and version == PROTOCOL_VERSION
    if not is_sound or purpose not in set(Purpose) or initiator >= roster.num_agents:
        raise TamperedError("a connection began with bytes that are not a greeting of CorN")
    return Greeting(Purpose(purpose), initiator, responder)


# Which keys of initiator and responder each of the two messages of KK agrees on: ephemeral or
# static ones. Only holders of static keys can compute es, ss and se; ee gives forward secrecy. ss
# proves the initiator's key in the first message, so a stranger gets no answer.
_AGREEMENTS = ((("e", "s"), ("s", "s")), (("e", "e"), ("s", "e")))


@final
class NoiseHandshake:
    """One end of a handshake: two messages of 48 bytes, without payload, the initiator's first.

    Names are those of the specification: h is the hash of all that was seen, ck the chaining key.
    """

    def __init__(
        self, identity: Identity, peer_key: bytes, prologue: bytes, *, is_initiator: bool
    ) -> None:
        self._own = {"s": identity, "e": generate_identity()}
        # An identity has two public keys. The first is that of X25519; the rest is for signatures.
        self._peer = {"s": peer_key[:AGREEMENT_KEY_BYTES]}
        self._is_initiator = is_initiator
        self._num_messages = 0
        # The specification pads a name of at most 32 bytes with zeros instead of hashing it.
        self._h = self._ck = _PROTOCOL.ljust(32, b"\0")
        self._key = b""
        own, peer = identity.public_key[:AGREEMENT_KEY_BYTES], self._peer["s"]
        # The initiator's key comes first at both ends.
        for known in (prologue, *((own, peer) if is_initiator else (peer, own))):
            self._mix_hash(known)

    def write(self) -> bytes:
        """Return the message of this end."""
        key = self._own["e"].public_key[:AGREEMENT_KEY_BYTES]
        self._mix_hash(key)
        self._agree()
        # The key of each message is new, so its counter is zero.
        tag = AESGCM(self._key).encrypt(make_nonce(0), b"", self._h)
        self._mix_hash(tag)
        return key + tag

    def read(self, message: bytes) -> None:
        """Read the message of the other end."""
        self._peer["e"], tag = message[:AGREEMENT_KEY_BYTES], message[AGREEMENT_KEY_BYTES:]
        self._mix_hash(self._peer["e"])
        self._agree()
        try:
            AESGCM(self._key).decrypt(make_nonce(0), tag, self._h)
        except InvalidTag:
            why = "the other end of a connection could not prove its key of the roster"
            raise TamperedError(why) from None
        self._mix_hash(tag)

    def split(self) -> tuple[bytes, bytes]:
        """Return the keys to send and to receive with."""
        first, second = self._derive(b"")
        # The initiator sends under the first key and the responder under the second. One key for
        # both directions would use each counter twice.
        return (first, second) if self._is_initiator else (second, first)

    def _agree(self) -> None:
        for pair in _AGREEMENTS[self._num_messages]:
            own, peer = pair if self._is_initiator else reversed(pair)
            try:
                secret = self._own[own].agree(self._peer[peer])
            except ValueError:
                # A point of low order makes the secret zero. Only an attacker sends one.
                raise TamperedError("the other end of a connection sent an unusable key") from None
            self._ck, self._key = self._derive(secret.reveal())
        self._num_messages += 1

    def _mix_hash(self, data: bytes) -> None:
        self._h = hashlib.sha256(self._h + data).digest()

    def _derive(self, material: bytes) -> tuple[bytes, bytes]:
        # The HKDF of Noise with two outputs is that of RFC 5869 with empty info, T(1) and T(2).
        both = HKDF(algorithm=SHA256(), length=64, salt=self._ck, info=b"").derive(material)
        return both[:32], both[32:]


def make_nonce(counter: int) -> bytes:
    """Return the nonce of AES-GCM for a counter, as Noise defines it."""
    return b"\0\0\0\0" + counter.to_bytes(8, "big")


class _Cipher:
    """The cipher of one direction of a channel."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._aes = AESGCM(key)
        # The nonce, which never goes back, for a new key either.
        self._count = 0

    def seal(self, data: memoryview, into: memoryview) -> None:
        self._aes.encrypt_into(make_nonce(self._count), data, None, into)
        self._advance()

    def open(self, sealed: memoryview, into: memoryview) -> None:
        self._aes.decrypt_into(make_nonce(self._count), sealed, None, into)
        self._advance()

    def _advance(self) -> None:
        # Both ends count the same records, so no message announces the new key.
        self._count += 1
        if self._count % REKEY_RECORDS == 0:
            # The function REKEY of Noise, section 4.2.
            self._key = self._aes.encrypt(make_nonce((1 << 64) - 1), bytes(32), None)[:32]
            self._aes = AESGCM(self._key)


@final
class Channel:
    """Messages to and from one agent, in order, over a connection with both ends proved.

    One thread may send while another receives. Both block, until either end closes.
    """

    def __init__(self, connection: socket.socket, peer: int, keys: tuple[bytes, bytes]) -> None:
        """Send with the first of the keys, and receive with the second."""
        self._socket = connection
        self.peer = peer
        self._sending, self._receiving = map(_Cipher, keys)
        self._outgoing = bytearray(RECORD_BYTES + TAG_BYTES)
        self._incoming = bytearray(RECORD_BYTES + TAG_BYTES)
        self._is_broken = False
        self._seconds: float | None = None

    def send(self, message: bytes | memoryview) -> int:
        """Send a message and return how many bytes were sent; raise ``ChannelClosedError``."""
        # The length is a record of its own, so the receiver authenticates it before it acts on it.
        total = self._send_record(memoryview(_LENGTH.pack(len(message))))
        data = memoryview(message)
        for begin in range(0, len(data), RECORD_BYTES):
            total += self._send_record(data[begin : begin + RECORD_BYTES])
        return total

    def receive(self, *, max_bytes: int) -> memoryview:
        """Return the next message; raise ``ChannelClosedError`` or ``TamperedError``."""
        # One deadline for the whole message, which a byte now and then does not extend.
        deadline = None if self._seconds is None else time.monotonic() + self._seconds
        header = bytearray(_LENGTH.size)
        self._receive_record(memoryview(header), deadline)
        (length,) = _LENGTH.unpack(header)
        # Checked before memory is allocated: the peer may be damaged.
        if length > max_bytes:
            self._is_broken = True
            what = f"a message of {length:,} bytes, of at most {max_bytes:,}"
            raise TamperedError(f"agent {self.peer} announced {what}")
        view = memoryview(bytearray(length))
        for begin in range(0, length, RECORD_BYTES):
            self._receive_record(view[begin : begin + RECORD_BYTES], deadline)
        return view

    def poll(self) -> bool | None:
        """Return whether bytes have arrived, or None if either end has closed the connection."""
        try:
            # A closed connection is readable and has no bytes. select has a limit of descriptors.
            waiting = select.poll()
            waiting.register(self._socket, select.POLLIN)
            return bool(waiting.poll(0)) and (bool(self._socket.recv(1, socket.MSG_PEEK)) or None)
        except (OSError, ValueError):  # a closed connection has no number
            return None

    def set_timeout(self, seconds: float | None) -> None:
        """Set the seconds after which an incomplete message fails; None waits for ever."""
        self._seconds = seconds
        with suppress(OSError):
            self._socket.settimeout(seconds)

    def finish(self) -> None:
        """Send no more; the other end reads all that was sent, and then learns of it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection; whatever waits on it raises ``ChannelClosedError``."""
        # A shutdown also wakes threads that are blocked in a read or write of this connection.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send_record(self, data: memoryview) -> int:
        sealed = memoryview(self._outgoing)[: len(data) + TAG_BYTES]
        self._sending.seal(data, sealed)
        # A receive may have left a shorter time-out on the same socket.
        _send_all(self._socket, sealed, self.peer, self._seconds)
        return len(sealed)

    def _receive_record(self, into: memoryview, deadline: float | None) -> None:
        # After one record that does not open, the counters at both ends differ for good.
        if self._is_broken:
            raise TamperedError(f"the connection to agent {self.peer} was tampered with")
        sealed = memoryview(self._incoming)[: len(into) + TAG_BYTES]
        receive_exactly(self._socket, sealed, deadline)
        try:
            self._receiving.open(sealed, into)
        except InvalidTag:
            self._is_broken = True
            raise TamperedError(
                f"bytes arrived that agent {self.peer} did not seal: the connection was tampered "
                "with"
            ) from None


def begin_handshake(
    own: Credentials, greeting: Greeting, session: bytes, *, is_initiator: bool
) -> NoiseHandshake:
    """Return one end of a handshake. Its prologue has the terms that both ends must have."""
    terms = (PROTOCOL_VERSION, own.roster.fingerprint, int(greeting.purpose), session)
    prologue = encode_fields("corn channel", *terms, greeting.initiator, greeting.responder)
    # Whoever claims another agent's number cannot compute ss, and the first read raises.
    peer = greeting.responder if is_initiator else greeting.initiator
    key = own.roster.public_key(peer)
    return NoiseHandshake(own.identity, key, prologue, is_initiator=is_initiator)


def initiate(
    connection: socket.socket,
    credentials: Credentials,
    peer: int,
    purpose: Purpose,
    session: bytes,
    deadline: float | None = None,
) -> Channel:
    """Complete a handshake on a connection that this end opened, before a time of the clock.

    Raise ``TamperedError`` or ``ChannelClosedError`` for another agent, or one with other terms.
    """
    greeting = Greeting(purpose, credentials.agent, peer)
    handshake = begin_handshake(credentials, greeting, session, is_initiator=True)
    _send_all(connection, greeting.encode() + handshake.write(), peer)
    answer = bytearray(HANDSHAKE_BYTES)
    receive_exactly(connection, memoryview(answer), deadline)
    handshake.read(bytes(answer))
    channel = Channel(connection, peer, handshake.split())
    # The first message of a handshake could be a copy of an earlier one. The responder trusts the
    # connection once it reads a message under the keys that both ends made just now.
    channel.send(b"")
    channel.set_timeout(None)
    return channel


def respond(
    connection: socket.socket,
    greeting: Greeting,
    first: bytes,
    credentials: Credentials,
    session: bytes,
    deadline: float | None = None,
    on_proof: Callable[[], None] = lambda: None,
) -> Channel:
    """Complete a handshake on a connection that the other end opened; see :func:`initiate`.

    ``on_proof`` is called once the first message, or a copy of one, has proved a key of the roster.
    """
    peer = greeting.initiator
    if greeting.responder != credentials.agent:
        raise TamperedError(f"a connection for agent {greeting.responder} came to another")
    handshake = begin_handshake(credentials, greeting, session, is_initiator=False)
    handshake.read(first)
    on_proof()
    _send_all(connection, handshake.write(), peer)
    channel = Channel(connection, peer, handshake.split())
    if deadline is not None:
        channel.set_timeout(max(deadline - time.monotonic(), _SHORTEST_WAIT))
    # The initiator's empty message is the proof of freshness: a replayed first message of an
    # earlier handshake gets this far, and no further.
    channel.receive(max_bytes=0)
    channel.set_timeout(None)
    return channel


def _send_all(
    connection: socket.socket, data: bytes | memoryview, peer: int, seconds: float | None = None
) -> None:
    try:
        if seconds is not None:
            connection.settimeout(seconds)
        connection.sendall(data)
    except OSError as error:
        raise ChannelClosedError(f"the connection to agent {peer} is closed") from error


def receive_exactly(
    connection: socket.socket, into: memoryview, deadline: float | None = None
) -> None:
    """Fill a buffer from a connection before a time of the clock, or raise ``ChannelClosedError``.

    Without a deadline the time-out of the connection counts for each part that arrives.
    """
    begin = 0
    while begin < len(into):
        try:
            # The system's time-out begins anew with every byte that somebody sends.
            if deadline is not None:
                connection.settimeout(max(deadline - time.monotonic(), _SHORTEST_WAIT))
            count = connection.recv_into(into[begin:])
        except OSError as error:
            raise ChannelClosedError("the connection is closed or silent") from error
        if count == 0:
            raise ChannelClosedError("the other end closed the connection")
        begin += count
        if deadline is not None and begin < len(into) and time.monotonic() > deadline:
            raise ChannelClosedError("the connection is too slow")
