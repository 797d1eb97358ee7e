"""The half step of an agent: gradient, clip, share of the noise, step, before anything is sent."""

from __future__ import annotations

from typing import Protocol, final

import torch
from torch import Tensor

from corn.checks import FloatArray
from corn.distributed.messages import ProtocolError
from corn.distributed.public_state import PublicState
from corn.learn.batches import Batch, BatchSampler
from corn.learn.step import (
    ClippedGradients,
    StepStatistics,
    compute_gradients,
    release_masked,
    smooth,
    take_half_step,
)
from corn.learn.tasks import Task
from corn.noise.masks import MaskWords
from corn.privacy import ClippedQuery


class UpdateRule(Protocol):
    """A caller's own rule for steps along releases.

    It must see nothing but releases and public models: then it is post-processing, whatever it
    does.
    """

    def begin_step(self, step: int) -> None:
        """Learn the number of the step of the network that begins."""

    def take_step(self, released: Tensor) -> Tensor:
        """Return the half step along a released gradient, or the average of all agents'."""

    def save(self) -> PublicState:
        """Return what the rule keeps between steps."""

    def restore(self, state: PublicState) -> None:
        """Go on with what another agent's rule keeps."""


@final
class CellBatches:
    """One agent's batches out of those of all agents, as a simulation draws them."""

    def __init__(self, sampler: BatchSampler, cell: int) -> None:
        self._sampler, self._cell = sampler, cell

    def draw(self, number: int) -> Batch:
        """Return the batch of a number, from 0, in one cell."""
        return self._sampler.draw(number).take(self._cell)


@final
class HalfStep:
    """An agent's part of a step before it sends: gradient, clip, share of the noise, half step.

    Attributes:
        num_broken: gradients so far that were not finite and counted as zero; for the owner alone.
        memory: the average of the releases that it steps along, its own or where they are summed
            exactly those of all agents; None without momentum.

    ``update`` replaces the step along the release, or along the average of all releases. A step
    whose sum is void is not taken at all.
    """

    def __init__(
        self,
        task: Task,
        batches: CellBatches,
        query: ClippedQuery,
        *,
        momentum: float = 0.0,
        update: UpdateRule | None = None,
    ) -> None:
        self._task, self._batches, self._query = task, batches, query
        self._momentum, self._update = momentum, update
        self.memory = torch.zeros(task.num_parameters) if momentum else None
        # Releases are clipped in float64, so that the true norm is at most C (docs/floats.md).
        self._clip = torch.tensor([query.clip], dtype=torch.float64)
        # Whether a gradient is finite depends on data without noise, so this count is never sent.
        self.num_broken = 0

    def begin(self, step: int) -> None:
        """Begin a step of the network."""
        if self._update is not None:
            self._update.begin_step(step)

    @torch.no_grad()
    def take(
        self,
        parameters: Tensor,
        noise: Tensor,
        *,
        number: int,
        step_size: float,
        grid: float,
        observe: bool = True,
    ) -> tuple[Tensor, StepStatistics]:
        """Return X − η (clipped gradient + noise, on the grid), shape (d,), and its statistics.

        With momentum, the average of all releases so far takes the place of this one.

        ``number`` is that of the release, which decides the batch. The norm of the noise, which
        takes a while to compute, is NaN unless ``observe``.
        """
        found = self._compute(parameters, number)
        clipped = found.values.view(-1), found.factors.view(-1)
        if self._update is None and self.memory is None:
            # Rounding to the grid must follow the sum of gradient and noise (docs/floats.md), so
            # one function does both.
            half = take_half_step(parameters, *clipped, noise, grid=grid, step_size=step_size)
        else:
            # A step of size −1 from zero is the release itself.
            zero = torch.zeros_like(parameters)
            released = take_half_step(zero, *clipped, noise, grid=grid, step_size=-1.0)
            half = self.move(parameters, released, step_size=step_size)
        return half, _summarize(found, noise, observe=observe)

    @torch.no_grad()
    def take_masked(
        self,
        parameters: Tensor,
        noise: Tensor,
        *,
        number: int,
        grid: float,
        offset: FloatArray,
        mask: MaskWords,
        observe: bool = True,
    ) -> tuple[MaskWords, StepStatistics]:
        """Return the release for an exact sum, under masks, and its statistics: see ``take``."""
        found = self._compute(parameters, number)
        clipped = found.values.view(-1), found.factors.view(-1)
        words = release_masked(*clipped, noise, grid=grid, offset=offset, mask=mask)
        return words, _summarize(found, noise, observe=observe)

    @torch.no_grad()
    def move(self, parameters: Tensor, released: Tensor, *, step_size: float) -> Tensor:
        """Return the step along a release, or the average of all agents'; by the caller's rule.

        Operations round one by one, in a fixed order: where releases are summed exactly all agents
        get the same bits, on whatever machine.
        """
        if self._update is not None:
            return self._update.take_step(released)
        if self.memory is not None:
            self.memory = smooth(self.memory.to(parameters), released, self._momentum)
            released = self.memory
        return parameters - released * parameters.new_full((1,), step_size)

    def save(self) -> PublicState:
        """Return what this agent keeps between steps where releases are summed exactly."""
        if self._update is not None:
            return self._update.save()
        return {} if self.memory is None else {"memory": self.memory}

    def restore(self, state: PublicState) -> None:
        """Go on with what another agent keeps; raise ``ProtocolError`` where it does not fit."""
        if self._update is not None:
            self._update.restore(state)
        elif self.memory is not None and "memory" in state:
            if state["memory"].shape != self.memory.shape:
                raise ProtocolError("sent an average of releases of another length")
            self.memory = state["memory"]

    def _compute(self, parameters: Tensor, number: int) -> ClippedGradients:
        # The same code as in a simulation, for one cell: one place to check clipping and rounding.
        found = compute_gradients(
            self._task,
            parameters.view(1, 1, -1),
            self._batches.draw(number),
            self._clip,
            clips_samples=self._query.unit == "sample",
        )
        self.num_broken += int(found.num_broken.sum())
        return found


def _summarize(found: ClippedGradients, noise: Tensor, *, observe: bool) -> StepStatistics:
    noise_norm = torch.linalg.vector_norm(noise if observe else noise[:0]).view(1, 1)
    return StepStatistics(found.norms, found.fraction_clipped, noise_norm)
