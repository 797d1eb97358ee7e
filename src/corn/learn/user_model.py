"""The module of the user's own training loop, through which each sample runs alone.

While a batch of the private loader is under way, a call of the module runs it on one sample after
the other, by ``torch.func.vmap``, each with a copy of the parameters. So no sample can change the
outputs of another one, and the gradient of its copy is that of the sample.
"""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from corn.checks import require
from corn.errors import CornError, CornWarning, InvalidArgumentError
from corn.learn.batches import Batch
from corn.learn.tasks.module import (
    has_same_values,
    hash_module,
    list_attributes,
    map_in_a_loop,
    require_no_batch_statistics,
    split_vector,
    trained_parameters,
)
from corn.learn.tasks.protocol import Gradients, Scores


@final
class SampleGradients:
    """The gradient of each sample's training loss, from one backward pass of the user's loop."""

    def __init__(self, module: nn.Module) -> None:
        rule = "one that is called as torch calls modules, without a __call__() of its own"
        is_plain = type(module).__call__ is nn.Module.__call__
        is_plain |= type(module).__module__.startswith("torch.")
        require(is_plain, "module", rule, type(module).__name__)
        self._module = module
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        forward = module.forward
        # A notebook that runs a cell again makes a module private twice.
        self._forward = forward.usual if isinstance(forward, _SampleForward) else forward
        module.forward = _SampleForward(self, module, self._forward)
        self._bare = _Bare(module, self._forward)
        for layer in module.modules():
            if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
                layer.register_forward_hook(_keep_padding)
        # Of each batch whose losses are expected, the number of samples and the followed inputs.
        self._expected: list[tuple[int, list[Tensor]]] = []
        self._num_batches = 0
        # Why modules run in a Python loop in place of ``vmap``; empty if they do not.
        self._obstacle = ""
        # Of the batch whose losses come next: the parameters of each sample, and all outputs.
        self._copies: dict[str, Tensor] = {}
        self._outputs: list[Tensor] = []
        self._is_taking = False

    def begin(self, batch: Any, num_samples: int) -> Any:
        """Expect losses of a batch, after those before; return the batch to show to the loop."""
        # One that removes itself when it has run is gone when the module runs.
        self._require_no_hooks()
        inputs: list[Tensor] = []
        self._expected.append((num_samples, inputs))
        self._num_batches += 1
        if not self._is_followed:
            return batch

        def follow(value: Any) -> Any:
            if isinstance(value, MutableMapping):
                shown = copy.copy(value)
                shown.update({name: tree_map(follow, own) for name, own in value.items()})
                return shown
            if not isinstance(value, Tensor) or not value.dim() or len(value) != num_samples:
                return value
            if not value.is_floating_point() and not value.is_complex():
                return value
            inputs.append(value.detach().requires_grad_())
            # A copy, which the loop may change in place.
            with torch.enable_grad():
                return inputs[-1].clone()

        return tree_map(follow, batch)

    @property
    def _is_followed(self) -> bool:
        """Whether the latest batch gets all checks, which take time: numbers 1, 2, 4, 8, …."""
        return not self._num_batches & (self._num_batches - 1)

    def end(self) -> None:
        """Expect no losses."""
        self._expected.clear()
        self._outputs.clear()
        self._copies.clear()

    def take(self, losses: Tensor) -> Tensor:
        """Return the gradient of each sample's loss, shape (samples, d)."""
        if not self._expected:
            raise CornError("optimizer.mean(losses) must have one backward pass for each batch")
        num_samples, inputs = self._expected[0]
        if losses.shape != (num_samples,) or not losses.requires_grad:
            raise InvalidArgumentError(
                f"losses must be one loss for each of the {num_samples} samples of the batch, as a "
                f"vector with gradients, found shape {tuple(losses.shape)}"
                f"{'' if losses.requires_grad else ' without gradients'}: use reduction='none'"
            )
        copies, trained = list(self._copies.values()), list(self._trained.values())
        self._is_taking = True
        try:
            self._require_own_losses(losses, inputs)
            # In the sum every loss has weight 1, so that each row is the gradient of one loss.
            slopes = torch.autograd.grad(losses.sum(), [*copies, *trained], allow_unused=True)
        finally:
            self._is_taking = False
        own, outside = slopes[: len(copies)], slopes[len(copies) :]
        is_own = any(slope is not None for slope in own)
        require(is_own, "losses", "computed from outputs of model(inputs)", "other ones")
        for name, slope in zip(self._trained, outside, strict=True):
            rule = "used by calls of the module alone, in its forward()"
            require(slope is None, "parameters", rule, f"a gradient of {name!r} from outside")
        used = [
            torch.zeros_like(copy) if slope is None else slope
            for copy, slope in zip(copies, own, strict=True)
        ]
        self._expected.pop(0)
        self._outputs.clear()
        self._copies.clear()
        return torch.cat([each.flatten(1) for each in used], dim=1)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of a call of the module."""
        if not self._expected or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        self._require_no_hooks()
        num_samples, _ = self._expected[0]
        call = _Call(self._bare, (args, kwargs), num_samples)
        if not self._copies:
            # Views: each sample's gradient has its own memory, its parameters have not.
            self._copies = {
                f"module.{name}": p.detach().expand(num_samples, *p.shape).requires_grad_()
                for name, p in self._trained.items()
            }
        if self._is_followed:
            outputs = self._run_twice(call)
        else:
            outputs = self._map(call.forward, self._copies, call.samples)
        # An output without parameters is followed too: as a weight of losses it may mix samples.
        real = [
            x if x.requires_grad or not x.is_floating_point() else x.detach().requires_grad_()
            for x in outputs
        ]
        followed = [x for x in real if x.requires_grad]
        self._outputs.extend(followed)
        for x in followed:
            x.register_hook(self._require_taking)  # type: ignore[no-untyped-call]
        # Copies, which the loop may change in place.
        return call.assemble([x.clone() for x in real])

    def _require_no_hooks(self) -> None:
        """Raise if the module itself has hooks: they would see all samples of a batch at once."""
        module = self._module
        own: list[Any] = [
            *module._forward_pre_hooks.values(),
            *module._forward_hooks.values(),
            *module._backward_pre_hooks.values(),
            *module._backward_hooks.values(),
        ]
        is_global: bool = _has_any_global_hook()  # type: ignore[no-untyped-call]
        if is_global or any(hook is not _keep_padding for hook in own):
            raise InvalidArgumentError(
                "the module must have no hooks of its own, and torch none for all modules, because "
                "they see the whole batch: hook its layers, through which each sample runs alone"
            )

    def _run_twice(self, call: _Call) -> Sequence[Tensor]:
        """Return the outputs of a call, or raise if a second one with the same data differs."""
        seed = int(torch.randint(1 << 31, ()))
        with seeded_randomness(seed):
            outputs: Sequence[Tensor] = self._map(call.forward, self._copies, call.samples)
        with seeded_randomness(seed), torch.no_grad():
            again = self._map(call.forward, self._copies, call.samples)
        for first, second in zip(outputs, again, strict=True):
            # Sums on some devices depend on the order of threads.
            if not torch.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True):
                raise InvalidArgumentError("the module must keep nothing between calls")
        return outputs

    def _require_taking(self, _: Tensor) -> None:
        """Raise in a backward pass through outputs that is not that of ``take``."""
        if not self._is_taking:
            raise CornError("gradients must come from optimizer.mean(losses), found others")

    def _map(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return a function's values of each sample."""
        dims = (0,) * len(args)
        kept = list_attributes(self._module) if self._is_followed else None
        obstacle = self._obstacle
        if not obstacle:
            try:
                # Fused attention has no batching rule; its plain formula has.
                with sdpa_kernel(SDPBackend.MATH), _plain_attention():
                    return vmap(function, dims, randomness="different")(*args)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                obstacle = str(error).strip().split("\n")[0][:200]
        # Modules without batching rules, such as recurrent ones, or that branch on their inputs.
        found = map_in_a_loop(function, dims)(*args)
        # The loop could read what a sample leaves in an attribute, and a later sample meets it.
        if kept is not None and not has_same_values(kept, list_attributes(self._module)):
            raise InvalidArgumentError(
                "the module must keep nothing between calls, found that forward() changes an "
                "attribute of a layer: return the value as an output, or set it before make_private"
            )
        if not self._obstacle:
            self._obstacle = obstacle
            warnings.warn(
                f"{type(self._module).__name__} runs one sample at a time, which is many times "
                f"slower: torch.func cannot vectorise it ({obstacle})",
                CornWarning,
                stacklevel=2,
            )
        return found

    def _require_own_losses(self, losses: Tensor, inputs: list[Tensor]) -> None:
        """Raise unless losses of samples have no gradient in others: all pairs, or half of them."""
        count = len(losses)
        numbers = torch.arange(count, device=losses.device)
        # Different weights, so that gradients of two losses do not cancel.
        weighted = losses * (1 + numbers / count)
        # Two numbers differ in a bit, so that each pair of samples is split, in both directions.
        splits = list(itertools.product(range((count - 1).bit_length()), (0, 1)))
        if not self._is_followed and splits:
            splits = [splits[self._num_batches % len(splits)]]

        def differentiate(total: Tensor) -> Sequence[Tensor]:
            rows = [*self._outputs, *inputs]
            if not rows:
                return ()
            return torch.autograd.grad(total, rows, retain_graph=True, materialize_grads=True)

        whole = differentiate(weighted.sum()) if self._is_followed else ()
        for bit, side in splits:
            chosen = (numbers >> bit) & 1 == side
            slopes = differentiate(weighted[chosen].sum())
            # A broken sample has NaN in its own row, also where its loss has weight 0.
            is_mixed = any(slope[~chosen].nan_to_num(nan=0.0).any() for slope in slopes)
            # Nor may other losses change a sample's gradient, as scaling by a norm of all does.
            is_mixed = is_mixed or any(
                not torch.allclose(slope[chosen], total[chosen], rtol=1e-3, equal_nan=True)
                for slope, total in zip(slopes, whole, strict=False)
            )
            if is_mixed:
                raise InvalidArgumentError(
                    "each of the losses must depend on its own sample alone, found one that "
                    "depends on others of the batch: use reduction='none', or unit='agent'"
                )


