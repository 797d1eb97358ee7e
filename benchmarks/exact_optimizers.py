"""SGD with momentum and Adam on exact sums, next to a trusted server and to gossip.

    OMP_NUM_THREADS=1 python benchmarks/exact_optimizers.py [--data-dir DATA] [--seeds N] [--tune]

One sample is protected, against one insider; the server's noise holds against readers of its models
only. Every agent's samples are clipped and drawn by Poisson sampling. All methods of a seed have
the same batches; exact sums and the server have the same standard normals too. Differences are
paired by seeds, with Student's 95 % interval. MNIST is used if DATA or CORN_DATA has it, else the
embedded digits. Step sizes were chosen on MNIST by validation accuracy on two other seeds, from
partial grids, after other rules had been tried (docs/results/exact-sums.md); ``--tune`` repeats the
choice on whole grids. Exact sums and the server share one.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import stats

from corn.checks import FloatArray
from corn.covariance import default_objective
from corn.learn import (
    Result,
    SweepSettings,
    TrainingProblem,
    make_grid,
    make_methods,
    make_workload,
    run_sweep,
)
from corn.privacy import PrivacyBudget
from corn.threads import limit_threads
from corn.topology import Mixing, choose_cooldown, load_network

_GRAPH, _DELTA, _CLIP, _MOMENTUM = "er:n=20,p=0.2,seed=1", 1e-5, 1.0, 0.9
_TUNING_SEEDS, _MOST_MEASURED = (1000, 1001), 2000
# Steps and expected samples per agent and step.
_SIZES = {"network": (120, 64), "cnn": (60, 16)}
_GRID = {"sgd": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0), "adam": (0.002, 0.005, 0.01, 0.02, 0.05)}
# By model, ε, mixing and optimizer.
_STEP_SIZES: dict[tuple[str, float, Mixing, str], float] = {
    ("network", 1.0, "sum", "sgd"): 8.0,
    ("network", 1.0, "sum", "adam"): 0.01,
    ("network", 1.0, "gossip", "sgd"): 4.0,
    ("network", 0.1, "sum", "sgd"): 1.0,
    ("network", 0.1, "sum", "adam"): 0.01,
    ("network", 0.1, "gossip", "sgd"): 0.5,
    ("cnn", 1.0, "sum", "sgd"): 8.0,
    ("cnn", 1.0, "sum", "adam"): 0.02,
    ("cnn", 1.0, "gossip", "sgd"): 4.0,
    ("cnn", 0.1, "sum", "sgd"): 2.0,
    ("cnn", 0.1, "sum", "adam"): 0.02,
    ("cnn", 0.1, "gossip", "sgd"): 1.0,
}


@dataclass(frozen=True)
class Setting:
    """A model at an ε, with its problem and its budget."""

    model: str
    epsilon: float
    problem: TrainingProblem

    @property
    def budget(self) -> PrivacyBudget:
        """The promise for one sample of an agent, whose number of samples decides its rate."""
        num_steps, batch_size = _SIZES[self.model]
        return PrivacyBudget.for_sizes(
            self.problem.data.sizes,
            epsilon=self.epsilon,
            delta=_DELTA,
            num_steps=num_steps,
            clip=_CLIP,
            batch_size=batch_size,
        )

    def train(
        self,
        mixing: Mixing,
        optimizer: str,
        step_sizes: Sequence[float],
        seeds: Sequence[int],
        *,
        names: Sequence[str],
        measured_on: str,
    ) -> Result:
        """Train the methods of these names with all step sizes."""
        network, budget = load_network(_GRAPH, mixing=mixing), self.budget
        # The momentum of Algorithm 1, for which noise of gossip is designed.
        momentum = _MOMENTUM if optimizer == "sgd" else 0.0
        objective = default_objective(budget.num_steps, momentum=momentum)
        methods = make_methods(names, network, budget, objective=objective)
        settings = SweepSettings(
            num_steps=budget.num_steps,
            batch_size=budget.batch_size,
            seeds=tuple(seeds),
            cooldown_steps=choose_cooldown(network, budget.num_steps),
            momentum=momentum,
            optimizer=torch.optim.Adam if optimizer == "adam" else None,
        )
        trials = make_grid(methods, step_sizes=step_sizes)
        return run_sweep(
            replace(self.problem, parts={measured_on: self.problem.parts[measured_on]}),
            network,
            trials,
            settings=settings,
            evaluate_at=[budget.num_steps],
            max_train_samples=100,
            show_progress=False,
        )


def make_problem(model: str, directory: str | None) -> TrainingProblem:
    """Return MNIST or the digits, with at most 2000 samples to measure on."""
    made = make_workload("mnist", 20, model=model, partition="iid", directory=directory)
    # Under gossip all agents' models are measured, which would take longer than training.
    parts = {name: (X[:_MOST_MEASURED], y[:_MOST_MEASURED]) for name, (X, y) in made.parts.items()}
    return replace(made, parts=parts)


def tune(setting: Setting, mixing: Mixing, optimizer: str) -> float:
    """Return the step size with which CorN has the largest validation accuracy."""
    sizes = _GRID[optimizer]
    result = setting.train(
        mixing, optimizer, sizes, _TUNING_SEEDS, names=("corn",), measured_on="validation"
    )
    found = result.average("validation_accuracy")
    return float(max(found, key=found.__getitem__)[1])


def score(result: Result, method: str) -> FloatArray:
    """Return the test accuracy of each seed, on average over the agents' own models."""
    return np.array([float(row["test_accuracy"]) for row in result.select(method)])


