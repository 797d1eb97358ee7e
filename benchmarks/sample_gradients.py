"""Clipped gradients of single samples of a small CNN: CorN against Opacus, same model and batch.

Three ways to the same sum of clipped gradients:

- ``loop``: the user's own loop with ``corn.make_private``, where ``torch.func`` runs each sample
  alone, clipped and summed in float64, as a release needs;
- ``task``: ``ModuleTask``, which ``corn.train`` and agents use: ``torch.func``, in float64 too;
- ``opacus``: ``GradSampleModule`` and the clipping of ``DPOptimizer``, in float32.

Opacus is no dependency of CorN and wants its own environment::

    python3 -m venv /tmp/opacusenv
    /tmp/opacusenv/bin/pip install . opacus==1.6.0
    OMP_NUM_THREADS=1 /tmp/opacusenv/bin/python benchmarks/sample_gradients.py

It exits with 1 if the loop takes more than 1.5 times as long as Opacus.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from corn.learn.batches import Batch
from corn.learn.own_loop import ClippedSums
from corn.learn.tasks import ModuleTask, small_cnn
from corn.learn.user_model import SampleGradients
from corn.threads import limit_threads
from measuring import best_seconds

_CLIP, _LIMIT = 1.0, 1.5


def compute_in_loop(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    """Return the work of one step in the user's loop, without noise and optimizer."""
    module = copy.deepcopy(model)
    gradients, num_parameters = SampleGradients(module), sum(p.numel() for p in model.parameters())
    count = len(images)
    weights = torch.full((1, count), 1 / count, dtype=torch.float64)
    batch = Batch(torch.arange(count)[None], torch.arange(count)[None], weights, True, count)

    def run() -> Tensor:
        sums = ClippedSums([batch], clip=_CLIP, num_parameters=num_parameters, num_pieces=1)
        sums.show()
        outputs = module(gradients.begin(images, count))
        sums.add(gradients.take(functional.cross_entropy(outputs, labels, reduction="none")))
        return sums.of_agent(0).values.view(-1)

    return run


def compute_by_task(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    """Return the same work by ``torch.func``, as agents do it."""
    task = ModuleTask(model, functional.cross_entropy)
    vector = task.initialize(0).float().view(1, 1, -1)
    count = len(images)
    weights = torch.full((1, count), 1 / count, dtype=torch.float64)
    batch = Batch(images[None], labels[None], weights, True, count)
    clip = torch.tensor([_CLIP], dtype=torch.float64)
    return lambda: task.gradient(vector, batch, sample_clip=clip).values.view(-1)


def compute_by_opacus(
    opacus: Any, model: nn.Module, images: Tensor, labels: Tensor
) -> Callable[[], Tensor]:
    """Return the same work by Opacus, without noise and optimizer."""
    wrapped = opacus.GradSampleModule(copy.deepcopy(model))
    inner = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    optimizer = opacus.optimizers.DPOptimizer(
        inner, noise_multiplier=0.0, max_grad_norm=_CLIP, expected_batch_size=len(images)
    )

    def run() -> Tensor:
        optimizer.zero_grad()
        loss: Any = functional.cross_entropy(wrapped(images), labels)
        loss.backward()
        optimizer.clip_and_accumulate()
        pieces = [p.summed_grad.flatten() / len(images) for p in wrapped.parameters()]
        return torch.cat(pieces)

    return run


def main() -> None:
    """Compare times of calls in turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--side", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    limit_threads()
    torch.manual_seed(0)
    model = small_cnn((arguments.side, arguments.side), 10)
    images = torch.randn(arguments.batch, 1, arguments.side, arguments.side)
    labels = torch.randint(0, 10, (arguments.batch,))
    ways = {
        "loop": compute_in_loop(model, images, labels),
        "task": compute_by_task(model, images, labels),
    }
    try:
        opacus = importlib.import_module("opacus")
    except ImportError:
        sys.exit("opacus is not installed here: see the head of this file")
    warnings.filterwarnings("ignore")
    ways["opacus"] = compute_by_opacus(opacus, model, images, labels)
    expected = ways["task"]()
    for name, run in ways.items():
        torch.testing.assert_close(run().double(), expected, rtol=1e-4, atol=1e-6, msg=name)
    seconds = best_seconds(ways, arguments.repeats)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters, batch of {arguments.batch}, {arguments.side}×{arguments.side}")
    for name, best in seconds.items():
        print(f"{name:7s} {1e3 * best:7.1f} ms, {best / seconds['opacus']:.2f} × opacus")
    sys.exit(0 if seconds["loop"] <= _LIMIT * seconds["opacus"] else 1)


if __name__ == "__main__":
    main()
