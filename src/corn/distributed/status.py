"""Status of a running agent: its state, the file and the server that show it, and its metrics.

The file is private: how long steps take shows how much data an agent has. The server keeps nothing
that a client sends; its address is for the operator's monitoring only.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, ThreadingWSGIServer

from corn.distributed.storage import Folders
from corn.errors import CornError, FileFormatError, InvalidArgumentError
from corn.files import writing_whole
from corn.parsing import build, format_address, read_json
from corn.privacy.rounding import round_up, write_exactly
from corn.version import __version__

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

STATE_NAME = "state.json"
STARTING, TRAINING, FAILED = "starting", "training", "failed"
# One time-out is the normal price of a lost neighbour.
_TIMEOUTS_UNTIL_STALE = 2
_SECONDS_PER_REQUEST = 5.0


@dataclass(frozen=True)
class AgentState:
    """The state of an agent at a moment; others may read it.

    ``phase`` is ``training``, ``failed``, or the status at the end. ``epsilon`` is the ε spent, at
    most; ``simulation`` why it is simulated, if it is. ``neighbours`` are those still linked, and
    ``lost`` has the step of each loss. ``test_loss`` is on public data.
    """

    agent: int
    num_agents: int
    names: tuple[str, ...]
    phase: str
    step: int
    num_steps: int
    epsilon: float
    promised_epsilon: float
    delta: float
    unit: str
    protects: str
    adversary: str
    simulation: str
    releases_left: int
    neighbours: tuple[int, ...]
    lost: Mapping[str, int]
    bytes_sent: int
    steps_per_minute: float
    test_loss: float | None
    plan: str
    corn_version: str
    timeout: float
    updated: float

    def name(self, agent: int | str) -> str:
        """Return the name of an agent, or its number."""
        return self.names[int(agent)] if self.names else str(agent)

    def describe_agents(self) -> dict[int, str]:
        """Return what this agent knows of every agent of the plan."""
        others = "takes part" if self.phase == TRAINING else "took part to the end"
        found = dict.fromkeys(range(self.num_agents), others)
        return found | {int(agent): f"lost at step {step}" for agent, step in self.lost.items()}

    def describe(self) -> str:
        """Return the state in one line; the line of the start says what ε means."""
        loss = "" if self.test_loss is None else f"test loss {self.test_loss:.4g}, "
        lost = f"lost {', '.join(map(self.name, self.lost))}, " if self.lost else ""
        return (
            f"step {self.step} of {self.num_steps}, {loss}{lost}"
            f"{self.bytes_sent / 1e6:.3g} MB sent, {self.steps_per_minute:.0f} steps per minute, "
            f"{'simulated ' if self.simulation else ''}ε spent at most "
            f"{round_up(self.epsilon)} of {write_exactly(self.promised_epsilon)} "
            f"(unit {self.unit}, δ = {write_exactly(self.delta)})"
        )


def write_state(path: Path, state: AgentState) -> None:
    """Replace the state of an agent; a reader sees the old or the new one."""
    with writing_whole(path, is_private=True) as partial:
        partial.write_text(json.dumps(asdict(state), allow_nan=False) + "\n", encoding="utf-8")


def read_states(out: Path) -> dict[int, AgentState]:
    """Return the states of all agents of a run that have written one."""
    states: dict[int, AgentState] = {}
    for path in Folders.of_run(out).private.glob(f"agent-*/{STATE_NAME}"):
        document = read_json(path, kind="the state of an agent")
        try:
            state: AgentState = build(AgentState, document, "the state")
        except InvalidArgumentError as error:
            raise FileFormatError(f"{path}: not the state of an agent: {error}") from error
        states[state.agent] = state
    return dict(sorted(states.items()))


def judge_condition(state: AgentState) -> tuple[str, bool]:
    """Return the phase of an agent, or that its state is stale; and whether somebody must act."""
    if state.phase != TRAINING:
        return state.phase, state.phase == FAILED
    age = time.time() - state.updated
    is_stale = age > _TIMEOUTS_UNTIL_STALE * state.timeout
    return f"stale: no news for {age:.0f} s" if is_stale else TRAINING, is_stale


@dataclass
class Status:
    """The newest state of one agent; None before training."""

    agent: int
    newest: AgentState | None = None
    names: tuple[str, ...] = ()

    @property
    def phase(self) -> str:
        """``starting``, or that of the state."""
        return STARTING if self.newest is None else self.newest.phase

    @property
    def problem(self) -> str:
        """The reason why the agent is not healthy; empty if it is."""
        if self.newest is None:
            return ""
        condition, needs_action = judge_condition(self.newest)
        return condition if needs_action else ""


def render_metrics(status: Status) -> str:
    """Return all metrics of an agent in Prometheus' text format."""
    registry = CollectorRegistry()
    agent = str(status.agent)

    def show(name: str, value: float | None, text: str = "", **labels: str) -> None:
        if value is not None:
            labels = {"agent": agent} | labels
            gauge = Gauge(f"corn_{name}", text or name, tuple(labels), registry=registry)
            gauge.labels(**labels).set(value)

    name = status.names[status.agent] if status.names else agent
    show("info", 1, version=__version__, phase=status.phase, agent_name=name)
    show("healthy", not status.problem, "1 unless /healthz fails.")
    state = status.newest
    if state is None:
        return generate_latest(registry).decode()
    for name in ("step", "num_steps", "steps_per_minute", "releases_left", "bytes_sent"):
        show(name, getattr(state, name))
    show("test_loss", state.test_loss, "Of the model, on public data.")
    show("updated_seconds", state.updated, "Unix time of the last report.")
    show("neighbours", len(state.neighbours), "Neighbours still linked.")
    text = "Step at which the loss of an agent was noticed."
    lost_at = Gauge("corn_lost_at_step", text, ("agent", "lost"), registry=registry)
    for lost, step in state.lost.items():
        lost_at.labels(agent, lost).set(step)
    meaning = {
        "unit": state.unit,
        "protects": state.protects,
        "adversary": state.adversary,
        "simulation": state.simulation,
        "delta": write_exactly(state.delta),
    }
    show("epsilon_spent", state.epsilon, "Under this plan so far, at most.", **meaning)
    show("epsilon_promised", state.promised_epsilon, "All that the plan allows.", **meaning)
    return generate_latest(registry).decode()


