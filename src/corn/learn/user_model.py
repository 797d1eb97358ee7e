"""The module of the user's own training loop, read and written as one vector of parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

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
        # One gradient for each sample of the batch, from ``backward`` to ``compute``.
        self._rows: Tensor | None = None
        # Copies of the trained parameters as CorN wrote them last, in their own types.
        self._written: list[Tensor] = []

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
        self._written = [p.detach().clone() for p in self._trained]

    def require_unchanged(self) -> None:
        """Raise if the trained parameters are not those of the last ``write``."""
        if not has_same_values(self._written, [p.detach() for p in self._trained]):
            raise CornError(
                "parameters must not change between a batch and optimizer.step(), found that they "
                "did: the change could depend on data, and would be sent without noise; leave all "
                "changes to the optimizer"
            )

    @torch.no_grad()
    def set_gradient(self, vector: Tensor) -> None:
        """Set the gradient that the user's optimizer will see."""
        for parameter, piece in self._split(vector):
            # Copied: an optimizer may change gradients in place, and the vector is the caller's.
            parameter.grad = piece.to(parameter, copy=True)

    def forget_gradient(self) -> None:
        """Remove all gradients, so that no release is added to the next gradient."""
        self._rows = None
        if self._samples is not None:
            self._samples.clear()
        for parameter in self._trained:
            parameter.grad = None

    def watch(self, batch: Any, *, num_samples: int) -> Any:
        """Return a batch for the user's loop; see ``SampleGradients.watch``."""
        return batch if self._samples is None else self._samples.watch(batch, num_samples)

    def backward(self, losses: Tensor, *, num_samples: int) -> None:
        """Compute the gradient of each sample from the vector of their losses, and keep it."""
        if self._samples is None:
            raise CornError(
                "optimizer.backward(losses) is for unit='sample', found unit='agent': call "
                "loss.backward() with any loss of the batch"
            )
        if losses.shape != (num_samples,) or not losses.requires_grad:
            raise InvalidArgumentError(
                f"losses must be one loss for each of the {num_samples} samples of the batch, as a "
                f"vector with gradients, found shape {tuple(losses.shape)}"
                f"{'' if losses.requires_grad else ' without gradients'}: use reduction='none', "
                "and for sequences the mean over each sample's own positions"
            )
        if self._rows is not None:
            raise CornError(
                "optimizer.backward(losses) must be called once for each batch, found a second "
                "call: add up the losses of each sample first"
            )
        self._require_no_gradient()
        self._rows = self._samples.take(losses)
        for parameter in self._trained:
            parameter.grad = None

    def _require_no_gradient(self) -> None:
        """Raise if there are gradients that ``backward`` did not compute."""
        is_empty = self._samples is None or self._samples.is_empty
        if not is_empty or any(p.grad is not None for p in self._trained):
            raise CornError(
                "with unit='sample' gradients must come from optimizer.backward(losses), found "
                "others: after loss.backward() a sample may have more weight than the accounting "
                "assumes; compute losses with reduction='none', and remove other gradients by "
                "optimizer.zero_grad()"
            )

    @torch.no_grad()
    def compute(self, batch: Batch, sample_clip: Tensor | None) -> Gradients:
        """Return the gradient of a batch after the user's backward pass."""
        if self._samples is None or sample_clip is None:
            if all(p.grad is None for p in self._trained):
                raise CornError(
                    "call loss.backward() before optimizer.step(): there is no gradient"
                )
            # A parameter that this batch did not reach counts as zero: the vector always has length
            # d.
            pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained]
            return Gradients(torch.cat([g.flatten().cpu() for g in pieces]).view(1, 1, -1).clone())
        self._require_no_gradient()
        if self._rows is None:
            raise CornError(
                "call optimizer.backward(losses) before optimizer.step(), with one loss for each "
                "sample: there is no gradient"
            )
        # Padding is in the user's batch as well. The weights of a ``Batch`` remove it from the sum.
        return self._sum(self._rows.cpu(), batch, sample_clip)

    def _sum(self, rows: Tensor, batch: Batch, sample_clip: Tensor) -> Gradients:
        # In the clip's type, float64: see ``sum_clipped_samples``.
        total = torch.zeros(rows.shape[1], dtype=sample_clip.dtype)
        count = max(1, _VALUES_AT_ONCE // rows.shape[1])
        factors = []
        pieces = zip(torch.split(rows, count), torch.split(batch.weights[0], count), strict=True)
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


def has_same_values(before: Any, after: Any) -> bool:
    """Return whether two nested values are equal, tensors in type, shape and every bit."""
    (own, structure), (other, changed) = tree_flatten(before), tree_flatten(after)
    return structure == changed and all(map(_is_same_value, own, other))


def _is_same_value(before: Any, after: Any) -> bool:
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        # Also by identity: NaN differs from itself.
        return before is after or (type(before) is type(after) and bool(before == after))
    if before.dtype != after.dtype or before.shape != after.shape or before.device != after.device:
        return False
    # As bytes: NaN differs from itself, and −0 is equal to 0.
    bits = (each.detach().contiguous().flatten().view(torch.uint8) for each in (before, after))
    return torch.equal(*bits)
