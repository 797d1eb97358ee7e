"""Monitoring of one agent's process: its log, its status as a page and as metrics, its protection.

The status server answers every request with what the newest state has, and keeps nothing that a
client sends.
"""

from __future__ import annotations

import base64
import hmac
import io
import json
import logging
import math
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from http.client import LineTooLong
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
from corn.distributed.state import FAILED, STATE_NAME, TRAINING, AgentState, LocalState, write_state
from corn.distributed.storage import Folders, make_folders
from corn.errors import CornError
from corn.files import writing_whole
from corn.privacy.rounding import round_up, write_exactly
from corn.version import __version__

# The library would add a metric with the time at which it made each counter, at every request.
disable_created_metrics()  # type: ignore[no-untyped-call]

STARTING = "starting"
# 720 points of 5 seconds are the last hour.
_SECONDS_BETWEEN_POINTS, _MOST_POINTS = 5.0, 720
# One time-out is the normal price of a lost neighbour.
_TIMEOUTS_OF_A_STALL = 2


@dataclass(frozen=True)
class Snapshot:
    """Everything that the board shows at one moment.

    Attributes:
        agent: the agent's number.
        phase: ``starting``, or that of the state.
        state: the newest; None before training.
        local: the newest; None before training.
        paces: steps per minute over the last hour, as pairs of a time and a pace.
    """

    agent: int
    phase: str = STARTING
    state: AgentState | None = None
    local: LocalState | None = None
    paces: tuple[tuple[float, float], ...] = ()

    @property
    def problem(self) -> str:
        """The reason why the agent is not healthy; empty if it is.

        A neighbour that is lost makes an agent wait for one time-out, so that a stall is longer.
        """
        if self.phase == FAILED:
            return "the agent failed"
        if self.phase == TRAINING and self.state is not None:
            limit = _TIMEOUTS_OF_A_STALL * self.state.timeout
            if self.state.seconds_old() > limit:
                return f"no step for {self.state.seconds_old():.0f} s"
        return ""


@final
class StatusBoard:
    """The newest state of one agent.

    Setting it costs the training thread an assignment. Readers get one snapshot, which does not
    change any more.
    """

    def __init__(self, agent: int) -> None:
        self._points: deque[tuple[float, float]] = deque(maxlen=_MOST_POINTS)
        self.snapshot = Snapshot(agent)

    def update(self, state: AgentState, local: LocalState) -> None:
        """Show a new state."""
        now = time.time()
        if not self._points or now > self._points[-1][0] + _SECONDS_BETWEEN_POINTS:
            self._points.append((now, state.steps_per_minute))
        # One assignment of a frozen record: readers in other threads need no lock.
        self.snapshot = Snapshot(state.agent, state.phase, state, local, tuple(self._points))


def render_metrics(snapshot: Snapshot, *, show_private: bool = False) -> str:
    """Return all metrics of an agent in Prometheus' text format; private ones only if asked for."""
    registry, agent = CollectorRegistry(), str(snapshot.agent)

    def show(name: str, text: str, value: float, **labels: str) -> None:
        labels = {"agent": agent} | labels
        Gauge(f"corn_{name}", text, tuple(labels), registry=registry).labels(**labels).set(value)

    show("info", "Version and phase.", 1, version=__version__, phase=snapshot.phase)
    show("healthy", "1 unless /healthz fails.", not snapshot.problem)
    state, local = snapshot.state, snapshot.local
    if state is None or local is None:
        return generate_latest(registry).decode()
    show("step", "Steps done.", state.step)
    show("planned_steps", "Steps to do.", state.num_steps)
    show("steps_per_minute", "Over the last minute.", state.steps_per_minute)
    show("updated_seconds", "Unix time of the last report.", state.updated)
    show("neighbours", "Neighbours still linked.", len(state.neighbours))
    show("lost_agents", "Agents lost so far.", len(state.lost))
    text = "Step at which the loss of an agent was noticed."
    lost_at = Gauge("corn_lost_at_step", text, ("agent", "lost"), registry=registry)
    for lost, step in state.lost.items():
        lost_at.labels(agent, lost).set(step)
    sent = Counter("corn_sent_bytes", "Bytes sent to neighbours.", ("agent",), registry=registry)
    sent.labels(agent).inc(state.bytes_sent)
    text = "Releases that the ledger still allows under this plan."
    show("releases_left", text, state.releases_left)
    if state.epsilon is not None:
        meaning = {
            "unit": state.unit,
            "protects": state.protects,
            "adversary": state.adversary,
            "simulation": state.simulation,
            "delta": write_exactly(state.delta),
        }
        text = "Privacy loss so far under this plan, at most."
        show("epsilon_spent", text, state.epsilon, **meaning)
        text = "Privacy loss that the plan allows."
        show("epsilon_promised", text, state.promised_epsilon, **meaning)
    if state.test_loss is not None:
        show("test_loss", "Of the model, on public data.", state.test_loss)
    if show_private:
        for name, value in asdict(local).items():
            show(f"private_{name}", "Private: depends on data without noise.", value)
    return generate_latest(registry).decode()


