"""One agent's part of Algorithm 1 before it sends: gradient, clip, share of noise, half step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, final

import torch
from torch import Tensor

from corn.learn.batches import Batch, BatchSampler
from corn.learn.step import StepStatistics, compute_gradients, take_half_step
from corn.learn.tasks import Task
from corn.noise import NoiseSource, draw_share
from corn.plan import Plan
from corn.privacy import ClippedQuery


class Batches(Protocol):
    """Where mini-batches come from."""

    def draw(self, step: int) -> Batch:
        """The batch of a step, from 0, in one cell."""


@final
@dataclass(frozen=True)
class OneCell:
    """One agent's batches out of those of all, as a simulation draws them."""

    sampler: BatchSampler
    cell: int

    def draw(self, step: int) -> Batch:
        """See ``Batches``."""
        batch, own = self.sampler.draw(step), slice(self.cell, self.cell + 1)
        return replace(
            batch,
            inputs=batch.inputs[own],
            targets=batch.targets[own],
            weights=batch.weights[own],
        )


class Noise(Protocol):
    """One agent's noise, step by step."""

    def prepare(self, step: int) -> None:
        """Draw a step's noise now, while messages are on their way. It is released later, once."""

    def take(self, step: int) -> Tensor:
        """Return v_i of a step, float64 of shape (d,)."""


@final
class NoiseShare:
    """This agent's share of the noise under one plan, drawn when needed or shortly before.

    Every draw overwrites the one before.
    """

    def __init__(
        self, plan: Plan, agent: int, source: NoiseSource, *, nonce: bytes, num_parameters: int
    ) -> None:
        self._plan, self._agent, self._source = plan, agent, source
        self._nonce = nonce
        self._share = torch.empty(num_parameters, dtype=torch.float64)
        self._prepared: int | None = None

    def prepare(self, step: int) -> None:
        """See ``Noise``."""
        self._prepared = None  # a draw that is cut short must not be taken for noise
        draw_share(
            self._plan.decomposition,
            self._agent,
            source=self._source,
            nonce=self._nonce,
            step=step,
            stop=len(self._share),
            out=self._share.numpy(),
        )
        self._prepared = step

    def take(self, step: int) -> Tensor:
        """See ``Noise``."""
        if self._prepared != step:
            self.prepare(step)
        self._prepared = None
        return self._share


@final
class HalfStep:
    """From a model to the message of a step.

    Attributes:
        num_broken: gradients so far that were not finite and counted as zero; for the owner alone.
    """

    def __init__(self, task: Task, batches: Batches, query: ClippedQuery) -> None:
        self._task, self._batches, self._query = task, batches, query
        self._clip = torch.tensor([query.clip], dtype=torch.float64)
        self.num_broken = 0

    @torch.no_grad()
    def take(
        self,
        parameters: Tensor,
        noise: Tensor,
        *,
        step: int,
        step_size: float,
        grid: float,
        observe: bool = True,
    ) -> tuple[Tensor, StepStatistics]:
        """Return X − η (clipped gradient + noise, on the grid), shape (d,), and what happened.

        The norm of the noise, which takes a while to compute, is NaN unless asked to observe.
        """
        found = compute_gradients(
            self._task,
            parameters.view(1, 1, -1),
            self._batches.draw(step),
            self._clip,
            clips_samples=self._query.unit == "sample",
        )
        self.num_broken += int(found.num_broken.sum())
        half = take_half_step(
            parameters,
            found.values.view(-1),
            found.factors.view(-1),
            noise,
            grid=grid,
            step_size=step_size,
        )
        noise_norm = torch.linalg.vector_norm(noise if observe else noise[:0]).view(1, 1)
        return half, StepStatistics(found.norms, found.fraction_clipped, noise_norm)


def torch_type(plan: Plan) -> torch.dtype:
    """Return the type of models and messages."""
    return torch.float32 if plan.dtype == "float32" else torch.float64
