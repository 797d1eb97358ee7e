"""Batches: distinct samples, whole epochs, the right weights, a function of seed and step."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from corn.checks import FloatArray, IntArray
from corn.errors import InvalidArgumentError
from corn.learn.batches import (
    AgentData,
    BatchSampler,
    Choices,
    SeededChoices,
    public_width,
    round_rate_down,
)
from corn.noise import Secret
from corn.noise.choices import SecretChoices
from corn.privacy import ClippedQuery


def numbered(sizes: list[int]) -> AgentData:
    """Make samples whose only feature is their row number."""
    total = sum(sizes)
    offsets = tuple(np.cumsum([0, *sizes]).tolist())
    return AgentData(torch.arange(total).double()[:, None], torch.arange(total), offsets)


def poisson(rate: float, batch_size: int) -> ClippedQuery:
    return ClippedQuery(1.0, unit="sample", batch_size=batch_size, sampling_rate=rate)


def in_passes(steps: int, batch_size: int) -> ClippedQuery:
    return ClippedQuery(
        1.0, unit="sample", batch_size=batch_size, sampling="passes", steps_per_pass=steps
    )


def every_step(batch_size: int) -> ClippedQuery:
    return ClippedQuery(1.0, unit="sample", batch_size=batch_size, sampling="every-step")


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
    sampler = BatchSampler(numbered([400, 200]), [poisson(0.1, 40)], choices=seeded(0))
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
@pytest.mark.parametrize("size", [1, 11, 12, 13, 16, 40])
def test_a_pass_has_the_planned_slots_whatever_the_number_of_samples(kind: str, size: int) -> None:
    """Three batches of four slots: a sample is in one at most, and no slot is empty in vain."""
    query, choices = in_passes(3, 4), [make_choices(kind)]
    compact = BatchSampler(numbered([size]), [query], choices=choices)
    protected = BatchSampler.of_agent(query, numbered([size]), choices)
    for sampler in (compact, protected):
        for first in range(0, 30, 3):
            batches = [sampler.draw(first + k) for k in range(3)]
            rows = [batch.targets[batch.weights > 0].tolist() for batch in batches]
            taken = [row for own in rows for row in own]
            assert len(set(taken)) == len(taken) == min(size, 12)
            for own, batch in zip(rows, batches, strict=True):
                assert set(batch.weights[batch.weights > 0].tolist()) <= {0.25}
                assert batch.targets.shape[1] == (4 if sampler is protected else max(1, len(own)))


def test_rows_take_the_slots_of_a_pass_at_random() -> None:
    """Each row is in each slot equally often, with more rows than slots and with fewer."""
    passes = 4000
    for size in (3, 9):
        choices = [make_choices("secret")]
        sampler = BatchSampler.of_agent(in_passes(2, 3), numbered([size]), choices)
        times = np.zeros((6, size))
        for number in range(2 * passes):
            batch = sampler.draw(number)
            for place, (row, weight) in enumerate(
                zip(batch.targets[0].tolist(), batch.weights[0].tolist(), strict=True)
            ):
                times[3 * (number % 2) + place, row] += weight > 0
        expected = np.full(times.shape, passes / max(size, 6))
        assert (
            stats.chisquare(times.ravel(), expected.ravel() * times.sum() / expected.sum()).pvalue
            > 1e-3
        )


def test_every_step_draws_anew_where_noise_protects_samples() -> None:
    """Passes would be of one length for 8 samples and of another for 7."""
    sampler = BatchSampler.of_agent(every_step(4), numbered([8]), [make_choices("secret")])
    shared = [
        len(set(sampler.draw(k).targets[0].tolist()) & set(sampler.draw(k + 1).targets[0].tolist()))
        for k in range(0, 400, 2)
    ]
    assert np.mean(shared) == pytest.approx(2, abs=0.3)


@pytest.mark.parametrize("kind", ["seeded", "secret"])
def test_each_agent_has_its_own_rate_and_samples_are_independent(kind: str) -> None:
    """Batch sizes have the mean and variance of independent coins; pairs occur as often as due."""
    sizes, rates, steps = [60, 30, 5], [0.1, 0.2, 1.0], 3000
    queries = [poisson(rate, 6) for rate in rates]
    sampler = BatchSampler(numbered(sizes), queries, choices=[make_choices(kind)])
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

        draw_positions = draw_order

    assert Fraction(limit) <= Fraction(1, 3) < Fraction(limit) + Fraction(1, 2**53)
    below = limit - 2.0**-53
    coins = Given([below, limit, 1 - 2.0**-53])
    sampler = BatchSampler(numbered([3]), [poisson(1 / 3, 1)], choices=[coins])
    assert [rows.tolist() for rows in sampler.choose_rows(0)] == [[0]]


def test_protected_batches_have_one_shape_for_any_data() -> None:
    """The same samples are in them as in compact batches, at random positions."""
    query, width, positions = poisson(0.05, 20), public_width(20), []
    for size in (1, 100, 400, 500):
        data, choices = numbered([size]), seeded(0)
        compact = BatchSampler(data, [query], choices=choices)
        protected = BatchSampler.of_agent(query, data, choices)
        for step in range(100):
            one, other = compact.draw(step), protected.draw(step)
            assert other.targets.shape == (1, width)
            present = other.weights > 0
            assert set(other.weights[present].tolist()) <= {0.05}
            assert sorted(other.targets[present].tolist()) == one.targets[one.weights > 0].tolist()
            positions += np.flatnonzero(present[0]).tolist()
    times = np.bincount(positions, minlength=width)
    assert stats.chisquare(times).pvalue > 1e-3


@given(
    query=st.sampled_from([poisson(0.2, 4), in_passes(3, 4), every_step(4)]),
    size=st.integers(1, 11),
    step=st.integers(0, 8),
    secret=st.binary(min_size=32, max_size=32),
)
def test_one_sample_more_moves_no_other(
    query: ClippedQuery, size: int, step: int, secret: bytes
) -> None:
    """With equal coins and orders, where slots are left."""
    if query.sampling == "every-step":
        size = min(size, 3)
    choices = [SecretChoices(coins=Secret(secret), orders=Secret(secret))]
    found = []
    for count in (size, size + 1):
        batch = BatchSampler.of_agent(query, numbered([count]), choices).draw(step)
        found.append(torch.where(batch.weights > 0, batch.targets, -1))
    found[1][found[1] == size] = -1
    assert torch.equal(*found)


def test_batches_wider_than_the_public_width_are_padded_to_a_multiple() -> None:
    query = poisson(1.0, 20)
    batch = BatchSampler.of_agent(query, numbered([300]), seeded(0)).draw(0)
    assert int((batch.weights > 0).sum()) == 300
    width = public_width(20)
    assert batch.weights.shape[1] == -(-300 // width) * width


def test_an_empty_poisson_batch_has_no_weight() -> None:
    queries = [poisson(1e-9, 2), poisson(1.0, 2)]
    batch = BatchSampler(numbered([4, 4]), queries, choices=seeded(0)).draw(0)
    assert batch.weights.sum(dim=1).tolist() == [0, 2]
    alone = BatchSampler.of_agent(queries[0], numbered([4]), seeded(0)).draw(0)
    assert alone.weights.tolist() == [[0.0] * public_width(2)]


def test_sample_level_weights_do_not_grow_for_small_agents() -> None:
    """An agent with fewer samples than a batch must not give each of them more than 1/B."""
    sampler = BatchSampler(numbered([3, 9]), [every_step(6)], choices=seeded(0))
    assert sampler.draw(0).weights.max().item() == pytest.approx(1 / 6)


def test_padding_is_a_sample_of_the_same_agent() -> None:
    """No agent's gradient may depend on another's samples, not even with weight zero."""
    data = numbered([9, 2, 4])
    uneven = BatchSampler(data, batch_size=6, choices=seeded(0, 1))
    sparse = BatchSampler(data, [poisson(0.2, 2)], choices=seeded(0, 1))
    for sampler in (uneven, sparse):
        for step in range(20):
            for cell, rows in enumerate(sampler.draw(step).targets.tolist()):
                first, last = data.offsets[cell % 3], data.offsets[cell % 3 + 1]
                assert all(first <= row < last for row in rows)


def test_inconsistent_agent_data_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="none for agent 1"):
        numbered([2, 0])
    with pytest.raises(InvalidArgumentError):
        AgentData(torch.zeros(3, 1), torch.zeros(2), (0, 3))


def test_batches_too_large_to_sum_accurately_are_refused() -> None:
    """The rounding of the sum would exceed 1 % of one sample's sensitivity."""
    with pytest.raises(InvalidArgumentError, match="batch_size must be smaller, found 5,000,000"):
        BatchSampler(numbered([3]), [every_step(5_000_000)], choices=seeded(0))
