"""Joining of an agent: its keys, the store, and its own port, by options or under torchrun.

torchrun's own store has no authentication. It only carries the address of CorN's store, which
proves its key afterwards. A false address keeps a run from starting, and does no more.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from corn.distributed.settings import parse_address
from corn.distributed.startup.keyring import load_credentials
from corn.distributed.startup.rendezvous import Rendezvous
from corn.distributed.startup.start_errors import naming_agent, raise_if_stopped
from corn.errors import CornError, PublicError
from corn.learn.sweep import Interruption
from corn.noise import find_compiled
from corn.transport import (
    HOST,
    NO_SESSION,
    Address,
    Channel,
    Credentials,
    Listener,
    MemoryStore,
    Purpose,
    RemoteStore,
    Store,
    StoreHost,
    UnreachableError,
    dial,
)

# An agent that returns asks its neighbours directly, and the store is only one source of addresses.
_SECONDS_TO_ANSWER = 1.0
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_KEY = "corn/store"
# After its own time-out torch may print a complaint: a thread inside it must not be left just then.
_SECONDS_FOR_TORCH = 3.0


def join_store(
    address: Address,
    credentials: Credentials,
    *,
    timeout: float,
    interruption: Interruption | None = None,
) -> RemoteStore:
    """Connect to the store that another process hosts, as soon as it is there."""

    def connect(seconds: float) -> Channel:
        return dial(
            address,
            credentials,
            HOST,
            Purpose.STORE,
            session=NO_SESSION,
            timeout=seconds,
            check=lambda: raise_if_stopped(interruption),
        )

    try:
        return RemoteStore(connect, timeout=timeout)
    except UnreachableError as error:
        where = f"{address[0]}:{address[1]}"
        if error.is_listening:
            raise PublicError(
                f"the program at {where} is not this run's store: it did not prove the key of "
                f"agent {HOST} within {timeout:g} s"
            ) from error
        raise PublicError(f"no store found at {where} within {timeout:g} s") from error


def join(
    credentials: Credentials | None = None,
    *,
    timeout: float = 60.0,
    store: Address | None = None,
    keys: Path | None = None,
    listen: Address | None = None,
    advertise: Address | None = None,
    opens_store: bool | None = None,
    needs_store: bool = True,
    interruption: Interruption | None = None,
) -> Rendezvous:
    """Join the other agents, by torchrun's environment or at the address given.

    Args:
        credentials: this agent's; by default loaded from ``keys``, for torchrun's rank.
        timeout: seconds to wait for the store, and later for other agents.
        store: its address and port.
        keys: the folder with ``agent-I.key`` and ``roster.json``.
        listen: where neighbours connect to this agent; by default a free port of the address that
            leads to the store.
        advertise: the address under which they reach it, where that is another, as behind NAT.
        opens_store: whether this process hosts the store; by default agent 0 does.
        needs_store: False lets an agent that returns do without a store that is gone.
        interruption: ends every wait when a person requests it.
    """
    find_compiled()  # may compile for seconds, and no other agent waits for this one yet
    place = None
    if store is None:
        place = read_torchrun()
        if credentials is None:
            credentials = load_credentials(keys, place.rank, place.world_size)
    if credentials is None:
        raise CornError("credentials must be given with a store")
    agent = credentials.agent
    is_host = agent == HOST if opens_store is None else opens_store
    with naming_agent(agent):
        hosted = None
        if place is not None:
            hosted, store = exchange_store_address(
                place, lambda address: StoreHost(address, credentials), timeout=timeout
            )
        elif is_host and store is not None and needs_store:
            hosted = host_store(store, credentials)
        if store is None:
            raise CornError("the address of the store must be given")
        found: Store
        if hosted is not None:
            found = hosted.words
        elif needs_store:
            found = join_store(store, credentials, timeout=timeout, interruption=interruption)
        else:
            found = _find_store(store, credentials, interruption)
        host = listen[0] if listen else _find_route(*store)
        # Open before the address is published, or a neighbour could dial a port that nobody listens
        # at yet.
        listener = Listener(listen or (host, 0), credentials)
        bound = host, listener.port
        reached = advertise or (_reachable_host(host, store), listener.port)
    return Rendezvous(
        found,
        credentials,
        listener=listener,
        address=reached,
        bound=bound,
        timeout=timeout,
        keys=keys,
        is_host=hosted is not None,
        interruption=interruption,
    )


def _find_store(
    address: Address, credentials: Credentials, interruption: Interruption | None
) -> Store:
    """Return the store of a run under way if it is still there, or an empty one."""
    try:
        return join_store(
            address, credentials, timeout=_SECONDS_TO_ANSWER, interruption=interruption
        )
    except PublicError:
        # The run outlived its store. An empty one lets the code that publishes and reads addresses
        # go on.
        return MemoryStore()


def host_store(address: Address, credentials: Credentials) -> StoreHost:
    """Open the store for all agents, at this address only; port 0 takes any that is free."""
    try:
        return StoreHost(address, credentials)
    except CornError as error:
        raise CornError(
            f"{address[0]}:{address[1]}: no store can be opened there: the port is taken, or the "
            "address is not this machine's"
        ) from error


def _find_route(host: str, port: int) -> str:
    """Return this host's address on the route to another, which neighbours can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing
            return str(probe.getsockname()[0])
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise CornError(f"{host}:{port}: no route to this address: {why}") from error


