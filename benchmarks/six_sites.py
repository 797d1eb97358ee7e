"""Six hospitals of examples/six_hospitals.py against Opacus on their pooled rows, at the same ε.

Run in an environment with Opacus, which ``opacus_pooled.py`` describes::

    OMP_NUM_THREADS=1 /tmp/opacusenv/bin/python benchmarks/six_sites.py

CorN simulates the plan of the consortium file: 9000 to 40 rows, exact sums, against an eavesdropper
together with one hospital, replace-one adjacency. Opacus gets the pooled training rows, its own
sampler, noise and accountant (PRV), and add-or-remove-one adjacency, which needs less noise.
"""

from __future__ import annotations

import importlib
import runpy
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from corn.covariance import default_objective
from corn.learn import (
    Constant,
    SweepSettings,
    TrainingProblem,
    Trial,
    make_mechanisms,
    run_sweep,
)
from corn.learn.consortium import Consortium, load_consortium
from measuring import describe
from opacus_pooled import train_opacus

SEEDS = range(10)


def main() -> None:
    torch.set_num_threads(1)
    example = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "six_hospitals.py"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        example["write_files"](folder)
        consortium = load_consortium(folder / "consortium.toml")
        problem = consortium.make_workload(folder / "{site}.csv").build(len(consortium.sites))
    budget, network = consortium.make_budget(), consortium.load_network()
    made = make_mechanisms(
        ["corn"], network, budget, objective=default_objective(budget.num_steps, mixing="sum")
    )
    settings = SweepSettings(budget.num_steps, budget.batch_size, seeds=tuple(SEEDS))
    trials = [Trial(made[0], Constant(consortium.step_size))]
    result = run_sweep(problem, network, trials, settings=settings)
    ours = np.array([float(row["test_accuracy"]) for row in result.last_rows])
    theirs = np.array([train_pooled(problem, consortium, seed) for seed in SEEDS])
    inputs = problem.data.inputs
    print(f"{len(inputs):,} training rows; {budget.describe()}")
    for label, values in (("CorN, six sites", ours), ("Opacus, pooled rows", theirs)):
        print(f"{label:20s} test accuracy {describe(values)}")
    print(f"difference {ours.mean() - theirs.mean():+.4f}")


def train_pooled(problem: TrainingProblem, consortium: Consortium, seed: int) -> float:
    """Return the test accuracy of one run on the pooled rows, at the noise that Opacus asks for."""
    utils = importlib.import_module("opacus.accountants.utils")
    torch.manual_seed(seed)
    promise, training = consortium.promise, consortium.training
    rate = 1 / round(1 / (consortium.make_budget().query.sampling_rate or 1.0))
    noise_multiplier = utils.get_noise_multiplier(
        target_epsilon=promise.epsilon,
        target_delta=promise.delta,
        sample_rate=rate,
        steps=training.steps,
        accountant="prv",
    )
    model = nn.Linear(problem.data.inputs.shape[1], int(problem.data.targets.max()) + 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    accuracy, _ = train_opacus(
        problem,
        model,
        torch.optim.SGD(model.parameters(), training.step_size),
        rate=rate,
        clip=training.clip,
        noise_multiplier=noise_multiplier,
        num_steps=training.steps,
    )
    return accuracy


if __name__ == "__main__":
    main()
