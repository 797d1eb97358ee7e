"""Accuracy on MNIST when one sample is protected: CorN, LDP, DECOR, a trusted server and none.

Every run is one line of FOLDER/MODEL.csv, written when it ends. The same command continues an
interrupted benchmark: runs that the file has are not repeated. Seed 0 chooses each method's step
size among powers of two, by validation accuracy. The other seeds run at that step size only.

    OMP_NUM_THREADS=1 python benchmarks/one_sample.py linear --data-dir DATA
    OMP_NUM_THREADS=1 python benchmarks/one_sample.py network --data-dir DATA
    OMP_NUM_THREADS=1 python benchmarks/one_sample.py cnn --data-dir DATA
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy import stats

from corn.covariance import DEFAULT_THREAT, EAVESDROPPER, default_objective
from corn.learn import (
    Constant,
    Mechanism,
    Simulation,
    SweepSettings,
    TrainingProblem,
    Trial,
    Workload,
    make_mechanisms,
)
from corn.learn.metrics import Samples
from corn.privacy import PrivacyBudget
from corn.report.figures import MECHANISM_COLOURS, LineEnd, label_ends, save_figure
from corn.threads import limit_threads
from corn.topology import load_network

_GRAPH, _DELTA, _CLIP, _COOLDOWN = "er:n=20,p=0.2,seed=1", 1e-5, 1.0, 25
_METHODS = ("corn", "corn-1-insider", "decor", "ldp", "central")
# Steps, batch size and values of ε of each model. 120 steps of the CNN take half a minute.
_SETTINGS = {
    "linear": (300, 128, (0.05, 0.1, 0.25, 0.5, 1, 2, 4)),
    "network": (300, 128, (0.05, 0.1, 0.25, 0.5, 1, 2, 4)),
    "cnn": (120, 32, (0.05, 0.1, 0.25, 0.5, 1, 2, 4)),
}
_LABELS = {
    "none": "no noise",
    "central": "trusted server",
    "corn": "CorN",
    "corn-1-insider": "CorN, one insider",
    "decor": "DECOR",
    "ldp": "LDP",
}
_COLUMNS = (
    "epsilon",
    "method",
    "step_size",
    "seed",
    "validation_loss",
    "validation_accuracy",
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
        self._path = arguments.out / f"{arguments.model}.csv"
        self._num_steps, self._batch_size, _ = _SETTINGS[arguments.model]
        self._objective = default_objective(self._num_steps)
        self._network = load_network(_GRAPH, mixing="gossip")
        self._problem = Workload(
            "mnist", model=arguments.model, directory=arguments.data_dir
        ).build(self._network.num_agents)
        self._rows: dict[tuple[Setting, float, int], dict[str, float]] = dict(self._read())
        self._methods: dict[Setting, Mechanism] = {}

    def run(self, setting: Setting, step_size: float, seed: int) -> dict[str, float]:
        """Return the scores of one run, from the file if it has them."""
        key = (setting, step_size, seed)
        if key not in self._rows:
            scores = self._train(self._make(setting), step_size, seed)
            # As in the file: a run that is read again must not change which step size is chosen.
            self._rows[key] = {name: float(f"{value:.6g}") for name, value in scores.items()}
            self._write(key)
        return self._rows[key]

    def tune(self, setting: Setting, start: float) -> float:
        """Return the step size with the largest validation accuracy on seed 0.

        The search halves ``start`` as long as this helps, then doubles it as long as this helps.
        """

        def accuracy(step_size: float) -> float:
            return self.run(setting, step_size, 0)["validation_accuracy"]

        best = start
        for factor in (0.5, 2.0):
            while accuracy(best * factor) > accuracy(best):
                best *= factor
        return best

    @property
    def num_runs(self) -> int:
        """Number of runs in the file."""
        return len(self._rows)

    @property
    def seconds(self) -> float:
        """Time that the runs of the file took together."""
        return sum(row["seconds"] for row in self._rows.values())

    def _make(self, setting: Setting) -> Mechanism:
        if setting not in self._methods:
            budget = self._budget(1.0 if math.isinf(setting.epsilon) else setting.epsilon)
            name, insider, _ = setting.method.partition("-1-insider")
            (self._methods[setting],) = make_mechanisms(
                [name],
                self._network,
                budget,
                objective=self._objective,
                threat=DEFAULT_THREAT if insider else EAVESDROPPER,
            )
        return self._methods[setting]

    def _budget(self, epsilon: float) -> PrivacyBudget:
        return PrivacyBudget(
            epsilon,
            _DELTA,
            self._num_steps,
            _CLIP,
            unit="sample",
            batch_size=self._batch_size,
            samples_per_agent=min(self._problem.data.sizes),
        )

    def _train(self, method: Mechanism, step_size: float, seed: int) -> dict[str, float]:
        start = time.perf_counter()
        settings = SweepSettings(
            num_steps=self._num_steps,
            batch_size=self._batch_size,
            seeds=(seed,),
            cooldown_steps=_COOLDOWN,
            momentum=self._objective.momentum,
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
        loss, accuracy = score_own(self._problem, models, parts["validation"])
        _, own = score_own(self._problem, models, parts["test"])
        joint = self._problem.task.evaluate(models.mean(dim=0, keepdim=True), *parts["test"])
        spread = (models - models.mean(dim=0)).square().sum(dim=1).mean().sqrt()
        return {
            "validation_loss": loss,
            "validation_accuracy": accuracy,
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


def mean_and_half_width(values: list[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval, infinite for one value."""
    mean, count = float(np.mean(values)), len(values)
    if count == 1:
        return mean, math.inf
    return mean, float(stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count))


