"""Accuracy of exact sums next to a trusted server, to gossip, and to Opacus on the pooled data.

    OMP_NUM_THREADS=1 python benchmarks/exact_accuracy.py --data-dir DATA [--groups NAME …]

Exact sums and gossip hold against one insider, the server's noise against readers of its models
only. Mechanisms of a seed have the same initial model and the same batches; exact sums and the
server have the same standard normals too. Opacus draws its own.

Step sizes are chosen on seeds of their own by validation accuracy, with one grid for all
mechanisms of an optimizer, which grows by factors of two as long as its best value is at an end.
Exact sums and Opacus run at the step size that is chosen for the server.

Every run is one line of FILE, written when its sweep ends. The same command continues an
interrupted benchmark: sweeps that the file has are not repeated. Tables are printed from the file.
Opacus is no dependency of CorN; ``opacus_pooled.py`` describes its environment.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import nn

from corn.checks import FloatArray
from corn.covariance import default_objective
from corn.files import load_function
from corn.learn import (
    AgentData,
    Constant,
    Result,
    SweepSettings,
    TrainingProblem,
    Trial,
    Workload,
    make_mechanisms,
    run_sweep,
)
from corn.learn.tasks.module import small_cnn
from corn.learn.workloads import make_named_task
from corn.privacy import Adjacency, PrivacyBudget
from corn.threads import limit_threads
from corn.topology import choose_cooldown, load_network
from measuring import append_runs, describe, format_table, read_runs
from opacus_pooled import train_opacus

_ROOT = Path(__file__).parent.parent
_GRAPH, _AGENTS, _DELTA, _MOMENTUM, _SPLIT_SEED = "er:n=20,p=0.2,seed=1", 20, 1e-5, 0.9, 1
_TUNING_SEEDS, _SEEDS = (100, 101), (10, 11, 12, 13, 14)
_GRID = {"sgd": (0.5, 1.0, 2.0, 4.0, 8.0), "adam": (0.005, 0.01, 0.02, 0.04)}
# Steps and samples per agent and step; 126 of 2520 samples of an agent are a rate of 1/20.
_SIZES = {"a9a": (5000, 128), "linear": (120, 126), "network": (120, 126), "cnn": (60, 15)}
# Under gossip all agents' CNNs are measured, which would take longer than training them.
_MOST_MEASURED = {"cnn": 2000}
# The mechanism whose validation accuracy chooses the step size.
_TUNED_FOR = {"sum": "server", "server": "server", "gossip": "gossip", "opacus": "server"}
_NAMES = {"sum": "corn", "server": "central", "gossip": "corn"}
_LABELS = {
    "linear": "softmax",
    "hog": "softmax on HOG",
    "a9a": "a9a",
    "network": "network",
    "cnn": "CNN",
}


@dataclass(frozen=True)
class Case:
    """A line of a table: a model on data, under a promise, trained by an optimizer."""

    model: str
    epsilon: float
    optimizer: str = "sgd"
    partition: str = "iid"
    adjacency: Adjacency = "replace"

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The mechanisms to compare."""
        if self.adjacency == "add-remove":
            return ("sum", "server", "opacus")
        # Adam is refused under gossip: each agent would divide by its own second moment.
        return ("sum", "server", "gossip") if self.optimizer == "sgd" else ("sum", "server")

    @property
    def label(self) -> str:
        """The name in tables."""
        partition = "" if self.model == "a9a" or self.partition == "iid" else f", {self.partition}"
        optimizer = {"sgd": "SGD", "adam": "Adam"}[self.optimizer]
        return f"{_LABELS[self.model]}{partition}, ε = {self.epsilon:g}, {optimizer}"

    @property
    def sizes(self) -> tuple[int, int]:
        """Steps, and expected samples per agent and step."""
        return _SIZES["linear" if self.model == "hog" else self.model]


