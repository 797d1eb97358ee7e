"""Batches: distinct samples, whole epochs, the right weights, a function of seed and step."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from corn.arrays import FloatArray, IntArray
from corn.errors import InvalidArgumentError
from corn.learn.batches import AgentData, BatchSampler
from corn.learn.sampling import Choices, SeededChoices, round_rate_down, usual_width
from corn.noise import Secret
from corn.noise.choices import SecretChoices


def numbered(sizes: list[int]) -> AgentData:
    """Make samples whose only feature is their row number."""
    total = sum(sizes)
    offsets = tuple(np.cumsum([0, *sizes]).tolist())
    return AgentData(torch.arange(total).double()[:, None], torch.arange(total), offsets)


def seeded(*seeds: int) -> list[Choices]:
    return [SeededChoices(seed) for seed in seeds]


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
    batch = BatchSampler(data, batch_size=batch_size, choices=seeded(seed, seed + 1)).draw(step)
    for cell, (rows, weights) in enumerate(zip(batch.targets, batch.weights, strict=True)):
        agent = cell % len(sizes)
        own = rows[weights > 0].tolist()
        assert len(set(own)) == len(own) == min(batch_size, sizes[agent])
        assert all(data.offsets[agent] <= row < data.offsets[agent + 1] for row in own)
        assert weights.sum().item() == pytest.approx(1)
        assert batch.inputs[cell, :, 0].tolist() == rows.tolist()
    assert batch.is_average == (len(set(batch.weights.flatten().tolist())) == 1)


def test_an_epoch_uses_every_sample_once() -> None:
    sampler = BatchSampler(numbered([12]), batch_size=4, choices=seeded(0))
    epochs = [
        sorted(torch.cat([sampler.draw(3 * e + k).targets[0] for k in range(3)]).tolist())
        for e in range(2)
    ]
    assert epochs == [list(range(12))] * 2


def test_batches_do_not_depend_on_earlier_draws() -> None:
    one, other = (BatchSampler(numbered([9, 5]), batch_size=3, choices=seeded(4)) for _ in range(2))
    for step in (0, 1, 2, 7):
        one.draw(step)
    assert torch.equal(one.draw(5).targets, other.draw(5).targets)


def test_poisson_sampling_has_the_right_rate_and_a_fixed_divisor() -> None:
    sampler = BatchSampler(
        numbered([400, 200]),
        batch_size=40,
        choices=seeded(0),
        rates=[0.1, 0.1],
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


def make_choices(kind: str) -> Choices:
    if kind == "seeded":
        return SeededChoices(7)
    return SecretChoices(coins=Secret(bytes(32)), orders=Secret(bytes(32)))


@pytest.mark.parametrize("kind", ["seeded", "secret"])
def test_a_sample_is_in_at_most_one_batch_of_a_pass(kind: str) -> None:
    """Replay all batches: after T of them a sample was in at most as many as passes were begun."""
    sizes, batch, num_steps = [23, 8, 11], 4, 57
    sampler = BatchSampler(numbered(sizes), batch_size=batch, choices=[make_choices(kind)])
    taken = np.zeros(sum(sizes), int)
    used: list[set[int]] = [set() for _ in sizes]
    most_used = np.zeros(len(sizes), int)
    for number in range(num_steps):
        for agent, rows in enumerate(sampler.choose_rows(number)):
            assert len(set(rows)) == len(rows) == batch
            taken[rows] += 1
            if number % (sizes[agent] // batch) == 0:
                used[agent] = set()
            assert not used[agent] & set(rows.tolist())
            used[agent] |= set(rows.tolist())
        offsets = np.cumsum([0, *sizes])
        for agent, size in enumerate(sizes):
            most_used[agent] = taken[offsets[agent] : offsets[agent + 1]].max()
            assert most_used[agent] <= -(-(number + 1) // (size // batch))
    # The agent without leftover samples reaches the bound: no fewer could be promised.
    assert most_used[1] == -(-num_steps // (sizes[1] // batch))


@pytest.mark.parametrize("kind", ["seeded", "secret"])
def test_each_agent_has_its_own_rate_and_samples_are_independent(kind: str) -> None:
    """Batch sizes have the mean and variance of independent coins; pairs occur as often as due."""
    sizes, rates, steps = [60, 30, 5], [0.1, 0.2, 1.0], 3000
    sampler = BatchSampler(
        numbered(sizes),
        batch_size=6,
        choices=[make_choices(kind)],
        rates=rates,
        divide_by_batch_size=True,
    )
    present = np.zeros((steps, sum(sizes)), bool)
    for step in range(steps):
        present[step, np.concatenate(sampler.choose_rows(step))] = True
    parts = np.split(present, np.cumsum(sizes)[:-1], axis=1)
    for part, size, rate in zip(parts, sizes, rates, strict=True):
        counts = part.sum(axis=1)
        variance = size * rate * (1 - rate)
        assert counts.mean() == pytest.approx(size * rate, abs=4 * (variance / steps) ** 0.5)
        assert counts.var() == pytest.approx(variance, rel=0.12)
    one, other = present[:, 0], present[:, 65]
    for pair in ((one, other), (one[:-1], one[1:]), (present[:, 0], present[:, 1])):
        assert stats.chi2_contingency(np.histogram2d(*pair, bins=2)[0]).pvalue > 1e-3


def test_a_sample_is_taken_exactly_at_the_rate_rounded_down() -> None:
    """Of two neighbouring coins the lower is below a third, the upper is not."""
    limit = round_rate_down(1 / 3)

    @dataclass
    class Given:
        coins: list[float]

        def draw_coins(self, _: int, sizes: Sequence[int]) -> FloatArray:
            return np.array(self.coins[: sum(sizes)])

        def draw_order(self, agent: int, number: int, *, size: int) -> IntArray:
            raise NotImplementedError(agent, number, size)

    assert Fraction(limit) <= Fraction(1, 3) < Fraction(limit) + Fraction(1, 2**53)
    below = limit - 2.0**-53
    sampler = BatchSampler(
        numbered([3]), batch_size=1, choices=[Given([below, limit, 1 - 2.0**-53])], rates=[1 / 3]
    )
    assert [rows.tolist() for rows in sampler.choose_rows(0)] == [[0]]


def test_widths_show_no_counts_where_they_are_hidden() -> None:
    data = numbered([400])
    common: Any = {"batch_size": 20, "choices": seeded(0), "rates": [0.05]}
    shown, hidden = BatchSampler(data, **common), BatchSampler(data, **common, hides_counts=True)
    batches = [(shown.draw(step), hidden.draw(step)) for step in range(300)]
    assert len({one.targets.shape for one, _ in batches}) > 10
    assert {other.targets.shape for _, other in batches} == {(1, usual_width(400, 0.05))}
    for one, other in batches:
        width = one.targets.shape[1]
        assert torch.equal(one.targets, other.targets[:, :width])
        assert not other.weights[:, width:].any()


def test_batches_wider_than_usual_are_padded_to_a_multiple() -> None:
    class Heads:
        def draw_coins(self, _: int, sizes: Sequence[int]) -> FloatArray:
            return np.zeros(sum(sizes))

        def draw_order(self, agent: int, number: int, *, size: int) -> IntArray:
            raise NotImplementedError(agent, number, size)

    sampler = BatchSampler(
        numbered([400]), batch_size=20, choices=[Heads()], rates=[0.05], hides_counts=True
    )
    batch, usual = sampler.draw(0), usual_width(400, 0.05)
    assert int((batch.weights > 0).sum()) == 400
    assert batch.weights.shape[1] % usual == 0
    assert batch.weights.shape[1] < 400 + usual


def test_an_empty_poisson_batch_has_no_weight() -> None:
    sampler = BatchSampler(
        numbered([4, 4]),
        batch_size=2,
        choices=seeded(0),
        rates=[1e-9, 1.0],
        divide_by_batch_size=True,
    )
    for batch in (sampler.draw(0), *sampler.draw_each(0)):
        assert torch.isfinite(batch.weights).all()
    assert sampler.draw(0).weights.sum(dim=1).tolist() == [0, 2]
    assert [float(own.weights.sum()) for own in sampler.draw_each(0)] == [0, 2]


def test_sample_level_weights_do_not_grow_for_small_agents() -> None:
    """An agent with fewer samples than a batch must not give each of them more than 1/B."""
    sampler = BatchSampler(
        numbered([3, 9]), batch_size=6, choices=seeded(0), divide_by_batch_size=True
    )
    assert sampler.draw(0).weights.max().item() == pytest.approx(1 / 6)


def test_padding_is_a_sample_of_the_same_agent() -> None:
    """No agent's gradient may depend on another's samples, not even with weight zero."""
    data = numbered([9, 2, 4])
    uneven = BatchSampler(data, batch_size=6, choices=seeded(0, 1))
    poisson = BatchSampler(
        data, batch_size=2, choices=seeded(0, 1), rates=[0.2] * 3, divide_by_batch_size=True
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
        BatchSampler(
            numbered([3]), batch_size=5_000_000, choices=seeded(0), divide_by_batch_size=True
        )
