"""Decompositions: a covariance split into agents' private noise and the noise of seed groups.

R = diag(θ) + Σ_k E_k F_k F_kᵀ E_kᵀ, where the members of group k share a seed and E_k places their
rows among all agents. The split lets an agent draw exactly its own share, and it decides which
noise a coalition of insiders can subtract (the paper's honest-but-curious setting, Problem 16).

Where releases are summed exactly, a group's noise can be masks instead: one-time pads on the grid
that cancel in the sum to the last bit. They are the limit of infinite noise with the same sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph

from corn.checks import FloatArray, IntArray, require, require_length
from corn.covariance.threat import SeedGroups
from corn.errors import InvalidArgumentError
from corn.privacy import ClippedQuery, PrivacyLoss, account_precision, precision_diagonal
from corn.topology.graphs import look_up_agents

_LARGEST = 1e100  # beyond it, squares and sums of noise would overflow


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Private noise and seed groups whose sum is the noise of all agents.

    Attributes:
        private_variance: θ, shape (n,): the variance of the noise that only agent i knows.
        seed_groups: the members of each group, in increasing order.
        factors: one matrix per group, shape (members, streams): member a of group k adds row a of
            ``factors[k]`` times the group's independent standard normal streams. Empty with masks.
        is_masked: whether the members of a group add masks from their seed in place of normals.
            Masks cancel in the exact sum of all agents and nowhere else.

    >>> opposite = np.array([[1.0], [-1.0]])
    >>> shares = Decomposition(np.ones(2), ((0, 1),), (opposite,))
    >>> shares.covariance.tolist(), shares.total_variance
    ([[2.0, -1.0], [-1.0, 2.0]], 2.0)
    """

    private_variance: FloatArray
    seed_groups: SeedGroups = ()
    factors: tuple[FloatArray, ...] = ()
    is_masked: bool = False

    def __post_init__(self) -> None:
        theta = np.array(self.private_variance, dtype=np.float64)
        # Written as "not all valid", so that NaN is refused: every comparison with it is False.
        if theta.ndim != 1 or not ((theta >= 0) & (theta < _LARGEST)).all():
            raise InvalidArgumentError("private_variance must be one finite number ≥ 0 per agent")
        factors = self.factors
        if self.is_masked:
            if any(factor.size for factor in factors):
                raise InvalidArgumentError("factors must be empty for noise with masks")
            # No normals: sums over streams then need no case of their own. Groups of one size share
            # a factor, as large networks have millions of groups.
            none = {size: np.empty((size, 0)) for size in set(map(len, self.seed_groups))}
            factors = tuple(none[len(group)] for group in self.seed_groups)
        require_length("factors", len(factors), len(self.seed_groups), per="seed group")
        # Checks, plans and keys refer to these very numbers, so that nobody may change them later.
        theta.setflags(write=False)
        object.__setattr__(self, "private_variance", theta)
        self._check_groups()
        if not self.is_masked:
            factors = tuple(np.array(factor, dtype=np.float64) for factor in factors)
        for group, factor in zip(self.seed_groups, factors, strict=True):
            has_rows = factor.ndim == 2 and len(factor) == len(group)
            is_valid = has_rows and bool((abs(factor) < _LARGEST).all())
            rule, found = "finite with a row per member", f"shape {factor.shape}"
            require(is_valid, f"the factor of group {group}", rule, found)
            factor.setflags(write=False)
        object.__setattr__(self, "factors", factors)

    @property
    def num_agents(self) -> int:
        """The number of agents n."""
        return len(self.private_variance)

    @property
    def covariance(self) -> FloatArray:
        """R, shape (n, n): the covariance of all agents' noise, as an eavesdropper sees it.

        Of noise with masks it is the private part alone, which is all that the sum contains.
        """
        return self.hidden_from(())

    @property
    def total_variance(self) -> float:
        """1ᵀR1, the noise variance of the sum of all agents, without a matrix of n × n numbers."""
        factors = () if self.is_masked else self.factors
        shared = sum(float(np.square(factor.sum(axis=0)).sum()) for factor in factors)
        return float(self.private_variance.sum()) + shared

    def rescale(self, weights: FloatArray) -> Decomposition:
        """Return the split in which the noise of agent i is multiplied by weight i, shape (n,)."""
        if self.is_masked:
            raise InvalidArgumentError("noise with masks has one scale for all agents")
        return Decomposition(
            self.private_variance * weights**2,
            self.seed_groups,
            tuple(
                weights[list(group), None] * factor
                for group, factor in zip(self.seed_groups, self.factors, strict=True)
            ),
        )

    def hidden_from(self, coalition: Iterable[int]) -> FloatArray:
        """Return R^(I), shape (n, n): the covariance of noise that a coalition cannot reproduce.

        A coalition knows the seed of every group it touches. Only the rows of honest agents have a
        meaning: a member also knows its own private noise, which stays on the diagonal here.
        """
        members = set(coalition)
        self._check_coalition(members)
        # A seed gives all streams of its group, the shares of the other members included, so one
        # member in the coalition is enough to subtract the whole group.
        hidden = np.diag(self.private_variance)
        for group, factor in zip(self.seed_groups, self.factors, strict=True):
            if members.isdisjoint(group):
                hidden[np.ix_(group, group)] += factor @ factor.T
        return hidden

    def count_streams(self) -> tuple[int, ...]:
        """Return the number of normal streams that each agent draws per step: its noise cost."""
        counts = (self.private_variance > 0).astype(int)
        if not self.is_masked:
            for group, factor in zip(self.seed_groups, self.factors, strict=True):
                counts[list(group)] += (factor != 0).sum(axis=1)
        return tuple(counts.tolist())

    @cached_property
    def memberships(self) -> tuple[IntArray, IntArray]:
        """All members of all seed groups, one group after the other, and the group of each."""
        sizes = [len(group) for group in self.seed_groups]
        members = np.fromiter(chain.from_iterable(self.seed_groups), np.int64, sum(sizes))
        return members, np.repeat(np.arange(len(sizes)), sizes)

    @cached_property
    def most_masks(self) -> int:
        """The largest number of seed groups whose masks an agent draws; zero without masks."""
        members, _ = self.memberships
        return int(np.bincount(members).max(initial=0)) if self.is_masked else 0

    def _check_coalition(self, coalition: Collection[int]) -> None:
        everyone = range(self.num_agents)
        is_inside = set(coalition) <= set(everyone)
        require(is_inside, "a coalition", f"of agents 0 … {everyone[-1]}", sorted(coalition))

    def _check_groups(self) -> None:
        groups = self.seed_groups
        # True and False are integers to Python, and would silently mean agents 1 and 0.
        kinds = set(map(type, chain.from_iterable(groups)))
        is_numbers = all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds)
        rule = "each of agents' numbers, once, in increasing order"
        require(is_numbers and all(groups), "seed groups", rule, "others")
        members, group_of = self.memberships
        stray = group_of[(members < 0) | (members >= self.num_agents)]
        found = groups[stray[0]] if len(stray) else None
        require(found is None, "seed groups", f"of agents 0 … {self.num_agents - 1}", found)
        is_wrong = (group_of[1:] == group_of[:-1]) & (members[1:] <= members[:-1])
        found = groups[group_of[1:][is_wrong][0]] if is_wrong.any() else None
        require(found is None, "seed groups", rule, found)


