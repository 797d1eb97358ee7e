"""Many models and samples of a module at once, by ``torch.func``, in pieces that fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch.func import grad, vmap

from corn.learn.batches import Batch
from corn.learn.clipping import (
    clip_factors,
    count_broken,
    drop_broken,
    fraction_clipped,
    norms_at_least,
)
from corn.learn.tasks.flat_module import FlatModule
from corn.learn.tasks.protocol import Gradients, Scores

# Larger pieces leave the processor's cache: four million numbers were the fastest of 2²⁰ … 2²⁴.
_ELEMENTS_AT_ONCE = 1 << 22
_ROWS_AT_ONCE = 512


@final
class Vectorised:
    """Losses of many models differentiated together.

    Args:
        module: the module as a function of a flat vector.
        elements_a_sample: what one sample of one model keeps for its backward pass.
        elements_at_once: bounds what is in memory together, as far as one model can be split.
    """

    def __init__(
        self,
        module: FlatModule,
        *,
        elements_a_sample: int,
        elements_at_once: int = _ELEMENTS_AT_ONCE,
    ) -> None:
        self._module, self._kept, self._limit = module, elements_a_sample, elements_at_once

    def gradient(self, parameters: Tensor, batch: Batch) -> Gradients:
        """Of each model's mini-batch, shape (cells, trials, d)."""
        if batch.is_average:
            return Gradients(self._mean_gradient(parameters, batch.inputs, batch.targets))
        values = torch.zeros_like(parameters)
        counts = (batch.weights > 0).sum(dim=1)
        # Cells with as many samples together, without their padding: a model that mixes samples
        # must not see it, and a mean loss would count it.
        for count in torch.unique(counts[counts > 0]).tolist():
            own = torch.nonzero(counts == count).flatten()
            data = batch.inputs[own, :count], batch.targets[own, :count]
            share = batch.weights[own].sum(dim=1)[:, None, None]
            values[own] = self._mean_gradient(parameters[own], *data).mul_(share)
        return Gradients(values)

    def clipped_gradient(self, parameters: Tensor, batch: Batch, sample_clip: Tensor) -> Gradients:
        """With every sample's gradient clipped: over cells, trials and samples together."""
        slopes_of = vmap(grad(self._module.sample_loss), in_dims=(None, 0, 0))
        slopes_of = vmap(vmap(slopes_of, in_dims=(0, None, 0)))
        real, width = sample_clip.dtype, batch.inputs.shape[1]
        values = torch.zeros_like(parameters, dtype=real)
        factors = values.new_empty(*parameters.shape[:2], width)
        taken = self._kept + parameters.shape[-1]
        for cells, trials, rows in self._pieces(parameters, batch.inputs, taken, split_rows=True):
            X, y = batch.inputs[cells, rows], batch.targets[cells, rows]
            models = parameters[cells, trials]
            slopes = slopes_of(models, X, _repeat(y, models.shape[1])).to(real)
            limit = sample_clip[trials].unsqueeze(-1)
            own = clip_factors(norms_at_least(slopes), limit, rounding=batch.most_samples**2)
            slopes = drop_broken(slopes, own)
            factors[cells, trials, rows] = own
            own = own * batch.weights[cells, rows].to(real).unsqueeze(1)
            values[cells, trials] += torch.matmul(own.unsqueeze(-2), slopes).squeeze(-2)
        return Gradients(
            values,
            fraction_clipped(factors.mT, batch.weights),
            count_broken(factors.mT, batch.weights),
        )

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """Score models, shape (models, d), each on all samples."""
        rows = min(_ROWS_AT_ONCE, len(inputs))
        models = max(1, self._limit // (rows * max(1, self._kept)))
        parts = [self._score(own, inputs, targets, rows) for own in torch.split(parameters, models)]
        accuracies = [part.accuracy for part in parts if part.accuracy is not None]
        loss = torch.cat([part.loss for part in parts])
        return Scores(loss, torch.cat(accuracies) if accuracies else None)

    def _score(self, parameters: Tensor, inputs: Tensor, targets: Tensor, rows: int) -> Scores:
        loss, hits = parameters.new_zeros(len(parameters)), parameters.new_zeros(len(parameters))
        outputs_of = vmap(self._module.outputs, in_dims=(0, None))
        losses_of = vmap(self._module.loss, in_dims=(0, None))
        counts = True
        for X, y in zip(torch.split(inputs, rows), torch.split(targets, rows), strict=True):
            outputs = outputs_of(parameters, X)
            loss += losses_of(outputs, y) * len(X)
            counts = counts and are_class_scores(outputs, y)
            if counts:
                hits += (outputs.argmax(dim=-1) == y).sum(dim=1)
        return Scores(loss / len(inputs), hits / len(inputs) if counts else None)

    def _mean_gradient(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        losses_of = vmap(vmap(self._module.mean_loss, in_dims=(0, None, 0)))
        values = torch.empty_like(parameters)
        for cells, trials, _ in self._pieces(values, inputs, self._kept, split_rows=False):
            models = parameters[cells, trials]
            y = _repeat(targets[cells], models.shape[1])
            values[cells, trials] = _differentiate(losses_of, models, inputs[cells], y)
        return values

    def _pieces(
        self, parameters: Tensor, inputs: Tensor, elements_a_sample: int, *, split_rows: bool
    ) -> Iterator[tuple[slice, slice, slice]]:
        """Cells, trials and samples to take together, as many as memory allows."""
        cells, trials, width = *parameters.shape[:2], inputs.shape[1]
        room = max(1, self._limit // max(1, elements_a_sample))
        rows = min(width, room) if split_rows else width
        some_trials = max(1, min(trials, room // rows))
        some_cells = max(1, min(cells, room // (rows * some_trials)))
        for c in range(0, cells, some_cells):
            for v in range(0, trials, some_trials):
                for r in range(0, width, rows):
                    yield slice(c, c + some_cells), slice(v, v + some_trials), slice(r, r + rows)


def are_class_scores(outputs: Any, targets: Tensor) -> bool:
    """Whether outputs (models, rows, classes) are scores of classes and targets classes."""
    return (
        isinstance(outputs, Tensor)
        and outputs.dim() == 3
        and outputs.shape[-1] > 1
        and targets.dim() == 1
        and not targets.is_floating_point()
    )


def _repeat(targets: Tensor, trials: int) -> Tensor:
    """A view (cells, trials, …) of targets (cells, …) that all trials share.

    Three levels deep torch's rules for some losses (mse_loss) fail where targets are shared by
    ``in_dims=None``. Inputs are shared so: then trials share one product with them.
    """
    return targets.unsqueeze(1).expand(-1, trials, *targets.shape[1:])


def _differentiate(losses_of: Callable[..., Tensor], parameters: Tensor, *data: Tensor) -> Tensor:
    """One backward pass through the sum of all models' losses gives each its own gradient."""
    leaf = parameters.detach().requires_grad_(True)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(losses_of(leaf, *data).sum(), leaf)
    return gradient
