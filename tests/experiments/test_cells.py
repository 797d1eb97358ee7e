"""Cells are computed once, kept by their configuration, and an interrupted matrix goes on."""

import json
from dataclasses import replace
from pathlib import Path

import joblib
import numpy as np
import pytest

from corn import learn
from corn.covariance import Horizon, ThreatModel, design
from corn.errors import FileFormatError, InvalidArgumentError, MissingExtraError
from corn.experiments import CellStore, list_cells, make_studies, reproduce
from corn.experiments.cells import Cell, DesignCell, TrainingCell, key_of
from corn.experiments.methods import CORN_TWO_INSIDERS, METHODS
from corn.experiments.parallel import compute_cells
from corn.topology import load_network

from .scales import TINY

FIGURES = ["fig1b", "fig4a"]


def test_a_design_is_that_of_the_library_at_cap_one() -> None:
    cell = DesignCell("ring:6", "corn", 10.0, 50.0, 1, "pairs")
    W = load_network("ring:6").mixing_matrix
    made = design(W, 1.0, objective=Horizon(10.0), threat=ThreatModel(1, "pairs"))
    found = cell.compute()
    assert found["one_step"] == pytest.approx(np.trace(W @ made.covariance @ W.T))
    assert found["accumulated"] == pytest.approx(
        float((Horizon(50.0).matrix(W) * made.covariance).sum())
    )


def test_training_is_that_of_the_library(tmp_path: Path) -> None:
    """One method, from the matrix and straight from the engine, at a cap that is not 1."""
    method = CORN_TWO_INSIDERS
    study = make_studies(["fig4b"], TINY)[0]
    cell = study.cells({})[0]
    assert isinstance(cell, TrainingCell)
    cell = replace(cell, methods=(method,))
    store = CellStore(tmp_path)
    compute_cells([cell], store, jobs=1)
    network = load_network(cell.graph)
    budget = method.budget(cell.epsilon, cell.delta, cell.num_steps, cell.clip)
    made = design(
        network.mixing_matrix,
        budget.precision_cap,
        objective=method.objective(cell.num_steps),
        threat=method.threat,
    )
    result = learn.run_sweep(
        learn.make_workload(cell.task, 6, seed=cell.data_seed),
        network,
        learn.make_grid(
            [learn.Method.private(method.name, made, budget)], step_sizes=cell.step_sizes
        ),
        settings=learn.SweepSettings(cell.num_steps, cell.batch_size, (0, 1)),
        evaluate_at=[cell.num_steps],
        show_progress=False,
    )
    found = store.load(cell)
    assert found is not None
    losses = {(run["step_size"], run["seed"]): run["test_loss"] for run in found["runs"]}
    for row in result.last_rows:
        assert losses[str(row["step_size"]), int(row["seed"])] == pytest.approx(
            float(row["test_loss"]), rel=1e-4
        )


@pytest.mark.slow
def test_every_figure_has_cells_and_every_method_a_point(tmp_path: Path) -> None:
    made = reproduce(["all"], TINY, store=CellStore(tmp_path), jobs=1)
    assert len(made.panels) == 17
    trained = [points for panel, points in made.panels if panel.is_random]
    for points in trained:
        assert {point.method for point in points} == set(METHODS)
        assert all(np.isfinite(point.mean) for point in points)
        assert all(len(point.values) > 1 for point in points)
    assert {claim.source for claim in made.claims} == {"paper", "expected", "corn"}
    chosen = [run for run in made.runs if run.get("chosen")]
    assert len(chosen) == sum(len(point.values) for points in trained for point in points)
    assert made.compute_seconds > 0


def test_what_is_finished_is_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CellStore(tmp_path)
    first = reproduce(FIGURES, TINY, store=store, jobs=1)

    def refuse(self: DesignCell) -> None:
        raise AssertionError(f"computed again: {self}")

    monkeypatch.setattr(DesignCell, "compute", refuse)
    monkeypatch.setattr(TrainingCell, "compute", refuse)
    seen: list[Cell] = []
    again = reproduce(FIGURES, TINY, store=store, jobs=1, on_done=seen.append)
    assert again == first
    assert set(seen) == set(list_cells(FIGURES, TINY))


@pytest.mark.slow
def test_an_interrupted_matrix_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = list_cells(FIGURES, TINY)
    whole, broken = CellStore(tmp_path / "whole"), CellStore(tmp_path / "broken")
    expected = reproduce(FIGURES, TINY, store=whole, jobs=1)
    count = 0
    compute = TrainingCell.compute

    def interrupt_second(self: TrainingCell, *arguments: object) -> object:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return compute(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainingCell, "compute", interrupt_second)
    with pytest.raises(KeyboardInterrupt):
        reproduce(FIGURES, TINY, store=broken, jobs=1)
    kept = [cell for cell in cells if broken.load(cell) is not None]
    assert 0 < len(kept) == len(cells) - 1
    found = reproduce(FIGURES, TINY, store=broken, jobs=1)
    assert found.panels == expected.panels
    assert found.runs == expected.runs
    assert count == 3


