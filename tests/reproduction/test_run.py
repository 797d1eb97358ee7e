"""A reproduction computes each cell once, in two stages, and resumes after an interruption.

Pilot seeds choose step sizes; further seeds run at those only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corn.errors import FileFormatError
from reproduction.cells import Cell, CellResult, CellStore, DesignCell, TrainingCell
from reproduction.figures import TrainingStudy, make_studies
from reproduction.mechanisms import MECHANISMS
from reproduction.run import Reproduction, reproduce
from reproduction.scale import Scale

from .scales import PILOTS, TINY

FIGURES = ["fig1b", "fig4a"]
PILOTED = ["fig4b"]
EVERY_SIZE = replace(PILOTS, regression=replace(PILOTS.regression, num_pilots=None))


def run_at(run: Mapping[str, Any]) -> tuple[Any, ...]:
    return run["x"], run["mechanism"], run["step_size"], run["seed"]


class Watch:
    """Notes the cells of each stage, and those that were finished, with whether they were new."""

    def __init__(self) -> None:
        self.plans: list[list[Cell]] = []
        self.finished: dict[Cell, bool] = {}

    def plan(self, cells: Sequence[Cell]) -> None:
        self.plans.append(list(cells))

    def finish(self, cell: Cell, is_new: bool) -> None:
        self.finished.setdefault(cell, is_new)

    @property
    def trainings(self) -> list[TrainingCell]:
        return [cell for cell in self.finished if isinstance(cell, TrainingCell)]


def watch(names: list[str], scale: Scale, store: CellStore) -> tuple[Reproduction, Watch]:
    seen = Watch()
    made = reproduce(names, scale, store=store, jobs=1, on_plan=seen.plan, on_done=seen.finish)
    return made, seen


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CellStore:
    return CellStore(tmp_path_factory.mktemp("cells"))


@pytest.fixture(scope="module")
def piloted(store: CellStore) -> Reproduction:
    return reproduce(PILOTED, PILOTS, store=store, jobs=1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[CellStore, Reproduction]:
    """Return a finished reproduction and its cells."""
    store = CellStore(tmp_path_factory.mktemp("whole"))
    return store, reproduce(FIGURES, TINY, store=store, jobs=1)


@pytest.mark.slow
def test_every_panel_of_training_has_a_point_for_every_method(tmp_path: Path) -> None:
    scale = replace(TINY, epsilons=(3.0,), connectivities=(0.4,))
    made = reproduce(["all"], scale, store=CellStore(tmp_path), jobs=1)
    assert len(made.panels) == 17
    trained = [points for panel, points in made.panels if panel.is_random]
    for points in trained:
        assert {point.mechanism for point in points} == set(MECHANISMS)
        assert all(np.isfinite(point.mean) for point in points)
        assert all(len(point.values) > 1 for point in points)
    assert {claim.source for claim in made.claims} == {"paper", "expected", "corn"}
    chosen = [run for run in made.runs if run.get("chosen")]
    assert len(chosen) == sum(len(point.values) for points in trained for point in points)
    assert made.compute_seconds > 0


def test_finished_cells_are_not_computed_again(
    whole: tuple[CellStore, Reproduction], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, first = whole

    def refuse(self: DesignCell) -> None:
        raise AssertionError(f"computed again: {self}")

    monkeypatch.setattr(DesignCell, "compute", refuse)
    monkeypatch.setattr(TrainingCell, "compute", refuse)
    again, seen = watch(FIGURES, TINY, store)
    assert again == first
    assert set(seen.finished) == set(seen.plans[-1])
    assert not any(seen.finished.values())


def test_blocks_of_seeds_do_not_change_results(tmp_path: Path) -> None:
    joint = replace(TINY, connectivities=(0.4,))
    split = replace(joint, regression=replace(joint.regression, seeds_per_cell=1))
    store = CellStore(tmp_path)
    together, apart = (reproduce(["fig4b"], s, store=store, jobs=1) for s in (joint, split))
    for (_, points), (_, others) in zip(together.panels, apart.panels, strict=True):
        for point, other in zip(points, others, strict=True):
            assert (point.mechanism, point.x, point.note) == (other.mechanism, other.x, other.note)
            assert point.values == pytest.approx(other.values, rel=1e-5)


def test_a_missing_data_set_is_never_replaced_by_another(tmp_path: Path) -> None:
    scale = replace(TINY, regression=replace(TINY.regression, task="a9a"))
    with pytest.raises(FileFormatError, match="corn data get a9a"):
        reproduce(["fig4b"], scale, store=CellStore(tmp_path), jobs=1, directory=tmp_path)


def test_further_seeds_run_as_they_would_at_every_step_size(
    store: CellStore, piloted: Reproduction
) -> None:
    whole = {run_at(run): run for run in reproduce(PILOTED, EVERY_SIZE, store=store, jobs=1).runs}
    assert len(piloted.runs) == (2 + 1 + 1) * len(MECHANISMS) < len(whole)
    for run in piloted.runs:
        expected = whole[run_at(run)]
        for column in ("validation_loss", "test_loss", "test_accuracy", "value"):
            assert run[column] == pytest.approx(expected[column], rel=1e-5)
    # With a single step size for all mechanisms these tests could not detect a mix-up.
    assert len({run["step_size"] for run in piloted.runs if run["seed"] > 0}) > 1


def test_only_pilots_choose_step_sizes(piloted: Reproduction) -> None:
    ((_, points),) = piloted.panels
    assert [point.mechanism for point in points] == list(MECHANISMS)
    for point in points:
        own = [run for run in piloted.runs if run["mechanism"] == point.mechanism.name]
        pilots = [run for run in own if run["seed"] == 0]
        best = min(pilots, key=lambda run: float(run["validation_loss"]))["step_size"]
        chosen = [run for run in own if run["chosen"]]
        assert [(run["step_size"], run["seed"]) for run in chosen] == [(best, k) for k in range(3)]
        assert all(run["chosen"] for run in own if run["seed"] > 0)
        assert point.values == tuple(run["value"] for run in chosen)
        assert f"step size {best}, " in point.note
        assert "chosen on 1 pilot seed of 3" in point.note
    assert any("fig4b" in note and "1 pilot seed of 3" in note for note in piloted.notes)


def test_both_stages_are_planned_and_found_again(store: CellStore, piloted: Reproduction) -> None:
    again, seen = watch(PILOTED, PILOTS, store)
    assert again == piloted
    assert len(seen.trainings) == 3
    before, after = seen.plans
    assert set(before) == set(after) - set(seen.trainings[1:])
    assert set(seen.finished) == set(after)
    assert not any(seen.finished.values())


def test_an_interruption_between_the_stages_keeps_the_pilots(
    tmp_path: Path, piloted: Reproduction, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, compute = CellStore(tmp_path), TrainingCell.compute
    computed: list[TrainingCell] = []
    allowed = 1

    def count(self: TrainingCell, *arguments: Any) -> CellResult:
        if len(computed) == allowed:
            raise KeyboardInterrupt
        computed.append(self)
        return compute(self, *arguments)

    monkeypatch.setattr(TrainingCell, "compute", count)
    # After the pilots, then after one cell of the second stage, then not at all.
    for allowed in (1, 2):  # noqa: B007 - read by `count`
        with pytest.raises(KeyboardInterrupt):
            reproduce(PILOTED, PILOTS, store=store, jobs=1)
        assert all(store.load(cell) is not None for cell in computed)
    allowed = 1000
    found, seen = watch(PILOTED, PILOTS, store)
    assert (found.panels, found.runs) == (piloted.panels, piloted.runs)
    assert len(computed) == len(set(computed)) == len(seen.trainings)


def make_run(mechanism: str, eta: float, seed: int) -> dict[str, Any]:
    """Return a run that is better the larger its step size, with a larger value at later seeds."""
    return {
        "mechanism": mechanism,
        "step_size": f"{eta:g}",
        "seed": seed,
        "validation_loss": -eta,
        "test_loss": seed + eta,
    }


def make_results(
    study: TrainingStudy, broken: set[tuple[str, float, int]]
) -> dict[Cell, CellResult]:
    """Return invented results of both stages, without the runs that broke down."""
    results: dict[Cell, CellResult] = {}
    for _ in range(2):
        for cell in study.cells(results):
            assert isinstance(cell, TrainingCell)
            runs = [
                make_run(mechanism.name, eta, seed)
                for mechanism, eta in cell.trials
                for seed in cell.seeds
                if (mechanism.name, eta, seed) not in broken
            ]
            results[cell] = {"runs": runs}
    return results


def piloted_study() -> TrainingStudy:
    (study,) = make_studies(PILOTED, PILOTS)
    assert isinstance(study, TrainingStudy)
    return study


def test_a_breakdown_at_a_further_seed_leaves_no_value() -> None:
    study = piloted_study()
    results = make_results(study, {("ldp", 3.0, 2), ("corn", 3.0, 1), ("corn", 3.0, 2)})
    points = {point.mechanism.name: point for point in study.points(results)}
    assert points["ldp"].values == points["corn"].values == ()
    assert points["ldp"].note.endswith("chosen on 1 pilot seed of 3, broke down at seed 2")
    assert points["corn"].note.endswith("broke down at seed 1 and 2")
    assert points["decor"].values == (3.0, 4.0, 5.0)
    assert points["ldp"].is_open
    assert not points["decor"].is_open


def test_a_breakdown_of_a_pilot_changes_the_choice() -> None:
    study = piloted_study()
    results = make_results(study, {("ldp", 3.0, 0), ("corn", 3.0, 0), ("corn", 0.3, 0)})
    points = {point.mechanism.name: point for point in study.points(results)}
    assert points["ldp"].values == (0.3, 1.3, 2.3)
    assert points["corn"].values == ()
    assert points["corn"].note == "every step size broke down on the pilot seeds"
    assert not points["corn"].is_open
    further = [run for run in study.runs(results) if run["seed"] > 0]
    assert {run["mechanism"] for run in further} == {m.name for m in MECHANISMS} - {"corn"}
    assert all(run["chosen"] for run in further)


def test_nothing_more_is_computed_if_every_pilot_broke_down() -> None:
    study = piloted_study()
    broken = {(mechanism.name, eta, 0) for mechanism in MECHANISMS for eta in (3.0, 0.3)}
    assert len(make_results(study, broken)) == 1


def test_a_single_seed_is_a_pilot_and_notes_mention_no_pilots() -> None:
    (study,) = make_studies(PILOTED, PILOTS.restrict(num_seeds=1))
    assert isinstance(study, TrainingStudy)
    points = study.points(make_results(study, set()))
    assert {point.note for point in points} == {"step size 3, the end of the grid"}
