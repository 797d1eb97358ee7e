"""Reproduce figures: compute what is missing, read off points and runs, check the claims."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from corn.covariance import ThreatModel
from corn.errors import CornWarning
from corn.experiments.cells import Cell, CellResult, TrainingCell
from corn.experiments.claims import Claim, check_claims
from corn.experiments.figures import make_studies
from corn.experiments.matrix import compute_cells, split_cells
from corn.experiments.scale import Scale
from corn.experiments.store import CellStore
from corn.experiments.studies import Panel, Point, Run, Study
from corn.learn.datasets import load_dataset
from corn.topology import load_network

_GAP_TO_MENTION = 0.01


@dataclass(frozen=True)
class Reproduction:
    """What came out.

    Attributes:
        scale: the settings.
        panels: every panel and its points.
        runs: everything that was measured, one row each.
        claims: what is said about it, and whether it holds.
        compute_seconds: what all cells took, on one core, in this run or an earlier one.
        notes: what a reader must know of tasks and designs.
        breakdowns: runs that broke down.
    """

    scale: Scale
    panels: tuple[tuple[Panel, tuple[Point, ...]], ...]
    runs: tuple[Run, ...]
    claims: tuple[Claim, ...]
    compute_seconds: float
    notes: tuple[str, ...] = ()
    breakdowns: tuple[str, ...] = ()


def list_cells(names: Sequence[str], scale: Scale) -> list[Cell]:
    """All cells that figures need, including the designs that training needs."""
    designs, trainings = split_cells(_cells(make_studies(names, scale)))
    return [*designs, *trainings]


def reproduce(
    names: Sequence[str],
    scale: Scale,
    *,
    store: CellStore,
    jobs: int = -1,
    cluster: str | None = None,
    directory: Path | None = None,
    on_done: Callable[[Cell], None] | None = None,
) -> Reproduction:
    """Reproduce the figures named; cells that the store has are not computed again.

    Args:
        names: ``fig1a`` … ``fig5b``, or ``all``.
        scale: the settings.
        store: where finished cells are kept.
        jobs: processes of one compute thread each; −1 is one for each core.
        cluster: ``dask`` or ``ray``, with ``:address`` for one that runs elsewhere.
        directory: the data cache.
        on_done: called for each cell as it is there.
    """
    studies = make_studies(names, scale)
    cells = _cells(studies)
    _require_inputs(cells, directory)
    compute_cells(cells, store, jobs=jobs, cluster=cluster, directory=directory, on_done=on_done)
    return gather(studies, scale, store)


def gather(studies: Sequence[Study], scale: Scale, store: CellStore) -> Reproduction:
    """Read finished cells off the store."""
    loaded = {cell: store.load(cell) for cell in _cells(studies)}
    results = {cell: result for cell, result in loaded.items() if result is not None}
    panels = tuple((study.panel, tuple(study.points(results))) for study in studies)
    designs, trainings = split_cells(results)
    needed: list[Cell] = [*designs, *trainings]
    return Reproduction(
        scale=scale,
        panels=panels,
        runs=tuple(run for study in studies for run in study.runs(results)),
        claims=tuple(check_claims(panels, scale)),
        compute_seconds=sum(map(store.seconds, needed)),
        notes=tuple(dict.fromkeys(_list_notes(results))),
        breakdowns=tuple(
            f"{cell.task} on {cell.graph} at ε = {cell.epsilon:g}: {message}"
            for cell in trainings
            for message in results[cell]["stopped"]
        ),
    )


def _list_notes(results: Mapping[Cell, CellResult]) -> Iterator[str]:
    """What tasks say of themselves, and designs that are not proved optimal within 1 %."""
    for cell, result in results.items():
        if isinstance(cell, TrainingCell):
            yield from (f"{cell.task}: {note}" for note in result["notes"])
        elif cell.mechanism == "corn" and result["gap"] > _GAP_TO_MENTION:
            colluders = ThreatModel(cell.max_colluders).describe_colluders()
            yield (
                f"CorN on {cell.graph}, designed for {cell.horizon:g} steps, seeds {cell.seeds}, "
                f"{colluders}: {result['status']}, within {result['gap']:.1%} of the best possible"
            )


def _require_inputs(cells: Sequence[Cell], directory: Path | None) -> None:
    """Refuse now, rather than after an hour, if a data set is absent or a graph falls apart."""
    for task in {cell.task for cell in cells if isinstance(cell, TrainingCell)} - {"quadratic"}:
        load_dataset(task, directory=directory, stand_in=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CornWarning)
        for graph in {cell.graph for cell in cells}:
            load_network(graph)


def _cells(studies: Sequence[Study]) -> list[Cell]:
    return list(dict.fromkeys(cell for study in studies for cell in study.cells))