def split_blocks(
    covariance: FloatArray, seed_groups: SeedGroups, *, precision_caps: FloatArray
) -> Decomposition:
    """Return the paper's split R = σ_mix² I + R_cor on each group, with the largest σ_mix².

    As much noise as possible is private, since no insider can subtract it. So an agent alone in its
    group shares no seed. Where caps differ, σ_mix² is in units of each agent's own 1/b_i, so that
    an agent with a stricter promise has more private noise.
    """
    shared = tuple(group for group in seed_groups if len(group) > 1)
    private = np.diag(covariance).copy()
    # Exactly 1 where all caps are equal.
    units = np.sqrt(precision_caps.min() / precision_caps)
    factors = []
    for group in shared:
        members = list(group)
        unit = units[members]
        block = covariance[np.ix_(group, group)] / np.outer(unit, unit)
        values, vectors = np.linalg.eigh(block)
        # R − σ² I ⪰ 0 allows σ² up to the smallest eigenvalue; rounding may put that below zero.
        least = max(float(values[0]), 0.0)
        # The largest σ_mix² of eq. (12): what is private is hidden from every insider.
        private[members] = least * unit**2
        factors.append(unit[:, None] * vectors * np.sqrt(np.maximum(values - least, 0)))
    return Decomposition(private, shared, tuple(factors))


def split_pairs(covariance: FloatArray) -> Decomposition:
    """Return pairwise cancelling noise, as DECOR draws it: a stream for each negative covariance.

    The covariance must be a diagonal plus a Laplacian.
    """
    i, j = np.nonzero(np.triu(covariance, 1))
    opposite = np.array([[1.0], [-1.0]])
    factors = [strength * opposite for strength in np.sqrt(-covariance[i, j])]
    pairs = tuple(zip(i.tolist(), j.tolist(), strict=True))
    # A pair of variance s adds s on the diagonal and −s off it, so that the sum of a row is the
    # private variance.
    return Decomposition(np.maximum(covariance.sum(axis=1), 0), pairs, tuple(factors))


