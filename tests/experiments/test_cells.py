"""Cells give the results of the library, and are stored and found by their configuration."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corn import learn
from corn.covariance import Horizon, ThreatModel, default_objective, design
from corn.experiments import FULL, CellStore, make_studies
from corn.experiments.cells import DesignCell, TrainingCell, key_of
from corn.experiments.methods import CORN_DEFAULTS, CORN_TWO_INSIDERS, METHODS, NONE
from corn.experiments.parallel import compute_cells
from corn.privacy import PrivacyBudget
from corn.topology import choose_cooldown, load_network

from .scales import TINY


def first_training_cell(figure: str) -> TrainingCell:
    cell = make_studies([figure], TINY)[0].cells({})[0]
    assert isinstance(cell, TrainingCell)
    return cell


def test_a_design_cell_is_the_design_of_the_library_at_cap_one() -> None:
    cell = DesignCell("ring:6", "corn", 10.0, 50.0, 1, "pairs")
    W = load_network("ring:6").mixing_matrix
    made = design(W, 1.0, objective=Horizon(10.0), threat=ThreatModel(1, "pairs"))
    found = cell.compute()
    assert found["one_step"] == pytest.approx(np.trace(W @ made.covariance @ W.T))
    assert found["accumulated"] == pytest.approx(
        float((Horizon(50.0).matrix(W) * made.covariance).sum())
    )


def test_noise_that_is_nearly_singular_keeps_its_budget_after_scaling(tmp_path: Path) -> None:
    """On complete graphs all noise cancels but a 20,000th: the check rounds up by over 1e-9."""
    names = ("decor-paper", "corn-paper", "corn")
    methods = tuple(method for method in METHODS if method.name in names)
    cell = replace(
        first_training_cell("fig4b"), graph="er:n=20,p=1,seed=1", methods=methods, num_steps=2
    )
    store = CellStore(tmp_path)
    compute_cells([cell], store, jobs=1)
    found = store.load(cell)
    assert found is not None
    assert {run["method"] for run in found["runs"]} == set(names)


def test_a_training_cell_gives_the_losses_of_the_library(tmp_path: Path) -> None:
    """One method, from its cell and from the engine directly, at a cap other than 1."""
    method = CORN_TWO_INSIDERS
    cell = replace(first_training_cell("fig4b"), methods=(method,))
    store = CellStore(tmp_path)
    compute_cells([cell], store, jobs=1)
    network = load_network(cell.graph, mixing="gossip")
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


def test_a_line_with_defaults_is_trained_as_by_corn_train() -> None:
    """Momentum, cool-down and Poisson sampling of a sample, from the cell and from the library."""
    cell = replace(
        first_training_cell("fig5b-sample"), methods=(CORN_DEFAULTS,), num_steps=200, seeds=(0,)
    )
    (run,) = cell.compute({CORN_DEFAULTS.name: cell.designs[CORN_DEFAULTS.name].compute()}, None)[
        "runs"
    ]
    problem = learn.make_workload(
        cell.task, 6, model=cell.model, partition=cell.partition, seed=cell.data_seed
    )
    budget = PrivacyBudget.for_sizes(
        problem.data.sizes,
        epsilon=cell.epsilon,
        delta=cell.delta,
        num_steps=cell.num_steps,
        clip=cell.clip,
        batch_size=cell.batch_size,
    )
    assert budget.query.sampling == "poisson"
    network = load_network(cell.graph, mixing="gossip")
    objective = default_objective(cell.num_steps, momentum=0.9)
    cap, threat = budget.precision_cap, CORN_DEFAULTS.threat
    noise = design(network.mixing_matrix, cap, objective=objective, threat=threat)
    result = learn.run_sweep(
        problem,
        network,
        learn.make_grid([learn.Method.private("corn", noise, budget)], step_sizes=cell.step_sizes),
        settings=learn.SweepSettings(
            cell.num_steps,
            cell.batch_size,
            cooldown_steps=choose_cooldown(network, cell.num_steps),
            momentum=objective.momentum,
        ),
        evaluate_at=[cell.num_steps],
        show_progress=False,
    )
    assert objective.momentum > 0
    assert run["test_loss"] == pytest.approx(float(result.last_rows[0]["test_loss"]), rel=1e-4)


def test_a_run_that_broke_down_is_listed_and_has_no_value() -> None:
    cell = replace(first_training_cell("fig4b"), methods=(NONE,), step_sizes=(0.1, 1e38))
    result = cell.compute({}, None)
    assert {run["step_size"] for run in result["runs"]} == {"0.1"}
    assert len(result["stopped"]) == len(cell.seeds)


def test_an_interrupted_training_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends a sweep early, which returns its measurements so far."""
    run_sweep = learn.run_sweep

    def interrupt(*arguments: Any, **options: Any) -> learn.Result:
        return replace(run_sweep(*arguments, **options), status="interrupted")

    monkeypatch.setattr(learn, "run_sweep", interrupt, raising=False)
    cell, store = replace(first_training_cell("fig4b"), methods=(NONE,)), CellStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        compute_cells([cell], store, jobs=1)
    assert store.load(cell) is None


def test_an_incomplete_or_foreign_file_counts_as_absent(tmp_path: Path) -> None:
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


def test_the_key_depends_on_every_setting() -> None:
    cell = first_training_cell("fig4a")
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


def test_the_key_does_not_depend_on_labels() -> None:
    cell = first_training_cell("fig4a")
    renamed = tuple(replace(method, label="another label") for method in cell.methods)
    assert key_of(replace(cell, methods=renamed)) == key_of(cell)


def test_keys_of_stored_results_do_not_change() -> None:
    """Cells of the full scale took hours. Another key would discard them."""
    for name, key in (
        ("fig5b-sample", "c747107f3364ec5db1879cb3"),
        ("fig5b-agent", "dd1ed5171a06fd46969565da"),
        ("fig4a", "eb4e8235adbbe403794acba7"),
    ):
        (study,) = make_studies([name], FULL)
        assert key_of(study.cells({})[0]) == key
    (study,) = make_studies(["fig5b-sample"], FULL)
    first = study.cells({})[0]
    assert isinstance(first, TrainingCell)
    assert (first.graph, first.epsilon, first.seeds) == ("er:n=20,p=0.2,seed=1", 10.0, (0,))
