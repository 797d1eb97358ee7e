"""A network of one hidden layer for many models at once, by batched matrix products."""

from __future__ import annotations

import math
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
from corn.learn.tasks.linear import append_one, cross_entropy, predict, require_classes
from corn.learn.tasks.protocol import Gradients, Scores, seeded

_ELEMENTS_AT_ONCE = 1 << 23


@final
class ShallowNetwork:
    """features → hidden (ReLU) → classes with cross-entropy: 784–32–10 on MNIST, as in the paper.

    The gradient is written out: trials that share a mini-batch share one product with it, which
    differentiating a vectorised module does not see (3 to 4 times slower). A sample's gradient has
    rank one in each layer, so its norm, for clipping, needs no gradient in memory.

    Parameters: the hidden layer, (hidden, features + 1) with the bias last, then the output layer,
    (classes, hidden + 1).
    """

    def __init__(self, num_features: int, num_classes: int, *, num_hidden: int = 32) -> None:
        if num_features < 1 or num_classes < 2 or num_hidden < 1:
            raise InvalidArgumentError(
                "num_features and num_hidden must be at least 1 and num_classes 2, found "
                f"{num_features}, {num_hidden} and {num_classes}"
            )
        self._features, self._hidden, self._classes = num_features, num_hidden, num_classes

    @property
    def num_parameters(self) -> int:
        """See ``Task``."""
        return self._first_layer_size + self._classes * (self._hidden + 1)

    @property
    def _first_layer_size(self) -> int:
        return self._hidden * (self._features + 1)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Append the constant feature."""
        return append_one(inputs, self._features)

    def check_targets(self, targets: Tensor) -> None:
        """See ``ChecksTargets``."""
        require_classes(targets, self._classes)

    def initialize(self, seed: int) -> Tensor:
        """Uniform in ±1/√(inputs of the layer), as ``torch.nn.Linear`` does."""
        uniform = torch.rand(self.num_parameters, generator=seeded(seed), dtype=torch.float64)
        uniform.mul_(2).sub_(1)
        uniform[: self._first_layer_size] /= math.sqrt(self._features)
        uniform[self._first_layer_size :] /= math.sqrt(self._hidden)
        return uniform

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        """See ``Task``."""
        X, (cells, trials, _) = batch.inputs, parameters.shape
        first = parameters[..., : self._first_layer_size].reshape(cells, -1, X.shape[-1])
        second, bias = self._output_layer(parameters)
        hidden = torch.bmm(X, first.mT).relu_().view(cells, -1, trials, self._hidden)
        hidden = hidden.transpose(1, 2).contiguous()
        delta_out = self._output_residuals(hidden, second, bias, batch.targets)
        delta_in = (delta_out @ second).mul_(hidden > 0)
        scale = batch.weights.unsqueeze(1).expand(-1, trials, -1)
        if sample_clip is None:
            delta_out.mul_(scale.unsqueeze(-1))
            delta_in.mul_(scale.unsqueeze(-1))
            return Gradients(self._backward(delta_out, delta_in, hidden, X))
        wide = [values.to(sample_clip.dtype) for values in (delta_out, delta_in, hidden, X)]
        delta_out, delta_in, hidden, X = wide
        norms = _sample_norms(delta_out, delta_in, hidden, X)
        rounding = batch.most_samples**2
        factors = clip_factors(norms, sample_clip.unsqueeze(-1), rounding=rounding)
        scale = scale.to(factors) * factors
        drop_broken(delta_out.mul_(scale.unsqueeze(-1)), factors)
        drop_broken(delta_in.mul_(scale.unsqueeze(-1)), factors)
        return Gradients(
            self._backward(
                delta_out,
                delta_in,
                drop_broken(hidden, factors),
                drop_broken_inputs(X, factors),
            ),
            fraction_clipped(factors.mT, batch.weights),
            count_broken(factors.mT, batch.weights),
        )

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """See ``Task``."""
        models = len(parameters)
        first = parameters[:, : self._first_layer_size].reshape(-1, self._features + 1)
        second, bias = self._output_layer(parameters)
        loss, hits = parameters.new_zeros(models), parameters.new_zeros(models)
        rows = max(1, _ELEMENTS_AT_ONCE // (models * self._hidden))
        for X, y in zip(torch.split(inputs, rows), torch.split(targets, rows), strict=True):
            hidden = (X @ first.T).relu_().view(len(X), models, self._hidden)
            logits = (hidden.transpose(0, 1) @ second.mT + bias.unsqueeze(1)).transpose(0, 1)
            loss += cross_entropy(logits, y).sum(dim=0)
            hits += (predict(logits) == y.unsqueeze(-1)).sum(dim=0)
        return Scores(loss / len(inputs), hits / len(inputs))

    def describe(self) -> str:
        """See ``Task``."""
        return f"network {self._features}–{self._hidden}–{self._classes}"

    def _output_layer(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the output layer's weights, shape (…, classes, hidden), and of its bias."""
        flat = parameters[..., self._first_layer_size :]
        output = flat.view(*flat.shape[:-1], self._classes, self._hidden + 1)
        return output[..., :-1], output[..., -1]

    def _output_residuals(
        self, hidden: Tensor, second: Tensor, bias: Tensor, targets: Tensor
    ) -> Tensor:
        """∂loss/∂logits, shape (cells, trials, batch, classes)."""
        logits = hidden @ second.mT + bias.unsqueeze(-2)
        labels = functional.one_hot(targets, self._classes).unsqueeze(1)
        return torch.softmax(logits, dim=-1).sub_(labels)

    def _backward(self, delta_out: Tensor, delta_in: Tensor, hidden: Tensor, X: Tensor) -> Tensor:
        cells, trials = delta_out.shape[:2]
        gradient = X.new_empty(cells, trials, self.num_parameters)
        second, bias = self._output_layer(gradient)
        rows = delta_in.transpose(1, 2).flatten(2)
        gradient[..., : self._first_layer_size] = torch.bmm(rows.mT, X).view(cells, trials, -1)
        second.copy_(delta_out.mT @ hidden)
        bias.copy_(delta_out.sum(dim=2))
        return gradient


def _sample_norms(delta_out: Tensor, delta_in: Tensor, hidden: Tensor, X: Tensor) -> Tensor:
    """Norms of the samples' gradients, shape (cells, trials, batch), layer by layer."""
    outer = norms_at_least(delta_out) * (1 + hidden.square().sum(dim=-1)).sqrt()
    inner = norms_at_least(delta_in) * norms_at_least(X).unsqueeze(1)
    return torch.hypot(outer, inner)
