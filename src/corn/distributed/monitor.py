"""Monitoring of one agent's process: its log, its status as a page and as metrics, its protection.

The status server answers every request with what the newest state has, and keeps nothing that a
client sends.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import logging
import math
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from typing import final

import jinja2

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


Sample = tuple[Mapping[str, str], float]


def render_metrics(snapshot: Snapshot, *, show_private: bool = False) -> str:
    """Return all metrics of an agent; private ones only if asked for."""
    lines: list[str] = []
    for name, kind, text, samples in _list_metrics(snapshot, show_private=show_private):
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{_render_labels(labels)} {value}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _list_metrics(
    snapshot: Snapshot, *, show_private: bool
) -> Iterator[tuple[str, str, str, list[Sample]]]:
    agent = {"agent": str(snapshot.agent)}

    def one(value: float, **labels: str) -> list[Sample]:
        return [(agent | labels, float(value))]

    yield (
        "corn_info",
        "gauge",
        "Version and phase.",
        one(1, version=__version__, phase=snapshot.phase),
    )
    yield "corn_healthy", "gauge", "1 unless /healthz fails.", one(not snapshot.problem)
    state, local = snapshot.state, snapshot.local
    if state is None or local is None:
        return
    yield "corn_step", "gauge", "Steps done.", one(state.step)
    yield "corn_planned_steps", "gauge", "Steps to do.", one(state.num_steps)
    yield "corn_steps_per_minute", "gauge", "Over the last minute.", one(state.steps_per_minute)
    yield "corn_updated_seconds", "gauge", "Unix time of the last report.", one(state.updated)
    yield "corn_neighbours", "gauge", "Neighbours still linked.", one(len(state.neighbours))
    yield "corn_lost_agents", "gauge", "Agents lost so far.", one(len(state.lost))
    yield (
        "corn_lost_at_step",
        "gauge",
        "Step at which the loss of an agent was noticed.",
        [(agent | {"lost": lost}, float(step)) for lost, step in state.lost.items()],
    )
    yield "corn_sent_bytes_total", "counter", "Bytes sent to neighbours.", one(state.bytes_sent)
    yield (
        "corn_releases_left",
        "gauge",
        "Releases that the ledger still allows under this plan.",
        one(state.releases_left),
    )
    meaning = {
        "unit": state.unit,
        "protects": state.protects,
        "adversary": state.adversary,
        "simulation": state.simulation,
        "delta": write_exactly(state.delta),
    }
    if state.epsilon is not None:
        yield (
            "corn_epsilon_spent",
            "gauge",
            "Privacy loss so far under this plan, at most.",
            one(state.epsilon, **meaning),
        )
        yield (
            "corn_epsilon_promised",
            "gauge",
            "Privacy loss that the plan allows.",
            one(state.promised_epsilon, **meaning),
        )
    if state.test_loss is not None:
        yield "corn_test_loss", "gauge", "Of the model, on public data.", one(state.test_loss)
    if show_private:
        for name, value in asdict(local).items():
            text = "Private: depends on data without noise."
            yield f"corn_private_{name}", "gauge", text, one(value)


def _render_labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


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
_SECONDS_TO_CLOSE = 2.0
_HEADERS = (
    "Connection: close",
    "Cache-Control: no-store",
    "X-Content-Type-Options: nosniff",
    "X-Frame-Options: DENY",
    "Referrer-Policy: no-referrer",
    "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'",
)
# Answered without the password too: probes of service managers have none.
_OPEN_PATH = "/healthz"


@dataclass(frozen=True)
class Response:
    """An answer to a request."""

    body: str
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: tuple[str, ...] = ()

    def encode(self, *, with_body: bool = True) -> bytes:
        """Return the bytes of the answer."""
        body = self.body.encode()
        head = [
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(body)}",
            *_HEADERS,
            *self.headers,
        ]
        return "\r\n".join([*head, "", ""]).encode() + (body if with_body else b"")


@final
class StatusPages:
    """The answers of the server, each computed at most twice a second.

    With a password, pages show private numbers, and only to those who send it. The address alone
    would not protect them: every user of a machine can connect to it.
    """

    def __init__(self, board: StatusBoard, *, password: str | None = None) -> None:
        self._board, self._password = board, password
        self._kept: dict[str, tuple[float, Response]] = {}
        self._renderers: dict[str, Callable[[Snapshot], Response]] = {
            "/": self._render_page,
            _OPEN_PATH: _render_health,
            "/metrics": self._render_metrics,
        }

    def answer(self, head: bytes) -> bytes:
        """Return the answer to the head of a request."""
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _refuse(HTTPStatus.BAD_REQUEST)
        method, path = words[0], words[1].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _refuse(HTTPStatus.METHOD_NOT_ALLOWED)
        if path not in self._renderers:
            return _refuse(HTTPStatus.NOT_FOUND)
        if path != _OPEN_PATH and not self._is_allowed(lines[1:]):
            # The header makes browsers ask for the password.
            return _refuse(HTTPStatus.UNAUTHORIZED, 'WWW-Authenticate: Basic realm="CorN"')
        return self._find(path).encode(with_body=method == "GET")

    def _is_allowed(self, headers: list[str]) -> bool:
        if self._password is None:
            return True
        sent = _read_password(headers)
        # In constant time: the time of a comparison by characters would reveal them one by one.
        return sent is not None and hmac.compare_digest(sent, self._password.encode())

    def _find(self, path: str) -> Response:
        # A flood of requests costs training one rendering per half second, not one each.
        made, response = self._kept.get(path, (0.0, Response("")))
        now = time.monotonic()
        if not made or now > made + _SECONDS_TO_KEEP:
            response = self._renderers[path](self._board.snapshot)
            self._kept[path] = now, response
        return response

    def _render_page(self, snapshot: Snapshot) -> Response:
        page = render_page(snapshot, show_private=self._password is not None)
        return Response(page, "text/html; charset=utf-8")

    def _render_metrics(self, snapshot: Snapshot) -> Response:
        text = render_metrics(snapshot, show_private=self._password is not None)
        return Response(text, "text/plain; version=0.0.4; charset=utf-8")


def _render_health(snapshot: Snapshot) -> Response:
    step = None if snapshot.state is None else snapshot.state.step
    facts = {"agent": snapshot.agent, "phase": snapshot.phase, "step": step}
    problem = snapshot.problem
    status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
    body = json.dumps(facts | {"problem": problem}) + "\n"
    return Response(body, "application/json", status)


def _read_password(headers: list[str]) -> bytes | None:
    """Return the password of a request by HTTP's basic authentication; any user name will do."""
    for line in headers:
        name, _, value = line.partition(":")
        kind, _, encoded = value.strip().partition(" ")
        if name.strip().lower() == "authorization" and kind.lower() == "basic":
            try:
                return base64.b64decode(encoded.strip(), validate=True).partition(b":")[2]
            except ValueError:
                return None
    return None


