"""Six hospitals of examples/six_hospitals.py against Opacus on their pooled rows, at the same ε.

Run in an environment with Opacus, which ``opacus_peer.py`` describes::

    OMP_NUM_THREADS=1 /tmp/opacusenv/bin/python benchmarks/six_sites.py

CorN simulates the plan of the consortium file: 9000 to 40 rows, exact sums, against an eavesdropper
together with one hospital, replace-one adjacency. Opacus gets the pooled training rows, its own
sampler, noise and accountant (PRV), and add-or-remove-one adjacency, which needs less noise.
"""

from __future__ import annotations

import importlib
import math
import runpy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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

SEEDS = range(10)


def main() -> None:
    warnings.filterwarnings("ignore", module="opacus|torch")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
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
    theirs = np.array([train_opacus(problem, consortium, seed) for seed in SEEDS])
    inputs = problem.data.inputs
    print(f"{len(inputs):,} training rows; {budget.describe()}")
    for label, values in (("CorN, six sites", ours), ("Opacus, pooled rows", theirs)):
        half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
        print(f"{label:20s} test accuracy {values.mean():.4f} ± {half:.4f}")
    print(f"difference {ours.mean() - theirs.mean():+.4f}")


def train_opacus(problem: TrainingProblem, consortium: Consortium, seed: int) -> float:
    """Return the test accuracy of one run on the pooled rows."""
    opacus = importlib.import_module("opacus")
    torch.manual_seed(seed)
    promise, training = consortium.promise, consortium.training
    inputs, targets = problem.data.inputs.float(), problem.data.targets
    # Opacus samples at a rate of one over the number of batches.
    num_batches = round(1 / (consortium.make_budget().query.sampling_rate or 1.0))
    model = nn.Linear(inputs.shape[1], int(targets.max()) + 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), training.step_size)
    loader: Any = DataLoader(
        TensorDataset(inputs, targets), batch_size=math.ceil(len(inputs) / num_batches)
    )
    engine = opacus.PrivacyEngine(accountant="prv")
    private, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=promise.epsilon,
        target_delta=promise.delta,
        epochs=training.steps / num_batches,
        max_grad_norm=training.clip,
    )
    step = 0
    while step < training.steps:
        for X, y in loader:
            optimizer.zero_grad()
            loss: Any = nn.functional.cross_entropy(private(X), y)
            loss.backward()
            optimizer.step()
            step += 1
            if step == training.steps:
                break
    X, y = problem.parts["test"]
    with torch.no_grad():
        return float((model(X.float()).argmax(dim=1) == y).double().mean())


if __name__ == "__main__":
    main()
