"""Compute threads per process: the only module that limits BLAS, OpenMP and torch.

Two processes with two BLAS threads each on two cores run over a hundred times slower than with one:
the threads of one process spin while they wait for a core that the other holds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import threadpoolctl

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def limit_threads() -> None:
    """Limit this process, and those that it starts, to one compute thread each."""
    # For libraries loaded later, each of which reads its own variable, and for child processes.
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    threadpoolctl.threadpool_limits(limits=1)
    # Not imported here: it takes seconds, and a process that never uses it should not wait.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def one_thread() -> AbstractContextManager[object]:
    """Compute with one thread inside a ``with`` block, for work on many small matrices."""
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
