"""Tasks from any ``torch.nn.Module`` with any loss, and a small convolutional network."""

from __future__ import annotations

import copy
import hashlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from corn.checks import require
from corn.errors import CornError, CornWarning, InvalidArgumentError
from corn.learn.batches import Batch
from corn.learn.step import sum_clipped_samples
from corn.learn.tasks.protocol import Gradients, Scores, Task

MeanLoss: TypeAlias = Callable[[Any, Tensor], Tensor]
"""(outputs, targets) → the mean loss over a batch, as in ``torch.nn.functional``."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_REHEARSAL_ROWS = 2
# Names of attributes, among them those of parameters, which recurrent layers list once more.
_OF_EVERY_MODULE = frozenset([*vars(nn.Module()), "_flat_weights"])
# Larger pieces leave the processor's cache: four million numbers were the fastest of 2²⁰ … 2²⁴.
_ELEMENTS_AT_ONCE = 1 << 22
_ROWS_AT_ONCE = 512


def map_in_a_loop(
    function: Callable[..., Any], in_dims: tuple[int | None, ...]
) -> Callable[..., Any]:
    """Return ``vmap(function, in_dims)`` by one call after the other, for any module."""

    def mapped(*args: Any) -> Any:
        leaves, structure = tree_flatten([a for a, d in zip(args, in_dims, strict=True) if d == 0])
        found = []
        # Unbound at once: the backward pass of one row by its number takes the memory of all.
        for rows in zip(*(leaf.unbind() for leaf in leaves), strict=True):
            own = iter(tree_unflatten(list(rows), structure))
            values = [a if d is None else next(own) for a, d in zip(args, in_dims, strict=True)]
            found.append(function(*values))
        return tree_map(lambda *each: torch.stack(each), *found)

    return mapped


def differentiate(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return ``torch.func.grad(function)`` by autograd, which knows more operations."""

    def slopes_of(weights: Any, *data: Any) -> Any:
        leaves, structure = tree_flatten(weights)
        copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        with torch.enable_grad():
            value = function(tree_unflatten(copies, structure), *data)
            slopes = torch.autograd.grad(value, copies, allow_unused=True, materialize_grads=True)
        return tree_unflatten(list(slopes), structure)

    return slopes_of


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen, in the flat vector's order, shared ones once."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise InvalidArgumentError(
            "model must have parameters that are not frozen, found none: set requires_grad"
        )
    return trained


def split_vector(vector: Tensor, shapes: Sequence[torch.Size]) -> Iterator[Tensor]:
    """Yield the parts of a vector of parameters in these shapes."""
    return map(Tensor.view, torch.split(vector, [shape.numel() for shape in shapes]), shapes)


def hash_module(text: str, constants: Iterable[Tensor]) -> bytes:
    """Return a hash of the description of a module and of its constants."""
    digest = hashlib.sha256(_ADDRESS.sub("", text).encode())
    for tensor in constants:
        values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(values.numpy().tobytes())
    return digest.digest()


def require_no_batch_statistics(model: nn.Module) -> None:
    """Raise for layers whose statistics mix samples or depend on them."""
    for name, layer in model.named_modules():
        where = name or "model"
        if isinstance(layer, nn.modules.instancenorm._InstanceNorm):
            if layer.track_running_stats:
                raise InvalidArgumentError(
                    f"model must not track running statistics, found them in {where!r}: they would "
                    "be released without noise; set track_running_stats=False"
                )
        elif isinstance(layer, nn.modules.batchnorm._NormBase):
            raise InvalidArgumentError(
                f"model must not use batch normalisation, which mixes samples, found it in "
                f"{where!r}: use GroupNorm or LayerNorm, here "
                f"torch.nn.GroupNorm(1, {layer.num_features})"
            )


