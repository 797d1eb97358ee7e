"""A small sweep that several tests run."""

from dataclasses import replace
from typing import Any

from corn.learn import (
    Constant,
    Result,
    SweepSettings,
    TrainingProblem,
    Trial,
    run_sweep,
)

from .problems import NETWORK, make_mechanism, make_problem, make_samples

SETTINGS = SweepSettings(40, 8, seeds=(0, 1), dtype="float64")


def make_logistic() -> TrainingProblem:
    task, data = make_problem("logistic")
    raw = data.inputs[:, :-1]  # without the constant feature, which the problem adds
    X, y = make_samples(60, 4, 2, seed=9)
    parts = {"validation": (X[:20], y[:20]), "test": (X[20:], y[20:])}
    return TrainingProblem(task, replace(data, inputs=raw), parts)


def sweep(*mechanisms: str, step_size: float = 0.1, **options: Any) -> Result:
    trials = [Trial(make_mechanism(name), Constant(step_size)) for name in mechanisms]
    settings = options.pop("settings", SETTINGS)
    return run_sweep(make_logistic(), NETWORK, trials, settings=settings, **options)


def average(result: Result, column: str) -> dict[tuple[str, str], float]:
    return {key: sum(own) / len(own) for key, own in result.last_values(column).items()}
