"""A run of all agents whose keys the audit knows, and what each view reads of it.

:class:`AuditedRun` makes every message as an agent does: with keys from identities, the nonce of an
attempt, and the ``AgentStepper`` of all releases. It reads messages as a view does, which has some
of the keys, and computes them a second time by another way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corn.audit.views import Parts, StreamWeights, View, sum_parts
from corn.checks import FloatArray
from corn.covariance import Decomposition
from corn.learn.batches import Choices
from corn.learn.perturbation import NoiseShare
from corn.learn.step import AgentStepper, ClippedGradients
from corn.noise import Identity, Owner, Roster, Secret, SecureSource, agent_keys, agree_on_nonce
from corn.noise.choices import SecretChoices
from corn.noise.masks import WORDS, MaskWords, draw_offset, list_masks, read_average
from corn.noise.shares import list_terms
from corn.noise.stream import encode_fields
from corn.plan import Plan, fingerprint
from corn.privacy import ClippedQuery

Keys: TypeAlias = Mapping[Owner, Secret]

STEP_SIZE = 0.25
"""A power of two: the release can be read off a message exactly."""


class ReleaseNumber(NamedTuple):
    """The place of a release: which attempt of the run made it, and for which step."""

    attempt: int
    step: int


def list_releases(num_releases: int) -> list[ReleaseNumber]:
    """Return the releases of a run that fails in its middle and is resumed one step earlier.

    The step that is repeated is released twice, with other noise if the program is right.

    >>> [tuple(each) for each in list_releases(4)]
    [(0, 0), (0, 1), (1, 1), (1, 2)]
    """
    first = (num_releases + 1) // 2
    again = range(first - 1, first - 1 + num_releases - first)
    return [ReleaseNumber(0, s) for s in range(first)] + [ReleaseNumber(1, s) for s in again]


def derive_keys(plan: Plan, seed: int) -> list[dict[Owner, Secret]]:
    """Return the keys of every agent, derived from identities as in a run; they follow from a seed.

    Seeds of groups of three and more are handed out by the group's lowest member.
    """
    n, groups = plan.num_agents, plan.decomposition.seed_groups
    identities = [Identity(make_secret(seed, "identity", agent)) for agent in range(n)]
    roster = Roster(tuple(own.public_key for own in identities))
    # Seeds of pairs follow from a key exchange, those of larger groups are random.
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
    parts = {
        agent: make_secret(seed, "nonce", attempt, agent).reveal()
        for agent in range(plan.num_agents)
    }
    return agree_on_nonce(parts, plan_fingerprint=fingerprint(plan))


def make_choices(seed: int, trial: int) -> Choices:
    """Return the source of the coins and orders of one trial, as of one run of an agent."""
    return SecretChoices(make_secret(seed, "coins", trial), make_secret(seed, "orders", trial))


@final
class AuditedRun:
    """Messages of all agents in some releases, with all keys, and what each view reads of them.

    Coordinates of one release stand for independent trials, as their streams are drawn
    independently for each coordinate: k of them for each trial, with a canary along ``direction``,
    shape (k,).

    Attributes:
        releases: the place of each release.
        size: the coordinates of a release.
        keys: those of each agent.
        is_masked: whether masks hide all but sums.
        gradients: the gradients in ``messages``, which attackers know, of their shape; None if
            there are none.
    """

    def __init__(
        self,
        plan: Plan,
        releases: Sequence[ReleaseNumber],
        num_trials: int,
        *,
        keys: Sequence[Keys],
        nonces: Mapping[int, bytes],
        direction: FloatArray | None = None,
    ) -> None:
        self._plan = plan
        self._nonces = nonces
        self._direction = np.ones(1) if direction is None else direction
        self._is_sum = plan.network.mixing == "sum"
        self.releases = tuple(releases)
        self.size = num_trials * len(self._direction)
        self.keys = keys
        self.is_masked = plan.decomposition.is_masked
        self.gradients: FloatArray | None = None

    @classmethod
    def of_seed(
        cls, plan: Plan, num_releases: int, num_trials: int, *, seed: int, **given: Any
    ) -> AuditedRun:
        """Return a run that is interrupted and resumed, with keys and nonces from a seed."""
        releases = list_releases(num_releases)
        # One nonce per attempt, as every start of a run agrees on a new one.
        nonces = {attempt: draw_nonce(plan, seed, attempt) for attempt in (0, 1)}
        keys = derive_keys(plan, seed)
        return cls(plan, releases, num_trials, keys=keys, nonces=nonces, **given)

    def project(self, values: FloatArray) -> FloatArray:
        """Return the part of each trial along the canary: the last axis has all trials' values."""
        shape = (*values.shape[:-1], -1, len(self._direction))
        projected: FloatArray = values.reshape(shape) @ self._direction
        return projected

    def held_by(self, coalition: Sequence[int]) -> dict[Owner, Secret]:
        """Return all keys that the insiders really have, whatever the plan says."""
        return {owner: key for agent in coalition for owner, key in self.keys[agent].items()}

    @cached_property
    def messages(self) -> NDArray[Any]:
        """All agents' messages, shape (releases, n, size): without gradients, or recorded.

        A recorded run assigns its messages, and ``gradients``.
        """
        zeros = keep_gradients(torch.zeros(1, self.size))
        return self._collect(lambda number, agent: self.send(zeros, number, agent))

    @cached_property
    def released(self) -> FloatArray:
        """All agents' releases without gradients, along the canary, shape (releases, n, trials)."""
        found = self._collect(lambda *at: self.read_release(self.messages[at], *at))
        return self.project(found - (0.0 if self.gradients is None else self.gradients))

    @cached_property
    def offsets(self) -> FloatArray:
        """The public offsets of the grid, shape (releases, size); zeros without masks."""
        if not self.is_masked:
            return np.zeros((len(self.releases), self.size))
        nonces = self._nonces
        return np.stack([draw_offset(nonces[a], step, self.size) for a, step in self.releases])

    def send(
        self, gradients: ClippedGradients, number: int, agent: int, keys: Keys | None = None
    ) -> NDArray[Any]:
        """Return an agent's message with the gradients of all trials, by the code of a run.

        It has words where releases are summed exactly. Under gossip it is what was released:
        models are zero, and the step size is a power of two, so that dividing by it is exact.
        """
        # All trials are one long gradient, because noise is independent in each coordinate.
        values = _multiply(gradients)
        share = self.open_share(agent, keys or self.keys[agent], number, size=values.numel())
        stepper = AgentStepper(query_of(self._plan, agent), lambda each: each)
        model = torch.zeros(values.numel(), dtype=getattr(torch, self._plan.dtype))
        stepper.begin(self.releases[number].step, share, model)
        stepper.hand_over(keep_gradients(values.view(1, -1)))
        if self._is_sum:
            return stepper.release_masked(observe=False)
        half = stepper.release_half_step(step_size=STEP_SIZE, observe=False)
        released: FloatArray = half.double().numpy() / -STEP_SIZE
        return released

    def recompute(self, gradients: ClippedGradients, number: int, agent: int) -> NDArray[Any]:
        """Return the message that the plan asks for, from the keys of all agents.

        It depends on the gradient by the sum with the noise alone: γ·rint((f g + v)/γ), or
        rint((f g + v)/γ + o) under masks.
        """
        keys, plan = self.held_by(range(self._plan.num_agents)), self._plan
        noisy = _multiply(gradients).numpy() + self._draw_noise(number, agent, keys)
        units = np.rint(noisy / plan.grid + self.offsets[number])
        if self._is_sum:
            # Through a signed type: a negative float has no unsigned integer.
            words = units.astype(np.int64).astype(WORDS[plan.mask_bits])
            return np.asarray(words + self._draw_mask(number, agent, keys))
        return np.asarray((plan.grid * units).astype(plan.dtype), np.float64)

    def read_release(self, message: NDArray[Any], number: int, agent: int) -> FloatArray:
        """Return the release in an agent's message, by its own masks, shape (size,)."""
        if not self._is_sum:
            return message
        mask, offset = self._draw_mask(number, agent, self.keys[agent]), self.offsets[number]
        return read_average(message - mask, num_agents=1, grid=self._plan.grid, offset=offset)

    def find_parts(self, view: View) -> Parts:
        """Return the agents of whose releases a view reads the sum, by the keys it really has."""
        streams = StreamWeights.of(self._plan.decomposition)
        return streams.join(view.honest(self._plan.num_agents), self.held_by(view.coalition))

    def unmask(self, view: View) -> NDArray[Any]:
        """Return all messages without the masks that a view draws, of their shape."""
        if not self.is_masked:
            return self.messages
        keys = self.held_by(view.coalition)
        masks = self._collect(lambda number, agent: self._draw_mask(number, agent, keys))
        return np.asarray(self.messages - masks)

    def read_sums(self, view: View) -> FloatArray:
        """Return the sums of releases that a view reads, shape (releases, parts, size).

        The view removes the masks that it can draw, adds up the messages of each part, and
        subtracts the gradients that it knows.
        """
        parts = self.find_parts(view)
        totals = sum_parts(self.unmask(view), parts, axis=1)
        if self._is_sum:
            at: dict[str, Any] = {"grid": self._plan.grid, "offset": self.offsets}
            sums = [
                len(part) * read_average(totals[:, k], num_agents=len(part), **at)
                for k, part in enumerate(parts)
            ]
            totals = np.stack(sums, axis=1)
        return (
            totals if self.gradients is None else totals - sum_parts(self.gradients, parts, axis=1)
        )

    def draw_known(self, view: View) -> FloatArray:
        """Return the part of all noise that a view draws with its keys, shape (releases, n, size).

        By the keys that insiders really hold: a key too many then shows as less hidden noise.
        """
        keys = self.held_by(view.coalition)
        return self._collect(lambda number, agent: self._draw_noise(number, agent, keys))

    def open_share(self, agent: int, keys: Keys, number: int, *, size: int) -> NoiseShare:
        """Return an agent's share of the noise in the attempt of a release, from some keys."""
        nonce = self._nonces[self.releases[number].attempt]
        source = SecureSource(keys)
        return NoiseShare(self._plan, agent, source, nonce=nonce, num_parameters=size)

    def _collect(self, make: Callable[[int, int], NDArray[Any]]) -> NDArray[Any]:
        """Return what is made of each release and agent, shape (releases, n, size)."""
        agents = range(self._plan.num_agents)
        return np.array([[make(r, agent) for agent in agents] for r in range(len(self.releases))])

    def _draw_noise(self, number: int, agent: int, keys: Keys) -> FloatArray:
        """Return that part of an agent's noise that keys are known of, shape (size,)."""
        attempt, step = self.releases[number]
        at: dict[str, Any] = {"nonce": self._nonces[attempt], "step": step, "size": self.size}
        return draw_known_share(self._plan.decomposition, agent, keys, **at)

    def _draw_mask(self, number: int, agent: int, keys: Keys) -> MaskWords:
        """Return the sum of those masks of an agent that keys are known of, shape (size,)."""
        attempt, step = self.releases[number]
        mask: MaskWords = np.zeros(self.size, WORDS[self._plan.mask_bits])
        added, subtracted = list_masks(
            self._plan.decomposition, agent, nonce=self._nonces[attempt], step=step
        )
        source = SecureSource(keys)
        for address in (*added, *subtracted):
            if address.owner in keys:
                stream = source.start(address, mask.nbytes, kind="mask")
                words = np.frombuffer(stream.update(bytes(mask.nbytes)), mask.dtype)
                mask = mask + words if address in added else mask - words
        return mask


