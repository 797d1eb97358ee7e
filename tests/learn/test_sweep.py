"""Sweeps: measurements, runs that break down, interruptions, and refused settings."""

import math
import os
import re
import signal
import threading
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from corn.covariance import Decomposition
from corn.errors import (
    InvalidArgumentError,
)
from corn.learn import (
    COLUMNS,
    Constant,
    Mechanism,
    Result,
    Row,
    SweepSettings,
    TrainingProblem,
    Trial,
    run_sweep,
)
from corn.plan import make_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network

from .problems import BUDGET, NETWORK, SAMPLE_BUDGET, make_mechanism, make_problem
from .sweeps import SETTINGS, make_logistic, sweep


def test_measurements_are_complete_and_correct() -> None:
    result = sweep("corn", "none", evaluate_at=[0, 20])
    assert result.parameters.shape == (4, 6, 5)
    assert (result.status, result.num_steps, result.notes) == ("complete", 40, ())
    assert sorted({row["step"] for row in result.rows}) == [0, 20, 40]
    assert all(tuple(row) == COLUMNS for row in result.rows)
    last = {(row["mechanism"], row["seed"]): row for row in result.last_rows}
    corn, none = last["corn", 1], last["none", 1]
    start = result.rows[0]
    assert start["train_loss"] == pytest.approx(math.log(2))
    assert float(none["train_loss"]) < math.log(2)
    assert start["consensus_distance"] == 0 < float(corn["consensus_distance"])
    assert none["noise_norm"] == 0 < float(corn["noise_norm"])
    assert math.isnan(float(none["simulated_epsilon"]))
    assert (corn["unit"], none["unit"]) == ("agent", "")
    problem = make_logistic()
    _, parts = problem.place(SETTINGS)
    own = problem.task.evaluate(result.parameters[2], *parts["test"])
    assert corn["test_loss"] == pytest.approx(own.loss.mean().item())
    joint = problem.task.evaluate(result.parameters[2].mean(0, keepdim=True), *parts["test"])
    assert corn["test_loss_of_average"] == pytest.approx(joint.loss.item())


def test_epsilon_grows_with_steps_up_to_the_budget() -> None:
    budget = PrivacyBudget(10, 1e-5, num_steps=40, clip=0.5)
    trials = [Trial(make_mechanism("corn", budget), Constant(0.1))]
    result = run_sweep(make_logistic(), NETWORK, trials, settings=replace(SETTINGS, seeds=(0,)))
    spent = [float(row["simulated_epsilon"]) for row in result.rows]
    assert spent[0] == 0
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(10, rel=1e-6)
    assert spent[-1] <= 10 * (1 + 1e-9)
    by_agent = trials[0].mechanism.epsilon_spent(40)
    assert by_agent is not None
    assert by_agent.shape == (6,)
    assert by_agent.max() == spent[-1]


def test_central_training_equals_training_on_the_average() -> None:
    """With very little noise the server's model is that of non-private training on the average."""
    weak = PrivacyBudget(1e8, 1e-5, num_steps=300, clip=5)
    trials = [
        Trial(Mechanism.central(weak, 6), Constant(0.3)),
        Trial(Mechanism.non_private(weak.query), Constant(0.3)),
    ]
    settings = SweepSettings(300, None, dtype="float64")
    result = run_sweep(
        make_logistic(), load_network("complete:6", mixing="gossip"), trials, settings=settings
    )
    torch.testing.assert_close(result.parameters[0], result.parameters[1], rtol=0, atol=0.05)
    assert float(result.last_rows[0]["train_accuracy"]) > 0.7


def test_peak_memory_does_not_grow_with_the_number_of_steps() -> None:
    peaks = []
    for steps in (30, 30, 2000):
        budget = PrivacyBudget(10, 1e-5, num_steps=2000, clip=0.5)
        trials = [Trial(make_mechanism("ldp", budget), Constant(0.1))]
        settings = SweepSettings(steps, 8, dtype="float64")
        tracemalloc.start()
        run_sweep(make_logistic(), NETWORK, trials, settings=settings, evaluate_at=[])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    noise_of_all_steps = 2000 * 6 * 5 * 8
    # Python keeps up to 2000 freed tuples of a size for later: up to 0.15 MB, whatever the steps.
    assert peaks[2] - peaks[1] < noise_of_all_steps / 2


def test_a_run_that_breaks_down_stops_and_the_others_continue() -> None:
    """A huge step size overflows float32 within a few steps on the quadratic."""
    task, data = make_problem("quadratic", torch.float32)
    method = Mechanism.non_private()
    trials = [Trial(method, Constant(eta)) for eta in (1e-3, 1e12)]
    settings = SweepSettings(60, 1, seeds=(0, 1))
    result = run_sweep(
        TrainingProblem(task, data), NETWORK, trials, settings=settings, evaluate_at=[59]
    )
    assert set(result.stopped) == {("none", "1e+12", 0), ("none", "1e+12", 1)}
    why = result.stopped["none", "1e+12", 0]
    assert re.match(r"stopped at step [1-5]?[0-9]: its gradients are not finite", why)
    assert torch.isnan(result.parameters[1]).all()
    assert torch.isfinite(result.parameters[0]).all()
    alone = run_sweep(TrainingProblem(task, data), NETWORK, trials[:1], settings=settings)
    torch.testing.assert_close(result.parameters[0], alone.parameters[0])
    assert result.last_values("train_loss")["none", "1e+12"] == [math.inf] * 2


