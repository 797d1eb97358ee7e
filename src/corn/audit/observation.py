"""Observations of a run, and the canary in them.

The victim's gradient is a canary along a known direction u. Everything else is the worst case: the
attacker knows all other data, so only noise and canary remain of what it observes. Each trial is
reduced to the projections on u of what all agents released, which lose nothing about the canary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from corn.audit.run import AuditedRun, make_choices, query_of
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


@dataclass(frozen=True, eq=False)
class Signal:
    """The canary's part of the victim's releases, under both data sets.

    Attributes:
        null: shape (releases, trials): without the canary, or with its negation.
        alternative: shape (releases, trials): with it.
        weights: shape (releases,): the change of each release that the plan accounts for, with its
            sign; all of one size.
        participation: shape (releases, trials), or that of one number: the probability that the
            canary takes part in each release, as far as the attacker knows; 0 or 1 but for secret
            coins.
        is_replace: whether the other data set has the canary's negation, instead of nothing.
        rate: the probability that coins take the canary into a release; None without coins.
    """

    null: FloatArray
    alternative: FloatArray
    weights: FloatArray
    participation: FloatArray
    is_replace: bool
    rate: float | None = None


class Observation:
    """A run without gradients, to whose releases a canary is added.

    Attributes:
        run: keys and messages of all agents.
        problems: faults that need no test.
    """

    def __init__(self, plan: Plan, run: AuditedRun) -> None:
        self.plan, self.run = plan, run
        self.problems = list[str]()

    def add_canary(self, victim: int) -> Signal:
        """Return the change of the victim's releases: that of T steps, in a few releases.

        Each of k releases carries √(T/k) times the canary of one step. Where the noise of releases
        is independent, which the audit checks, this is as informative as T releases with the
        canary.
        """
        query, shape = query_of(self.plan, victim), (len(self.run.releases), self.run.size)
        # A sample under Poisson sampling is audited given that it takes part in one step.
        steps = 1 if query.is_subsampled else query.participations(self.plan.budget.num_steps)
        weights = query.sensitivity * math.sqrt(steps / shape[0]) * _signs(shape[0])
        is_replace = query.adjacency == "replace"
        # Under replace the two data sets are ±½ of the sensitivity, otherwise 0 and all of it.
        middle = 0.5 if is_replace else 0.0
        low, high = (np.outer(weights, np.full(shape[1], part - middle)) for part in (0.0, 1.0))
        return Signal(low, high, weights, np.ones(shape), is_replace)


class StepObservation(Observation):
    """A sample with a far too long gradient in the victim's data, through the whole step.

    It is sampled, clipped and released by the code of agents, up to the message.
    """

    def __init__(self, plan: Plan, *, num_trials: int, num_releases: int, seed: int) -> None:
        # A random direction, so that clipping and rounding of all coordinates take part.
        direction = np.random.default_rng(seed).standard_normal(_DIMENSIONS)
        direction /= np.linalg.norm(direction)
        run = AuditedRun.of_seed(plan, num_releases, num_trials, seed=seed, direction=direction)
        super().__init__(plan, run)
        self._seed = seed
        self._predicts = query_of(plan, 0).sampling == "poisson" and predicts_coins(seed)
        if self._predicts:
            self.problems.append(
                "the coins of Poisson sampling are predictable: they do not follow from a secret"
            )
        self._canaries = cache(self._compute_canaries)

    def add_canary(self, victim: int) -> Signal:
        """Return the change of the victim's releases, and note messages that are not the plan's."""
        query = query_of(self.plan, victim)
        lows, highs, taken = self._canaries(query)
        null, alternative = self._release(lows, victim), self._release(highs, victim)
        weights = query.sensitivity * _signs(len(lows))
        # The guarantee of passes holds even if the attacker knows the orders. Coins must be secret.
        rate = rate_of(query) if query.is_subsampled else None
        chances = taken.numpy() if rate is None or self._predicts else np.full((1, 1), rate)
        return Signal(null, alternative, weights, chances, query.adjacency == "replace", rate)

    def _release(self, gradients: Tensor, victim: int) -> FloatArray:
        """Return what gradients change in the victim's releases, shape (releases, trials)."""
        found = []
        for number, own in enumerate(gradients):
            message = self.run.send(own, number, victim)
            # Rounding the gradient by itself, for example, would show here: the sum is then no
            # post-processing of noisy data.
            if not np.array_equal(message, self.run.recompute(own, number, victim)):
                self.problems.append(
                    f"messages of agent {victim} are not those of its gradient, noise, offset and "
                    "masks"
                )
            found.append(self.run.project(self.run.read_release(message, number, victim)))
        # With the same noise, so that the difference is the canary's part after rounding.
        return np.stack(found) - self.run.released[:, victim]

    def _compute_canaries(self, query: ClippedQuery) -> list[Tensor]:
        """Sample, differentiate and clip for all trials; they do not depend on the victim.

        Returns:
            The clipped gradients of all releases without and with the canary, shape (releases,
            size), and whether it takes part, shape (releases, trials).
        """
        every = range(self.run.num_trials)
        chunks = [
            self._compute_some(query, every[first : first + _TRIALS_AT_ONCE])
            for first in every[::_TRIALS_AT_ONCE]
        ]
        return [torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True)]

    def _compute_some(self, query: ClippedQuery, trials: range) -> list[Tensor]:
        """Return what ``_compute_canaries`` returns, for some trials."""
        # The sampler has one run per trial, so that each trial has coins of its own.
        choices = [make_choices(self._seed, trial) for trial in trials]
        sampler = BatchSampler.of_agent(query, self._make_data(query), choices)
        # A linear model whose loss is its output: a sample's gradient is its input.
        task = ModuleTask(nn.Linear(_DIMENSIONS, 1, bias=False), mean_output)
        models = torch.zeros(len(trials), 1, _DIMENSIONS)
        # float64, as agents clip: in float32 the norm could exceed C by some ulps.
        clip = torch.tensor([query.clip], dtype=torch.float64)
        is_sample = query.unit == "sample"

        def clip_batch(batch: Batch, factor: float) -> Tensor:
            # Samples without the canary have no gradient, so that another sign is another canary.
            own = replace(batch, inputs=batch.inputs * factor)
            found = compute_gradients(task, models, own, clip, clips_samples=is_sample)
            return (found.values * found.factors[..., None]).flatten()

        found = []
        for number, sign in enumerate(_signs(len(self.run.releases)).tolist()):
            batch = sampler.draw(number)
            low = clip_batch(batch, -sign if query.adjacency == "replace" else 0.0)
            # Only samples of the canary are not zero, and padding has weight 0.
            is_canary = (batch.inputs != 0).any(dim=-1) & (batch.weights > 0)
            found.append((low, clip_batch(batch, sign), is_canary.any(dim=1).double()))
        return [torch.stack(column) for column in zip(*found, strict=True)]

    def _make_data(self, query: ClippedQuery) -> AgentData:
        """Return the victim's samples: their gradients are their inputs, and the canary is first.

        Other samples have no gradient.
        """
        count = _AGENT_SAMPLES if query.unit == "agent" else count_samples(query)
        inputs = torch.zeros(count, _DIMENSIONS)
        # An agent's whole data set may be the canary.
        own = inputs if query.unit == "agent" else inputs[:1]
        own[:] = torch.from_numpy(self.run.direction * query.clip * RAW_LENGTH)
        return AgentData(inputs, torch.zeros(count), (0, count))


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


def _signs(num_releases: int) -> FloatArray:
    # Alternating: a canary with one sign would cancel in the differences that reused noise leaves.
    return np.where(np.arange(num_releases) % 2 == 0, 1.0, -1.0)


def mean_output(outputs: Tensor, _: Tensor) -> Tensor:
    """Return a loss whose gradient, for a linear model, is a sample's input."""
    return outputs.mean()
