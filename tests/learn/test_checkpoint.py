"""Checkpoints: resumed to the last bit, and refused by any other sweep."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from corn.errors import (
    FileFormatError,
)
from corn.learn import (
    Constant,
    Mechanism,
    Row,
    SweepSettings,
    TrainingProblem,
    Trial,
    run_sweep,
)
from corn.learn.sweep import load_checkpoint
from corn.learn.tasks import ModuleTask

from .problems import NETWORK, make_mechanism, make_problem
from .sweeps import SETTINGS, make_logistic, sweep


@pytest.mark.parametrize(("interrupt_at", "momentum"), [(10, 0.0), (13, 0.0), (13, 0.8)])
def test_resuming_gives_the_same_result_to_the_last_bit(
    tmp_path: Path, interrupt_at: int, momentum: float
) -> None:
    def press(rows: Sequence[Row]) -> None:
        if rows[0]["step"] == interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)

    settings = replace(SETTINGS, cooldown_steps=2, dtype="float32", momentum=momentum)
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


def test_a_resumed_sweep_keeps_its_stopped_runs(tmp_path: Path) -> None:
    task, data = make_problem("quadratic", torch.float32)
    trials = [Trial(Mechanism.non_private(), Constant(eta)) for eta in (1e-3, 1e12)]
    options: dict[str, Any] = {
        "settings": SweepSettings(60, 1),
        "checkpoint": tmp_path / "c.pt",
        "checkpoint_every": 20,
    }
    first = run_sweep(TrainingProblem(task, data), NETWORK, trials, **options)
    again = run_sweep(TrainingProblem(task, data), NETWORK, trials, **options, resume=True)
    assert first.stopped == again.stopped != {}
    torch.testing.assert_close(first.parameters, again.parameters, equal_nan=True)


def test_a_checkpoint_fits_no_other_sweep(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    sweep("corn", checkpoint=path)
    with pytest.raises(FileFormatError, match="other data, network, mechanisms or settings"):
        sweep("ldp", checkpoint=path, resume=True)
    problem = make_logistic()
    X, y = problem.parts["test"]
    trials = [Trial(make_mechanism("corn"), Constant(0.1))]
    for changed in ({"test": (X + 1, y)}, {"test": (X[1:], y[1:])}, {}):
        with pytest.raises(FileFormatError):
            run_sweep(
                replace(problem, parts=changed),
                NETWORK,
                trials,
                settings=SETTINGS,
                checkpoint=path,
                resume=True,
            )
    path.write_bytes(b"no checkpoint")
    with pytest.raises(FileFormatError):
        load_checkpoint(path, fingerprint="")
    torch.save(torch.zeros(3), path)
    with pytest.raises(FileFormatError):
        load_checkpoint(path, fingerprint="")
    with pytest.raises(FileFormatError):
        load_checkpoint(tmp_path, fingerprint="")


def test_a_checkpoint_fits_no_other_module(tmp_path: Path) -> None:
    """The initial parameters do not reflect losses and layers without parameters."""
    data = replace(make_logistic().data)
    linear = nn.Linear(4, 2)
    settings = replace(SETTINGS, num_steps=3)
    options: dict[str, Any] = {"settings": settings, "checkpoint": tmp_path / "c.pt"}
    trials = [Trial(make_mechanism("none"), Constant(0.1))]
    for layer, loss, fits in (
        (nn.Tanh(), functional.cross_entropy, True),
        (nn.Tanh(), functional.cross_entropy, True),
        (nn.ReLU(), functional.cross_entropy, False),
        (nn.Tanh(), functional.nll_loss, False),
    ):
        problem = TrainingProblem(ModuleTask(nn.Sequential(linear, layer), loss), data)
        if fits:
            run_sweep(problem, NETWORK, trials, **options, resume=True)
            continue
        with pytest.raises(FileFormatError):
            run_sweep(problem, NETWORK, trials, **options, resume=True)
