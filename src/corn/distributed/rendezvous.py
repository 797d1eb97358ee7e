"""Rendezvous before the first step: a TCP store to which each agent publishes and which all read.

The store carries public messages, sealed seeds and the addresses of links. Once training has begun
no agent needs it any more. Its host is honest but curious, see ``handshake``.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar, final

from torch import distributed
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from corn.errors import (
    CornError,
    InvalidArgumentError,
    PublicError,
    StoppedByUserError,
    make_printable,
)
from corn.learn.monitor import Interruption
from corn.noise import find_compiled
from corn.parsing import build, parse_json

Connected = TypeVar("Connected")

_SECONDS_TO_LEAVE = 5.0
_SECONDS_BETWEEN_POLLS = 0.02
_SECONDS_TO_ANSWER = 1.0
# After its own time-out torch may print a complaint: a thread inside it must not be left just then.
_SECONDS_FOR_TORCH = 3.0
_REFUSAL = "refusal"
_MAX_REASON = 300
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class AbsentError(PublicError):
    """Some agents published nothing in time: ``agents``, under ``topic``."""

    def __init__(self, topic: str, agents: Sequence[int], seconds: float) -> None:
        self.topic, self.agents = topic, tuple(agents)
        who = ("agent " if len(agents) == 1 else "agents ") + ", ".join(map(str, agents))
        super().__init__(f"no message ({topic}) from {who} within {seconds:g} s")


class RefusalError(PublicError):
    """Another agent cannot start, so none does: ``refused_by``, None if that cannot be read."""

    def __init__(self, refused_by: int | None, reason: str) -> None:
        self.refused_by, self.reason = refused_by, make_printable(reason, limit=_MAX_REASON)
        who = "an agent" if refused_by is None else f"agent {refused_by}"
        super().__init__(f"does not start, because {who} refused: {self.reason}")


class StoreLostError(PublicError):
    """The store is gone, with the process that hosted it."""

    def __init__(self) -> None:
        super().__init__("the rendezvous store is gone")


class StoppedBeforeStartError(PublicError, StoppedByUserError):
    """A person stopped an agent before its first step."""

    def __init__(self) -> None:
        super().__init__("interrupted before the first step, nothing was released")


@final
class Rendezvous:
    """One agent's access to the store, for one run and no more.

    Args:
        store: common to all agents.
        agent: this agent's number.
        num_agents: n.
        timeout: seconds to wait for other agents.
        address: this host's address, for links.
        is_host: whether the store lives in this process, and ends with it.
        interruption: ends every wait when a person requests it.
    """

    def __init__(
        self,
        store: Store,
        agent: int,
        num_agents: int,
        *,
        timeout: float,
        address: str,
        is_host: bool = False,
        interruption: Interruption | None = None,
    ) -> None:
        self.store, self.agent, self.num_agents = store, agent, num_agents
        self.timeout, self.address, self._is_host = timeout, address, is_host
        self.interruption = interruption
        self._topics: set[str] = set()

    def publish(self, topic: str, message: bytes) -> None:
        """Publish a message to all agents; each agent publishes once per topic."""
        # A second run through the same store would read the nonces of the first one as its own, and
        # so draw its noise again.
        if topic in self._topics:
            raise InvalidArgumentError(
                "this rendezvous has served a run, and its messages would be taken for new: use "
                "another store for another run"
            )
        self._topics.add(topic)
        self._set(f"{topic}/{self.agent}", message)

    def gather(self, topic: str) -> dict[int, bytes]:
        """Return every agent's message under a topic; raise ``AbsentError`` after the time-out."""
        keys = [f"{topic}/{agent}" for agent in range(self.num_agents)]
        self._wait(keys, topic, range(self.num_agents))
        return {agent: self._get(key) for agent, key in enumerate(keys)}

    def barrier(self, topic: str) -> None:
        """Wait until all agents have come here."""
        self.publish(topic, b"")
        self.gather(topic)

    def send(self, topic: str, receiver: int, package: bytes) -> None:
        """Leave a package for one agent."""
        self._set(f"{topic}/{self.agent}/{receiver}", package)

    def receive(self, topic: str, sender: int) -> bytes:
        """Return the package that another agent left for this one."""
        key = f"{topic}/{sender}/{self.agent}"
        self._wait([key], topic, [sender])
        return self._get(key)

    def find_absent(self, *topics: str, seconds: float) -> list[int]:
        """Return the agents that have published under none of the topics after so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            absent = [
                agent
                for agent in range(self.num_agents)
                if not any(self._has([f"{topic}/{agent}"]) for topic in topics)
            ]
            if not absent or time.monotonic() > deadline:
                return absent
            time.sleep(_SECONDS_BETWEEN_POLLS)

    def refuse(self, reason: str) -> None:
        """Publish that this agent does not start; every wait of another agent then ends.

        Where several refuse, the first refusal counts for all.
        """
        with _explaining_loss():
            # Only the first refusal is stored, so that all agents report the same reason.
            self.store.compare_set(_REFUSAL, "", json.dumps([self.agent, reason]))

    def raise_refusal(self) -> None:
        """Raise ``RefusalError`` if another agent does not start."""
        if not self._has([_REFUSAL]):
            return
        try:
            entry = parse_json(self._get(_REFUSAL))
            refused_by, reason = build(tuple[int, str], entry, "the refusal")
        except InvalidArgumentError as error:
            raise RefusalError(None, f"a message that cannot be read: {error}") from error
        if refused_by != self.agent:
            raise RefusalError(refused_by, reason)

    def leave(self) -> None:
        """Leave without having started; a host stays until all have left, for some seconds."""
        with suppress(CornError):
            self.publish("parted", b"")
            if self._is_host:
                # The store ends with this process: the others must have read the refusal before.
                is_hurried = self.interruption is not None and self.interruption.requested
                patience = _SECONDS_TO_ANSWER if is_hurried else _SECONDS_TO_LEAVE
                self.find_absent("parted", seconds=min(self.timeout, patience))

    def _wait(self, keys: list[str], topic: str, agents: Sequence[int]) -> None:
        # The store's own wait would not notice a signal, nor a refusal, until its time-out.
        deadline = time.monotonic() + self.timeout
        while not self._has(keys):
            _raise_if_interrupted(self.interruption)
            self.raise_refusal()
            if time.monotonic() > deadline:
                absent = [a for a, key in zip(agents, keys, strict=True) if not self._has([key])]
                raise AbsentError(topic, absent, self.timeout)
            time.sleep(_SECONDS_BETWEEN_POLLS)

    def _set(self, key: str, value: bytes) -> None:
        with _explaining_loss():
            self.store.set(key, value)  # type: ignore[arg-type]  # bytes are taken as they are

    def _get(self, key: str) -> bytes:
        with _explaining_loss():
            return bytes(self.store.get(key))

    def _has(self, keys: list[str]) -> bool:
        with _explaining_loss():
            return bool(self.store.check(keys))


@contextmanager
def naming_agent(agent: int) -> Iterator[None]:
    """Begin the message of every failure inside with the agent's number."""
    try:
        yield
    except CornError as error:
        error.args = (f"agent {agent}: {error}",)
        raise
    except OSError as error:
        what = f"{error.filename or 'file'}: {error.strerror or error}"
        raise CornError(f"agent {agent}: {what}") from error


