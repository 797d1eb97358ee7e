"""Accuracy on MNIST when one sample is protected: exact sums, gossip, a trusted server and none.

Every run is one line of FOLDER/MODEL.csv, written when it ends. The same command continues an
interrupted benchmark: runs that the file has are not repeated. Seed 0 chooses each line's step size
among powers of two, by validation accuracy. The other seeds run at that step size only. The CNN's
lines of exact sums are the figure of the README.

    OMP_NUM_THREADS=1 python benchmarks/one_sample.py linear --data-dir DATA
    OMP_NUM_THREADS=1 python benchmarks/one_sample.py network --data-dir DATA
    OMP_NUM_THREADS=1 python benchmarks/one_sample.py cnn --data-dir DATA
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

from corn.covariance import default_objective
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
from corn.learn.workloads import select_agents
from corn.privacy import PrivacyBudget
from corn.report.figures import LineEnd, choose_styles, figure_style, label_ends, save_figure
from corn.threads import limit_threads
from corn.topology import Mixing, Network, load_network
from measuring import append_runs, format_table, half_width, read_runs

_GRAPH, _DELTA, _CLIP, _COOLDOWN = "er:n=20,p=0.2,seed=1", 1e-5, 1.0, 25
_MIXINGS: tuple[Mixing, ...] = ("sum", "gossip")
# Steps, batch size and values of ε of each model. 120 steps of the CNN take half a minute.
_SETTINGS = {
    "linear": (300, 128, (0.05, 0.1, 0.25, 0.5, 1, 2, 4)),
    "network": (300, 128, (0.05, 0.1, 0.25, 0.5, 1, 2, 4)),
    "cnn": (120, 32, (0.05, 0.1, 0.25, 0.5, 1, 2, 4)),
}


class Line(NamedTuple):
    """One line of the figure: a mechanism with a kind of mixing."""

    label: str
    mechanism: str
    mixing: Mixing = "sum"


# From the top of the figure to its bottom.
_LINES = {
    "none": Line("no noise", "none"),
    "central": Line("trusted server", "central"),
    "corn": Line("CorN, no server", "corn"),
    "gossip": Line("CorN, gossip", "corn", "gossip"),
    "ldp": Line("independent noise (LDP)", "ldp"),
    # Noise of a server with one agent.
    "alone": Line("each agent by itself", "central"),
}
_COLUMNS = (
    "epsilon",
    "line",
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
    """One cell of the table: a line at an ε, infinite without noise."""

    epsilon: float
    line: str


class Trials:
    """Runs of the benchmark, each computed once and kept in a file."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._path = arguments.out / f"{arguments.model}.csv"
        self._num_steps, self._batch_size, _ = _SETTINGS[arguments.model]
        self._networks = {mixing: load_network(_GRAPH, mixing=mixing) for mixing in _MIXINGS}
        self._single = load_network("complete:1", mixing="sum")
        self._problem = Workload(
            "mnist", model=arguments.model, directory=arguments.data_dir
        ).build(self._networks["sum"].num_agents)
        self._rows: dict[tuple[Setting, float, int], dict[str, float]] = dict(self._read())
        self._mechanisms: dict[Setting, Mechanism] = {}

    def run(self, setting: Setting, step_size: float, seed: int) -> dict[str, float]:
        """Return the scores of one run, from the file if it has them."""
        key = (setting, step_size, seed)
        if key not in self._rows:
            scores = self._train(setting, step_size, seed)
            # As in the file: a run that is read again must not change which step size is chosen.
            self._rows[key] = {name: float(f"{value:.6g}") for name, value in scores.items()}
            row = [setting.epsilon, setting.line, step_size, seed, *self._rows[key].values()]
            append_runs(self._path, _COLUMNS, [row])
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
        if setting not in self._mechanisms:
            line = _LINES[setting.line]
            (self._mechanisms[setting],) = make_mechanisms(
                [line.mechanism],
                self._network(setting.line),
                self._budget(1.0 if math.isinf(setting.epsilon) else setting.epsilon),
                objective=default_objective(self._num_steps, mixing=line.mixing),
            )
        return self._mechanisms[setting]

    def _network(self, line: str) -> Network:
        return self._single if line == "alone" else self._networks[_LINES[line].mixing]

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

    def _train(self, setting: Setting, step_size: float, seed: int) -> dict[str, float]:
        start = time.perf_counter()
        mixing = _LINES[setting.line].mixing
        settings = SweepSettings(
            num_steps=self._num_steps,
            batch_size=self._batch_size,
            seeds=(seed,),
            cooldown_steps=_COOLDOWN if mixing == "gossip" else 0,
            momentum=default_objective(self._num_steps, mixing=mixing).momentum,
        )
        problem = self._problem
        if setting.line == "alone":
            # Another agent for each seed.
            problem = select_agents(problem, [4 * seed % problem.data.num_agents])
        data, parts = problem.place(settings)
        simulation = Simulation(
            problem.task,
            data,
            self._network(setting.line),
            [Trial(self._make(setting), Constant(step_size))],
            settings=settings,
        )
        for _ in range(settings.num_steps):
            simulation.advance()
        simulation.cool_down()
        models = simulation.parameters[0, :, 0]
        loss, accuracy = score_own(problem, models, parts["validation"])
        _, own = score_own(problem, models, parts["test"])
        joint = problem.task.evaluate(models.mean(dim=0, keepdim=True), *parts["test"])
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
        for row in read_runs(self._path):
            key = (
                Setting(float(row["epsilon"]), row["line"]),
                float(row["step_size"]),
                int(row["seed"]),
            )
            yield key, {name: float(row[name]) for name in _COLUMNS[4:]}


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


