"""Secrets, the identity of an agent, the public roster of all agents, and their files.

An agent has one X25519 identity. Its private half is a :class:`Secret`, which does not leak by
accident: not by print, log, pickle, copy or JSON. Only public keys ever leave an agent.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from corn.errors import FileFormatError, InvalidArgumentError
from corn.parsing import build_fields, parse_hex, read_json

SECRET_BYTES = 32

_IDENTITY_PREFIX = b"corn-identity-1 "
# The key, and then the plans that it was used with. A crash may leave a part of the last line: then
# nothing was released under that plan.
_IDENTITY_PATTERN = re.compile(
    re.escape(_IDENTITY_PREFIX)
    + rb"([0-9a-f]{%d})\n((?:plan [0-9a-f]{64}\n)*)(?:[plan 0-9a-f]*\Z)" % (2 * SECRET_BYTES)
)
_MAX_IDENTITY_BYTES = 1 << 20
_OTHERS = stat.S_IRWXG | stat.S_IRWXO

_ROSTER_FORMAT = "corn roster 1"
_PUBLIC_KEY_BYTES = 32
_FIELD_PRIME = 2**255 - 19
# Any private key: only whether an exchange with it fails is of interest.
_PROBE = X25519PrivateKey.from_private_bytes(b"\x01" * _PUBLIC_KEY_BYTES)


@final
class Secret:
    """32 bytes that only :meth:`reveal` shows.

    Its text forms are constant, it cannot be pickled, copied or hashed, and comparing takes the
    same time wherever two secrets differ. Python cannot wipe memory, so a secret stays in the
    process until its memory is used again.

    >>> secret = Secret.random()
    >>> f"{secret} {secret!r}"
    'Secret(hidden) Secret(hidden)'
    """

    __slots__ = ("_value",)
    __hash__ = None  # type: ignore[assignment]  # a hash table would compare in variable time

    def __init__(self, value: bytes) -> None:
        # The message must not quote the value: it may be a secret of the wrong length.
        if not isinstance(value, bytes) or len(value) != SECRET_BYTES:
            raise InvalidArgumentError(f"a secret must be {SECRET_BYTES} bytes")
        self._value = value

    @classmethod
    def random(cls) -> Secret:
        """Return a new secret from the operating system's randomness."""
        return cls(secrets.token_bytes(SECRET_BYTES))

    def reveal(self) -> bytes:
        """Return the 32 bytes: for a cipher or a key derivation, never for output."""
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a secret cannot be pickled or copied")


@final
class Identity:
    """An agent's private key, which shows only its public half."""

    __slots__ = ("public_key", "secret")

    def __init__(self, secret: Secret) -> None:
        self.secret = secret
        self.public_key = self._private_key().public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"Identity(public key {self.public_key.hex()})"

    def agree(self, public_key: bytes) -> Secret:
        """Return the secret that this identity and the owner of ``public_key`` have in common."""
        peer = X25519PublicKey.from_public_bytes(public_key)
        return Secret(self._private_key().exchange(peer))

    def _private_key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self.secret.reveal())


@dataclass(frozen=True)
class Roster:
    """The public keys of agents 0 … n−1: 32 bytes each, usable, all different."""

    public_keys: tuple[bytes, ...]

    def __post_init__(self) -> None:
        owners: dict[bytes, int] = {}
        for agent, key in enumerate(self.public_keys):
            _check_public_key(key, agent)
            # One key for two agents makes them one party, while a threat counts insiders by agents.
            if owners.setdefault(key, agent) != agent:
                raise InvalidArgumentError(
                    f"agents {owners[key]} and {agent} have the same public key: each needs its own"
                )

    @property
    def num_agents(self) -> int:
        """The number of agents n."""
        return len(self.public_keys)

    def public_key(self, agent: int) -> bytes:
        """Return an agent's public key."""
        # Checked, because a negative number would be another agent's place from the end.
        if not 0 <= agent < self.num_agents:
            raise InvalidArgumentError(
                f"the roster has agents 0 … {self.num_agents - 1}, found agent {agent}"
            )
        return self.public_keys[agent]


def generate_identity() -> Identity:
    """Return a new identity, from the operating system's randomness."""
    return Identity(Secret.random())


