"""One model and one sample of a module at a time: for modules that ``torch.func`` cannot batch."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

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
from corn.learn.tasks.vectorised import are_class_scores

_ROWS_AT_ONCE = 512


@final
class Looped:
    """Plain backward passes, so that a module may decide by the values of its data."""

    def __init__(self, module: FlatModule) -> None:
        self._module = module

    def gradient(self, parameters: Tensor, batch: Batch) -> Gradients:
        """Of each model's mini-batch, shape (cells, trials, d)."""
        values = torch.empty_like(parameters)
        for cell, models in enumerate(parameters):
            present = batch.weights[cell] > 0
            X, y = batch.inputs[cell, present], batch.targets[cell, present]
            # Weights are equal where they are not zero; an empty batch has no gradient.
            share = batch.weights[cell].sum()
            for trial, vector in enumerate(models):
                slope = self._slope(vector, X, y) if len(X) else torch.zeros_like(vector)
                values[cell, trial] = share * slope
        return Gradients(values)

    def clipped_gradient(self, parameters: Tensor, batch: Batch, sample_clip: Tensor) -> Gradients:
        """With every sample's gradient clipped: one backward pass for each."""
        real, width = sample_clip.dtype, batch.inputs.shape[1]
        values = torch.zeros_like(parameters, dtype=real)
        factors = values.new_ones(*parameters.shape[:2], width)
        for cell, models in enumerate(parameters):
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
            values,
            fraction_clipped(factors.mT, batch.weights),
            count_broken(factors.mT, batch.weights),
        )

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """Score models, shape (models, d), each on all samples."""
        parts = [self._score(vector, inputs, targets) for vector in parameters]
        accuracies = [part.accuracy for part in parts if part.accuracy is not None]
        loss = torch.stack([part.loss for part in parts])
        return Scores(loss, torch.stack(accuracies) if accuracies else None)

    def _score(self, vector: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        loss, hits, counts = vector.new_zeros(()), vector.new_zeros(()), True
        for X, y in zip(
            torch.split(inputs, _ROWS_AT_ONCE), torch.split(targets, _ROWS_AT_ONCE), strict=True
        ):
            outputs = self._module.outputs(vector, X)
            loss += self._module.loss(outputs, y) * len(X)
            counts = counts and isinstance(outputs, Tensor) and are_class_scores(outputs[None], y)
            if counts:
                hits += (outputs.argmax(dim=-1) == y).sum()
        return Scores(loss / len(inputs), hits / len(inputs) if counts else None)

    def _slope(self, vector: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        leaf = vector.detach().requires_grad_(True)
        with torch.enable_grad():
            loss = self._module.mean_loss(leaf, inputs, targets)
            (slope,) = torch.autograd.grad(loss, leaf)
        return slope
