"""Observations of releases with and without a canary, on the path of data through a run.

The victim's gradient is a canary along a known direction u. Everything else is the worst case: the
attacker knows all other data, so only noise and canary remain of what it observes. Each trial is
reduced to the projections on u of what all agents released, which lose nothing about the canary.

- :class:`ShareObservation` adds the canary to the agents' noise.
- :class:`StepObservation` puts a sample with a far too long gradient into the victim's data, and
  runs sampling, clipping, the noisy sum, rounding and the half step of the library.

Where releases are summed exactly, :class:`MaskedMessages` has the integers that travel, and reads
them as a view does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from corn.audit.program import (
    DEPLOYED,
    STEP_SIZE,
    NoiseRecord,
    Program,
    list_releases,
)
from corn.audit.views import Parts, StreamWeights, View, sum_parts
from corn.checks import FloatArray
from corn.learn.batches import AgentData, BatchSampler, SeededChoices, round_rate_down
from corn.learn.step import ClippedGradients, join_gradients
from corn.learn.tasks import ModuleTask
from corn.noise.masks import MaskWords
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
        record: keys and noise of the releases observed.
        messages: the messages of all agents where masks hide releases, and None where nothing does.
        released: all agents' releases without any gradient, shape (releases, n, trials).
        is_rounded: whether releases are on the grid.
    """

    problems: list[str]
    record: NoiseRecord
    messages: MaskedMessages | None
    released: FloatArray
    is_rounded: bool

    def project(self, values: FloatArray) -> FloatArray:
        """Return one number for each trial from the values of releases, along the last axis."""

    def add_canary(self, victim: int) -> Signal:
        """Return the change of the victim's releases by the canary."""


@final
class MaskedMessages:
    """The messages of all agents as they travel, and what views read of them.

    Args:
        plan: the plan.
        record: keys, noise and masks of the releases.
        program: the functions under audit.
        words: messages that were recorded; by default the program makes them, without gradients.
        gradients: the gradients in them, which the attacker knows, shape as ``words``; by default
            there are none.
    """

    def __init__(
        self,
        plan: Plan,
        record: NoiseRecord,
        program: Program,
        words: MaskWords | None = None,
        gradients: FloatArray | None = None,
    ) -> None:
        self._plan = plan
        self._record = record
        self._program = program
        self._recorded = words
        self.gradients = gradients

    @cached_property
    def words(self) -> MaskWords:
        """Messages, shape (releases, n, size)."""
        if self._recorded is not None:
            return self._recorded
        zeros, agents = no_gradients(self._record.size), range(self._plan.num_agents)
        return np.array(
            [
                [self.make(zeros, number, agent)[0] for agent in agents]
                for number in range(len(self._record.releases))
            ]
        )

    @property
    def bits(self) -> int:
        """B, of a word of a message."""
        return 8 * self.words.dtype.itemsize

    @property
    def offsets(self) -> FloatArray:
        """The public offsets of the grid, shape (releases, size)."""
        return self._record.offsets

    def make(
        self,
        gradients: ClippedGradients,
        number: int,
        agent: int,
        noise: FloatArray | None = None,
        *,
        is_masked: bool = True,
    ) -> MaskWords:
        """Return an agent's messages of a release by the code that agents run, shape (trials, d).

        Args:
            gradients: of all trials.
            number: of the release.
            agent: the agent.
            noise: by default that of the record.
            is_masked: whether masks are added; without, releases can be read.
        """
        record, shape = self._record, (len(gradients.values), -1)
        drawn = record.noise[number, agent] if noise is None else noise
        mask = record.masks[number, agent].reshape(shape)
        return self._program.make_masked_messages(
            gradients,
            torch.from_numpy(np.ascontiguousarray(drawn.reshape(shape))),
            mask if is_masked else np.zeros_like(mask),
            grid=self._plan.grid,
            offset=record.offsets[number].reshape(shape),
        )

    def read_release(self, words: MaskWords, number: int, agent: int) -> FloatArray:
        """Return the releases in an agent's messages, whose masks nobody else knows."""
        mask, offset = self._record.masks[number, agent], self._record.offsets[number]
        return self._program.read_average(
            words - mask.reshape(words.shape),
            num_agents=1,
            grid=self._plan.grid,
            offset=offset.reshape(words.shape),
        )

    @property
    def released(self) -> FloatArray:
        """The releases of all agents without gradients, shape (releases, n, size)."""
        found = [
            [self.read_release(own, number, agent) for agent, own in enumerate(words)]
            for number, words in enumerate(self.words)
        ]
        return np.array(found) - (0.0 if self.gradients is None else self.gradients)

    def unmask(self, view: View) -> tuple[Parts, MaskWords]:
        """Return the parts whose sums a view can read, and messages without the masks it draws."""
        held = self._record.held_by(view.coalition)
        streams = StreamWeights.of(self._plan.decomposition)
        parts = streams.join(view.honest(self._plan.num_agents), held)
        return parts, self.words - self._record.draw_known_masks(view.coalition)

    def read(self, view: View, parts: Parts) -> FloatArray:
        """Return the sums of releases that a view reads, shape (releases, parts, size).

        The view removes the masks that it can draw, adds up the messages of each part, and
        subtracts the gradients that it knows.
        """
        totals = sum_parts(self.unmask(view)[1], parts, axis=1)
        averages = [
            self._program.read_average(
                totals[:, k], num_agents=len(part), grid=self._plan.grid, offset=self.offsets
            )
            for k, part in enumerate(parts)
        ]
        sums = [len(part) * average for part, average in zip(parts, averages, strict=True)]
        read = np.stack(sums, axis=1)
        return read if self.gradients is None else read - sum_parts(self.gradients, parts, axis=1)