_WIDTH, _HEIGHT, _MARGIN, _TOP = 680.0, 180.0, 44.0, 6.0
_GRID_LINES = 4


@dataclass(frozen=True)
class Chart:
    """A line chart in the coordinates of its picture.

    Attributes:
        points: of the line, as SVG expects them.
        marks: the height of each grid line, and its number.
        begin: the time at the left end.
        end: the time at the right end.
    """

    points: str
    marks: tuple[tuple[float, str], ...]
    begin: str
    end: str


def draw_chart(paces: Sequence[tuple[float, float]]) -> Chart | None:
    """Return the chart of steps per minute; None for fewer than two points.

    >>> draw_chart([(0.0, 10.0), (60.0, 20.0)]).points
    '44.0,93.0 680.0,6.0'
    """
    if len(paces) < 2:
        return None
    # The board keeps points more than five seconds apart, so last − first is not zero.
    first, last = paces[0][0], paces[-1][0]
    interval = _choose_interval(max(pace for _, pace in paces))
    top = _GRID_LINES * interval

    def height(pace: float) -> float:
        return _TOP + (_HEIGHT - _TOP) * (1 - pace / top)

    points = (
        f"{_MARGIN + (_WIDTH - _MARGIN) * (when - first) / (last - first):.1f},{height(pace):.1f}"
        for when, pace in paces
    )
    marks = tuple((height(k * interval), f"{k * interval:,g}") for k in range(_GRID_LINES + 1))
    return Chart(" ".join(points), marks, _clock(first), _clock(last))


def _choose_interval(largest: float) -> float:
    """Return 1, 2, 2.5 or 5 times a power of ten, so that the grid lines reach the largest pace."""
    least = max(largest, 1.0) / _GRID_LINES
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= least)


