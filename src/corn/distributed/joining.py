"""Joining of an agent: the store of the run, and the agent's own port."""

from __future__ import annotations

import socket
from pathlib import Path

from corn.distributed.rendezvous import Rendezvous
from corn.distributed.start_errors import naming_agent, raise_if_stopped
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
    credentials: Credentials,
    *,
    store: Address,
    timeout: float = 60.0,
    keys: Path | None = None,
    listen: Address | None = None,
    advertise: Address | None = None,
    opens_store: bool | None = None,
    needs_store: bool = True,
    interruption: Interruption | None = None,
) -> Rendezvous:
    """Join the other agents at the store of a run.

    Args:
        credentials: this agent's keys, as :func:`load_credentials` returns them.
        store: address and port of the store.
        timeout: seconds to wait for the store, and later for other agents.
        keys: the folder of this agent's key, in which its ledger is kept.
        listen: where neighbours connect to this agent; by default a free port of the address that
            leads to the store.
        advertise: the address under which they reach it, where that is another, as behind NAT.
        opens_store: whether this process hosts the store; by default agent 0 does.
        needs_store: False lets an agent that returns do without a store that is gone.
        interruption: ends every wait when a person requests it.
    """
    find_compiled()  # may compile for seconds, and no other agent waits for this one yet
    agent = credentials.agent
    is_host = agent == HOST if opens_store is None else opens_store
    with naming_agent(agent):
        hosted = host_store(store, credentials) if is_host and needs_store else None
        entries: Store
        if hosted is not None:
            entries = hosted.words
        elif needs_store:
            entries = join_store(store, credentials, timeout=timeout, interruption=interruption)
        else:
            entries = _find_store(store, credentials, interruption)
        host = listen[0] if listen else _find_route(*store)
        # Open before the address is published, or a neighbour could dial a port that nobody listens
        # at yet.
        listener = Listener(listen or (host, 0), credentials)
        bound = host, listener.port
        reached = advertise or (_reachable_host(host, store), listener.port)
    return Rendezvous(
        entries,
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
