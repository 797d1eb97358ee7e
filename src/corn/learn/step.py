"""One step of Algorithm 1, for a simulation and for an agent alike.

Clip the gradient, add the noise, round the sum to the public grid, take the half step from the
model; then mix the models, or step along the average of all releases. Privacy rests on this order.
Gradients to be released are clipped in float64, so that the true norm is at most C, as accounting
assumes. Simulations may clip in float32, because their noise protects nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import Tensor

from corn.checks import require
from corn.errors import CornError, InvalidArgumentError
from corn.learn.batches import Batch, BatchSampler
from corn.learn.perturbation import DrawnNoise, NoiseShare, to_sparse_tensor
from corn.noise import load_compiled
from corn.noise.masks import MaskWords
from corn.privacy import ClippedQuery
from corn.topology import Network

if TYPE_CHECKING:  # tasks clip samples with the functions of this module
    from corn.learn.own_loop import PrivateOptimizer
    from corn.learn.tasks import Task
    from corn.learn.tasks.protocol import Gradients

# A norm in floating point is right to some ulps only, a sum of m numbers to m ulps. Gradients are
# clipped by this much more, so that the true norm is at most C: in float64 for up to 10⁹ numbers.
_MARGIN = {torch.float32: 1e-6, torch.float64: 1e-10}

# Adding up many more squares than this one by one loses more than the margin.
_BLOCK = 1 << 12


@dataclass(frozen=True, eq=False)
class StepStatistics:
    """Statistics of a step, averaged over agents, (seeds, trials); norms before clipping."""

    gradient_norm: Tensor
    fraction_clipped: Tensor
    noise_norm: Tensor


def no_statistics() -> StepStatistics:
    """Return the statistics of a step without a release."""
    nan = torch.full((1, 1), torch.nan)
    return StepStatistics(nan, nan, nan)


@dataclass(frozen=True, eq=False)
class ClippedGradients:
    """Clipped gradients, shape (cells, trials, parameters), and statistics for their owner alone.

    ``factors`` are still to be multiplied with; they are 1 where each sample was clipped.
    ``num_broken`` counts the gradients that were not finite and count as zero.
    """

    values: Tensor
    factors: Tensor
    norms: Tensor
    fraction_clipped: Tensor
    num_broken: Tensor


def compute_gradients(
    task: Task, parameters: Tensor, batch: Batch, clip: Tensor, *, clips_samples: bool
) -> ClippedGradients:
    """Compute one gradient for each model, clipped to C of each trial in the type of ``clip``."""
    found = task.gradient(parameters, batch, sample_clip=clip if clips_samples else None)
    return clip_gradients(found, clip, clips_samples=clips_samples)


def clip_gradients(found: Gradients, clip: Tensor, *, clips_samples: bool) -> ClippedGradients:
    """Clip one gradient for each model, or check that each of its samples was clipped."""
    # In the clip's type, whatever that of the gradient: a float32 norm could be too small.
    norms = gradient_norms(found.values, clip.dtype)
    if not clips_samples:
        factors = clip_factors(norms, clip)
        values = drop_broken(found.values, factors)
        # A factor is 0 only where the norm is not finite: C is positive.
        num_broken = (factors == 0).long()
        return ClippedGradients(values, factors, norms, (factors < 1).to(norms), num_broken)
    # A task that ignored sample_clip, or summed in float32, would exceed the sensitivity.
    rule = "one that clips each sample, for a budget of unit sample"
    if found.fraction_clipped is None or found.num_broken is None:
        raise InvalidArgumentError(f"task must be {rule}, found one that ignores sample_clip")
    is_exact = found.values.dtype == clip.dtype
    require(is_exact, "sums of clipped samples", f"in {clip.dtype}", found.values.dtype)
    ones = torch.ones_like(norms)
    return ClippedGradients(found.values, ones, norms, found.fraction_clipped, found.num_broken)


def sum_clipped_samples(
    slopes: Tensor, clip: Tensor, weights: Tensor, *, most_samples: int
) -> tuple[Tensor, Tensor]:
    """Return Σ_i w_i · clip(g_i) along the dimension of samples, and the clipping factors.

    ``slopes`` has shape (…, samples, parameters), in the type to clip in; those that are not finite
    are set to zero in place. ``most_samples`` is a public bound on the number of samples.
    """
    factors = clip_factors(norms_at_least(slopes), clip, rounding=most_samples**2)
    # Before the product: 0 times NaN is NaN, which would spoil the whole sum.
    kept = drop_broken(slopes, factors)
    weighted = factors * weights.to(factors.dtype)
    return torch.matmul(weighted.unsqueeze(-2), kept).squeeze(-2), factors


def gradient_norms(gradients: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return ‖g‖ along the last dimension, correct up to the margin of :func:`clip_factors`."""
    if (gradients.dtype, dtype) == (torch.float32, torch.float64) and gradients.is_cpu:
        rows = gradients.reshape(-1, gradients.shape[-1]).contiguous()
        squares = np.empty(len(rows))
        load_compiled().sum_squares(squares, rows.numpy())
        return torch.from_numpy(np.sqrt(squares)).view(gradients.shape[:-1])
    # The norm of the norms of blocks: rounding errors then grow with the block's length.
    whole = gradients.shape[-1] // _BLOCK * _BLOCK
    rest: Tensor = torch.linalg.vector_norm(gradients[..., whole:], dim=-1, dtype=dtype)
    if not whole:
        return rest
    blocks = torch.unflatten(gradients[..., :whole], -1, (-1, _BLOCK))
    norms = torch.linalg.vector_norm(blocks, dim=-1, dtype=dtype)
    both: Tensor = torch.linalg.vector_norm(torch.cat([norms, rest.unsqueeze(-1)], -1), dim=-1)
    return both