@final
class ModuleTask:
    """The user's own model and loss as a task.

    Parameters with ``requires_grad`` False are constants: they get no gradient and no noise. A
    module that ``torch.func`` cannot vectorise runs one model (and one sample) at a time, with a
    ``CornWarning``. Module and loss keep no state, and draw no random numbers. The loss is the
    **mean** over a batch; where samples are clipped, it is called with one at a time. With
    ``reset`` each seed draws its own initial parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: MeanLoss,
        *,
        input_shape: tuple[int, ...] | None = None,
        reset: bool = False,
    ) -> None:
        require_no_batch_statistics(model)
        for name, parameter in model.named_parameters():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise InvalidArgumentError(
                    f"model must have all its parameters, found {name!r} without a shape yet: call "
                    "it once on a sample, or give the layer its sizes"
                )
        # A copy: later changes to the user's model must not change the task.
        self._model = copy.deepcopy(model)
        self.loss = loss
        self.input_shape = input_shape
        self._reset = reset
        self.num_parameters = sum(p.numel() for p in trained_parameters(self._model))
        named = dict(self._model.named_parameters())
        self._shapes = {name: p.shape for name, p in named.items() if p.requires_grad}
        self._constants = {name: p.detach() for name, p in named.items() if not p.requires_grad}
        self._constants |= dict(self._model.named_buffers())
        # Copies of the constants by type and device: placing them at every call would be slow.
        self._placed: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
        # Numbers that the backward pass of one sample keeps; None before the first samples.
        self._num_kept: int | None = None
        self._map: Callable[..., Any] = vmap
        self._grad: Callable[..., Any] = grad

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return samples in the model's input shape."""
        return inputs if self.input_shape is None else inputs.view(-1, *self.input_shape)

    def initialize(self, seed: int) -> Tensor:
        """Return the model's own parameters, or new ones for the seed."""
        model = self._model
        if self._reset:
            model = copy.deepcopy(model)
            # Layers draw from torch's global generator, whose state is restored afterwards.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model.apply(_reset_layer)
        return torch.cat([p.detach().flatten().double() for p in trained_parameters(model)])

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        """See ``Task``."""
        inputs, targets = batch.inputs.flatten(0, 1), batch.targets.flatten(0, 1)
        with _explained(inputs, targets):
            self._rehearse(parameters[0, 0], inputs, targets)
            if sample_clip is None:
                return self._batch_gradient(parameters, batch)
            return self._clipped_gradient(parameters, batch, sample_clip)

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """See ``Task``; with accuracy if outputs score classes and targets are classes."""
        with _explained(inputs, targets), torch.no_grad():
            self._rehearse(parameters[0], inputs, targets)
            rows = min(_ROWS_AT_ONCE, len(inputs))
            models = max(1, _ELEMENTS_AT_ONCE // (rows * max(1, self._num_kept or 0)))
            score = self._map(self._score, (0, None, None))
            total = parameters.new_zeros(len(parameters), 2)
            for X, y in zip(torch.split(inputs, rows), torch.split(targets, rows), strict=True):
                parts = [score(own, X, y) for own in torch.split(parameters, models)]
                total += torch.cat(parts) * len(X)
            loss, accuracy = (total / len(inputs)).unbind(dim=1)
            return Scores(loss, None if bool(accuracy.isnan().any()) else accuracy)

    def describe(self) -> str:
        """See ``Task``."""
        return f"{type(self._model).__name__} with {self.num_parameters} parameters"

    def to_module(self, parameters: Tensor) -> nn.Module:
        """Return a copy of the user's model with these parameters; constants keep their values."""
        filled = copy.deepcopy(self._model)
        with torch.no_grad():
            for name, piece in self._split(parameters).items():
                filled.get_parameter(name).copy_(piece)
        return filled

    def fingerprint(self) -> bytes:
        """Return a hash of layers, loss and constants, so that checkpoints fit this model alone."""
        loss = getattr(self.loss, "__qualname__", repr(self.loss))
        shapes = ", ".join(f"{name} {tuple(shape)}" for name, shape in self._shapes.items())
        constants = list(self._constants.values())
        if isinstance(self.loss, nn.Module):
            constants += self.loss.state_dict().values()
        return hash_module(f"{self._model!r}; {loss}; training {shapes}", constants)

    def _split(self, vector: Tensor) -> dict[str, Tensor]:
        return dict(zip(self._shapes, split_vector(vector, [*self._shapes.values()]), strict=True))

    def _outputs(self, vector: Tensor, inputs: Tensor) -> Any:
        weights = {**self._place_constants(vector), **self._split(vector)}
        return functional_call(self._model, weights, (inputs,))

    def _mean_loss(self, vector: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self._outputs(vector, inputs), targets)

    def _sample_loss(self, vector: Tensor, sample: Tensor, target: Tensor) -> Tensor:
        """Return the loss of one sample, alone in its batch."""
        return self._mean_loss(vector, sample.unsqueeze(0), target.unsqueeze(0))

    def _score(self, vector: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, and the accuracy or NaN, shape (2,)."""
        outputs = self._outputs(vector, inputs)
        loss = self.loss(outputs, targets)
        is_class = targets.dim() == 1 and not targets.is_floating_point()
        is_score = isinstance(outputs, Tensor) and outputs.dim() == 2 and outputs.shape[-1] > 1
        accuracy = torch.full_like(loss, torch.nan)
        if is_class and is_score:
            accuracy = (outputs.argmax(dim=-1) == targets).to(loss).mean()
        return torch.stack([loss, accuracy])

    def _place_constants(self, vector: Tensor) -> dict[str, Tensor]:
        """Return frozen parameters and buffers in the vector's type and on its device."""
        where = vector.dtype, vector.device
        if where not in self._placed:
            self._placed[where] = {
                name: tensor.to(vector if tensor.is_floating_point() else vector.device, copy=True)
                for name, tensor in self._constants.items()
            }
        return self._placed[where]

    def _batch_gradient(self, parameters: Tensor, batch: Batch) -> Gradients:
        """Return the gradient of each model's mini-batch, shape (cells, trials, d)."""
        if batch.is_average:
            return Gradients(self._mean_gradient(parameters, batch.inputs, batch.targets))
        values = torch.zeros_like(parameters)
        counts = (batch.weights > 0).sum(dim=1)
        # Cells of one size together, without padding, which some models would see.
        for count in torch.unique(counts[counts > 0]).tolist():
            own = torch.nonzero(counts == count).flatten()
            data = batch.inputs[own, :count], batch.targets[own, :count]
            # Weights within a cell are equal, so their sum turns a mean into the weighted sum.
            share = batch.weights[own].sum(dim=1)[:, None, None]
            values[own] = self._mean_gradient(parameters[own], *data).mul_(share)
        return Gradients(values)

    def _mean_gradient(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        losses_of = self._map(self._map(self._mean_loss, (0, None, 0)), (0, 0, 0))
        values = torch.empty_like(parameters)
        for cells, trials, _ in self._pieces(values, inputs, self._num_kept or 0, split_rows=False):
            # Models are disjoint: one backward pass through the sum gives each its own gradient.
            models = parameters[cells, trials].detach().requires_grad_()
            y = _repeat(targets[cells], models.shape[1])
            with torch.enable_grad():
                total = losses_of(models, inputs[cells], y).sum()
            (values[cells, trials],) = torch.autograd.grad(total, models)
        return values

    def _clipped_gradient(self, parameters: Tensor, batch: Batch, sample_clip: Tensor) -> Gradients:
        """Return the sum of clipped sample gradients, over cells, trials and samples at once."""
        slopes_of = self._map(self._grad(self._sample_loss), (None, 0, 0))
        # From the inside: samples, trials, cells. Shape (cells, trials, samples, d).
        slopes_of = self._map(self._map(slopes_of, (0, None, 0)), (0, 0, 0))
        values = torch.zeros_like(parameters, dtype=sample_clip.dtype)
        factors = values.new_empty(*parameters.shape[:2], batch.inputs.shape[1])
        taken = (self._num_kept or 0) + parameters.shape[-1]
        for cells, trials, rows in self._pieces(parameters, batch.inputs, taken, split_rows=True):
            X, y = batch.inputs[cells, rows], batch.targets[cells, rows]
            models = parameters[cells, trials]
            total, own = sum_clipped_samples(
                slopes_of(models, X, _repeat(y, models.shape[1])).to(sample_clip.dtype),
                sample_clip[trials].unsqueeze(-1),
                batch.weights[cells, rows].unsqueeze(1),
                most_samples=batch.most_samples,
            )
            factors[cells, trials, rows] = own
            values[cells, trials] += total
        return Gradients.of_samples(values, factors.mT, batch.weights)

    def _pieces(
        self, parameters: Tensor, inputs: Tensor, elements_per_sample: int, *, split_rows: bool
    ) -> Iterator[tuple[slice, slice, slice]]:
        """Yield the cells, trials and samples of each piece, as many as memory allows."""
        cells, trials, width = *parameters.shape[:2], inputs.shape[1]
        capacity = max(1, _ELEMENTS_AT_ONCE // max(1, elements_per_sample))
        rows = min(width, capacity) if split_rows else width
        some_trials = max(1, min(trials, capacity // rows))
        some_cells = max(1, min(cells, capacity // (rows * some_trials)))
        for c in range(0, cells, some_cells):
            for v in range(0, trials, some_trials):
                for r in range(0, width, rows):
                    yield slice(c, c + some_cells), slice(v, v + some_trials), slice(r, r + rows)

    def _rehearse(self, vector: Tensor, inputs: Tensor, targets: Tensor) -> None:
        """Try a few samples once; raise if the module cannot be trained privately."""
        if self._num_kept is not None:
            return
        # On real samples, because shapes and types of inputs decide which layers run.
        X, y = inputs[:_REHEARSAL_ROWS], targets[:_REHEARSAL_ROWS]
        constants = self._place_constants(vector)
        # Torch counts in-place changes of tensors, and its generator changes with each draw.
        versions = {name: tensor._version for name, tensor in constants.items()}
        before = torch.get_rng_state()
        sizes: list[int] = []

        def count(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        # Autograd packs what it saves for the backward pass through this hook, so sizes add up.
        leaf = vector.detach().requires_grad_(True)
        parts = [part for part in (self._model, self.loss) if isinstance(part, nn.Module)]
        kept = list(map(list_attributes, parts))
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(count, lambda kept: kept),
        ):
            total = self._mean_loss(leaf, X, y).detach()
        if not torch.equal(before, torch.get_rng_state()):
            torch.set_rng_state(before)
            raise InvalidArgumentError("model must not draw random numbers, found that it does")
        changed = [name for name, tensor in constants.items() if tensor._version != versions[name]]
        require(not changed, "model", "without changes of its buffers", f"changes of {changed[:1]}")
        self._require_mean(vector, X, y, total)
        if not has_same_values(kept, list(map(list_attributes, parts))):
            raise InvalidArgumentError("model and loss must not keep state between calls")
        obstacle = self._find_obstacle(vector, X, y)
        self._num_kept = -(-sum(sizes) // len(X))
        if obstacle:
            self._map = map_in_a_loop
            self._grad = differentiate
            text = f"one model and one sample at a time, which is many times slower ({obstacle})"
            warnings.warn(f"{type(self._model).__name__} runs {text}", CornWarning, stacklevel=2)

    def _require_mean(self, vector: Tensor, X: Tensor, y: Tensor, total: Tensor) -> None:
        require(total.shape == (), "loss", "one number, the mean", f"shape {tuple(total.shape)}")
        # A sum would scale gradients. A model that mixes samples has neither, and is accepted.
        alone = torch.stack([self._sample_loss(vector, *pair) for pair in zip(X, y, strict=True)])
        # State, such as a running mean of targets, would carry one sample into others' gradients.
        again = self._sample_loss(vector, X[0], y[0])
        if not torch.isclose(again, alone[0], rtol=1e-6, atol=0.0, equal_nan=True):
            raise InvalidArgumentError("model and loss must not keep state between calls")
        is_mean = torch.isclose(total, alone.mean(), rtol=1e-3)
        is_sum = not is_mean and torch.isclose(total, alone.sum(), rtol=1e-3)
        require(not is_sum, "loss", "the mean over the batch", "the sum")

    def _find_obstacle(self, vector: Tensor, X: Tensor, y: Tensor) -> str:
        """Return the error of a module that runs alone but not vectorised; empty if it runs."""
        models = vector.expand(1, 2, -1)
        weights = vector.new_full((1, len(X)), 1 / len(X))
        batch = Batch(X.unsqueeze(0), y.unsqueeze(0), weights, is_average=True)
        # All three uses are tried: batching rules exist for some layers and transforms only.
        try:
            self._batch_gradient(models, batch)
            self._clipped_gradient(models, batch, vector.new_ones(2))
            vmap(self._score, (0, None, None))(models[0], X, y)
        except RuntimeError as error:
            return str(error).strip().split("\n")[0][:200]
        return ""


def make_task(model: nn.Module | Task, loss: MeanLoss | None) -> Task:
    """Return a task unchanged, or a task made from a module and its loss."""
    if not isinstance(model, nn.Module):
        require(loss is None, "loss", f"None for a {type(model).__name__}, which has its own", loss)
        return model
    if loss is None:
        raise InvalidArgumentError("loss must be given with a module, found None")
    return ModuleTask(model, loss)


@contextmanager
def _explained(inputs: Tensor, targets: Tensor) -> Iterator[None]:
    """Raise ``InvalidArgumentError`` with the samples on which the user's model or loss failed."""
    try:
        yield
    except CornError:
        raise
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        # Running out of memory is no fault of the samples.
        if isinstance(error, torch.OutOfMemoryError):
            raise
        kinds = [
            f"{str(values.dtype).removeprefix('torch.')} of shape {tuple(values.shape[1:])}"
            for values in (inputs, targets)
        ]
        why = str(error).strip().split("\n")[0][:200]
        raise InvalidArgumentError(
            f"model and loss must accept the samples, found inputs {kinds[0]} and targets "
            f"{kinds[1]}, on which they failed: {why}"
        ) from error


def list_attributes(module: nn.Module) -> list[Any]:
    """Return what layers and their classes could keep of samples: tensors, numbers and texts.

    Parameters and buffers are left out.
    """
    values = [
        value
        for layer in module.modules()
        for owner in (layer, type(layer))
        for name, value in vars(owner).items()
        if name not in _OF_EVERY_MODULE and not name.startswith("__")
    ]
    kinds = Tensor | np.ndarray | np.generic | int | float | complex | str
    return [_copy(leaf) for leaf in tree_flatten(values)[0] if isinstance(leaf, kinds)]


def _copy(value: Any) -> Any:
    """Return a copy that ``has_same_values`` can compare."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if not isinstance(value, Tensor):
        return value
    # What was left by ``vmap`` can neither be read nor used.
    is_left = torch._C._functorch.is_functorch_wrapped_tensor(value)
    return "left by vmap" if is_left else value.detach().clone()


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


def _reset_layer(layer: nn.Module) -> None:
    if callable(getattr(layer, "reset_parameters", None)):
        layer.reset_parameters()  # type: ignore[operator]


def _repeat(targets: Tensor, trials: int) -> Tensor:
    """Return a view (cells, trials, …) of targets, for losses that fail with ``in_dims=None``."""
    return targets.unsqueeze(1).expand(-1, trials, *targets.shape[1:])


def small_cnn(image_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return two convolutions with pooling and a linear layer, for images of this shape."""
    # A grey image gets one channel; one with channels loses the extra 1.
    channels, height, width = (1, *image_shape)[-3:]
    require(min(height, width) >= 4, "image_shape", "at least 4×4", f"{height}×{width}")
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (height // 4) * (width // 4), num_classes),
    )


def small_cnn_task(image_shape: tuple[int, ...], num_classes: int) -> ModuleTask:
    """Return the small network with cross-entropy; each seed draws its own initial parameters."""
    model = small_cnn(image_shape, num_classes)
    shape = (1, *image_shape)[-3:]
    return ModuleTask(model, functional.cross_entropy, input_shape=shape, reset=True)
