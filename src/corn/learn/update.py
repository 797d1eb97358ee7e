"""Replaceable parts of an update: what is clipped, how models are mixed, and the rule of steps.

A step is: gradient, *clipping*, the release kernel (clip to C, add noise, round), *local rule*,
*mixing*. A `Clipping` gets one gradient at a time, of an agent or of a sample; whatever it returns,
the kernel clips to C. A `LocalRule` and a `MixingRule` get releases and models alone, all of which
an eavesdropper sees as well: post-processing, which costs no privacy.

They are settings of a sweep, for simulations. ``examples/update_rules.py`` has implementations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from corn.checks import require
from corn.learn.batches import Batch
from corn.learn.step import ClippedGradients, clip_gradients, sum_clipped_samples
from corn.learn.tasks import Gradients, Task

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
        """Return the models (seeds, agents, trials, d) after a step.

        ``released`` are the releases, with exact sums their average, for one agent; the next step
        overwrites them. ``step_size`` broadcasts against them, and is 0 for runs that were stopped.
        ``mix`` mixes such values over agents, once for each message of the step.
        """


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
    slopes = slopes.view(cells, size, *slopes.shape[1:]).transpose(1, 2).contiguous()
    values, factors = sum_clipped_samples(
        slopes, clip[:, None], batch.weights.unsqueeze(1), most_samples=batch.most_samples
    )
    found = Gradients.of_samples(values, factors.transpose(1, 2), batch.weights)
    return clip_gradients(found, clip, clips_samples=True)


def check_clipping(rule: Clipping, num_parameters: int) -> None:
    """Raise unless a rule keeps shapes, and has no memory, by which samples would meet."""
    first, other = torch.randn(2, 1, 1, num_parameters, generator=torch.Generator().manual_seed(0))
    made, _, again = (_apply(rule, values, torch.ones(1)) for values in (first, other, first))
    kind, found = "a function without memory", "other values for the same gradient"
    require(torch.equal(made, again), "clipping", kind, found)


def _apply(rule: Clipping, values: Tensor, clip: Tensor) -> Tensor:
    """Apply a rule to each gradient by itself, shape (cells, trials, d): it sees no other."""
    over_trials = torch.vmap(rule)
    made: Tensor = torch.vmap(lambda own: over_trials(own, clip.to(own.dtype)))(values)
    rule_shape = "a function that keeps the shape of a gradient"
    require(made.shape == values.shape, "clipping", rule_shape, tuple(made.shape[2:]))
    return made.contiguous()
