"""A run of all agents whose keys the audit knows, the canary in it, and what each view reads.

The victim's gradient is a canary along a known direction u. Everything else is the worst case: the
attacker knows all other data, so only noise and canary remain of what it reads. Each trial is
reduced to the projections on u of what all agents released, which lose nothing about the canary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from corn.audit.views import Parts, StreamWeights, View, sum_parts
from corn.checks import FloatArray
from corn.learn.batches import (
    AgentData,
    Batch,
    BatchSampler,
    Choices,
    SeededChoices,
    round_rate_down,
)
from corn.learn.perturbation import NoiseShare
from corn.learn.step import AgentStepper, ClippedGradients, compute_gradients
from corn.learn.tasks import ModuleTask
from corn.noise import Identity, Owner, Roster, Secret, SecureSource, agent_keys, agree_on_nonce
from corn.noise.choices import SecretChoices
from corn.noise.masks import SIGNED, WORDS, MaskWords, draw_offset, list_masks
from corn.noise.stream import encode_fields, list_terms
from corn.plan import Plan, fingerprint
from corn.privacy import ClippedQuery

Keys: TypeAlias = Mapping[Owner, Secret]

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
# A power of two: the release can be read off a message exactly.
_STEP_SIZE = 0.25


def list_releases(num_releases: int) -> list[tuple[int, int]]:
    """Return attempt and step of the releases of a run that fails and is resumed one step earlier.

    The step that is repeated is released twice, with other noise if the program is right.

    >>> list_releases(4)
    [(0, 0), (0, 1), (1, 1), (1, 2)]
    """
    first = (num_releases + 1) // 2
    again = range(first - 1, num_releases - 1)
    return [(0, step) for step in range(first)] + [(1, step) for step in again]


def make_secret(seed: int, *purpose: str | int) -> Secret:
    """Return a key that follows from a seed and a purpose."""
    # Public, as it follows from the seed: an audit protects nobody, and must be repeatable.
    data = encode_fields("audit", seed, *purpose)
    return Secret(hashlib.blake2b(data, digest_size=32).digest())


def derive_keys(plan: Plan, seed: int) -> list[dict[Owner, Secret]]:
    """Return the keys of every agent, derived from identities as in a run."""
    n, groups = plan.num_agents, plan.decomposition.seed_groups
    identities = [Identity(make_secret(seed, "identity", agent)) for agent in range(n)]
    roster = Roster(tuple(own.public_key for own in identities))
    # Seeds of pairs follow from a key exchange, those of larger groups are handed out.
    seeds = {k: make_secret(seed, "group", k) for k, group in enumerate(groups) if len(group) > 2}
    return [
        agent_keys(
            identity,
            agent,
            seed_groups=groups,
            roster=roster,
            plan_fingerprint=fingerprint(plan),
            group_seeds={k: own for k, own in seeds.items() if agent in groups[k]},
        )
        for agent, identity in enumerate(identities)
    ]


def draw_nonce(plan: Plan, seed: int, attempt: int) -> bytes:
    """Return the nonce on which agents agree at the start of an attempt, each with a new part."""
    agents = range(plan.num_agents)
    parts = {agent: make_secret(seed, "nonce", attempt, agent).reveal() for agent in agents}
    return agree_on_nonce(parts, plan_fingerprint=fingerprint(plan))


def make_choices(seed: int, trial: int) -> Choices:
    """Return the source of the coins and orders of one trial, as of one run of an agent."""
    return SecretChoices(make_secret(seed, "coins", trial), make_secret(seed, "orders", trial))


class Signal(NamedTuple):
    """The canary's part of the victim's releases, under both data sets."""

    null: FloatArray  # shape (releases, trials): without the canary, or with its negation
    alternative: FloatArray  # of this shape: with it
    shift: float  # the change of a release that the plan accounts for
    # The probability that the canary takes part in each release, as far as the attacker knows: 0 or
    # 1 but for secret coins. Shape (releases, trials), or that of one number.
    participation: FloatArray
    is_replace: bool  # whether the other data set has the canary's negation, instead of nothing
    rate: float | None = None  # at which coins take the canary into a release; None without coins


def alternate(num_releases: int) -> FloatArray:
    """Return the sign of the canary in each release.

    A canary with one sign would cancel in the differences that reused noise leaves.
    """
    return np.where(np.arange(num_releases) % 2 == 0, 1.0, -1.0)


class AuditedRun:
    """Messages of all agents without gradients, the canary in them, and what each view reads.

    Every message is made as an agent makes it: with keys from identities, the nonce of an attempt,
    and the ``AgentStepper`` of all releases. It is computed a second time by another way.

    Coordinates of a release are independent trials, because streams are drawn for each coordinate.
    With a ``direction`` of the canary, shape (k,), each trial has k coordinates.
    """

    def __init__(
        self,
        plan: Plan,
        num_releases: int,
        num_trials: int,
        *,
        seed: int,
        direction: FloatArray | None = None,
    ) -> None:
        self.plan = plan
        self.num_trials = num_trials
        self.direction = np.ones(1) if direction is None else direction
        self.size = num_trials * len(self.direction)
        self.releases = list_releases(num_releases)
        self.keys: Sequence[Keys] = derive_keys(plan, seed)
        # One nonce per attempt, as every start of a run agrees on a new one.
        self.nonces = {attempt: draw_nonce(plan, seed, attempt) for attempt in (0, 1)}
        self.problems = list[str]()
        """Faults that need no test."""

    def add_canary(self, victim: int) -> Signal:
        """Return the change of the victim's releases: that of T steps, in a few releases.

        Each of k releases carries √(T/k) times the canary of one step. Where the noise of releases
        is independent, which the audit checks, this is as informative as T releases with the
        canary.
        """
        query, shape = query_of(self.plan, victim), (len(self.releases), self.size)
        # A sample under Poisson sampling is audited given that it takes part in one step.
        steps = 1 if query.is_subsampled else query.participations(self.plan.budget.num_steps)
        shift = query.sensitivity * math.sqrt(steps / shape[0])
        is_replace = query.adjacency == "replace"
        # Under replace the two data sets are ±½ of the sensitivity, otherwise 0 and all of it.
        middle = 0.5 if is_replace else 0.0
        weights = np.repeat(shift * alternate(shape[0])[:, None], shape[1], axis=1)
        low, high = -middle * weights, (1 - middle) * weights
        return Signal(low, high, shift, np.ones(shape), is_replace)

    @property
    def _is_sum(self) -> bool:
        return self.plan.network.mixing == "sum"

    # What agents send, by the code of a run.

    @cached_property
    def messages(self) -> NDArray[Any]:
        """All agents' messages, shape (releases, n, size); a recorded run assigns its own."""
        zeros = torch.zeros(self.size)
        return self._collect(lambda number, agent: self.send(zeros, number, agent))

    def send(
        self, gradient: Tensor, number: int, agent: int, keys: Keys | None = None
    ) -> NDArray[Any]:
        """Return an agent's message with the clipped gradients of all trials, shape (size,).

        It has words where releases are summed exactly. Under gossip it is what was released: models
        are zero, and the step size is a power of two, so that dividing by it is exact.
        """
        share = self.open_share(agent, keys or self.keys[agent], number, size=len(gradient))
        stepper = AgentStepper(query_of(self.plan, agent), lambda each: each)
        model = torch.zeros(len(gradient), dtype=getattr(torch, self.plan.dtype))
        stepper.begin(self.releases[number][1], share, model)
        one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1)
        stepper.hand_over(ClippedGradients(gradient.double().view(1, 1, -1), one, zero, zero, zero))
        if self._is_sum:
            return stepper.release_masked(observe=False)
        half = stepper.release_half_step(step_size=_STEP_SIZE, observe=False)
        return half.double().numpy() / -_STEP_SIZE

    def open_share(self, agent: int, keys: Keys, number: int, *, size: int) -> NoiseShare:
        """Return an agent's share of the noise in the attempt of a release, from some keys."""
        nonce = self.nonces[self.releases[number][0]]
        return NoiseShare(self.plan, agent, SecureSource(keys), nonce=nonce, num_parameters=size)

    def recompute(self, gradient: Tensor, number: int, agent: int) -> NDArray[Any]:
        """Return the message that the plan asks for, from the keys of all agents.

        It depends on the gradient by the sum with the noise alone: γ·rint((f g + v)/γ), or
        rint((f g + v)/γ + o) under masks.
        """
        keys, plan = self.held_by(range(self.plan.num_agents)), self.plan
        noisy = gradient.double().numpy() + self._draw_noise(number, agent, keys)
        units = np.rint(noisy / plan.grid + self.offsets[number])
        if self._is_sum:
            # Through a signed type: a negative float has no unsigned integer.
            words = units.astype(np.int64).astype(WORDS[plan.mask_bits])
            return np.asarray(words + self._draw_mask(number, agent, keys))
        return np.asarray((plan.grid * units).astype(plan.dtype), np.float64)

    # What is read of messages.

    def held_by(self, coalition: Sequence[int]) -> dict[Owner, Secret]:
        """Return all keys that the insiders really have, whatever the plan says."""
        return {owner: key for agent in coalition for owner, key in self.keys[agent].items()}

    def project(self, values: FloatArray) -> FloatArray:
        """Return the part of each trial along the canary: the last axis has all trials' values."""
        shape = (*values.shape[:-1], -1, len(self.direction))
        return np.asarray(values.reshape(shape) @ self.direction)

    @cached_property
    def offsets(self) -> FloatArray:
        """The public offsets of the grid, shape (releases, size); zeros without masks."""
        if not self.plan.decomposition.is_masked:
            return np.zeros((len(self.releases), self.size))
        places = ((self.nonces[attempt], step) for attempt, step in self.releases)
        return np.stack([draw_offset(nonce, step, self.size) for nonce, step in places])

    @cached_property
    def released(self) -> FloatArray:
        """All agents' releases along the canary, shape (releases, n, trials)."""
        return self.project(self._collect(lambda *at: self.read_release(self.messages[at], *at)))

    def read_release(self, message: NDArray[Any], number: int, agent: int) -> FloatArray:
        """Return the release in an agent's message, by its own masks, shape (size,)."""
        if not self._is_sum:
            return message
        words = message - self._draw_mask(number, agent, self.keys[agent])
        return self._read_words(words, 1, self.offsets[number])

    def find_parts(self, view: View) -> Parts:
        """Return the agents of whose releases a view reads the sum, by the keys it really has."""
        streams = StreamWeights.of(self.plan.decomposition)
        return streams.join(view.honest(self.plan.num_agents), self.held_by(view.coalition))

    def unmask(self, view: View) -> NDArray[Any]:
        """Return all messages without the masks that a view draws, of their shape."""
        if not self.plan.decomposition.is_masked:
            return self.messages
        keys = self.held_by(view.coalition)
        masks = self._collect(lambda r, agent: self._draw_mask(r, agent, keys))
        return np.asarray(self.messages - masks)

    def read_sums(self, view: View) -> FloatArray:
        """Return the sums of releases that a view reads, shape (releases, parts, size)."""
        parts = self.find_parts(view)
        totals = sum_parts(self.unmask(view), parts, axis=1)
        if not self._is_sum:
            return totals
        sizes = np.array([[len(part)] for part in parts])
        return self._read_words(totals, sizes, self.offsets[:, None])

    def draw_known(self, view: View) -> FloatArray:
        """Return the part of all noise that a view draws with its keys, shape (releases, n, size).

        By the keys that insiders really hold: a key too many then shows as less hidden noise.
        """
        keys = self.held_by(view.coalition)
        return self._collect(lambda r, agent: self._draw_noise(r, agent, keys))

    def _collect(self, make: Callable[[int, int], NDArray[Any]]) -> NDArray[Any]:
        """Return what is made of each release and agent, shape (releases, n, size)."""
        agents = range(self.plan.num_agents)
        return np.array([[make(r, agent) for agent in agents] for r in range(len(self.releases))])

    def _read_words(self, total: MaskWords, num_agents: Any, offset: FloatArray) -> FloatArray:
        """Return the sum of some agents' releases from that of their unmasked messages."""
        signed = total.view(SIGNED[self.plan.mask_bits])
        return np.asarray((signed - num_agents * offset) * self.plan.grid)

    def _draw_noise(self, number: int, agent: int, keys: Keys) -> FloatArray:
        """Return that part of an agent's noise that keys are known of, shape (size,)."""
        attempt, step = self.releases[number]
        terms = list_terms(self.plan.decomposition, agent, nonce=self.nonces[attempt], step=step)
        known = np.empty(self.size)
        SecureSource(keys).fill_sum(known, [term for term in terms if term[1].owner in keys])
        return known

    def _draw_mask(self, number: int, agent: int, keys: Keys) -> MaskWords:
        """Return the sum of those masks of an agent that keys are known of, shape (size,)."""
        attempt, step = self.releases[number]
        mask: MaskWords = np.zeros(self.size, WORDS[self.plan.mask_bits])
        nonce = self.nonces[attempt]
        added, subtracted = list_masks(self.plan.decomposition, agent, nonce=nonce, step=step)
        source = SecureSource(keys)
        for address in (*added, *subtracted):
            if address.owner in keys:
                stream = source.start(address, mask.nbytes, kind="mask")
                words = np.frombuffer(stream.update(bytes(mask.nbytes)), mask.dtype)
                mask = mask + words if address in added else mask - words
        return mask


class StepRun(AuditedRun):
    """A run in which a sample of the victim has a far too long gradient.

    It is sampled, clipped and released by the code of agents.
    """

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
        """Return the clipped gradients of all releases without and with the canary.

        They have shape (releases, size); and whether it takes part, shape (releases, trials).
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


def query_of(plan: Plan, agent: int) -> ClippedQuery:
    """Return what an agent clips and releases under a plan."""
    return plan.budget.of_agent(agent).query
