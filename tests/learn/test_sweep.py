"""Sweeps: measurements, runs that break, interruptions, checkpoints, writers, tuning."""

import csv
import math
import os
import signal
import sys
import threading
import tracemalloc
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corn.covariance import design
from corn.errors import (
    FileFormatError,
    InfeasibleError,
    InvalidArgumentError,
    MissingExtraError,
)
from corn.learn import (
    COLUMNS,
    Constant,
    Contender,
    InverseSqrt,
    Problem,
    Result,
    Row,
    SweepSettings,
    Variant,
    make_grid,
    require_writers,
    run_sweep,
    summarize_contenders,
    tune,
    write_table,
    write_tensorboard,
)
from corn.learn.monitor import summarize
from corn.privacy import ClippedQuery, PrivacyBudget
from corn.topology import load_network

from .problems import BUDGET, NETWORK, SAMPLE_BUDGET, make_contender, make_problem, make_samples

SETTINGS = SweepSettings(40, 8, seeds=(0, 1), dtype="float64")


def make_logistic() -> Problem:
    task, data = make_problem("logistic")
    raw = data.inputs[:, :-1]  # without the constant feature, which the problem adds
    X, y = make_samples(60, 4, 2, seed=9)
    parts = {"validation": (X[:20], y[:20]), "test": (X[20:], y[20:])}
    return Problem(task, replace(data, inputs=raw), parts, ("a note",))


def sweep(*mechanisms: str, step_size: float = 0.1, **options: Any) -> Result:
    variants = [Variant(make_contender(name), Constant(step_size)) for name in mechanisms]
    settings = options.pop("settings", SETTINGS)
    return run_sweep(make_logistic(), NETWORK, variants, settings=settings, **options)


def test_measurements_are_complete_and_right() -> None:
    result = sweep("corn", "none", evaluate_at=[0, 20])
    assert result.parameters.shape == (4, 6, 5)
    assert (result.status, result.num_steps, result.notes) == ("complete", 40, ("a note",))
    assert sorted({row["step"] for row in result.rows}) == [0, 20, 40]
    assert all(tuple(row) == COLUMNS for row in result.rows)
    last = {(row["contender"], row["seed"]): row for row in result.last_rows}
    corn, none = last["corn", 1], last["none", 1]
    start = result.rows[0]
    assert start["train_loss"] == pytest.approx(math.log(2))
    assert float(none["train_loss"]) < math.log(2)
    assert start["consensus_distance"] == 0 < float(corn["consensus_distance"])
    assert none["noise_norm"] == 0 < float(corn["noise_norm"])
    assert math.isnan(float(none["epsilon"]))
    assert (corn["unit"], none["unit"]) == ("agent", "")
    problem = make_logistic()
    _, parts = problem.place(SETTINGS)
    own = problem.task.evaluate(result.parameters[2], *parts["test"])
    assert corn["test_loss"] == pytest.approx(own.loss.mean().item())
    joint = problem.task.evaluate(result.parameters[2].mean(0, keepdim=True), *parts["test"])
    assert corn["test_loss_of_average"] == pytest.approx(joint.loss.item())


def test_epsilon_grows_with_steps_up_to_the_budget() -> None:
    budget = PrivacyBudget(10, 1e-5, num_steps=40, clip=0.5)
    variants = [Variant(make_contender("corn", budget), Constant(0.1))]
    result = run_sweep(make_logistic(), NETWORK, variants, settings=replace(SETTINGS, seeds=(0,)))
    spent = [float(row["epsilon"]) for row in result.rows]
    assert spent[0] == 0
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(10, rel=1e-6)
    assert spent[-1] <= 10 * (1 + 1e-9)
    by_agent = variants[0].contender.epsilon_spent(40)
    assert by_agent is not None
    assert by_agent.shape == (6,)
    assert by_agent.max() == spent[-1]


def test_central_noise_is_accounted_like_an_agent_at_the_cap() -> None:
    budget = PrivacyBudget(10, 1e-5, num_steps=40, clip=0.5)
    spent = Contender.central(budget, 6).epsilon_spent(40)
    assert spent is not None
    np.testing.assert_allclose(spent, 10, rtol=1e-6)


def test_central_really_trains_on_the_data() -> None:
    """With hardly any noise the server ends where non-private training on the average does."""
    weak = PrivacyBudget(1e8, 1e-5, num_steps=300, clip=5)
    variants = [
        Variant(Contender.central(weak, 6), Constant(0.3)),
        Variant(Contender.non_private(weak.query), Constant(0.3)),
    ]
    settings = SweepSettings(300, None, dtype="float64")
    result = run_sweep(make_logistic(), load_network("complete:6"), variants, settings=settings)
    torch.testing.assert_close(result.parameters[0], result.parameters[1], rtol=0, atol=0.05)
    assert float(result.last_rows[0]["train_accuracy"]) > 0.7


