"""Success rate of an attacker who must tell two files apart that differ in one row.

Run ``python benchmarks/split_attack.py [--runs N] [--epsilon E]``.

Real agents train for one step on one of two files, under add-remove adjacency of samples. The
attacker knows both files, the seed of the split and the plan, and reads one weight of the published
model. The rows were chosen against a split by position: those that the last row would move into
training pull the weight one way, and those that it would move out of it the other way. ε allows a
success rate of e^ε/(1 + e^ε), and a split in which one row moves no other keeps to it.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import numpy as np
import torch
from scipy.stats import binomtest

from corn import PrivacyBudget, make_plan
from corn.distributed import RunSettings, launch
from corn.learn import Constant, FileWorkload
from corn.learn.batches import Batch
from corn.learn.partition import split_samples
from corn.plan import save_plan

ROWS, BATCH, RATE, DELTA = 1000, 250, 0.5, 1e-5


def write_candidates(folder: Path, salt: int) -> list[FileWorkload]:
    """Write the file of agent 0 with and without its last row, and the same file of agent 1."""
    trained = np.zeros((2, ROWS))
    for case, count in enumerate((ROWS, ROWS - 1)):
        trained[case, split_samples(count, seed=0).train] = 1
    pull = trained[0] - trained[1]
    pull[-1] = 1
    workloads = []
    for case, count in enumerate((ROWS, ROWS - 1)):
        own = folder / f"candidate-{case}"
        own.mkdir(exist_ok=True)
        # The numbers tell rows apart. Their bounds make them too small to matter.
        rows = [f"{salt + k},{pull[k]:g},yes" for k in range(count)]
        (own / "agent-0.csv").write_text("\n".join(["number,pull,ill", *rows]))
        others = [f"{k},0,yes" for k in range(ROWS)]
        (own / "agent-1.csv").write_text("\n".join(["number,pull,ill", *others]))
        bounds = {"number": (-1e12, 1e12)}
        workloads.append(
            FileWorkload(
                own / "agent-{agent}.csv", "ill", classes=("no", "yes"), bounds=bounds, l2=0.0
            )
        )
    return workloads


def sum_gradients(workload: FileWorkload) -> torch.Tensor:
    """Return the sum of the clipped gradients of agent 0 at the first model."""
    problem = workload.build(2, [0])
    data, task = problem.data, problem.task
    weights = torch.ones(1, len(data.targets), dtype=torch.float64)
    batch = Batch(task.prepare(data.inputs)[None], data.targets[None], weights, is_average=False)
    start = task.initialize(0).float().view(1, 1, -1)
    clip = torch.ones(1, dtype=torch.float64)
    return task.gradient(start, batch, sample_clip=clip).values.flatten()


def find_candidates(folder: Path) -> tuple[list[FileWorkload], list[torch.Tensor]]:
    """Return two candidates, of which only one trains on the last row."""
    for salt in range(0, 100 * ROWS, ROWS):
        workloads = write_candidates(folder, salt)
        sums = [sum_gradients(own) for own in workloads]
        if not torch.equal(*sums):
            return workloads, sums
    raise RuntimeError("the last row was held out in all of 100 files")


def main() -> None:
    """Attack runs of real agents, and print the success rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--epsilon", type=float, default=1.0)
    options = parser.parse_args()
    budget = PrivacyBudget(
        options.epsilon,
        DELTA,
        num_steps=1,
        clip=1.0,
        unit="sample",
        adjacency="add-remove",
        sampling="poisson",
        batch_size=BATCH,
        sampling_rate=RATE,
    )
    plan = make_plan("complete:2", budget)
    right = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workloads, sums = find_candidates(folder)
        apart = sums[0] - sums[1]
        weight = int(apart.abs().argmax())
        print(f"the sums of clipped gradients are {float(apart.norm()):.2f} C apart")
        # One step of size 1, averaged over two agents, of which the other does not pull.
        middle = -0.5 * RATE / BATCH * float((sums[0] + sums[1])[weight]) / 2
        secrets = np.random.default_rng().integers(0, 2, options.runs)
        for run, secret in enumerate(secrets):
            save_plan(plan, folder / f"{run}.corn")
            result = launch(
                folder / f"{run}.corn",
                workloads[secret],
                out=folder / f"run-{run}",
                settings=RunSettings(Constant(1.0)),
                keys=folder / f"{run}.keys",
            )
            published = float(result.measured.average_parameters[0, weight])
            # A larger sum of gradients makes a smaller weight.
            is_first = (published < middle) == bool(apart[weight] > 0)
            right += is_first == (secret == 0)
    allowed = 1 / (1 + math.exp(-options.epsilon)) + DELTA
    doubt = binomtest(right, options.runs, allowed, alternative="greater").pvalue
    print(
        f"{right} of {options.runs} guesses are right, ε = {options.epsilon:g} allows "
        f"{allowed:.1%} (p = {doubt:.2g}, one sample, clipped to 1, against an eavesdropper "
        "together with one insider)"
    )


if __name__ == "__main__":
    main()