def _reachable_host(bound: str, store: Address) -> str:
    # A listener on all addresses is reached at the one that leads to the store.
    return _find_route(*store) if bound in ("", "0.0.0.0", "::") else bound  # noqa: S104


@dataclass(frozen=True)
class TorchrunPlace:
    """This process among those that torchrun started."""

    rank: int
    world_size: int
    host: str
    port: int


def read_torchrun() -> TorchrunPlace:
    """Read torchrun's environment variables."""
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise CornError(
            f"{missing[0]} is not set: start agents with torchrun, or give --agent and --store"
        )
    # Torch would raise a ValueError, which no command reports in one line.
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not os.environ[name].isdecimal():
            raise CornError(f"{name} must be a number, found {os.environ[name]!r}")
    return TorchrunPlace(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        host=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
    )


def exchange_store_address(
    place: TorchrunPlace, open_store: Callable[[Address], StoreHost], *, timeout: float
) -> tuple[StoreHost | None, Address]:
    """Open CorN's store at rank 0, and return its address at all ranks."""
    # Torch's own wait notices no signal, and lasts for ever if another program holds the port. So
    # it runs in a thread, which ends with this process.
    found: Future[tuple[StoreHost | None, Address]] = Future()

    def run() -> None:
        try:
            found.set_result(_exchange(place, open_store, timeout))
        except BaseException as error:  # noqa: BLE001  # it is raised below
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return found.result(timeout + _SECONDS_FOR_TORCH)
    except FutureTimeoutError:
        raise PublicError(
            f"no store at {place.host}:{place.port} within {timeout:g} s: no process hosts it, or "
            "another program holds the port"
        ) from None


def _exchange(
    place: TorchrunPlace, open_store: Callable[[Address], StoreHost], timeout: float
) -> tuple[StoreHost | None, Address]:
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    try:
        torch_store: Any
        torch_store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        if place.rank != HOST:
            # torchrun's store has no authentication, and may hold anything.
            return None, parse_address(torch_store.get(_KEY).decode(errors="replace"))
        hosted = open_store((place.host, 0))
        torch_store.set(_KEY, f"{place.host}:{hosted.port}")
        # Rank 0 may host torch's store too, which other ranks still read.
        hosted.companion = torch_store
    except distributed.DistError as error:
        raise CornError(
            f"no store at {place.host}:{place.port}: no process hosts it, the port is taken, or "
            f"not all agents came within {timeout:g} s"
        ) from error
    return hosted, (place.host, hosted.port)
