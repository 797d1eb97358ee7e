"""Observations of releases with and without a canary, on the path of data through a run.

The victim's gradient is a canary along a known direction u. Everything else is the worst case: the
attacker knows all other data, so only noise and canary remain of what it observes. Each trial is
reduced to the projections on u of what all agents released, which lose nothing about the canary.

- :class:`ShareObservation` adds the canary to the agents' noise.
- :class:`StepObservation` puts a sample with a far too long gradient into the victim's data, and
  runs sampling, clipping, the noisy sum, rounding and the half step of the library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from corn.audit.program import DEPLOYED, Program, RunRecord, list_releases, no_gradients
from corn.checks import FloatArray
from corn.learn.batches import AgentData, round_rate_down
from corn.learn.step import ClippedGradients, join_gradients
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


@dataclass(frozen=True, eq=False)
class Signal:
    """The canary's part of the victim's releases, under both data sets.

    Attributes:
        null: shape (releases, trials): without the canary, or with its negation.
        alternative: shape (releases, trials): with it.
        weights: shape (releases,): the change of each release that the plan accounts for, with its
            sign.
        participation: shape (releases, trials): the releases that the canary takes part in, as far
            as the attacker knows them; None if its part in each is secret.
        is_replace: whether the other data set has the canary's negation, instead of nothing.
    """

    null: FloatArray
    alternative: FloatArray
    weights: FloatArray
    participation: NDArray[np.bool_] | None
    is_replace: bool


class Observation(Protocol):
    """Material for a test of one plan.

    Attributes:
        problems: faults that need no test, such as a release off the grid.
        record: keys, noise and messages of the releases observed.
        released: all agents' releases without any gradient, shape (releases, n, trials).
        is_rounded: whether releases are on the grid.
    """

    problems: list[str]
    record: RunRecord
    released: FloatArray
    is_rounded: bool

    def add_canary(self, victim: int) -> Signal:
        """Return the change of the victim's releases by the canary."""


def add_share_canary(plan: Plan, victim: int, shape: tuple[int, int]) -> Signal:
    """Return a canary that is added to noise: T steps, represented by a few releases.

    Each of k releases carries √(T/k) times the canary of one step. Where the noise of releases is
    independent, which the audit checks, this is as informative as T releases with the canary.
    ``shape`` is (releases, trials).
    """
    query = query_of(plan, victim)
    # A sample under Poisson sampling is audited given that it takes part in one step.
    steps = 1 if query.is_subsampled else query.participations(plan.budget.num_steps)
    weights = query.sensitivity * math.sqrt(steps / shape[0]) * _signs(shape[0])
    is_replace = query.adjacency == "replace"
    # Under replace the two data sets are ±½ of the sensitivity, otherwise 0 and all of it.
    middle = 0.5 if is_replace else 0.0
    low, high = (np.outer(weights, np.full(shape[1], part - middle)) for part in (0.0, 1.0))
    return Signal(low, high, weights, np.ones(shape, dtype=bool), is_replace)


@final
class ShareObservation:
    """A canary added to the noise that agents draw."""

    def __init__(
        self,
        plan: Plan,
        *,
        num_trials: int,
        num_releases: int,
        seed: int,
        program: Program = DEPLOYED,
    ) -> None:
        self._plan = plan
        releases = list_releases(num_releases)
        self.record = RunRecord(plan, releases, num_trials, seed=seed, program=program)
        self.problems = self.record.check_keys()
        self.is_rounded = self.record.is_masked
        self.released = self.record.read_releases() if self.is_rounded else self.record.noise

    def add_canary(self, victim: int) -> Signal:
        """See ``Observation``."""
        return add_share_canary(self._plan, victim, (len(self.released), self.released.shape[-1]))


