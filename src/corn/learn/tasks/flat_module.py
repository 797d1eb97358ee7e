"""A module and its loss as functions of one flat vector, with checks that it can be trained."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from corn.errors import CornError, InvalidArgumentError
from corn.learn.tasks.protocol import seeded

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