def test_peak_memory_does_not_grow_with_the_number_of_steps() -> None:
    peaks = []
    for steps in (30, 30, 500):
        budget = PrivacyBudget(10, 1e-5, num_steps=1000, clip=0.5)
        variants = [Variant(make_contender("ldp", budget), Constant(0.1))]
        settings = SweepSettings(steps, 8, dtype="float64")
        tracemalloc.start()
        run_sweep(make_logistic(), NETWORK, variants, settings=settings, evaluate_at=[])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    noise_of_all_steps = 500 * 6 * 5 * 8
    assert peaks[2] - peaks[1] < noise_of_all_steps / 5


def test_a_run_that_breaks_stops_and_the_others_go_on() -> None:
    """A huge step size overflows float32 within a few steps on the quadratic."""
    task, data = make_problem("quadratic", torch.float32)
    contender = Contender.non_private()
    variants = [Variant(contender, Constant(eta)) for eta in (1e-3, 1e12)]
    settings = SweepSettings(60, 1, seeds=(0, 1))
    result = run_sweep(Problem(task, data), NETWORK, variants, settings=settings, evaluate_at=[59])
    assert set(result.stopped) == {("none", "1e+12", 0), ("none", "1e+12", 1)}
    message = result.stopped["none", "1e+12", 0]
    assert message.startswith("stopped at step")
    assert "smaller step size" in message
    assert torch.isnan(result.parameters[1]).all()
    assert torch.isfinite(result.parameters[0]).all()
    alone = run_sweep(Problem(task, data), NETWORK, variants[:1], settings=settings)
    torch.testing.assert_close(result.parameters[0], alone.parameters[0])
    assert result.average("train_loss")["none", "1e+12"] == math.inf
    assert result.best_step_sizes("train_loss") == {"none": "0.001"}


def test_an_exploding_loss_stops_its_run_before_it_overflows() -> None:
    task, data = make_problem("quadratic")
    variants = [Variant(Contender.non_private(), Constant(10.0))]
    settings = SweepSettings(40, 1, dtype="float64")
    result = run_sweep(
        Problem(task, data), NETWORK, variants, settings=settings, evaluate_at=range(41)
    )
    assert "its loss exploded" in result.stopped["none", "10", 0]


def test_ctrl_c_leaves_a_usable_result() -> None:
    def press(rows: Sequence[Row]) -> None:
        if rows[0]["step"] == 10:
            os.kill(os.getpid(), signal.SIGINT)

    result = sweep("corn", "none", evaluate_at=range(0, 41, 10), on_rows=press)
    assert (result.status, result.num_steps) == ("interrupted", 10)
    assert torch.isfinite(result.parameters).all()
    assert max(int(row["step"]) for row in result.rows) == 10
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outside_the_main_thread_it_runs_too() -> None:
    found: list[Result] = []
    thread = threading.Thread(target=lambda: found.append(sweep("none")))
    thread.start()
    thread.join()
    assert found[0].status == "complete"


@pytest.mark.parametrize("interrupt_at", [10, 13])
def test_resuming_gives_the_same_result_to_the_last_bit(tmp_path: Path, interrupt_at: int) -> None:
    def press(rows: Sequence[Row]) -> None:
        if rows[0]["step"] == interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)

    settings = replace(SETTINGS, cooldown_rounds=2, dtype="float32")
    options: dict[str, Any] = {
        "settings": settings,
        "evaluate_at": [0, 13, 20],
        "checkpoint": tmp_path / "c.pt",
        "checkpoint_every": 10,
    }
    options["evaluate_at"] = [0, 10, 13, 20]
    whole = sweep("corn", "ldp", **{**options, "checkpoint": None})
    part = sweep("corn", "ldp", **options, on_rows=press)
    assert part.num_steps == interrupt_at
    resumed = sweep("corn", "ldp", **options, resume=True)
    assert torch.equal(whole.parameters, resumed.parameters)
    np.testing.assert_equal(resumed.rows, whole.rows)
    again = sweep("corn", "ldp", **options, resume=True)
    assert torch.equal(whole.parameters, again.parameters)