@final
class StepObservation:
    """A canary in the victim's data, through the whole step of Algorithm 1 up to the message.

    Models are zero and the step size is a power of two, so that the release can be read off a
    message exactly.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        num_trials: int,
        num_releases: int,
        seed: int,
        program: Program = DEPLOYED,
    ) -> None:
        self._plan = plan
        self._program = program
        self._seed = seed
        self._trials = num_trials
        self.is_rounded = True
        # A random direction, so that clipping and rounding of all coordinates take part.
        direction = np.random.default_rng(seed).standard_normal(_DIMENSIONS)
        self._direction = direction / np.linalg.norm(direction)
        self.record = RunRecord(
            plan,
            list_releases(num_releases),
            num_trials,
            seed=seed,
            program=program,
            direction=self._direction,
        )
        self.problems = self.record.check_keys()
        self._canaries = cache(self._compute_canaries)
        if self.record.is_masked:
            released = self.record.read_releases()
        else:
            # All trials at once, as one long release.
            zeros, agents = no_gradients(self.record.size), range(plan.num_agents)
            numbers = range(num_releases)
            found = [[self._release(zeros, r, agent)[0] for agent in agents] for r in numbers]
            released = np.array(found)
        self.released = self.record.project(released)

    def add_canary(self, victim: int) -> Signal:
        """See ``Observation``."""
        query = query_of(self._plan, victim)
        lows, highs, taken = self._canaries(query)
        null, alternative = (
            np.stack([self._release(g, r, victim) @ self._direction for r, g in enumerate(own)])
            # With the same noise, so that the difference is the canary's part after rounding.
            - self.released[:, victim]
            for own in (lows, highs)
        )
        self._check_sum(highs[0], victim)
        weights = query.sensitivity * _signs(len(self.released))
        # Coins are secret. The guarantee of passes holds even if the attacker knows the orders.
        participation = None if query.is_subsampled else taken
        return Signal(null, alternative, weights, participation, query.adjacency == "replace")

    def _compute_canaries(
        self, query: ClippedQuery
    ) -> tuple[list[ClippedGradients], list[ClippedGradients], NDArray[np.bool_]]:
        """Sample, differentiate and clip for all trials; they do not depend on the victim.

        Returns:
            The gradients of each release without and with the canary, and when it takes part,
            shape (releases, trials).
        """
        starts = range(0, self._trials, _TRIALS_AT_ONCE)
        chunks = [range(first, min(first + _TRIALS_AT_ONCE, self._trials)) for first in starts]
        by_chunk = [list(self._compute_some(query, trials)) for trials in chunks]
        by_release = [zip(*parts, strict=True) for parts in zip(*by_chunk, strict=True)]
        lows, highs, taken = zip(*by_release, strict=True)
        return (
            [join_gradients(parts) for parts in lows],
            [join_gradients(parts) for parts in highs],
            np.stack([np.concatenate(parts) for parts in taken]),
        )

    def _compute_some(
        self, query: ClippedQuery, trials: range
    ) -> Iterator[tuple[ClippedGradients, ClippedGradients, NDArray[np.bool_]]]:
        """Yield the gradients of some trials without and with the canary, for each release."""
        # The sampler has one run per trial, so that each trial has coins of its own.
        choices = [self._program.make_choices(self._seed, trial) for trial in trials]
        sampler = self._program.make_sampler(query, self._make_data(query), choices)
        # A linear model whose loss is its output: a sample's gradient is its input.
        task = ModuleTask(nn.Linear(_DIMENSIONS, 1, bias=False), mean_output)
        models = torch.zeros(len(trials), 1, _DIMENSIONS)
        # float64, as agents clip: in float32 the norm could exceed C by some ulps.
        clip = torch.tensor([query.clip], dtype=torch.float64)
        for number, sign in enumerate(_signs(len(self.released)).tolist()):
            batch = sampler.draw(number)
            # Only samples of the canary are not zero, and padding has weight 0.
            taken = (batch.inputs != 0).any(dim=-1) & (batch.weights > 0)
            # Samples without the canary have no gradient, so that another sign is another canary.
            low, high = (
                self._program.compute_gradients(
                    task,
                    models,
                    replace(batch, inputs=batch.inputs * factor),
                    clip,
                    clips_samples=query.unit == "sample",
                )
                for factor in (-sign if query.adjacency == "replace" else 0.0, sign)
            )
            yield low, high, taken.any(dim=1).numpy()

    def _make_data(self, query: ClippedQuery) -> AgentData:
        """Return the victim's samples: their gradients are their inputs, and the canary is first.

        Other samples have no gradient.
        """
        count = _AGENT_SAMPLES if query.unit == "agent" else count_samples(query)
        inputs = torch.zeros(count, _DIMENSIONS)
        # An agent's whole data set may be the canary.
        own = inputs if query.unit == "agent" else inputs[:1]
        own[:] = torch.from_numpy(self._direction * query.clip * RAW_LENGTH)
        return AgentData(inputs, torch.zeros(count), (0, count))

    def _release(
        self,
        gradients: ClippedGradients,
        number: int,
        agent: int,
        noise: FloatArray | None = None,
    ) -> FloatArray:
        """Return releases of an agent, and note whether they are off the grid."""
        released = self.record.release(gradients, number, agent, noise)
        # The grid is a power of two, so that the division is exact. Under masks there are only
        # integers.
        units = released / self._plan.grid
        if not self.record.is_masked and not np.array_equal(units, np.rint(units)):
            self.problems.append(f"releases are not multiples of the grid {self._plan.grid:g}")
        return released

    def _check_sum(self, gradients: ClippedGradients, agent: int) -> None:
        """Note whether a release depends on the gradient other than by its sum with the noise.

        Rounding the gradient by itself would: the sum is then no post-processing of noisy data.
        """
        noise = self.record.noise[0, agent].reshape(-1, _DIMENSIONS)
        factors = gradients.factors.flatten().unsqueeze(1)
        total = torch.mul(gradients.values.flatten(1), factors).add_(torch.from_numpy(noise))
        zeros = replace(gradients, values=torch.zeros_like(gradients.values))
        with_gradient = self._release(gradients, 0, agent)
        if not np.array_equal(with_gradient, self._release(zeros, 0, agent, total.numpy())):
            self.problems.append(
                "messages depend on a gradient other than by its sum with the noise"
            )


def query_of(plan: Plan, agent: int) -> ClippedQuery:
    """Return what an agent clips and releases under a plan."""
    return plan.budget.of_agent(agent).query


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