def host_store(host: str, port: int, *, timeout: float) -> TCPStore:
    """Open the store for all agents, at this address only; port 0 takes any that is free."""
    try:
        # Torch itself would listen on every address, and the store authenticates no client.
        listener = socket.create_server((host, port))
        return TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach(),
        )
    except (OSError, distributed.DistError) as error:
        raise CornError(
            f"{host}:{port}: no store can be opened there: the port is taken, or the address is "
            "not this machine's"
        ) from error


def join_store(
    host: str, port: int, *, timeout: float, interruption: Interruption | None = None
) -> TCPStore:
    """Connect to the store that another process hosts, as soon as it is there."""
    _wait_for_host(host, port, timeout, interruption)

    def connect() -> TCPStore:
        return TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=timeout))

    try:
        return _wait_for_answer(connect, f"{host}:{port}", timeout, interruption)
    except distributed.DistError as error:
        raise CornError(f"the program that listens at {host}:{port} is not a store") from error


def join(
    *,
    timeout: float = 60.0,
    store: tuple[str, int] | None = None,
    agent: int | None = None,
    num_agents: int | None = None,
    interruption: Interruption | None = None,
    opens_store: bool | None = None,
) -> Rendezvous:
    """Join the other agents, by torchrun's environment or at the address given.

    Args:
        timeout: seconds to wait for the store, and later for other agents.
        store: its address and port.
        agent: this agent's number, with ``store``.
        num_agents: n, with ``store``.
        interruption: ends every wait when a person requests it.
        opens_store: whether this process hosts the store; by default agent 0 does.
    """
    find_compiled()  # may compile for seconds, and no other agent waits for this one yet
    if store is None:
        return _join_torchrun(timeout, interruption)
    if agent is None or num_agents is None:
        raise CornError("the number of this agent and of all agents must be given with a store")
    if not 0 <= agent < num_agents:
        raise InvalidArgumentError(f"agent must be from 0 to {num_agents - 1}, found {agent}")
    is_host = agent == 0 if opens_store is None else opens_store
    with naming_agent(agent):
        if is_host:
            found = host_store(*store, timeout=timeout)
        else:
            found = join_store(*store, timeout=timeout, interruption=interruption)
        address = _find_address(*store)
    return Rendezvous(
        found,
        agent,
        num_agents,
        timeout=timeout,
        address=address,
        is_host=is_host,
        interruption=interruption,
    )


