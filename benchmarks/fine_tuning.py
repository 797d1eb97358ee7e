"""LoRA of examples/fine_tuning.py across five agents against Opacus on the pooled samples.

Both have the adjacency of Opacus (adding or removing one sample), the same steps, rate, clip,
optimizer and noise: the multiplier is that of CorN's plan, which also holds against one insider.
Opacus uses its own sampler, its own gradients of single samples and its own noise::

    python3 -m venv /tmp/opacusenv
    /tmp/opacusenv/bin/pip install '.[frameworks]' opacus==1.6.0
    OMP_NUM_THREADS=1 /tmp/opacusenv/bin/python benchmarks/fine_tuning.py

It exits with 1 if the means differ by more than the standard deviation over Opacus' seeds.
"""

from __future__ import annotations

import argparse
import importlib
import math
import runpy
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_EXAMPLE = Path(__file__).parent.parent / "examples" / "fine_tuning.py"


def train_by_opacus(
    example: dict[str, Any], model: nn.Module, data: TensorDataset, *, noise_multiplier: float
) -> float:
    """Train on the pooled samples; return the ε that Opacus states."""
    opacus = importlib.import_module("opacus")
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = opacus.PrivacyEngine(accountant="prv")
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.Adam(trained, lr=example["RATE"]),
        data_loader=DataLoader(data, batch_size=example["BATCH"]),
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
    )
    for _ in range(example["EPOCHS"]):
        for images, classes in loader:
            optimizer.zero_grad()
            loss: Any = nn.functional.cross_entropy(private(images).logits, classes)
            loss.backward()
            optimizer.step()
    return float(engine.get_epsilon(example["DELTA"]))


def main() -> None:
    """Train both with each seed, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    warnings.filterwarnings("ignore")
    example = runpy.run_path(str(_EXAMPLE))
    public, private, test = example["load_data"]()
    ours, theirs = [], []
    for seed in range(seeds):
        model = example["make_model"](public, seed)
        optimizer = example["train"](model, private, adjacency="add-remove", seed=seed)
        ours.append(example["measure_accuracy"](model.eval(), test))
        plan = optimizer._plan
        noise = math.sqrt(plan.decomposition.covariance.sum())
        multiplier = noise / plan.budget.query.contribution
        model = example["make_model"](public, seed).train()
        epsilon = train_by_opacus(example, model, private, noise_multiplier=multiplier)
        theirs.append(example["measure_accuracy"](model.eval(), test))
        print(f"seed {seed}: corn {ours[-1]:.3f}, opacus {theirs[-1]:.3f}", flush=True)
    difference = statistics.mean(ours) - statistics.mean(theirs)
    spread = statistics.stdev(theirs)
    print(
        f"noise multiplier {multiplier:.4f}; ε: corn {optimizer.get_epsilon():.4f} against an "
        f"insider, opacus {epsilon:.4f} without"
    )
    for name, values in (("corn", ours), ("opacus", theirs)):
        print(f"{name:6s} {statistics.mean(values):.4f} ± {statistics.stdev(values):.4f} (std)")
    print(f"difference {difference:+.4f}")
    sys.exit(0 if abs(difference) <= spread else 1)


if __name__ == "__main__":
    main()
