"""The module of the user's own training loop as a task, whose gradients the loop computes."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from corn.errors import CornError, InvalidArgumentError
from corn.learn.batches import Batch
from corn.learn.step import sum_clipped_samples
from corn.learn.tasks.module import (
    differentiate,
    map_in_a_loop,
    require_no_batch_statistics,
    tensor_bytes,
    trained_parameters,
)
from corn.learn.tasks.protocol import Gradients, Scores

_TOLERANCE = 1e-3  # relative, between the sum over samples and autograd's own gradient


# Layers that hooks call again must not be hooked then, nor by other hooks on the same module.
_HOOKS = threading.local()


def _is_paused() -> bool:
    return getattr(_HOOKS, "are_paused", False)


@contextmanager
def _paused() -> Iterator[None]:
    _HOOKS.are_paused = True
    try:
        yield
    finally:
        _HOOKS.are_paused = False


@final
class SampleGradients:
    """Hooks on a module that collect the gradient of each sample.

    The first dimension of every layer's inputs and outputs must number the samples, no sample may
    change the row of another one, and each loss must depend on its own sample alone. All of this is
    checked on the first batch of each kind.
    """

    def __init__(self, module: nn.Module) -> None:
        # The gradient of each sample by parameter, shape (samples, …).
        self._rows: dict[nn.Parameter, Tensor] = {}
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._owners = find_owners(module)
        self._names = {
            parameter: name or type(layer).__name__
            for name, layer in self._owners.items()
            for parameter in layer.parameters()
        }
        # Whether the module ran with gradients since the last losses.
        self._was_called = False
        # Kinds of inputs and of losses that were checked.
        self._checked: set[tuple[Any, ...]] = set()
        self._num_batches = 0
        self._inputs: list[Tensor] = []
        # Samples whose losses are differentiated to see whether others move; else None.
        self._chosen: Tensor | None = None
        self._are_mixed = False
        for layer in self._owners.values():
            layer.register_forward_hook(self._after_layer, with_kwargs=True)
        module.register_forward_pre_hook(self._require_independence, with_kwargs=True)

    @property
    def is_empty(self) -> bool:
        """Whether no gradient was collected since the last call of ``take`` or ``clear``."""
        return not self._rows

    def watch(self, batch: Any, num_samples: int) -> Any:
        """Return a batch that shows, when it has gradients, which losses its samples reach.

        This notices samples that the loop mixes before it calls the module. Every batch would cost
        a gradient of its inputs, so the first one, the second, the fourth and so on are watched.
        """
        self._num_batches += 1
        self._inputs.clear()
        if self._num_batches & (self._num_batches - 1):
            return batch

        def follow(value: Any) -> Any:
            is_real = isinstance(value, Tensor) and value.is_floating_point() and value.dim()
            if not is_real or len(value) != num_samples:
                return value
            self._inputs.append(value.detach().requires_grad_())
            # A copy, which the loop may change in place.
            with torch.enable_grad():
                return self._inputs[-1].clone()

        return tree_map(follow, batch)

    def take(self, losses: Tensor) -> Tensor:
        """Return the gradient of each sample's loss, shape (samples, d), by one backward pass.

        It leaves the gradient of the sum in ``.grad``.
        """
        if not self._was_called:
            raise InvalidArgumentError(
                "losses must be computed from the outputs of the whole module, found that it was "
                "not called on tensors of this batch: call model(inputs), not single layers of it"
            )
        # Which operations lead from layers to losses, not how often: sequences of other lengths
        # have the same. A term that is added in a later pass brings a new kind.
        kind = len(losses) > 1, _list_operations(losses)
        is_new = kind not in self._checked or bool(self._inputs)
        # In the sum every loss has weight 1, so that each row is the gradient of a sample's loss.
        torch.autograd.backward(losses.sum(), retain_graph=is_new)
        rows = self._join(len(losses))
        # Before anything is released. Whether it holds depends on the program, not on data.
        if is_new:
            self._require_sum(rows)
            self._require_own_losses(losses)
            self._checked.add(kind)
        self.clear()
        self._inputs.clear()
        self._was_called = False
        return rows

    def clear(self) -> None:
        """Forget all gradients."""
        self._rows.clear()

    def _after_layer(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Keep a layer's inputs, and compute gradients of samples when those of outputs come."""
        # Recurrent and attention layers return (outputs, state or weights).
        result = output[0] if isinstance(output, tuple) else output
        if _is_paused() or not torch.is_grad_enabled() or not result.requires_grad:
            return
        kept = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
        # Inputs are kept without a copy, so a later change in place would give wrong gradients.
        versions = [a._version for a in kept if isinstance(a, Tensor)]

        def collect(gradient: Tensor) -> None:
            if self._chosen is not None:
                self._look_at(gradient, self._chosen)
                return
            if versions != [a._version for a in kept if isinstance(a, Tensor)]:
                raise InvalidArgumentError(
                    f"the inputs of {type(layer).__name__} must not be changed in place after it "
                    "used them, found that they were: use operations that return new tensors"
                )
            # Runs inside the user's backward pass, whose graph must not grow by these products.
            with _paused(), torch.no_grad():
                slopes_of = _differentiate(layer, kept, kwargs, gradient)
            for name, slopes in slopes_of.items():
                parameter = layer.get_parameter(name)
                earlier = self._rows.get(parameter)
                # A layer that runs twice in one pass, or shares its weights, adds up.
                self._rows[parameter] = slopes if earlier is None else earlier + slopes

        # On the output, not a full backward hook of the module: that one wraps inputs and outputs,
        # and fails on later changes in place.
        result.register_hook(collect)

    def _look_at(self, gradient: Tensor, chosen: Tensor) -> None:
        """Note whether a gradient has other rows than those chosen."""
        others = gradient[~chosen.to(gradient.device)]
        # A broken sample has NaN in its own row, also where its loss has weight 0.
        self._are_mixed |= bool(torch.nan_to_num(others, 0.0, 0.0, 0.0).any())

    def _join(self, num_samples: int) -> Tensor:
        pieces = []
        for parameter in self._parameters:
            # A layer that this batch did not use has no gradient, as in autograd.
            rows = self._rows.get(parameter, parameter.new_zeros(num_samples, *parameter.shape))
            # A layer that takes samples along another dimension, as (time, batch, …), is noticed
            # here if that has another length, and by the check of independence if not.
            if len(rows) != num_samples:
                raise InvalidArgumentError(
                    f"layer {self._names[parameter]!r} must take the {num_samples} samples of the "
                    f"batch along its first dimension, found {len(rows)}: gradients of single "
                    "samples need it, and so do layers with batch_first=True"
                )
            pieces.append(rows.reshape(num_samples, -1))
        return torch.cat(pieces, dim=1)

    def _require_sum(self, rows: Tensor) -> None:
        """Raise unless the gradients of the samples add up to the gradient that autograd found."""
        sums = torch.split(rows.sum(dim=0), [p.numel() for p in self._parameters])
        for parameter, total in zip(self._parameters, sums, strict=True):
            gradient = parameter.grad
            usual = torch.zeros_like(total) if gradient is None else gradient.flatten()
            # Relative to both norms: where gradients vanish there is nothing to compare.
            scale = float(usual.norm()) + float(total.norm())
            if float((usual - total).norm()) > _TOLERANCE * scale:
                raise InvalidArgumentError(
                    f"the gradients of single samples of layer {self._names[parameter]!r} do not "
                    "add up to that of the batch: its parameters are used outside of the layer, "
                    "or it draws random numbers; use unit='agent', or another layer"
                )

    def _require_own_losses(self, losses: Tensor) -> None:
        """Raise unless the losses of some samples have no gradient in the rows of all others."""
        count = len(losses)
        numbers = torch.arange(count, device=losses.device)
        # Different weights, so that gradients of two losses do not cancel.
        weighted = losses * (1 + numbers / count)
        self._are_mixed = False
        # Two numbers differ in a bit, so that each pair of samples is split, in both directions.
        for bit, side in itertools.product(range((count - 1).bit_length()), (0, 1)):
            self._chosen = (numbers >> bit) & 1 == side
            try:
                slopes = torch.autograd.grad(
                    weighted[self._chosen].sum(),
                    [*self._parameters, *self._inputs],
                    retain_graph=True,
                    allow_unused=True,
                )
                for slope in slopes[len(self._parameters) :]:
                    if slope is not None:
                        self._look_at(slope, self._chosen)
            finally:
                self._chosen = None
        if self._are_mixed:
            raise InvalidArgumentError(
                "each of the losses must depend on its own sample alone, found one that depends on "
                "others of the batch: compute one loss for each sample, in their order, with "
                "reduction='none'; mix no samples before the model, as mixup does, and compare "
                "none in the loss; unit='agent' allows all of this"
            )

    def _require_independence(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Change one sample before the module runs, and raise if rows of others change.

        Clipping a row bounds the influence of one sample only if no other sample has a part in it.
        A layer that takes (time, batch, …) has other rows, which their number does not show where
        there are as many times as samples; and a module may mix samples between its layers.
        """
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim()]
        if _is_paused() or not torch.is_grad_enabled() or not tensors:
            return
        self._was_called = True
        count = len(tensors[0])
        # Other lengths than before need no other check, unless they coincide with the samples.
        kind = tuple(tuple(size == count for size in x.shape) for x in tensors)
        if kind in self._checked or count < 2:
            return
        with _paused(), torch.no_grad():
            usual = self._record(module, *tree_map(_copy, (args, kwargs)))
            changed = self._record(module, *tree_map(partial(_change, count), (args, kwargs)))
        for (name, before), (_, after) in zip(usual, changed, strict=True):
            if len(before) == count and not _agree(before[1:], after[1:]):
                raise InvalidArgumentError(
                    f"each row of layer {name!r} must belong to one sample, found that a change of "
                    "one sample changes the rows of others: use batch_first=True, or a layer that "
                    "does not mix samples"
                )
        self._checked.add(kind)

    def _record(self, module: nn.Module, args: Any, kwargs: Any) -> list[tuple[str, Tensor]]:
        """Return the inputs of each layer and the outputs of the module, in order."""
        found: list[tuple[str, Tensor]] = []

        def keep(name: str, inputs: Any) -> None:
            leaves = tree_leaves(inputs)
            found.extend((name, x.clone()) for x in leaves if isinstance(x, Tensor) and x.dim())

        def follow(name: str) -> Callable[..., None]:
            return lambda _layer, own, named: keep(name or type(module).__name__, (own, named))

        handles = [
            layer.register_forward_pre_hook(follow(name), with_kwargs=True)
            for name, layer in self._owners.items()
        ]
        try:
            # The same random numbers each time, for dropout, and none taken from the user's.
            with torch.random.fork_rng():
                torch.manual_seed(0)
                keep(type(module).__name__, module(*args, **kwargs))
        finally:
            for handle in handles:
                handle.remove()
        return found


def _list_operations(losses: Tensor) -> frozenset[tuple[str, str]]:
    """Return the pairs of operations of which one uses the result of the other."""
    found: set[tuple[str, str]] = set()
    left: list[Any] = [losses.grad_fn]
    visited = set(left)
    while left:
        node = left.pop()
        for used, _ in node.next_functions:
            if used is None:
                continue
            found.add((node.name(), used.name()))
            if used not in visited:
                visited.add(used)
                left.append(used)
    return frozenset(found)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _change(count: int, value: Any) -> Any:
    """Return a batch in which the first sample has other values of the same range."""
    changed = _copy(value)
    if not isinstance(value, Tensor) or not value.dim() or len(value) != count:
        return changed
    if value.dtype == torch.bool:
        changed[0] = ~value[0]
    elif value.numel() and not value.is_complex():
        changed[0] = value.min() + value.max() - value[0]
    return changed


def _agree(before: Tensor, after: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding."""
    if before.shape != after.shape or not before.is_floating_point():
        return torch.equal(before, after)
    return torch.allclose(before, after, rtol=_TOLERANCE, atol=1e-6, equal_nan=True)


def find_owners(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules that own trained parameters themselves, by name.

    A module such as attention uses the parameters of its children directly, so that it is
    differentiated as a whole.
    """
    owners: dict[str, nn.Module] = {}
    for name, layer in module.named_modules():
        # ``named_modules`` lists parents before children. An empty name is the module itself.
        if any(name.startswith(f"{outer}.") or not outer for outer in owners):
            continue
        if any(p.requires_grad for p in layer.parameters(recurse=False)):
            owners[name] = layer
    return owners


def _differentiate(layer: nn.Module, args: Any, kwargs: Any, gradient: Tensor) -> dict[str, Tensor]:
    """Return the gradient of each sample by parameter name, from the gradient of the outputs."""
    named = dict(layer.named_parameters())
    trained = {name: p.detach() for name, p in named.items() if p.requires_grad}
    fixed = {name: p.detach() for name, p in named.items() if not p.requires_grad}
    fixed |= dict(layer.named_buffers())
    inputs = [a for a in args if isinstance(a, Tensor)]

    def product(weights: dict[str, Tensor], samples: list[Tensor], own: Tensor) -> Tensor:
        # Layers expect a batch, so each sample is a batch of one. Tensors among keyword arguments
        # are not split: the check of the sum refuses layers whose gradients come out wrong for it.
        alone = iter([sample.unsqueeze(0) for sample in samples])
        call = tuple(next(alone) if isinstance(a, Tensor) else a for a in args)
        output = functional_call(layer, {**weights, **fixed}, call, kwargs)
        result = output[0] if isinstance(output, tuple) else output
        # The gradient of ⟨output, g⟩ is the product of g with the layer's Jacobian.
        return torch.sum(result.squeeze(0) * own)

    dims = (None, 0, 0)
    # Fused attention has no batching rule, its plain formula has.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        try:
            found: dict[str, Tensor] = vmap(grad(product), dims)(trained, inputs, gradient)
        except RuntimeError:
            # Layers without a batching rule, such as recurrent ones.
            found = map_in_a_loop(differentiate(product), dims)(trained, inputs, gradient)
    return found


# Gradients of single samples are clipped in float64, this many values at once.
_VALUES_AT_ONCE = 1 << 22


@final
class UserModel:
    """The user's module as a ``Task``, and a check that values without noise stay as they are.

    Args:
        module: trained where ``requires_grad`` is set. Batch normalisation is refused.
        clips_samples: whether gradients of single samples are needed.
    """

    def __init__(self, module: nn.Module, *, clips_samples: bool) -> None:
        require_no_batch_statistics(module)
        self.module = module
        self._trained = trained_parameters(module)
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
        self._start = self.read()

    @property
    def num_parameters(self) -> int:
        """See ``Task``; frozen parameters do not count."""
        return sum(p.numel() for p in self._trained)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return row numbers as they are."""
        return inputs

    def initialize(self, seed: int) -> Tensor:  # noqa: ARG002 - the module has its own start
        """Return the parameters with which the module came."""
        return self._start.clone()

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:  # noqa: ARG002
        """Return no scores: only the user's loop knows the loss."""
        return Scores(parameters.new_full((len(parameters),), torch.nan))

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
    def gradient(
        self,
        parameters: Tensor,  # noqa: ARG002 - those of the module: see ``require_unchanged``
        batch: Batch,
        *,
        sample_clip: Tensor | None = None,
    ) -> Gradients:
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
        return Gradients.of_samples(total.view(1, 1, -1), every, batch.weights)

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