def choose_step_sizes(trials: Trials, epsilons: Sequence[float]) -> dict[Setting, float]:
    """Return the step size of every cell, from the largest ε of a line to the smallest."""
    chosen: dict[Setting, float] = {}
    for line in _LINES:
        step_size = _FIRST_STEP_SIZE
        own = sorted(epsilons, reverse=True) if line != "none" else [math.inf]
        for epsilon in own:
            setting = Setting(epsilon, line)
            chosen[setting] = step_size = trials.tune(setting, step_size)
    return chosen


def tabulate(title: str, cells: dict[Setting, str], epsilons: Sequence[float]) -> str:
    """Return a Markdown table with one row for each line and one column for each ε."""
    rows = [[title, *(f"ε = {epsilon:g}" for epsilon in epsilons)]]
    for name, line in reversed(_LINES.items()):
        own = [math.inf if name == "none" else epsilon for epsilon in epsilons]
        rows.append([line.label, *(cells[Setting(epsilon, name)] for epsilon in own)])
    return format_table(rows)


def draw(
    scores: dict[Setting, tuple[float, float]], epsilons: Sequence[float], names: Sequence[str]
) -> Figure:
    """Draw accuracy against ε, one line for each name, with intervals as bands."""
    figure = Figure(figsize=(7.2, 3.7), layout="constrained")
    axes = figure.subplots()
    ends = []
    for name, style in choose_styles(names).items():
        own = [
            scores[Setting(math.inf if name == "none" else epsilon, name)] for epsilon in epsilons
        ]
        mean, half = np.transpose(own)
        colour, marker, dashes = style
        axes.plot(
            epsilons,
            mean,
            color=colour,
            linewidth=2.6 if name == "corn" else 1.7,
            linestyle=dashes,
            marker=marker,
            # The server's line would be hidden under CorN's.
            zorder=3 if name == "central" else 2,
        )
        axes.fill_between(epsilons, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)
        ends.append(LineEnd(_LINES[name].label, float(mean[-1]), colour, marker, dashes))
    axes.set_xscale("log")
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.minorticks_off()
    axes.set(ylim=(0, 1), xlim=(epsilons[0], epsilons[-1]), ylabel="test accuracy")
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
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
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
        accuracies = [row["test_accuracy"] for row in runs]
        scores[setting] = float(np.mean(accuracies)), half_width(accuracies)
    shown = {setting: "{:.3f} ± {:.3f}".format(*score) for setting, score in scores.items()}
    print(tabulate("test accuracy", shown, epsilons))
    print(tabulate("step size", {key: f"{eta:g}" for key, eta in chosen.items()}, epsilons))
    print(f"{trials.num_runs} runs, {trials.seconds:,.0f} s")
    with figure_style():
        save_figure(draw(scores, epsilons, list(_LINES)), arguments.out / f"{arguments.model}.png")
        if arguments.model == "cnn":
            # Exact sums alone.
            of_readme = [name for name, line in _LINES.items() if line.mixing == "sum"]
            save_figure(draw(scores, epsilons, of_readme), arguments.images / "accuracy.png")


if __name__ == "__main__":
    main()
