"""Files that are there as a whole or not at all, whenever a process ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing_whole(path: Path, *, durable: bool = False, is_private: bool = False) -> Iterator[Path]:
    """Where to write instead; once that is done it takes the place of ``path``.

    With ``durable`` the content is on the disk before, so that a power failure leaves the old file
    or the new one too. A private file can be read by its owner only, whatever its folder allows.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        if is_private:
            partial.touch(mode=0o600)
        yield partial
        if durable:
            _sync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
