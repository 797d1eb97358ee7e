"""``corn.compare`` and data frames."""

import sys
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

import corn
from corn.errors import CornError, MissingExtraError
from corn.learn import Comparison
from corn.learn.metrics import COLUMNS, make_frame, write_table
from corn.learn.problem import read_samples

N = 4


def make_data() -> list[tuple[Any, Any]]:
    random = np.random.default_rng(0)
    inputs = random.standard_normal((N, 40, 3)).astype(np.float32)
    return [(own, (own[:, 0] > 0).astype(np.int64)) for own in inputs]


def compare(network: Any = None, **options: Any) -> Comparison:
    budget = corn.PrivacyBudget(30, 1e-5, num_steps=20, clip=1.0)
    data = make_data()
    torch.manual_seed(0)
    return corn.compare(
        network or nx.cycle_graph(N),
        budget,
        model=nn.Linear(3, 2),
        loss=nn.functional.cross_entropy,
        datasets=data,
        test=data[0],
        step_sizes=(0.1, 0.5),
        show_progress=False,
        **options,
    )


def test_mechanisms_are_compared_on_an_own_model(tmp_path: Path) -> None:
    np.save(tmp_path / "R.npy", np.eye(N) + 2 * (np.eye(N) - 1 / N))
    names = ("corn", "ldp", "central", "none", f"mine={tmp_path / 'R.npy'}")
    found = compare(mechanisms=names, seeds=(0, 1))
    assert set(found.summary) == {"corn", "ldp", "central", "none", "mine"}
    for name, facts in found.summary.items():
        assert 0 <= float(str(facts["test_accuracy"])) <= 1
        spent = facts["simulated_epsilon"]
        assert spent is None if name == "none" else spent == pytest.approx(30)
    assert "eavesdropper" in str(found.summary["mine"]["against"])


def test_an_objective_may_be_a_function_of_the_mixing_matrix() -> None:
    network, run = corn.load_network("path:4", mixing="gossip"), corn.FiniteRun([0.5, 0.1])
    losses = [
        compare(network, mechanisms=("corn",), objective=objective).summary["corn"]["train_loss"]
        for objective in (run, run.matrix, corn.Horizon(20))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] != pytest.approx(losses[2], rel=1e-5)
    with pytest.raises(CornError, match="objective must be of the shape"):
        compare(network, mechanisms=("corn",), objective=np.eye(N + 1))


def test_differences_are_paired_by_seed() -> None:
    found = compare(mechanisms=["corn", "ldp", "none"], seeds=range(6))
    keys = found.best_step_sizes
    last = {(r["mechanism"], r["step_size"], r["seed"]): r for r in found.result.last_rows}
    for name, (mean, width) in found.differences("test_loss", to="ldp").items():
        own, other = (
            [float(last[each, keys[each], seed]["test_loss"]) for seed in range(6)]
            for each in (name, "ldp")
        )
        expected = scipy.stats.ttest_rel(own, other)
        interval = expected.confidence_interval(0.95)
        assert mean == pytest.approx((interval.low + interval.high) / 2)
        assert width == pytest.approx((interval.high - interval.low) / 2)
    assert found.reference == "corn"
    assert set(found.differences("test_loss")) == {"ldp", "none"}
    assert found.summary["ldp"]["differences"]["test_loss"] == pytest.approx(  # type: ignore[index]
        found.differences("test_loss")["ldp"]
    )
    assert found.summary["corn"]["differences"] == {}
    with pytest.raises(CornError, match="to must be one of corn, ldp, none, found 'decor'"):
        found.differences("test_loss", to="decor")


def test_data_is_found_by_the_labels_of_a_graph() -> None:
    names = ["north", "east", "south", "west"]
    labelled = nx.cycle_graph(names)
    data = dict(zip(names, make_data(), strict=True))
    backwards = dict(reversed(data.items()))

    def train(datasets: Any) -> torch.Tensor:
        torch.manual_seed(0)
        return corn.train(
            corn.load_network(labelled, mixing="gossip"),
            model=nn.Linear(3, 2),
            loss=nn.functional.cross_entropy,
            datasets=datasets,
            num_steps=3,
            cooldown_steps=0,
        ).parameters

    expected = train(make_data())
    assert torch.equal(train(backwards), expected)
    assert not torch.equal(train(list(backwards.values())), expected)
    with pytest.raises(CornError, match=r"a key of datasets must be .* 'up': names are north, "):
        train({**{name: data[name] for name in names[:3]}, "up": data["west"]})
    broken = {**data, "south": (data["south"][0] * np.nan, data["south"][1])}
    with pytest.raises(CornError, match="inputs of agent south must be finite"):
        train(broken)


def test_results_become_data_frames(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="needs the extra pandas")
    found = compare(mechanisms=("corn", "none"))
    frame = found.result.to_pandas()
    assert tuple(frame.columns) == COLUMNS
    assert len(frame) == len(found.result.rows)
    tidy = found.to_pandas()
    assert tuple(tidy.columns) == (*COLUMNS, "is_best")
    assert set(tidy[tidy.is_best].step_size) == set(found.best_step_sizes.values())
    write_table(found.result.rows, tmp_path / "metrics.csv")
    written = pandas.read_csv(tmp_path / "metrics.csv", dtype={"step_size": str})
    pandas.testing.assert_frame_equal(written.fillna({"unit": ""}), frame, check_dtype=False)
    table = pandas.DataFrame({"a": [1.0, 2.0], "b": [0.5, 1.5]})
    inputs, targets = read_samples((table, pandas.Series([0, 1])))
    assert inputs.tolist() == [[1.0, 0.5], [2.0, 1.5]]
    assert targets.tolist() == [0, 1]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"corn-dsgd\[pandas\]"):
        make_frame([])