def _join_torchrun(timeout: float, interruption: Interruption | None) -> Rendezvous:
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise CornError(
            f"{missing[0]} is not set: start agents with torchrun, or give --agent and --store"
        )
    # Torch would raise a ValueError, which no command reports in one line.
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not os.environ[name].isdecimal():
            raise CornError(f"{name} must be a number, found {os.environ[name]!r}")
    agent, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    host = os.environ["MASTER_ADDR"]
    with naming_agent(agent):
        if agent != 0:  # rank 0 may have to open the store
            _wait_for_host(host, port, timeout, interruption)
        try:
            store, rank, size = _wait_for_answer(
                lambda: next(rendezvous("env://", timeout=timedelta(seconds=timeout))),
                f"{host}:{port}",
                timeout,
                interruption,
            )
        except distributed.DistError as error:
            raise CornError(
                f"no store at {host}:{port}: no process hosts it, the port is taken, or not all "
                f"agents came within {timeout:g} s"
            ) from error
        address = _find_address(host, port)
    return Rendezvous(
        store,
        rank,
        size,
        timeout=timeout,
        address=address,
        # Where torchrun itself hosts the store, it outlasts rank 0.
        is_host=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        interruption=interruption,
    )


def _wait_for_host(host: str, port: int, timeout: float, interruption: Interruption | None) -> None:
    message = f"no store found at {host}:{port} within {timeout:g} s"
    _wait_until(lambda: _is_open(host, port), message, timeout, interruption)


def _wait_for_answer(
    connect: Callable[[], Connected],
    address: str,
    timeout: float,
    interruption: Interruption | None,
) -> Connected:
    """Return the result of ``connect``, unless the program at that address never answers."""
    found: Future[Connected] = Future()

    def run() -> None:
        try:
            found.set_result(connect())
        except BaseException as error:  # noqa: BLE001  # it is raised below
            found.set_exception(error)

    # Torch's own wait notices no signal, and lasts for ever if another program holds the port. So
    # it runs in a thread, which ends with this process.
    threading.Thread(target=run, daemon=True).start()
    message = f"the program at {address} does not answer as a store does within {timeout:g} s"
    _wait_until(found.done, message, timeout + _SECONDS_FOR_TORCH, interruption)
    return found.result()


def _wait_until(
    is_over: Callable[[], bool], message: str, seconds: float, interruption: Interruption | None
) -> None:
    deadline = time.monotonic() + seconds
    while not is_over():
        _raise_if_interrupted(interruption)
        if time.monotonic() > deadline:
            raise PublicError(message)
        time.sleep(_SECONDS_BETWEEN_POLLS)


def _is_open(host: str, port: int) -> bool:
    """Return whether a program listens there."""
    with (
        suppress(OSError),
        socket.create_connection((host, port), timeout=_SECONDS_TO_ANSWER) as line,
    ):
        # The system may lend a free port of this machine to the very socket that connects to it.
        return bool(line.getsockname() != line.getpeername())
    return False


def _find_address(host: str, port: int) -> str:
    """Return this host's address on the route to another, which neighbours can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError as error:
            raise CornError(f"{host}: no route to this host: {error.strerror}") from error


def _raise_if_interrupted(interruption: Interruption | None) -> None:
    if interruption is not None and interruption.requested:
        raise StoppedBeforeStartError


@contextmanager
def _explaining_loss() -> Iterator[None]:
    try:
        yield
    except distributed.DistError as error:
        raise StoreLostError from error
