"""Compute threads per process: the only module that limits BLAS, OpenMP and torch.

Two processes with two BLAS threads each on two cores run over a hundred times slower than with one:
the threads of one process spin while they wait for a core that the other holds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import threadpoolctl

Item = TypeVar("Item")
Result = TypeVar("Result")

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def limit_threads() -> None:
    """Limit this process, and those that it starts, to one compute thread each.

    Libraries already loaded are limited at run time; those loaded later, and child processes, read
    the environment.
    """
    # Three variables, because each library reads its own.
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    threadpoolctl.threadpool_limits(limits=1)
    # Not imported here: it takes seconds, and a process that never uses it should not wait.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def one_thread() -> AbstractContextManager[object]:
    """Compute with one thread inside a ``with`` block.

    For work on many small matrices, which threads slow down, and by far if another process uses the
    cores too.
    """
    limits: AbstractContextManager[object] = threadpoolctl.threadpool_limits(limits=1)
    return limits


@contextmanager
def own_threads() -> Iterator[None]:
    """Compute with one thread inside a ``with`` block, unless the environment sets a number.

    For training, torch included. Two threads are at most 1.6 times as fast on an idle machine, and
    ten times as slow on a busy one. OMP_NUM_THREADS sets another number.
    """
    if any(name in os.environ for name in _THREAD_VARIABLES):
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with one_thread():
            yield
    finally:
        torch.set_num_threads(before)


def map_in_workers(
    function: Callable[[Item], Result], items: Iterable[Item], *, num_workers: int
) -> list[Result]:
    """Apply ``function`` to every item, in ``num_workers`` processes of one compute thread each.

    With one worker everything runs in this process, whose threads stay as they are.

    >>> map_in_workers(abs, [-1, 2, -3], num_workers=1)
    [1, 2, 3]
    """
    if num_workers == 1:
        return [function(item) for item in items]
    import joblib

    # joblib's workers are processes of their own, reused between calls, so each call limits again.
    parallel = joblib.Parallel(n_jobs=num_workers)
    results: list[Result] = parallel(joblib.delayed(_call_limited)(function, i) for i in items)
    return results


def _call_limited(function: Callable[[Item], Result], item: Item) -> Result:
    limit_threads()
    return function(item)
