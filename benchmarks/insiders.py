"""Accuracy on MNIST against 0 to 3 curious agents, for exact sums and for gossip.

    OMP_NUM_THREADS=1 python benchmarks/insiders.py --data-dir DATA [--out FILE]

ε protects one sample. The noise for each number of curious agents has the same budget, seeds and
batches, and one step size. Validation accuracy on seeds of their own chooses it for noise against
an eavesdropper. So differences are paired by seeds. FILE has every run.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from corn.covariance import ThreatModel, default_objective
from corn.learn import (
    Constant,
    SweepSettings,
    TrainingProblem,
    Trial,
    Workload,
    make_mechanisms,
    run_sweep,
)
from corn.privacy import PrivacyBudget
from corn.threads import limit_threads
from corn.topology import Mixing, Network, choose_cooldown, load_network
from measuring import append_runs, describe, format_table
from when_correlation_pays import tune_step_sizes

_NUM_STEPS, _RATE, _CLIP, _DELTA = 120, 1 / 20, 1.0, 1e-5
_TUNING_SEEDS, _SEEDS, _MOST_INSIDERS = (100, 101), (10, 11, 12, 13, 14), 3
_GRAPHS = {8: "er:n=8,p=0.5,seed=1", 20: "er:n=20,p=0.2,seed=1"}
_CASES = tuple(
    (model, epsilon, agents)
    for model in ("linear", "network")
    for epsilon in (1.0, 0.1)
    for agents in _GRAPHS
)


class Score(NamedTuple):
    """One run, and the noise variance of its average over a trusted server's."""

    model: str
    epsilon: float
    agents: int
    mixing: str
    insiders: int
    step_size: float
    seed: int
    central_ratio: float
    accuracy: float


def train(
    problem: TrainingProblem,
    network: Network,
    trials: Sequence[Trial],
    *,
    part: str,
    seeds: Sequence[int],
) -> dict[tuple[str, float], list[float]]:
    """Return the accuracies on a part of the data, by mechanism and step size."""
    objective = default_objective(_NUM_STEPS, mixing=network.mixing)
    is_gossip = network.mixing == "gossip"
    result = run_sweep(
        problem,
        network,
        trials,
        settings=SweepSettings(
            num_steps=_NUM_STEPS,
            batch_size=round(_RATE * min(problem.data.sizes)),
            seeds=tuple(seeds),
            momentum=objective.momentum,
            cooldown_steps=choose_cooldown(network, _NUM_STEPS) if is_gossip else 0,
        ),
        evaluate_at=[_NUM_STEPS],
        max_train_samples=100,
        show_progress=False,
    )
    found: dict[tuple[str, float], list[float]] = {}
    for row in result.last_rows:
        key = str(row["mechanism"]), float(row["step_size"])
        found.setdefault(key, []).append(float(row[f"{part}_accuracy"]))
    return found


def run_case(
    problem: TrainingProblem, model: str, epsilon: float, agents: int, mixing: Mixing
) -> Iterator[Score]:
    """Choose the step size, and yield the run of every seed against every number of insiders."""
    network = load_network(_GRAPHS[agents], mixing=mixing)
    budget = PrivacyBudget(
        epsilon,
        _DELTA,
        _NUM_STEPS,
        _CLIP,
        unit="sample",
        batch_size=round(_RATE * min(problem.data.sizes)),
        sampling_rate=_RATE,
    )
    # Against insiders everyone shares a seed with everyone, whatever their number.
    mechanisms = [
        make_mechanisms(
            ["corn"],
            network,
            budget,
            objective=default_objective(_NUM_STEPS, mixing=mixing),
            threat=ThreatModel(insiders, "pairs"),
        )[0]
        for insiders in range(_MOST_INSIDERS + 1)
    ]

    def measure(wanted: Sequence[tuple[int, float]]) -> list[float]:
        trials = [Trial(mechanisms[0], Constant(size)) for _, size in wanted]
        found = train(problem, network, trials, part="validation", seeds=_TUNING_SEEDS)
        (name,) = {name for name, _ in found}
        # A run that broke down has no accuracy.
        return [float(np.nan_to_num(np.mean(found[name, size]), nan=-1.0)) for _, size in wanted]

    (size,) = tune_step_sizes(measure, [1.0])
    for insiders, mechanism in enumerate(mechanisms):
        ((accuracies),) = train(
            problem, network, [Trial(mechanism, Constant(size))], part="test", seeds=_SEEDS
        ).values()
        ratio = mechanism.central_ratio or math.nan
        for seed, accuracy in zip(_SEEDS, accuracies, strict=True):
            yield Score(model, epsilon, agents, mixing, insiders, size, seed, ratio, accuracy)


def tabulate(scores: Sequence[Score]) -> str:
    """Return a Markdown table of accuracies, and of paired differences to no insiders."""
    groups: dict[tuple[str, float, int, str], dict[int, list[Score]]] = {}
    for score in scores:
        group = groups.setdefault((score.model, score.epsilon, score.agents, score.mixing), {})
        group.setdefault(score.insiders, []).append(score)
    rows = [["case", "mixing", *(f"q = {q}" for q in range(_MOST_INSIDERS + 1))]]
    for (model, epsilon, agents, mixing), group in groups.items():
        usual = [score.accuracy for score in group[0]]
        cells = []
        for insiders, own in group.items():
            accuracies = np.array([score.accuracy for score in own])
            text = describe(accuracies - usual, "+") if insiders else describe(usual)
            cells.append(f"{text} ({own[0].central_ratio:.2f})")
        rows.append([f"{model}, ε = {epsilon:g}, {agents} agents", mixing, *cells])
    return format_table(rows)


def main() -> None:
    """Run every case, write every run and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=Path, help="directory of data sets, with mnist")
    parser.add_argument("--out", type=Path, default=Path("docs/results/insiders.csv"))
    arguments = parser.parse_args()
    limit_threads()
    arguments.out.unlink(missing_ok=True)
    scores: list[Score] = []
    for model, epsilon, agents in _CASES:
        problem = Workload(
            "mnist", model=model, partition="iid", l2=0.0, seed=1, directory=arguments.data_dir
        ).build(agents)
        for mixing in ("sum", "gossip"):
            made = list(run_case(problem, model, epsilon, agents, mixing))
            append_runs(arguments.out, Score._fields, made)
            scores += made
            print(made[-1], flush=True)
    print(tabulate(scores))


if __name__ == "__main__":
    main()