def describe(values: FloatArray, digits: str = ".4f") -> str:
    """Return mean ± half the width of Student's 95 % interval."""
    count = len(values)
    if count < 2:
        return f"{values.mean():{digits}}"
    half = stats.t.ppf(0.975, count - 1) * values.std(ddof=1) / math.sqrt(count)
    return f"{values.mean():{digits}} ± {half:.4f}"


CASES: tuple[tuple[Mixing, str], ...] = (("sum", "sgd"), ("sum", "adam"), ("gossip", "sgd"))


def main() -> None:
    """Print a table with one line for each model, ε and optimizer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", help="directory of data sets; by default that of CORN_DATA")
    parser.add_argument("--models", nargs="+", choices=list(_SIZES), default=list(_SIZES))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 0.1])
    parser.add_argument("--seeds", type=int, default=2, help="two take about 140 s of CPU time")
    parser.add_argument("--tune", action="store_true", help="choose step sizes, and print them")
    arguments = parser.parse_args()
    limit_threads()
    start = time.process_time()
    columns = ("exact sums", "trusted server", "sums − server", "gossip")
    print("model    ε     optimizer  " + "  ".join(f"{name:<17}" for name in columns))
    for model in arguments.models:
        problem = make_problem(model, arguments.data_dir)
        for note in problem.notes:
            print(f"note: {note}")
        for epsilon in arguments.epsilons:
            setting, found = Setting(model, epsilon, problem), {}
            for mixing, optimizer in CASES:
                size = _STEP_SIZES.get((model, epsilon, mixing, optimizer))
                if arguments.tune or size is None:
                    size = tune(setting, mixing, optimizer)
                    print(f"{(model, epsilon, mixing, optimizer)}: {size},", flush=True)
                names = ("corn", "central") if mixing == "sum" else ("corn",)
                found[mixing, optimizer] = setting.train(
                    mixing,
                    optimizer,
                    [size],
                    range(arguments.seeds),
                    names=names,
                    measured_on="test",
                )
            for optimizer in ("sgd", "adam"):
                sums, server = (score(found["sum", optimizer], m) for m in ("corn", "central"))
                cells = [describe(sums), describe(server), describe(sums - server, "+.4f")]
                # Adam is refused under gossip: each agent would divide by its own second moment.
                gossip = "refused"
                if optimizer == "sgd":
                    own = score(found["gossip", "sgd"], "corn")
                    gossip = f"{describe(own)} (sums − gossip {describe(sums - own, '+.4f')})"
                row = "  ".join(f"{cell:<17}" for cell in cells)
                print(f"{model:<8} {epsilon:<5g} {optimizer:<9}  {row}  {gossip}", flush=True)
    print(f"{time.process_time() - start:.0f} s of CPU time")


if __name__ == "__main__":
    main()
