"""The paper's tasks: a quadratic, and linear and one-hidden-layer classifiers, many models at once.

Agent i = 1 … n/2 of the quadratic has f_i(x) = 15 (x₁ + i)² + x₂², the others 15 (x₁ − i)² + x₂²,
rotated by 15° around their minimisers (i, 0). The paper's text does not state where agents start,
and states its step size in two ways. With C = 0.1 and gradients of norm 600, clipped steps from
x = 0 do not reach the minimiser. So agents start **there** and the gap measures the noise, with
η_t = 0.01/√t. The other reading (η_t = 1/√t from x = 0) puts mechanisms in the same order.

The gradients of classifiers are written out. Trials that share a mini-batch share one product with
it. In each layer the gradient of one sample is an outer product, so its norm is a product of two
vector norms: no gradient of a single sample is ever in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from corn.checks import FloatArray, require, require_count, require_in_range
from corn.errors import InvalidArgumentError
from corn.learn.batches import AgentData, Batch
from corn.learn.step import clip_factors, drop_broken, drop_broken_inputs, norms_at_least
from corn.learn.tasks.protocol import Gradients, Scores

_STIFFNESS = 15.0
_ANGLE_DEGREES = 15.0


@final
class Quadratic:
    """f_i(x) = (x − c_i)ᵀA_i(x − c_i); the one "sample" of agent i is its own A_i and c_i.

    ``matrices`` and ``centers`` are all A_i and c_i, ``minimizer`` and ``minimum`` those of the
    average. Agents begin at ``start``, by default the minimiser.
    """

    def __init__(self, num_agents: int) -> None:
        if num_agents < 2 or num_agents % 2:
            raise InvalidArgumentError(f"num_agents must be even and positive, not {num_agents}")
        half = num_agents // 2
        angle = np.deg2rad(_ANGLE_DEGREES)
        Q = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        plain = np.diag([_STIFFNESS, 1.0])
        self.matrices = np.stack([plain] * half + [Q @ plain @ Q.T] * half)
        places = np.arange(1, num_agents + 1) * np.where(np.arange(num_agents) < half, -1.0, 1.0)
        self.centers = np.stack([places, np.zeros(num_agents)], axis=1)
        self.num_parameters = 2
        # Σ A_i (x − c_i) = 0.
        pull = np.einsum("nij,nj->i", self.matrices, self.centers)
        self.minimizer: FloatArray = np.linalg.solve(self.matrices.sum(axis=0), pull)
        offset = self.minimizer - self.centers
        self.minimum = float(np.einsum("ni,nij,nj->n", offset, self.matrices, offset).mean())
        self.start = self.minimizer

    def agent_data(self, dtype: torch.dtype = torch.float32) -> AgentData:
        """Return one sample per agent: its A_i, row by row, then its c_i."""
        n = len(self.centers)
        rows = np.concatenate([self.matrices.reshape(n, -1), self.centers], axis=1)
        offsets = tuple(range(n + 1))
        return AgentData(torch.from_numpy(rows).to(dtype), torch.zeros(n, dtype=dtype), offsets)

    def prepare(self, inputs: Tensor) -> Tensor:
        """See ``Task``."""
        return inputs

    def initialize(self, seed: int) -> Tensor:  # noqa: ARG002
        """See ``Task``; the same for every seed."""
        return torch.from_numpy(self.start.copy())

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        """See ``Task``."""
        # The objective itself is the sample, so that mini-batches and clipping work as for data.
        A, c = self._unpack(batch.inputs)
        slopes = 2 * torch.einsum("kbij,kbvj->kbvi", A, parameters.unsqueeze(1) - c.unsqueeze(2))
        weights = batch.weights.unsqueeze(-1)
        if sample_clip is None:
            return Gradients((weights.unsqueeze(-1) * slopes).sum(dim=1))
        slopes = slopes.to(sample_clip.dtype)
        factors = clip_factors(norms_at_least(slopes), sample_clip, rounding=batch.most_samples**2)
        slopes = drop_broken(slopes, factors)
        values = ((weights.to(factors) * factors).unsqueeze(-1) * slopes).sum(dim=1)
        return Gradients.of_samples(values, factors, batch.weights)

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:  # noqa: ARG002
        """See ``Task``."""
        A, c = self._unpack(inputs)
        offset = parameters.unsqueeze(1) - c
        return Scores(torch.einsum("pbi,bij,pbj->pb", offset, A, offset).mean(dim=1))

    def describe(self) -> str:
        """See ``Task``."""
        return f"quadratic objectives of {len(self.centers)} agents in {self.num_parameters} dims"

    def _unpack(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        d = self.num_parameters
        return inputs[..., : d * d].view(*inputs.shape[:-1], d, d), inputs[..., d * d :]


# Bound the memory of one evaluation: 2²³ logits or hidden units, of which a model has about 32.
_ELEMENTS_AT_ONCE = 1 << 23
_MOST_UNITS = 32


class _Classifier:
    """A model of features, to which a constant is appended, for classes from 0."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        self._num_features = require_count("num_features", num_features)
        self._num_classes = require_count("num_classes", num_classes, least=2)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return samples flattened, with a constant feature after the others."""
        require(inputs.is_floating_point(), "inputs", "real numbers", inputs.dtype)
        flat = inputs.flatten(1)
        is_whole = flat.shape[1] == self._num_features
        require(is_whole, "inputs", f"of {self._num_features} features", flat.shape[1])
        return torch.cat([flat, flat.new_ones(len(flat), 1)], dim=1)

    def check_targets(self, targets: Tensor) -> None:
        """Raise unless targets are classes from 0: others would train silently."""
        found = torch.unique(targets)
        is_wrong = (found != found.long()) | (found < 0) | (found >= self._num_classes)
        is_class = targets.dim() == 1 and not bool(is_wrong.any())
        rule = f"classes, one of 0 … {self._num_classes - 1} for each sample"
        shape = tuple(targets.shape)
        require(is_class, "targets", rule, f"shape {shape} with {found[:4].tolist()}")


@final
class LinearClassifier(_Classifier):
    """Regression on features and a constant: logistic with two classes, softmax with more.

    A sample's loss is its cross-entropy plus λ/2 ‖θ‖² (the paper's regularised model), so the
    penalty is clipped with it; reported losses leave the penalty out. All models start at zero.
    """

    def __init__(self, num_features: int, num_classes: int, *, l2: float = 1e-4) -> None:
        super().__init__(num_features, num_classes)
        require_in_range("l2", l2, 0)
        require(l2 < math.inf, "l2", "finite", l2)
        self._l2 = l2
        # Two classes need one logit, which halves the parameters, and so the noise's energy.
        self._num_outputs = 1 if num_classes == 2 else num_classes
        self.num_parameters = self._num_outputs * (num_features + 1)

    def initialize(self, seed: int) -> Tensor:  # noqa: ARG002
        """Return zeros for every seed: the problem is convex."""
        return torch.zeros(self.num_parameters, dtype=torch.float64)

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        """See ``Task``."""
        if sample_clip is not None:
            return self._clipped_gradient(parameters, batch, sample_clip)
        X, (cells, trials, _) = batch.inputs, parameters.shape
        # (cells, trials · outputs, features + 1): one product for all trials of a cell.
        theta = parameters.view(cells, -1, X.shape[-1])
        # Samples are the last dimension: over the few classes there, softmax is many times slower.
        logits = torch.bmm(theta, X.mT).view(cells, trials, self._num_outputs, -1)
        residuals = self._residuals(logits, batch.targets.unsqueeze(1), dim=2)
        scale = 1 / X.shape[1] if batch.is_average else 1.0
        if not batch.is_average:
            residuals.mul_(batch.weights[:, None, None])
        G = torch.baddbmm(theta, residuals.flatten(1, 2), X, beta=self._l2, alpha=scale)
        return Gradients(G.view_as(parameters))

    def _clipped_gradient(self, parameters: Tensor, batch: Batch, sample_clip: Tensor) -> Gradients:
        # In float32 a row may round differently at another place, to which one sample moves others.
        X = batch.inputs.to(sample_clip.dtype)
        models = parameters.to(sample_clip.dtype)
        cells, trials, _ = models.shape
        theta = models.view(cells, -1, X.shape[-1])
        # Samples are not the last dimension, along which softmax rounds the last few differently.
        logits = torch.bmm(X, theta.mT).view(cells, -1, trials, self._num_outputs)
        residuals = self._residuals(logits, batch.targets.unsqueeze(2), dim=3)
        norms = self._sample_norms(residuals, logits, X, models)
        # Terms of the sum may exceed clipped gradients by the penalty's part, which is public.
        penalty = self._l2 * torch.linalg.vector_norm(models, dim=-1).unsqueeze(1)
        rounding = batch.most_samples**2 * (1 + 2 * penalty / sample_clip)
        factors = clip_factors(norms, sample_clip, rounding=rounding)
        weights = factors * batch.weights.to(factors).unsqueeze(-1)
        residuals = drop_broken(residuals.mul_(weights.unsqueeze(-1)), factors)
        X = drop_broken_inputs(X, factors)
        G = torch.bmm(residuals.flatten(2).mT, X).view_as(models)
        # λθ is a part of every sample's clipped gradient, with that sample's factor and weight.
        G.add_(models * weights.sum(dim=1).unsqueeze(-1), alpha=self._l2)
        return Gradients.of_samples(G, factors, batch.weights)

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """See ``Task``; the loss is the cross-entropy without the penalty."""
        shape = len(parameters), self._num_outputs
        theta = parameters.reshape(-1, inputs.shape[-1])
        return _score(lambda X: (X @ theta.T).view(len(X), *shape), parameters, inputs, targets)

    def describe(self) -> str:
        """See ``Task``."""
        is_binary = self._num_outputs == 1
        kind = "logistic" if is_binary else "softmax"
        classes = "" if is_binary else f" and {self._num_classes} classes"
        return f"{kind} regression on {self._num_features} features{classes}, l2 = {self._l2:g}"

    def to_module(self, parameters: Tensor) -> nn.Module:
        """Return an ``nn.Linear``, whose output is class 1's logit of two, else all logits."""
        return _make_linear(parameters.reshape(self._num_outputs, -1))

    def _residuals(self, logits: Tensor, targets: Tensor, *, dim: int) -> Tensor:
        """Return ∂loss/∂logits, in new memory; outputs are along ``dim``, which targets lack."""
        if self._num_outputs == 1:
            return torch.sigmoid(logits).sub_(targets.unsqueeze(dim))
        labels = functional.one_hot(targets, self._num_classes).movedim(-1, dim)
        return torch.softmax(logits, dim=dim).sub_(labels)

    def _sample_norms(
        self, residuals: Tensor, logits: Tensor, X: Tensor, parameters: Tensor
    ) -> Tensor:
        """Return at least ‖r xᵀ + λθ‖, shape (cells, batch, trials), from ⟨r xᵀ, θ⟩ = r·logits."""
        plain = norms_at_least(residuals) * norms_at_least(X).unsqueeze(-1)
        if not self._l2:
            return plain
        squared = plain.square()
        cross = (residuals * logits).sum(dim=-1)
        own = self._l2**2 * parameters.square().sum(dim=-1).unsqueeze(1)
        product = squared.sqrt() * own.sqrt()
        # Where the two parts nearly cancel, rounding errors exceed their sum, and a norm that comes
        # out too small would clip too little. So the most that rounding can take away is added: 16
        # ulps for the sums, and as many ulps for a logit as it has features.
        lost = 16 * (squared + own + 2 * product) + 2 * X.shape[-1] * product
        ulp = torch.finfo(logits.dtype).eps
        return (squared + 2 * self._l2 * cross + own).clamp(min=0).add(lost, alpha=ulp).sqrt()


