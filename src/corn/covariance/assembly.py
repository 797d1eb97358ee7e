"""Seed groups as arrays: from blocks to what coalitions cannot know, and gradients back.

Both directions are one sparse matrix per chunk of coalitions, so that a step of the solver is a few
large array operations; chunks keep the dense work small however many coalitions there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from corn.arrays import FloatArray, IntArray
from corn.covariance.coalitions import Coalitions
from corn.covariance.groups import SeedGroups
from corn.errors import InvalidArgumentError

_CHUNK_ENTRIES = 4_000_000
_MAX_NONZEROS = 60_000_000


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
        """The diagonal blocks of an (n, n) matrix on these groups, shape (k, m, m)."""
        blocks: FloatArray = matrix[self.members[:, :, None], self.members[:, None, :]]
        return blocks


class Assembly:
    """Adds up private noise and the blocks of unknown groups, for chunks of coalitions."""

    def __init__(self, seed_groups: SeedGroups, coalitions: Coalitions, num_agents: int) -> None:
        self.num_agents = num_agents
        self.coalitions = coalitions
        self.seed_groups = seed_groups
        self.buckets = tuple(_stack(seed_groups, num_agents))
        self._require_memory(seed_groups)
        size = max(1, _CHUNK_ENTRIES // num_agents**2)
        self.chunks = [slice(s, s + size) for s in range(0, len(coalitions), size)]
        everyone = np.ones((1, len(seed_groups)), dtype=bool)
        self._place_all = self._placement(everyone)
        self._place = [self._placement(coalitions.unknown[chunk]) for chunk in self.chunks]

    def stack(self, per_group: Sequence[FloatArray]) -> list[FloatArray]:
        """Blocks listed by group, shape (m, m) each, as one array per bucket."""
        return [np.stack([per_group[k] for k in bucket.groups]) for bucket in self.buckets]

    def total(self, private_variance: FloatArray, blocks: Sequence[FloatArray]) -> FloatArray:
        """R: everything that is added, shape (n, n)."""
        matrices = self._add(self._place_all, private_variance, blocks)
        return matrices.reshape(matrices.shape[1:])

    def hidden(
        self, private_variance: FloatArray, blocks: Sequence[FloatArray], chunk: int
    ) -> FloatArray:
        """R^(I) for each coalition of a chunk, shape (c, n, n)."""
        return self._add(self._place[chunk], private_variance, blocks)

    def pull_back(self, matrices: FloatArray, chunk: int) -> list[FloatArray]:
        """Σ over coalitions that do not know group k of their matrices on H_k, per bucket."""
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
        """The 0/1 matrix that adds the entries of all blocks into (c, n, n) matrices."""
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
                f"about {40e-9 * nonzeros:.0f} GB: reduce max_colluders, the number of agents, or "
                "the number of seed groups"
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