def render_page(snapshot: Snapshot, *, show_private: bool = False) -> str:
    """Return the page as HTML."""
    state = snapshot.state
    spent, epsilon = None, ""
    if state is not None and state.epsilon is not None:
        spent = min(1.0, state.epsilon / state.promised_epsilon)
        epsilon = round_up(state.epsilon)
    return _template().render(
        snapshot=snapshot,
        state=state,
        local=snapshot.local if show_private else None,
        spent=spent,
        epsilon=epsilon,
        promised="" if state is None else write_exactly(state.promised_epsilon),
        delta="" if state is None else write_exactly(state.delta),
        done=0.0 if state is None else state.step / state.num_steps,
        chart=draw_chart(snapshot.paces),
        width=_WIDTH,
        height=_HEIGHT,
        margin=_MARGIN,
        updated=None if state is None else _clock(state.updated),
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


def _clock(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%H:%M:%S UTC")


_MOST_CONNECTIONS = 64
_MOST_HEAD_BYTES = 8192
_SECONDS_PER_CONNECTION = 5.0
_SECONDS_BETWEEN_CONNECTIONS = 0.005
_SECONDS_TO_KEEP = 0.5
_HEADERS = {
    "Connection": "close",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
}
# Answered without the password too: probes of service managers have none.
_OPEN_PATH = "/healthz"


@dataclass(frozen=True)
class Response:
    """An answer to a request."""

    body: str
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


@final
class StatusPages:
    """The pages of the server, each computed at most twice a second.

    With a password, pages show private numbers, and only to those who send it. The address alone
    would not protect them: every user of a machine can connect to it.
    """

    def __init__(self, board: StatusBoard, *, password: str | None = None) -> None:
        self._board, self._password = board, password
        self._kept: dict[str, tuple[float, Response]] = {}
        self._lock = threading.Lock()
        self._renderers: dict[str, Callable[[Snapshot], Response]] = {
            "/": self._render_page,
            _OPEN_PATH: _render_health,
            "/metrics": self._render_metrics,
        }

    def has(self, path: str) -> bool:
        """Return whether there is such a page."""
        return path in self._renderers

    def is_allowed(self, path: str, authorization: str) -> bool:
        """Return whether a request with this header ``Authorization`` may read a page."""
        if self._password is None or path == _OPEN_PATH:
            return True
        # HTTP's basic authentication; any user name will do.
        kind, _, encoded = authorization.strip().partition(" ")
        try:
            sent = base64.b64decode(encoded.strip(), validate=True).partition(b":")[2]
        except ValueError:
            return False
        # In constant time: the time of a comparison by characters would reveal them one by one.
        return kind.lower() == "basic" and hmac.compare_digest(sent, self._password.encode())

    def find(self, path: str) -> Response:
        """Return a page."""
        # A flood of requests costs training one rendering per half second, not one each.
        with self._lock:
            made, response = self._kept.get(path, (-math.inf, Response("")))
            now = time.monotonic()
            if now > made + _SECONDS_TO_KEEP:
                response = self._renderers[path](self._board.snapshot)
                self._kept[path] = now, response
            return response

    def _render_page(self, snapshot: Snapshot) -> Response:
        page = render_page(snapshot, show_private=self._password is not None)
        return Response(page, "text/html; charset=utf-8")

    def _render_metrics(self, snapshot: Snapshot) -> Response:
        text = render_metrics(snapshot, show_private=self._password is not None)
        return Response(text, CONTENT_TYPE_PLAIN_0_0_4)


def _render_health(snapshot: Snapshot) -> Response:
    step = None if snapshot.state is None else snapshot.state.step
    facts = {"agent": snapshot.agent, "phase": snapshot.phase, "step": step}
    problem = snapshot.problem
    status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
    body = json.dumps(facts | {"problem": problem}) + "\n"
    return Response(body, "application/json", status)


@contextmanager
def serving_status(address: tuple[str, int], pages: StatusPages) -> Iterator[tuple[str, int]]:
    """Serve status pages at an address while the block lasts; yield the address in use.

    Raises:
        CornError: the address cannot be used.
    """
    host, port = address
    try:
        server = _StatusServer(address, pages)
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
        server.close_all()


@final
class _StatusServer(ThreadingHTTPServer):
    """A server with a limit on connections, which strangers can neither stall nor overload."""

    request_queue_size = 64
    daemon_threads = True
    # Closing must not wait for clients.
    block_on_close = False

    def __init__(self, address: tuple[str, int], pages: StatusPages) -> None:
        self.pages = pages
        # With the time at which each was accepted, in that order.
        self._connections: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, _StatusHandler)

    def server_bind(self) -> None:
        """Bind the port."""
        # That of HTTPServer asks the network for the name of the host, which can take seconds.
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own."""
        with self._lock:
            # Requests take milliseconds, so the oldest connection is the one that does not ask.
            if len(self._connections) >= _MOST_CONNECTIONS:
                _disconnect(next(iter(self._connections)))
            self._connections[request] = time.monotonic()
        super().process_request(request, client_address)
        # At most 200 connections a second, which bounds what strangers cost.
        time.sleep(_SECONDS_BETWEEN_CONNECTIONS)

    def service_actions(self) -> None:
        """End connections that took too long; the loop of the server calls this all the time."""
        # A time-out of the socket would begin anew with every byte that a slow client sends.
        with self._lock:
            for connection, began in self._connections.items():
                if time.monotonic() > began + _SECONDS_PER_CONNECTION:
                    _disconnect(connection)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that failed: its client is gone, or was disconnected."""

    def close_all(self) -> None:
        """Close the port and all connections."""
        self.server_close()
        with self._lock:
            for connection in self._connections:
                _disconnect(connection)


@final
class _HeadReader(io.BufferedReader):
    """A stream of which so much can be read as the head of a request may have."""

    _num_read = 0

    def readline(self, size: int | None = -1) -> bytes:
        """Return the next line, or raise ``LineTooLong``, which the server answers."""
        line = super().readline(_MOST_HEAD_BYTES if size is None else size)
        self._num_read += len(line)
        if self._num_read > _MOST_HEAD_BYTES:
            raise LineTooLong("the head of a request")
        return line


@final
class _StatusHandler(BaseHTTPRequestHandler):
    """The answer to one request."""

    server: _StatusServer
    protocol_version = "HTTP/1.1"
    # Without, a request that cannot be read would get an answer without a status.
    default_request_version = "HTTP/1.0"

    def setup(self) -> None:
        """Open the streams of the connection."""
        super().setup()
        self.rfile = _HeadReader(self.connection.makefile("rb", buffering=0))

    def do_GET(self) -> None:
        """Answer a request for a page."""
        path = self.path.partition("?")[0]
        pages = self.server.pages
        if not pages.has(path):
            self.send_error(HTTPStatus.NOT_FOUND)
        elif not pages.is_allowed(path, self.headers.get("Authorization", "")):
            self.send_error(HTTPStatus.UNAUTHORIZED)
        else:
            self._answer(pages.find(path))

    do_HEAD = do_GET  # noqa: N815

    def send_error(self, code: int, *_: object) -> None:
        """Refuse a request, without its text, which a stranger chose."""
        status = HTTPStatus(code)
        self._answer(Response(f"{status.phrase}\n", status=status))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing: the lines of strangers do not belong into the log of a run."""

    def _answer(self, response: Response) -> None:
        body = response.body.encode()
        # Without the versions and the time that send_response would add.
        self.send_response_only(response.status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(body)))
        if response.status == HTTPStatus.UNAUTHORIZED:
            # It makes browsers ask for the password.
            self.send_header("WWW-Authenticate", 'Basic realm="CorN"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _disconnect(connection: socket.socket) -> None:
    """End a connection; a thread that waits for it wakes up and closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


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

    def show(state: AgentState, local: LocalState) -> None:
        board.update(state, local)
        if reports.on_state is not None:
            reports.on_state(state, local)

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
            yield replace(reports, on_state=show)
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