def test_resuming_remembers_what_was_stopped(tmp_path: Path) -> None:
    task, data = make_problem("quadratic", torch.float32)
    variants = [Variant(Contender.non_private(), Constant(eta)) for eta in (1e-3, 1e12)]
    options: dict[str, Any] = {
        "settings": SweepSettings(60, 1),
        "checkpoint": tmp_path / "c.pt",
        "checkpoint_every": 20,
    }
    first = run_sweep(Problem(task, data), NETWORK, variants, **options)
    again = run_sweep(Problem(task, data), NETWORK, variants, **options, resume=True)
    assert first.stopped == again.stopped != {}
    torch.testing.assert_close(first.parameters, again.parameters, equal_nan=True)


def test_a_checkpoint_fits_no_other_sweep(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    sweep("corn", checkpoint=path)
    with pytest.raises(FileFormatError, match="other data, network, contenders or settings"):
        sweep("ldp", checkpoint=path, resume=True)
    path.write_bytes(b"no checkpoint")
    with pytest.raises(FileFormatError, match="not a checkpoint"):
        sweep("corn", checkpoint=path, resume=True)


def test_tuning_chooses_on_validation_for_each_contender() -> None:
    contenders = [make_contender(name) for name in ("ldp", "none")]
    tuning = tune(make_logistic(), NETWORK, contenders, settings=SETTINGS, step_sizes=(0.5, 1e-4))
    validation = tuning.result.average("validation_loss")
    for name, schedule in tuning.schedules.items():
        own = {size: value for (found, size), value in validation.items() if found == name}
        assert own[schedule.describe()] == min(own.values())
    assert tuning.schedules["none"] == Constant(0.5)
    assert tuning.score("test_loss").keys() == {"ldp", "none"}


def test_tuning_needs_validation_and_a_run_that_holds() -> None:
    task, data = make_problem("quadratic", torch.float32)
    contender = Contender.non_private()
    with pytest.raises(InvalidArgumentError, match="validation"):
        tune(Problem(task, data), NETWORK, [contender], settings=SETTINGS)
    parts = {"validation": (data.inputs, data.targets)}
    with pytest.raises(InfeasibleError, match="every run broke down"):
        tune(
            Problem(task, data, parts),
            NETWORK,
            [contender],
            settings=SweepSettings(60, 1),
            step_sizes=[1e12],
        )


def test_a_contender_that_breaks_down_does_not_hide_the_others() -> None:
    """Clipped gradients stay small whatever the step size; unclipped ones do not."""
    task, data = make_problem("quadratic", torch.float32)
    contenders = [make_contender("none"), make_contender("unclipped")]
    problem = Problem(task, data, {"validation": (data.inputs, data.targets)})
    settings = SweepSettings(60, 1)
    tuning = tune(problem, NETWORK, contenders, settings=settings, step_sizes=[1e4])
    assert list(tuning.schedules) == ["none"]
    summary = summarize_contenders(problem, tuning)
    assert summary["unclipped"]["step_size"] is None
    assert "train_loss" in summary["none"]


def test_grid_has_the_paper_s_step_sizes() -> None:
    grid = make_grid([Contender.non_private()], schedule="inverse-sqrt")
    assert [v.schedule for v in grid] == [InverseSqrt(s) for s in (0.1, 0.05, 0.01, 0.005, 0.001)]


def test_csv_has_every_measurement(tmp_path: Path) -> None:
    result = sweep("corn", "none")
    write_table(result.rows, tmp_path / "new" / "t.csv")
    with (tmp_path / "new" / "t.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == len(result.rows)
    assert float(rows[-1]["test_loss"]) == result.rows[-1]["test_loss"]
    assert rows[-1]["epsilon"] == ""


def test_other_tables_need_what_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("pyarrow.parquet", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"corn-dsgd\[parquet\]"):
        write_table([], tmp_path / "t.parquet")
    with pytest.raises(MissingExtraError, match=r"corn-dsgd\[tensorboard\]"):
        write_tensorboard([], tmp_path)
    with pytest.raises(FileFormatError, match=r"must end in \.csv"):
        write_table([], tmp_path / "t.txt")


def test_parquet_and_tensorboard_get_every_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for both libraries, which are not installed everywhere."""
    tables: list[dict[str, list[Any]]] = []
    scalars: list[tuple[str, str, float, int]] = []

    class Writer:
        def __init__(self, directory: str) -> None:
            self.directory = directory

        def __enter__(self) -> "Writer":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars.append((self.directory, name, value, step))

    arrow = types.SimpleNamespace(table=lambda columns: columns)
    parquet = types.SimpleNamespace(write_table=lambda table, _: tables.append(table))
    board = types.SimpleNamespace(SummaryWriter=Writer)
    for name, module in (
        ("pyarrow", arrow),
        ("pyarrow.parquet", parquet),
        ("torch.utils.tensorboard", board),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    require_writers(parquet=True, tensorboard=True)
    rows = sweep("corn").rows
    write_table(rows, tmp_path / "t.parquet")
    assert tables[0]["test_loss"] == [row["test_loss"] for row in rows]
    write_tensorboard(rows, tmp_path / "board")
    assert {Path(where).name for where, *_ in scalars} == {"seed 0", "seed 1"}
    losses = [(value, step) for _, name, value, step in scalars if name == "test_loss"]
    assert sorted(losses) == sorted((row["test_loss"], row["step"]) for row in rows)


def test_the_progress_bar_is_drawn_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep("corn")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    sweep("corn")
    shown = capsys.readouterr().err
    assert "training" in shown
    sweep("corn", show_progress=False)
    assert capsys.readouterr().err == ""


def test_the_progress_line_names_loss_and_epsilon() -> None:
    rows = sweep("corn", "none").last_rows
    assert summarize(rows).startswith("best test loss 0.")
    assert ", ε 3." in summarize(rows) or ", ε 2." in summarize(rows)
    assert summarize([]) == ""


@pytest.mark.parametrize(
    ("contenders", "change", "message"),
    [
        (["none", "none"], {}, "found twice: none, step size 0.1"),
        ([], {}, "at least one variant"),
        (["corn"], {"num_steps": 401}, "at most 400, for which the budget"),
        (["sample"], {"batch_size": 9}, "batch_size must be 8, for which privacy was counted"),
        (["corn", "sample"], {}, "same unit, batch size and sampling rate"),
    ],
)
def test_sweeps_that_would_break_a_promise(
    contenders: list[str], change: dict[str, Any], message: str
) -> None:
    made = [
        make_contender("ldp", SAMPLE_BUDGET) if name == "sample" else make_contender(name)
        for name in contenders
    ]
    variants = [Variant(contender, Constant(0.1)) for contender in made]
    with pytest.raises(InvalidArgumentError, match=message):
        run_sweep(make_logistic(), NETWORK, variants, settings=replace(SETTINGS, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"num_steps": 0},
        {"batch_size": 0},
        {"seeds": ()},
        {"seeds": (1, 1)},
        {"seeds": (-1,)},
        {"dtype": "float16"},
        {"device": "abacus"},
        {"cooldown_rounds": -1},
    ],
)
def test_bad_settings(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(change))):
        replace(SETTINGS, **change)


def test_noise_that_does_not_keep_the_budget_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="does not keep its budget"):
        Contender.private("weak", np.eye(6), BUDGET)
    with pytest.raises(InvalidArgumentError, match="does not keep its budget"):
        Contender.private("zero-sum", 1e9 * (np.eye(6) - 1 / 6), BUDGET)


def test_clipping_that_the_budget_does_not_count_on_is_impossible() -> None:
    """Samples clipped one by one must not be sold as an agent's privacy, nor noise for one unit
    used for another.
    """
    shares = make_contender("ldp").noise
    for query in (SAMPLE_BUDGET.query, ClippedQuery(0.6), None):
        with pytest.raises(InvalidArgumentError, match="must clip as its budget says"):
            Contender("wrong", shares, query, BUDGET)
    with pytest.raises(InvalidArgumentError, match="both noise and the budget"):
        Contender("wrong", shares, BUDGET.query)
    with pytest.raises(InvalidArgumentError, match="a reference without a guarantee"):
        Contender.private("none", design(NETWORK.mixing_matrix, 1.0, mechanism="none"), BUDGET)


def test_wrong_number_of_agents() -> None:
    variants = [Variant(make_contender("ldp"), Constant(0.1))]
    with pytest.raises(InvalidArgumentError, match="data must be of 4 agents"):
        run_sweep(make_logistic(), load_network("ring:4"), variants, settings=SETTINGS)
    other = Contender.private("other", np.eye(4) * 1e6, BUDGET)
    with pytest.raises(InvalidArgumentError, match="must be for 6 agents, found 4"):
        run_sweep(make_logistic(), NETWORK, [Variant(other, Constant(1))], settings=SETTINGS)


def test_poisson_sampled_runs() -> None:
    pytest.importorskip("dp_accounting")
    query = ClippedQuery(0.5, unit="sample", batch_size=8, sampling_rate=0.25)
    variants = [Variant(Contender.non_private(query), Constant(0.3))]
    result = run_sweep(
        make_logistic(), NETWORK, variants, settings=replace(SETTINGS, num_steps=200)
    )
    assert float(result.last_rows[0]["train_loss"]) < 0.6
