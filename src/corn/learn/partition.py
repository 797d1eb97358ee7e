"""Splits of samples into training, validation and test parts, and partitions over agents."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from corn.checks import FloatArray, IntArray, require, require_count, require_in_range

# The fraction of all samples for tests, and of the others to measure models while they train.
TEST_FRACTION = 0.2
VALIDATION_FRACTION = 0.1

AgentRows: TypeAlias = list[IntArray]
"""The row numbers of each agent's samples: disjoint and complete."""


@dataclass(frozen=True, eq=False)
class Split:
    """The samples of each part: three disjoint arrays of row numbers that cover all rows."""

    train: IntArray
    validation: IntArray
    test: IntArray


def split_samples(num_samples: int, *, seed: int) -> Split:
    """Draw a fifth for tests, then a tenth for validation, of public benchmarks only."""
    num_test = round(num_samples * TEST_FRACTION)
    num_validation = round((num_samples - num_test) * VALIDATION_FRACTION)
    order = np.random.default_rng(require_count("seed", seed, least=0)).permutation(num_samples)
    test, validation, train = np.split(order, [num_test, num_test + num_validation])
    return Split(train=train, validation=validation, test=test)


def toss_coins(contents: Iterable[bytes], *, seed: int) -> FloatArray:
    """Return two independent uniform numbers in [0, 1) for each sample, shape (samples, 2).

    They follow from the public seed, the content of the sample, and how many samples before it have
    the same content. So where a sample is added, removed or changed, all others keep their coins.
    """
    key = hashlib.blake2b(str(require_count("seed", seed, least=0)).encode()).digest()
    seen: Counter[bytes] = Counter()
    coins = bytearray()
    for content in contents:
        name = hashlib.blake2b(content, digest_size=32).digest()
        numbered = name + seen[name].to_bytes(8, "big")
        coins += hashlib.blake2b(numbered, digest_size=16, key=key, person=b"corn coins").digest()
        seen[name] += 1
    # 53 bits are what a double holds exactly.
    return (np.frombuffer(coins, "<u8").reshape(-1, 2) >> 11).astype(np.float64) * 2.0**-53


def split_by_coins(coins: FloatArray, *, test_fraction: float) -> Split:
    """Put each sample into a part by its own coin, so that sizes are random; one may be empty."""
    order = np.argsort(coins, kind="stable")
    limits = test_fraction, test_fraction + (1 - test_fraction) * VALIDATION_FRACTION
    test, validation, train = np.split(order, np.searchsorted(coins[order], limits))
    return Split(train=train, validation=validation, test=test)


def deal_by_coins(coins: FloatArray, num_agents: int) -> AgentRows:
    """Assign each sample to an agent by its own coin; an agent may get none."""
    agents = (coins * num_agents).astype(np.int64)
    return [np.flatnonzero(agents == agent) for agent in range(num_agents)]


def partition_samples(spec: str, labels: ArrayLike, num_agents: int, *, seed: int) -> AgentRows:
    """Assign samples to agents by ``iid``, ``dirichlet:α`` (default 10) or ``shards:k`` (2).

    - iid: at random, and sizes differ by at most one.
    - dirichlet: each label's samples in proportions drawn from a Dirichlet distribution. A small α
      gives agents few labels and uneven sizes. The paper uses α = 10. An agent without any sample
      gets one from the agent with the most.
    - shards: samples are sorted by label and cut into k equal shards for each agent.
    """
    found = np.asarray(labels)
    require(found.ndim == 1, "labels", "one number per sample", f"shape {found.shape}")
    require_count("num_agents", num_agents, most=len(found), advice="each needs a sample")
    kind, _, number = spec.partition(":")
    rng = np.random.default_rng(require_count("seed", seed, least=0))
    if kind in ("dirichlet", "shards"):
        try:
            parameter = float(number or 10) if kind == "dirichlet" else int(number or 2)
        except ValueError:
            kind = ""
    if kind == "dirichlet":
        return _partition_dirichlet(found, num_agents, parameter, rng)
    if kind == "shards":
        return _partition_shards(found, num_agents, int(parameter), rng)
    require(spec == "iid", "partition", "iid, dirichlet:ALPHA or shards:K", repr(spec))
    return [np.sort(part) for part in np.array_split(rng.permutation(len(found)), num_agents)]


def _partition_dirichlet(
    labels: IntArray, num_agents: int, concentration: float, rng: np.random.Generator
) -> AgentRows:
    # Beyond these the variates behind a draw may underflow or overflow.
    require_in_range("concentration", concentration, 1e-6, 1e6, advice="the paper uses 10")
    parts: list[list[IntArray]] = [[] for _ in range(num_agents)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        proportions = rng.dirichlet(np.full(num_agents, concentration))
        cuts = np.round(np.cumsum(proportions)[:-1] * len(rows)).astype(np.int64)
        for part, piece in zip(parts, np.split(rows, cuts), strict=True):
            part.append(piece)
    joined = [np.sort(np.concatenate(part)) for part in parts]
    for agent, rows in enumerate(joined):
        if not len(rows):
            largest = max(range(num_agents), key=lambda k: len(joined[k]))
            # The agent with most samples has at least two, because there are as many as agents.
            joined[agent], joined[largest] = joined[largest][-1:], joined[largest][:-1]
    return joined


def _partition_shards(
    labels: IntArray, num_agents: int, shards_per_agent: int, rng: np.random.Generator
) -> AgentRows:
    most = len(labels) // num_agents
    require_count("shards_per_agent", shards_per_agent, most=most, advice="none may be empty")
    # Samples of one label come in random order, so that shards do not follow the file's order.
    shuffled = rng.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    shards = np.array_split(order, num_agents * shards_per_agent)
    assigned = rng.permutation(len(shards)).reshape(num_agents, shards_per_agent)
    return [np.sort(np.concatenate([shards[k] for k in own])) for own in assigned]
