"""The transform gives the normals of its words, and what it gives is normally distributed."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from corn.errors import InvalidArgumentError
from corn.noise import Owner, Secret, SecureSource, StreamAddress
from corn.noise.normals import (
    NUM_BUFFERS,
    PAIRS_PER_BLOCK,
    TAIL,
    TAIL_WORDS_PER_BLOCK,
    NormalArray,
    precision_of,
    sum_normals,
)

DTYPES = [np.float32, np.float64]
OWNER = Owner((0,))
NUM_VALUES = 1 << 22


def transform(words: Any, dtype: Any) -> NormalArray:
    """The normals of blocks of words, shape (blocks, 2, 512)."""
    words = np.ascontiguousarray(words, np.uint32)
    out = np.full((len(words), 2, PAIRS_PER_BLOCK), np.nan, dtype)
    buffers = np.empty((NUM_BUFFERS, len(words), PAIRS_PER_BLOCK), dtype)
    sum_normals(words[np.newaxis], np.ones(1, dtype), out, buffers=buffers)
    return out


def transform_compiled(words: Any, dtype: Any) -> NormalArray:
    compiled = pytest.importorskip("corn.noise.compiled", exc_type=ImportError)
    out = np.full((len(words), 2, PAIRS_PER_BLOCK), np.nan, dtype)
    compiled.sum_normals(words[np.newaxis], np.ones(1, dtype), out)
    return out


def random_words(num_blocks: int, dtype: Any, *, seed: int) -> Any:
    shape = (num_blocks, precision_of(dtype).words_per_block)
    return np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32)


def split_block(words: list[int], dtype: Any) -> list[tuple[int, int, int, int]]:
    """Each pair's upper and lower words for u and φ, as the module's text has it."""
    u, phi, low = words[:512], words[512:1024], words[1024:]
    if dtype is np.float64:
        return list(zip(u, phi, low[:512], low[512:], strict=True))
    spare = itertools.cycle(low)
    # Without a lower word the middle of its range, which is half a step more.
    lower = [next(spare) if word < 2**20 else 2**31 - 0.5 for word in u]
    return [(*pair, 0) for pair in zip(u, phi, lower, strict=True)]  # type: ignore[misc]


def exact_pair(u: int, phi: int, low_u: float, low_phi: int) -> tuple[float, float]:
    """Box–Muller as a book has it, on one pair's words."""
    uniform = (u // 2 * 2**32 + low_u + 0.5) / 2**63
    angle = phi * 2 % 2**32
    angle = angle - 2**32 if angle >= 2**31 else angle
    x = angle / 2**32 + low_phi / 2**63
    r, sign = math.sqrt(-2 * math.log(uniform)), -1 if phi >= 2**31 else 1
    return sign * r * math.cos(math.pi * x), r * math.sin(math.pi * x)


def draw(step: int, *, dtype: Any = np.float32, stream: int = 0, size: int = NUM_VALUES) -> Any:
    out = np.empty(size, dtype)
    address = StreamAddress(OWNER, bytes(32), step, stream)
    SecureSource({OWNER: Secret(b"a key of thirty-two bytes, yes!!")}).fill(out, address)
    return out.astype(np.float64)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-14)])
