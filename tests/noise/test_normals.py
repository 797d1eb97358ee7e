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
    NormalArray,
    precision_of,
    transform_words,
)

DTYPES = [np.float32, np.float64]
OWNER = Owner((0,))
NUM_VALUES = 1 << 22


def transform(words: Any, dtype: Any) -> NormalArray:
    words = np.ascontiguousarray(words, np.uint32)
    out = np.empty((len(words), 2, PAIRS_PER_BLOCK), dtype)
    buffers = np.empty((NUM_BUFFERS, len(words), PAIRS_PER_BLOCK), dtype)
    transform_words(words, out, buffers=buffers)
    return out


def transform_compiled(words: Any, dtype: Any) -> NormalArray:
    words = np.ascontiguousarray(words, np.uint32)
    out = np.full((len(words), 2, PAIRS_PER_BLOCK), np.nan, dtype)
    pytest.importorskip("corn.noise.compiled", exc_type=ImportError).transform_words(words, out)
    return out


def exact_pair(words: list[int]) -> tuple[float, float]:
    """Box–Muller as a book has it, on one pair's words."""
    u = (words[0] * 2**32 + words[1] + 0.5) / 2**64
    angle = words[2] * 2 % 2**32
    angle = angle - 2**32 if angle >= 2**31 else angle
    x = angle / 2**32 + (words[3] / 2**63 if len(words) == 4 else 0.0)
    r, sign = math.sqrt(-2 * math.log(u)), -1 if words[2] >= 2**31 else 1
    return sign * r * math.cos(math.pi * x), r * math.sin(math.pi * x)


def draw(step: int, *, dtype: Any = np.float32, stream: int = 0, size: int = NUM_VALUES) -> Any:
    out = np.empty(size, dtype)
    address = StreamAddress(OWNER, bytes(32), step, stream)
    SecureSource({OWNER: Secret(b"a key of thirty-two bytes, yes!!")}).fill(out, address)
    return out.astype(np.float64)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-14)])
def test_transform_matches_the_formula(dtype: Any, tolerance: float) -> None:
    num_words = precision_of(dtype).words_per_pair
    words = np.random.default_rng(1).integers(0, 2**32, (2, num_words, 512), dtype=np.uint32)
    found = transform(words, dtype)
    for block, pair in itertools.product(range(2), range(512)):
        expected = exact_pair(words[block, :, pair].tolist())
        np.testing.assert_allclose(found[block, :, pair], expected, rtol=0, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_words_give_finite_values_and_the_documented_largest(dtype: Any) -> None:
    num_words = precision_of(dtype).words_per_pair
    extremes = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1]
    cases = list(itertools.product(extremes, repeat=num_words))
    words = np.zeros((-(-len(cases) // 512), num_words, 512), np.uint32)
    for index, case in enumerate(cases):
        words[index // 512, :, index % 512] = case
    found = transform(words, dtype)
    assert np.array_equal(transform_compiled(words, dtype), found)
    assert np.isfinite(found).all()
    assert np.abs(found).max() == pytest.approx(math.sqrt(130 * math.log(2)), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_compiled_transform_gives_the_same_bits(dtype: Any) -> None:
    shape = (600, precision_of(dtype).words_per_pair, 512)
    words = np.random.default_rng(2).integers(0, 2**32, shape, dtype=np.uint32)
    assert np.array_equal(transform_compiled(words, dtype), transform(words, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sign_of_the_extreme_tail_is_fair(dtype: Any) -> None:
    words = np.zeros((1, precision_of(dtype).words_per_pair, 512), np.uint32)
    words[0, 2, 0], words[0, 2, 1] = 0, 1 << 31
    found = transform(words, dtype)
    assert found[0, 0, 0] == -found[0, 0, 1] > 9.49


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


def test_far_tails_by_thinning() -> None:
    # Words whose first is small are all a far tail is made of: draw from there alone.
    words = np.random.default_rng(5).integers(0, 2**32, (400, 3, 512), dtype=np.uint32)
    words[:, 0] = 0
    r_squared = (transform(words, np.float32).astype(float) ** 2).sum(axis=1).ravel()
    # r² beyond 64 ln 2, given that it is there, is exponential with mean 2.
    assert stats.kstest(r_squared - 64 * math.log(2), "expon", (0, 2)).pvalue > 1e-3


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
