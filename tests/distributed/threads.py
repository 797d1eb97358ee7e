"""Several agents in threads of one process, for tests without faults of processes."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._distributed_c10d import HashStore

from corn.distributed.rendezvous import Rendezvous

Result = TypeVar("Result")


def run_in_threads(
    num_agents: int, function: Callable[[Rendezvous], Result], *, timeout: float = 20.0
) -> list[Result | BaseException]:
    """Return what ``function`` returns or raises for each agent."""
    store = HashStore()
    results: list[Any] = [None] * num_agents

    def run(agent: int) -> None:
        try:
            results[agent] = function(
                Rendezvous(store, agent, num_agents, timeout=timeout, address="127.0.0.1")
            )
        except BaseException as error:  # noqa: BLE001
            results[agent] = error

    threads = [threading.Thread(target=run, args=(agent,)) for agent in range(num_agents)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "an agent hangs"
    return results
