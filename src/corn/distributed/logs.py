"""Log of a run: one line per event with its time, by Python's ``logging``.

A private record depends on data without noise, and is for the agent's owner alone.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import final

from corn.errors import make_printable
from corn.topology.graphs import add_names, label_agent

LOG_NAME = "log"
LAST_EVENT = "failure"
PRIVATE_MARK = "private, do not publish: "

# A program that uses the library chooses its own handlers; without any, nothing is printed.
_LOGGER = logging.getLogger("corn")
_LOGGER.addHandler(logging.NullHandler())


def log_event(
    agent: int | None, event: str, text: str, *, level: int = logging.INFO, is_private: bool = False
) -> None:
    """Log an event of an agent, or of the launcher if ``agent`` is None."""
    own = {"agent": agent, "event": event, "is_private": is_private}
    _LOGGER.log(level, "%s", text, extra=own)


@contextmanager
def writing_log(
    *, folder: Path | None = None, to_stderr: bool = True, names: Sequence[str] = ()
) -> Iterator[None]:
    """Write events to stderr and to ``log`` in a private folder, as long as the block lasts."""
    handlers: list[logging.Handler] = []
    if to_stderr:
        console = logging.StreamHandler(sys.stderr)
        # The command prints the failure that ends it as its last line.
        console.addFilter(lambda record: getattr(record, "event", "") != LAST_EVENT)
        handlers.append(console)
    # Without a folder, or on a full disk, an agent goes on without a log.
    with suppress(OSError):
        if folder is not None:
            handlers.append(_PrivateFile(folder / LOG_NAME, encoding="utf-8", delay=True))
    before = _LOGGER.level, _LOGGER.propagate
    for handler in handlers:
        handler.setFormatter(_TextFormatter(names))
        _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.INFO)
    # Handlers of the root logger would print every line a second time.
    _LOGGER.propagate = False
    try:
        yield
    finally:
        _LOGGER.setLevel(before[0])
        _LOGGER.propagate = before[1]
        for handler in handlers:
            _LOGGER.removeHandler(handler)
            with suppress(OSError):
                handler.close()


@final
class _PrivateFile(WatchedFileHandler):
    """A file that only its owner can read; one that logrotate has moved away is made anew."""

    def _open(self) -> TextIOWrapper:
        # Created with its mode: a later chmod would leave a moment to read it.
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode=0o600)
        return os.fdopen(descriptor, "a", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        # No folder yet, or a full disk: an agent goes on without a log.
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Drop the record; logging would print a traceback with its private text."""


@final
class _TextFormatter(logging.Formatter):
    """``TIME LEVEL agent 3 (Lake): text``, in one line whatever the text contains."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names

    def format(self, record: logging.LogRecord) -> str:
        agent = getattr(record, "agent", None)
        who = "launch" if agent is None else f"agent {label_agent(self._names, agent)}"
        mark = PRIVATE_MARK if getattr(record, "is_private", False) else ""
        text = make_printable(add_names(record.getMessage(), self._names))
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        when = time.replace("+00:00", "Z")
        return f"{when} {record.levelname} {who}: {mark}{text}"