_BOTH = (1.0, 0.1)
GROUPS: dict[str, tuple[Case, ...]] = {
    "similar": (
        *(Case(model, epsilon) for model in ("linear", "hog") for epsilon in _BOTH),
        Case("a9a", 10.0, partition="dirichlet:10"),
        *(
            Case(model, epsilon, optimizer)
            for model in ("network", "cnn")
            for epsilon in _BOTH
            for optimizer in _GRID
        ),
    ),
    "skewed": tuple(
        Case("network", epsilon, optimizer, partition)
        for partition in ("shards:2", "dirichlet:0.1")
        for epsilon in _BOTH
        for optimizer in _GRID
    ),
    "opacus": tuple(
        Case("network", epsilon, optimizer, adjacency="add-remove")
        for epsilon in _BOTH
        for optimizer in _GRID
    ),
}


class Run(NamedTuple):
    """One trained model, or one for each agent under gossip."""

    case: Case
    mechanism: str
    part: str
    step_size: float
    seed: int


class Score(NamedTuple):
    """What is measured of a run; NaN if it diverged."""

    accuracy: float
    loss: float
    seconds: float


_COLUMNS = (*Case.__dataclass_fields__, *Run._fields[1:], *Score._fields)


class Runs:
    """Runs of the benchmark, each computed once and kept in a file."""

    def __init__(self, path: Path, directory: str) -> None:
        self._path, self._directory = path, directory
        self.scores: dict[Run, Score] = dict(self._read())

    def measure(
        self,
        case: Case,
        mechanisms: Sequence[str],
        part: str,
        step_sizes: Sequence[float],
        seeds: Sequence[int],
    ) -> None:
        """Train the mechanisms with all step sizes and seeds, unless the file has these runs."""
        wanted = [
            Run(case, mechanism, part, size, seed)
            for mechanism in mechanisms
            for size in step_sizes
            for seed in seeds
        ]
        if all(run in self.scores for run in wanted):
            return
        start = time.process_time()
        problem = make_problem(case.model, case.partition, self._directory)
        found = (
            pool(case, problem, part, step_sizes, seeds)
            if "opacus" in mechanisms
            else sweep(case, problem, mechanisms, part, step_sizes, seeds)
        )
        seconds = (time.process_time() - start) / len(wanted)
        new = {
            run: Score(*found.get(run, (math.nan, math.nan)), seconds)
            for run in wanted
            if run not in self.scores
        }
        self._append(new)

    def tune(self, case: Case, mechanism: str) -> float:
        """Return the step size with the largest validation accuracy on the tuning seeds."""
        sizes = sorted(_GRID[case.optimizer])
        while True:
            missing = [
                size
                for size in sizes
                if Run(case, mechanism, "validation", size, _TUNING_SEEDS[0]) not in self.scores
            ]
            self.measure(case, [mechanism], "validation", missing, _TUNING_SEEDS)
            # Of equally good step sizes the least.
            best = max(sizes, key=lambda size: (self._validate(case, mechanism, size), -size))
            if best == sizes[0]:
                sizes.insert(0, best / 2)
            elif best == sizes[-1]:
                sizes.append(best * 2)
            else:
                return best

    def test(self, case: Case) -> dict[str, list[Score]]:
        """Return the scores of each mechanism by seed, at the step sizes that are chosen."""
        chosen = {name: self.tune(case, _TUNED_FOR[name]) for name in case.mechanisms}
        for together in (("sum", "server"), ("gossip",), ("opacus",)):
            if together[0] in chosen:
                self.measure(case, together, "test", [chosen[together[0]]], _SEEDS)
        return {
            name: [self.scores[Run(case, name, "test", size, seed)] for seed in _SEEDS]
            for name, size in chosen.items()
        }

    def _validate(self, case: Case, mechanism: str, size: float) -> float:
        runs = [Run(case, mechanism, "validation", size, seed) for seed in _TUNING_SEEDS]
        accuracy = float(np.mean([self.scores[run].accuracy for run in runs]))
        return -1.0 if math.isnan(accuracy) else accuracy

    def _read(self) -> Iterator[tuple[Run, Score]]:
        for row in read_runs(self._path):
            known: Any = row["adjacency"]
            case = Case(
                row["model"], float(row["epsilon"]), row["optimizer"], row["partition"], known
            )
            run = Run(
                case, row["mechanism"], row["part"], float(row["step_size"]), int(row["seed"])
            )
            yield run, Score(*(float(row[name]) for name in Score._fields))

    def _append(self, new: dict[Run, Score]) -> None:
        append_runs(
            self._path,
            _COLUMNS,
            [
                [
                    *astuple(run.case),
                    run.mechanism,
                    run.part,
                    f"{run.step_size:.12g}",
                    run.seed,
                    *score,
                ]
                for run, score in new.items()
            ],
        )
        # As in the file: a run that is read again must not change a choice.
        self.scores |= dict(self._read())


