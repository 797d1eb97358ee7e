"""The transform gives the normals of its words, and they are normally distributed."""

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy import stats

from corn.checks import FloatArray
from corn.noise import Owner, Secret, SecureSource, StreamAddress
from corn.noise.normals import (
    ERROR,
    FAILURE,
    FEW_BITS,
    LARGEST,
    PAIRS_PER_BLOCK,
    SPARES_PER_BLOCK,
    WORDS_PER_BLOCK,
    load_compiled,
)
from tests.oracles.normals import sum_normals

OWNER = Owner((0,))
NUM_VALUES = 1 << 22
ALL = 2**32 - 1


def transform(words: Any) -> FloatArray:
    """Return the normals of blocks of words, shape (blocks, 2, 512)."""
    words = np.ascontiguousarray(words, np.uint32)
    out = np.full((len(words), 2, PAIRS_PER_BLOCK), np.nan)
    load_compiled().sum_blocks(words[np.newaxis], 0, np.ones(1), out)
    return out


def random_words(num_blocks: int, *, seed: int) -> Any:
    shape = (num_blocks, WORDS_PER_BLOCK)
    return np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32)


def exact_block(words: list[int], further: float) -> list[tuple[Any, Any]]:
    """Compute Box–Muller in 300 bits; ``further`` is the fraction after each word's last bit."""
    pairs, spare = [], 0
    with mpmath.workprec(300):
        for k in range(PAIRS_PER_BLOCK):
            upper, angle, lower, low_angle = (words[part * 512 + k] for part in range(4))
            u = mpmath.mpf(upper * 2**32 + lower)
            if upper < FEW_BITS or ALL - upper < FEW_BITS:
                place = 2048 + spare % SPARES_PER_BLOCK * 4
                for word in words[place : place + 4]:
                    # Above ¾ the bits are those of 1 − u.
                    u = u * 2**32 + (word if upper < FEW_BITS else ALL - word)
                spare += 1
                u = (u + further) / 2**192
            else:
                u = (u + further) / 2**64
            turn = angle * 4 % 2**32
            x = mpmath.mpf(turn - 2**32 if turn >= 2**31 else turn) / 2**33
            x += (low_angle + mpmath.mpf(further)) / 2**63
            r, sign = mpmath.sqrt(-2 * mpmath.log(u)), -1 if angle >= 2**31 else 1
            pair = (sign * r * mpmath.cospi(x), r * mpmath.sinpi(x))
            pairs.append(pair[::-1] if angle >> 30 & 1 else pair)
    return pairs


def draw(step: int, *, stream: int = 0, size: int = NUM_VALUES) -> FloatArray:
    out = np.empty(size)
    address = StreamAddress(OWNER, bytes(32), step, stream)
    SecureSource({OWNER: Secret(b"a key of thirty-two bytes, yes!!")}).fill(out, address)
    return out


def hard_words() -> Any:
    """Return blocks of usual words, far tails down to 2⁻¹⁴⁰, tiny radii and all boundaries."""
    words = random_words(8, seed=1)
    words[1, :16] >>= 16
    words[2, :16] = ALL - (words[2, :16] >> 16)
    words[3, :16], words[3, 1024:1040] = 0, words[3, 1024:1040] >> 30
    words[4, :16], words[4, 1024:1040] = ALL, ALL - (words[4, 1024:1040] >> 30)
    words[5, :16], words[5, 1024:1040], words[5, 2048::4], words[5, 2049::4] = 0, 0, 0, 7
    words[6, :16], words[6, 1024:1040], words[6, 2048::4] = ALL, ALL, ALL
    edges = [
        0,
        1,
        FEW_BITS - 1,
        FEW_BITS,
        2**31 - 1,
        2**31,
        3 * 2**30 - 1,
        3 * 2**30,
        ALL - FEW_BITS,
    ]
    words[7, : len(edges) ** 2] = np.repeat(edges, len(edges))
    words[7, 512 : 512 + len(edges) ** 2] = np.tile(edges, len(edges))
    words[7, :9] = 2**30  # so that at most 16 pairs of this block take spares
    return words


