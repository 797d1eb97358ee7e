"""Step sizes: schedules, and the best on validation loss."""

import numpy as np
import pytest
import torch

from corn.errors import (
    InfeasibleError,
    InvalidArgumentError,
)
from corn.learn import (
    Constant,
    InverseSqrt,
    Mechanism,
    SweepSettings,
    TrainingProblem,
    tune,
)
from corn.learn.schedule import Cosine, make_schedule

from .problems import NETWORK, make_mechanism, make_problem
from .sweeps import SETTINGS, average, make_logistic


def test_tuning_chooses_on_validation_for_each_method() -> None:
    mechanisms = [make_mechanism(name) for name in ("ldp", "none")]
    tuning = tune(make_logistic(), NETWORK, mechanisms, settings=SETTINGS, step_sizes=(0.5, 1e-4))
    validation = average(tuning.result, "validation_loss")
    for name, schedule in tuning.schedules.items():
        own = {size: value for (found, size), value in validation.items() if found == name}
        assert own[schedule.describe()] == min(own.values())
    assert tuning.schedules["none"] == Constant(0.5)
    assert tuning.score("test_loss").keys() == {"ldp", "none"}


def test_tuning_needs_a_finite_run() -> None:
    task, data = make_problem("quadratic", torch.float32)
    mechanism = Mechanism.non_private()
    parts = {"validation": (data.inputs, data.targets)}
    with pytest.raises(InfeasibleError):
        tune(
            TrainingProblem(task, data, parts),
            NETWORK,
            [mechanism],
            settings=SweepSettings(60, 1),
            step_sizes=[1e12],
        )


def test_a_method_that_breaks_down_does_not_hide_the_others() -> None:
    """Clipped gradients stay small at any step size; unclipped ones do not."""
    task, data = make_problem("quadratic", torch.float32)
    mechanisms = [make_mechanism("none"), make_mechanism("unclipped")]
    problem = TrainingProblem(task, data, {"validation": (data.inputs, data.targets)})
    settings = SweepSettings(60, 1)
    tuning = tune(problem, NETWORK, mechanisms, settings=settings, step_sizes=[1e4])
    assert list(tuning.schedules) == ["none"]
    summary = tuning.summary
    assert summary["unclipped"]["step_size"] is None
    assert "train_loss" in summary["none"]


def test_schedules_have_their_step_sizes() -> None:
    assert Constant(0.1).at(7, 10) == 0.1
    assert InverseSqrt(0.01).at(100, 100) == pytest.approx(0.001)
    assert Cosine(0.2).at(1, 11) == pytest.approx(0.2)
    assert Cosine(0.2).at(6, 10) == pytest.approx(0.1)
    assert Cosine(0.2).at(10, 10) > 0
    assert Cosine(0.2).at(1, 1) == pytest.approx(0.2)
    assert make_schedule(0.1, "cosine") == Cosine(0.1)
    assert make_schedule(np.float32(0.5)) == Constant(0.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        make_schedule("0.1")  # type: ignore[arg-type]
    assert make_schedule(Constant(3)) == Constant(3)
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InvalidArgumentError):
            make_schedule(bad)
    with pytest.raises(InvalidArgumentError, match="constant, inverse-sqrt, cosine"):
        make_schedule(0.1, "linear")  # type: ignore[arg-type]
