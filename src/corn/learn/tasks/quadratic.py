"""The paper's quadratic task: two-dimensional bowls with different centres and orientations.

Agent i = 1 … n/2 has f_i(x) = 15 (x₁ + i)² + x₂², the others 15 (x₁ − i)² + x₂², rotated by 15°
around their minimisers (i, 0). The paper's text does not state where agents start, and states its
step size in two ways. With C = 0.1 and gradients of norm 600, clipped steps cannot reach the
minimiser from a distance: from x = 0 the gap stays near 600 for every mechanism. So agents start
**at the global minimiser** and the gap measures the effect of noise, with η_t = 0.01/√t. The other
reading (η_t = 1/√t from x = 0) puts the mechanisms in the same order.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from corn.checks import FloatArray
from corn.errors import InvalidArgumentError
from corn.learn.batches import AgentData, Batch
from corn.learn.step import (
    clip_factors,
    drop_broken,
    norms_at_least,
)
from corn.learn.tasks.protocol import Gradients, Scores

_STIFFNESS, _ANGLE_DEGREES = 15.0, 15.0


def quadratic_objectives(num_agents: int) -> tuple[FloatArray, FloatArray]:
    """Return A, shape (n, 2, 2), and c, shape (n, 2), of f_i(x) = (x − c_i)ᵀA_i(x − c_i)."""
    if num_agents < 2 or num_agents % 2:
        raise InvalidArgumentError(f"num_agents must be even and at least 2, found {num_agents}")
    half = num_agents // 2
    angle = np.deg2rad(_ANGLE_DEGREES)
    Q = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    plain = np.diag([_STIFFNESS, 1.0])
    matrices = np.stack([plain] * half + [Q @ plain @ Q.T] * half)
    # Centres −i for the first half and +i for the second, i = 1 … n, as in the paper.
    places = np.arange(1, num_agents + 1) * np.where(np.arange(num_agents) < half, -1.0, 1.0)
    return matrices, np.stack([places, np.zeros(num_agents)], axis=1)


@final
class Quadratic:
    """f_i(x) = (x − c_i)ᵀA_i(x − c_i); the one "sample" of agent i is its own A_i and c_i.

    Agents start at the minimiser of the average unless ``start`` is given.

    >>> task = Quadratic.from_paper(20)
    >>> task.minimizer.round(5).tolist(), round(task.minimum, 3)
    ([2.84555, 15.07599], 1434.305)
    """

    def __init__(
        self, matrices: FloatArray, centers: FloatArray, *, start: FloatArray | None = None
    ) -> None:
        self._matrices, self._centers = np.array(matrices), np.array(centers)
        if self._matrices.shape != (*self._centers.shape, self._centers.shape[-1]):
            raise InvalidArgumentError(
                f"matrices must have shape (n, d, d) for centers (n, d), found "
                f"{self._matrices.shape} and {self._centers.shape}"
            )
        self._start = self.minimizer if start is None else np.array(start, dtype=np.float64)

    @classmethod
    def from_paper(cls, num_agents: int, *, start: FloatArray | None = None) -> Quadratic:
        """Make the paper's objectives."""
        return cls(*quadratic_objectives(num_agents), start=start)

    @property
    def minimizer(self) -> FloatArray:
        """x* of the average objective, shape (d,)."""
        # Σ A_i (x − c_i) = 0.
        pull = np.einsum("nij,nj->i", self._matrices, self._centers)
        return np.asarray(np.linalg.solve(self._matrices.sum(axis=0), pull))

    @property
    def minimum(self) -> float:
        """f(x*) of the average objective."""
        offset = self.minimizer - self._centers
        return float(np.einsum("ni,nij,nj->n", offset, self._matrices, offset).mean())

    @property
    def num_parameters(self) -> int:
        """See ``Task``."""
        return int(self._centers.shape[1])

    def agent_data(self, dtype: torch.dtype = torch.float32) -> AgentData:
        """Return one sample per agent: its A_i, row by row, then its c_i."""
        n, d = self._centers.shape
        rows = np.concatenate([self._matrices.reshape(n, d * d), self._centers], axis=1)
        offsets = tuple(range(n + 1))
        return AgentData(torch.from_numpy(rows).to(dtype), torch.zeros(n, dtype=dtype), offsets)

    def prepare(self, inputs: Tensor) -> Tensor:
        """See ``Task``."""
        return inputs

    def initialize(self, seed: int) -> Tensor:  # noqa: ARG002
        """See ``Task``; the same for every seed."""
        return torch.from_numpy(self._start.copy())

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        """See ``Task``."""
        # The objective itself is the sample, so that mini-batches and clipping work as for data.
        A, c = self._unpack(batch.inputs)
        # (cells, batch, trials, d).
        offset = parameters.unsqueeze(1) - c.unsqueeze(2)
        slopes = 2 * torch.einsum("kbij,kbvj->kbvi", A, offset)
        weights = batch.weights.unsqueeze(-1)
        if sample_clip is None:
            return Gradients((weights.unsqueeze(-1) * slopes).sum(dim=1))
        slopes = slopes.to(sample_clip.dtype)
        rounding = batch.most_samples**2
        factors = clip_factors(norms_at_least(slopes), sample_clip, rounding=rounding)
        slopes = drop_broken(slopes, factors)
        values = ((weights.to(factors) * factors).unsqueeze(-1) * slopes).sum(dim=1)
        return Gradients.of_samples(values, factors, batch.weights)

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:  # noqa: ARG002
        """See ``Task``."""
        A, c = self._unpack(inputs)
        offset = parameters.unsqueeze(1) - c
        return Scores(torch.einsum("pbi,bij,pbj->pb", offset, A, offset).mean(dim=1))

    def describe(self) -> str:
        """See ``Task``."""
        return f"quadratic objectives of {len(self._centers)} agents in {self.num_parameters} dims"

    def _unpack(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        d = self.num_parameters
        matrices = inputs[..., : d * d]
        return matrices.view(*inputs.shape[:-1], d, d), inputs[..., d * d :]
