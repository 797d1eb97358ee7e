"""Training with Opacus on the pooled rows of all agents, as several benchmarks compare with.

Opacus uses its own sampler, its own gradients of single samples and its own noise. It is no
dependency of CorN and wants its own environment::

    python3 -m venv /tmp/opacusenv
    /tmp/opacusenv/bin/pip install . opacus==1.6.0
"""

from __future__ import annotations

import importlib
import math
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from corn.learn import TrainingProblem


def train_opacus(
    problem: TrainingProblem,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rate: float,
    clip: float,
    noise_multiplier: float,
    num_steps: int,
    part: str = "test",
) -> tuple[float, float]:
    """Return accuracy and loss of one run; Opacus draws from torch's default generator."""
    opacus = importlib.import_module("opacus")
    # Opacus and torch warn of hooks that torch is to change.
    warnings.filterwarnings("ignore", module="opacus|torch")
    warnings.filterwarnings("ignore", message="Full backward hook")
    inputs, targets = problem.data.inputs.float(), problem.data.targets
    # Opacus samples at a rate of one over the number of batches.
    size = math.ceil(len(inputs) / round(1 / rate))
    loader: Any = DataLoader(TensorDataset(inputs, targets), batch_size=size)
    engine = opacus.PrivacyEngine(accountant="prv")
    private, private_optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=noise_multiplier,
        max_grad_norm=clip,
        # Norms of single gradients without the gradients: ten times as fast.
        grad_sample_mode="ghost",
    )
    step = 0
    while step < num_steps:
        for X, y in loader:
            private_optimizer.zero_grad()
            criterion(private(X), y).backward()
            private_optimizer.step()
            step += 1
            if step == num_steps:
                break
    X, y = problem.parts[part]
    with torch.no_grad():
        outputs = model(X.float())
    accuracy = (outputs.argmax(dim=1) == y).double().mean()
    return float(accuracy), float(functional.cross_entropy(outputs, y))
