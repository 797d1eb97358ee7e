"""The program under audit: the library's own functions, run as agents run them.

:class:`Program` lists the functions that protect an agent's data, from the keys to the message. The
auditor calls nothing else. Tests replace one of them with a faulty one, which the audit must find.
:class:`RunRecord` calls them for all agents, and reads what they send as a view does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from corn.audit.views import Parts, StreamWeights, View, sum_parts
from corn.checks import FloatArray
from corn.covariance import Decomposition
from corn.learn.batches import BatchSampler, Choices
from corn.learn.perturbation import simulation_nonce
from corn.learn.step import (
    ClippedGradients,
    compute_gradients,
    release_masked,
    take_half_step,
)
from corn.noise import (
    Identity,
    NoiseSource,
    Owner,
    Roster,
    Secret,
    SecureSource,
    agent_keys,
    agree_on_nonce,
    draw_all_shares,
    draw_share,
    simulated_keys,
)
from corn.noise.choices import SecretChoices
from corn.noise.masks import (
    MaskBits,
    MaskWords,
    choose_bits,
    draw_mask,
    draw_offset,
    read_average,
)
from corn.noise.stream import NormalArray, StreamAddress, Terms, encode_fields
from corn.plan import Plan, fingerprint

Keys: TypeAlias = Mapping[Owner, Secret]

STEP_SIZE = 0.25
"""A power of two: the release can be read off a message exactly."""

# Of the check that noise and masks follow from keys: streams and values that are drawn again.
_MOST_OWNERS, _VALUES = 300, 64


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
    identities = [Identity(_secret(seed, "identity", agent)) for agent in range(n)]
    roster = Roster(tuple(own.public_key for own in identities))
    # Seeds of pairs follow from a key exchange, those of larger groups are random.
    seeds = {k: _secret(seed, "group", k) for k, group in enumerate(groups) if len(group) > 2}
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
        agent: _secret(seed, "nonce", attempt, agent).reveal() for agent in range(plan.num_agents)
    }
    return agree_on_nonce(parts, plan_fingerprint=fingerprint(plan))


def make_choices(seed: int, trial: int) -> Choices:
    """Return the source of the coins and orders of one trial, as of one run of an agent."""
    return SecretChoices(_secret(seed, "coins", trial), _secret(seed, "orders", trial))


@dataclass(frozen=True)
class Program:
    """The functions that stand between an agent's data and its messages."""

    derive_keys: Callable[[Plan, int], Sequence[Keys]] = derive_keys
    draw_nonce: Callable[[Plan, int, int], bytes] = draw_nonce
    draw_share: Callable[..., FloatArray] = draw_share
    make_choices: Callable[[int, int], Choices] = make_choices
    make_sampler: Callable[..., BatchSampler] = BatchSampler.of_agent
    compute_gradients: Callable[..., ClippedGradients] = compute_gradients
    take_half_step: Callable[..., Tensor] = take_half_step
    choose_bits: Callable[..., MaskBits] = choose_bits
    draw_mask: Callable[..., MaskWords] = draw_mask
    draw_offset: Callable[[bytes, int, int], FloatArray] = draw_offset
    release_masked: Callable[..., MaskWords] = release_masked
    read_average: Callable[..., FloatArray] = read_average


DEPLOYED = Program()
"""The functions that agents run."""


