"""Progress of designs that take minutes, and what to do when the user interrupts one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class DesignProgress:
    """Progress of a design.

    Attributes:
        evaluations: evaluations so far.
        max_evaluations: where the search ends at the latest.
        gap: the largest relative distance of the best candidate from the optimum for its seeds;
            infinite before the first bound.
    """

    evaluations: int
    max_evaluations: int
    gap: float


Watcher: TypeAlias = Callable[[DesignProgress], None]
# Context variables, as solvers are called through layers that should not pass a callback on.
_watcher: ContextVar[Watcher | None] = ContextVar("design watcher", default=None)
_keeps_best: ContextVar[bool] = ContextVar("whether an interrupted design is kept", default=False)


@contextmanager
def watch_designs(watcher: Watcher, *, keep_best: bool = False) -> Iterator[None]:
    """Call ``watcher`` after every evaluation of `LowRank` inside the ``with`` block.

    With ``keep_best`` Ctrl-C ends such a search, and the design is the best candidate so far, with
    the status ``interrupted``. Otherwise, and in other solvers, it raises ``KeyboardInterrupt``.
    """
    watching, keeping = _watcher.set(watcher), _keeps_best.set(keep_best)
    try:
        yield
    finally:
        _watcher.reset(watching)
        _keeps_best.reset(keeping)


def keeps_best() -> bool:
    """Return whether the caller wants the best design so far when it is interrupted."""
    return _keeps_best.get()


def report_progress(progress: DesignProgress) -> None:
    """Call the watcher, if there is one."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(progress)
