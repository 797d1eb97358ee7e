"""The file that holds an agent's private key: readable by its owner only, never written over."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from corn.errors import FileFormatError
from corn.noise.keys import Identity
from corn.noise.secret import SECRET_BYTES, Secret

_PREFIX = b"corn-identity-1 "
_PATTERN = re.compile(re.escape(_PREFIX) + rb"([0-9a-f]{%d})\n" % (2 * SECRET_BYTES))
_MAX_BYTES = 4096
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def save_identity(identity: Identity, path: Path) -> None:
    """Write an identity to a new file with mode 0600; one that exists is never written over."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise FileFormatError(
            f"{path}: exists; a key that is written over is lost, so choose another name"
        ) from None
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(_PREFIX + identity.secret.reveal().hex().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def load_identity(path: Path) -> Identity:
    """Read an identity; a file that others than its owner can read or change is refused."""
    identity = _parse(_read_private(path))
    if identity is None:
        raise FileFormatError(f"{path}: not an identity of CorN, or a damaged one")
    return identity


def _read_private(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & _OTHERS:
                raise FileFormatError(
                    f"{path}: a private key that others may use, mode {mode:04o}; make it yours "
                    f"alone with: chmod 600 {path}"
                )
            return file.read(_MAX_BYTES)
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error


def _parse(content: bytes) -> Identity | None:
    # A pattern rather than a parser, whose error would carry the content along.
    match = _PATTERN.fullmatch(content)
    return Identity(Secret(bytes.fromhex(match[1].decode()))) if match else None