def choose_step_sizes(trials: Trials, epsilons: Sequence[float]) -> dict[Setting, float]:
    """Return the step size of every cell, from the largest ε of a method to the smallest."""
    chosen: dict[Setting, float] = {}
    for method in (*_METHODS, "none"):
        step_size = _FIRST_STEP_SIZE
        own = sorted(epsilons, reverse=True) if method != "none" else [math.inf]
        for epsilon in own:
            setting = Setting(epsilon, method)
            chosen[setting] = step_size = trials.tune(setting, step_size)
    return chosen


def tabulate(title: str, cells: dict[Setting, str], epsilons: Sequence[float]) -> str:
    """Return a Markdown table with one row for each method and one column for each ε."""
    rows = [[title, *(f"ε = {epsilon:g}" for epsilon in epsilons)], ["---"] * (len(epsilons) + 1)]
    for method in reversed(_LABELS):
        own = [math.inf if method == "none" else epsilon for epsilon in epsilons]
        rows.append([_LABELS[method], *(cells[Setting(epsilon, method)] for epsilon in own)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(scores: dict[Setting, tuple[float, float]], epsilons: Sequence[float]) -> Figure:
    """Draw accuracy against ε, one line for each method, named at its end."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    ends = []
    for method, label in _LABELS.items():
        own = [
            scores[Setting(math.inf if method == "none" else epsilon, method)]
            for epsilon in epsilons
        ]
        mean, half = np.transpose(own)
        is_insider = method == "corn-1-insider"
        colour = "#CC79A7" if is_insider else MECHANISM_COLOURS[method]
        axes.plot(epsilons, mean, color=colour, linestyle="--" if is_insider else "-")
        axes.fill_between(epsilons, mean - half, mean + half, color=colour, alpha=0.15, lw=0)
        ends.append(LineEnd(label, float(mean[-1]), colour, dashes="--" if is_insider else "-"))
    axes.set_xscale("log")
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.minorticks_off()
    axes.set(xlim=(epsilons[0], epsilons[-1]), ylabel="test accuracy of the agents' own models")
    axes.set_xlabel("ε of one sample: more private to the left")
    axes.spines[["top", "right"]].set_visible(False)
    label_ends(axes, ends)
    return figure


def main() -> None:
    """Run what is missing, print the table and draw it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", choices=_SETTINGS)
    parser.add_argument("--data-dir", required=True, help="directory of data sets, with mnist")
    parser.add_argument("--out", type=Path, default=Path("docs/results/one-sample"))
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    limit_threads()
    arguments.out.mkdir(parents=True, exist_ok=True)
    trials, epsilons = Trials(arguments), _SETTINGS[arguments.model][2]
    chosen = choose_step_sizes(trials, epsilons)
    # All cells get their second run before the first gets its third.
    for seed in range(1, arguments.seeds):
        for setting, step_size in chosen.items():
            trials.run(setting, step_size, seed)
    scores = {}
    for setting, step_size in chosen.items():
        runs = [trials.run(setting, step_size, seed) for seed in range(arguments.seeds)]
        scores[setting] = mean_and_half_width([row["test_accuracy"] for row in runs])
    accuracies = {setting: "{:.3f} ± {:.3f}".format(*score) for setting, score in scores.items()}
    print(tabulate("test accuracy", accuracies, epsilons))
    print(tabulate("step size", {key: f"{eta:g}" for key, eta in chosen.items()}, epsilons))
    print(f"{trials.num_runs} runs, {trials.seconds:,.0f} s")
    save_figure(draw(scores, epsilons), arguments.out / f"{arguments.model}.png")


if __name__ == "__main__":
    main()
