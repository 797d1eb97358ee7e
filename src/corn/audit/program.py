"""The program under audit: the library's own functions, run as agents run them.

:class:`Program` lists the functions that protect an agent's data, from the keys to the message. The
auditor calls nothing else. Tests replace one of them with a faulty one, which the audit must find.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from corn.arrays import FloatArray
from corn.covariance import Decomposition
from corn.learn.batches import BatchSampler
from corn.learn.sampling import Choices
from corn.learn.step import ClippedGradients, compute_gradients, take_half_step
from corn.noise import (
    Identity,
    Owner,
    Roster,
    Secret,
    SecureSource,
    agent_keys,
    agree_on_nonce,
    draw_share,
)
from corn.noise.address import encode_fields
from corn.noise.choices import SecretChoices
from corn.plan import Plan, fingerprint

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


def make_messages(model: Tensor, found: ClippedGradients, noise: Tensor, *, grid: float) -> Tensor:
    """Return the message of each trial, shape (trials, d), by the code that agents run.

    Args:
        model: the public model, shape (d,).
        found: clipped gradients of all trials.
        noise: the noise of all trials, float64 of shape (trials, d).
        grid: γ.
    """
    # A copy: where types agree, the step takes over the gradient's memory.
    values, factors = found.values.clone().flatten(1), found.factors.flatten()
    return torch.stack(
        [
            take_half_step(model, own, factor, v, grid=grid, step_size=STEP_SIZE)
            for own, factor, v in zip(values, factors, noise, strict=True)
        ]
    )


@dataclass(frozen=True)
class Program:
    """The functions that stand between an agent's data and its messages."""

    derive_keys: Callable[[Plan, int], Sequence[Keys]] = derive_keys
    draw_nonce: Callable[[Plan, int, int], bytes] = draw_nonce
    draw_share: Callable[..., FloatArray] = draw_share
    make_choices: Callable[[int, int], Choices] = make_choices
    make_sampler: Callable[..., BatchSampler] = BatchSampler.of_agent
    compute_gradients: Callable[..., ClippedGradients] = compute_gradients
    make_messages: Callable[..., Tensor] = make_messages


DEPLOYED = Program()
"""The functions that agents run."""


class NoiseRecord:
    """The noise of all agents in some releases, and the part of it that each view can draw.

    Coordinates of one release stand for independent trials, as their streams are drawn
    independently for each coordinate.
    """

    def __init__(
        self,
        plan: Plan,
        releases: Sequence[ReleaseNumber],
        size: int,
        *,
        seed: int,
        program: Program = DEPLOYED,
    ) -> None:
        self._plan, self._program = plan, program
        self.releases = tuple(releases)
        self.keys = program.derive_keys(plan, seed)
        # One nonce per attempt, as every start of a run agrees on a new one.
        attempts = dict.fromkeys(release.attempt for release in releases)
        self._nonces = {each: program.draw_nonce(plan, seed, each) for each in attempts}
        # Each agent draws with its own keys: a wrong key shows as noise that does not cancel.
        sources = [SecureSource(own) for own in self.keys]
        self.noise = self._draw(plan.decomposition, sources, size)
        """All agents' noise, shape (releases, agents, size)."""

    def held_by(self, coalition: Sequence[int]) -> dict[Owner, Secret]:
        """Return all keys that the insiders really have, whatever the plan says."""
        return {owner: key for agent in coalition for owner, key in self.keys[agent].items()}

    def check_keys(self) -> list[str]:
        """Return the keys that agents have although the plan does not give them those keys."""
        return [
            f"agent {agent} has the key of {owner}"
            for agent, own in enumerate(self.keys)
            for owner in own
            if agent not in owner.members
        ]

    def draw_known(self, coalition: Sequence[int]) -> FloatArray:
        """Return the part of the noise that insiders draw with their keys, shape as ``noise``.

        The attacker knows the program, so that it draws by the same functions.
        """
        # By the keys that insiders really hold: a key too many then shows as less hidden noise.
        keys = self.held_by(coalition)
        if not keys:
            return np.zeros_like(self.noise)
        known = select_known(self._plan.decomposition, keys)
        sources = [SecureSource(keys)] * self._plan.num_agents
        return self._draw(known, sources, self.noise.shape[-1])

    def _draw(
        self, decomposition: Decomposition, sources: Sequence[SecureSource], size: int
    ) -> FloatArray:
        drawn = np.empty((len(self.releases), len(sources), size))
        for number, (attempt, step) in enumerate(self.releases):
            for agent, source in enumerate(sources):
                drawn[number, agent] = self._program.draw_share(
                    decomposition,
                    agent,
                    source=source,
                    nonce=self._nonces[attempt],
                    step=step,
                    stop=size,
                )
        return drawn


def select_known(decomposition: Decomposition, known: Mapping[Owner, Secret]) -> Decomposition:
    """Return the noise of known owners alone; other groups keep their numbers with weight 0."""
    private = [Owner((agent,)) in known for agent in range(decomposition.num_agents)]
    groups = decomposition.seed_groups
    factors = tuple(
        # Group numbers are part of a stream's address, so that groups are zeroed, not removed.
        factor if Owner(groups[k], k) in known else np.zeros_like(factor)
        for k, factor in enumerate(decomposition.factors)
    )
    return Decomposition(np.where(private, decomposition.private_variance, 0.0), groups, factors)


def _secret(seed: int, *purpose: str | int) -> Secret:
    # Public, as it follows from the seed: an audit protects nobody, and must be repeatable.
    data = encode_fields("audit", seed, *purpose)
    return Secret(hashlib.blake2b(data, digest_size=32).digest())