def test_transform_matches_the_formula(dtype: Any, tolerance: float) -> None:
    words = random_words(6, dtype, seed=1)
    words[2:4, :512] >>= 12  # all pairs are tails
    words[4:, 100:103] >>= 20  # three are
    found = transform(words, dtype)
    for block, own in zip(found, words, strict=True):
        expected = [exact_pair(*pair) for pair in split_block(own.tolist(), dtype)]
        np.testing.assert_allclose(block.T, expected, rtol=0, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_words_give_finite_values_and_the_documented_largest(dtype: Any) -> None:
    extremes = [0, 1, 2**20 - 1, 2**20, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1]
    words = np.zeros((len(extremes), precision_of(dtype).words_per_block), np.uint32)
    for block, low in zip(words, extremes, strict=True):
        block[1024:] = low
        block[: len(extremes) ** 2] = np.repeat(extremes, len(extremes))
        block[512 : 512 + len(extremes) ** 2] = np.tile(extremes, len(extremes))
    found = transform(words, dtype)
    assert np.array_equal(transform_compiled(words, dtype), found)
    assert np.isfinite(found).all()
    assert np.abs(found).max() == pytest.approx(math.sqrt(128 * math.log(2)), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_sums_have_the_same_bits(dtype: Any) -> None:
    compiled = pytest.importorskip("corn.noise.compiled", exc_type=ImportError)
    words = random_words(600, dtype, seed=2).reshape(3, 200, -1)
    words[:, 50:100, :512] >>= 12
    weights = np.array([0.3, -1.7, 1e-3], dtype)
    found, expected = np.empty((2, 200, 2, PAIRS_PER_BLOCK), dtype)
    compiled.sum_normals(words, weights, found)
    buffers = np.empty((NUM_BUFFERS, 200, PAIRS_PER_BLOCK), dtype)
    sum_normals(words, weights, expected, buffers=buffers)
    assert np.array_equal(found, expected)
    first, second, third = (transform(own, dtype) for own in words)
    by_hand = (weights[0] * first + weights[1] * second) + weights[2] * third
    assert np.array_equal(expected, by_hand)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sign_of_the_extreme_tail_is_fair(dtype: Any) -> None:
    words = np.zeros((1, precision_of(dtype).words_per_block), np.uint32)
    words[0, 513] = 1 << 31
    found = transform(words, dtype)
    assert found[0, 0, 0] == -found[0, 0, 1] > 9.41


def test_where_lower_words_are_left_out_a_radius_is_off_by_less_than_a_step() -> None:
    whole = np.geomspace(TAIL, 2**30, 100_000).astype(np.int64)  # u up to ½
    r, middle = (np.sqrt(-2 * np.log((whole + shift) / 2**31)) for shift in (0, 0.5))
    assert (np.abs(r - middle) < np.spacing(middle.astype(np.float32))).all()


def test_more_tails_in_a_block_than_lower_words_are_as_rare_as_said() -> None:
    assert 0.8e-30 < stats.binom.sf(TAIL_WORDS_PER_BLOCK, PAIRS_PER_BLOCK, TAIL / 2**31) < 1e-30


def test_other_types_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="float32 or float64, found float16"):
        precision_of(np.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_moments(dtype: Any) -> None:
    z = draw(1, dtype=dtype)
    # Standard errors of the k-th moment: √((E z^2k − (E z^k)²)/N).
    for k, (mean, variance) in {
        1: (0, 1),
        2: (1, 2),
        3: (0, 15),
        4: (3, 96),
        6: (15, 10170),
    }.items():
        error = (float(np.mean(z**k)) - mean) / math.sqrt(variance / len(z))
        assert abs(error) < 4.5, f"moment {k} is off by {error:.1f} standard errors"


@pytest.mark.parametrize("dtype", DTYPES)
def test_distribution(dtype: Any) -> None:
    assert stats.kstest(draw(2, dtype=dtype, size=1 << 20), "norm").pvalue > 1e-3
    # Both halves of a block, cosines and sines, separately.
    halves = draw(3, dtype=dtype, size=1 << 20).reshape(-1, 2, PAIRS_PER_BLOCK)
    for half in range(2):
        assert stats.kstest(halves[:, half].ravel(), "norm").pvalue > 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_tails_to_four_and_a_half_sigma(dtype: Any) -> None:
    z = draw(4, dtype=dtype)
    for threshold in (2.0, 3.0, 3.5, 4.0, 4.5):
        expected = len(z) * stats.norm.sf(threshold)
        for count in ((z > threshold).sum(), (z < -threshold).sum()):
            assert abs(count - expected) < 4.5 * math.sqrt(expected), (threshold, count, expected)


@pytest.mark.parametrize("bits", [12, 16, 20, 31])
def test_far_tails_by_thinning(bits: int) -> None:
    # Words whose first is small are all a far tail is made of: draw from there alone. As lower
    # words are few, only so many pairs a block are.
    words = random_words(6000, np.float32, seed=5)
    words[:, :512] |= 1 << 31
    words[:, :TAIL_WORDS_PER_BLOCK] = (
        random_words(6000, np.float32, seed=6)[:, :TAIL_WORDS_PER_BLOCK] >> bits
    )
    normals = transform(words, np.float32)[..., :TAIL_WORDS_PER_BLOCK].astype(float)
    r_squared = (normals**2).sum(axis=1).ravel()
    # r² beyond a bound, given that it is there, is exponential with mean 2.
    assert stats.kstest(r_squared - 2 * bits * math.log(2), "expon", (0, 2)).pvalue > 1e-3


def test_small_values_are_fine_grained() -> None:
    z = np.abs(draw(6))
    near_zero = z[z < 1e-3]
    assert stats.kstest(near_zero / 1e-3, "uniform").pvalue > 1e-3
    assert len(np.unique(near_zero)) > 0.99 * len(near_zero)


def test_no_correlation_across_coordinates_streams_or_steps() -> None:
    z = draw(7)
    others = [np.roll(z, lag) for lag in (1, 2, 3, 511, 512, 513, 1024, 32768)]
    others += [draw(8), draw(7, stream=1), draw(7, dtype=np.float64)]
    limit = 4.5 / math.sqrt(len(z))
    for other in others:
        assert abs(np.mean(z * other)) < limit
        # Squares too: a shared radius would not show in the values.
        assert abs(np.mean((z**2 - 1) * (other**2 - 1))) < 2 * limit
