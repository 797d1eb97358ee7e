"""Which coalitions matter: only the largest, and only once per set of seeds they leave unknown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from corn.covariance.groups import SeedGroups
from corn.errors import InvalidArgumentError

_MAX_TABLE_BYTES = 400_000_000


@dataclass(frozen=True, eq=False)
class Coalitions:
    """The constraint sets that remain after pruning.

    Attributes:
        unknown: (coalitions, groups) of bool: whether the group's seed is unknown to the coalition.
        protected: (coalitions, agents) of bool: whose privacy is at stake against it.
        num_before_pruning: how many coalitions of size exactly q there are.
    """

    unknown: NDArray[np.bool_]
    protected: NDArray[np.bool_]
    num_before_pruning: int

    def __len__(self) -> int:
        return len(self.unknown)


def list_coalitions(seed_groups: SeedGroups, *, num_agents: int, max_colluders: int) -> Coalitions:
    """All coalitions of size q, those with equal unknown seeds merged into one.

    A smaller coalition knows less, so it asks for nothing more. Coalitions that leave the same
    seeds unknown see the same noise; together they threaten whoever is outside one of them.
    """
    count = math.comb(num_agents, max_colluders)
    if count * (len(seed_groups) + num_agents + 8 * max_colluders) > _MAX_TABLE_BYTES:
        raise InvalidArgumentError(
            f"{count:,} coalitions of {max_colluders} among {num_agents} agents with "
            f"{len(seed_groups):,} seed groups are too many to check one by one: reduce "
            "max_colluders, the number of agents, or the number of seed groups"
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
        unknown &= ~belongs[member]
    kept, merged = np.unique(np.packbits(unknown, axis=1), axis=0, return_inverse=True)
    protected = np.zeros((len(kept), num_agents), dtype=bool)
    np.logical_or.at(protected, merged.ravel(), outside)
    unpacked = np.unpackbits(kept, axis=1, count=len(seed_groups)).astype(bool)
    return Coalitions(unpacked, protected, count)