@contextmanager
def serving_status(address: tuple[str, int], status: Status) -> Iterator[tuple[str, int]]:
    """Serve an agent's status at an address while the block lasts; yield the address in use."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        path = environ["PATH_INFO"]
        code, kind, text = HTTPStatus.NOT_FOUND, "text/plain", "Not Found"
        if path == "/metrics":
            code, kind, text = HTTPStatus.OK, CONTENT_TYPE_PLAIN_0_0_4, render_metrics(status)
        elif path == "/healthz":
            problem = status.problem
            step = None if status.newest is None else status.newest.step
            facts = {"agent": status.agent, "phase": status.phase, "step": step, "problem": problem}
            code = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
            kind, text = "application/json", json.dumps(facts) + "\n"
        start_response(f"{code} {code.phrase}", [("Content-Type", kind)])
        return [text.encode()]

    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        kind = type("StatusServer", (_StatusServer,), {"address_family": family})
        server: WSGIServer = make_server(*address, answer, kind, _StatusHandler)
    # A port above 65535 overflows; the Unicode error is for a name that no host can have.
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise CornError(f"--status {format_address(address)}: cannot be served: {why}") from error
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield server.socket.getsockname()[:2]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _StatusServer(ThreadingWSGIServer):
    def server_bind(self) -> None:
        """Bind without a search for the name of this host, which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that failed: its client is gone."""


@final
class _StatusHandler(WSGIRequestHandler):
    timeout = _SECONDS_PER_REQUEST

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing: the lines of strangers do not belong into the log of a run."""