@cache
def make_problem(model: str, partition: str, directory: str) -> TrainingProblem:
    """Return a9a, MNIST, or features of MNIST, split and dealt out by one fixed seed."""
    made = Workload(
        "a9a" if model == "a9a" else "mnist",
        model="linear" if model in ("a9a", "hog") else model,
        partition=partition,
        seed=_SPLIT_SEED,
        directory=Path(directory),
    ).build(_AGENTS)
    if model == "hog":
        made = compute_features(made)
    most = _MOST_MEASURED.get(model)
    return replace(made, parts={name: (X[:most], y[:most]) for name, (X, y) in made.parts.items()})


def compute_features(problem: TrainingProblem) -> TrainingProblem:
    """Return the problem with the features of ``examples/hog_features.py`` instead of pixels."""
    describe_images = load_function(f"{_ROOT / 'examples' / 'hog_features.py'}:compute_features")

    def transform(inputs: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(describe_images(inputs.numpy().reshape(-1, 28, 28)))

    data = problem.data
    inputs = transform(data.inputs)
    shape = tuple(inputs.shape[1:])
    return replace(
        problem,
        task=make_named_task("linear", shape, 10, is_image=False, l2=1e-4, of="features"),
        data=AgentData(inputs, data.targets, data.offsets),
        parts={name: (transform(X), y) for name, (X, y) in problem.parts.items()},
    )


def make_budget(case: Case, problem: TrainingProblem) -> PrivacyBudget:
    """Return the promise: for an agent's whole data on a9a, as in the paper, else for a sample."""
    num_steps, batch_size = case.sizes
    if case.model == "a9a":
        return PrivacyBudget(case.epsilon, _DELTA, num_steps, clip=0.1)
    return PrivacyBudget(
        case.epsilon,
        _DELTA,
        num_steps,
        clip=1.0,
        unit="sample",
        adjacency=case.adjacency,
        batch_size=batch_size,
        # Sizes are those of public data here, and not what a changed sample changes.
        sampling_rate=batch_size * _AGENTS / sum(problem.data.sizes),
    )


def sweep(
    case: Case,
    problem: TrainingProblem,
    mechanisms: Sequence[str],
    part: str,
    step_sizes: Sequence[float],
    seeds: Sequence[int],
) -> dict[Run, tuple[float, float]]:
    """Return accuracy and loss of the agents' own models for each run that did not diverge."""
    network = load_network(_GRAPH, mixing="gossip" if "gossip" in mechanisms else "sum")
    budget = make_budget(case, problem)
    # The momentum of Algorithm 1, for which noise of gossip is designed.
    momentum = _MOMENTUM if case.optimizer == "sgd" else 0.0
    methods = make_mechanisms(
        [_NAMES[name] for name in mechanisms],
        network,
        budget,
        objective=default_objective(budget.num_steps, momentum=momentum),
    )
    settings = SweepSettings(
        num_steps=budget.num_steps,
        batch_size=case.sizes[1],
        seeds=tuple(seeds),
        cooldown_steps=choose_cooldown(network, budget.num_steps),
        momentum=momentum,
        optimizer=torch.optim.Adam if case.optimizer == "adam" else None,
    )
    result: Result = run_sweep(
        replace(problem, parts={part: problem.parts[part]}),
        network,
        [Trial(method, Constant(size)) for method in methods for size in step_sizes],
        settings=settings,
        evaluate_at=[budget.num_steps],
        max_train_samples=100,
        show_progress=False,
    )
    mechanism_of = {_NAMES[name]: name for name in mechanisms}
    return {
        Run(
            case,
            mechanism_of[str(row["mechanism"])],
            part,
            float(row["step_size"]),
            int(row["seed"]),
        ): (float(row[f"{part}_accuracy"]), float(row[f"{part}_loss"]))
        for row in result.last_rows
    }


def pool(
    case: Case,
    problem: TrainingProblem,
    part: str,
    step_sizes: Sequence[float],
    seeds: Sequence[int],
) -> dict[Run, tuple[float, float]]:
    """Return accuracy and loss of Opacus on the pooled data, with the noise of CorN's server."""
    budget = make_budget(case, problem)
    found = {}
    for size in step_sizes:
        for seed in seeds:
            torch.manual_seed(seed)
            model = make_module(case.model)
            # torch sums gradients where CorN averages them.
            optimizer = (
                torch.optim.SGD(model.parameters(), size * (1 - _MOMENTUM), momentum=_MOMENTUM)
                if case.optimizer == "sgd"
                else torch.optim.Adam(model.parameters(), size)
            )
            found[Run(case, "opacus", part, size, seed)] = train_opacus(
                problem,
                model,
                optimizer,
                rate=budget.query.sampling_rate or 1.0,
                clip=budget.clip,
                # Of a trusted server in units of the clip, as Opacus counts it.
                noise_multiplier=(budget.batch_size or 1)
                * budget.independent_noise_std
                / budget.clip,
                num_steps=budget.num_steps,
                part=part,
            )
    return found


def make_module(model: str) -> nn.Module:
    """Return the model of a task as a module of torch, with new random parameters."""
    if model == "cnn":
        return nn.Sequential(nn.Unflatten(1, (1, 28, 28)), small_cnn((28, 28), 10))
    return nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


def compare(first: FloatArray, second: FloatArray) -> str:
    """Return the difference of two independent means with Welch's 95 % interval."""
    interval = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    half = (interval.high - interval.low) / 2
    return f"{first.mean() - second.mean():+.4f} ± {half:.4f}".replace("-", "−")


def tabulate(cases: Sequence[Case], runs: Runs) -> str:
    """Return a Markdown table with one line for each case."""
    is_pooled = cases[0].adjacency == "add-remove"
    other = "Opacus" if is_pooled else "gossip"
    columns = ["case", "step sizes", "exact sums", "trusted server", "sums − server"]
    columns += [other, f"sums − {other}"]
    lines = [columns]
    for case in cases:
        accuracy = {
            name: np.array([score.accuracy for score in scores])
            for name, scores in runs.test(case).items()
        }
        sums, server, last = accuracy["sum"], accuracy["server"], accuracy.get(other.lower())
        tuned = dict.fromkeys(_TUNED_FOR[name] for name in case.mechanisms)
        line = [case.label, ", ".join(f"{runs.tune(case, name):g}" for name in tuned)]
        line += [describe(sums), describe(server), describe(sums - server, "+")]
        if last is None:
            line += ["refused", ""]
        elif is_pooled:
            line += [describe(last), compare(sums, last)]
        else:
            line += [describe(last), describe(sums - last, "+")]
        lines.append(line)
    return format_table(lines)


def main() -> None:
    """Run what is missing, and print one table for each group."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", required=True, help="directory of data sets: a9a, mnist")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    default = _ROOT / "docs" / "results" / "exact-sums.csv"
    parser.add_argument("--out", type=Path, default=default, metavar="FILE")
    arguments = parser.parse_args()
    limit_threads()
    runs = Runs(arguments.out, arguments.data_dir)
    for group in arguments.groups:
        print(f"\n{group}\n\n{tabulate(GROUPS[group], runs)}", flush=True)
    seconds = sum(score.seconds for score in runs.scores.values())
    print(f"\n{len(runs.scores)} runs, {seconds:,.0f} s of CPU time")


if __name__ == "__main__":
    main()
