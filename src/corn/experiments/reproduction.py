"""Reproductions: compute missing cells, collect points and runs, check the claims."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from corn.covariance import ThreatModel
from corn.errors import CornWarning
from corn.experiments.cells import Cell, CellResult, CellStore, Results, TrainingCell
from corn.experiments.claims import Claim, check_claims
from corn.experiments.figures import make_studies
from corn.experiments.parallel import compute_cells, split_cells
from corn.experiments.scale import Scale
from corn.experiments.studies import Panel, Point, Run, Study, TrainingStudy
from corn.learn.datasets import load_dataset
from corn.privacy.rounding import write_exactly
from corn.topology import load_network

_GAP_TO_MENTION = 0.01
"""The relative optimality gap of a design above which the report mentions it."""


@dataclass(frozen=True)
class Reproduction:
    """The results of a reproduction.

    Attributes:
        scale: the settings.
        panels: every panel with its points.
        runs: everything that was measured, one row per run.
        claims: statements about the results, with verdicts.
        compute_seconds: the time of all cells on one core, in this run or an earlier one.
        notes: facts about tasks and designs that a reader needs.
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
    """Return all cells that figures need, including the designs that training needs.

    The step sizes of seeds that are not pilots are known once the store has the pilots. Until then,
    or without a store, cells of the same cost take their place.
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
    """Reproduce figures; cells that the store has are not computed again.

    Args:
        names: ``fig1a`` … ``fig5b``, the name of a panel, or ``all``.
        scale: the settings.
        store: the store of finished cells.
        jobs: the number of processes, of one compute thread each; −1 is one per core.
        cluster: ``dask`` or ``ray``, with ``:address`` for a running cluster.
        directory: the data cache.
        on_plan: called before each stage with all cells, as ``list_cells`` returns them. The pilots
            are the first stage; the seeds that run at the chosen step sizes are the second.
        on_done: called for each finished cell; for a design, in each stage that needs it.
    """
    studies = make_studies(names, scale)
    _require_inputs(_cells(studies, {}), directory)
    asked: set[Cell] = set()
    results: dict[Cell, CellResult] = {}
    # Each stage may reveal further cells: the pilots choose the step sizes of the other seeds.
    while cells := [cell for cell in _cells(studies, results) if cell not in asked]:
        if on_plan:
            on_plan(_forecast(studies, results))
        compute_cells(
            cells, store, jobs=jobs, cluster=cluster, directory=directory, on_done=on_done
        )
        # Each cell is asked for once, so that the loop ends.
        asked.update(cells)
        results.update(_load(cells, store))
    return gather(studies, scale, results, store)


def gather(
    studies: Sequence[Study], scale: Scale, results: Results, store: CellStore
) -> Reproduction:
    """Collect panels, runs and claims from the results of all cells; the store has their times."""
    panels = tuple((study.panel, tuple(study.points(results))) for study in studies)
    # The results lack designs that only training needs; their time counts as well.
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
            f"{cell.task} on {cell.graph} at ε = {write_exactly(cell.epsilon)}: {message}"
            for cell in trainings
            for message in results[cell]["stopped"]
        ),
    )


def _list_choices(studies: Iterable[Study]) -> Iterator[str]:
    """Yield a note for each panel whose step sizes were chosen on some of the seeds only."""
    for study in studies:
        if isinstance(study, TrainingStudy) and study.places[0].repeats:
            yield (
                f"{study.panel.name}: step sizes were {study.places[0].describe_pilots()}; the "
                "other seeds ran at those only, so intervals leave out how that choice varies"
            )


def _list_notes(results: Results) -> Iterator[str]:
    """Yield the notes of tasks, and one for each design not proved optimal within 1 %."""
    for cell, result in results.items():
        if isinstance(cell, TrainingCell):
            yield from (f"{cell.task}: {note}" for note in result["notes"])
        elif cell.mechanism == "corn" and result["gap"] > _GAP_TO_MENTION:
            # Of CorN only: a gap of another mechanism is a property of it, not of a solver.
            colluders = ThreatModel(cell.max_colluders).describe_colluders()
            yield (
                f"CorN on {cell.graph}, designed for {cell.horizon:g} steps, seeds {cell.seeds}, "
                f"{colluders}: {result['status']}, within {result['gap']:.1%} of the best possible"
            )


def _require_inputs(cells: Sequence[Cell], directory: Path | None) -> None:
    """Raise if a data set is absent or a graph is not connected: now, not after an hour."""
    for task in {cell.task for cell in cells if isinstance(cell, TrainingCell)} - {"quadratic"}:
        # No stand-in: a figure of the paper on another data set would be mistaken for its own.
        load_dataset(task, directory=directory, stand_in=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CornWarning)
        for graph in {cell.graph for cell in cells}:
            load_network(graph)


def _cells(studies: Iterable[Study], results: Results) -> list[Cell]:
    """Return the cells known to be needed, given these results, each once."""
    return list(dict.fromkeys(cell for study in studies for cell in study.cells(results)))


def _forecast(studies: Iterable[Study], results: Results) -> list[Cell]:
    """Return all cells, forecasts included, with the designs that training needs."""
    designs, trainings = split_cells(cell for study in studies for cell in study.forecast(results))
    return [*designs, *trainings]


def _load(cells: Iterable[Cell], store: CellStore) -> dict[Cell, CellResult]:
    """Return the results of those cells that the store has."""
    found = {cell: store.load(cell) for cell in cells}
    return {cell: result for cell, result in found.items() if result is not None}