@dataclass(frozen=True, eq=False)
class _Canaries:
    """Clipped gradients of all trials, for each release; they do not depend on the victim.

    ``participation`` is that of ``Signal``.
    """

    null: list[ClippedGradients]
    alternative: list[ClippedGradients]
    participation: NDArray[np.bool_] | None


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
        self.record = NoiseRecord(plan, releases, num_trials, seed=seed, program=program)
        self.problems = self.record.check_keys()
        self.messages = _mask(plan, self.record, program)
        self.released = self.record.noise if self.messages is None else self.messages.released
        self.is_rounded = self.messages is not None

    def project(self, values: FloatArray) -> FloatArray:
        """Return values as they are: each coordinate is a trial."""
        return values

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
        releases = list_releases(num_releases)
        # Trial k has the coordinates 3k, 3k + 1 and 3k + 2 of one long release.
        size = num_trials * _DIMENSIONS
        self.record = NoiseRecord(plan, releases, size, seed=seed, program=program)
        self.problems = self.record.check_keys()
        # A linear model whose loss is its output: a sample's gradient is its input.
        self._task = ModuleTask(nn.Linear(_DIMENSIONS, 1, bias=False), mean_output)
        self._canaries: dict[ClippedQuery, _Canaries] = {}
        self._samplers: dict[tuple[ClippedQuery, range], BatchSampler] = {}
        self.messages = _mask(plan, self.record, program)
        self.released: FloatArray = (
            np.stack([self._release_zeros(number) for number in range(num_releases)])
            if self.messages is None
            else self.project(self.messages.released)
        )

    def project(self, values: FloatArray) -> FloatArray:
        """Return the part of each trial along the canary: the last axis has all trials' values."""
        projected: FloatArray = (
            values.reshape(*values.shape[:-1], -1, _DIMENSIONS) @ self._direction
        )
        return projected

    def add_canary(self, victim: int) -> Signal:
        """See ``Observation``."""
        query = query_of(self._plan, victim)
        if query not in self._canaries:
            self._canaries[query] = self._compute(query)
        canaries = self._canaries[query]
        null, alternative = (
            np.stack([self._release(g, victim, r) @ self._direction for r, g in enumerate(own)])
            # With the same noise, so that the difference is the canary's part after rounding.
            - self.released[:, victim]
            for own in (canaries.null, canaries.alternative)
        )
        self._check_sum(canaries.alternative[0], victim)
        weights = query.sensitivity * _signs(len(self.released))
        is_replace = query.adjacency == "replace"
        return Signal(null, alternative, weights, canaries.participation, is_replace)

    def _compute(self, query: ClippedQuery) -> _Canaries:
        """Sample, differentiate and clip for all trials and releases."""
        null, alternative, taken = [], [], []
        for number, sign in enumerate(_signs(len(self.released)).tolist()):
            parts = [self._compute_some(query, number, sign, trials) for trials in self._chunks()]
            lows, highs, present = zip(*parts, strict=True)
            null.append(join_gradients(lows))
            alternative.append(join_gradients(highs))
            taken.append(np.concatenate(present))
        return _Canaries(null, alternative, self._find_known(query, np.stack(taken)))

    def _compute_some(
        self, query: ClippedQuery, number: int, sign: float, trials: range
    ) -> tuple[ClippedGradients, ClippedGradients, NDArray[np.bool_]]:
        if (query, trials) not in self._samplers:
            choices = [self._program.make_choices(self._seed, trial) for trial in trials]
            data = self._make_data(query)
            self._samplers[query, trials] = self._program.make_sampler(query, data, choices)
        # The sampler has one run per trial, so that each trial has coins of its own.
        batch = self._samplers[query, trials].draw(number)
        # Only samples of the canary are not zero, and padding has weight 0.
        taken = (batch.inputs != 0).any(dim=-1) & (batch.weights > 0)
        models = torch.zeros(len(trials), 1, _DIMENSIONS)
        # float64, as agents clip: in float32 the norm could exceed C by some ulps.
        clip = torch.tensor([query.clip], dtype=torch.float64)
        # Samples without the canary have no gradient, so that another sign is another canary.
        low, high = (
            self._program.compute_gradients(
                self._task,
                models,
                replace(batch, inputs=batch.inputs * factor),
                clip,
                clips_samples=query.unit == "sample",
            )
            for factor in (-sign if query.adjacency == "replace" else 0.0, sign)
        )
        return low, high, taken.any(dim=1).numpy()

    def _chunks(self) -> list[range]:
        starts = range(0, self._trials, _TRIALS_AT_ONCE)
        return [range(first, min(first + _TRIALS_AT_ONCE, self._trials)) for first in starts]

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

    def _find_known(
        self, query: ClippedQuery, actual: NDArray[np.bool_]
    ) -> NDArray[np.bool_] | None:
        """Return when the canary takes part, where the attacker may know it."""
        # The guarantee of passes holds even for an attacker who knows the orders.
        if not query.is_subsampled:
            return actual
        # Coins that a public seed predicts would void the amplification by sampling.
        for guess in (
            [SeededChoices(0)] * self._trials,
            [SeededChoices(self._seed)] * self._trials,
            [SeededChoices(trial) for trial in range(self._trials)],
        ):
            # The first coins are compared first: they decide in all but a few cases.
            if bool((_toss_first(query, guess, 1) == actual[:1]).all()) and bool(
                (_toss_first(query, guess, len(self.released)) == actual).all()
            ):
                self.problems.append(
                    "the coins of Poisson sampling are predictable: they follow from a public seed"
                )
                return actual
        return None

    def _release_zeros(self, number: int) -> FloatArray:
        """Return the releases of all agents without gradients, shape (n, trials)."""
        noises = self.record.noise[number]
        # All trials at once, as one long release.
        zeros = no_gradients(noises.shape[-1])
        released = [self._send(zeros, noise[np.newaxis])[0] for noise in noises]
        return np.stack([self.project(own) for own in released])

    def _release(
        self,
        gradients: ClippedGradients,
        agent: int,
        number: int,
        noise: FloatArray | None = None,
    ) -> FloatArray:
        """Return releases of an agent, read off its messages, shape (trials, d)."""
        if self.messages is None:
            drawn = self.record.noise[number, agent] if noise is None else noise
            return self._send(gradients, drawn.reshape(-1, _DIMENSIONS))
        words = self.messages.make(gradients, number, agent, noise)
        return self.messages.read_release(words, number, agent)

    def _check_sum(self, gradients: ClippedGradients, agent: int) -> None:
        """Note whether a release depends on the gradient other than by its sum with the noise.

        Rounding the gradient by itself would: the sum is then no post-processing of noisy data.
        """
        noise = self.record.noise[0, agent].reshape(-1, _DIMENSIONS)
        factors = gradients.factors.flatten().unsqueeze(1)
        total = torch.mul(gradients.values.flatten(1), factors).add_(torch.from_numpy(noise))
        zeros = replace(gradients, values=torch.zeros_like(gradients.values))
        with_gradient = self._release(gradients, agent, 0)
        fault = "messages depend on a gradient other than by its sum with the noise"
        if fault not in self.problems and not np.array_equal(
            with_gradient, self._release(zeros, agent, 0, total.numpy())
        ):
            self.problems.append(fault)

    def _send(self, gradients: ClippedGradients, noise: FloatArray) -> FloatArray:
        dtype = torch.float32 if self._plan.dtype == "float32" else torch.float64
        model = torch.zeros(noise.shape[1], dtype=dtype)
        drawn = torch.from_numpy(np.ascontiguousarray(noise))
        sent = self._program.make_messages(model, gradients, drawn, grid=self._plan.grid)
        released: FloatArray = np.asarray(sent.double().numpy() / -STEP_SIZE, dtype=np.float64)
        # The grid and the step size are powers of two, so that both divisions are exact.
        units = released / self._plan.grid
        fault = f"releases are not multiples of the grid {self._plan.grid:g}"
        if fault not in self.problems and not bool((units == np.rint(units)).all()):
            self.problems.append(fault)
        return released


