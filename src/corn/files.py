"""Files that are complete or absent, at whatever moment a process ends, and private ones."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from corn.errors import FileFormatError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@contextmanager
def writing_whole(path: Path, *, durable: bool = False, is_private: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to, and move it to ``path`` if the block succeeds.

    With ``durable`` the content reaches the disk before the move, so that a power failure also
    leaves the old file or the new one. A private file can be read by its owner only, whatever its
    folder allows.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        # Created with its mode before anything is written: a later chmod would come too late.
        if is_private:
            partial.touch(mode=0o600)
        yield partial
        if durable:
            _sync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def require_private(path: Path) -> None:
    """Raise unless only its owner can read, change or list a file or folder that holds secrets."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error
    if mode & _OTHERS:
        kind, wanted = ("folder", "700") if stat.S_ISDIR(mode) else ("file", "600")
        raise FileFormatError(
            f"{path}: a {kind} with secrets that others may use, mode {stat.S_IMODE(mode):04o}; "
            f"restrict it to its owner with: chmod {wanted} {shlex.quote(str(path))}"
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