def test_two_processes_find_the_same(tmp_path: Path) -> None:
    one = reproduce(["fig1b"], TINY, store=CellStore(tmp_path / "one"), jobs=1)
    two = reproduce(["fig1b"], TINY, store=CellStore(tmp_path / "two"), jobs=2)
    assert one.panels == two.panels


def test_a_torn_or_foreign_file_counts_as_absent(tmp_path: Path) -> None:
    store, cell = CellStore(tmp_path), DesignCell("ring:6", "ldp", 1.0, 1.0)
    file = tmp_path / f"{key_of(cell)}.json"
    for text in ("", "{", "[]", '{"result": {}}', "\x00"):
        file.write_text(text)
        assert store.load(cell) is None
    store.save(cell, {"one_step": 1.0}, seconds=2.0)
    record = json.loads(file.read_text())
    for name, value in (("corn_version", "9.9"), ("configuration", {}), ("result", None)):
        file.write_text(json.dumps(record | {name: value}))
        assert store.load(cell) is None
    file.write_text(json.dumps(record))
    assert store.load(cell) == {"one_step": 1.0}
    assert store.seconds(cell) == 2.0


def test_seeds_in_blocks_find_the_same(tmp_path: Path) -> None:
    split = replace(TINY, regression=replace(TINY.regression, seeds_per_cell=1))
    store = CellStore(tmp_path)
    together, apart = (reproduce(["fig4b"], s, store=store, jobs=1) for s in (TINY, split))
    for (_, points), (_, others) in zip(together.panels, apart.panels, strict=True):
        for point, other in zip(points, others, strict=True):
            assert (point.method, point.x, point.note) == (other.method, other.x, other.note)
            assert point.values == pytest.approx(other.values, rel=1e-5)


def test_a_backend_that_cannot_stream_loses_one_batch_only(tmp_path: Path) -> None:
    store, cells = CellStore(tmp_path), list_cells(["fig1b"], TINY)

    def interrupt(cell: Cell) -> None:
        del cell
        if len(list(tmp_path.iterdir())) >= 4:
            raise KeyboardInterrupt

    with (
        joblib.parallel_config(backend="multiprocessing"),
        pytest.raises(KeyboardInterrupt),
    ):
        compute_cells(cells, store, jobs=2, on_done=interrupt)
    assert sum(store.load(cell) is not None for cell in cells) == 4


def test_every_setting_is_in_the_key() -> None:
    cell = make_studies(["fig4a"], TINY)[0].cells({})[0]
    assert isinstance(cell, TrainingCell)
    other = {
        "task": "digits",
        "model": "network",
        "unit": "sample",
        "graph": "ring:6",
        "epsilon": 4.0,
        "methods": METHODS[:2],
        "num_steps": 21,
        "step_sizes": (0.3,),
        "schedule": "cosine",
        "seeds": (0, 1, 2),
        "delta": 1e-6,
        "clip": 0.2,
        "batch_size": 9,
        "partition": "iid",
        "data_seed": 3,
    }
    assert set(other) == set(cell.__dataclass_fields__)
    keys = {key_of(replace(cell, **{name: value})) for name, value in other.items()}  # type: ignore[arg-type]
    assert len(keys | {key_of(cell)}) == len(other) + 1


def test_real_data_is_never_replaced(tmp_path: Path) -> None:
    scale = replace(TINY, regression=replace(TINY.regression, task="a9a"))
    with pytest.raises(FileFormatError, match="corn data get a9a"):
        reproduce(["fig4b"], scale, store=CellStore(tmp_path), jobs=1, directory=tmp_path)


def test_clusters_by_name(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    with pytest.raises(InvalidArgumentError, match="cluster must be dask or ray"):
        compute_cells([], store, cluster="slurm")
    for kind in ("dask", "ray"):
        try:
            __import__({"dask": "distributed", "ray": "ray"}[kind])
        except ImportError:
            with pytest.raises(MissingExtraError, match=kind):
                compute_cells([], store, cluster=kind)


def test_a_panel_by_its_name() -> None:
    (study,) = make_studies(["fig5a-agent"], TINY)
    assert study.panel.unit == "agent"
    assert len(make_studies(["fig5a", "fig5a-agent"], TINY)) == 2


def test_unknown_figures_and_impossible_graphs() -> None:
    with pytest.raises(InvalidArgumentError, match="fig9"):
        make_studies(["fig9"], TINY)
    with pytest.raises(InvalidArgumentError, match=r"\(0, 1\]"):
        TINY.restrict(connectivities=[1.5])
    assert TINY.restrict(num_seeds=7).regression.num_seeds == 7
