"""What brings CorN closer to a trusted server at no privacy: averages, schedules and momentum.

Everything here post-processes releases, so ε stays the same. Each way of training gets the step
size with the least validation loss. Scores are those of the average model after a cool-down.

    OMP_NUM_THREADS=1 python benchmarks/closing_gap.py a9a --data-dir DATA
    OMP_NUM_THREADS=1 python benchmarks/closing_gap.py mnist --data-dir DATA
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from corn.covariance import EAVESDROPPER, default_objective
from corn.learn import (
    Constant,
    Cosine,
    InverseSqrt,
    Simulation,
    SweepSettings,
    TrainingProblem,
    Trial,
    Workload,
    make_mechanisms,
)
from corn.learn.schedule import Schedule
from corn.privacy import PrivacyBudget
from corn.threads import limit_threads
from corn.topology import Network, choose_cooldown, load_network
from measuring import describe, format_table

_GRAPH, _BATCH = "er:n=20,p=0.2,seed=1", 128
# Fractions of the run at its end over which models are averaged; 0 is the last model.
_TAILS = (0.0, 0.1, 0.25)
# Momentum of the steps, and the momentum that the noise is designed for.
_MOMENTA = ((0.0, 0.0), (0.9, 0.0), (0.9, 0.9), (0.97, 0.97))


class Linear(Schedule):
    """η_t falls from η₁ towards zero in equal steps."""

    text = "linear from {:g}"

    def at(self, step: int, num_steps: int) -> float:
        """See ``Schedule``."""
        return self.initial * (1 - (step - 1) / num_steps)


@dataclass(frozen=True)
class Study:
    """A task with its budget, and step sizes near the best constant one."""

    problem: TrainingProblem
    budget: PrivacyBudget
    step_sizes: tuple[float, ...]
    score: str

    def schedules(self) -> list[Schedule]:
        """Return all schedules; those that decay start higher, by powers of two."""
        decaying = [size * factor for size in self.step_sizes[:2] for factor in (2.0, 4.0)]
        steep = [self.step_sizes[1] * math.sqrt(self.budget.num_steps) / d for d in (4, 2, 1)]
        return [
            *map(Constant, self.step_sizes),
            *map(Linear, decaying),
            *map(Cosine, decaying),
            *map(InverseSqrt, steep),
        ]


def make_study(arguments: argparse.Namespace, num_agents: int) -> Study:
    """Return the study of a task: agents on a9a, samples on MNIST."""
    options = {"directory": arguments.data_dir}
    if arguments.task == "a9a":
        problem = Workload("a9a", seed=1, **options).build(num_agents)
        budget = PrivacyBudget(10, 1e-5, 5000, 0.1)
        return Study(problem, budget, (0.0075, 0.01, 0.015), "loss")
    problem = Workload("mnist", model="linear", **options).build(num_agents)
    budget = PrivacyBudget(
        0.1,
        1e-5,
        300,
        1.0,
        unit="sample",
        batch_size=_BATCH,
        samples_per_agent=min(problem.data.sizes),
    )
    return Study(problem, budget, (0.3, 0.4, 0.6), "accuracy")


def train_all(
    study: Study, network: Network, trials: Sequence[Trial], momentum: float, seed: int
) -> dict[float, torch.Tensor]:
    """Return the average model of each trial, for each tail, shape (trials, parameters)."""
    settings = SweepSettings(
        study.budget.num_steps,
        _BATCH,
        (seed,),
        choose_cooldown(network, study.budget.num_steps),
        momentum=momentum,
    )
    data, _ = study.problem.place(settings)
    simulation = Simulation(study.problem.task, data, network, trials, settings=settings)
    sums = {tail: torch.zeros_like(simulation.parameters[0, 0]) for tail in _TAILS if tail}
    for step in range(settings.num_steps):
        simulation.advance()
        average = simulation.parameters[0].mean(dim=0)
        for tail, total in sums.items():
            if step >= settings.num_steps * (1 - tail):
                total += average / (settings.num_steps * tail)
    # Mixing preserves the average, so the cool-down does not change it.
    return {0.0: average} | sums


def run(study: Study, network: Network, seed: int) -> Iterator[tuple[str, float, float, float]]:
    """Yield the way of training, its step size, its validation loss and its test score."""
    settings = SweepSettings(1, _BATCH)
    _, parts = study.problem.place(settings)
    for momentum, designed in _MOMENTA:
        objective = default_objective(study.budget.num_steps, momentum=designed)
        names = ["corn"] if momentum else ["corn", "central"]
        methods = make_mechanisms(
            names, network, study.budget, objective=objective, threat=EAVESDROPPER
        )
        constant = [Constant(size) for size in study.step_sizes]
        trials = [
            Trial(method, schedule)
            for method in methods
            for schedule in (constant if momentum else study.schedules())
        ]
        for tail, models in train_all(study, network, trials, momentum, seed).items():
            valid = study.problem.task.evaluate(models, *parts["validation"])
            test = study.problem.task.evaluate(models, *parts["test"])
            scores = test.loss if study.score == "loss" else test.accuracy
            if scores is None:
                raise ValueError("the task has no accuracy")
            for k, trial in enumerate(trials):
                way = f"{trial.mechanism.name}, {type(trial.schedule).__name__.lower()}"
                way += f", last {tail:.0%} averaged" if tail else ""
                if momentum:
                    way += f", momentum {momentum:g}, noise designed for {designed:g}"
                yield way, trial.schedule.initial, float(valid.loss[k]), float(scores[k])


def main() -> None:
    """Run all ways of training with all seeds, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("task", choices=["a9a", "mnist"])
    parser.add_argument("--data-dir", required=True, help="directory of data sets")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    limit_threads()
    network = load_network(_GRAPH, mixing="gossip")
    study = make_study(arguments, network.num_agents)
    found: dict[str, dict[float, list[tuple[float, float]]]] = {}
    for seed in range(arguments.seeds):
        for way, step_size, loss, score in run(study, network, seed):
            found.setdefault(way, {}).setdefault(step_size, []).append((loss, score))
    print(f"{arguments.task}: {study.budget.describe()}")
    rows = [["way of training", "step size", f"test {study.score}"]]
    for way, sizes in found.items():
        best = min(sizes, key=lambda size: float(np.mean([loss for loss, _ in sizes[size]])))
        rows.append([way, f"{best:.3g}", describe([score for _, score in sizes[best]])])
    print(format_table(rows))


if __name__ == "__main__":
    main()
