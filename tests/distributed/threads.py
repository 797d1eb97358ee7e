"""Several agents in threads of one process: enough for everything but faults of processes."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._distributed_c10d import HashStore

from corn.distributed.meeting import Meeting

Result = TypeVar("Result")


def run_in_threads(
    num_agents: int, function: Callable[[Meeting], Result], *, timeout: float = 20.0
) -> list[Result | BaseException]:
    """What ``function`` gives each agent, or what it raises."""
    store = HashStore()
    results: list[Any] = [None] * num_agents

    def run(agent: int) -> None:
        try:
            results[agent] = function(
                Meeting(store, agent, num_agents, timeout=timeout, address="127.0.0.1")
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
