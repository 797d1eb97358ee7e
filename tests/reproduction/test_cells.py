"""Cells give the results of the library, and are found by their configuration.

Workers end when the process that started them does.
"""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corn import learn
from corn.covariance import Horizon, ThreatModel, default_objective, design
from corn.errors import InvalidArgumentError, MissingExtraError
from corn.privacy import PrivacyBudget
from corn.topology import Mixing, Network, choose_cooldown, load_network
from reproduction.cells import (
    CellStore,
    DesignCell,
    TrainingCell,
    compute_cells,
    configuration_of,
)
from reproduction.figures import make_studies
from reproduction.mechanisms import (
    CORN,
    CORN_DEFAULTS,
    CORN_PAPER,
    CORN_TWO_INSIDERS,
    DECOR_PAPER,
    NONE,
    Mechanism,
)
from reproduction.run import reproduce
from tests.distributed.harness import is_alive

from .scales import TINY

ROOT = Path(__file__).parent.parent.parent


def first_training_cell(figure: str, *mechanisms: Mechanism) -> TrainingCell:
    scale = replace(TINY, mechanisms=mechanisms or TINY.mechanisms)
    cell = make_studies([figure], scale)[0].cells({})[0]
    assert isinstance(cell, TrainingCell)
    return cell


def step_sizes_of(cell: TrainingCell) -> list[float]:
    return list(dict.fromkeys(eta for _, eta in cell.trials))


def test_a_design_cell_is_the_design_of_the_library_at_cap_one() -> None:
    cell = DesignCell("ring:6", "corn", 10.0, 50.0, 1, "pairs")
    W = load_network("ring:6", mixing="gossip").mixing_matrix
    made = design(W, 1.0, objective=Horizon(10.0), threat=ThreatModel(1, "pairs"))
    found = cell.compute()
    assert found["one_step"] == pytest.approx(np.trace(W @ made.covariance @ W.T))
    assert found["accumulated"] == pytest.approx(
        float((Horizon(50.0).matrix(W) * made.covariance).sum())
    )


def test_noise_that_is_nearly_singular_keeps_its_budget_after_scaling(tmp_path: Path) -> None:
    """On complete graphs all noise cancels but a 20,000th: the check rounds up by over 1e-9."""
    mechanisms = (DECOR_PAPER, CORN_PAPER, CORN)
    cell = first_training_cell("fig4b", *mechanisms)
    cell = replace(cell, graph="er:n=20,p=1,seed=1", num_steps=2)
    runs = compute_cells([cell], CellStore(tmp_path), jobs=1)[cell]["runs"]
    assert {run["mechanism"] for run in runs} == {one.name for one in mechanisms}


def test_a_training_cell_gives_the_losses_of_the_library(tmp_path: Path) -> None:
    """One mechanism, from its cell and from the engine directly, at a cap other than 1."""
    mechanism = CORN_TWO_INSIDERS
    cell = first_training_cell("fig4b", mechanism)
    found = compute_cells([cell], CellStore(tmp_path), jobs=1)[cell]
    network = load_network(cell.graph, mixing="gossip")
    budget = mechanism.budget(cell.epsilon, cell.delta, cell.num_steps, cell.clip)
    made = design(
        network.mixing_matrix,
        budget.precision_cap,
        objective=mechanism.objective(cell.num_steps),
        threat=mechanism.threat,
    )
    result = learn.run_sweep(
        learn.Workload(cell.task, seed=cell.data_seed).build(6),
        network,
        [
            learn.Trial(learn.Mechanism.private(mechanism.name, made, budget), learn.Constant(size))
            for size in step_sizes_of(cell)
        ],
        settings=learn.SweepSettings(cell.num_steps, cell.batch_size, (0, 1)),
        evaluate_at=[cell.num_steps],
        show_progress=False,
    )
    losses = {(run["step_size"], run["seed"]): run["test_loss"] for run in found["runs"]}
    for row in result.last_rows:
        assert losses[str(row["step_size"]), int(row["seed"])] == pytest.approx(
            float(row["test_loss"]), rel=1e-4
        )


