"""Coalitions of insiders: which of them matter, and the noise that each of them cannot know.

Only coalitions of the largest size matter, and only once per set of seeds they leave unknown. The
noise unknown to a coalition is one sparse matrix times the entries of all group covariances, so
that a step of a solver is a few large array operations; chunks keep the dense work small however
many coalitions there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from corn.arrays import FloatArray, IntArray
from corn.covariance.threat import SeedGroups
from corn.errors import InvalidArgumentError

_ADVICE = (
    "design against fewer insiders, or an eavesdropper alone (--colluders 0; in Python "
    "threat=ThreatModel(0))"
)
_MAX_TABLE_BYTES = 400_000_000
_CHUNK_ENTRIES = 4_000_000  # 32 MB of float64 for the matrices of a chunk
_MAX_NONZEROS = 60_000_000  # of the sparse matrices: 40 bytes each while they are made


@dataclass(frozen=True, eq=False)
class Coalitions:
    """The constraint sets that remain after pruning.

    Attributes:
        unknown: (coalitions, groups) of bool: is the group's seed unknown to the coalition?
        protected: (coalitions, agents) of bool: is the agent's privacy at stake against it?
        merged: the row above of each coalition of size q, in lexicographic order.
    """

    unknown: NDArray[np.bool_]
    protected: NDArray[np.bool_]
    merged: IntArray

    def __len__(self) -> int:
        return len(self.unknown)


def list_coalitions(seed_groups: SeedGroups, *, num_agents: int, max_colluders: int) -> Coalitions:
    """Return all coalitions of size q, those with equal unknown seeds merged into one.

    A smaller coalition knows less, so it asks for nothing more. Coalitions that leave the same
    seeds unknown see the same noise; together they threaten whoever is outside one of them.
    """
    count = math.comb(num_agents, max_colluders)
    if count * (len(seed_groups) + num_agents + 8 * max_colluders) > _MAX_TABLE_BYTES:
        raise InvalidArgumentError(
            f"{describe_count(count)} coalitions of {max_colluders} among {num_agents} agents with "
            f"{len(seed_groups):,} seed groups are too many to check one by one: {_ADVICE}"
        )
    belongs = np.zeros((num_agents, len(seed_groups)), dtype=bool)
    for k, group in enumerate(seed_groups):
        belongs[list(group), k] = True
    members = np.array(list(combinations(range(num_agents), max_colluders)), dtype=int)
    members = members.reshape(count, max_colluders)
    outside = np.ones((count, num_agents), dtype=bool)
    np.put_along_axis(outside, members, False, axis=1)
    unknown = np.ones((count, len(seed_groups)), dtype=bool)
    for member in members.T:
        # One member is enough to know a seed: a group stays unknown if no member belongs to it.
        unknown &= ~belongs[member]
    # Rows as packed bits: an eighth of the bytes to sort for equal ones.
    kept, merged = np.unique(np.packbits(unknown, axis=1), axis=0, return_inverse=True)
    # Coalitions with equal knowledge are one constraint set for everyone outside any of them.
    protected = np.zeros((len(kept), num_agents), dtype=bool)
    np.logical_or.at(protected, merged.ravel(), outside)
    unpacked = np.unpackbits(kept, axis=1, count=len(seed_groups)).astype(bool)
    return Coalitions(unpacked, protected, merged.ravel())


def describe_count(count: int) -> str:
    """Return a number of coalitions in figures, or its power of ten if it has many digits.

    >>> describe_count(math.comb(50, 25)), describe_count(math.comb(20_000, 10_000))
    ('126,410,606,437,752', 'more than 10^6018')
    """
    # Python does not print integers of more than 4300 digits.
    return f"{count:,}" if count < 10**20 else f"more than 10^{math.floor(math.log10(count))}"


@dataclass(frozen=True, eq=False)
class Bucket:
    """Groups of one size m, stacked.

    Attributes:
        groups: their numbers, shape (k,).
        members: shape (k, m).
        positions: where the entries of each block stand in a flat n × n matrix, shape (k · m²,).
        start: where these entries begin among those of all buckets.
    """

    groups: IntArray
    members: IntArray
    positions: IntArray
    start: int

    def take(self, matrix: FloatArray) -> FloatArray:
        """Return the diagonal blocks of an (n, n) matrix on these groups, shape (k, m, m)."""
        blocks: FloatArray = matrix[self.members[:, :, None], self.members[:, None, :]]
        return blocks


class Assembly:
    """The noise unknown to each coalition, and the adjoint map, in chunks of coalitions."""

    def __init__(self, seed_groups: SeedGroups, coalitions: Coalitions, num_agents: int) -> None:
        self.num_agents = num_agents
        self.coalitions = coalitions
        self.seed_groups = seed_groups
        self.buckets = tuple(_stack(seed_groups, num_agents))
        self._require_memory(seed_groups)  # before anything large is made
        # Coalitions of a chunk are inverted in one call; chunks bound its memory.
        size = max(1, _CHUNK_ENTRIES // num_agents**2)
        self.chunks = [slice(s, s + size) for s in range(0, len(coalitions), size)]
        everyone = np.ones((1, len(seed_groups)), dtype=bool)
        self._place_all = self._placement(everyone)
        self._place = [self._placement(coalitions.unknown[chunk]) for chunk in self.chunks]

    def stack(self, per_group: Sequence[FloatArray]) -> list[FloatArray]:
        """Return matrices listed by group, of m rows each, as one array per bucket."""
        return [np.stack([per_group[k] for k in bucket.groups]) for bucket in self.buckets]

    def total(self, private_variance: FloatArray, blocks: Sequence[FloatArray]) -> FloatArray:
        """Return R, the sum of all noise, shape (n, n)."""
        matrices = self._add(self._place_all, private_variance, blocks)
        return matrices.reshape(matrices.shape[1:])

    def hidden(
        self, private_variance: FloatArray, blocks: Sequence[FloatArray], chunk: int
    ) -> FloatArray:
        """Return R^(I) for each coalition of a chunk, shape (c, n, n)."""
        return self._add(self._place[chunk], private_variance, blocks)

    def pull_back(self, matrices: FloatArray, chunk: int) -> list[FloatArray]:
        """Return Σ over coalitions that do not know group k of their matrices on H_k, per bucket.

        This is the adjoint of ``hidden``: it takes gradients from coalitions back to groups.
        """
        # The transpose of the map that adds blocks is the map that reads them, so gradients need no
        # code of their own.
        entries = self._place[chunk].T @ matrices.ravel()
        return [
            entries[bucket.start : bucket.start + len(bucket.positions)].reshape(
                *bucket.members.shape, -1
            )
            for bucket in self.buckets
        ]

    def _add(
        self,
        placement: scipy.sparse.csr_array,
        private_variance: FloatArray,
        blocks: Sequence[FloatArray],
    ) -> FloatArray:
        n = self.num_agents
        entries = np.concatenate([np.empty(0), *(block.ravel() for block in blocks)])
        matrices: FloatArray = (placement @ entries).reshape(-1, n, n)
        agents = np.arange(n)
        matrices[:, agents, agents] += private_variance
        return matrices

    def _placement(self, unknown: NDArray[np.bool_]) -> scipy.sparse.csr_array:
        """Return the 0/1 matrix that adds the entries of all blocks into (c, n, n) matrices."""
        n = self.num_agents
        rows, columns = [], []
        for bucket in self.buckets:
            m = bucket.members.shape[1]
            which, group = np.nonzero(unknown[:, bucket.groups])
            entry = group[:, None] * m * m + np.arange(m * m)
            rows.append((which[:, None] * n * n + bucket.positions[entry]).ravel())
            columns.append((bucket.start + entry).ravel())
        row = np.concatenate([np.empty(0, int), *rows])
        column = np.concatenate([np.empty(0, int), *columns])
        num_entries = sum(len(bucket.positions) for bucket in self.buckets)
        shape = (len(unknown) * n * n, num_entries)
        return scipy.sparse.csr_array((np.ones(len(row)), (row, column)), shape=shape)

    def _require_memory(self, seed_groups: SeedGroups) -> None:
        sizes = np.array([len(group) for group in seed_groups])
        nonzeros = int(self.coalitions.unknown.sum(axis=0) @ sizes**2) if seed_groups else 0
        if nonzeros > _MAX_NONZEROS:
            raise InvalidArgumentError(
                f"{len(self.coalitions):,} coalitions with {len(seed_groups):,} seed groups need "
                f"about {40e-9 * nonzeros:.0f} GB: {_ADVICE}"
            )


def _stack(seed_groups: SeedGroups, num_agents: int) -> Iterator[Bucket]:
    sizes = np.array([len(group) for group in seed_groups], dtype=int)
    start = 0
    for size in np.unique(sizes):
        groups = np.flatnonzero(sizes == size)
        members = np.array([seed_groups[k] for k in groups], dtype=int)
        positions = members[:, :, None] * num_agents + members[:, None, :]
        yield Bucket(groups, members, positions.ravel(), start)
        start += positions.size
