"""Where agents meet before they train: a key-value store that each writes to and all read.

It carries public words and sealed seeds, and addresses of links. Once training has begun nobody
needs it any more.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, final

from torch import distributed
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from corn.distributed.links import find_address
from corn.errors import CornError, InvalidArgumentError, PublicError, make_printable
from corn.learn.monitor import Interruption
from corn.noise import find_compiled
from corn.parsing import build, parse_json

Connected = TypeVar("Connected")

_SECONDS_TO_PART = 5.0
_SECONDS_BETWEEN_LOOKS = 0.02
_SECONDS_TO_ANSWER = 1.0
_SECONDS_FOR_TORCH = 3.0
"""After its time-out torch may complain itself: a thread inside it must not be left just then."""
_REFUSAL = "refusal"
_MAX_REASON = 300
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class AbsentError(PublicError):
    """Some agents did not come in time."""


class RefusalError(PublicError):
    """Another agent cannot start, so nobody does."""


@final
class Meeting:
    """What agents say to each other through a store, before one run and no more.

    Args:
        store: common to all agents.
        agent: this one.
        num_agents: n.
        timeout: how many seconds to wait for others.
        address: this host's address, for links.
        is_host: whether the store lives in this process, and dies with it.
        interruption: gives up waiting when a person asks for it.
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

    def say(self, topic: str, text: bytes) -> None:
        """Tell everybody, under a topic of which each agent speaks once."""
        if topic in self._topics:
            raise InvalidArgumentError(
                f"agent {self.agent}: this meeting has served a run, and what was said there would "
                "be taken for new: use another store for another run"
            )
        self._topics.add(topic)
        self._put(f"{topic}/{self.agent}", text)

    def hear_all(self, topic: str) -> dict[int, bytes]:
        """What every agent said under a topic; names those that stay silent."""
        keys = [f"{topic}/{agent}" for agent in range(self.num_agents)]
        self._wait(keys, topic)
        with self._explain():
            return {agent: bytes(self.store.get(key)) for agent, key in enumerate(keys)}

    def give(self, topic: str, receiver: int, package: bytes) -> None:
        """Leave something for one agent."""
        self._put(f"{topic}/{self.agent}/{receiver}", package)

    def take(self, topic: str, sender: int) -> bytes:
        """Fetch what another agent left for this one."""
        key = f"{topic}/{sender}/{self.agent}"
        self._wait([key], topic, [sender])
        with self._explain():
            return bytes(self.store.get(key))

    def find_silent(self, *topics: str, seconds: float) -> list[int]:
        """Who has still said nothing under any of some topics after so many seconds."""
        deadline = time.monotonic() + seconds
        while not any(
            self._are_there([f"{topic}/{agent}" for agent in range(self.num_agents)])
            for topic in topics
        ):
            silent = [
                agent
                for agent in range(self.num_agents)
                if not any(self._are_there([f"{topic}/{agent}"]) for topic in topics)
            ]
            if not silent or time.monotonic() > deadline:
                return silent
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return []

    def refuse(self, why: str) -> None:
        """Tell everybody that this agent does not start: whoever waits, for any word, hears it.

        Where several refuse, the first one counts for all.
        """
        with self._explain():
            self.store.compare_set(_REFUSAL, "", json.dumps([self.agent, why]))

    def heed_refusal(self) -> None:
        """Raise ``RefusalError`` if another agent does not start."""
        if self._are_there([_REFUSAL]):
            with self._explain():
                word = bytes(self.store.get(_REFUSAL))
            who, why = self._read_refusal(word)
            if who != self.agent:
                reason = make_printable(why, limit=_MAX_REASON)
                raise RefusalError(
                    f"agent {self.agent}: does not start, because agent {who} refused: {reason}"
                )

    def _read_refusal(self, word: bytes) -> tuple[int, str]:
        try:
            who, why = build(tuple[int, str], parse_json(word), "the refusal")
        except InvalidArgumentError as error:
            raise RefusalError(
                f"agent {self.agent}: does not start, because somebody refused in a word that "
                f"cannot be read: {error}"
            ) from error
        return who, why

    def part(self) -> None:
        """Leave without having started; a host stays for some seconds until all have left."""
        with suppress(CornError):
            self.say("parted", b"")
            if self._is_host:
                is_hurried = self.interruption is not None and self.interruption.requested
                patience = _SECONDS_TO_ANSWER if is_hurried else _SECONDS_TO_PART
                self.find_silent("parted", seconds=min(self.timeout, patience))

    def _wait(self, keys: list[str], topic: str, agents: list[int] | None = None) -> None:
        # The store's own wait would hear no signal until its time is out.
        deadline = time.monotonic() + self.timeout
        while not self._are_there(keys):
            _heed(self.interruption, self.agent)
            self.heed_refusal()
            if time.monotonic() > deadline:
                break
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        else:
            return
        everyone = agents or range(self.num_agents)
        absent = [
            str(who) for who, key in zip(everyone, keys, strict=True) if not self._are_there([key])
        ]
        raise AbsentError(
            f"agent {self.agent}: no word ({topic}) from agents {', '.join(absent)} within "
            f"{self.timeout:g} s"
        )

    def _put(self, key: str, value: bytes) -> None:
        with self._explain():
            self.store.set(key, value)  # type: ignore[arg-type]  # bytes are taken as they are

    def _are_there(self, keys: list[str]) -> bool:
        with self._explain():
            return bool(self.store.check(keys))

    @contextmanager
    def _explain(self) -> Iterator[None]:
        try:
            yield
        except distributed.DistError as error:
            raise PublicError(f"agent {self.agent}: the store where agents meet is gone") from error


