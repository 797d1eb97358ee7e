"""Status server of an agent: ``/healthz``, ``/metrics`` and a page, over HTTP.

It runs in a thread of its own, and shares nothing with training but the board. Strangers may
connect: connections are accepted at a limited rate, requests are short and have a deadline, and the
oldest connection makes room for a new one. A stranger therefore costs training a bounded share of
one core, and cannot keep others out.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import final

from corn.distributed.board import Snapshot, StatusBoard
from corn.distributed.metrics import render_metrics
from corn.distributed.page import render_page
from corn.errors import CornError

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
