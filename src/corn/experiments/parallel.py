"""Computation of missing cells, on all cores of this machine or on a cluster."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import joblib

from corn.checks import require
from corn.errors import CornWarning, MissingExtraError
from corn.experiments.cells import Cell, CellResult, CellStore, DesignCell, TrainingCell
from corn.threads import limit_threads

CLUSTERS = ("dask", "ray")

_PARENT_CHECK_SECONDS = 0.5

_Outcome: TypeAlias = tuple[Cell, CellResult, float]
"""A cell, its result and the seconds that it took."""


def compute_cells(
    cells: Iterable[Cell],
    store: CellStore,
    *,
    jobs: int = -1,
    cluster: str | None = None,
    directory: Path | None = None,
    on_done: Callable[[Cell], None] | None = None,
) -> None:
    """Compute every cell that the store lacks, designs first, and store each as it is finished.

    Args:
        cells: the cells; designs that training needs are added.
        store: the store of results.
        jobs: the number of processes, of one compute thread each; −1 is one per core.
        cluster: ``dask`` or ``ray``, with ``:address`` for a running cluster; None is this machine.
        directory: the data cache.
        on_done: called in this process for each cell, including those that the store had.
    """
    with _open_cluster(cluster):
        # Designs first: trainings read their results from the store.
        for stage in split_cells(cells):
            missing: list[Cell] = []
            for cell in stage:
                if store.load(cell) is None:
                    missing.append(cell)
                elif on_done:
                    on_done(cell)
            # The longest first, so that no core is left with a long one at the end.
            missing.sort(key=lambda cell: -cell.cost)
            tasks = [
                joblib.delayed(_compute)(cell, _load_designs(cell, store), directory, os.getpid())
                for cell in missing
            ]
            with _abandoning(_run(tasks, jobs)) as outcomes:
                for cell, result, seconds in outcomes:
                    store.save(cell, result, seconds=seconds)
                    if on_done:
                        on_done(cell)


def split_cells(cells: Iterable[Cell]) -> tuple[list[DesignCell], list[TrainingCell]]:
    """Return designs, including those that training needs, and trainings, each cell once."""
    wanted = list(dict.fromkeys(cells))
    trainings = [cell for cell in wanted if isinstance(cell, TrainingCell)]
    designs = [cell for cell in wanted if isinstance(cell, DesignCell)]
    for training in trainings:
        designs.extend(training.designs.values())
    return list(dict.fromkeys(designs)), trainings


def _load_designs(cell: Cell, store: CellStore) -> dict[str, CellResult]:
    """Return the results of the designs that a training cell needs, by method."""
    needed = cell.designs if isinstance(cell, TrainingCell) else {}
    found = {name: store.load(design) for name, design in needed.items()}
    return {name: result for name, result in found.items() if result is not None}


def _compute(
    cell: Cell, designs: dict[str, CellResult], directory: Path | None, parent: int
) -> _Outcome:
    """Compute one cell in a worker.

    The worker may be another machine: everything that it needs is an argument.
    """
    # As many processes as cores run at once; more threads would compete for them.
    limit_threads()
    _end_with_parent(parent)
    start = time.perf_counter()
    with warnings.catch_warnings():
        # Warnings about sparse graphs and the paper's constant concern what the figures study.
        warnings.simplefilter("ignore", CornWarning)
        if isinstance(cell, DesignCell):
            result = cell.compute()
        else:
            result = cell.compute(designs, directory)
    return cell, result, time.perf_counter() - start


@functools.cache
def _end_with_parent(parent: int) -> None:
    """End this process soon after the process ``parent`` has ended, if this is a worker of it.

    A process that is killed cannot stop its workers. They would go on with their cells, which take
    up to a quarter of an hour, for a result that nobody reads.
    """
    # Not the main process itself, nor a worker of a cluster, whose parent is another process. The
    # parent may have ended while this worker was still importing, so its id does not tell.
    if not multiprocessing.current_process().name.startswith("LokyProcess"):
        return

    def watch() -> None:
        # An orphan is adopted by another process, so that its parent's id changes.
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_SECONDS)
        # Not sys.exit, which would end this thread only. There is nothing to clean up: files are
        # written by the parent.
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _run(tasks: Sequence[Any], jobs: int) -> Generator[_Outcome]:
    """Yield outcomes as they are finished."""
    if not tasks:
        return
    with joblib.Parallel(n_jobs=jobs, batch_size=1) as parallel:
        # Both depend on the backend, which the surrounding context of a cluster decides.
        num_workers = parallel._effective_n_jobs()
        can_stream = parallel._backend.supports_return_generator
    if can_stream:
        stream = joblib.Parallel(n_jobs=jobs, batch_size=1, return_as="generator_unordered")
        yield from stream(tasks)
        return
    # Some backends return everything at the end only. They get one task per worker at a time, so
    # that an interruption loses no more than those.
    with joblib.Parallel(n_jobs=jobs, batch_size=1) as parallel:
        for start in range(0, len(tasks), num_workers):
            yield from parallel(tasks[start : start + num_workers])


@contextmanager
def _abandoning(outcomes: Generator[_Outcome]) -> Iterator[Iterator[_Outcome]]:
    """Stop the workers at the end of the block, however it ends.

    Without this an exception raised between two outcomes, such as KeyboardInterrupt while one is
    stored, keeps the generator alive in its traceback, and the interpreter waits at its exit until
    the workers have finished their cells.
    """
    try:
        yield outcomes
    finally:
        with warnings.catch_warnings():
            # joblib warns about tasks that were cancelled, which is the purpose here.
            warnings.simplefilter("ignore", UserWarning)
            outcomes.close()


@contextmanager
def _open_cluster(cluster: str | None) -> Iterator[None]:
    """Let joblib send tasks to Dask or Ray inside a ``with`` block."""
    if cluster is None:
        yield
        return
    kind, _, address = cluster.partition(":")
    rule = f"{' or '.join(CLUSTERS)}, with :ADDRESS for a running cluster"
    require(kind in CLUSTERS, "cluster", rule, repr(cluster))
    connect = _connect_dask if kind == "dask" else _connect_ray
    with connect(address or None), joblib.parallel_config(backend=kind):
        yield


@contextmanager
def _connect_dask(address: str | None) -> Iterator[None]:
    distributed = _import("distributed", "dask")
    # A running cluster has its own number of threads.
    settings = {} if address else {"threads_per_worker": 1}
    with distributed.Client(address, **settings):
        yield


@contextmanager
def _connect_ray(address: str | None) -> Iterator[None]:
    ray = _import("ray", "ray")
    _import("ray.util.joblib", "ray").register_ray()
    ray.init(address=address, ignore_reinit_error=True)
    try:
        yield
    finally:
        ray.shutdown()


def _import(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"running on {extra}", extra=extra) from error
