"""Gradients and scores of many models of one module: vectorised by ``torch.func``, or in a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch.func import grad, vmap

from corn.learn.batches import Batch
from corn.learn.step import (
    clip_factors,
    count_broken,
    drop_broken,
    fraction_clipped,
    norms_at_least,
    sum_clipped_samples,
)
from corn.learn.tasks.flat_module import FlatModule
from corn.learn.tasks.protocol import Gradients, Scores

# Larger pieces leave the processor's cache: four million numbers were the fastest of 2²⁰ … 2²⁴.
_ELEMENTS_AT_ONCE = 1 << 22
_ROWS_AT_ONCE = 512


@final
class Vectorised:
    """Differentiation of many models together.

    Args:
        module: the module as a function of a flat vector.
        elements_per_sample: how many numbers the backward pass of one sample of one model keeps.
        elements_at_once: bound on the numbers in memory at once, as far as one model can be split.
    """

    def __init__(
        self,
        module: FlatModule,
        *,
        elements_per_sample: int,
        elements_at_once: int = _ELEMENTS_AT_ONCE,
    ) -> None:
        self._module, self._kept, self._limit = module, elements_per_sample, elements_at_once

    def gradient(self, parameters: Tensor, batch: Batch) -> Gradients:
        """Return the gradient of each model's mini-batch, shape (cells, trials, d)."""
        if batch.is_average:
            return Gradients(self._mean_gradient(parameters, batch.inputs, batch.targets))
        values = torch.zeros_like(parameters)
        counts = (batch.weights > 0).sum(dim=1)
        # Cells with equally many samples are taken together, without their padding: a model that
        # mixes samples must not see padding, and a mean loss would count it.
        for count in torch.unique(counts[counts > 0]).tolist():
            own = torch.nonzero(counts == count).flatten()
            data = batch.inputs[own, :count], batch.targets[own, :count]
            # Weights within a cell are equal, so their sum turns a mean into the weighted sum.
            share = batch.weights[own].sum(dim=1)[:, None, None]
            values[own] = self._mean_gradient(parameters[own], *data).mul_(share)
        return Gradients(values)

    def clipped_gradient(self, parameters: Tensor, batch: Batch, sample_clip: Tensor) -> Gradients:
        """Return the sum of clipped sample gradients, over cells, trials and samples at once."""
        slopes_of = vmap(grad(self._module.sample_loss), in_dims=(None, 0, 0))
        # From the inside: samples, trials (which share inputs), cells. Shape (cells, trials,
        # samples, d).
        slopes_of = vmap(vmap(slopes_of, in_dims=(0, None, 0)))
        real, width = sample_clip.dtype, batch.inputs.shape[1]
        values = torch.zeros_like(parameters, dtype=real)
        factors = values.new_empty(*parameters.shape[:2], width)
        # Every sample has a gradient of its own here, besides what its backward pass keeps.
        taken = self._kept + parameters.shape[-1]
        for cells, trials, rows in self._pieces(parameters, batch.inputs, taken, split_rows=True):
            X, y = batch.inputs[cells, rows], batch.targets[cells, rows]
            models = parameters[cells, trials]
            slopes = slopes_of(models, X, _repeat(y, models.shape[1])).to(real)
            total, own = sum_clipped_samples(
                slopes,
                sample_clip[trials].unsqueeze(-1),
                batch.weights[cells, rows].unsqueeze(1),
                most_samples=batch.most_samples,
            )
            factors[cells, trials, rows] = own
            # Pieces of rows add up in the clip's type. The factors' margin covers the rounding of
            # the sum.
            values[cells, trials] += total
        return Gradients(
            values=values,
            fraction_clipped=fraction_clipped(factors.mT, batch.weights),
            num_broken=count_broken(factors.mT, batch.weights),
        )

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """Score models, shape (models, d), each on all samples."""
        # Rows first, then as many models as memory allows: a mean loss over a piece is weighted by
        # its number of rows.
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
        # Until a batch shows otherwise, outputs are taken for scores of classes.
        has_accuracy = True
        for X, y in zip(torch.split(inputs, rows), torch.split(targets, rows), strict=True):
            outputs = outputs_of(parameters, X)
            loss += losses_of(outputs, y) * len(X)
            has_accuracy = has_accuracy and are_class_scores(outputs, y)
            if has_accuracy:
                hits += (outputs.argmax(dim=-1) == y).sum(dim=1)
        return Scores(loss / len(inputs), hits / len(inputs) if has_accuracy else None)

    def _mean_gradient(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        losses_of = vmap(vmap(self._module.mean_loss, in_dims=(0, None, 0)))
        values = torch.empty_like(parameters)
        for cells, trials, _ in self._pieces(values, inputs, self._kept, split_rows=False):
            models = parameters[cells, trials]
            y = _repeat(targets[cells], models.shape[1])
            values[cells, trials] = _differentiate(losses_of, models, inputs[cells], y)
        return values

    def _pieces(
        self, parameters: Tensor, inputs: Tensor, elements_per_sample: int, *, split_rows: bool
    ) -> Iterator[tuple[slice, slice, slice]]:
        """Yield the cells, trials and samples of each piece, as many as memory allows."""
        cells, trials, width = *parameters.shape[:2], inputs.shape[1]
        capacity = max(1, self._limit // max(1, elements_per_sample))
        # A mean loss needs all samples of a mini-batch at once; clipped samples can be split.
        rows = min(width, capacity) if split_rows else width
        some_trials = max(1, min(trials, capacity // rows))
        some_cells = max(1, min(cells, capacity // (rows * some_trials)))
        for c in range(0, cells, some_cells):
            for v in range(0, trials, some_trials):
                for r in range(0, width, rows):
                    yield slice(c, c + some_cells), slice(v, v + some_trials), slice(r, r + rows)


@final
class Looped:
    """One backward pass per model and sample, for modules that branch on the values of data."""

    def __init__(self, module: FlatModule) -> None:
        self._module = module

    def gradient(self, parameters: Tensor, batch: Batch) -> Gradients:
        """Return the gradient of each model's mini-batch, shape (cells, trials, d)."""
        values = torch.empty_like(parameters)
        for cell, models in enumerate(parameters):
            present = batch.weights[cell] > 0
            X, y = batch.inputs[cell, present], batch.targets[cell, present]
            # Weights that are not zero are equal. An empty Poisson batch has a zero gradient.
            share = batch.weights[cell].sum()
            for trial, vector in enumerate(models):
                slope = self._slope(vector, X, y) if len(X) else torch.zeros_like(vector)
                values[cell, trial] = share * slope
        return Gradients(values)

    def clipped_gradient(self, parameters: Tensor, batch: Batch, sample_clip: Tensor) -> Gradients:
        """Return the sum of clipped sample gradients, with one backward pass per sample."""
        real, width = sample_clip.dtype, batch.inputs.shape[1]
        values = torch.zeros_like(parameters, dtype=real)
        factors = values.new_ones(*parameters.shape[:2], width)
        for cell, models in enumerate(parameters):
            # Padding has weight 0 and is skipped; its factor stays 1.
            for row in torch.nonzero(batch.weights[cell]).flatten().tolist():
                X, y = batch.inputs[cell, row : row + 1], batch.targets[cell, row : row + 1]
                for trial, vector in enumerate(models):
                    slope = self._slope(vector, X, y).to(real)
                    norm, rounding = norms_at_least(slope), batch.most_samples**2
                    factor = clip_factors(norm, sample_clip[trial], rounding=rounding)
                    factors[cell, trial, row] = factor
                    weight = batch.weights[cell, row] * factor
                    values[cell, trial] += weight * drop_broken(slope, factor)
        return Gradients(
            values=values,
            fraction_clipped=fraction_clipped(factors.mT, batch.weights),
            num_broken=count_broken(factors.mT, batch.weights),
        )

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """Score models, shape (models, d), each on all samples."""
        parts = [self._score(vector, inputs, targets) for vector in parameters]
        accuracies = [part.accuracy for part in parts if part.accuracy is not None]
        loss = torch.stack([part.loss for part in parts])
        return Scores(loss, torch.stack(accuracies) if accuracies else None)

    def _score(self, vector: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        loss, hits, has_accuracy = vector.new_zeros(()), vector.new_zeros(()), True
        for X, y in zip(
            torch.split(inputs, _ROWS_AT_ONCE), torch.split(targets, _ROWS_AT_ONCE), strict=True
        ):
            outputs = self._module.outputs(vector, X)
            loss += self._module.loss(outputs, y) * len(X)
            is_tensor = isinstance(outputs, Tensor)
            has_accuracy = has_accuracy and is_tensor and are_class_scores(outputs[None], y)
            if has_accuracy:
                hits += (outputs.argmax(dim=-1) == y).sum()
        return Scores(loss / len(inputs), hits / len(inputs) if has_accuracy else None)

    def _slope(self, vector: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        leaf = vector.detach().requires_grad_(True)
        with torch.enable_grad():
            loss = self._module.mean_loss(leaf, inputs, targets)
            (slope,) = torch.autograd.grad(loss, leaf)
        return slope


def are_class_scores(outputs: Any, targets: Tensor) -> bool:
    """Return whether outputs (models, rows, classes) score classes and targets are classes."""
    return (
        isinstance(outputs, Tensor)
        and outputs.dim() == 3
        and outputs.shape[-1] > 1
        and targets.dim() == 1
        and not targets.is_floating_point()
    )


def _repeat(targets: Tensor, trials: int) -> Tensor:
    """Return a view (cells, trials, …) of targets (cells, …) that all trials share.

    Under three levels of ``vmap``, torch's batching rules for some losses (mse_loss) fail for
    targets with ``in_dims=None``. Inputs do use ``in_dims=None``, so that trials share one product
    with them.
    """
    return targets.unsqueeze(1).expand(-1, trials, *targets.shape[1:])


def _differentiate(losses_of: Callable[..., Tensor], parameters: Tensor, *data: Tensor) -> Tensor:
    """Return each model's gradient by one backward pass through the sum of all losses."""
    # The models' parameters are disjoint, so the gradient of the sum is each model's own.
    leaf = parameters.detach().requires_grad_(True)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(losses_of(leaf, *data).sum(), leaf)
    return gradient
