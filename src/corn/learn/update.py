"""Replaceable parts of an update: what is clipped, how models are mixed, and the rule of steps.

A step is: gradient, *clipping*, the release kernel (clip to C, add noise, round), *local rule*,
*mixing*. The kernel stays between the two sides, so that replacements keep the accounting, as long
as they compute from nothing but what they are given:

- A `Clipping` gets one gradient at a time, of an agent or of a sample, as the budget's unit
  demands. Whatever it returns, the kernel clips to C. A rule that remembers earlier gradients is
  refused. One that reads the data set by itself cannot be noticed, and ε does not cover it.
- A `LocalRule` and a `MixingRule` get releases and models alone, all of which an eavesdropper sees
  as well. What they compute from those is post-processing, and costs no privacy.
- `LocalSteps` is a task: several steps on an agent's own batch count as one gradient. The kernel
  clips the whole of it, so it is for the unit agent.

Settings of a sweep take them (`corn.learn.SweepSettings`), and so do `corn.train` and
`corn.compare`. They are for simulations: agents run what their plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, final

import torch
from torch import Tensor, nn

from corn.checks import require, require_count, require_positive
from corn.errors import InvalidArgumentError
from corn.learn.batches import Batch
from corn.learn.step import ClippedGradients, Mixer, clip_gradients, sum_clipped_samples
from corn.learn.tasks import MeanLoss, Task
from corn.learn.tasks.module import make_task, trained_parameters
from corn.learn.tasks.protocol import Gradients
from corn.topology import Network

Clipping: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(gradient, C) → gradient, both of shape (d,); it is vectorised by ``torch.vmap``, so it may not
branch on values: take ``torch.where`` or ``clamp``."""

MixingRule: TypeAlias = Callable[[Tensor, int], Tensor]
"""(half steps, step from 0) → models, both of shape (seeds, agents, values)."""