def norms_at_least(values: Tensor) -> Tensor:
    """Return ‖x‖ along the last dimension, or an upper bound where squares would underflow."""
    norms = gradient_norms(values)
    # Squares of numbers below √tiny lose digits or vanish; 10⁶ leaves room for many of them.
    tiny = norms < math.sqrt(torch.finfo(values.dtype).tiny) * 1e6
    if not bool(tiny.any()):
        return norms
    # ‖x‖ ≤ √m · max|x_i| needs no squares.
    largest = torch.linalg.vector_norm(values, torch.inf, dim=-1)
    return torch.where(tiny, largest * math.sqrt(values.shape[-1]), norms)


def clip_factors(norms: Tensor, clip: Tensor | float, *, rounding: Tensor | float = 1.0) -> Tensor:
    """Return the factors min(1, C/‖g‖) that clip gradients of these norms; 0 if not finite.

    Where m clipped gradients are summed, rounding the sum can add up to ``rounding`` = m² ulps to
    one sample's sensitivity, by which the factors are smaller. The number must be public: otherwise
    one sample would change the contributions of the others.
    """
    margin = torch.as_tensor(_MARGIN[norms.dtype], dtype=norms.dtype)
    if norms.dtype == torch.float64:
        # The rounding errors of both neighbouring data sets count.
        margin = margin + 2 * torch.finfo(norms.dtype).eps * rounding
    # A norm of 0 gives ∞, and so 1. Without the lower limit a margin above 1 would turn signs.
    factors = (clip * (1 - margin).clamp(min=0.0) / norms).clamp(max=1.0)
    return factors.masked_fill(~torch.isfinite(norms), 0.0)


def drop_broken(values: Tensor, factors: Tensor) -> Tensor:
    """Set gradients of factor 0 to zero, in place: to stop there would reveal private data."""
    broken = factors == 0
    return values.masked_fill_(broken.unsqueeze(-1), 0.0) if bool(broken.any()) else values


def drop_broken_inputs(inputs: Tensor, factors: Tensor) -> Tensor:
    """Return inputs without infinities if any gradient was dropped: zero times one is NaN."""
    return torch.nan_to_num(inputs, 0.0, 0.0, 0.0) if bool((factors == 0).any()) else inputs


def release(gradient: Tensor, factor: Tensor, noise: Tensor, grid: Tensor) -> Tensor:
    """Return γ·rint((f g + v)/γ), in the type of factor and noise: float64 for releases.

    The result depends on the gradient through the noisy sum alone, without the sum's low-order
    bits, which would reveal the gradient's own rounding (Mironov 2012). Where the grid is 0, the
    sum is returned unrounded, for comparisons that protect nobody.
    """
    # The grid is a power of two, so dividing and multiplying by it are exact: rint alone rounds.
    total = torch.mul(gradient, factor).add_(noise)
    # Where the grid is 0 this is NaN, and replaced below.
    rounded = torch.div(total, grid).round_().mul_(grid)
    return rounded if bool((grid > 0).all()) else torch.where(grid > 0, rounded, total)


def release_integers(
    gradient: Tensor, factor: Tensor, noise: Tensor, grid: Tensor, offset: Tensor | None
) -> Tensor:
    """Return rint((f g + v)/γ + o) as integers, for exact sums with the public offset o, if any.

    ε holds for their sum over all agents: nothing else may be computed, not even a sum of floats.
    """
    units = torch.mul(gradient, factor).add_(noise).div_(grid)
    return (units if offset is None else units.add_(offset)).round_().long()