def save_identity(identity: Identity, path: Path) -> None:
    """Write an identity to a new file with mode 0600; an existing file is never overwritten."""
    try:
        # Created with its final mode: a later chmod would leave it readable for a moment.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise FileFormatError(
            f"{path}: exists; an overwritten key is lost, so choose another name"
        ) from None
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(_IDENTITY_PREFIX + identity.secret.reveal().hex().encode() + b"\n")
        # On the disk before the public key is handed out: a lost private key cannot be replaced.
        file.flush()
        os.fsync(file.fileno())


def load_identity(path: Path) -> Identity:
    """Read an identity; a file that others than its owner can read or change is refused."""
    return Identity(Secret(bytes.fromhex(_read_identity(path)[1].decode())))


def list_used_plans(path: Path) -> tuple[str, ...]:
    """Return the fingerprints of the plans that a key was used with, in hexadecimal."""
    return tuple(line[5:].decode() for line in _read_identity(path)[2].splitlines())


def record_use(path: Path, plan_fingerprint: bytes) -> None:
    """Record in the key's file that it is used with a plan, durably, before the first release.

    A copy of the key without the release ledger of that plan is then known to lack it.
    """
    plan = plan_fingerprint.hex()
    if plan in list_used_plans(path):
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        try:
            # One agent may start under two plans at the same time.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            # A line that a crash left incomplete is removed; its plan was never used.
            whole = os.pread(descriptor, size, 0).rfind(b"\n") + 1
            os.ftruncate(descriptor, whole)
            os.write(descriptor, f"plan {plan}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise FileFormatError(
            f"{path}: cannot be written: {error.strerror}; a key records the plans that it was "
            "used with, so that a lost ledger is noticed"
        ) from error


def _read_identity(path: Path) -> re.Match[bytes]:
    try:
        with path.open("rb") as file:
            # Of the open file, not of the path, which could be replaced between check and read.
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & _OTHERS:
                raise FileFormatError(
                    f"{path}: a private key that others may use, mode {mode:04o}; restrict it to "
                    f"its owner with: chmod 600 {path}"
                )
            content = file.read(_MAX_IDENTITY_BYTES + 1)
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error
    # Plans beyond the part that was read would be forgotten, and their lost ledgers unnoticed.
    if len(content) > _MAX_IDENTITY_BYTES:
        raise FileFormatError(
            f"{path}: has more than {_MAX_IDENTITY_BYTES:,} bytes: not an identity of CorN, or one "
            "that was used with too many plans"
        )
    # A pattern rather than a parser, whose error message would quote the content.
    match = _IDENTITY_PATTERN.fullmatch(content)
    if match is None:
        raise FileFormatError(f"{path}: not an identity of CorN, or a damaged one")
    return match


def save_roster(roster: Roster, path: Path) -> None:
    """Write the roster as JSON: agent's number → public key in hexadecimal."""
    agents = {str(agent): key.hex() for agent, key in enumerate(roster.public_keys)}
    text = json.dumps({"format": _ROSTER_FORMAT, "agents": agents}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def load_roster(path: Path) -> Roster:
    """Read and check a roster: agents 0 … n−1, each once, each with a public key of its own."""
    document = read_json(path, kind="a roster")
    try:
        return _decode_roster(document)
    except InvalidArgumentError as error:
        raise FileFormatError(f"{path}: not a roster: {error}") from error


def _decode_roster(document: object) -> Roster:
    fields = build_fields({"format": str, "agents": Mapping[str, str]}, document, "the roster")
    keys: dict[str, str] = fields["agents"]
    numbers = [str(agent) for agent in range(len(keys))]
    if fields["format"] != _ROSTER_FORMAT or set(keys) != set(numbers):
        raise InvalidArgumentError(
            f"agents 0, 1, 2, … in the format {_ROSTER_FORMAT!r} were expected"
        )
    return Roster(tuple(parse_hex(keys[number], "a public key") for number in numbers))


def _check_public_key(key: bytes, agent: int) -> None:
    if not isinstance(key, bytes) or len(key) != _PUBLIC_KEY_BYTES:
        raise InvalidArgumentError(f"agent {agent}'s public key must be {_PUBLIC_KEY_BYTES} bytes")
    # Second encodings of a point, and the few points of low order that make every shared secret
    # zero, are only ever sent by an attacker.
    if int.from_bytes(key, "little") >= _FIELD_PRIME or not _can_agree(key):
        raise InvalidArgumentError(f"agent {agent}'s public key is not a usable X25519 key")


def _can_agree(key: bytes) -> bool:
    try:
        _PROBE.exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError:
        return False
    return True
