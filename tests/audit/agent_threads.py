"""Agents in threads of this process, so that a test can plant a fault in the code they run."""

import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest


class _Agent(threading.Thread):
    """A thread in the place of an agent's process."""

    def __init__(self, connection: Connection, **given: Any) -> None:
        super().__init__(args=(connection,), **given)
        self._connection = connection

    def kill(self) -> None:
        """End the connection, and with it the thread."""
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as own:
            own.shutdown(socket.SHUT_RDWR)


class _Context:
    """The part of a context of ``multiprocessing`` that ``AgentPool`` uses."""

    def __init__(self) -> None:
        self._num_agents = 0

    def Pipe(self) -> Any:  # noqa: N802 - the name in multiprocessing
        return multiprocessing.Pipe()

    def Process(self, *, args: tuple[Connection], **given: Any) -> _Agent:  # noqa: N802
        self._num_agents += 1
        # A copy, as a process has: the pool closes its own.
        own = Connection(os.dup(args[0].fileno()))
        return _Agent(name=f"agent {self._num_agents - 1}", connection=own, **given)


def record_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``AgentPool`` run agents in threads."""

    @contextmanager
    def use_threads() -> Iterator[_Context]:
        yield _Context()

    monkeypatch.setattr("tests.audit.recording.preloaded_context", use_threads)
