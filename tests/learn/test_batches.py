"""Batches: distinct samples, whole epochs, the right weights, a function of seed and step."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corn.errors import InvalidArgumentError
from corn.learn.batches import AgentData, BatchSampler


def numbered(sizes: list[int]) -> AgentData:
    """Make samples whose only feature is their row number."""
    total = sum(sizes)
    offsets = tuple(np.cumsum([0, *sizes]).tolist())
    return AgentData(torch.arange(total).double()[:, None], torch.arange(total), offsets)


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    batch_size=st.integers(1, 15),
    step=st.integers(0, 50),
    seed=st.integers(0, 99),
)
def test_batches_are_distinct_samples_of_the_agent(
    sizes: list[int], batch_size: int, step: int, seed: int
) -> None:
    data = numbered(sizes)
    batch = BatchSampler(data, batch_size=batch_size, seeds=[seed, seed + 1]).draw(step)
    for cell, (rows, weights) in enumerate(zip(batch.targets, batch.weights, strict=True)):
        agent = cell % len(sizes)
        own = rows[weights > 0].tolist()
        assert len(set(own)) == len(own) == min(batch_size, sizes[agent])
        assert all(data.offsets[agent] <= row < data.offsets[agent + 1] for row in own)
        assert weights.sum().item() == pytest.approx(1)
        assert batch.inputs[cell, :, 0].tolist() == rows.tolist()
    assert batch.is_average == (len(set(batch.weights.flatten().tolist())) == 1)


def test_an_epoch_uses_every_sample_once() -> None:
    sampler = BatchSampler(numbered([12]), batch_size=4, seeds=[0])
    epochs = [
        sorted(torch.cat([sampler.draw(3 * e + k).targets[0] for k in range(3)]).tolist())
        for e in range(2)
    ]
    assert epochs == [list(range(12))] * 2


def test_batches_do_not_depend_on_earlier_draws() -> None:
    one, other = (BatchSampler(numbered([9, 5]), batch_size=3, seeds=[4]) for _ in range(2))
    for step in (0, 1, 2, 7):
        one.draw(step)
    assert torch.equal(one.draw(5).targets, other.draw(5).targets)


def test_poisson_sampling_has_the_right_rate_and_a_fixed_divisor() -> None:
    sampler = BatchSampler(
        numbered([400, 200]),
        batch_size=40,
        seeds=[0],
        sampling_rate=0.1,
        divide_by_batch_size=True,
    )
    counts = []
    for step in range(200):
        batch = sampler.draw(step)
        present = batch.weights > 0
        assert set(batch.weights[present].tolist()) <= {1 / 40}
        counts.append(present.sum(dim=1).numpy())
    np.testing.assert_allclose(np.mean(counts, axis=0), [40, 20], rtol=0.05)
    np.testing.assert_allclose(np.var(counts, axis=0), [36, 18], rtol=0.3)


def test_sample_level_weights_do_not_grow_for_small_agents() -> None:
    """An agent with fewer samples than a batch must not give each of them more than 1/B."""
    sampler = BatchSampler(numbered([3, 9]), batch_size=6, seeds=[0], divide_by_batch_size=True)
    assert sampler.draw(0).weights.max().item() == pytest.approx(1 / 6)


def test_padding_is_a_sample_of_the_same_agent() -> None:
    """No agent's gradient may depend on another's samples, not even with weight zero."""
    data = numbered([9, 2, 4])
    uneven = BatchSampler(data, batch_size=6, seeds=[0, 1])
    poisson = BatchSampler(
        data, batch_size=2, seeds=[0, 1], sampling_rate=0.2, divide_by_batch_size=True
    )
    for sampler in (uneven, poisson):
        for step in range(20):
            for cell, rows in enumerate(sampler.draw(step).targets.tolist()):
                first, last = data.offsets[cell % 3], data.offsets[cell % 3 + 1]
                assert all(first <= row < last for row in rows)


def test_inconsistent_agent_data_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="none for agent 1"):
        numbered([2, 0])
    with pytest.raises(InvalidArgumentError, match="must agree on the number of samples"):
        AgentData(torch.zeros(3, 1), torch.zeros(2), (0, 3))


def test_batches_too_large_to_sum_accurately_are_refused() -> None:
    """The rounding of the sum would exceed 1 % of one sample's sensitivity."""
    with pytest.raises(InvalidArgumentError, match="batch_size must be smaller, found 5,000,000"):
        BatchSampler(numbered([3]), batch_size=5_000_000, seeds=[0], divide_by_batch_size=True)
