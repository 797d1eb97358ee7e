"""Tasks from any ``torch.nn.Module`` with any loss, and a small convolutional network."""

from __future__ import annotations

import copy
import hashlib
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from corn.checks import require
from corn.errors import CornError, CornWarning, InvalidArgumentError
from corn.learn.batches import Batch
from corn.learn.step import (
    clip_factors,
    count_broken,
    drop_broken,
    fraction_clipped,
    norms_at_least,
    sum_clipped_samples,
)
from corn.learn.tasks.protocol import Gradients, Scores, seeded

MeanLoss: TypeAlias = Callable[[Any, Tensor], Tensor]
"""(outputs, targets) → the mean loss over a batch, as in ``torch.nn.functional``."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Two samples are enough to tell a sum from a mean.
_REHEARSAL_ROWS = 2


@final
class FlatModule:
    """The loss of a module as a function of its trained parameters, flattened to one vector.

    Frozen parameters (``requires_grad`` False) and buffers are constants, in the vector's type and
    on its device.
    """

    def __init__(self, model: nn.Module, loss: MeanLoss) -> None:
        # A copy: later changes to the user's model must not change the task.
        require_stateless(model)
        self._model, self._loss = copy.deepcopy(model), loss
        named = dict(self._model.named_parameters())
        trained = {name: p for name, p in named.items() if p.requires_grad}
        if not trained:
            raise InvalidArgumentError(
                "model must have parameters that are not frozen, found none: set requires_grad"
            )
        self._shapes = {name: p.shape for name, p in trained.items()}
        self._sizes = [p.numel() for p in trained.values()]
        self._fixed = {name: p.detach() for name, p in named.items() if name not in trained}
        self._fixed |= dict(self._model.named_buffers())
        # Copies of the constants by type and device: placing them at every call would be slow.
        self._placed: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters."""
        return sum(self._sizes)

    def initialize(self, seed: int | None) -> Tensor:
        """Return the model's own parameters, or new ones for a seed, in float64."""
        model = self._model
        if seed is not None:
            model = copy.deepcopy(model)
            # Layers draw from torch's global generator, whose state is restored afterwards.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seeded(seed).initial_seed())
                model.apply(_reset_layer)
        return torch.cat([p.detach().flatten().double() for p in trained_parameters(model)])

    def outputs(self, vector: Tensor, inputs: Tensor) -> Any:
        """Return the model's outputs for a batch."""
        pieces = zip(self._shapes.items(), torch.split(vector, self._sizes), strict=True)
        weights = {name: piece.view(shape) for (name, shape), piece in pieces}
        return functional_call(self._model, {**self._constants(vector), **weights}, (inputs,))

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the user's loss of outputs."""
        return self._loss(outputs, targets)

    def mean_loss(self, vector: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        return self._loss(self.outputs(vector, inputs), targets)

    def sample_loss(self, vector: Tensor, sample: Tensor, target: Tensor) -> Tensor:
        """Return the loss of one sample, alone in its batch."""
        return self.mean_loss(vector, sample.unsqueeze(0), target.unsqueeze(0))

    def describe(self) -> str:
        """Return layers, loss and trained parameters as text, without the parameters' values."""
        loss = getattr(self._loss, "__qualname__", repr(self._loss))
        shapes = ", ".join(f"{name} {tuple(shape)}" for name, shape in self._shapes.items())
        text = f"{self._model!r}; {loss}; training {shapes}"
        return _ADDRESS.sub("", text)  # memory addresses differ between processes

    def constants(self) -> Iterator[Tensor]:
        """Yield frozen parameters and buffers, and those of a loss that is itself a module."""
        yield from self._fixed.values()
        if isinstance(self._loss, nn.Module):
            yield from self._loss.state_dict().values()

    def rehearse(self, vector: Tensor, inputs: Tensor, targets: Tensor) -> int:
        """Try a few samples; raise if the module cannot be trained privately.

        Returns how many numbers autograd keeps for the backward pass of one sample.
        """
        X, y = inputs[:_REHEARSAL_ROWS], targets[:_REHEARSAL_ROWS]
        constants = self._constants(vector)
        # Torch counts in-place changes of every tensor, and its default generator changes with each
        # draw. So state and randomness are found in any layer, not in those of known names only.
        versions = {name: tensor._version for name, tensor in constants.items()}
        before = torch.get_rng_state()
        total, kept = _count_kept(lambda leaf: self.mean_loss(leaf, X, y), vector)
        if not torch.equal(before, torch.get_rng_state()):
            torch.set_rng_state(before)
            raise InvalidArgumentError(
                "model must not draw random numbers, as dropout does, found that it does: they "
                "cannot be repeated from a seed; remove them"
            )
        changed = [name for name, tensor in constants.items() if tensor._version != versions[name]]
        if changed:
            raise InvalidArgumentError(
                f"model must not change its buffers, found {changed[0]!r} changed: state that "
                "depends on data would be released without noise; remove it"
            )
        self._require_mean(vector, X, y, total)
        return -(-kept // len(X))

    def _require_mean(self, vector: Tensor, X: Tensor, y: Tensor, total: Tensor) -> None:
        if total.shape != ():
            raise InvalidArgumentError(
                "loss must return one number, the mean over the batch, found shape "
                f"{tuple(total.shape)}: try reduction='mean'"
            )
        # A sum in place of a mean would scale gradients by the batch size. The loss of a model that
        # mixes samples equals neither, and is accepted.
        alone = torch.stack([self.sample_loss(vector, *pair) for pair in zip(X, y, strict=True)])
        # Where samples are clipped, each is alone in its batch. State, such as a running mean of
        # targets, would carry the influence of one into the gradients of others.
        again = self.sample_loss(vector, X[0], y[0])
        if not torch.isclose(again, alone[0], rtol=1e-6, atol=0.0, equal_nan=True):
            raise InvalidArgumentError(
                "model and loss must not keep state between calls, found that the loss of a sample "
                "depends on the calls before: compute it from outputs and targets alone"
            )
        mean, added = alone.mean(), alone.sum()
        if torch.isclose(total, added, rtol=1e-3) and not torch.isclose(total, mean, rtol=1e-3):
            raise InvalidArgumentError(
                "loss must return the mean over the batch, found the sum: try reduction='mean'"
            )

    def _constants(self, vector: Tensor) -> dict[str, Tensor]:
        where = vector.dtype, vector.device
        if where not in self._placed:
            self._placed[where] = {
                name: tensor.to(device=where[1], dtype=where[0], copy=True)
                if tensor.is_floating_point()
                else tensor.to(device=where[1], copy=True)
                for name, tensor in self._fixed.items()
            }
        return self._placed[where]


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen, in the flat vector's order, shared ones once."""
    return [p for p in model.parameters() if p.requires_grad]


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return the values of a tensor as bytes, for hashes."""
    # Viewed as bytes: NumPy has no bfloat16.
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


@contextmanager
def explained(inputs: Tensor, targets: Tensor) -> Iterator[None]:
    """Raise ``InvalidArgumentError`` with the samples on which the user's model or loss failed."""
    try:
        yield
    except CornError:
        raise
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        # Running out of memory is no fault of the samples.
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise InvalidArgumentError(
            f"model and loss must accept the samples, found inputs {_describe(inputs)} and targets "
            f"{_describe(targets)}, on which they failed: {_first_line(error)}"
        ) from error


def _describe(values: Tensor) -> str:
    kind = str(values.dtype).removeprefix("torch.")
    return f"{kind} of shape {tuple(values.shape[1:])}"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]


def _count_kept(loss_of: Callable[[Tensor], Tensor], vector: Tensor) -> tuple[Tensor, int]:
    """Return a loss, and how many numbers its backward pass keeps."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    # Autograd packs what it saves for the backward pass through this hook, so sizes add up.
    leaf = vector.detach().requires_grad_(True)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        total = loss_of(leaf)
    return total.detach(), sum(sizes)


def _reset_layer(layer: nn.Module) -> None:
    if callable(getattr(layer, "reset_parameters", None)):
        layer.reset_parameters()  # type: ignore[operator]


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
                f"model must not use batch normalisation, found it in {where!r}: its statistics "
                "mix samples, so clipping does not bound one sample's influence; use GroupNorm or "
                f"LayerNorm, here torch.nn.GroupNorm(1, {layer.num_features})"
            )


def require_stateless(model: nn.Module) -> None:
    """Raise for layers that mix samples, draw random numbers or have no shape yet."""
    require_no_batch_statistics(model)
    for name, layer in model.named_modules():
        where = name or "model"
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            raise InvalidArgumentError(
                f"model must not use dropout, found it in {where!r}: its draws cannot "
                "be repeated from a seed; set p = 0 or remove it"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InvalidArgumentError(
                f"model must have all its parameters, found {name!r} without a shape yet: call it "
                "once on a sample, or give the layer its sizes"
            )


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


@final
class ModuleTask:
    """The user's own model and loss as a task.

    Parameters with ``requires_grad`` False are constants: they get no gradient and no noise. All
    models, and all samples where each is clipped, are differentiated together by ``torch.func``. A
    module that ``torch.func`` cannot vectorise, such as one that branches on the values of its
    data, runs one model (and one sample) at a time, with a ``CornWarning``.

    Args:
        model: any module without state beyond its parameters. Batch normalisation is refused: its
            statistics mix samples, so clipping a sample's gradient does not bound its influence.
            Dropout is refused: its random draws could not be repeated from a seed.
        loss: (outputs, targets) → the **mean** loss over a batch, as in ``torch.nn.functional``.
            Where samples are clipped, it is called with one sample at a time. It must not keep
            state between calls.
        input_shape: the shape of one sample for the model; by default its shape in the data.
        reset: draw new initial parameters for each seed, by each layer's ``reset_parameters``;
            otherwise all runs start from the model's present parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: MeanLoss,
        *,
        input_shape: tuple[int, ...] | None = None,
        reset: bool = False,
    ) -> None:
        self._module, self._name = FlatModule(model, loss), type(model).__name__
        self._input_shape, self._reset = input_shape, reset
        self._runner: Vectorised | Looped | None = None

    @property
    def num_parameters(self) -> int:
        """See ``Task``; frozen parameters do not count."""
        return self._module.num_parameters

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return samples in the model's input shape."""
        return inputs if self._input_shape is None else inputs.view(-1, *self._input_shape)

    def initialize(self, seed: int) -> Tensor:
        """Return the model's own parameters, or new ones for the seed."""
        return self._module.initialize(seed if self._reset else None)

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        """See ``Task``."""
        # All cells' samples in a row, for the rehearsal and for error messages.
        inputs, targets = batch.inputs.flatten(0, 1), batch.targets.flatten(0, 1)
        with explained(inputs, targets):
            runner = self._choose_runner(parameters[0, 0], inputs, targets)
            if sample_clip is None:
                return runner.gradient(parameters, batch)
            return runner.clipped_gradient(parameters, batch, sample_clip)

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """See ``Task``; with accuracy if outputs score classes and targets are classes."""
        with explained(inputs, targets), torch.no_grad():
            runner = self._choose_runner(parameters[0], inputs, targets)
            return runner.evaluate(parameters, inputs, targets)

    def describe(self) -> str:
        """See ``Task``."""
        return f"{self._name} with {self.num_parameters} parameters"

    def fingerprint(self) -> bytes:
        """Return a hash of layers, loss and constants, so that checkpoints fit this model alone."""
        digest = hashlib.sha256(self._module.describe().encode())
        for tensor in self._module.constants():
            digest.update(tensor_bytes(tensor))
        return digest.digest()

    def _choose_runner(
        self, vector: Tensor, inputs: Tensor, targets: Tensor
    ) -> Vectorised | Looped:
        """Return the runner, chosen once by trying a few samples."""
        # On real samples, because shapes and types of inputs decide which layers run.
        if self._runner is None:
            kept = self._module.rehearse(vector, inputs, targets)
            self._runner = Vectorised(self._module, elements_per_sample=kept)
            reason = _find_obstacle(self._runner, vector, inputs, targets)
            if reason is not None:
                self._runner = Looped(self._module)
                warnings.warn(
                    f"{self._name} runs one model and one sample at a time, which is many times "
                    f"slower: torch.func cannot vectorise it ({reason})",
                    CornWarning,
                    stacklevel=2,
                )
        return self._runner


def _find_obstacle(
    runner: Vectorised, vector: Tensor, inputs: Tensor, targets: Tensor
) -> str | None:
    """Return the error of a module that runs alone but not vectorised; None if it runs."""
    X, y = inputs[:2].unsqueeze(0), targets[:2].unsqueeze(0)
    # One cell with two models and two samples: every ``vmap`` has something to batch.
    models = vector.expand(1, 2, -1)
    batch = Batch(X, y, vector.new_full(y.shape[:2], 1 / len(X[0])), is_average=True)
    # All three uses are tried: batching rules exist for some layers and transforms only.
    try:
        runner.gradient(models, batch)
        runner.clipped_gradient(models, batch, vector.new_ones(2))
        runner.evaluate(models[0], X[0], y[0])
    except RuntimeError as error:
        return str(error).strip().split("\n")[0][:120]
    return None


def small_cnn(image_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return two convolutions with pooling and a linear layer: 9,098 parameters for 28×28.

    ``image_shape`` is (height, width), or (channels, height, width).
    """
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
    model, shape = small_cnn(image_shape, num_classes), (1, *image_shape)[-3:]
    return ModuleTask(model, functional.cross_entropy, input_shape=shape, reset=True)