def _keep_padding(layer: nn.Embedding, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Return an embedding whose padding has no gradient, which torch forgets under ``vmap``."""
    is_padding = torch.eq(given[0], layer.padding_idx or 0)
    return torch.where(is_padding.unsqueeze(-1), output.detach(), output)


@contextmanager
def _plain_attention() -> Iterator[None]:
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)


@contextmanager
def seeded_randomness(seed: int) -> Iterator[None]:
    """Let the user's random numbers follow from a seed, then give them back as they were."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - the user's generator
    try:
        with torch.random.fork_rng():
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


class _SampleForward:
    """The ``forward`` of the user's module; copies and pickles of the module have the usual one."""

    def __init__(self, gradients: SampleGradients, module: nn.Module, usual: Any) -> None:
        self.usual = usual
        self._module = module
        self._run = gradients.run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __reduce__(self) -> Any:
        # Of the class: the module's own attributes are not there yet when this is called.
        return getattr, (self._module, "forward")


class _Bare(nn.Module):
    """The user's module without its own hooks, which run for the whole batch."""

    def __init__(self, module: nn.Module, usual: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.forward = usual


class _Call:
    """One call of the module, whose samples run alone."""

    def __init__(self, bare: _Bare, given: Any, num_samples: int) -> None:
        self._bare = bare
        self._leaves, self._structure = tree_flatten(given)
        self._is_split = [
            isinstance(x, Tensor) and bool(x.dim()) and len(x) == num_samples for x in self._leaves
        ]
        self.samples = list(itertools.compress(self._leaves, self._is_split))
        shared = itertools.compress(self._leaves, [not own for own in self._is_split])
        for x in (x for x in shared if isinstance(x, Tensor)):
            # A tensor that all samples see could have values of other samples.
            if x.dim() and len(x) != 1:
                raise InvalidArgumentError(
                    f"tensors for the module must have the {num_samples} samples of the batch "
                    f"along their first dimension, found shape {tuple(x.shape)}: use "
                    "batch_first=True, and 1 as the first dimension of what all samples share"
                )
            rule = "without gradients, as they must not depend on the batch"
            require(not x.requires_grad, "tensors that all samples share", rule, tuple(x.shape))
        require(bool(self.samples), "the module", "called with a tensor of the batch", "none")

    def forward(self, weights: Any, samples: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors among the outputs for one sample."""
        given = iter(samples)
        leaves = [
            next(given).unsqueeze(0) if own else x
            for x, own in zip(self._leaves, self._is_split, strict=True)
        ]
        args, kwargs = tree_unflatten(leaves, self._structure)
        output = functional_call(self._bare, weights, args, kwargs)
        self._outputs, self._output_structure = tree_flatten(output)
        tensors = [x for x in self._outputs if isinstance(x, Tensor)]
        for x in tensors:
            if x.dim() and len(x) != 1:
                raise InvalidArgumentError(
                    "outputs of the module must have samples along their first dimension, found "
                    f"shape {tuple(x.shape)} for one: use batch_first=True, and squeeze(dim)"
                )
        return tuple(x.squeeze(0) if x.dim() else x for x in tensors)

    def assemble(self, outputs: Sequence[Tensor]) -> Any:
        """Return outputs in the structure of the module's."""
        found = iter(outputs)
        leaves = [next(found) if isinstance(x, Tensor) else None for x in self._outputs]
        return tree_unflatten(leaves, self._output_structure)


@final
class UserModel:
    """The user's module as a ``Task``, and a check that values without noise stay as they are."""

    def __init__(self, module: nn.Module) -> None:
        require_no_batch_statistics(module)
        self.module = module
        self._trained = trained_parameters(module)
        self.num_parameters = sum(p.numel() for p in self._trained)
        # By identity, because ``==`` compares tensors by value.
        own = set(map(id, self._trained))
        everything = [*module.named_parameters(), *module.named_buffers()]
        self._frozen = {name: p.detach().clone() for name, p in everything if id(p) not in own}
        # Copies of the trained parameters as CorN left them last, in their own types.
        self._written = [p.detach().clone() for p in self._trained]
        self._start = self.read()

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return row numbers as they are."""
        return inputs

    def initialize(self, seed: int) -> Tensor:  # noqa: ARG002 - the module has its own start
        """Return the parameters with which the module came."""
        return self._start.clone()

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:  # noqa: ARG002
        """Return no scores: only the user's loop knows the loss."""
        return Scores(parameters.new_full((len(parameters),), torch.nan))

    def gradient(
        self,
        parameters: Tensor,  # noqa: ARG002 - those of the module: see ``require_unchanged``
        batch: Batch,  # noqa: ARG002 - the loop has it
        *,
        sample_clip: Tensor | None = None,  # noqa: ARG002 - gradients of samples come otherwise
    ) -> Gradients:
        """Return the gradient of a batch as a whole after the user's backward pass."""
        if not self.has_gradient:
            raise CornError("call loss.backward() before optimizer.step(): there is no gradient")
        # A parameter that this batch did not reach counts as zero: the vector always has length d.
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained]
        return Gradients(torch.cat([g.flatten().cpu() for g in pieces]).view(1, 1, -1).clone())

    def read(self) -> Tensor:
        """Return the trained parameters as one vector, in float64: of any types, without loss."""
        return torch.cat([p.detach().flatten().double().cpu() for p in self._trained])

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Set the trained parameters, and forget their gradients."""
        self.forget_gradient()
        # Copied: the optimizer changes parameters in place, but not the caller's vector.
        for parameter, piece in self._split(vector):
            parameter.copy_(piece)
        self._written = [p.detach().clone() for p in self._trained]

    def require_unchanged(self) -> None:
        """Raise if the trained parameters are not those of the start, or of the last ``write``."""
        if not has_same_values(self._written, [p.detach() for p in self._trained]):
            raise CornError(
                "parameters must not change but by optimizer.step(), found that they did: load "
                "weights before make_private, and checkpoints by optimizer.load_state_dict()"
            )

    @torch.no_grad()
    def set_gradient(self, vector: Tensor) -> None:
        """Set the gradient that the user's optimizer will see."""
        for parameter, piece in self._split(vector):
            # Copied: an optimizer may change gradients in place, and the vector is the caller's.
            parameter.grad = piece.to(parameter, copy=True)

    def forget_gradient(self) -> None:
        """Remove all gradients, so that no release is added to the next gradient."""
        for parameter in self._trained:
            parameter.grad = None

    @property
    def has_gradient(self) -> bool:
        """Whether a trained parameter has a gradient."""
        return any(p.grad is not None for p in self._trained)

    def require_frozen(self) -> None:
        """Raise if a frozen parameter or a buffer has changed: no noise covers such a change."""
        # By name: a module may replace a buffer in place of changing it.
        present = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        for name, before in self._frozen.items():
            if name not in present or not has_same_values(before, present[name].detach()):
                raise CornError(f"{name!r} is not trained and must not change, found that it did")

    def describe(self) -> str:
        """Return the layers and the trained parameters in one line."""
        return f"{type(self.module).__name__} with {self.num_parameters} parameters"

    def fingerprint(self) -> bytes:
        """Return a hash of layers, trained parameters and frozen values."""
        # Of trained parameters only the names: their values are the start, which is compared apart.
        named = [name for name, p in self.module.named_parameters() if p.requires_grad]
        return hash_module(f"{self.module!r}; training {named}", self._frozen.values())

    def _split(self, vector: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        pieces = split_vector(vector, [p.shape for p in self._trained])
        return zip(self._trained, pieces, strict=True)
