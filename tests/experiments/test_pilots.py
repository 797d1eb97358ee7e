"""Pilot seeds choose step sizes; further seeds run at those only, and are the same runs."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corn.errors import InvalidArgumentError
from corn.experiments import FULL, METHODS, CellStore, Training, list_cells, make_studies, reproduce
from corn.experiments.cells import Cell, CellResult, TrainingCell, key_of
from corn.experiments.reproduction import Reproduction
from corn.experiments.studies import TrainingStudy

from .scales import PILOTS

FIGURE = ["fig4b"]
EVERY_SIZE = replace(PILOTS, regression=replace(PILOTS.regression, num_pilots=None))


def run_at(run: Mapping[str, Any]) -> tuple[Any, ...]:
    return run["x"], run["method"], run["step_size"], run["seed"]


def trainings_of(cells: list[Cell]) -> list[TrainingCell]:
    return [cell for cell in cells if isinstance(cell, TrainingCell)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CellStore:
    return CellStore(tmp_path_factory.mktemp("cells"))


@pytest.fixture(scope="module")
def piloted(store: CellStore) -> Reproduction:
    return reproduce(FIGURE, PILOTS, store=store, jobs=1)


def test_further_seeds_are_the_runs_of_a_whole_matrix(
    store: CellStore, piloted: Reproduction
) -> None:
    whole = {run_at(run): run for run in reproduce(FIGURE, EVERY_SIZE, store=store, jobs=1).runs}
    assert len(piloted.runs) == (2 + 1 + 1) * len(METHODS) < len(whole)
    for run in piloted.runs:
        expected = whole[run_at(run)]
        for column in ("validation_loss", "test_loss", "test_accuracy", "value"):
            assert run[column] == pytest.approx(expected[column], rel=1e-5)
    # Otherwise nothing here would tell one step size for all from one for each.
    assert len({run["step_size"] for run in piloted.runs if run["seed"] > 0}) > 1


def test_the_pilots_alone_choose(piloted: Reproduction) -> None:
    ((_, points),) = piloted.panels
    assert [point.method for point in points] == list(METHODS)
    for point in points:
        own = [run for run in piloted.runs if run["method"] == point.method.name]
        pilots = [run for run in own if run["seed"] == 0]
        best = min(pilots, key=lambda run: float(run["validation_loss"]))["step_size"]
        chosen = [run for run in own if run["chosen"]]
        assert [(run["step_size"], run["seed"]) for run in chosen] == [(best, k) for k in range(3)]
        assert all(run["chosen"] for run in own if run["seed"] > 0)
        assert point.values == tuple(run["value"] for run in chosen)
        assert f"step size {best}, " in point.note
        assert "chosen on 1 pilot seed of 3" in point.note
    assert (
        "fig4b: step sizes were chosen on 1 pilot seed of 3; the other seeds ran at those only, so "
        "intervals leave out how that choice varies" in piloted.notes
    )


def test_both_stages_are_foreseen_counted_and_found_again(
    store: CellStore, piloted: Reproduction
) -> None:
    before, after = list_cells(FIGURE, PILOTS), list_cells(FIGURE, PILOTS, store=store)
    assert sum(cell.cost for cell in before) == pytest.approx(sum(cell.cost for cell in after))
    assert len(trainings_of(before)) == 3 <= len(trainings_of(after))
    assert piloted.compute_seconds == pytest.approx(sum(map(store.seconds, after)))
    plans: list[list[Cell]] = []
    seen: list[Cell] = []
    again = reproduce(
        FIGURE,
        PILOTS,
        store=store,
        jobs=1,
        on_plan=lambda cells: plans.append(list(cells)),
        on_done=seen.append,
    )
    assert again == piloted
    assert plans == [before, after]
    assert set(seen) == set(after)


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
    for allowed in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            reproduce(FIGURE, PILOTS, store=store, jobs=1)
        kept = trainings_of(list_cells(FIGURE, PILOTS, store=store))
        assert sum(store.load(cell) is not None for cell in kept) == allowed
    allowed = 1000
    found = reproduce(FIGURE, PILOTS, store=store, jobs=1)
    assert (found.panels, found.runs) == (piloted.panels, piloted.runs)
    assert len(computed) == len(set(computed)) == len(kept)


def make_run(method: str, eta: float, seed: int) -> dict[str, Any]:
    """Larger steps are better, later seeds have larger values."""
    return {
        "method": method,
        "step_size": f"{eta:g}",
        "seed": seed,
        "validation_loss": -eta,
        "test_loss": seed + eta,
    }


def make_result(cell: TrainingCell, broken: set[tuple[str, float, int]]) -> CellResult:
    runs = [(m.name, eta, k) for m in cell.methods for eta in cell.step_sizes for k in cell.seeds]
    return {"runs": [make_run(*run) for run in runs if run not in broken]}


def compute_results(
    study: TrainingStudy, broken: set[tuple[str, float, int]]
) -> dict[Cell, CellResult]:
    """Both stages, made up."""
    results: dict[Cell, CellResult] = {}
    for _ in range(2):
        for cell in study.cells(results):
            assert isinstance(cell, TrainingCell)
            results[cell] = make_result(cell, broken)
    return results


def piloted_study() -> TrainingStudy:
    (study,) = make_studies(FIGURE, PILOTS)
    assert isinstance(study, TrainingStudy)
    return study


def test_a_breakdown_at_a_further_seed_leaves_no_value() -> None:
    study = piloted_study()
    results = compute_results(study, {("ldp", 3.0, 2), ("corn", 3.0, 1), ("corn", 3.0, 2)})
    points = {point.method.name: point for point in study.points(results)}
    assert points["ldp"].values == points["corn"].values == ()
    assert points["ldp"].note.endswith("chosen on 1 pilot seed of 3, broke down at seed 2")
    assert points["corn"].note.endswith("broke down at seed 1 and 2")
    assert points["decor"].values == (3.0, 4.0, 5.0)
    assert points["ldp"].is_open
    assert not points["decor"].is_open


def test_a_breakdown_of_a_pilot_changes_the_choice() -> None:
    study = piloted_study()
    results = compute_results(study, {("ldp", 3.0, 0), ("corn", 3.0, 0), ("corn", 0.3, 0)})
    points = {point.method.name: point for point in study.points(results)}
    assert points["ldp"].values == (0.3, 1.3, 2.3)
    assert points["corn"].values == ()
    assert points["corn"].note == "every step size broke down on the pilot seeds"
    assert not points["corn"].is_open
    further = [run for run in study.runs(results) if run["seed"] > 0]
    assert {run["method"] for run in further} == {m.name for m in METHODS} - {"corn"}
    assert all(run["chosen"] for run in further)


def test_no_cells_are_left_if_everything_broke_down() -> None:
    study = piloted_study()
    broken = {(method.name, eta, 0) for method in METHODS for eta in (3.0, 0.3)}
    assert len(compute_results(study, broken)) == 1


def test_seeds_are_split_into_pilots_and_repeats() -> None:
    training = Training("a9a", "agent", 5, (0.1,), 7, seeds_per_cell=2, num_pilots=3)
    assert training.pilot_blocks == ((0, 1), (2,))
    assert training.repeat_blocks == ((3, 4), (5, 6))
    for num_seeds in (2, 3):
        assert replace(training, num_seeds=num_seeds).repeat_blocks == ()
        assert sum(map(len, replace(training, num_seeds=num_seeds).pilot_blocks)) == num_seeds
    assert replace(training, num_pilots=None).pilot_blocks == ((0, 1), (2, 3), (4, 5), (6,))
    with pytest.raises(InvalidArgumentError, match="num_pilots"):
        replace(training, num_pilots=0)


def test_one_seed_is_a_pilot_and_nothing_is_said_of_pilots() -> None:
    (study,) = make_studies(FIGURE, PILOTS.restrict(num_seeds=1))
    assert isinstance(study, TrainingStudy)
    points = study.points(compute_results(study, set()))
    assert {point.note for point in points} == {"step size 3, the end of the grid"}


def test_results_from_before_there_were_pilots_are_found() -> None:
    """Keys of cells that took hours: another value would throw them away."""
    for name, key in (
        ("fig5b-sample", "5c0d02e146fb26490abe62f2"),
        ("fig5b-agent", "d66c72a0021d7583977b3a8a"),
        ("fig4a", "0d7b741ec60fa05d1be37667"),
    ):
        (study,) = make_studies([name], FULL)
        assert key_of(study.cells({})[0]) == key
    (study,) = make_studies(["fig5b-sample"], FULL)
    first = study.cells({})[0]
    assert isinstance(first, TrainingCell)
    assert (first.graph, first.epsilon, first.seeds) == ("er:n=20,p=0.2,seed=1", 10.0, (0,))
