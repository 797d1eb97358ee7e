"""The search for step sizes: it reaches the best place, and its runs are those of one sweep."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from corn.covariance import default_objective
from corn.learn import (
    Constant,
    Trial,
    make_mechanisms,
    run_sweep,
    tune,
)
from corn.learn import tuning as search_module
from corn.learn.metrics import Result
from corn.learn.tuning import expect_place, half_width, propose_places, step_size_at
from corn.privacy import PrivacyBudget

from .problems import NETWORK, make_mechanism
from .sweeps import SETTINGS, average, make_logistic


@given(start=st.integers(-9, 9), shift=st.integers(-10, 10), slope=st.floats(0.05, 3))
def test_a_valley_is_found_wherever_it_is(start: int, shift: int, slope: float) -> None:
    """From three places, a search ends at the least of any unimodal loss within its reach."""
    best = start + shift

    def loss(place: int) -> float:
        return math.exp(slope * abs(place - best))

    losses = {place: loss(place) for place in (start - 2, start, start + 2)}
    for _ in range(12):
        new = propose_places(losses, start=start)
        if not new:
            break
        losses |= {place: loss(place) for place in new}
    assert not propose_places(losses, start=start)
    assert min(losses, key=losses.__getitem__) == best
    assert len(losses) <= 10


def test_a_search_ends_where_nothing_more_is_gained() -> None:
    assert propose_places({0: 1.0, 2: 0.7, 4: 0.699}, start=2) == (3,)
    assert propose_places({0: 1.0, 2: 0.7, 3: 0.7, 4: 0.699}, start=2) == ()
    falling = {place: 0.5**place for place in range(-10, 11, 2)}
    assert propose_places(falling, start=0) == (9,)
    assert propose_places({0: math.inf, 2: math.inf, 4: math.inf}, start=2) == (-2,)


def test_more_noise_and_more_steps_start_lower() -> None:
    problem = make_logistic()
    none, ldp, central = (make_mechanism(name) for name in ("none", "ldp", "central"))
    places = [
        expect_place(mechanism, problem, 10, "constant") for mechanism in (ldp, central, none)
    ]
    assert places[0] < places[1] <= places[2]
    assert expect_place(none, problem, 1000, "constant") < places[2]
    # A falling schedule begins higher.
    assert expect_place(none, problem, 1000, "inverse-sqrt") > expect_place(
        none, problem, 1000, "constant"
    )


@pytest.mark.parametrize("names", [("ldp", "none"), ("ldp", "unclipped")])
def test_rounds_give_the_runs_of_one_sweep(names: tuple[str, ...]) -> None:
    """Under Poisson sampling, a mechanism that does not clip is not trained on other batches."""
    budget = PrivacyBudget(
        3, 1e-4, num_steps=40, clip=0.5, unit="sample", batch_size=8, sampling_rate=0.9
    )
    problem = make_logistic()
    mechanisms = make_mechanisms(names, NETWORK, budget, objective=default_objective(40))
    found = tune(problem, NETWORK, mechanisms, settings=SETTINGS).result
    together = run_sweep(problem, NETWORK, found.trials, settings=SETTINGS)
    assert average(found, "test_loss") == pytest.approx(average(together, "test_loss"))
    torch.testing.assert_close(found.parameters, together.parameters)
    assert [row["step"] for row in found.rows] == sorted(row["step"] for row in found.rows)


def test_the_search_finds_what_a_fine_grid_has() -> None:
    problem, mechanism = make_logistic(), make_mechanism("ldp")
    found = tune(problem, NETWORK, [mechanism], settings=SETTINGS).result
    grid = [Trial(mechanism, Constant(step_size_at(place))) for place in range(-12, 10)]
    best = min(
        average(run_sweep(problem, NETWORK, grid, settings=SETTINGS), "validation_loss").values()
    )
    assert min(average(found, "validation_loss").values()) <= best * 1.02


def test_an_interrupted_round_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def run(*arguments: object, **options: object) -> Result:
        result: Result = run_sweep(*arguments, **options)  # type: ignore[arg-type]
        return replace(result, status="interrupted") if next(calls) == 1 else result

    monkeypatch.setattr(search_module, "run_sweep", run)
    found = tune(make_logistic(), NETWORK, [make_mechanism("none")], settings=SETTINGS).result
    assert (found.status, len(found.trials), next(calls)) == ("interrupted", 3, 2)


def test_ends_of_a_grid_are_named() -> None:
    mechanisms = [make_mechanism("none")]
    problem = make_logistic()
    for sizes, ends in (((1e-4, 1e-3), {"none": "largest"}), ((1e-3,), {})):
        found = tune(problem, NETWORK, mechanisms, settings=SETTINGS, step_sizes=sizes)
        assert found.ends == ends


def test_intervals_are_student_s() -> None:
    trials = [Trial(make_mechanism("ldp"), Constant(0.1))]
    settings = replace(SETTINGS, seeds=(0, 1, 2, 3))
    result = run_sweep(make_logistic(), NETWORK, trials, settings=settings)
    losses = [float(row["test_loss"]) for row in result.last_rows]
    low, high = stats.t.interval(0.95, 3, loc=np.mean(losses), scale=stats.sem(losses))
    assert half_width(losses) == pytest.approx((high - low) / 2)
    assert result.last_values("test_loss")["ldp", "0.1"] == losses
    single = run_sweep(make_logistic(), NETWORK, trials, settings=replace(SETTINGS, seeds=(0,)))
    assert math.isnan(half_width(single.last_values("test_loss")["ldp", "0.1"]))


def test_without_validation_samples_the_training_loss_decides() -> None:
    problem = replace(make_logistic(), parts={})
    settings = replace(SETTINGS, num_steps=2)
    tuning = tune(
        problem, NETWORK, [make_mechanism("ldp")], settings=settings, step_sizes=(0.1, 0.2)
    )
    losses = average(tuning.result, "train_loss")
    assert losses["ldp", tuning.schedules["ldp"].describe()] == min(losses.values())