class LocalRule(Protocol):
    """A rule of steps along releases, made anew for each sweep, so that it may keep a memory."""

    def take_step(
        self, models: Tensor, released: Tensor, step_size: Tensor, mix: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the models after a step.

        Args:
            models: shape (seeds, agents, trials, d).
            released: the releases, of the same shape; with exact sums their average, for one agent.
            step_size: broadcasts against them; 0 for runs that were stopped.
            mix: mixes such values over agents, once for each message of the step.
        """


@final
class GradientTracking:
    """Gradient tracking: agents step along an estimate of the average release of all agents.

    y ← W y + r − r', with the releases r of this step and r' of the one before, and
    x ← W (x − η y) (Di Lorenzo and Scutari 2016). It takes two messages over each link and step,
    and corrects for agents whose data differ.
    """

    def __init__(self) -> None:
        self._tracked: Tensor | None = None
        self._released: Tensor | None = None

    def take_step(
        self, models: Tensor, released: Tensor, step_size: Tensor, mix: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """See ``LocalRule``."""
        # A copy: the memory of releases is used again in the next step.
        released = released.clone()
        tracked = released
        if self._tracked is not None and self._released is not None:
            tracked = mix(self._tracked) + released - self._released
        self._tracked = tracked
        self._released = released
        return mix(models - step_size * tracked)


@final
class LocalSteps:
    """A task whose gradient is the mean of several gradient steps on the agent's own batch.

    The agent takes ``num_steps`` steps of ``step_size`` without noise, and what it releases is the
    distance that it moved, divided by both, clipped as one gradient. Each sample counts in all
    steps, so that single samples cannot be clipped: the unit must be the agent. ``model`` and
    ``loss`` are those of `corn.train`, which then takes this task in their place.
    """

    def __init__(
        self,
        model: nn.Module | Task,
        num_steps: int,
        step_size: float,
        *,
        loss: MeanLoss | None = None,
    ) -> None:
        self._task = make_task(model, loss)
        self._num_steps = require_count("num_steps", num_steps)
        self._step_size = require_positive("step_size", step_size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        """See ``Task``."""
        if sample_clip is not None:
            raise InvalidArgumentError(
                "local steps need a budget with unit 'agent', found 'sample': one sample changes "
                "all steps after it, so that clipping single samples does not bound its effect"
            )
        current = parameters
        for _ in range(self._num_steps):
            current = current - self._step_size * self._task.gradient(current, batch).values
        return Gradients((parameters - current) / (self._num_steps * self._step_size))

    def describe(self) -> str:
        """See ``Task``."""
        return f"{self._task.describe()}, {self._num_steps} local steps of {self._step_size:g}"


def clip_layers(model: nn.Module) -> Clipping:
    """Return the rule that clips the gradient of each of L parameters to C/√L.

    The norm of the whole is then at most C. A layer with large gradients does not shrink the
    others.
    """
    sizes = [parameter.numel() for parameter in trained_parameters(model)]

    def clip(gradient: Tensor, largest: Tensor) -> Tensor:
        most = largest / len(sizes) ** 0.5
        # The smallest positive number: a layer of zeros stays zero.
        least = torch.finfo(gradient.dtype).tiny
        parts = torch.split(gradient, sizes)
        norms = [torch.linalg.vector_norm(part).clamp(min=least) for part in parts]
        pairs = zip(parts, norms, strict=True)
        return torch.cat([part * (most / norm).clamp(max=1.0) for part, norm in pairs])

    return clip


def normalise(gradient: Tensor, clip: Tensor) -> Tensor:
    """Return the gradient scaled to norm C, however small it was.

    >>> normalise(torch.tensor([3.0, 4.0]), torch.tensor(1.0)).tolist()
    [0.6000000238418579, 0.800000011920929]
    """
    norm: Tensor = torch.linalg.vector_norm(gradient)
    scaled: Tensor = gradient * (clip / norm.clamp(min=torch.finfo(gradient.dtype).tiny))
    return scaled


def clip_by_rule(
    task: Task,
    parameters: Tensor,
    batch: Batch,
    clip: Tensor,
    rule: Clipping,
    *,
    clips_samples: bool,
) -> ClippedGradients:
    """Compute gradients, apply a rule to each, and clip them to C; see ``compute_gradients``."""
    if not clips_samples:
        values = _apply(rule, task.gradient(parameters, batch).values, clip)
        return clip_gradients(Gradients(values), clip, clips_samples=False)
    # A sample is a batch of its own, so that any task computes its gradient.
    cells, size = batch.weights.shape
    alone = Batch(
        batch.inputs.flatten(0, 1).unsqueeze(1),
        batch.targets.flatten(0, 1).unsqueeze(1),
        parameters.new_ones(cells * size, 1),
        is_average=True,
    )
    models = parameters.repeat_interleave(size, dim=0)
    slopes = _apply(rule, task.gradient(models, alone).values.to(clip.dtype), clip)
    # Shape (cells, trials, samples, d).
    slopes = slopes.view(cells, size, *slopes.shape[1:]).transpose(1, 2).contiguous()
    values, factors = sum_clipped_samples(
        slopes, clip[:, None], batch.weights.unsqueeze(1), most_samples=batch.most_samples
    )
    found = Gradients.of_samples(values, factors.transpose(1, 2), batch.weights)
    return clip_gradients(found, clip, clips_samples=True)


def check_clipping(rule: Clipping, num_parameters: int) -> None:
    """Raise unless a rule maps a gradient to one of its shape, whatever it was called with before.

    A rule with a memory would let one sample change what is released of others.
    """
    generator = torch.Generator().manual_seed(0)
    first, other = torch.randn(2, 1, 1, num_parameters, generator=generator)
    clip = torch.ones(1)
    try:
        made, _, again = (_apply(rule, values, clip) for values in (first, other, first))
    except (RuntimeError, TypeError, IndexError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidArgumentError(
            f"clipping must be a function of one gradient of shape ({num_parameters},) and of C, "
            f"which torch.vmap can vectorise, so that it has torch.where in place of if: {reason}"
        ) from error
    is_same = torch.equal(made, again)
    require(is_same, "clipping", "a function without memory", "other values for the same gradient")


def _apply(rule: Clipping, values: Tensor, clip: Tensor) -> Tensor:
    """Apply a rule to each gradient by itself, shape (cells, trials, d): it sees no other."""
    over_trials = torch.vmap(rule)
    made: Tensor = torch.vmap(lambda own: over_trials(own, clip.to(own.dtype)))(values)
    rule_shape = "a function that keeps the shape of a gradient"
    require(made.shape == values.shape, "clipping", rule_shape, tuple(made.shape[2:]))
    return made.contiguous()


def follow_graphs(*phases: tuple[int, Network]) -> MixingRule:
    """Return the rule that mixes over each network for its number of steps, then from the start.

    >>> from corn.topology import load_network
    >>> ring = load_network("ring:4", mixing="gossip")
    >>> models = torch.arange(4.0).view(1, 4, 1)
    >>> follow_graphs((1, ring))(models, 0).flatten().tolist()
    [1.3333333730697632, 1.0, 2.0, 1.6666667461395264]
    """
    _require_gossip([network for _, network in phases])
    order = [network for count, network in phases for _ in range(require_count("steps", count))]
    mixers: dict[tuple[int, torch.dtype, torch.device], Mixer] = {}

    def mix(models: Tensor, step: int) -> Tensor:
        network = order[step % len(order)]
        _require_agents(network, models)
        key = id(network), models.dtype, models.device
        if key not in mixers:
            mixers[key] = Mixer(network, dtype=models.dtype, device=models.device)
        return mixers[key].mix(models)

    return mix


def pair_at_random(network: Network, *, seed: int = 0) -> MixingRule:
    """Return the rule by which random pairs of linked agents average their models in each step.

    Pairs are a random maximal matching of the links: an agent has one partner at most
    (one-peer gossip, Boyd and others 2006). They depend on seed and step alone.
    """
    _require_gossip([network])
    links = torch.tensor(list(network.graph.to_undirected().edges))

    def mix(models: Tensor, step: int) -> Tensor:
        _require_agents(network, models)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        order = links[torch.randperm(len(links), generator=generator)].tolist()
        partner = torch.arange(models.shape[1])
        taken: set[int] = set()
        for first, second in order:
            if first not in taken and second not in taken:
                taken |= {first, second}
                partner[first] = second
                partner[second] = first
        return (models + models[:, partner.to(models.device)]) / 2

    return mix


def _require_agents(network: Network, models: Tensor) -> None:
    rule = f"over networks of the {models.shape[1]} agents that train"
    require(network.num_agents == models.shape[1], "mixing", rule, network.num_agents)


def _require_gossip(networks: Sequence[Network]) -> None:
    require(len(networks) > 0, "networks", "at least one", "none")
    for network in networks:
        require(network.mixing == "gossip", "mixing", "that of networks with gossip", "sum")