@pytest.mark.parametrize("further", [0.0, 0.5, 1.0])
def test_computed_normals_are_within_the_stated_error_of_real_ones(further: float) -> None:
    words = hard_words()
    found = transform(words)
    worst = 0.0
    for block, own in zip(found, words, strict=True):
        exact = exact_block(own.tolist(), further)
        for k, pair in enumerate(exact):
            with mpmath.workprec(300):
                if mpmath.hypot(*pair) > LARGEST:
                    continue
                worst = max(
                    worst, *(float(abs(z - p)) for z, p in zip(block[:, k], pair, strict=True))
                )
    # The proof is not tight; a bound that is nearly attained would point to a mistake.
    assert worst < ERROR / 4


def test_failures_are_as_rare_as_stated() -> None:
    beyond = math.exp(-(LARGEST**2) / 2)
    too_many = float(
        mpmath.nsum(
            lambda k: mpmath.binomial(512, k) * mpmath.mpf(2) ** (-15 * k),
            [SPARES_PER_BLOCK + 1, 60],
        )
    )
    assert 0 < too_many < 2.0**-149
    assert beyond + too_many < FAILURE


def test_compiled_sums_have_numpys_bits() -> None:
    words = random_words(600, seed=2).reshape(3, 200, -1)
    words[:, 50:100, :512] >>= 14
    words[:, 100:150, :512] |= 0xFFFF0000
    weights = np.array([0.3, -1.7, 1e-3])
    found, expected = np.empty((2, 200, 2, PAIRS_PER_BLOCK))
    load_compiled().sum_blocks(words, 0, weights, found)
    sum_normals(words, weights, expected)
    assert np.array_equal(found, expected)
    first, second, third = (transform(own) for own in words)
    by_hand = (weights[0] * first + weights[1] * second) + weights[2] * third
    assert np.array_equal(expected, by_hand)
    reference = np.empty((8, 2, PAIRS_PER_BLOCK))
    sum_normals(hard_words()[np.newaxis], np.ones(1), reference)
    assert np.array_equal(transform(hard_words()), reference)


def test_extreme_words_give_finite_nonzero_values() -> None:
    extremes = [0, 1, FEW_BITS - 1, FEW_BITS, 2**31 - 1, 2**31, 3 * 2**30, ALL - 1, ALL]
    words = np.zeros((len(extremes), WORDS_PER_BLOCK), np.uint32)
    for block, low in zip(words, extremes, strict=True):
        block[1024:1536] = block[2048:] = low
        block[: len(extremes) ** 2] = np.repeat(extremes, len(extremes))
        block[512 : 512 + len(extremes) ** 2] = np.tile(extremes, len(extremes))
        block[1536:2048] = 1  # an angle of exactly 0 has probability 2⁻⁶³
    found = transform(words)
    assert np.isfinite(found).all()
    assert np.hypot(found[:, 0], found[:, 1]).min() > 0
    assert 16 < np.abs(found).max() < 16.4


def test_the_sign_of_the_extreme_tail_is_fair() -> None:
    words = np.zeros((1, WORDS_PER_BLOCK), np.uint32)
    words[0, 513] = 1 << 31
    found = transform(words)
    assert found[0, 0, 0] == -found[0, 0, 1] > LARGEST


