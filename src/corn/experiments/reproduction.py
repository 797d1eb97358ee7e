"""Reproduce figures: compute what is missing, read off points and runs, check the claims."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from corn.covariance import ThreatModel
from corn.errors import CornWarning
from corn.experiments.cells import Cell, CellResult, Results, TrainingCell
from corn.experiments.claims import Claim, check_claims
from corn.experiments.figures import make_studies
from corn.experiments.matrix import compute_cells, split_cells
from corn.experiments.places import Run
from corn.experiments.scale import Scale
from corn.experiments.store import CellStore
from corn.experiments.studies import Panel, Point, Study, TrainingStudy
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


def list_cells(names: Sequence[str], scale: Scale, *, store: CellStore | None = None) -> list[Cell]:
    """All cells that figures need, including the designs that training needs.

    Which step sizes further seeds run at is known once the store has the pilots; until then, or
    without a store, cells of the same cost stand for theirs.
    """
    studies = make_studies(names, scale)
    return _forecast(studies, {} if store is None else _load(_cells(studies, {}), store))


def reproduce(
    names: Sequence[str],
    scale: Scale,
    *,
    store: CellStore,
    jobs: int = -1,
    cluster: str | None = None,
    directory: Path | None = None,
    on_plan: Callable[[Sequence[Cell]], None] | None = None,
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
        on_plan: called before each stage with all cells, as ``list_cells`` has them; the pilots are
            the first stage, and the seeds that run at the step sizes they chose the second.
        on_done: called for each cell as it is there; for a design, in each stage that needs it.
    """
    studies = make_studies(names, scale)
    _require_inputs(_cells(studies, {}), directory)
    asked: set[Cell] = set()
    results: dict[Cell, CellResult] = {}
    while cells := [cell for cell in _cells(studies, results) if cell not in asked]:
        if on_plan:
            on_plan(_forecast(studies, results))
        compute_cells(
            cells, store, jobs=jobs, cluster=cluster, directory=directory, on_done=on_done
        )
        asked.update(cells)
        results.update(_load(cells, store))
    return gather(studies, scale, results, store)


def gather(
    studies: Sequence[Study], scale: Scale, results: Results, store: CellStore
) -> Reproduction:
    """Read panels, runs and claims off the results of all cells; the store knows their time."""
    panels = tuple((study.panel, tuple(study.points(results))) for study in studies)
    designs, trainings = split_cells(results)
    needed: list[Cell] = [*designs, *trainings]
    return Reproduction(
        scale=scale,
        panels=panels,
        runs=tuple(run for study in studies for run in study.runs(results)),
        claims=tuple(check_claims(panels, scale)),
        compute_seconds=sum(map(store.seconds, needed)),
        notes=tuple(dict.fromkeys([*_list_choices(studies), *_list_notes(results)])),
        breakdowns=tuple(
            f"{cell.task} on {cell.graph} at ε = {cell.epsilon:g}: {message}"
            for cell in trainings
            for message in results[cell]["stopped"]
        ),
    )


def _list_choices(studies: Iterable[Study]) -> Iterator[str]:
    """Panels whose step sizes were chosen on some of the seeds only."""
    for study in studies:
        if isinstance(study, TrainingStudy) and study.places[0].repeats:
            yield (
                f"{study.panel.name}: step sizes were {study.places[0].describe_pilots()}; the "
                "other seeds ran at those only, so intervals leave out how that choice varies"
            )


def _list_notes(results: Results) -> Iterator[str]:
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


def _cells(studies: Iterable[Study], results: Results) -> list[Cell]:
    """What must be computed, as far as these results tell, each once."""
    return list(dict.fromkeys(cell for study in studies for cell in study.cells(results)))


def _forecast(studies: Iterable[Study], results: Results) -> list[Cell]:
    """All cells, those not known yet as foreseen, with the designs that training needs."""
    designs, trainings = split_cells(cell for study in studies for cell in study.forecast(results))
    return [*designs, *trainings]


def _load(cells: Iterable[Cell], store: CellStore) -> dict[Cell, CellResult]:
    """The results of those cells that the store has."""
    found = {cell: store.load(cell) for cell in cells}
    return {cell: result for cell, result in found.items() if result is not None}
