"""One agent's part of Algorithm 1 before it speaks: gradient, clip, own share of noise, half step.

The same operations in the same order as the batched engine (:mod:`corn.learn.simulation`), for one
agent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from corn.errors import CornError
from corn.learn.batches import Batch, BatchSampler
from corn.learn.clipping import clip_factors, gradient_norms
from corn.learn.simulation import StepStatistics
from corn.learn.tasks import Task
from corn.noise import NoiseSource, draw_share
from corn.plan import Plan
from corn.privacy import ClippedQuery


class BrokenError(CornError):
    """Gradients are not finite: nothing of this step may be sent."""


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
        return Batch(batch.inputs[own], batch.targets[own], batch.weights[own], batch.is_average)


class Noise(Protocol):
    """One agent's noise, step by step."""

    def prepare(self, step: int) -> None:
        """Draw a step's noise now, while messages are on their way. It is released later, once."""

    def take(self, step: int) -> Tensor | None:
        """v_i of a step, shape (d,); None for no noise."""


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
        self._share = torch.empty(num_parameters, dtype=torch_type(plan))
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
            dtype=self._plan.noise_type,
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
    """From a model to the message of a step."""

    def __init__(self, task: Task, batches: Batches, query: ClippedQuery) -> None:
        self._task, self._batches, self._query = task, batches, query

    @torch.no_grad()
    def take(
        self, parameters: Tensor, noise: Tensor | None, *, step: int, step_size: float
    ) -> tuple[Tensor, StepStatistics]:
        """X − η (clipped gradient + noise), shape (d,), and what happened on the way.

        The sum in brackets comes first: what is rounded together with X is private already. The
        other way round, a gradient far smaller than X would be rounded to multiples of X's last
        place, and two that differ by the clip norm could end up further apart.
        """
        x, clip = parameters.view(1, 1, -1), self._query.clip
        limit = torch.full((1,), clip, dtype=x.dtype) if self._query.unit == "sample" else None
        found = self._task.gradient(x, self._batches.draw(step), sample_clip=limit)
        g = found.values.view(-1)
        norm = gradient_norms(g)
        if not bool(torch.isfinite(norm)):
            raise BrokenError(
                f"its gradients are not finite at step {step}: try a smaller step size"
            )
        factor = clip_factors(norm, clip) if limit is None else torch.ones_like(norm)
        g.mul_(factor)
        noise_norm = torch.zeros_like(norm)
        if noise is not None:
            g.add_(noise)
            noise_norm = torch.linalg.vector_norm(noise)
        half = torch.sub(parameters, g, alpha=step_size, out=g)
        clipped = found.fraction_clipped
        fraction = (factor < 1).to(norm) if clipped is None else clipped.view(())
        return half, StepStatistics(*(v.view(1, 1) for v in (norm, fraction, noise_norm)))


def torch_type(plan: Plan) -> torch.dtype:
    """The type in which agents compute: that of the plan's noise."""
    return torch.float32 if plan.noise_type == "float32" else torch.float64
