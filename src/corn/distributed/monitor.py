"""Monitoring of one agent's process: its log, its status as a page and as metrics, its protection.

The status server answers every request with what the newest state has, and keeps nothing that a
client sends.
"""

from __future__ import annotations

import base64
import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from socketserver import TCPServer
from typing import Any, final

import jinja2
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from corn.distributed.handshake import is_public
from corn.distributed.journal import Reports
from corn.distributed.keyring import protect_process
from corn.distributed.logs import LAST_EVENT, log_event, writing_log
from corn.distributed.settings import AgentConfig
from corn.distributed.state import (
    FAILED,
    STATE_NAME,
    AgentState,
    PrivateState,
    judge_condition,
    write_state,
)
from corn.distributed.storage import Folders, make_folders
from corn.errors import CornError
from corn.files import writing_whole
from corn.privacy.rounding import round_up, write_exactly
from corn.version import __version__

# The library would add a metric with the time at which it made each counter, at every request.
disable_created_metrics()  # type: ignore[no-untyped-call]

STARTING = "starting"
ACCESS_FILE = "status-password"
_PASSWORD_BYTES = 24
# Limits on what strangers cost: at most so many connections at a time, for so long, and fifty new
# ones a second.
_MOST_CONNECTIONS = 16
_SECONDS_PER_CONNECTION = 5.0
_SECONDS_BETWEEN_CONNECTIONS = 0.02
_HEADERS = {
    "Connection": "close",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
}


@dataclass
class Status:
    """The newest state of one agent, and its private numbers; None before training.

    Threads that read it need no lock: the pair is replaced by one assignment.
    """

    agent: int
    newest: tuple[AgentState, PrivateState] | None = None

    @property
    def phase(self) -> str:
        """``starting``, or that of the state."""
        return STARTING if self.newest is None else self.newest[0].phase

    @property
    def problem(self) -> str:
        """The reason why the agent is not healthy; empty if it is."""
        if self.newest is None:
            return ""
        condition = judge_condition(self.newest[0], is_gone=False)
        return condition.text if condition.needs_action else ""


def render_metrics(status: Status, *, show_private: bool = False) -> str:
    """Return all metrics of an agent in Prometheus' text format; private ones only if asked for."""
    registry, agent = CollectorRegistry(), str(status.agent)

    def show(name: str, text: str, value: float, **labels: str) -> None:
        labels = {"agent": agent} | labels
        Gauge(f"corn_{name}", text, tuple(labels), registry=registry).labels(**labels).set(value)

    show("info", "Version and phase.", 1, version=__version__, phase=status.phase)
    show("healthy", "1 unless /healthz fails.", not status.problem)
    if status.newest is None:
        return generate_latest(registry).decode()
    state, local = status.newest
    numbers = {
        "step": ("Steps done.", state.step),
        "planned_steps": ("Steps to do.", state.num_steps),
        "steps_per_minute": ("Over the last minute.", state.steps_per_minute),
        "updated_seconds": ("Unix time of the last report.", state.updated),
        "neighbours": ("Neighbours still linked.", len(state.neighbours)),
        "lost_agents": ("Agents lost so far.", len(state.lost)),
        "releases_left": ("Releases that the ledger still allows.", state.releases_left),
        "test_loss": ("Of the model, on public data.", state.test_loss),
    }
    for name, (text, value) in numbers.items():
        if value is not None:
            show(name, text, value)
    text = "Step at which the loss of an agent was noticed."
    lost_at = Gauge("corn_lost_at_step", text, ("agent", "lost"), registry=registry)
    for lost, step in state.lost.items():
        lost_at.labels(agent, lost).set(step)
    sent = Counter("corn_sent_bytes", "Bytes sent to neighbours.", ("agent",), registry=registry)
    sent.labels(agent).inc(state.bytes_sent)
    meaning = {
        "unit": state.unit,
        "protects": state.protects,
        "adversary": state.adversary,
        "simulation": state.simulation,
        "delta": write_exactly(state.delta),
    }
    text = "Privacy loss so far under this plan, at most."
    show("epsilon_spent", text, state.epsilon, **meaning)
    show(
        "epsilon_promised", "Privacy loss that the plan allows.", state.promised_epsilon, **meaning
    )
    if show_private:
        for name, value in asdict(local).items():
            show(f"private_{name}", "Private: depends on data without noise.", value)
    return generate_latest(registry).decode()


def render_page(status: Status, *, show_private: bool = False) -> str:
    """Return the page as HTML."""
    state, local = status.newest or (None, None)
    return _template().render(
        status=status,
        state=state,
        local=local if show_private else None,
        round_up=round_up,
        write_exactly=write_exactly,
        clock=lambda moment: datetime.fromtimestamp(moment, UTC).strftime("%H:%M:%S UTC"),
        version=__version__,
    )


@cache
def _template() -> jinja2.Template:
    source = resources.files("corn.distributed").joinpath("status.html")
    # Escaped, as texts of a plan come from others; strict, so that a missing value is an error, not
    # a gap.
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source.read_text(encoding="utf-8"))


