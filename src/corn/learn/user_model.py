"""The module of the user's own training loop, read and written as one vector of parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn

from corn.errors import CornError, InvalidArgumentError
from corn.learn.batches import Batch
from corn.learn.sample_gradients import SampleGradients
from corn.learn.step import count_broken, fraction_clipped, sum_clipped_samples
from corn.learn.tasks.flat_module import (
    require_no_batch_statistics,
    tensor_bytes,
    trained_parameters,
)
from corn.learn.tasks.protocol import Gradients

# Gradients of single samples are clipped in float64, this many values at once.
_VALUES_AT_ONCE = 1 << 22


@final
class UserModel:
    """The user's module with the gradients of a batch, and a check that the rest stays as it is.

    Args:
        module: trained where ``requires_grad`` is set. Batch normalisation is refused.
        clips_samples: whether gradients of single samples are needed.
    """

    def __init__(self, module: nn.Module, *, clips_samples: bool) -> None:
        require_no_batch_statistics(module)
        self.module, self._trained = module, trained_parameters(module)
        if not self._trained:
            raise InvalidArgumentError(
                "module must have parameters that are not frozen, found none: set requires_grad"
            )
        # By identity, because ``==`` compares tensors by value.
        own = set(map(id, self._trained))
        everything = [*module.named_parameters(), *module.named_buffers()]
        # Copies of all values that get no noise: every step is compared with them.
        self._frozen = [(name, p, p.detach().clone()) for name, p in everything if id(p) not in own]
        self._samples = SampleGradients(module) if clips_samples else None
        self._is_checked = False

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters."""
        return sum(p.numel() for p in self._trained)

    def read(self) -> Tensor:
        """Return the trained parameters as one vector, in float64."""
        # In float64: parameters of several types then have one vector without loss.
        return torch.cat([p.detach().flatten().double().cpu() for p in self._trained])

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Set the trained parameters."""
        # Copied: the optimizer changes parameters in place, but not the caller's vector.
        for parameter, piece in self._split(vector):
            parameter.copy_(piece)

    @torch.no_grad()
    def set_gradient(self, vector: Tensor) -> None:
        """Set the gradient that the user's optimizer will see."""
        for parameter, piece in self._split(vector):
            # Copied: an optimizer may change gradients in place, and the vector is the caller's.
            parameter.grad = piece.to(parameter, copy=True)

    def forget_gradient(self) -> None:
        """Remove all gradients, so that no release is added to the next gradient."""
        for parameter in self._trained:
            parameter.grad = None

    @torch.no_grad()
    def compute(self, batch: Batch, sample_clip: Tensor | None) -> Gradients:
        """Return the gradient of a batch after the user's backward pass."""
        if all(p.grad is None for p in self._trained):
            raise CornError("call loss.backward() before optimizer.step(): there is no gradient")
        if self._samples is None or sample_clip is None:
            # A parameter that this batch did not reach counts as zero: the vector always has length
            # d.
            pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained]
            return Gradients(torch.cat([g.flatten().cpu() for g in pieces]).view(1, 1, -1).clone())
        # Padding is in the user's batch as well, so that its width is the number of samples. The
        # weights of a ``Batch`` remove padding from the sum.
        slopes = self._samples.take(batch.inputs.shape[1])
        # Once, before anything is released: whether it holds depends on the layers, not on data.
        if not self._is_checked:
            self._samples.check(slopes)
            self._is_checked = True
        return self._sum(slopes.cpu(), batch, sample_clip)

    def _sum(self, slopes: Tensor, batch: Batch, sample_clip: Tensor) -> Gradients:
        # In the clip's type, float64: see ``sum_clipped_samples``.
        total = torch.zeros(slopes.shape[1], dtype=sample_clip.dtype)
        rows = max(1, _VALUES_AT_ONCE // slopes.shape[1])
        factors = []
        pieces = zip(torch.split(slopes, rows), torch.split(batch.weights[0], rows), strict=True)
        for own, weights in pieces:
            found, factor = sum_clipped_samples(
                own.to(sample_clip.dtype), sample_clip, weights, most_samples=batch.most_samples
            )
            total += found
            factors.append(factor)
        # As (cells, samples, trials), with one cell and one trial.
        every = torch.cat(factors).view(1, -1, 1)
        return Gradients(
            total.view(1, 1, -1),
            fraction_clipped(every, batch.weights),
            count_broken(every, batch.weights),
        )

    def require_frozen(self) -> None:
        """Raise if a frozen parameter or a buffer has changed: no noise covers such a change."""
        for name, tensor, before in self._frozen:
            if not torch.equal(tensor, before):
                raise CornError(
                    f"{name!r} is not trained and must not change, found that it did: it would "
                    "depend on data without noise"
                )

    def describe(self) -> str:
        """Return the layers and the trained parameters in one line."""
        return f"{type(self.module).__name__} with {self.num_parameters} parameters"

    def fingerprint(self) -> bytes:
        """Return a hash of layers, trained parameters and frozen values."""
        # Of trained parameters only the names: their values are the start, which is compared apart.
        named = [name for name, p in self.module.named_parameters() if p.requires_grad]
        digest = hashlib.sha256(f"{self.module!r}; training {named}".encode())
        for _, tensor, _ in self._frozen:
            digest.update(tensor_bytes(tensor))
        return digest.digest()

    def _split(self, vector: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        pieces = torch.split(vector, [p.numel() for p in self._trained])
        for parameter, piece in zip(self._trained, pieces, strict=True):
            yield parameter, piece.view_as(parameter)