@final
class ShallowNetwork(_Classifier):
    """features → hidden (ReLU) → classes with cross-entropy: 784–32–10 on MNIST, as in the paper.

    Parameters are (hidden, features + 1) with the bias last, then (classes, hidden + 1).
    """

    def __init__(self, num_features: int, num_classes: int, *, num_hidden: int = 32) -> None:
        super().__init__(num_features, num_classes)
        self._hidden = require_count("num_hidden", num_hidden)
        self._first_layer_size = num_hidden * (num_features + 1)
        self.num_parameters = self._first_layer_size + num_classes * (num_hidden + 1)

    def initialize(self, seed: int) -> Tensor:
        """Draw uniformly from ±1/√(inputs of the layer), as ``torch.nn.Linear`` does."""
        random = torch.Generator().manual_seed(seed)
        uniform = torch.rand(self.num_parameters, generator=random, dtype=torch.float64)
        uniform.mul_(2).sub_(1)
        uniform[: self._first_layer_size] /= math.sqrt(self._num_features)
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
        logits = hidden @ second.mT + bias.unsqueeze(-2)
        labels = functional.one_hot(batch.targets, self._num_classes).unsqueeze(1)
        # ∂loss/∂logits, shape (cells, trials, batch, classes).
        delta_out = torch.softmax(logits, dim=-1).sub_(labels)
        delta_in = (delta_out @ second).mul_(hidden > 0)
        scale = batch.weights.unsqueeze(1).expand(-1, trials, -1)
        if sample_clip is None:
            delta_out.mul_(scale.unsqueeze(-1))
            delta_in.mul_(scale.unsqueeze(-1))
            return Gradients(self._backward(delta_out, delta_in, hidden, X))
        # Forward pass in the model's precision, norms and sums in that of the clip.
        wide = [values.to(sample_clip.dtype) for values in (delta_out, delta_in, hidden, X)]
        delta_out, delta_in, hidden, X = wide
        # ‖δ hᵀ‖_F = ‖δ‖ ‖h‖ in each layer, (cells, trials, batch); the 1 is the bias.
        outer = norms_at_least(delta_out) * (1 + hidden.square().sum(dim=-1)).sqrt()
        norms = torch.hypot(outer, norms_at_least(delta_in) * norms_at_least(X).unsqueeze(1))
        factors = clip_factors(norms, sample_clip.unsqueeze(-1), rounding=batch.most_samples**2)
        scale = scale.to(factors) * factors
        drop_broken(delta_out.mul_(scale.unsqueeze(-1)), factors)
        drop_broken(delta_in.mul_(scale.unsqueeze(-1)), factors)
        # Zero residuals times infinite activations would be NaN, so those are dropped too.
        hidden, X = drop_broken(hidden, factors), drop_broken_inputs(X, factors)
        values = self._backward(delta_out, delta_in, hidden, X)
        return Gradients.of_samples(values, factors.mT, batch.weights)

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """See ``Task``."""
        first = parameters[:, : self._first_layer_size].reshape(-1, self._num_features + 1)
        second, bias = self._output_layer(parameters)

        def compute(X: Tensor) -> Tensor:
            hidden = (X @ first.T).relu_().view(len(X), len(parameters), self._hidden)
            return (hidden.transpose(0, 1) @ second.mT + bias.unsqueeze(1)).transpose(0, 1)

        return _score(compute, parameters, inputs, targets)

    def describe(self) -> str:
        """See ``Task``."""
        return f"network {self._num_features}–{self._hidden}–{self._num_classes}"

    def to_module(self, parameters: Tensor) -> nn.Module:
        """Return an ``nn.Sequential`` of the two layers with ``nn.ReLU`` between them."""
        first = parameters[: self._first_layer_size].reshape(self._hidden, -1)
        second = parameters[self._first_layer_size :].reshape(self._num_classes, -1)
        return nn.Sequential(_make_linear(first), nn.ReLU(), _make_linear(second))

    def _output_layer(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the output layer's weights, shape (…, classes, hidden), and its bias."""
        flat = parameters[..., self._first_layer_size :]
        output = flat.view(*flat.shape[:-1], self._num_classes, self._hidden + 1)
        return output[..., :-1], output[..., -1]

    def _backward(self, delta_out: Tensor, delta_in: Tensor, hidden: Tensor, X: Tensor) -> Tensor:
        cells, trials = delta_out.shape[:2]
        gradient = X.new_empty(cells, trials, self.num_parameters)
        second, bias = self._output_layer(gradient)
        rows = delta_in.transpose(1, 2).flatten(2)
        gradient[..., : self._first_layer_size] = torch.bmm(rows.mT, X).view(cells, trials, -1)
        second.copy_(delta_out.mT @ hidden)
        bias.copy_(delta_out.sum(dim=2))
        return gradient


def _make_linear(theta: Tensor) -> nn.Linear:
    """Return a layer with weights of shape (outputs, inputs + 1), in which the bias is last."""
    num_outputs, width = theta.shape
    layer = nn.Linear(width - 1, num_outputs, device="meta").to_empty(device="cpu").to(theta.dtype)
    layer.load_state_dict({"weight": theta[:, :-1], "bias": theta[:, -1]})
    return layer


def _score(
    logits_of: Callable[[Tensor], Tensor], parameters: Tensor, inputs: Tensor, targets: Tensor
) -> Scores:
    """Score models by logits of shape (rows, models, outputs)."""
    loss, hits = parameters.new_zeros(len(parameters)), parameters.new_zeros(len(parameters))
    rows = max(1, _ELEMENTS_AT_ONCE // (len(parameters) * _MOST_UNITS))
    for X, y in zip(torch.split(inputs, rows), torch.split(targets, rows), strict=True):
        logits = logits_of(X)
        if logits.shape[-1] == 1:
            z = logits.squeeze(-1)
            # log(1 + eᶻ) − z y, without overflow for large z.
            loss += (functional.softplus(z) - z * y.unsqueeze(-1)).sum(dim=0)
            hits += ((z > 0).long() == y.unsqueeze(-1)).sum(dim=0)
        else:
            picked = logits.gather(-1, y[:, None, None].expand(-1, len(parameters), 1))
            loss += (torch.logsumexp(logits, dim=-1) - picked.squeeze(-1)).sum(dim=0)
            hits += (logits.argmax(dim=-1) == y.unsqueeze(-1)).sum(dim=0)
    return Scores(loss / len(inputs), hits / len(inputs))
