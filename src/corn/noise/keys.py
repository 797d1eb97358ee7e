"""Secrets, the identity of an agent, and its file.

An agent has an X25519 key to agree on secrets, and an Ed25519 key to sign messages to all. Both
follow from one :class:`Secret`. Only public keys ever leave an agent (:mod:`corn.noise.roster`).
"""

from __future__ import annotations

import fcntl
import hmac
import os
import re
import secrets
import shlex
import stat
from pathlib import Path
from typing import NoReturn, final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from corn.errors import FileFormatError, InvalidArgumentError

SECRET_BYTES = 32
AGREEMENT_KEY_BYTES = 32
PUBLIC_KEY_BYTES = 64  # 32 of X25519, then 32 of Ed25519

_IDENTITY_PREFIX = b"corn-identity-1 "
# The key, and then the plans and rosters that it was used with. A crash may leave a part of the
# last line: then nothing was released under that plan.
_IDENTITY_PATTERN = re.compile(
    re.escape(_IDENTITY_PREFIX)
    + rb"([0-9a-f]{%d})\n((?:(?:plan|roster) [0-9a-f]{64}\n)*)(?:[a-z0-9 ]*\Z)" % (2 * SECRET_BYTES)
)
_MAX_IDENTITY_BYTES = 1 << 20
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@final
class Secret:
    """32 bytes that only :meth:`reveal` shows: no text, pickle, copy or hash has them.

    Comparing takes the same time wherever two secrets differ. Python cannot wipe memory.
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
    """An agent's private keys, which show only their public halves."""

    __slots__ = ("public_key", "secret")

    def __init__(self, secret: Secret) -> None:
        self.secret = secret
        keys = (self._agreement_key(), self._signing_key())
        self.public_key = b"".join(key.public_key().public_bytes_raw() for key in keys)

    def __repr__(self) -> str:
        return f"Identity(public key {self.public_key.hex()})"

    def agree(self, public_key: bytes) -> Secret:
        """Return the secret shared with the owner of a public key, of which 32 bytes count."""
        peer = X25519PublicKey.from_public_bytes(public_key[:AGREEMENT_KEY_BYTES])
        return Secret(self._agreement_key().exchange(peer))

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message, which the public key verifies."""
        return self._signing_key().sign(message)

    def _agreement_key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self.secret.reveal())

    def _signing_key(self) -> Ed25519PrivateKey:
        # A key of its own: two algorithms must not share one.
        hkdf = HKDF(algorithm=SHA256(), length=SECRET_BYTES, salt=None, info=b"corn 1 signing key")
        return Ed25519PrivateKey.from_private_bytes(hkdf.derive(self.secret.reveal()))


def generate_identity() -> Identity:
    """Return a new identity, from the operating system's randomness."""
    return Identity(Secret.random())


def save_identity(identity: Identity, path: Path) -> None:
    """Write an identity to a new file with mode 0600; an existing file is never overwritten."""
    content = _IDENTITY_PREFIX + identity.secret.reveal().hex().encode() + b"\n"
    descriptor = None
    try:
        # Created with its final mode: a later chmod would leave it readable for a moment.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            # On the disk before the public key is handed out: a lost key cannot be replaced.
            os.fsync(file.fileno())
    except OSError as error:
        if descriptor is not None:
            path.unlink()  # no key yet: nobody can have its public half
        why = "exists, and would be lost" if isinstance(error, FileExistsError) else error.strerror
        raise FileFormatError(f"{path}: cannot be written: {why}") from error


def load_identity(path: Path) -> Identity:
    """Read an identity; a file that others than its owner can read or change is refused."""
    return Identity(Secret(bytes.fromhex(_read_identity(path)[1].decode())))


def list_used_plans(path: Path, kind: str = "plan") -> tuple[str, ...]:
    """Return the fingerprints of the plans or rosters that a key was used with, as text."""
    lines = _read_identity(path)[2].decode().splitlines()
    return tuple(name for label, name in map(str.split, lines) if label == kind)


def find_pinned_roster(path: Path) -> str | None:
    """Return the fingerprint of the roster that a key was last used with; None before any use."""
    return (list_used_plans(path, "roster") or (None,))[-1]


def record_use(path: Path, fingerprint: bytes, kind: str = "plan") -> None:
    """Record in the key's file that it is used with a plan or a roster, durably.

    A copy of the key without the release ledger of that plan is then known to lack it, and a roster
    that somebody exchanged is noticed.
    """
    uses = list_used_plans(path, kind)
    # Of rosters only the last one counts, and an earlier one may come back.
    if fingerprint.hex() in (uses if kind == "plan" else uses[-1:]):
        return
    try:
        with path.open("rb+") as file:
            # One agent may start under two plans at the same time.
            fcntl.flock(file, fcntl.LOCK_EX)
            # A line that a crash left incomplete is removed; its plan was never used.
            whole = file.read().rfind(b"\n") + 1
            file.truncate(whole)
            file.seek(whole)
            file.write(f"{kind} {fingerprint.hex()}\n".encode())
            file.flush()
            os.fsync(file.fileno())
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
                    f"its owner with: chmod 600 {shlex.quote(str(path))}"
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
