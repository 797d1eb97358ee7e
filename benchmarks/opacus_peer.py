"""The trusted server of CorN (``central``) against Opacus: same model, data, clip, rate and noise.

Both train softmax regression on MNIST with Poisson sampling, clipped sample gradients and Gaussian
noise. Opacus uses its own sampler, its own gradients of single samples and its own PRV accountant,
on the pooled data of all agents. The adjacency is Opacus', adding or removing one sample. With n
agents that divide by B each, the average has n·B as its divisor, and noise of standard deviation
1/(n √b) is a noise multiplier of B/(C √b).

Opacus is no dependency of CorN and wants its own environment::

    python3 -m venv /tmp/opacusenv
    /tmp/opacusenv/bin/pip install . opacus==1.6.0
    OMP_NUM_THREADS=1 /tmp/opacusenv/bin/python benchmarks/opacus_peer.py --data-dir DATA
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from corn.checks import FloatArray
from corn.learn import (
    Constant,
    Mechanism,
    SweepSettings,
    TrainingProblem,
    Trial,
    Workload,
    run_sweep,
)
from corn.privacy import PrivacyBudget, account_precision
from corn.privacy.rounding import round_bound_down, round_up
from corn.threads import limit_threads
from corn.topology import load_network

_AGENTS, _RATE, _CLIP, _DELTA = 20, 0.05, 1.0, 1e-5


def train_corn(
    problem: TrainingProblem, method: Mechanism, arguments: argparse.Namespace
) -> FloatArray:
    """Return the test accuracy of the server's model for each seed."""
    settings = SweepSettings(
        num_steps=arguments.steps,
        batch_size=None if method.budget is None else method.budget.batch_size,
        seeds=tuple(range(arguments.seeds)),
    )
    result = run_sweep(
        problem,
        load_network(f"complete:{_AGENTS}", mixing="sum"),
        [Trial(method, Constant(arguments.step_size))],
        settings=settings,
        evaluate_at=[arguments.steps],
        max_train_samples=100,
    )
    return np.array([float(row["test_accuracy"]) for row in result.last_rows])


def train_opacus(
    problem: TrainingProblem,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    budget: PrivacyBudget,
    *,
    num_agents: int,
    part: str,
) -> tuple[float, float, Any]:
    """Return accuracy and loss of one run on the pooled data, and the accountant that watched it.

    The run has the steps, clip, rate and noise of a trusted server under the budget, which is for
    agents with equally many samples. Opacus draws from torch's default generator.
    """
    opacus = importlib.import_module("opacus")
    inputs, targets = problem.data.inputs.float(), problem.data.targets
    rate = budget.query.sampling_rate or 1.0
    batch_size = budget.query.batch_size or 1
    # Opacus samples at a rate of one over the number of batches.
    loader: Any = DataLoader(TensorDataset(inputs, targets), batch_size=num_agents * batch_size)
    if not math.isclose(1 / len(loader), rate):
        raise ValueError(f"the rate of Opacus must be {rate}, found one over {len(loader)}")
    engine = opacus.PrivacyEngine(accountant="prv")
    private, private_optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=find_noise_multiplier(budget),
        max_grad_norm=budget.clip,
        # Norms of single gradients without the gradients: ten times as fast.
        grad_sample_mode="ghost",
    )
    step = 0
    while step < budget.num_steps:
        for X, y in loader:
            private_optimizer.zero_grad()
            criterion(private(X), y).backward()
            private_optimizer.step()
            step += 1
            if step == budget.num_steps:
                break
    X, y = problem.parts[part]
    with torch.no_grad():
        outputs = model(X.float())
    accuracy = (outputs.argmax(dim=1) == y).double().mean()
    return float(accuracy), float(functional.cross_entropy(outputs, y)), engine.accountant


def find_noise_multiplier(budget: PrivacyBudget) -> float:
    """Return the noise of a trusted server in units of the clip, as Opacus counts it."""
    return (budget.batch_size or 1) * budget.independent_noise_std / budget.clip


