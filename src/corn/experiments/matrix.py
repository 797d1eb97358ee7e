"""Compute the cells of a matrix: those that are missing, on all cores or on a cluster."""

from __future__ import annotations

import contextlib
import importlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import joblib

from corn.errors import CornWarning, InvalidArgumentError, MissingExtraError
from corn.experiments.cells import Cell, CellResult, DesignCell, TrainingCell
from corn.experiments.store import CellStore
from corn.threads import limit_threads

CLUSTERS = ("dask", "ray")


def compute_cells(
    cells: Iterable[Cell],
    store: CellStore,
    *,
    jobs: int = -1,
    cluster: str | None = None,
    directory: Path | None = None,
    on_done: Callable[[Cell], None] | None = None,
) -> None:
    """Compute every cell that the store has not, designs first, and keep each as it is finished.

    Args:
        cells: what is wanted; designs that training needs are added.
        store: where results are kept.
        jobs: processes of one compute thread each; −1 is one for each core.
        cluster: ``dask`` or ``ray``, with ``:address`` for one that runs elsewhere; None is this
            machine.
        directory: the data cache.
        on_done: called for each cell, in this process, also for those that the store had.
    """
    designs, trainings = split_cells(cells)
    stages: tuple[list[Cell], list[Cell]] = ([*designs], [*trainings])
    with _open_cluster(cluster):
        for stage in stages:
            for cell in _compute_missing(stage, store, jobs, directory):
                if on_done:
                    on_done(cell)


def _compute_missing(
    cells: Sequence[Cell], store: CellStore, jobs: int, directory: Path | None
) -> Iterator[Cell]:
    """Each cell as it is in the store: first those that were."""
    missing = []
    for cell in cells:
        if store.load(cell) is None:
            missing.append(cell)
        else:
            yield cell
    # The longest first, so that no core is left with a long one at the end.
    missing.sort(key=lambda cell: -cell.cost)
    tasks = [joblib.delayed(_compute)(*_arguments(cell, store, directory)) for cell in missing]
    for cell, result, seconds in _run(tasks, jobs):
        store.save(cell, result, seconds=seconds)
        yield cell


def split_cells(cells: Iterable[Cell]) -> tuple[list[DesignCell], list[TrainingCell]]:
    """Designs, including those that training needs, and trainings, each once."""
    wanted = list(dict.fromkeys(cells))
    trainings = [cell for cell in wanted if isinstance(cell, TrainingCell)]
    designs = [cell for cell in wanted if isinstance(cell, DesignCell)]
    for training in trainings:
        designs.extend(training.designs.values())
    return list(dict.fromkeys(designs)), trainings


def _arguments(
    cell: Cell, store: CellStore, directory: Path | None
) -> tuple[Cell, dict[str, CellResult], Path | None]:
    if isinstance(cell, DesignCell):
        return cell, {}, directory
    found = {name: store.load(needed) for name, needed in cell.designs.items()}
    return cell, {name: result for name, result in found.items() if result is not None}, directory


def _compute(
    cell: Cell, designs: dict[str, CellResult], directory: Path | None
) -> tuple[Cell, CellResult, float]:
    """Runs in a worker, which may be another machine: everything it needs is an argument."""
    limit_threads()
    start = time.perf_counter()
    with warnings.catch_warnings():
        # Sparse graphs and the paper's constant are what is studied; the claims speak of them.
        warnings.simplefilter("ignore", CornWarning)
        if isinstance(cell, DesignCell):
            result = cell.compute()
        else:
            result = cell.compute(designs, directory)
    return cell, result, time.perf_counter() - start


def _run(tasks: Sequence[Any], jobs: int) -> Iterator[tuple[Cell, CellResult, float]]:
    """Results as they are finished.

    A backend that only returns everything at the end gets the tasks a few at a time, so that an
    interruption loses no more than those.
    """
    with joblib.Parallel(n_jobs=jobs, batch_size=1) as parallel:
        workers = parallel._effective_n_jobs()
        streams = parallel._backend.supports_return_generator
    if streams:
        yield from joblib.Parallel(n_jobs=jobs, batch_size=1, return_as="generator_unordered")(
            tasks
        )
        return
    with joblib.Parallel(n_jobs=jobs, batch_size=1) as parallel:
        for start in range(0, len(tasks), workers):
            yield from parallel(tasks[start : start + workers])


@contextlib.contextmanager
def _open_cluster(cluster: str | None) -> Iterator[None]:
    """Let joblib send its tasks to Dask or Ray."""
    if cluster is None:
        yield
        return
    kind, _, address = cluster.partition(":")
    if kind not in CLUSTERS:
        raise InvalidArgumentError(
            f"cluster must be {' or '.join(CLUSTERS)}, with :address if it runs elsewhere, found "
            f"{cluster!r}"
        )
    open_one = _open_dask if kind == "dask" else _open_ray
    with open_one(address or None), joblib.parallel_config(backend=kind):
        yield


@contextlib.contextmanager
def _open_dask(address: str | None) -> Iterator[None]:
    distributed = _import("distributed", "dask")
    settings = {} if address else {"threads_per_worker": 1}
    with distributed.Client(address, **settings):
        yield


@contextlib.contextmanager
def _open_ray(address: str | None) -> Iterator[None]:
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
