"""The interface of a task: initial parameters, gradients of many models at once, scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from corn.learn.batches import Batch


@dataclass(frozen=True, eq=False)
class Gradients:
    """One gradient for each model.

    Attributes:
        values: shape (cells, trials, parameters).
        fraction_clipped: shape (cells, trials): fraction of samples that were clipped; None where
            samples are not clipped one by one.
        num_broken: shape (cells, trials): number of samples whose gradient was not finite and
            counts as zero; None where samples are not clipped one by one.
    """

    values: Tensor
    fraction_clipped: Tensor | None = None
    num_broken: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """Mean loss of each model over some samples, shape (models,), and accuracy if it has one."""

    loss: Tensor
    accuracy: Tensor | None = None


class Task(Protocol):
    """A model and its loss, with parameters flattened to one vector.

    A *cell* is one agent in one seed's run, and has data; its *trials* are the models that differ
    in mechanism or step size and share that data.
    """

    @property
    def num_parameters(self) -> int:
        """The length d of the parameter vector."""

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return inputs in the form that the other methods expect; called once."""

    def initialize(self, seed: int) -> Tensor:
        """Return the initial parameters of all agents, shape (d,), float64."""

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        """Return the weighted sum of the samples' gradients for each model.

        Args:
            parameters: shape (cells, trials, d); not to be modified.
            batch: one mini-batch per cell.
            sample_clip: shape (trials,): clip each sample's gradient to this norm first. Norms,
                sums and the result are then in its type. In float64 the rounding of the sum is far
                below one sample's sensitivity; in float32 it is not.
        """

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """Score models, shape (models, d), each on all the samples."""

    def describe(self) -> str:
        """Return one line that describes the model."""


@runtime_checkable
class ChecksTargets(Protocol):
    """A task that checks targets before training starts."""

    def check_targets(self, targets: Tensor) -> None:
        """Raise ``InvalidArgumentError`` for targets that the task cannot learn."""


@runtime_checkable
class HasFingerprint(Protocol):
    """A task with details that ``describe`` and the initial parameters do not show."""

    def fingerprint(self) -> bytes:
        """Return a hash of those details, as far as results depend on them."""


def seeded(seed: int) -> torch.Generator:
    """Return a new generator for a seed, so that nothing depends on global state."""
    return torch.Generator().manual_seed(seed)
