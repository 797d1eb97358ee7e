"""Several agents in threads of one process, for tests without faults of processes."""

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import networkx as nx

from corn.distributed.membership import Membership
from corn.distributed.messages import NewsKeys
from corn.distributed.rendezvous import Rendezvous
from corn.noise import Identity, Roster, generate_identity
from corn.transport import Address, Credentials, Listener, MemoryStore, RemoteStore, StoreHost

Result = TypeVar("Result")


@lru_cache
def make_identities(num_agents: int) -> list[Identity]:
    return [generate_identity() for _ in range(num_agents)]


def make_credentials(agent: int, num_agents: int) -> Credentials:
    """Return the keys of an agent; those of the same number of agents belong together."""
    identities = make_identities(num_agents)
    roster = Roster(tuple(own.public_key for own in identities))
    return Credentials(agent, identities[agent], roster)


def make_membership(graph: nx.Graph, agent: int, **options: Any) -> Membership:
    """Return what an agent of a graph knows at first, with keys to sign news."""
    keys = NewsKeys(make_credentials(agent, len(graph)), b"run")
    return Membership(graph, agent, keys, **options)


def make_rendezvous(
    agent: int,
    num_agents: int,
    store: MemoryStore | RemoteStore,
    *,
    timeout: float = 20.0,
    wait: float | None = None,
    host: StoreHost | None = None,
    address: Address | None = None,
) -> Rendezvous:
    """Return an agent at a store, with a listener on this machine."""
    credentials = make_credentials(agent, num_agents)
    listener = Listener(address or ("127.0.0.1", 0), credentials)
    return Rendezvous(
        store,
        credentials,
        listener=listener,
        address=("127.0.0.1", listener.port),
        bound=("127.0.0.1", listener.port),
        timeout=timeout,
        wait=wait,
        host=host,
    )


def run_in_threads(
    num_agents: int,
    function: Callable[[Rendezvous], Result],
    *,
    timeout: float = 20.0,
) -> list[Result | BaseException]:
    """Return what ``function`` returns or raises for each agent."""
    store = MemoryStore()
    make_identities(num_agents)  # once, before threads ask for them
    results: list[Any] = [None] * num_agents

    def run(agent: int) -> None:
        rendezvous = make_rendezvous(agent, num_agents, store, timeout=timeout)
        try:
            results[agent] = function(rendezvous)
        except BaseException as error:  # noqa: BLE001
            results[agent] = error
        finally:
            rendezvous.listener.close()

    threads = [threading.Thread(target=run, args=(agent,)) for agent in range(num_agents)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "an agent hangs"
    return results
