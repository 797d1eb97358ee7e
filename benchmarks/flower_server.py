"""The model of a Flower server that sees noisy updates only, next to a trusted server's.

It repeats ``examples/flower_app.py`` without Flower, with the same data, local training, clipping
and rounds, for many seeds: the plan's covariance, a trusted server's noise on the average, local DP
and no noise. Noise is drawn from seeds, and is not rounded.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from sklearn.datasets import make_classification

from corn.arrays import FloatArray
from corn.plan import make_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network

_AGENTS, _ROUNDS, _ROWS = 6, 15, 100


def train_locally(weights: FloatArray, inputs: Any, labels: Any) -> FloatArray:
    """Return the weights after twenty steps of logistic regression."""
    for _ in range(20):
        slope = inputs.T @ (1 / (1 + np.exp(-inputs @ weights)) - labels) / len(labels)
        weights = weights - 0.5 * slope
    return weights


def run(factor: FloatArray, clip: float, seed: int) -> float:
    """Return the test accuracy of the server's model; ``factor`` is F of the noise F·s."""
    data, labels = make_classification(1000, 20, n_informative=8, class_sep=2.0, random_state=1)
    inputs = np.column_stack([np.clip(data, -5, 5) / 5, np.ones(len(data))])
    random, weights = np.random.default_rng(seed), np.zeros(inputs.shape[1])
    for _ in range(_ROUNDS):
        updates = []
        for agent in range(_AGENTS):
            own = slice(_ROWS * agent, _ROWS * (agent + 1))
            update = train_locally(weights, inputs[own], labels[own]) - weights
            updates.append(update * min(1.0, clip / float(np.linalg.norm(update))))
        noise = factor @ random.standard_normal((factor.shape[1], len(weights)))
        weights = weights + (np.array(updates) + noise).mean(axis=0)
    rest = slice(_ROWS * _AGENTS, None)
    return float(np.mean((inputs[rest] @ weights > 0) == labels[rest]))


def main() -> None:
    """Print mean accuracies with 95 % intervals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epsilon", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=40)
    arguments = parser.parse_args()
    budget = PrivacyBudget(arguments.epsilon, 1e-5, num_steps=_ROUNDS, clip=1.0)
    plan = make_plan(load_network(f"complete:{_AGENTS}"), budget)
    std = budget.independent_noise_std
    factors = {
        "plan": np.linalg.cholesky(plan.decomposition.covariance),
        "trusted server": np.full((_AGENTS, 1), std / _AGENTS),
        "local DP": std * np.eye(_AGENTS),
        "no noise": np.zeros((_AGENTS, 1)),
    }
    print(f"{plan.describe()}; noise of the average {plan.central_ratio:.3f} × a trusted server's")
    for name, factor in factors.items():
        found = [run(factor, budget.clip, seed) for seed in range(arguments.seeds)]
        half = 1.96 * np.std(found) / len(found) ** 0.5
        print(f"{name:15s} test accuracy {np.mean(found):.3f} ± {half:.3f}")


if __name__ == "__main__":
    main()
