"""The model of a Flower server that sees masked updates only, next to a trusted server's.

It repeats ``examples/flower_app.py`` without Flower, with the same data, local training, clipping
and rounds, for many seeds: the noise of exact sums, a trusted server's noise on the average, local
DP and no noise. Noise is drawn from seeds, and is not rounded. At last the time of one round's
message, of one client and of the server, for a model of ``--parameters`` weights.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from sklearn.datasets import make_classification

from corn.checks import FloatArray
from corn.distributed import make_keys
from corn.engines import AgentRelease, average_updates
from corn.plan import Plan, make_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network
from measuring import describe

_AGENTS, _ROUNDS, _ROWS = 6, 15, 100


def train_locally(weights: FloatArray, inputs: Any, labels: Any) -> FloatArray:
    """Return the weights after twenty steps of logistic regression."""
    for _ in range(20):
        slope = inputs.T @ (1 / (1 + np.exp(-inputs @ weights)) - labels) / len(labels)
        weights = weights - 0.5 * slope
    return weights


def run(noise_std: float, clip: float, seed: int) -> float:
    """Return the test accuracy of the server's model, with this noise on the average update."""
    data, labels = make_classification(1000, 20, n_informative=8, class_sep=2.0, random_state=1)
    inputs = np.column_stack([np.clip(data, -5, 5) / 5, np.ones(len(data))])
    random, weights = np.random.default_rng(seed), np.zeros(inputs.shape[1])
    for _ in range(_ROUNDS):
        updates = []
        for agent in range(_AGENTS):
            own = slice(_ROWS * agent, _ROWS * (agent + 1))
            update = train_locally(weights, inputs[own], labels[own]) - weights
            updates.append(update * min(1.0, clip / float(np.linalg.norm(update))))
        noise = noise_std * random.standard_normal(len(weights))
        weights = weights + np.mean(updates, axis=0) + noise
    rest = slice(_ROWS * _AGENTS, None)
    return float(np.mean((inputs[rest] @ weights > 0) == labels[rest]))


def time_round(plan: Plan, num_parameters: int) -> tuple[float, float, float]:
    """Return seconds of a client's message and of the server's sum, and bytes per parameter."""
    update = np.full(num_parameters, 1e-4)
    with TemporaryDirectory() as folder:
        make_keys(Path(folder), plan.num_agents)
        agents = [AgentRelease(plan, k, Path(folder)) for k in range(plan.num_agents)]
        # Once before, as the first release verifies the plan and compiles.
        for _ in range(2):
            nonces = {agent.agent: agent.say_hello().nonce for agent in agents}
            began = time.perf_counter()
            sent = [each.release(each.clip_update(update), nonces) for each in agents]
            client = (time.perf_counter() - began) / plan.num_agents
        began = time.perf_counter()
        if average_updates(plan, sent) is None:
            raise SystemExit("the masks did not cancel")
        return client, time.perf_counter() - began, sent[0].integers.nbytes / num_parameters


def main() -> None:
    """Print mean accuracies with 95 % intervals, and times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epsilon", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    arguments = parser.parse_args()
    budget = PrivacyBudget(arguments.epsilon, 1e-5, num_steps=_ROUNDS, clip=1.0)
    plan = make_plan(load_network(f"complete:{_AGENTS}", mixing="sum"), budget)
    std = budget.independent_noise_std
    noises = {
        "exact sums": float(plan.decomposition.total_variance) ** 0.5 / _AGENTS,
        "trusted server": std / _AGENTS,
        "local DP": std / _AGENTS**0.5,
        "no noise": 0.0,
    }
    print(f"{plan.describe()}; noise of the average {plan.central_ratio:.3f} × a trusted server's")
    for name, noise_std in noises.items():
        found = [run(noise_std, budget.clip, seed) for seed in range(arguments.seeds)]
        print(f"{name:15s} test accuracy {describe(found)}")
    client, server, size = time_round(plan, arguments.parameters)
    print(
        f"{arguments.parameters:,} parameters: {client:.3f} s for the message of a client, of "
        f"{size:g} bytes per parameter; {server:.3f} s for the sum of {_AGENTS} on the server"
    )


if __name__ == "__main__":
    main()
