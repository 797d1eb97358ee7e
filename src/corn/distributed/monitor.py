"""Monitoring of one agent's process: its log, its status server, and its protection."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from corn.distributed.board import StatusBoard
from corn.distributed.handshake import is_public
from corn.distributed.journal import Reports
from corn.distributed.logs import LAST_EVENT, log_event, writing_log
from corn.distributed.protection import protect_process
from corn.distributed.server import StatusPages, serving_status
from corn.distributed.settings import AgentConfig
from corn.distributed.state import FAILED, STATE_NAME, write_state
from corn.distributed.storage import Folders, make_folders
from corn.errors import CornError
from corn.files import writing_whole
from corn.version import __version__

ACCESS_FILE = "status-password"
_PASSWORD_BYTES = 24


@contextmanager
def monitor_agent(config: AgentConfig, reports: Reports, *, to_stderr: bool) -> Iterator[Reports]:
    """Log, protect and, if asked to, serve an agent while the block lasts.

    Yields:
        ``reports`` that also feed the status server.

    Raises:
        CornError: the status server's address cannot be used.
    """
    agent = config.agent
    protect_process(f"corn agent {agent}")
    is_rehearsal, settings = config.settings.is_rehearsal, config.monitoring
    # Made now, so that the log has the whole start. A folder that cannot be made is reported to all
    # agents later, where the run needs it.
    with suppress(CornError):
        make_folders(config.out, agent, is_rehearsal=is_rehearsal)
    folders = Folders.of_run(config.out, is_rehearsal=is_rehearsal).of_agent(agent)
    board = StatusBoard(agent)
    with ExitStack() as stack:
        stack.enter_context(writing_log(settings.log, folder=folders.private, to_stderr=to_stderr))
        log_event(agent, "process", f"corn {__version__} starts")
        if settings.status is not None:
            password = _make_password(folders.private) if settings.shows_private else None
            pages = StatusPages(board, password=password)
            host, port = stack.enter_context(serving_status(settings.status, pages))
            shown = f"[{host}]" if ":" in host else host
            # Where the password is, never the password: logs are forwarded.
            needed = f", with the password in {folders.private / ACCESS_FILE}" * bool(password)
            log_event(agent, "status", f"serves its status at http://{shown}:{port}/{needed}")
        try:
            yield replace(reports, on_state=board.update)
        except BaseException as error:
            _record_failure(board, folders.private)
            text = str(error) if isinstance(error, CornError) else type(error).__name__
            text = text.removeprefix(f"agent {agent}: ")
            log_event(
                agent,
                LAST_EVENT,
                text,
                level=logging.ERROR,
                is_private=not (isinstance(error, CornError) and is_public(error)),
            )
            raise


def _make_password(folder: Path) -> str:
    """Return a new password for private numbers, which is also in a file of the agent's owner."""
    password = secrets.token_urlsafe(_PASSWORD_BYTES)
    try:
        with writing_whole(folder / ACCESS_FILE, is_private=True) as partial:
            partial.write_text(password + "\n", encoding="ascii")
    except OSError as error:
        raise CornError(f"{folder / ACCESS_FILE}: cannot be written: {error.strerror}") from error
    return password


def _record_failure(board: StatusBoard, folder: Path) -> None:
    """Write the last state again as that of a failure, if this process has written one."""
    state, local = board.snapshot.state, board.snapshot.local
    if state is None or local is None:
        return
    failed = replace(state, phase=FAILED, updated=time.time())
    board.update(failed, local)
    with suppress(OSError):
        write_state(folder / STATE_NAME, failed)