@pytest.mark.slow
def test_a_hundred_million_draws_are_normal() -> None:
    # Cells of 1/32 from −6 to 6, moments up to the sixth, and exact zeros, of which there are none.
    edges = np.linspace(-6, 6, 385)
    counts, sums, zeros = np.zeros(386, np.int64), np.zeros(7), 0
    num_draws = 24 * NUM_VALUES
    for step in range(24):
        z = draw(100 + step)
        cell = np.clip((z + 6) * 32 + 1, 0, 385).astype(np.int16)
        counts += np.bincount(cell, minlength=386)
        zeros += int((z == 0).sum())
        power = z.copy()
        for k in range(1, 7):
            sums[k] += power.sum()
            power *= z
    expected = num_draws * np.diff(stats.norm.cdf(np.concatenate([[-np.inf], edges, [np.inf]])))
    assert zeros == 0
    assert stats.chisquare(counts, expected).pvalue > 1e-3
    # Standard errors of the k-th moment: √((E z^2k − (E z^k)²)/N).
    for k, (mean, variance) in {
        1: (0, 1),
        2: (1, 2),
        3: (0, 15),
        4: (3, 96),
        6: (15, 10170),
    }.items():
        error = (sums[k] / num_draws - mean) / math.sqrt(variance / num_draws)
        assert abs(error) < 4.5, f"moment {k} is off by {error:.1f} standard errors"


def test_distribution_of_both_halves_of_a_block() -> None:
    halves = draw(3, size=1 << 20).reshape(-1, 2, PAIRS_PER_BLOCK)
    for half in range(2):
        assert stats.kstest(halves[:, half].ravel(), "norm").pvalue > 1e-3


def test_tails_to_four_and_a_half_sigma() -> None:
    z = draw(4)
    for threshold in (2.0, 3.0, 3.5, 4.0, 4.5):
        expected = len(z) * stats.norm.sf(threshold)
        for count in ((z > threshold).sum(), (z < -threshold).sum()):
            assert abs(count - expected) < 4.5 * math.sqrt(expected), (threshold, count, expected)


@pytest.mark.parametrize("bits", [12, 16, 20, 31])
def test_far_tails_by_thinning(bits: int) -> None:
    # Words whose first is small are all a far tail is made of: draw from there alone. As spares are
    # few, only so many pairs a block are.
    words = random_words(6000, seed=5)
    words[:, :512] = 1 << 31
    words[:, :SPARES_PER_BLOCK] = random_words(6000, seed=6)[:, :SPARES_PER_BLOCK] >> bits
    normals = transform(words)[..., :SPARES_PER_BLOCK]
    r_squared = (normals**2).sum(axis=1).ravel()
    # r² beyond a bound, given that it is there, is exponential with mean 2.
    assert stats.kstest(r_squared - 2 * bits * math.log(2), "expon", (0, 2)).pvalue > 1e-3


@pytest.mark.parametrize("bits", [16, 20, 31])
def test_small_radii_by_thinning(bits: int) -> None:
    words = random_words(6000, seed=7)
    words[:, :512] = 1 << 31
    words[:, :SPARES_PER_BLOCK] = ALL - (words[:, 512 : 512 + SPARES_PER_BLOCK] >> bits)
    normals = transform(words)[..., :SPARES_PER_BLOCK]
    one_minus_u = -np.expm1(-(normals**2).sum(axis=1).ravel() / 2)
    assert stats.kstest(one_minus_u * 2.0**bits, "uniform").pvalue > 1e-3
    assert len(np.unique(one_minus_u)) == one_minus_u.size


def test_small_values_are_fine_grained() -> None:
    z = np.abs(draw(6))
    near_zero = z[z < 1e-3]
    assert stats.kstest(near_zero / 1e-3, "uniform").pvalue > 1e-3
    assert len(np.unique(near_zero)) == len(near_zero)


def test_no_correlation_across_coordinates_streams_or_steps() -> None:
    z = draw(7)
    others = [np.roll(z, lag) for lag in (1, 2, 3, 511, 512, 513, 1024, 32768)]
    others += [draw(8), draw(7, stream=1)]
    limit = 4.5 / math.sqrt(len(z))
    for other in others:
        assert abs(np.mean(z * other)) < limit
        # Squares too: a shared radius would not show in the values.
        assert abs(np.mean((z**2 - 1) * (other**2 - 1))) < 2 * limit