class RunRecord:
    """All agents' keys, noise, masks and messages in some releases, and what each view reads.

    Coordinates of one release stand for independent trials, as their streams are drawn
    independently for each coordinate: k of them for each trial, with a canary along ``direction``,
    shape (k,).

    Attributes:
        size: the coordinates of a release.
        gradients: the gradients in ``words``, which attackers know, of their shape; None if there
            are none.
    """

    def __init__(
        self,
        plan: Plan,
        releases: Sequence[ReleaseNumber],
        num_trials: int,
        *,
        seed: int,
        program: Program = DEPLOYED,
        direction: FloatArray | None = None,
    ) -> None:
        self._plan = plan
        self._program = program
        self.releases = tuple(releases)
        self._direction = np.ones(1) if direction is None else direction
        self.size = num_trials * len(self._direction)
        self.keys = program.derive_keys(plan, seed)
        # One nonce per attempt, as every start of a run agrees on a new one.
        attempts = dict.fromkeys(release.attempt for release in releases)
        self._nonces = {each: program.draw_nonce(plan, seed, each) for each in attempts}
        self.is_masked = plan.decomposition.is_masked
        self.gradients: FloatArray | None = None

    def project(self, values: FloatArray) -> FloatArray:
        """Return the part of each trial along the canary: the last axis has all trials' values."""
        shape = (*values.shape[:-1], -1, len(self._direction))
        projected: FloatArray = values.reshape(shape) @ self._direction
        return projected

    def held_by(self, coalition: Sequence[int]) -> dict[Owner, Secret]:
        """Return all keys that the insiders really have, whatever the plan says."""
        return {owner: key for agent in coalition for owner, key in self.keys[agent].items()}

    @cached_property
    def noise(self) -> FloatArray:
        """All agents' noise, shape (releases, n, size)."""
        return self._draw_noise(self._sources)

    @cached_property
    def masks(self) -> MaskWords:
        """All agents' masks, shape as ``noise``."""
        return self._draw_masks(self._sources)

    @cached_property
    def offsets(self) -> FloatArray:
        """The public offsets of the grid, shape (releases, size); zeros without masks."""
        if not self.is_masked:
            return np.zeros((len(self.releases), self.size))
        draw, nonces = self._program.draw_offset, self._nonces
        return np.stack([draw(nonces[a], step, self.size) for a, step in self.releases])

    @cached_property
    def words(self) -> MaskWords:
        """All agents' messages of exact sums, shape as ``noise``: without gradients, or recorded.

        A recorded run assigns its messages, and ``gradients``.
        """
        zeros = no_gradients(self.size)
        return np.array(
            [
                [self.make_message(zeros, r, agent)[0] for agent in range(self._plan.num_agents)]
                for r in range(len(self.releases))
            ]
        )

    def read_releases(self) -> FloatArray:
        """Return what all agents release without gradients, by their masks, shape as ``noise``."""
        found = [
            [self.read_message(own, r, agent) for agent, own in enumerate(words)]
            for r, words in enumerate(self.words)
        ]
        return np.array(found) - (0.0 if self.gradients is None else self.gradients)

    def release(
        self,
        gradients: ClippedGradients,
        number: int,
        agent: int,
        noise: FloatArray | None = None,
    ) -> FloatArray:
        """Return what an agent releases in each trial, read off its messages, (trials, d).

        Args:
            gradients: of all trials.
            number: of the release.
            agent: the agent.
            noise: by default that of the record.
        """
        if self.is_masked:
            words = self.make_message(gradients, number, agent, noise)
            return self.read_message(words, number, agent)
        drawn = self._take_noise(gradients, number, agent, noise)
        dtype = torch.float32 if self._plan.dtype == "float32" else torch.float64
        model = torch.zeros(drawn.shape[1], dtype=dtype)
        # A copy: where types agree, the step takes over the gradient's memory.
        values, factors = gradients.values.clone().flatten(1), gradients.factors.flatten()
        halves = [
            self._program.take_half_step(
                model, own, factor, v, grid=self._plan.grid, step_size=STEP_SIZE
            )
            for own, factor, v in zip(values, factors, drawn, strict=True)
        ]
        released: FloatArray = torch.stack(halves).double().numpy() / -STEP_SIZE
        return released

    def make_message(
        self,
        gradients: ClippedGradients,
        number: int,
        agent: int,
        noise: FloatArray | None = None,
    ) -> MaskWords:
        """Return an agent's messages where releases are summed exactly; see ``release``."""
        shape = (len(gradients.values), -1)
        return self._program.release_masked(
            gradients.values.flatten(1),
            gradients.factors.flatten().unsqueeze(1),
            self._take_noise(gradients, number, agent, noise),
            grid=self._plan.grid,
            offset=self.offsets[number].reshape(shape),
            mask=self.masks[number, agent].reshape(shape),
        )

    def read_message(self, words: MaskWords, number: int, agent: int) -> FloatArray:
        """Return the releases in an agent's messages, whose masks nobody else knows."""
        mask, offset = self.masks[number, agent], self.offsets[number]
        return self._program.read_average(
            words - mask.reshape(words.shape),
            num_agents=1,
            grid=self._plan.grid,
            offset=offset.reshape(words.shape),
        )

    def find_parts(self, view: View) -> Parts:
        """Return the agents of whose releases a view reads the sum, by the keys it really has."""
        streams = StreamWeights.of(self._plan.decomposition)
        return streams.join(view.honest(self._plan.num_agents), self.held_by(view.coalition))

    def unmask(self, view: View) -> MaskWords:
        """Return all messages without the masks that a view draws, shape as ``noise``."""
        return self.words - self.draw_known_masks(view.coalition)

    def read_sums(self, view: View) -> FloatArray:
        """Return the sums of releases that a view reads, shape (releases, parts, size).

        The view removes the masks that it can draw, adds up the messages of each part, and
        subtracts the gradients that it knows.
        """
        parts = self.find_parts(view)
        totals = sum_parts(self.unmask(view), parts, axis=1)
        averages = [
            self._program.read_average(
                totals[:, k], num_agents=len(part), grid=self._plan.grid, offset=self.offsets
            )
            for k, part in enumerate(parts)
        ]
        sums = [len(part) * average for part, average in zip(parts, averages, strict=True)]
        read = np.stack(sums, axis=1)
        return read if self.gradients is None else read - sum_parts(self.gradients, parts, axis=1)

    def draw_known(self, coalition: Sequence[int]) -> FloatArray:
        """Return the part of the noise that insiders draw with their keys, shape as ``noise``.

        The attacker knows the program, so that it draws by the same functions.
        """
        return self._draw_noise(self._know(coalition))

    def draw_known_masks(self, coalition: Sequence[int]) -> MaskWords:
        """Return the part of the masks that insiders draw with their keys, shape as ``noise``."""
        return self._draw_masks(self._know(coalition))

    def check_keys(self) -> list[str]:
        """Return faults of keys that need no test.

        These are keys that agents have although the plan does not give them those keys, equal keys
        of different owners, and noise or masks that do not follow from the key of their owner, so
        that anybody can draw them. In large networks the last is checked for some owners.
        """
        leaked: list[str] = []
        equal: list[str] = []
        owners: dict[bytes, Owner] = {}
        for agent, own in enumerate(self.keys):
            for owner, key in own.items():
                if agent not in owner.members:
                    leaked.append(f"agent {agent} has the key of {owner}")
                first = owners.setdefault(key.reveal(), owner)
                if first != owner:
                    equal.append(f"{first} and {owner} have one key")
        # One of each kind shows the fault.
        return [*leaked, *equal[:1], *islice(self._find_public_streams(), 1)]

    def _find_public_streams(self) -> Iterator[str]:
        """Draw again with another key of one owner, which must give other values."""
        shares = self._plan.decomposition
        drawn = [Owner((i,)) for i, theta in enumerate(shares.private_variance) if theta > 0]
        drawn += [
            Owner(group, number)
            for number, group in enumerate(shares.seed_groups)
            if shares.is_masked or shares.factors[number][0].any()
        ]
        attempt, step = self.releases[0]
        at: dict[str, Any] = {"nonce": self._nonces[attempt], "step": step}
        for owner in drawn[:: 1 + len(drawn) // _MOST_OWNERS]:
            agent = owner.members[0]
            draw: Callable[..., Any] = partial(self._program.draw_share, stop=_VALUES)
            kind = "noise"
            if shares.is_masked and owner.group is not None:
                draw = partial(self._program.draw_mask, size=_VALUES, bits=self._bits)
                kind = "mask"
            keys = (self.keys[agent], {**self.keys[agent], owner: _secret(0, "another key")})
            first, second = (draw(shares, agent, source=SecureSource(own), **at) for own in keys)
            # Words of 16 bits are equal by chance, but not five of them among 64.
            if int((first == second).sum()) > 4:
                yield (
                    f"the {kind} that agent {agent} draws does not depend on the key of {owner}: "
                    "others can draw it too"
                )

    @cached_property
    def _bits(self) -> MaskBits:
        plan = self._plan
        return self._program.choose_bits(plan.decomposition, plan.grid, plan.budget)

    def _take_noise(
        self, gradients: ClippedGradients, number: int, agent: int, noise: FloatArray | None
    ) -> Tensor:
        drawn = self.noise[number, agent] if noise is None else noise
        return torch.from_numpy(np.ascontiguousarray(drawn.reshape(len(gradients.values), -1)))

    @property
    def _sources(self) -> list[NoiseSource]:
        # Each agent draws with its own keys: a wrong key shows as noise that does not cancel.
        return [SecureSource(own) for own in self.keys]

    def _know(self, coalition: Sequence[int]) -> list[NoiseSource]:
        # By the keys that insiders really hold: a key too many then shows as less hidden noise.
        return [KnownSource(self.held_by(coalition))] * self._plan.num_agents

    def _draw_noise(self, sources: Sequence[NoiseSource]) -> FloatArray:
        return np.array(self._draw(self._program.draw_share, sources, stop=self.size))

    def _draw_masks(self, sources: Sequence[NoiseSource]) -> MaskWords:
        draw = self._program.draw_mask
        return np.array(self._draw(draw, sources, size=self.size, bits=self._bits))

    def _draw(
        self, draw: Callable[..., Any], sources: Sequence[NoiseSource], **options: Any
    ) -> list[list[Any]]:
        """Draw for every release and agent, each from its source."""
        noise = self._plan.decomposition
        found = []
        for attempt, step in self.releases:
            at = {"nonce": self._nonces[attempt], "step": step}
            found.append(
                [draw(noise, k, source=own, **at, **options) for k, own in enumerate(sources)]
            )
        return found


def draw_known_noise(
    decomposition: Decomposition, view: View, *, seed: int, step: int, size: int
) -> Tensor:
    """Return the part of a step's noise that a view knows in a simulation of a seed, (n, d)."""
    every = simulated_keys(decomposition, seed=seed)
    held = StreamWeights.of(decomposition).held_by(view.coalition)
    keys = {owner: key for owner, key in every.items() if owner in held}
    # The nonce is public: all agents of the run agree on it.
    at: dict[str, Any] = {"nonce": simulation_nonce(seed), "step": step, "stop": size}
    return torch.from_numpy(draw_all_shares(decomposition, source=KnownSource(keys), **at))


@final
class KnownSource(NoiseSource):
    """The streams whose keys are known, and zeros in the place of all others."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._source = SecureSource(keys)

    def fill_sum(self, out: NormalArray, terms: Terms, *, start: int = 0) -> None:
        """See ``NoiseSource``."""
        known = [(weight, address) for weight, address in terms if address.owner in self._keys]
        self._source.fill_sum(out, known, start=start)

    def draw_mask_bytes(self, address: StreamAddress, num_bytes: int) -> bytes:
        """See ``SecureSource``."""
        if address.owner not in self._keys:
            return bytes(num_bytes)
        return self._source.draw_mask_bytes(address, num_bytes)


def _secret(seed: int, *purpose: str | int) -> Secret:
    # Public, as it follows from the seed: an audit protects nobody, and must be repeatable.
    data = encode_fields("audit", seed, *purpose)
    return Secret(hashlib.blake2b(data, digest_size=32).digest())


def no_gradients(size: int) -> ClippedGradients:
    """Return the clipped gradients of one trial whose data has no gradient."""
    return keep_gradients(torch.zeros(1, size))


def keep_gradients(values: Tensor) -> ClippedGradients:
    """Return gradients of trials, shape (trials, d), as if clipping had left them as they are."""
    ones = torch.ones(len(values), 1, dtype=torch.float64)
    zeros = torch.zeros(len(values), 1)
    return ClippedGradients(values.unsqueeze(1), ones, zeros, zeros, zeros)
