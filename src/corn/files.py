"""Files that are complete or absent at any moment, private files, and functions from files."""

from __future__ import annotations

import importlib.util
import os
import shlex
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from corn.errors import FileFormatError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@contextmanager
def writing_whole(path: Path, *, durable: bool = False, is_private: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to, and move it to ``path`` if the block succeeds.

    With ``durable`` a power failure also leaves the old file or the new one. Only its owner can
    read a private file, whatever its folder allows.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        # Created with its mode before anything is written: a later chmod would come too late.
        if is_private:
            partial.touch(mode=0o600)
        yield partial
        if durable:
            with partial.open("rb") as written:
                os.fsync(written.fileno())
        partial.replace(path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(partial):
            error.filename = str(path)
        raise


def write_file(path: Path, content: str | bytes, *, is_private: bool = False) -> None:
    """Write a whole file in a folder that is made if it is missing; see `writing_whole`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing_whole(path, is_private=is_private) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


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


def load_function(spec: str) -> Callable[..., Any]:
    """Run a user's Python file and return a function of it: ``mine.py:make_model``.

    The file may import modules that lie beside it. An error of its own is raised as it is.
    """
    name, colon, function = spec.rpartition(":")
    path = Path(name)
    if not colon or not function.isidentifier() or path.suffix != ".py":
        raise FileFormatError(f"{spec}: must be FILE.py:FUNCTION")
    if not path.is_file():
        raise FileFormatError(f"{path}: no such file")
    # Under a name of its own, so that it replaces no installed module.
    found = importlib.util.spec_from_file_location(f"_own_{path.stem}", path)
    if found is None or found.loader is None:
        raise FileFormatError(f"{path}: cannot be loaded")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        found.loader.exec_module(module)
    except SyntaxError as error:
        # The error may be in a module that the file imports.
        line = "" if error.lineno is None else f"line {error.lineno}: "
        raise FileFormatError(f"{error.filename or path}: {line}{error.msg}") from error
    finally:
        # The file may have changed the path itself.
        with suppress(ValueError):
            sys.path.remove(str(path.resolve().parent))
    made = getattr(module, function, None)
    if not callable(made):
        raise FileFormatError(f"{path}: must define a function {function!r}, found none")
    return made  # type: ignore[no-any-return]
