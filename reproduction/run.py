"""A reproduction: compute missing cells, collect points and runs, check the claims."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from corn.covariance import ThreatModel
from corn.errors import CornWarning
from corn.learn.datasets import load_dataset
from corn.privacy.rounding import write_exactly
from corn.topology import load_network
from reproduction.cells import (
    Cell,
    CellResult,
    CellStore,
    Results,
    TrainingCell,
    compute_cells,
    split_cells,
)
from reproduction.claims import Claim, check_claims
from reproduction.figures import Panel, Point, Run, Study, TrainingStudy, make_studies
from reproduction.scale import Scale

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


def reproduce(
    names: Sequence[str],
    scale: Scale,
    *,
    store: CellStore,
    jobs: int = -1,
    cluster: str | None = None,
    directory: Path | None = None,
    on_plan: Callable[[Sequence[Cell]], None] | None = None,
    on_done: Callable[[Cell, bool], None] | None = None,
) -> Reproduction:
    """Reproduce figures; cells that the store has are not computed again.

    Args:
        names: ``fig1a`` … ``fig5b``, the name of a panel, or ``all``.
        scale: the settings.
        store: the store of finished cells.
        jobs: the number of processes, of one compute thread each; −1 is one per core.
        cluster: ``dask``, with ``:address`` for a running cluster.
        directory: the data cache.
        on_plan: called before each stage with all cells known by then. The pilots are the first
            stage; the seeds that run at the chosen step sizes are the second.
        on_done: called with each finished cell, and whether it was computed now; for a design, in
            each stage that needs it.
    """
    studies = make_studies(names, scale)
    _require_inputs(_list_cells(studies, {}), directory)
    results: dict[Cell, CellResult] = {}
    # Each stage may reveal further cells: the pilots choose the step sizes of the other seeds.
    while cells := [cell for cell in _list_cells(studies, results) if cell not in results]:
        if on_plan:
            designs, trainings = split_cells([*results, *cells])
            on_plan([*designs, *trainings])
        results |= compute_cells(
            cells, store, jobs=jobs, cluster=cluster, directory=directory, on_done=on_done
        )
    panels = tuple((study.panel, tuple(study.points(results))) for study in studies)
    return Reproduction(
        scale=scale,
        panels=panels,
        runs=tuple(run for study in studies for run in study.runs(results)),
        claims=tuple(check_claims(panels, scale)),
        compute_seconds=sum(result["seconds"] for result in results.values()),
        notes=tuple(dict.fromkeys([*_list_choices(studies), *_list_notes(results)])),
        breakdowns=tuple(
            f"{cell.task} on {cell.graph} at ε = {write_exactly(cell.epsilon)}: {message}"
            for cell, result in results.items()
            if isinstance(cell, TrainingCell)
            for message in result["stopped"]
        ),
    )


def _list_cells(studies: Iterable[Study], results: Results) -> list[Cell]:
    """Return the cells known to be needed, given these results, each once."""
    return list(dict.fromkeys(cell for study in studies for cell in study.cells(results)))


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
        elif cell.rule == "corn" and result["gap"] > _GAP_TO_MENTION:
            # Of CorN only: a gap of another rule is a property of it, not of a solver.
            colluders = ThreatModel(cell.max_colluders).describe_colluders()
            yield (
                f"CorN on {cell.graph}, designed for {cell.horizon:g} steps, seeds {cell.seeds}, "
                f"{colluders}: {result['status']}, within {result['gap']:.1%} of the best possible"
            )


def _require_inputs(cells: Sequence[Cell], directory: Path | None) -> None:
    """Raise if a data set is absent or a graph is not connected: now, not after an hour."""
    for task in {cell.task for cell in cells if isinstance(cell, TrainingCell)} - {"quadratic"}:
        load_dataset(task, directory=directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CornWarning)
        for graph in {cell.graph for cell in cells}:
            load_network(graph, mixing="gossip")
