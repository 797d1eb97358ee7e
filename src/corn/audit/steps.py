"""A canary through the whole step: sampled, clipped and released by the code of agents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from corn.audit.run import AuditedRun, Signal, alternate, make_choices, query_of
from corn.checks import FloatArray
from corn.learn.batches import (
    AgentData,
    Batch,
    BatchSampler,
    Choices,
    SeededChoices,
    round_rate_down,
)
from corn.learn.step import compute_gradients
from corn.learn.tasks import ModuleTask
from corn.plan import Plan
from corn.privacy import ClippedQuery

RAW_LENGTH = 1000.0
"""Raw gradients are this much longer than C: without clipping they would dominate all noise."""

# Samples of the victim in the unit of agents: each has the canary's gradient.
_AGENT_SAMPLES = 4
# Clipping needs a norm over several coordinates; more of them would only cost time.
_DIMENSIONS = 3
# Trials are sampled and clipped in pieces of this many, so that memory stays bounded.
_TRIALS_AT_ONCE = 2000
# More than any attacker would guess by chance.
_PRACTICE_COINS = 8


class StepRun(AuditedRun):
    """A run in which a sample of the victim has a far too long gradient."""

    def __init__(self, plan: Plan, num_releases: int, num_trials: int, *, seed: int) -> None:
        # A random direction, so that clipping and rounding of all coordinates take part.
        direction = np.random.default_rng(seed).standard_normal(_DIMENSIONS)
        direction /= np.linalg.norm(direction)
        super().__init__(plan, num_releases, num_trials, seed=seed, direction=direction)
        self._seed = seed
        self._predicts = query_of(plan, 0).sampling == "poisson" and predicts_coins(seed)
        if self._predicts:
            self.problems.append(
                "the coins of Poisson sampling are predictable: they do not follow from a secret"
            )
        # They do not depend on the victim.
        self._canaries = cache(self._compute_canaries)

    def add_canary(self, victim: int) -> Signal:
        """Return the change of the victim's releases, and note messages that are not the plan's."""
        query = query_of(self.plan, victim)
        lows, highs, taken = self._canaries(query)
        null, alternative = self._release(lows, victim), self._release(highs, victim)
        # The guarantee of passes holds even if the attacker knows the orders. Coins must be secret.
        rate = rate_of(query) if query.is_subsampled else None
        chances = taken.numpy() if rate is None or self._predicts else np.full((1, 1), rate)
        is_replace = query.adjacency == "replace"
        return Signal(null, alternative, query.sensitivity, chances, is_replace, rate)

    def _release(self, gradients: Tensor, victim: int) -> FloatArray:
        """Return what gradients change in the victim's releases, shape (releases, trials)."""
        found = []
        for number, own in enumerate(gradients):
            message = self.send(own, number, victim)
            # Rounding the gradient by itself, for example, would show here: the sum is then no
            # post-processing of noisy data.
            if not np.array_equal(message, self.recompute(own, number, victim)):
                self.problems.append(
                    f"messages of agent {victim} are not those of its gradient, noise, offset and "
                    "masks"
                )
            found.append(self.project(self.read_release(message, number, victim)))
        # With the same noise, so that the difference is the canary's part after rounding.
        return np.stack(found) - self.released[:, victim]

    def _compute_canaries(self, query: ClippedQuery) -> list[Tensor]:
        """Sample, differentiate and clip for all trials.

        Returned are the clipped gradients of all releases without and with the canary, shape
        (releases, size), and whether it takes part, shape (releases, trials).
        """
        every = range(self.num_trials)
        chunks = [
            self._compute_some(query, every[first : first + _TRIALS_AT_ONCE])
            for first in every[::_TRIALS_AT_ONCE]
        ]
        return [torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True)]

    def _compute_some(self, query: ClippedQuery, trials: range) -> list[Tensor]:
        """Return what ``_compute_canaries`` returns, for some trials."""
        # The sampler has one run per trial, so that each trial has coins of its own.
        choices = [make_choices(self._seed, trial) for trial in trials]
        count = _AGENT_SAMPLES if query.unit == "agent" else count_samples(query)
        inputs = torch.zeros(count, _DIMENSIONS)
        # An agent's whole data set may be the canary; otherwise it is the first sample.
        canary = inputs if query.unit == "agent" else inputs[:1]
        canary[:] = torch.from_numpy(self.direction * query.clip * RAW_LENGTH)
        data = AgentData(inputs, torch.zeros(count), (0, count))
        sampler = BatchSampler.of_agent(query, data, choices)
        # A linear model whose loss is its output: a sample's gradient is its input.
        task = ModuleTask(nn.Linear(_DIMENSIONS, 1, bias=False), mean_output)
        models = torch.zeros(len(trials), 1, _DIMENSIONS)
        # float64, as agents clip: in float32 the norm could exceed C by some ulps.
        clip = torch.tensor([query.clip], dtype=torch.float64)
        is_sample = query.unit == "sample"

        def clip_batch(batch: Batch, factor: float) -> Tensor:
            # Other samples have no gradient, so that another sign is another canary.
            own = replace(batch, inputs=batch.inputs * factor)
            found = compute_gradients(task, models, own, clip, clips_samples=is_sample)
            return (found.values * found.factors[..., None]).flatten()

        found = []
        for number, sign in enumerate(alternate(len(self.releases)).tolist()):
            batch = sampler.draw(number)
            low = clip_batch(batch, -sign if query.adjacency == "replace" else 0.0)
            # Only samples of the canary are not zero, and padding has weight 0.
            is_canary = (batch.inputs != 0).any(dim=-1) & (batch.weights > 0)
            found.append((low, clip_batch(batch, sign), is_canary.any(dim=1).double()))
        return [torch.stack(column) for column in zip(*found, strict=True)]


def predicts_coins(seed: int) -> bool:
    """Return whether an attacker predicts the coins of trials, which then amplify no privacy.

    It runs the program with secrets of its own, or takes the public seed of the run.
    """

    def draw(choices: Iterable[Choices]) -> list[FloatArray]:
        return [each.draw_coins(0, [_PRACTICE_COINS]) for each in choices]

    coins, own = (draw(make_choices(key, trial) for trial in (0, 1)) for key in (seed, seed + 1))
    public = draw([SeededChoices(seed)] * 2)
    return np.array_equal(coins, own) or np.array_equal(coins, public)


def count_samples(query: ClippedQuery) -> int:
    """Return the number of the victim's samples with which one of them counts most."""
    # Under add-remove any number is allowed. With few samples a divisor that follows the batch
    # would be far below the batch size.
    if query.sampling == "poisson" and query.adjacency == "add-remove":
        return 2
    if query.sampling == "every-step":
        return query.batch_size or 1
    return max(query.least_samples, 2)


def rate_of(query: ClippedQuery) -> float:
    """Return the rate at which the victim's samples are drawn."""
    return round_rate_down(query.sampling_rate or 1.0)


def mean_output(outputs: Tensor, _: Tensor) -> Tensor:
    """Return a loss whose gradient, for a linear model, is a sample's input."""
    return outputs.mean()
