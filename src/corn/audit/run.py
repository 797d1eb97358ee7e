"""A run of all agents whose keys the audit knows, and what each view reads of it.

:class:`AuditedRun` makes every message as an agent does: with keys from identities, the nonce of an
attempt, and the ``AgentStepper`` of all releases. It reads messages as a view does, which has some
of the keys, and computes them a second time by another way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corn.audit.views import Parts, StreamWeights, View, sum_parts
from corn.checks import FloatArray
from corn.learn.batches import Choices
from corn.learn.perturbation import NoiseShare
from corn.learn.step import AgentStepper, ClippedGradients
from corn.noise import Identity, Owner, Roster, Secret, SecureSource, agent_keys, agree_on_nonce
from corn.noise.choices import SecretChoices
from corn.noise.masks import SIGNED, WORDS, MaskWords, draw_offset, list_masks
from corn.noise.stream import encode_fields, list_terms
from corn.plan import Plan, fingerprint
from corn.privacy import ClippedQuery

Keys: TypeAlias = Mapping[Owner, Secret]
ReleaseNumber: TypeAlias = tuple[int, int]
"""The place of a release: which attempt of the run made it, and for which step."""

STEP_SIZE = 0.25
"""A power of two: the release can be read off a message exactly."""


def list_releases(num_releases: int) -> list[ReleaseNumber]:
    """Return the releases of a run that fails in its middle and is resumed one step earlier.

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


@dataclass(eq=False)
class AuditedRun:
    """Messages of all agents in some releases, with all keys, and what each view reads of them.

    Attributes:
        plan: that agents run.
        releases: the place of each release.
        num_trials: independent trials, for which coordinates of one release stand: streams are
            drawn independently for each coordinate.
        keys: those of each agent.
        nonces: of each attempt.
        direction: of the canary in the coordinates of a trial, shape (k,).
    """

    plan: Plan
    releases: Sequence[ReleaseNumber]
    num_trials: int
    keys: Sequence[Keys]
    nonces: Mapping[int, bytes]
    direction: FloatArray = field(default_factory=lambda: np.ones(1))

    @classmethod
    def of_seed(
        cls, plan: Plan, num_releases: int, num_trials: int, *, seed: int, **given: Any
    ) -> AuditedRun:
        """Return a run that is interrupted and resumed, with keys and nonces from a seed."""
        # One nonce per attempt, as every start of a run agrees on a new one.
        nonces = {attempt: draw_nonce(plan, seed, attempt) for attempt in (0, 1)}
        releases = list_releases(num_releases)
        return cls(plan, releases, num_trials, derive_keys(plan, seed), nonces, **given)

    @property
    def size(self) -> int:
        """The coordinates of a release."""
        return self.num_trials * len(self.direction)

    @property
    def _is_sum(self) -> bool:
        return self.plan.network.mixing == "sum"

    # What agents send, by the code of a run.

    @cached_property
    def messages(self) -> NDArray[Any]:
        """All agents' messages, shape (releases, n, size); a recorded run assigns its own."""
        zeros = torch.zeros(self.size)
        return self._collect(lambda number, agent: self.send(zeros, number, agent))

    @cached_property
    def gradients(self) -> FloatArray:
        """The gradients in ``messages``, which attackers know; assigned by a recorded run."""
        return np.zeros(self.messages.shape)

    def send(
        self, gradient: Tensor, number: int, agent: int, keys: Keys | None = None
    ) -> NDArray[Any]:
        """Return an agent's message with the clipped gradients of all trials, shape (size,).

        All trials are one long gradient, because noise is independent in each coordinate. The
        message has words where releases are summed exactly. Under gossip it is what was released:
        models are zero, and the step size is a power of two, so that dividing by it is exact.
        """
        share = self.open_share(agent, keys or self.keys[agent], number, size=len(gradient))
        stepper = AgentStepper(query_of(self.plan, agent), lambda each: each)
        model = torch.zeros(len(gradient), dtype=getattr(torch, self.plan.dtype))
        stepper.begin(self.releases[number][1], share, model)
        one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1)
        stepper.hand_over(ClippedGradients(gradient.double().view(1, 1, -1), one, zero, zero, zero))
        if self._is_sum:
            return stepper.release_masked(observe=False)
        half = stepper.release_half_step(step_size=STEP_SIZE, observe=False)
        released: FloatArray = half.double().numpy() / -STEP_SIZE
        return released

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
        projected: FloatArray = values.reshape(shape) @ self.direction
        return projected

    @cached_property
    def offsets(self) -> FloatArray:
        """The public offsets of the grid, shape (releases, size); zeros without masks."""
        if not self.plan.decomposition.is_masked:
            return np.zeros((len(self.releases), self.size))
        places = ((self.nonces[attempt], step) for attempt, step in self.releases)
        return np.stack([draw_offset(nonce, step, self.size) for nonce, step in places])

    @cached_property
    def released(self) -> FloatArray:
        """All agents' releases without gradients, along the canary, shape (releases, n, trials)."""
        found = self._collect(lambda *at: self.read_release(self.messages[at], *at))
        return self.project(found - self.gradients)

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
        """Return the sums of releases that a view reads, shape (releases, parts, size).

        The view removes the masks that it can draw, adds up the messages of each part, and
        subtracts the gradients that it knows.
        """
        parts = self.find_parts(view)
        totals = sum_parts(self.unmask(view), parts, axis=1)
        if self._is_sum:
            sizes = np.array([[len(part)] for part in parts])
            totals = self._read_words(totals, sizes, self.offsets[:, None])
        return np.asarray(totals - sum_parts(self.gradients, parts, axis=1))

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
        added, subtracted = list_masks(
            self.plan.decomposition, agent, nonce=self.nonces[attempt], step=step
        )
        source = SecureSource(keys)
        for address in (*added, *subtracted):
            if address.owner in keys:
                stream = source.start(address, mask.nbytes, kind="mask")
                words = np.frombuffer(stream.update(bytes(mask.nbytes)), mask.dtype)
                mask = mask + words if address in added else mask - words
        return mask


def query_of(plan: Plan, agent: int) -> ClippedQuery:
    """Return what an agent clips and releases under a plan."""
    return plan.budget.of_agent(agent).query