@contextmanager
def serving_status(
    address: tuple[str, int], status: Status, *, password: str | None = None
) -> Iterator[tuple[str, int]]:
    """Serve an agent's status at an address while the block lasts; yield the address in use.

    With a password, pages show private numbers, and only to those who send it. The address alone
    would not protect them: every user of a machine can connect to it.

    Raises:
        CornError: the address cannot be used.
    """
    host, port = address
    try:
        server = _StatusServer(address, status, password)
    # A port above 65535 overflows; the Unicode error is for a name that no host can have.
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise CornError(f"--status {host}:{port}: cannot be served: {why}") from error
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield server.socket.getsockname()[:2]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@final
class _StatusServer(ThreadingHTTPServer):
    """A server with a limit on connections, which strangers can neither stall nor overload."""

    request_queue_size = 64
    daemon_threads = True
    # Closing must not wait for clients.
    block_on_close = False

    def __init__(self, address: tuple[str, int], status: Status, password: str | None) -> None:
        self.status = status
        self.password = password
        self._connections: list[socket.socket] = []
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, _StatusHandler)

    def server_bind(self) -> None:
        """Bind the port."""
        # That of HTTPServer asks the network for the name of the host, which can take seconds.
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own."""
        self._connections.append(request)
        # Requests take milliseconds, so the oldest connection is the one that does not ask.
        if len(self._connections) > _MOST_CONNECTIONS:
            _disconnect(self._connections[0])
        super().process_request(request, client_address)
        time.sleep(_SECONDS_BETWEEN_CONNECTIONS)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection, and end it after some seconds."""
        # A time-out of the socket would begin anew with every byte that a slow client sends.
        deadline = threading.Timer(_SECONDS_PER_CONNECTION, _disconnect, (request,))
        deadline.daemon = True
        deadline.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self._connections.remove(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that failed: its client is gone, or was disconnected."""


def _disconnect(connection: socket.socket) -> None:
    """End a connection; a thread that waits for it wakes up and closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@final
class _StatusHandler(BaseHTTPRequestHandler):
    """The answer to one request."""

    server: _StatusServer
    protocol_version = "HTTP/1.1"
    # Without, a request that cannot be read would get an answer without a status.
    default_request_version = "HTTP/1.0"

    def do_GET(self) -> None:
        """Answer a request for a page."""
        path, status = self.path.partition("?")[0], self.server.status
        show_private = self.server.password is not None
        if path == "/healthz":
            # Without the password too: probes of service managers have none.
            step = None if status.newest is None else status.newest[0].step
            facts = {"agent": status.agent, "phase": status.phase, "step": step}
            problem = status.problem
            code = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
            body = json.dumps(facts | {"problem": problem}) + "\n"
            self._answer(body, "application/json", code)
        elif path not in ("/", "/metrics"):
            self.send_error(HTTPStatus.NOT_FOUND)
        elif not self._is_allowed():
            self.send_error(HTTPStatus.UNAUTHORIZED)
        elif path == "/":
            self._answer(render_page(status, show_private=show_private), "text/html; charset=utf-8")
        else:
            text = render_metrics(status, show_private=show_private)
            self._answer(text, CONTENT_TYPE_PLAIN_0_0_4)

    do_HEAD = do_GET  # noqa: N815

    def send_error(self, code: int, *_: object) -> None:
        """Refuse a request, without its text, which a stranger chose."""
        status = HTTPStatus(code)
        self._answer(f"{status.phrase}\n", "text/plain; charset=utf-8", status)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing: the lines of strangers do not belong into the log of a run."""

    def _is_allowed(self) -> bool:
        if self.server.password is None:
            return True
        # HTTP's basic authentication; any user name will do.
        kind, _, encoded = self.headers.get("Authorization", "").strip().partition(" ")
        try:
            sent = base64.b64decode(encoded.strip(), validate=True).partition(b":")[2]
        except ValueError:
            return False
        # In constant time: the time of a comparison by characters would reveal them one by one.
        return kind.lower() == "basic" and hmac.compare_digest(sent, self.server.password.encode())

    def _answer(self, text: str, content_type: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        body = text.encode()
        # Without the versions and the time that send_response would add.
        self.send_response_only(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if status == HTTPStatus.UNAUTHORIZED:
            # It makes browsers ask for the password.
            self.send_header("WWW-Authenticate", 'Basic realm="CorN"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def monitor_agent(
    config: AgentConfig,
    reports: Reports,
    *,
    to_stderr: bool,
    forward: Callable[[logging.LogRecord], None] | None = None,
) -> Iterator[Reports]:
    """Log, protect and, if asked to, serve an agent while the block lasts.

    ``forward`` is called with every record of the log.

    Yields:
        ``reports`` that also feed the status server.

    Raises:
        CornError: the status server's address cannot be used.
    """
    agent = config.agent
    protect_process(f"corn agent {agent}")
    # Made now, so that the log has the whole start. A folder that cannot be made is reported to all
    # agents later, where the run needs it.
    with suppress(CornError):
        make_folders(config.out, agent)
    folder = Folders.of_run(config.out).of_agent(agent).private
    settings, status = config.monitoring, Status(agent)

    def show(state: AgentState, local: PrivateState) -> None:
        status.newest = state, local
        if reports.on_state is not None:
            reports.on_state(state, local)

    with ExitStack() as stack:
        stack.enter_context(
            writing_log(settings.log_format, folder=folder, to_stderr=to_stderr, forward=forward)
        )
        log_event(agent, "process", f"corn {__version__} starts")
        if settings.status is not None:
            password = _make_password(folder) if settings.shows_private else None
            host, port = stack.enter_context(
                serving_status(settings.status, status, password=password)
            )
            shown = f"[{host}]" if ":" in host else host
            # Where the password is, never the password: logs are forwarded.
            needed = f", with the password in {folder / ACCESS_FILE}" * bool(password)
            log_event(agent, "status", f"serves its status at http://{shown}:{port}/{needed}")
        try:
            yield replace(reports, on_state=show)
        except BaseException as error:
            if status.newest is not None:
                failed = replace(status.newest[0], phase=FAILED, updated=time.time())
                status.newest = failed, status.newest[1]
                with suppress(OSError):
                    write_state(folder / STATE_NAME, failed)
            text = str(error) if isinstance(error, CornError) else type(error).__name__
            log_event(
                agent,
                LAST_EVENT,
                text.removeprefix(f"agent {agent}: "),
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