def average_integers(total: Tensor, num_agents: int, grid: Tensor, offset: Tensor | None) -> Tensor:
    """Return γ·(Σ − n o)/n from the sum Σ of all integers, the bits of ``masks.read_average``."""
    units = total.double()
    return (units if offset is None else units - num_agents * offset) * (grid / num_agents)


def smooth(memory: Tensor, released: Tensor, momentum: float) -> Tensor:
    """Return m ← β m + (1 − β) s, in the memory's place: an average of what was released so far."""
    # Two products and a sum, each rounded, so that simulations and agents get the same bits.
    return memory.mul_(momentum).add_(released * (1 - momentum))


def take_half_step(
    parameters: Tensor,
    gradient: Tensor,
    factor: Tensor,
    noise: Tensor,
    *,
    grid: float,
    step_size: float,
) -> Tensor:
    """Return X − η·release of one agent, shape (d,): the bits of :func:`release`, in one pass."""
    # The gradient's memory is reused: allocating new memory would take longer than the step.
    half = gradient if gradient.dtype == parameters.dtype else torch.empty_like(parameters)
    arrays = (each.numpy() for each in (half, parameters, gradient, noise))
    load_compiled().write_half_step(*arrays, float(factor), grid, step_size)
    return half


@final
class AgentStepper:
    """One agent's steps, without the messages: ``begin``, ``clip``, ``release…``, ``finish``.

    ``reserve`` allows the release of a step, once and durably, and returns its number. ``batches``
    is None where others compute gradients. ``update`` replaces the step along what was released.
    ``statistics`` of the last release, and ``num_broken``, the number of gradients that were not
    finite and counted as zero, are for the agent's owner.
    """

    def __init__(
        self,
        query: ClippedQuery,
        reserve: Callable[[int], int],
        batches: BatchSampler | None = None,
        *,
        num_parameters: int = 0,
        momentum: float = 0.0,
        update: PrivateOptimizer | None = None,
    ) -> None:
        # In float64, so that the true norm is at most C (docs/floats.md).
        self._clip = torch.tensor([query.clip], dtype=torch.float64)
        self._sample_clip = self._clip if query.unit == "sample" else None
        self._reserve = reserve
        self._batches = batches
        self._momentum = momentum
        self._update = update
        self._batch: Batch | None = None
        self._drawn: DrawnNoise | None = None
        self._is_released = False
        self._found: ClippedGradients | None = None
        self.step = 0
        self.parameters = torch.empty(0)
        self.statistics = no_statistics()
        self.num_broken = 0
        self._memory = torch.zeros(num_parameters) if momentum else None

    @property
    def batch(self) -> Batch:
        """The batch of the step under way."""
        if self._batch is None:
            raise CornError("a step must begin before it has a batch")
        return self._batch

    def begin(self, step: int, noise: NoiseShare, parameters: Tensor | None = None) -> None:
        """Reserve the release of a step, then take its noise and its batch."""
        # Durably reserved before anything is sent: a run that crashes cannot release it again.
        number = self._reserve(step)
        self._drawn = noise.take(step)
        self._is_released = False
        self._found = None
        self.step = step
        if parameters is not None:
            self.parameters = parameters
        if self._batches is not None:
            self._batch = self._batches.draw(number)

    @torch.no_grad()
    def differentiate(self, task: Task) -> None:
        """Compute the gradient of a task on the batch, and clip it."""
        model = self.parameters.view(1, 1, -1)
        self.clip(task.gradient(model, self.batch, sample_clip=self._sample_clip))

    @torch.no_grad()
    def clip(self, found: Gradients) -> None:
        """Take the gradient of the step, and clip it as the query demands."""
        is_sample = self._sample_clip is not None
        self.hand_over(clip_gradients(found, self._clip, clips_samples=is_sample))

    def hand_over(self, clipped: ClippedGradients) -> None:
        """Take the gradient of the step, which is clipped already."""
        self._found = clipped
        self.num_broken += int(clipped.num_broken.sum())

    def _take(self, *, observe: bool) -> tuple[Tensor, Tensor, DrawnNoise]:
        """Return gradient, factor and noise of the step, once."""
        found, drawn = self._found, self._drawn
        # A second gradient must not get the same noise: the difference would be free of it.
        if found is None or drawn is None or self._is_released:
            raise CornError("a release must follow the gradient of a step that has begun, once")
        self._found = None
        self._is_released = True
        # The norm of the noise takes a while to compute.
        noise_norm = torch.linalg.vector_norm(drawn.values) if observe else torch.zeros(1)
        self.statistics = StepStatistics(found.norms, found.fraction_clipped, noise_norm.view(1, 1))
        return found.values.view(-1), found.factors.view(-1), drawn

    @torch.no_grad()
    def release_half_step(self, *, step_size: float, observe: bool = True) -> Tensor:
        """Return X − η (clipped gradient + noise, on the grid), shape (d,), for neighbours."""
        gradient, factor, drawn = self._take(observe=observe)
        model, grid = self.parameters, drawn.share.plan.grid
        # One function rounds to the grid after the sum of gradient and noise (docs/floats.md).
        terms = (gradient, factor, drawn.values)
        if self._update is None and self._memory is None:
            return take_half_step(model, *terms, grid=grid, step_size=step_size)
        # A step of size −1 from zero is the release itself.
        released = take_half_step(torch.zeros_like(model), *terms, grid=grid, step_size=-1.0)
        return self.move(released, step_size=step_size)

    @torch.no_grad()
    def release_masked(self, *, observe: bool = True) -> MaskWords:
        """Return the release for an exact sum, under masks."""
        gradient, factor, drawn = self._take(observe=observe)
        return drawn.make_message(gradient, factor)

    @torch.no_grad()
    def finish(self, total: MaskWords, *, step_size: float) -> Tensor | None:
        """Return the model after the step along the average, or None where the sum is void."""
        if self._drawn is None:
            raise CornError("a step must begin before it ends")
        average = self._drawn.read_total(total, self.parameters.numpy().dtype)
        if average is None:
            return None
        return self.move(torch.from_numpy(average), step_size=step_size)

    def move(self, released: Tensor, *, step_size: float) -> Tensor:
        """Return the step along a release or an average, in a fixed order of operations."""
        if self._update is not None:
            return self._update.take_step(released).to(released)
        parameters = self.parameters
        if self._memory is not None:
            self._memory = smooth(self._memory.to(parameters), released, self._momentum)
            released = self._memory
        # In memory that exists: new memory would take longer than the subtraction.
        out = released if self._memory is None else torch.empty_like(released)
        scaled = torch.mul(released, parameters.new_full((1,), step_size), out=out)
        return torch.sub(parameters, scaled, out=scaled)

    def save(self) -> Mapping[str, Tensor]:
        """Return what this agent keeps between steps where releases are summed exactly."""
        if self._update is not None:
            return self._update.save()
        return {} if self._memory is None else {"memory": self._memory}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what another agent keeps; raise ``InvalidArgumentError`` for other models."""
        if self._update is not None:
            self._update.restore(state)
        elif self._memory is not None and "memory" in state:
            shape, rule = state["memory"].shape, "of one number per parameter"
            require(shape == self._memory.shape, "the average of releases", rule, tuple(shape))
            self._memory = state["memory"]


# An entry of a sparse matrix takes about as long as this many entries of a dense one.
_SPARSE_COST = 12


@final
class Mixer:
    """The rounds of a step of gossip, for models of all agents; over links if that is faster."""

    def __init__(
        self, network: Network, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        W = network.sparse_matrix
        rounds = network.schedule
        if _SPARSE_COST * W.nnz * len(rounds) < network.num_agents**2:
            self._rounds, matrix = rounds, to_sparse_tensor(W)
        else:
            # The dense matrix has all rounds of a step in it, so that none is left to repeat.
            self._rounds, matrix = rounds[:0], torch.from_numpy(np.array(network.step_matrix))
        self._matrix = matrix.to(device=device, dtype=dtype)

    def mix(self, models: Tensor) -> Tensor:
        """Return the models after a step's rounds, shape (seeds, agents, values)."""
        if not self._rounds:
            return torch.matmul(self._matrix, models)
        # Torch multiplies a sparse matrix with matrices only, so seeds are taken one by one.
        return torch.stack([self._mix_one(own) for own in models])

    def _mix_one(self, models: Tensor) -> Tensor:
        change = None
        for momentum, gain in self._rounds:
            mixed: Tensor = self._matrix @ models
            # A plain round x ← W x. It also forgets the change of earlier Chebyshev rounds.
            if gain == 1 and not momentum:
                models, change = mixed, None
                continue
            # x ← x + m_k (x − the x before) + g_k (W x − x): docs/theory.md, “Chebyshev rounds”.
            moved = mixed.sub_(models).mul_(gain)
            # The first Chebyshev round has no momentum, so that a change is known from then on.
            change = moved if change is None else moved.add_(change, alpha=momentum)
            models = models + change
        return models
