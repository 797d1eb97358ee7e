"""The small CNN on MNIST at the sample level: CorN against LDP, DECOR, a trusted server and none.

Every run is one line of a CSV file, written when it ends. The same command continues an interrupted
benchmark: runs that the file has are not repeated. Seed 0 chooses each method's step size among
powers of two, by validation loss. The other seeds run at that step size only.

    OMP_NUM_THREADS=1 python benchmarks/cnn_mnist.py --data-dir DATA --out docs/results/cnn/runs.csv
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from corn.covariance import EAVESDROPPER, default_objective
from corn.learn import (
    Constant,
    Method,
    Simulation,
    SweepSettings,
    TrainingProblem,
    Trial,
    make_methods,
    make_workload,
)
from corn.learn.metrics import Samples
from corn.privacy import PrivacyBudget
from corn.threads import limit_threads
from corn.topology import load_network

_GRAPH, _DELTA, _CLIP, _COOLDOWN = "er:n=20,p=0.2,seed=1", 1e-5, 1.0, 25
_METHODS = ("corn", "decor", "ldp", "central")
_COLUMNS = (
    "epsilon",
    "method",
    "step_size",
    "seed",
    "validation_loss",
    "test_accuracy",
    "test_accuracy_of_average",
    "disagreement",
    "seconds",
)
# The step size to begin with at the largest ε; the search leaves it if a neighbour is better.
_FIRST_STEP_SIZE = 4.0


@dataclass(frozen=True)
class Setting:
    """One cell of the table: a method at an ε, infinite without noise."""

    epsilon: float
    method: str


class Trials:
    """Runs of the benchmark, each computed once and kept in a file."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments, self._path = arguments, Path(arguments.out)
        self._network = load_network(_GRAPH)
        self._problem = make_workload(
            "mnist",
            self._network.num_agents,
            model="cnn",
            directory=arguments.data_dir,
            stand_in=False,
        )
        self._rows: dict[tuple[Setting, float, int], dict[str, float]] = dict(self._read())
        self._methods: dict[Setting, Method] = {}

    def run(self, setting: Setting, step_size: float, seed: int) -> dict[str, float]:
        """Return the scores of one run, from the file if it has them."""
        key = (setting, step_size, seed)
        if key not in self._rows:
            self._rows[key] = self._train(self._make(setting), step_size, seed)
            self._write(key)
        return self._rows[key]

    def tune(self, setting: Setting, start: float, factors: tuple[float, ...]) -> float:
        """Return the step size with the least validation loss on seed 0.

        The search multiplies ``start`` by one factor as long as this helps, then by the next.
        """

        def loss(step_size: float) -> float:
            return self.run(setting, step_size, 0)["validation_loss"]

        best = start
        for factor in factors:
            while loss(best * factor) < loss(best):
                best *= factor
        return best

    def _make(self, setting: Setting) -> Method:
        if setting not in self._methods:
            budget = self._budget(1.0 if math.isinf(setting.epsilon) else setting.epsilon)
            (self._methods[setting],) = make_methods(
                [setting.method],
                self._network,
                budget,
                objective=default_objective(self._arguments.steps),
                threat=EAVESDROPPER,
            )
        return self._methods[setting]

    def _budget(self, epsilon: float) -> PrivacyBudget:
        batch = self._arguments.batch_size
        return PrivacyBudget(
            epsilon,
            _DELTA,
            self._arguments.steps,
            _CLIP,
            unit="sample",
            batch_size=batch,
            samples_per_agent=min(self._problem.data.sizes),
        )

    def _train(self, method: Method, step_size: float, seed: int) -> dict[str, float]:
        start = time.perf_counter()
        settings = SweepSettings(
            num_steps=self._arguments.steps,
            batch_size=self._arguments.batch_size,
            seeds=(seed,),
            cooldown_steps=_COOLDOWN,
        )
        data, parts = self._problem.place(settings)
        simulation = Simulation(
            self._problem.task,
            data,
            self._network,
            [Trial(method, Constant(step_size))],
            settings=settings,
        )
        for _ in range(settings.num_steps):
            simulation.advance()
        simulation.cool_down()
        models = simulation.parameters[0, :, 0]
        validation, _ = score_own(self._problem, models, parts["validation"])
        _, own = score_own(self._problem, models, parts["test"])
        joint = self._problem.task.evaluate(models.mean(dim=0, keepdim=True), *parts["test"])
        spread = (models - models.mean(dim=0)).square().sum(dim=1).mean().sqrt()
        return {
            "validation_loss": validation,
            "test_accuracy": own,
            "test_accuracy_of_average": math.nan
            if joint.accuracy is None
            else float(joint.accuracy),
            "disagreement": float(spread),
            "seconds": time.perf_counter() - start,
        }

    def _read(self) -> Iterator[tuple[tuple[Setting, float, int], dict[str, float]]]:
        if not self._path.exists():
            return
        with self._path.open(newline="") as file:
            for row in csv.DictReader(file):
                setting = Setting(float(row["epsilon"]), row["method"])
                key = (setting, float(row["step_size"]), int(row["seed"]))
                yield key, {name: float(row[name]) for name in _COLUMNS[4:]}

    def _write(self, key: tuple[Setting, float, int]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self._path.exists()
        setting, step_size, seed = key
        with self._path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if is_new:
                writer.writerow(_COLUMNS)
            scores = (f"{value:.6g}" for value in self._rows[key].values())
            writer.writerow([f"{setting.epsilon:g}", setting.method, step_size, seed, *scores])


def score_own(
    problem: TrainingProblem, models: torch.Tensor, samples: Samples
) -> tuple[float, float]:
    """Return loss and accuracy of the agents' own models, each on its own share of the samples.

    The shares are disjoint and cover all samples: an unbiased estimate of the average over agents,
    at the price of measuring one model.
    """
    losses, hits = 0.0, 0.0
    for agent, model in enumerate(models):
        inputs, targets = (part[agent :: len(models)] for part in samples)
        found = problem.task.evaluate(model[None], inputs, targets)
        losses += float(found.loss) * len(inputs)
        hits += math.nan if found.accuracy is None else float(found.accuracy) * len(inputs)
    return losses / len(samples[0]), hits / len(samples[0])


def describe(accuracies: list[float]) -> str:
    """Return mean ± half the width of the 95 % interval."""
    mean, count = float(np.mean(accuracies)), len(accuracies)
    if count == 1:
        return f"{mean:.4f} (one run)"
    half = stats.t.ppf(0.975, count - 1) * np.std(accuracies, ddof=1) / math.sqrt(count)
    return f"{mean:.4f} ± {half:.4f}"


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", required=True, help="directory of data sets, with mnist")
    parser.add_argument("--out", required=True, help="CSV file of all runs")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.5, 1, 2, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args()
    limit_threads()
    trials = Trials(arguments)
    chosen: dict[Setting, float] = {}
    for method in (*_METHODS, "none"):
        step_size = _FIRST_STEP_SIZE
        epsilons = sorted(arguments.epsilons, reverse=True) if method != "none" else [math.inf]
        for epsilon in epsilons:
            setting = Setting(epsilon, method)
            # Less ε is more noise, for which a larger step size is not tried.
            factors = (0.5, 2.0) if epsilon == epsilons[0] else (0.5,)
            chosen[setting] = step_size = trials.tune(setting, step_size, factors)
    # All cells get their second run before the first gets its third.
    for seed in range(1, arguments.seeds):
        for setting, step_size in chosen.items():
            trials.run(setting, step_size, seed)
    for setting, step_size in chosen.items():
        runs = [trials.run(setting, step_size, seed) for seed in range(arguments.seeds)]
        own = describe([row["test_accuracy"] for row in runs])
        average = describe([row["test_accuracy_of_average"] for row in runs])
        cell = f"ε = {setting.epsilon:g}  {setting.method:8s} step size {step_size:g}"
        print(f"{cell}  own models {own}  average {average}")


if __name__ == "__main__":
    main()