@dataclass(frozen=True, eq=False)
class Exposure:
    """The privacy loss of honest agents, given by numbers or names, against a coalition."""

    honest: tuple[Any, ...]
    loss: PrivacyLoss

    def epsilon(self, delta: float) -> dict[Any, float]:
        """Return each honest agent's exact ε at this δ; ∞ where no noise hides the agent."""
        return dict(zip(self.honest, self.loss.epsilon(delta).tolist(), strict=True))


def expose(
    decomposition: Decomposition,
    coalition: Iterable[int | str],
    query: ClippedQuery,
    *,
    num_steps: int,
    names: Sequence[str] = (),
) -> Exposure:
    """Return the privacy that each honest agent keeps against a coalition over ``num_steps`` steps.

    With ``names=network.agent_names`` agents may be given by name, and the result names them. It
    shares no code with the solvers, so it can judge them.

    >>> pair = np.array([[1.0], [-1.0]])
    >>> shares = Decomposition(np.ones(2), ((0, 1),), (pair,))
    >>> query = ClippedQuery(0.01)
    >>> outside = expose(shares, [], query, num_steps=100).epsilon(1e-5)[0]
    >>> outside < expose(shares, [1], query, num_steps=100).epsilon(1e-5)[0]
    True
    """
    known = names or [str(agent) for agent in range(decomposition.num_agents)]
    require_length("names", len(known), decomposition.num_agents, per="agent")
    members = tuple(sorted(look_up_agents(known, coalition, argument="coalition")))
    honest, precision = hidden_precision(decomposition, members)
    loss = account_precision(precision, query, num_steps=num_steps)
    return Exposure(tuple(names[agent] for agent in honest) if names else honest, loss)


def masked_precision(decomposition: Decomposition, coalition: Collection[int]) -> FloatArray:
    """Return an upper bound on each agent's precision under masks, shape (n,).

    A coalition removes the masks of the groups that it touches. Groups that it does not touch join
    their members into parts. Masks make the messages of a part uniform given its sum, so the
    coalition learns the sum of each part and nothing else: what protects an agent is the private
    noise of its whole part, as if [R⁻¹]_ii were 1/Σθ. The entries of the members have no meaning.
    """
    n = decomposition.num_agents
    members, group_of = decomposition.memberships
    is_known = np.zeros(1 + len(decomposition.seed_groups), dtype=bool)
    is_known[group_of[np.isin(members, list(coalition))]] = True
    # A path through each group that the coalition does not touch joins its members.
    is_link = (group_of[1:] == group_of[:-1]) & ~is_known[group_of[1:]]
    ends = members[:-1][is_link], members[1:][is_link]
    joined = scipy.sparse.coo_array((np.ones(len(ends[0])), ends), shape=(n, n))
    _, part = scipy.sparse.csgraph.connected_components(joined, directed=False)
    totals = np.bincount(part, weights=decomposition.private_variance)[part]
    # A sum of n numbers is at least 1 − n u of the true one, and a quotient rounds once.
    with np.errstate(divide="ignore"):
        return np.asarray((1 / totals) * (1 + 2 * (n + 2) * np.finfo(np.float64).eps))


def hidden_precision(
    decomposition: Decomposition, coalition: Collection[int]
) -> tuple[tuple[int, ...], FloatArray]:
    """Return the honest agents, and an upper bound on [(R^(I))⁻¹]_ii of each of them."""
    decomposition._check_coalition(coalition)
    honest = tuple(i for i in range(decomposition.num_agents) if i not in coalition)
    if not honest:
        raise InvalidArgumentError("a coalition of all agents leaves nobody to protect")
    if decomposition.is_masked:
        return honest, masked_precision(decomposition, coalition)[list(honest)]
    if not decomposition.seed_groups:
        # R is diagonal. A quotient is rounded to the nearest number, so that the next one is above.
        with np.errstate(divide="ignore"):
            own = 1 / decomposition.private_variance[list(honest)]
        return honest, np.nextafter(own, np.inf)
    hidden = decomposition.hidden_from(coalition)[np.ix_(honest, honest)]
    # An entry of R is a sum of that many terms, whose rounding the bound must cover.
    return honest, precision_diagonal(hidden, num_terms=1 + max(decomposition.count_streams()))