def host_store(host: str, port: int, *, timeout: float, name: str = "") -> TCPStore:
    """Open the store for all agents, at this address only; port 0 takes any that is free.

    ``name`` says in errors who wanted to.
    """
    try:
        # Torch itself would listen on every address, and the store asks nobody who they are.
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
            f"{name}{host}:{port}: no store can be opened there, the port is taken or the address "
            "is not this machine's"
        ) from error


def join_store(
    host: str,
    port: int,
    *,
    agent: int,
    timeout: float,
    interruption: Interruption | None = None,
) -> TCPStore:
    """Connect to the store that another process hosts, as soon as it is there."""
    wait = _Wait(host, port, agent, timeout, interruption)
    wait.for_host()
    try:
        return wait.for_answer(
            lambda: TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=timeout))
        )
    except distributed.DistError as error:
        raise CornError(f"agent {agent}: what listens at {host}:{port} is no store") from error


def join(
    *,
    timeout: float = 60.0,
    store: tuple[str, int] | None = None,
    agent: int | None = None,
    num_agents: int | None = None,
    interruption: Interruption | None = None,
) -> Meeting:
    """Join the others: as torchrun's environment says, or at the address given.

    With an address, agent 0 opens the store there. ``interruption`` ends all waiting for others.
    """
    find_compiled()  # may take seconds, for which nobody waits yet
    if store is None:
        found, rank, size = join_torchrun(timeout=timeout, interruption=interruption)
        address = find_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return Meeting(
            found,
            rank,
            size,
            timeout=timeout,
            address=address,
            is_host=is_host,
            interruption=interruption,
        )
    if agent is None or num_agents is None:
        raise CornError("the agent's number and the number of agents must be given with a store")
    if not 0 <= agent < num_agents:
        raise InvalidArgumentError(f"agent must be from 0 to {num_agents - 1}, found {agent}")
    if agent == 0:
        opened = host_store(*store, timeout=timeout, name="agent 0: ")
    else:
        opened = join_store(*store, agent=agent, timeout=timeout, interruption=interruption)
    return Meeting(
        opened,
        agent,
        num_agents,
        timeout=timeout,
        address=find_address(*store),
        is_host=agent == 0,
        interruption=interruption,
    )


def join_torchrun(
    *, timeout: float, interruption: Interruption | None = None
) -> tuple[Store, int, int]:
    """The store, this agent's number and the number of agents, as torchrun set them."""
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if missing:
        raise CornError(
            f"{missing[0]} is not set: start agents with torchrun, or give --agent and --store"
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not os.environ[name].isdecimal():
            raise CornError(f"{name} must be a number, found {os.environ[name]!r}")
    agent, host, port = (os.environ[name] for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    wait = _Wait(host, int(port), int(agent), timeout, interruption)
    if agent != "0":  # which may have to open it
        wait.for_host()
    try:
        store, rank, size = wait.for_answer(
            lambda: next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        )
    except distributed.DistError as error:
        raise CornError(
            f"agent {agent}: no store at {host}:{port}: nobody hosts it, the port is taken, or not "
            f"all agents came within {timeout:g} s"
        ) from error
    return store, rank, size


@final
@dataclass(frozen=True)
class _Wait:
    """An agent's wait for a store: torch's own would hear no signal, and could last for ever."""

    host: str
    port: int
    agent: int
    timeout: float
    interruption: Interruption | None

    def for_host(self) -> None:
        """Until somebody listens there."""
        self._until(lambda: _is_open(self.host, self.port), "no store found at {}")

    def for_answer(self, connect: Callable[[], Connected]) -> Connected:
        """What ``connect`` gives, once whoever listens there answers."""
        found: Future[Connected] = Future()

        def run() -> None:
            try:
                found.set_result(connect())
            except BaseException as error:  # noqa: BLE001  # it is raised below
                found.set_exception(error)

        # Of another program that holds the port no answer comes, and this thread ends with us.
        threading.Thread(target=run, daemon=True).start()
        complaint = "what listens at {} does not answer as a store does"
        self._until(found.done, complaint, grace=_SECONDS_FOR_TORCH)
        return found.result()

    def _until(self, is_over: Callable[[], bool], complaint: str, grace: float = 0.0) -> None:
        deadline = time.monotonic() + self.timeout + grace
        while not is_over():
            _heed(self.interruption, self.agent)
            if time.monotonic() > deadline:
                what = complaint.format(f"{self.host}:{self.port}")
                raise PublicError(f"agent {self.agent}: {what} within {self.timeout:g} s")
            time.sleep(_SECONDS_BETWEEN_LOOKS)


def _is_open(host: str, port: int) -> bool:
    """Whether anybody listens there."""
    with (
        suppress(OSError),
        socket.create_connection((host, port), timeout=_SECONDS_TO_ANSWER) as line,
    ):
        # A port of this machine that nobody has may be lent to the very socket that asks for it.
        return bool(line.getsockname() != line.getpeername())
    return False


def _heed(interruption: Interruption | None, agent: int) -> None:
    """Wait no longer if a person asked for that."""
    if interruption is not None and interruption.requested:
        raise PublicError(f"agent {agent}: interrupted before the first step")
