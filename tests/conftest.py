"""Settings of all test processes: one compute thread, and the same examples in each CI run."""

import gc
import hashlib
import os
from collections.abc import Generator

import hypothesis
import pytest

from corn.threads import limit_threads

limit_threads()

# A developer's run draws new examples each time. CI repeats the same ones, so that a failure is due
# to the change under test. Examples have no deadline: the machine may be busy, and benchmarks
# measure speed.
hypothesis.settings.register_profile("corn", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("corn")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import and collect without garbage collection, which would take a fifth of that time.

    Nothing that was made until then is looked at by later collections either.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow tests, on every second worker.

    Each worker begins with an equal part of the list, and takes from others' parts when it is done.
    Slow tests mostly wait for processes, so half of the workers compute meanwhile, and none of them
    is left to the end. Files are in an order that is as if at random, but always the same, so that
    tests of mathematics, which compute, are everywhere.
    """
    items.sort(key=lambda item: hashlib.sha256(item.nodeid.partition("::")[0].encode()).digest())
    slow = [item for item in items if item.get_closest_marker("slow")]
    fast = [item for item in items if not item.get_closest_marker("slow")]
    half = len(fast) // 2
    items[:] = [*slow[::2], *fast[:half], *slow[1::2], *fast[half:]]