def bound_opacus(accountant: Any) -> tuple[float, float]:
    """Return the lower and the upper bound of Opacus on the ε that was spent."""
    errors = {"eps_error": 0.01, "delta_error": _DELTA / 1000}
    lower, _, upper = accountant._get_dprv(**errors).compute_epsilon(_DELTA, **errors)
    return float(lower), float(upper)


def describe(accuracies: FloatArray) -> str:
    """Return mean ± half the width of the 95 % interval."""
    count = len(accuracies)
    half = stats.t.ppf(0.975, count - 1) * accuracies.std(ddof=1) / math.sqrt(count)
    return f"{accuracies.mean():.4f} ± {half:.4f}"


def main() -> None:
    """Train with both, and compare ε, noise and accuracy; exit 1 where they disagree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", required=True, help="directory of data sets, with mnist")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--step-size", type=float, default=0.5)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    try:
        calibration = importlib.import_module("opacus.accountants.utils")
    except ImportError:
        sys.exit("opacus is not installed here: see the head of this file")
    warnings.filterwarnings("ignore", module="opacus|torch")
    warnings.filterwarnings("ignore", message="Full backward hook")
    limit_threads()
    # Equal shares, so that one rate and one divisor are those of every agent and of the pool.
    problem = Workload(
        "mnist",
        model="linear",
        partition="iid",
        l2=0.0,
        directory=arguments.data_dir,
    ).build(_AGENTS)
    batch_size = round(_RATE * min(problem.data.sizes))
    budget = PrivacyBudget(
        arguments.epsilon,
        _DELTA,
        arguments.steps,
        _CLIP,
        unit="sample",
        adjacency="add-remove",
        batch_size=batch_size,
        sampling_rate=_RATE,
    )
    method = Mechanism.central(budget, _AGENTS)
    noise_multiplier = find_noise_multiplier(budget)
    theirs_asked = calibration.get_noise_multiplier(
        target_epsilon=arguments.epsilon,
        target_delta=_DELTA,
        sample_rate=_RATE,
        steps=arguments.steps,
        accountant="prv",
        epsilon_tolerance=1e-4,
    )
    print(f"{budget.describe()}; trusted server")
    print(f"noise multiplier: corn {noise_multiplier:.4f}, opacus asks for {theirs_asked:.4f}")
    start = time.perf_counter()
    ours = train_corn(problem, method, arguments)
    middle = time.perf_counter()
    runs = []
    for seed in range(arguments.seeds):
        torch.manual_seed(seed)
        model = nn.Linear(problem.data.inputs.shape[1], 10)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=arguments.step_size)
        runs.append(
            train_opacus(problem, model, optimizer, budget, num_agents=_AGENTS, part="test")
        )
    end = time.perf_counter()
    theirs = np.array([accuracy for accuracy, _, _ in runs])
    # The precision diagonal of the server's noise is the cap, the same for all agents.
    loss = account_precision(method.precision, budget.query, num_steps=arguments.steps)
    spent, (lower, upper) = loss.worst_epsilon(_DELTA), bound_opacus(runs[0][2])
    print(
        f"ε spent: corn {round_up(spent)}, opacus between {round_bound_down(lower)} and "
        f"{round_up(upper)}"
    )
    print(
        f"test accuracy, {arguments.seeds} seeds: corn {describe(ours)}, opacus {describe(theirs)}"
    )
    print(f"seconds: corn {middle - start:.0f}, opacus {end - middle:.0f}")
    difference = float(ours.mean() - theirs.mean())
    p_value = float(stats.ttest_ind(ours, theirs, equal_var=False).pvalue)
    print(f"difference of accuracies {difference:+.4f} (Welch's test, p = {p_value:.2f})")
    agrees = lower <= spent <= upper and noise_multiplier <= theirs_asked and p_value > 0.01
    print("they agree" if agrees else "they do not agree")
    sys.exit(0 if agrees else 1)


if __name__ == "__main__":
    main()
