"""What the engine asks of a task: initial parameters, gradients of many models at once, scores."""

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
        fraction_clipped: shape (cells, trials), of samples; None where samples were not clipped.
        num_broken: shape (cells, trials): samples whose gradient was not finite and was taken as
            zero; None where samples were not clipped.
    """

    values: Tensor
    fraction_clipped: Tensor | None = None
    num_broken: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """Mean loss of each model over some samples, shape (models,), and accuracy where it exists."""

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
        """Inputs as the other methods want them; done once."""

    def initialize(self, seed: int) -> Tensor:
        """Where all agents start, shape (d,), float64."""

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        """The weighted sum of the samples' gradients for each model.

        Args:
            parameters: shape (cells, trials, d); not to be modified.
            batch: one mini-batch per cell.
            sample_clip: shape (trials,): clip every sample's gradient to this norm first. Norms
                and sums are then in its type, and so is the result. In float64 the rounding of the
                sum is far below what one sample can move, which in float32 it is not.
        """

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """Score models, shape (models, d), each on all the samples."""

    def describe(self) -> str:
        """Say in one line what is trained."""


@runtime_checkable
class ChecksTargets(Protocol):
    """A task that can say, before it starts, which targets it cannot learn."""

    def check_targets(self, targets: Tensor) -> None:
        """Raise ``InvalidArgumentError`` for targets that are not what the task takes."""


@runtime_checkable
class HasFingerprint(Protocol):
    """A task of which ``describe`` and the initial parameters do not say everything."""

    def fingerprint(self) -> bytes:
        """A hash of the rest that a result depends on."""


def seeded(seed: int) -> torch.Generator:
    """A generator of its own for a seed, so that nothing depends on global state."""
    return torch.Generator().manual_seed(seed)