def test_a_line_with_defaults_is_trained_as_by_corn_train() -> None:
    """Momentum, cool-down and Poisson sampling of a sample, from the cell and from the library."""
    cell = replace(first_training_cell("fig5b-sample", CORN_DEFAULTS), num_steps=200, seeds=(0,))
    (run,) = cell.compute({CORN_DEFAULTS.name: cell.designs[CORN_DEFAULTS.name].compute()}, None)[
        "runs"
    ]
    problem = learn.Workload(
        cell.task, model=cell.model, partition=cell.partition, seed=cell.data_seed
    ).build(6)
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
    objective = default_objective(cell.num_steps)
    cap, threat = budget.precision_cap, CORN_DEFAULTS.threat
    noise = design(network.mixing_matrix, cap, objective=objective, threat=threat)
    result = learn.run_sweep(
        problem,
        network,
        [
            learn.Trial(learn.Mechanism.private("corn", noise, budget), learn.Constant(size))
            for size in step_sizes_of(cell)
        ],
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
    cell = replace(first_training_cell("fig4b"), trials=((NONE, 0.1), (NONE, 1e38)))
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
    cell, store = first_training_cell("fig4b", NONE), CellStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        compute_cells([cell], store, jobs=1)
    assert store.load(cell) is None


def stored_file(directory: Path) -> Path:
    (file,) = directory.rglob("output.pkl")
    return file


def test_a_damaged_file_counts_as_absent_and_is_replaced(tmp_path: Path) -> None:
    store, cell = CellStore(tmp_path), DesignCell("ring:6", "ldp", 1.0, 1.0)
    assert store.load(cell) is None
    store.save(cell, {"one_step": 1.0})
    whole = stored_file(tmp_path).read_bytes()
    for damaged in (b"", whole[:-5]):
        stored_file(tmp_path).write_bytes(damaged)
        assert store.load(cell) is None
        store.save(cell, {"one_step": 1.0})
        assert CellStore(tmp_path).load(cell) == {"one_step": 1.0}


@pytest.mark.parametrize(("name", "value"), [("_FORMAT", 99), ("__version__", "9.9")])
def test_results_of_another_format_or_version_count_as_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    store, cell = CellStore(tmp_path), DesignCell("ring:6", "ldp", 1.0, 1.0)
    store.save(cell, {"one_step": 1.0})
    assert store.load(cell) == {"one_step": 1.0}
    monkeypatch.setattr(f"reproduction.cells.{name}", value)
    assert store.load(cell) is None


def test_the_key_depends_on_every_setting() -> None:
    cell = first_training_cell("fig4a")
    other = {
        "task": "digits",
        "model": "network",
        "unit": "sample",
        "graph": "ring:6",
        "epsilon": 4.0,
        "trials": cell.trials[:2],
        "num_steps": 21,
        "schedule": "cosine",
        "seeds": (0, 1, 2),
        "delta": 1e-6,
        "clip": 0.2,
        "batch_size": 9,
        "partition": "iid",
        "data_seed": 3,
    }
    assert set(other) == set(cell.__dataclass_fields__)
    changed = {configuration_of(replace(cell, **{name: value})) for name, value in other.items()}  # type: ignore[arg-type]
    assert len(changed | {configuration_of(cell)}) == len(other) + 1


def test_the_key_does_not_depend_on_labels() -> None:
    cell = first_training_cell("fig4a")
    renamed = tuple((replace(one, label="another label"), eta) for one, eta in cell.trials)
    assert configuration_of(replace(cell, trials=renamed)) == configuration_of(cell)


def test_networks_mix_by_gossip_as_in_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever mixing is the default of the library."""
    asked: list[object] = []

    def load(source: str, *, mixing: Mixing) -> Network:
        asked.append(mixing)
        return load_network(source, mixing=mixing)

    monkeypatch.setattr("reproduction.cells.load_network", load)
    cell = first_training_cell("fig4b", NONE)
    cell.compute({}, None)
    DesignCell("ring:6", "ldp", 1.0, 1.0).compute()
    assert asked == ["gossip", "gossip"]


SLOW_CELLS = """
    import os, sys, time
    from pathlib import Path
    from reproduction.cells import CellStore, DesignCell, compute_cells

    class SlowCell(DesignCell):
        def compute(self):
            if self.horizon == 3:
                return {"one_step": 1.0}
            Path(self.graph, str(os.getpid())).touch()
            time.sleep(600)

    def interrupt(cell, is_new):
        while not list(directory.iterdir()):
            time.sleep(0.05)
        raise KeyboardInterrupt

    if __name__ == "__main__":
        directory, store = Path(sys.argv[1]), CellStore(Path(sys.argv[2]))
        cells = [SlowCell(str(directory), "ldp", float(h), 1.0) for h in sys.argv[3:]]
        compute_cells(cells, store, jobs=2, on_done=interrupt)
"""


def wait_until(is_true: Callable[[], bool], *, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [True, False])
def test_workers_end_with_the_process_that_started_them(tmp_path: Path, is_killed: bool) -> None:
    """The process is killed, or interrupted between two results, while a cell takes ten minutes."""
    script, marks = tmp_path / "slow.py", tmp_path / "marks"
    script.write_text(textwrap.dedent(SLOW_CELLS))
    marks.mkdir()
    horizons = ["1", "2"] if is_killed else ["1", "3"]
    arguments = [sys.executable, str(script), str(marks), str(tmp_path / "store"), *horizons]
    # The script is elsewhere, and Python looks for modules beside it.
    places = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        arguments, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": places}
    ) as process:
        try:
            if is_killed:
                wait_until(lambda: len(list(marks.iterdir())) == 2)
                process.kill()
            assert process.wait(120) != 0
        finally:
            process.kill()
    workers = [int(mark.name) for mark in marks.iterdir()]
    wait_until(lambda: not any(map(is_alive, workers)))


def test_two_processes_give_the_same_points_as_one(tmp_path: Path) -> None:
    one = reproduce(["fig1b"], TINY, store=CellStore(tmp_path / "one"), jobs=1)
    two = reproduce(["fig1b"], TINY, store=CellStore(tmp_path / "two"), jobs=2)
    assert one.panels == two.panels


def test_a_cluster_must_be_known_and_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CellStore(tmp_path)
    with pytest.raises(InvalidArgumentError, match="cluster must be dask"):
        compute_cells([], store, cluster="slurm")
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingExtraError, match="dask"):
        compute_cells([], store, cluster="dask")


@pytest.mark.slow
def test_a_dask_cluster_gives_the_same_results(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="needs the extra dask")
    cells = [DesignCell("ring:6", rule, 1.0, 10.0) for rule in ("ldp", "decor")]
    here = compute_cells(cells, CellStore(tmp_path / "here"), jobs=1)
    there = compute_cells(cells, CellStore(tmp_path / "there"), cluster="dask")
    for cell in cells:
        assert here[cell]["accumulated"] == pytest.approx(there[cell]["accumulated"])