def test_the_progress_bar_is_drawn_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    sweep("corn")
    assert "training" in capsys.readouterr().err


def test_a_diverging_loss_stops_its_run_before_it_overflows() -> None:
    task, data = make_problem("quadratic")
    trials = [Trial(Mechanism.non_private(), Constant(10.0))]
    settings = SweepSettings(40, 1, dtype="float64")
    result = run_sweep(
        TrainingProblem(task, data), NETWORK, trials, settings=settings, evaluate_at=range(41)
    )
    assert result.stopped["none", "10", 0].partition(": ")[2].startswith("its loss diverged")


def test_ctrl_c_leaves_a_usable_result() -> None:
    def press(rows: Sequence[Row]) -> None:
        if rows[0]["step"] == 10:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    result = sweep("corn", "none", evaluate_at=range(0, 41, 10), on_step=press)
    assert (result.status, result.num_steps) == ("interrupted", 10)
    assert torch.isfinite(result.parameters).all()
    assert max(int(row["step"]) for row in result.rows) == 10
    assert signal.getsignal(signal.SIGINT) == before


def test_progress_off_a_terminal_tells_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep("corn", "none")
    assert capsys.readouterr().err == "", "nothing is said about a run of seconds"
    monkeypatch.setattr("corn.learn.sweep._SECONDS_BETWEEN_LINES", 0.0)
    sweep("corn", "none")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 39
    assert re.fullmatch(r"training 4 runs: step 20 of 40, 0:00:\d\d left", lines[19])
    sweep("corn", "none", show_progress=False)
    assert capsys.readouterr().err == ""


def test_a_sweep_runs_outside_the_main_thread() -> None:
    found: list[Result] = []
    thread = threading.Thread(target=lambda: found.append(sweep("none")))
    thread.start()
    thread.join()
    assert found[0].status == "complete"


@pytest.mark.parametrize(
    ("methods", "change", "message"),
    [
        (["none", "none"], {}, "different in name or step size, found none, step size 0.1"),
        ([], {}, "trials must be at least one"),
        (["corn"], {"num_steps": 401}, "at most 400, found 401"),
        (["sample"], {"batch_size": 9}, "batch_size must be 8, for which privacy was counted"),
        (["corn", "sample"], {}, "one unit, batch size and sampling"),
    ],
)
def test_sweeps_that_would_break_a_promise_are_refused(
    methods: list[str], change: dict[str, Any], message: str
) -> None:
    made = [
        make_mechanism("ldp", SAMPLE_BUDGET) if name == "sample" else make_mechanism(name)
        for name in methods
    ]
    trials = [Trial(method, Constant(0.1)) for method in made]
    with pytest.raises(InvalidArgumentError, match=message):
        run_sweep(make_logistic(), NETWORK, trials, settings=replace(SETTINGS, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"num_steps": 0},
        {"batch_size": 0},
        {"seeds": ()},
        {"seeds": (1, 1)},
        {"seeds": (-1,)},
        {"seeds": (0.5,)},
        {"dtype": "float16"},
        {"device": "abacus"},
        {"cooldown_steps": -1},
    ],
)
def test_bad_settings_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(change))):
        replace(SETTINGS, **change)


def test_data_and_noise_must_have_one_part_per_agent() -> None:
    trials = [Trial(make_mechanism("ldp"), Constant(0.1))]
    with pytest.raises(InvalidArgumentError):
        run_sweep(
            make_logistic(), load_network("ring:4", mixing="gossip"), trials, settings=SETTINGS
        )
    other = Mechanism.private("other", Decomposition(np.full(4, 1e6)), BUDGET)
    with pytest.raises(InvalidArgumentError):
        run_sweep(make_logistic(), NETWORK, [Trial(other, Constant(1))], settings=SETTINGS)


def test_a_result_without_noise_states_that_it_protects_nobody() -> None:
    assert sweep("none", evaluate_at=[0]).privacy == "no noise: the models protect nobody"


def test_a_result_states_a_promise_once_and_each_of_its_adversaries() -> None:
    mechanisms = [make_mechanism(name) for name in ("decor", "ldp", "central", "none")]
    text = sweep("decor", "ldp", "central", "none").privacy
    budget = mechanisms[0].budget
    assert budget is not None
    assert text.count(budget.describe()) == 1
    for mechanism in mechanisms[:3]:
        assert text.count(f"against {mechanism.against}") == 1
        assert text.count(f"({mechanism.name})") == 1
    assert "(none)" not in text


def test_secret_keys_are_for_one_trial() -> None:
    """Two trials of a method would release different gradients with the same noise."""
    plan = make_plan(NETWORK, BUDGET, mechanism="ldp")
    trials = [Trial(Mechanism.from_plan(plan), Constant(step_size)) for step_size in (0.1, 0.2)]
    settings = SweepSettings(2, None, noise_keys="secret")
    with pytest.raises(InvalidArgumentError, match="trials must be one for a run with secret keys"):
        run_sweep(make_logistic(), NETWORK, trials, settings=settings)
