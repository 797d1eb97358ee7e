"""Splits and partitions are disjoint and complete, and every agent has a sample."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.errors import InvalidArgumentError
from corn.learn.partition import partition_samples, split_samples

SPECS = ["iid", "dirichlet", "dirichlet:0.01", "dirichlet:1e-6", "dirichlet:1e6", "shards:1"]


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    num_agents=st.integers(1, 60),
    spec=st.sampled_from(SPECS),
    seed=st.integers(0, 2**32),
)
def test_partitions_are_disjoint_and_complete_with_a_sample_per_agent(
    labels: list[int], num_agents: int, spec: str, seed: int
) -> None:
    num_agents = min(num_agents, len(labels))
    parts = partition_samples(spec, labels, num_agents, seed=seed)
    assert len(parts) == num_agents
    assert min(map(len, parts)) >= 1
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))


@pytest.mark.parametrize("spec", SPECS)
def test_same_seed_same_partition(spec: str) -> None:
    labels = np.arange(300) % 3
    first, again, other = (partition_samples(spec, labels, 7, seed=seed) for seed in (1, 1, 2))
    assert all(map(np.array_equal, first, again))
    assert not all(map(np.array_equal, first, other))


def test_concentration_sets_how_skewed_agents_are() -> None:
    labels = np.arange(10_000) % 10

    def spread(concentration: float) -> float:
        parts = partition_samples(f"dirichlet:{concentration}", labels, 10, seed=0)
        shares = [np.bincount(labels[part], minlength=10) / len(part) for part in parts]
        return float(np.std(shares))

    assert spread(0.1) > 3 * spread(10) > 9 * spread(1000)


def test_two_shards_hold_few_labels() -> None:
    labels = np.arange(1000) % 10
    parts = partition_samples("shards:2", labels, 10, seed=0)
    assert max(len(np.unique(labels[part])) for part in parts) <= 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dirichlet:much", "partition must be iid"),
        ("dirichlet:0", "concentration must be"),
        ("shards:9", "at most 4, found 9"),
        ("shards:1.5", "found 'shards:1.5'"),
        ("iid:5", "found 'iid:5'"),
    ],
)
def test_bad_partition_specs_are_refused(spec: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        partition_samples(spec, np.zeros(8), 2, seed=0)


@given(num_samples=st.integers(10, 500), seed=st.integers(0, 99))
def test_splits_are_disjoint_and_complete(num_samples: int, seed: int) -> None:
    split = split_samples(num_samples, seed=seed)
    rows = np.concatenate([split.train, split.validation, split.test])
    assert sorted(rows.tolist()) == list(range(num_samples))
    assert len(split.test) == round(num_samples * 0.2)
