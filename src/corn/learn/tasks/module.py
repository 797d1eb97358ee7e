"""Any ``torch.nn.Module`` with any loss as a task: many models at once by ``torch.func``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeAlias, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from corn.errors import InvalidArgumentError
from corn.learn.batches import Batch
from corn.learn.clipping import clip_factors, fraction_clipped
from corn.learn.tasks.protocol import Gradients, Scores, seeded

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_ELEMENTS_AT_ONCE = 1 << 24
_MODELS_AT_ONCE = 64
_ROWS_AT_ONCE = 512


@final
class ModuleTask:
    """The user's own model and loss.

    Args:
        model: any module without state beyond its parameters. Batch normalisation is refused: its
            statistics mix samples, which no clipping bounds. So is dropout, whose randomness could
            not be repeated from a seed.
        loss: (outputs, targets) → the **mean** loss over a batch, as in ``torch.nn.functional``.
        input_shape: the shape of a sample as the model wants it; by default as the data has it.
        reset: draw new initial parameters for each seed, by each layer's ``reset_parameters``;
            otherwise all start from the model's present parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        input_shape: tuple[int, ...] | None = None,
        reset: bool = False,
    ) -> None:
        _require_stateless(model)
        self._model, self._loss = copy.deepcopy(model), loss
        self._input_shape, self._reset = input_shape, reset
        named = dict(self._model.named_parameters())
        if not named:
            raise InvalidArgumentError("model must have parameters, found none")
        self._shapes = {name: parameter.shape for name, parameter in named.items()}
        self._sizes = [parameter.numel() for parameter in named.values()]

    @property
    def num_parameters(self) -> int:
        """See ``Task``."""
        return sum(self._sizes)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Give samples the shape that the model wants."""
        return inputs if self._input_shape is None else inputs.view(-1, *self._input_shape)

    def initialize(self, seed: int) -> Tensor:
        """The model's own parameters, or drawn anew for the seed."""
        model = self._model
        if self._reset:
            model = copy.deepcopy(model)
            # Layers draw from torch's global generator; it is put back as it was.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seeded(seed).initial_seed())
                model.apply(_reset_layer)
        return torch.cat([p.detach().flatten().double() for p in model.parameters()])

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        """See ``Task``."""
        if sample_clip is not None:
            return self._clipped_gradient(parameters, batch, sample_clip)
        cells = max(1, _MODELS_AT_ONCE // parameters.shape[1])
        parts = zip(
            *(torch.split(tensor, cells) for tensor in (parameters, *_tensors(batch))), strict=True
        )
        loss_of = self._mean_loss if batch.is_average else self._weighted_loss
        # One backward pass through the sum of all models' losses gives each its own gradient.
        over_models = vmap(vmap(loss_of, in_dims=(0, None, None, None)))
        return Gradients(torch.cat([_differentiate(over_models, *part) for part in parts]))

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """See ``Task``; accuracy where outputs are scores of classes and targets are classes."""
        with torch.no_grad():
            parts = [
                self._score(p, inputs, targets) for p in torch.split(parameters, _MODELS_AT_ONCE)
            ]
        accuracies = [part.accuracy for part in parts if part.accuracy is not None]
        loss = torch.cat([part.loss for part in parts])
        return Scores(loss, torch.cat(accuracies) if accuracies else None)

    def describe(self) -> str:
        """See ``Task``."""
        return f"{type(self._model).__name__} with {self.num_parameters} parameters"

    def _outputs(self, vector: Tensor, inputs: Tensor) -> Tensor:
        pieces = zip(self._shapes.items(), torch.split(vector, self._sizes), strict=True)
        weights = {name: piece.view(shape) for (name, shape), piece in pieces}
        outputs: Tensor = functional_call(self._model, weights, (inputs,))
        return outputs

    def _mean_loss(self, vector: Tensor, inputs: Tensor, targets: Tensor, _: Tensor) -> Tensor:
        return self._loss(self._outputs(vector, inputs), targets)

    def _weighted_loss(
        self, vector: Tensor, inputs: Tensor, targets: Tensor, weights: Tensor
    ) -> Tensor:
        outputs = self._outputs(vector, inputs)
        losses = vmap(lambda o, t: self._loss(o.unsqueeze(0), t.unsqueeze(0)))(outputs, targets)
        return (losses * weights).sum()

    def _sample_loss(self, vector: Tensor, sample: Tensor, target: Tensor) -> Tensor:
        return self._loss(self._outputs(vector, sample.unsqueeze(0)), target.unsqueeze(0))

    def _clipped_gradient(self, parameters: Tensor, batch: Batch, sample_clip: Tensor) -> Gradients:
        """One model at a time: all samples' gradients of all models would not fit in memory."""
        values = torch.empty_like(parameters)
        fractions = parameters.new_empty(parameters.shape[:2])
        for cell in range(len(parameters)):
            X, y, w = batch.inputs[cell], batch.targets[cell], batch.weights[cell]
            for variant, vector in enumerate(parameters[cell]):
                total, factors = self._clip_samples(vector, X, y, w, sample_clip[variant])
                values[cell, variant] = total
                fractions[cell, variant] = fraction_clipped(factors[None, :, None], w[None])
        return Gradients(values, fractions)

    def _clip_samples(
        self, vector: Tensor, X: Tensor, y: Tensor, weights: Tensor, clip: Tensor
    ) -> tuple[Tensor, Tensor]:
        slopes_of = vmap(grad(self._sample_loss), in_dims=(None, 0, 0))
        rows = max(1, _ELEMENTS_AT_ONCE // len(vector))
        total, factors = torch.zeros_like(vector), []
        for inputs, targets, share in zip(
            torch.split(X, rows), torch.split(y, rows), torch.split(weights, rows), strict=True
        ):
            slopes = slopes_of(vector, inputs, targets)
            factors.append(clip_factors(torch.linalg.vector_norm(slopes, dim=1), clip))
            total += (factors[-1] * share) @ slopes
        return total, torch.cat(factors)

    def _score(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        loss, hits = parameters.new_zeros(len(parameters)), parameters.new_zeros(len(parameters))
        outputs_of = vmap(self._outputs, in_dims=(0, None))
        losses_of = vmap(self._loss, in_dims=(0, None))
        outputs = parameters.new_empty(0)
        for X, y in zip(
            torch.split(inputs, _ROWS_AT_ONCE), torch.split(targets, _ROWS_AT_ONCE), strict=True
        ):
            outputs = outputs_of(parameters, X)
            loss += losses_of(outputs, y) * len(X)
            if _are_class_scores(outputs, y):
                hits += (outputs.argmax(dim=-1) == y).sum(dim=1)
        accuracy = hits / len(inputs) if _are_class_scores(outputs, targets) else None
        return Scores(loss / len(inputs), accuracy)


def _tensors(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.inputs, batch.targets, batch.weights


def _differentiate(losses_of: Callable[..., Tensor], parameters: Tensor, *data: Tensor) -> Tensor:
    leaf = parameters.detach().requires_grad_(True)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(losses_of(leaf, *data).sum(), leaf)
    return gradient


def _are_class_scores(outputs: Tensor, targets: Tensor) -> bool:
    return outputs.dim() == 3 and targets.dim() == 1 and not targets.is_floating_point()


def _reset_layer(layer: nn.Module) -> None:
    if callable(getattr(layer, "reset_parameters", None)):
        layer.reset_parameters()  # type: ignore[operator]


def _require_stateless(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise InvalidArgumentError(
                f"model must not use batch normalisation, found it in {name or 'model'!r}: its "
                "statistics mix samples, which no clipping bounds; use GroupNorm or LayerNorm"
            )
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            raise InvalidArgumentError(
                f"model must not use dropout, found it in {name or 'model'!r}: its draws cannot "
                "be repeated from a seed; set p = 0 or leave it out"
            )