def draw_known_share(
    noise: Decomposition, agent: int, keys: Keys, *, nonce: bytes, step: int, size: int
) -> FloatArray:
    """Return the part of an agent's noise at a step that follows from known keys, shape (size,)."""
    terms = list_terms(noise, agent, nonce=nonce, step=step)
    known = np.empty(size)
    SecureSource(keys).fill_sum(known, [term for term in terms if term[1].owner in keys])
    return known


def query_of(plan: Plan, agent: int) -> ClippedQuery:
    """Return what an agent clips and releases under a plan."""
    return plan.budget.of_agent(agent).query


def keep_gradients(values: Tensor) -> ClippedGradients:
    """Return gradients of trials, shape (trials, d), as if clipping had left them as they are."""
    ones = torch.ones(len(values), 1, dtype=torch.float64)
    zeros = torch.zeros(len(values), 1)
    return ClippedGradients(values.unsqueeze(1), ones, zeros, zeros, zeros)


def _multiply(gradients: ClippedGradients) -> Tensor:
    """Return clipped gradients of all trials as one vector, in float64."""
    return (gradients.values * gradients.factors.unsqueeze(-1)).flatten()


def make_secret(seed: int, *purpose: str | int) -> Secret:
    """Return a key that follows from a seed and a purpose."""
    # Public, as it follows from the seed: an audit protects nobody, and must be repeatable.
    data = encode_fields("audit", seed, *purpose)
    return Secret(hashlib.blake2b(data, digest_size=32).digest())
