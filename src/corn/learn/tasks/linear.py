"""Logistic and softmax regression for many models at once, by batched matrix products."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from corn.errors import InvalidArgumentError
from corn.learn.batches import Batch
from corn.learn.clipping import (
    clip_factors,
    count_broken,
    drop_broken,
    drop_broken_inputs,
    fraction_clipped,
    norms_at_least,
)
from corn.learn.tasks.protocol import Gradients, Scores

_ELEMENTS_AT_ONCE = 1 << 23


@final
class LinearClassifier:
    """Regression on features and a constant: logistic with two classes, softmax with more.

    A sample's loss is its cross-entropy plus λ/2 ‖θ‖² (the paper's regularised model), so the
    penalty is clipped with it; reported losses leave the penalty out. All models start at zero. The
    gradient of a sample is a residual times its features, whose norm needs no gradient in memory:
    clipping each sample costs next to nothing.
    """

    def __init__(self, num_features: int, num_classes: int, *, l2: float = 1e-4) -> None:
        if num_features < 1 or num_classes < 2:
            raise InvalidArgumentError(
                f"num_features must be at least 1 and num_classes 2, found {num_features} and "
                f"{num_classes}"
            )
        if not 0 <= l2 < float("inf"):
            raise InvalidArgumentError(f"l2 must be finite and at least 0, found {l2}")
        self._num_features, self._num_classes, self._l2 = num_features, num_classes, l2
        self._num_outputs = 1 if num_classes == 2 else num_classes

    @property
    def num_parameters(self) -> int:
        """See ``Task``."""
        return self._num_outputs * (self._num_features + 1)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Append the constant feature."""
        return append_one(inputs, self._num_features)

    def check_targets(self, targets: Tensor) -> None:
        """See ``ChecksTargets``."""
        require_classes(targets, self._num_classes)

    def initialize(self, seed: int) -> Tensor:  # noqa: ARG002
        """Zero, whatever the seed: the problem is convex."""
        return torch.zeros(self.num_parameters, dtype=torch.float64)

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        """See ``Task``."""
        X, (cells, trials, _) = batch.inputs, parameters.shape
        theta = parameters.view(cells, -1, X.shape[-1])
        logits = torch.bmm(X, theta.mT).view(cells, -1, trials, self._num_outputs)
        residuals = self._residuals(logits, batch.targets)
        if sample_clip is None:
            scale = 1 / X.shape[1] if batch.is_average else 1.0
            if not batch.is_average:
                residuals.mul_(batch.weights[..., None, None])
            # One product that scales and adds the penalty's gradient in passing.
            G = torch.baddbmm(theta, residuals.flatten(2).mT, X, beta=self._l2, alpha=scale)
            return Gradients(G.view_as(parameters))
        real = sample_clip.dtype
        wide, X, models = residuals.to(real), X.to(real), parameters.to(real)
        norms = self._sample_norms(wide, logits, X, models)
        # A sum of residuals times inputs can be larger than the clipped gradients by the penalty's
        # part, which is public.
        penalty = self._l2 * torch.linalg.vector_norm(models, dim=-1).unsqueeze(1)
        rounding = batch.most_samples**2 * (1 + 2 * penalty / sample_clip)
        factors = clip_factors(norms, sample_clip, rounding=rounding)
        weights = factors * batch.weights.to(real).unsqueeze(-1)
        wide = drop_broken(wide.mul_(weights.unsqueeze(-1)), factors)
        X = drop_broken_inputs(X, factors)
        G = torch.bmm(wide.flatten(2).mT, X).view_as(parameters)
        G.add_(models * weights.sum(dim=1).unsqueeze(-1), alpha=self._l2)
        return Gradients(
            G, fraction_clipped(factors, batch.weights), count_broken(factors, batch.weights)
        )

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """See ``Task``; the loss is the cross-entropy without the penalty."""
        models = len(parameters)
        theta = parameters.reshape(-1, inputs.shape[-1])
        loss, hits = parameters.new_zeros(models), parameters.new_zeros(models)
        rows = max(1, _ELEMENTS_AT_ONCE // len(theta))
        for X, y in zip(torch.split(inputs, rows), torch.split(targets, rows), strict=True):
            logits = (X @ theta.T).view(len(X), models, self._num_outputs)
            loss += cross_entropy(logits, y).sum(dim=0)
            hits += (predict(logits) == y.unsqueeze(-1)).sum(dim=0)
        return Scores(loss / len(inputs), hits / len(inputs))

    def describe(self) -> str:
        """See ``Task``."""
        kind = "logistic" if self._num_outputs == 1 else f"softmax, {self._num_classes} classes,"
        return f"{kind} regression on {self._num_features} features, l2 = {self._l2:g}"

    def _residuals(self, logits: Tensor, targets: Tensor) -> Tensor:
        """∂loss/∂logits, shape (cells, batch, trials, outputs); does not modify ``logits``."""
        if self._num_outputs == 1:
            return torch.sigmoid(logits).sub_(targets[..., None, None])
        labels = functional.one_hot(targets, self._num_classes).unsqueeze(2)
        return torch.softmax(logits, dim=-1).sub_(labels)

    def _sample_norms(
        self, residuals: Tensor, logits: Tensor, X: Tensor, parameters: Tensor
    ) -> Tensor:
        """At least ‖r xᵀ + λθ‖, shape (cells, batch, trials), from ⟨r xᵀ, θ⟩ = r·logits.

        Where the two nearly cancel, rounding would leave anything or nothing of their sum. So as
        much is added as rounding can take away: sums to 16 ulps, and a logit to as many as it has
        features.
        """
        plain = norms_at_least(residuals) * norms_at_least(X).unsqueeze(-1)
        if not self._l2:
            return plain
        squared = plain.square()
        cross = (residuals * logits).sum(dim=-1)
        own = self._l2**2 * parameters.square().sum(dim=-1).unsqueeze(1)
        product = squared.sqrt() * own.sqrt()
        lost = 16 * (squared + own + 2 * product) + 2 * X.shape[-1] * product
        ulp = torch.finfo(logits.dtype).eps
        return (squared + 2 * self._l2 * cross + own).clamp(min=0).add(lost, alpha=ulp).sqrt()


def append_one(inputs: Tensor, num_features: int) -> Tensor:
    """Samples flattened, with a constant feature after the others."""
    if not inputs.is_floating_point():
        raise InvalidArgumentError(
            f"samples must be real numbers, found {inputs.dtype}: convert them, pixels to [0, 1]"
        )
    flat = inputs.flatten(1)
    if flat.shape[1] != num_features:
        raise InvalidArgumentError(
            f"samples must have {num_features} features, found {flat.shape[1]}"
        )
    return torch.cat([flat, flat.new_ones(len(flat), 1)], dim=1)


def require_classes(targets: Tensor, num_classes: int) -> None:
    """Raise unless targets are classes 0 … num_classes − 1.

    Logistic regression would take −1 and 1 without a word, and learn from a loss without a minimum.
    """
    found = torch.unique(targets)
    whole = found.long()
    if targets.dim() != 1 or bool(((found != whole) | (whole < 0) | (whole >= num_classes)).any()):
        raise InvalidArgumentError(
            f"targets must be classes, one of 0 … {num_classes - 1} for each sample, found shape "
            f"{tuple(targets.shape)} with {found[:4].tolist()}"
        )


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each sample, shape (rows, models), from logits (rows, models, outputs)."""
    if logits.shape[-1] == 1:
        z = logits.squeeze(-1)
        return functional.softplus(z) - z * targets.unsqueeze(-1)
    picked = logits.gather(-1, targets[:, None, None].expand(-1, logits.shape[1], 1))
    return torch.logsumexp(logits, dim=-1) - picked.squeeze(-1)


def predict(logits: Tensor) -> Tensor:
    """The class of each sample, shape (rows, models)."""
    return (logits.squeeze(-1) > 0).long() if logits.shape[-1] == 1 else logits.argmax(dim=-1)