def _refuse(status: HTTPStatus, *headers: str) -> bytes:
    return Response(f"{status.phrase}\n", status=status, headers=headers).encode()


@contextmanager
def serving_status(address: tuple[str, int], pages: StatusPages) -> Iterator[tuple[str, int]]:
    """Serve status pages at an address while the block lasts; yield the address in use.

    Raises:
        CornError: the address cannot be used.
    """
    listener = _listen_at(address)
    server = _Server(listener, pages)
    thread = threading.Thread(target=server.run, name="corn status", daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[:2]
    finally:
        server.stop()
        thread.join(_SECONDS_TO_CLOSE)
        listener.close()


def _listen_at(address: tuple[str, int]) -> socket.socket:
    host, port = address
    if port >= 1 << 16:
        raise CornError(f"--status {host}:{port}: cannot be served: ports end at 65535")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=64)
    except (OSError, UnicodeError) as error:  # the latter for a name that no host can have
        why = getattr(error, "strerror", None) or error
        raise CornError(f"--status {host}:{port}: cannot be served: {why}") from error
    listener.setblocking(False)
    return listener


@final
class _Server:
    """The loop that accepts connections, and one task for each of them."""

    def __init__(self, listener: socket.socket, pages: StatusPages) -> None:
        self._listener, self._pages = listener, pages
        self._loop = asyncio.new_event_loop()
        # In the order in which they were accepted.
        self._connections: dict[asyncio.Task[None], None] = {}
        self._accepting: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Serve until ``stop``; runs in the server's thread."""
        try:
            self._accepting = self._loop.create_task(self._accept())
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._accepting)
        finally:
            self._loop.close()

    def stop(self) -> None:
        """End the loop; called from another thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()

    async def _accept(self) -> None:
        try:
            while True:
                try:
                    connection, _ = await self._loop.sock_accept(self._listener)
                except OSError:  # out of descriptors, or the stranger is gone already
                    await asyncio.sleep(_SECONDS_PER_CONNECTION / 10)
                    continue
                # Requests take milliseconds, so the oldest connection is the one that does not ask.
                if len(self._connections) >= _MOST_CONNECTIONS:
                    next(iter(self._connections)).cancel()
                task = self._loop.create_task(self._serve(connection))
                self._connections[task] = None
                task.add_done_callback(lambda done: self._connections.pop(done, None))
                # At most 200 connections a second, which bounds what strangers cost (see the
                # module's docstring).
                await asyncio.sleep(_SECONDS_BETWEEN_CONNECTIONS)
        finally:
            left = list(self._connections)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _serve(self, connection: socket.socket) -> None:
        # TimeoutError is an OSError, so the deadline ends here as well.
        with connection, contextlib.suppress(OSError, asyncio.CancelledError):
            connection.setblocking(False)
            async with asyncio.timeout(_SECONDS_PER_CONNECTION):
                head = await self._read_head(connection)
                if head is None:
                    answer = _refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
                else:
                    answer = self._pages.answer(head)
                await self._loop.sock_sendall(connection, answer)

    async def _read_head(self, connection: socket.socket) -> bytes | None:
        """Return the head of a request; None if it is too long, empty if it is cut short."""
        head = b""
        while b"\r\n\r\n" not in head:
            if len(head) > _MOST_HEAD_BYTES:
                return None
            part = await self._loop.sock_recv(connection, _MOST_HEAD_BYTES)
            if not part:
                return b""
            head += part
        return head.partition(b"\r\n\r\n")[0]


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
