"""Deal samples out to agents: alike, skewed by label (Dirichlet), or by shards of few labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from corn.arrays import IntArray
from corn.errors import InvalidArgumentError

_MAX_DRAWS = 100

Parts: TypeAlias = list[IntArray]


def partition_iid(labels: ArrayLike, num_agents: int, *, seed: int) -> Parts:
    """Deal samples out at random; sizes differ by at most one.

    Returns row numbers, one array per agent: disjoint, complete, nobody empty. So do the other
    partitions of this module.
    """
    labels = _check(labels, num_agents)
    order = np.random.default_rng(seed).permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, num_agents)]


def partition_dirichlet(
    labels: ArrayLike, num_agents: int, *, concentration: float, seed: int
) -> Parts:
    """Deal each label's samples out in proportions drawn from a Dirichlet distribution.

    Small ``concentration`` α gives agents few labels and uneven sizes; large α is near IID. The
    paper takes α = 10. An agent that would end up with nothing gets one sample of whoever has most.

    >>> parts = partition_dirichlet([0, 0, 0, 1, 1, 1], 2, concentration=1.0, seed=0)
    >>> sorted(np.concatenate(parts).tolist())
    [0, 1, 2, 3, 4, 5]
    """
    labels = _check(labels, num_agents)
    if not 0 < concentration < np.inf:
        raise InvalidArgumentError(
            f"concentration must be positive and finite, found {concentration}: the paper takes 10"
        )
    rng = np.random.default_rng(seed)
    parts: list[list[IntArray]] = [[] for _ in range(num_agents)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        shares = _draw_shares(rng, num_agents, concentration)
        cuts = np.round(np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
        for part, piece in zip(parts, np.split(rows, cuts), strict=True):
            part.append(piece)
    return _leave_nobody_empty([np.sort(np.concatenate(part)) for part in parts])


def partition_shards(
    labels: ArrayLike, num_agents: int, *, shards_per_agent: int = 2, seed: int
) -> Parts:
    """Sort samples by label, cut them into equal shards, and give each agent so many of them.

    With two shards an agent sees at most about two labels.
    """
    labels = _check(labels, num_agents)
    num_shards = num_agents * shards_per_agent
    if shards_per_agent < 1 or num_shards > len(labels):
        raise InvalidArgumentError(
            f"shards_per_agent must be at least 1 and leave no shard of {len(labels)} samples for "
            f"{num_agents} agents empty, found {shards_per_agent}"
        )
    rng = np.random.default_rng(seed)
    # Samples of one label come in random order, so that shards do not follow the file's order.
    shuffled = rng.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    shards = np.array_split(order, num_shards)
    dealt = rng.permutation(num_shards).reshape(num_agents, shards_per_agent)
    return [np.sort(np.concatenate([shards[k] for k in own])) for own in dealt]


@dataclass(frozen=True)
class PartitionSpec:
    """A partition by name: ``iid``, ``dirichlet:α`` (default 10) or ``shards:k`` (default 2).

    >>> PartitionSpec.parse("dirichlet:0.5")
    PartitionSpec(kind='dirichlet', parameter=0.5)
    """

    kind: str
    parameter: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in _DEFAULTS:
            raise InvalidArgumentError(
                f"partition must be iid, dirichlet:ALPHA or shards:K, found {self.kind!r}"
            )
        if self.kind == "iid" and self.parameter is not None:
            raise InvalidArgumentError(f"iid takes no number, found {self.parameter:g}")
        if self.kind == "shards" and not float(self.parameter or 0).is_integer():
            raise InvalidArgumentError(f"shards must be a whole number, found {self.parameter}")

    @classmethod
    def parse(cls, text: str) -> PartitionSpec:
        """Read a spec from text."""
        kind, _, parameter = text.partition(":")
        try:
            return cls(kind, float(parameter) if parameter else _DEFAULTS.get(kind))
        except ValueError as error:
            raise InvalidArgumentError(
                f"partition must be iid, dirichlet:ALPHA or shards:K, found {text!r}"
            ) from error

    def deal(self, labels: ArrayLike, num_agents: int, *, seed: int) -> Parts:
        """Deal samples with these labels out to agents."""
        return self._dealer()(labels, num_agents, seed=seed)

    def _dealer(self) -> Callable[..., Parts]:
        if self.kind == "iid":
            return partition_iid
        if self.kind == "shards":
            return partial(partition_shards, shards_per_agent=int(self.parameter or 0))
        return partial(partition_dirichlet, concentration=self.parameter or 0.0)


_DEFAULTS: dict[str, float | None] = {"iid": None, "dirichlet": 10.0, "shards": 2.0}


def _check(labels: ArrayLike, num_agents: int) -> IntArray:
    found = np.asarray(labels)
    if found.ndim != 1 or not 1 <= num_agents <= len(found):
        raise InvalidArgumentError(
            f"num_agents must be from 1 to the number of samples {found.shape}, found {num_agents}"
        )
    return found.astype(np.int64)


def _draw_shares(
    rng: np.random.Generator, num_agents: int, concentration: float
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    # For tiny α all gamma variates behind a draw can underflow to zero, which gives NaN.
    for _ in range(_MAX_DRAWS):
        shares = rng.dirichlet(np.full(num_agents, concentration))
        if np.isfinite(shares).all():
            return np.asarray(shares)
    shares = np.zeros(num_agents)
    shares[rng.integers(num_agents)] = 1.0
    return shares


def _leave_nobody_empty(parts: Parts) -> Parts:
    for agent, part in enumerate(parts):
        if not len(part):
            richest = max(range(len(parts)), key=lambda k: len(parts[k]))
            parts[agent], parts[richest] = parts[richest][-1:], parts[richest][:-1]
    return parts