def _mask(plan: Plan, record: NoiseRecord, program: Program) -> MaskedMessages | None:
    return MaskedMessages(plan, record, program) if plan.decomposition.is_masked else None


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


def _toss_first(
    query: ClippedQuery, choices: list[SeededChoices], num_releases: int
) -> NDArray[np.bool_]:
    sizes, rate = [count_samples(query)], rate_of(query)
    # Coin 0 is the canary's, which is the victim's first sample.
    tossed = [
        [each.draw_coins(number, sizes)[0] < rate for each in choices]
        for number in range(num_releases)
    ]
    return np.array(tossed)


def _signs(num_releases: int) -> FloatArray:
    # Alternating: a canary with one sign would cancel in the differences that reused noise leaves.
    return np.where(np.arange(num_releases) % 2 == 0, 1.0, -1.0)


def mean_output(outputs: Tensor, _: Tensor) -> Tensor:
    """Return a loss whose gradient, for a linear model, is a sample's input."""
    return outputs.mean()


def no_gradients(size: int) -> ClippedGradients:
    """Return the clipped gradients of one trial whose data has no gradient."""
    return ClippedGradients(
        values=torch.zeros(1, 1, size),
        factors=torch.ones(1, 1, dtype=torch.float64),
        norms=torch.zeros(1, 1),
        fraction_clipped=torch.zeros(1, 1),
        num_broken=torch.zeros(1, 1),
    )
