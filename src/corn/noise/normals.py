"""Normals from a keystream: within 2⁻⁴⁵ of real ones, bit for bit the same on every machine.

Box–Muller: a pair of normals is r·(cos φ, sin φ), where r² = −2 ln u for a uniform u in (0, 1) and
φ is a uniform angle. NumPy's and libm's log, sin and cos differ by an ulp between machines, so none
is called here. The polynomials below use only +, −, ×, ÷, √ and conversions from integers, which
IEEE 754 rounds in one way only, and each is a separate array operation that no compiler can fuse.
Two agents therefore draw identical values on any processor with IEEE arithmetic.

Accuracy. Read each pair's words as the leading bits of a real u and a real φ, whose further bits
are unknown. The exact transform of those is a pair of exact normals, and what is computed here
differs from it by at most ``ERROR``, except with probability ``FAILURE`` per pair. The privacy of
floating-point releases rests on these two numbers; ``docs/floats.md`` proves them. Two details
matter. Where u > ¾ the radius is computed from 1 − u, because u itself would round a small radius
away. Where u or 1 − u is below 2⁻¹⁶, 128 more bits are read, because 64 would leave the far tail,
and the smallest radii, with too few.

Words. A block of 512 pairs is made of 512 upper words for u, 512 for φ, 512 lower words for u, 512
for φ, and 16 spares of four words each. The pairs that need more bits take the spares in turn.

The functions here are the reference. Where Numba works, :mod:`corn.noise.compiled` computes the
same bits several times as fast; :func:`find_compiled` checks that it does.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import warnings
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from corn.checks import FloatArray
from corn.errors import CornWarning

Words: TypeAlias = NDArray[np.uint32]

# A block's first 512 values are r·cos φ, the other 512 are r·sin φ.
PAIRS_PER_BLOCK = 512
VALUES_PER_BLOCK = 2 * PAIRS_PER_BLOCK
SPARES_PER_BLOCK, WORDS_PER_SPARE = 16, 4
WORDS_PER_BLOCK = 4 * PAIRS_PER_BLOCK + SPARES_PER_BLOCK * WORDS_PER_SPARE
NUM_BUFFERS = 6

ERROR = 2.0**-45
"""The largest distance of a computed normal from the real one, failures aside."""

LARGEST = 14.2
"""The largest |r|, failures aside: √(288 ln 2), where u = 2⁻¹⁴⁴."""

FAILURE = 2.0**-143
"""An upper bound on the probability that a pair exceeds one of the two bounds above.

Either u is below 2⁻¹⁴⁴, or its block of 512 has over 16 pairs that need spares: the chance of that
is below 2⁻¹⁴⁹, as each needs one with probability 2⁻¹⁵.
"""

NEAR_ONE = 3 << 30  # upper words from here on belong to a u above ¾
FEW_BITS = 1 << 16  # upper words below, of u or of 1 − u, need a spare
EXCHANGE = 1 << 30  # the bit of an angle's upper word that exchanges cosine and sine

LN_2 = 0.6931471805599453

# Chebyshev fits in increasing powers, with errors below 2.3e-16, 4e-17 and 1.1e-16 (relative to the
# function, absolute for the cosine).
# −2 ln m = s·P(s²) with s = (m − 1)/(m + 1), for m in [√½, √2].
LOG = (
    -4.000000000000001,
    -1.3333333333310584,
    -0.8000000012348336,
    -0.5714283204219481,
    -0.44446869096531216,
    -0.362438688127239,
    -0.3367532055575042,
)
# sin πx = x·P(x²) for |x| ≤ ¼.
SINE = (
    3.141592653589793,
    -5.167712780049954,
    2.5501640398733763,
    -0.5992645289396449,
    0.08214586918000175,
    -0.007370021586907771,
    0.000461531855383581,
)
# cos πx = P(x²) for |x| ≤ ¼.
COSINE = (
    1.0,
    -4.934802200544605,
    4.058712126397836,
    -1.3352627670365804,
    0.2353305472106652,
    -0.025804938510627626,
    0.0019068093183945778,
)

# The bits of a float64, read as an integer, are its exponent followed by its mantissa.
MANTISSA_BITS = 52
ROOT_HALF_BITS = int(np.float64(math.sqrt(0.5)).view(np.int64))
SCALED_ROOT_HALF_BITS = int(np.float64(math.sqrt(0.5) * 2.0**32).view(np.int64))
MANTISSA_MASK = (1 << MANTISSA_BITS) - 1
LOG_OF_EXPONENT = -2 * LN_2 / (1 << MANTISSA_BITS)

_ONES = np.uint32(0xFFFFFFFF)
_SIGN = np.int64(np.iinfo(np.int64).min)


def sum_normals(words: Words, weights: FloatArray, out: FloatArray, *, buffers: FloatArray) -> None:
    """Write weighted sums of streams, block by block; each block of words gives one of normals.

    Shapes: words (streams, blocks, ``WORDS_PER_BLOCK``), weights (streams,), out (blocks, 2, 512),
    buffers (6, blocks, 512). Blocks do not depend on each other. Sums run from the first stream to
    the last, because another order would round differently.
    """
    normals = buffers[4:].swapaxes(0, 1)
    _transform_words(words[0], normals, buffers=buffers[:4])
    np.multiply(normals, weights[0], out)
    for own, weight in zip(words[1:], weights[1:], strict=True):
        _transform_words(own, normals, buffers=buffers[:4])
        np.multiply(normals, weight, normals)
        np.add(out, normals, out)


@cache
def find_compiled() -> ModuleType | None:
    """Return :mod:`corn.noise.compiled` if it gives NumPy's bits here, None without Numba.

    The first call on a machine compiles for several seconds: a process for which others wait should
    call it before they do. A warning is given, once, where Numba is installed but does not work.
    """
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        compiled = importlib.import_module("corn.noise.compiled")
        _check_bits(compiled)
    except Exception as error:  # noqa: BLE001, as installations break in many ways
        warnings.warn(
            f"noise is drawn by NumPy, several times as slowly: Numba does not work here: {error}",
            CornWarning,
            stacklevel=2,
        )
        return None
    return compiled


def _transform_words(words: Words, out: FloatArray, *, buffers: FloatArray) -> None:
    """Write a block of normals for each block of uniform words."""
    radius, angle, square, value = buffers
    _fill_radius(radius, words, buffers=(angle, square, value))
    _fill_angle(angle, words, buffer=square)
    np.multiply(angle, angle, square)
    _fill_polynomial(value, SINE, square)
    np.multiply(value, angle, value)
    np.multiply(value, radius, out[:, 1])
    _fill_polynomial(value, COSINE, square)
    np.multiply(value, radius, value)
    # The angle spans a quarter of the circle. Its word's top bit, a sign for the cosine, makes that
    # a half, and the next bit, which exchanges the two, the whole.
    sign = angle.view(np.int64)
    np.bitwise_and(_part(words, 1).view(np.int32), _SIGN, sign)
    np.bitwise_xor(value.view(np.int64), sign, out[:, 0].view(np.int64))
    exchanged = (_part(words, 1) & EXCHANGE) != 0
    np.copyto(value, out[:, 0])
    np.copyto(out[:, 0], out[:, 1], where=exchanged)
    np.copyto(out[:, 1], value, where=exchanged)


def _part(words: Words, number: int) -> Words:
    """Return one of the four parts of each block: upper words of u, of φ, lower ones of u, of φ."""
    return words[:, number * PAIRS_PER_BLOCK : (number + 1) * PAIRS_PER_BLOCK]


def _fill_radius(
    radius: FloatArray, words: Words, *, buffers: tuple[FloatArray, FloatArray, FloatArray]
) -> None:
    ratio, square, exponent = buffers
    near_one = _part(words, 0) >= NEAR_ONE
    _fill_uniform(radius, words, near_one, buffer=ratio)
    # u = 2^e·m with m in [√½, √2): both are read off the bits, and −2 ln u = −2e ln 2 − 2 ln m.
    bits, exponent_bits = square.view(np.int64), exponent.view(np.int64)
    np.subtract(radius.view(np.int64), SCALED_ROOT_HALF_BITS, bits)
    np.bitwise_and(bits, ~MANTISSA_MASK, exponent_bits)
    np.copyto(exponent, exponent_bits, casting="same_kind")
    np.multiply(exponent, LOG_OF_EXPONENT, exponent)
    np.bitwise_and(bits, MANTISSA_MASK, bits)
    np.add(bits, ROOT_HALF_BITS, bits)
    np.subtract(square, 1.0, ratio)
    # Above ¾ the radius holds 2³²(1 − u): m = u, e = 0, and m − 1 is known without a subtraction.
    np.multiply(radius, -(2.0**-32), radius)
    np.copyto(ratio, radius, where=near_one)
    np.copyto(exponent, 0.0, where=near_one)
    np.add(ratio, 2.0, radius)
    np.divide(ratio, radius, ratio)
    np.multiply(ratio, ratio, square)
    _fill_polynomial(radius, LOG, square)
    np.multiply(radius, ratio, radius)
    np.add(radius, exponent, radius)
    np.sqrt(radius, radius)


def _fill_uniform(
    out: FloatArray, words: Words, near_one: NDArray[np.bool_], *, buffer: FloatArray
) -> None:
    """Write 2³²u, or 2³²(1 − u) where u > ¾, to a relative error of some ulps however small."""
    flip = np.multiply(near_one, _ONES, dtype=np.uint32)
    upper = _part(words, 0) ^ flip
    np.copyto(out, upper)
    np.copyto(buffer, _part(words, 2) ^ flip)
    np.multiply(buffer, 2.0**-32, buffer)
    np.add(buffer, 2.0**-33, buffer)
    np.add(out, buffer, out)
    block, pair = np.nonzero(upper < FEW_BITS)
    if len(block):
        rank = np.arange(len(block)) - np.searchsorted(block, block)
        spares = words[:, 4 * PAIRS_PER_BLOCK :].reshape(len(words), SPARES_PER_BLOCK, -1)
        spare: Any = spares[block, rank % SPARES_PER_BLOCK].astype(np.float64)
        # From the last word to the first, so that small numbers keep their digits.
        fraction = (spare[:, 3] + 0.5) * 2.0**-32
        for k in (2, 1, 0):
            fraction = (spare[:, k] + fraction) * 2.0**-32
        lower = (_part(words, 2) ^ flip)[block, pair].astype(np.float64)
        out[block, pair] = upper[block, pair] + (lower + fraction) * 2.0**-32


def _fill_angle(angle: FloatArray, words: Words, *, buffer: FloatArray) -> None:
    # x = φ/π in [−¼, ¼) from the bits below the top two.
    np.copyto(angle, np.left_shift(_part(words, 1), 2).view(np.int32), casting="same_kind")
    np.multiply(angle, 2.0**-33, angle)
    np.copyto(buffer, _part(words, 3))
    np.multiply(buffer, 2.0**-63, buffer)
    np.add(angle, buffer, angle)


def _fill_polynomial(
    out: FloatArray, coefficients: tuple[float, ...], argument: FloatArray
) -> None:
    np.multiply(argument, coefficients[-1], out)
    for coefficient in coefficients[-2:0:-1]:
        np.add(out, coefficient, out)
        np.multiply(out, argument, out)
    np.add(out, coefficients[0], out)


def _check_bits(compiled: Any) -> None:
    """Raise unless the compiled code gives NumPy's bits on this processor.

    Machine code that Numba keeps on the disk may be of another version, or damaged.
    """
    shape = (2, 2, WORDS_PER_BLOCK)
    words = np.random.Generator(np.random.SFC64(0)).integers(0, 1 << 32, shape, dtype=np.uint32)
    # Random words need a spare once in 32,768 pairs. Here all pairs of one block need one, and some
    # of another, at both ends of u.
    upper = words[0, :, :PAIRS_PER_BLOCK]
    upper >>= np.array([[16], [14]], np.uint32)
    upper[:, ::2] ^= np.uint32(0xFFFFFFFF)
    weights = np.array([0.3, -0.7])
    expected, found = np.empty((2, 2, 2, PAIRS_PER_BLOCK))
    buffers = np.empty((NUM_BUFFERS, 2, PAIRS_PER_BLOCK))
    sum_normals(words, weights, expected, buffers=buffers)
    compiled.sum_blocks(words, weights, found)
    if not np.array_equal(found, expected):
        raise ArithmeticError("its normals differ from NumPy's")
    noise = found.ravel()
    for real in (np.float32, np.float64):
        gradient: Any = noise[::-1].astype(real)
        step, model = np.empty_like(gradient), np.zeros_like(gradient)
        compiled.write_half_step(step, model, gradient, noise, 0.3, 2.0**-6, -1.0)
        released = np.rint((gradient.astype(np.float64) * 0.3 + noise) * 64) / 64
        if not np.array_equal(step, released):
            raise ArithmeticError("its releases differ from NumPy's")
        _check_sums(compiled, gradient, noise)


def _check_sums(compiled: Any, gradient: Any, noise: FloatArray) -> None:
    bits, offset = noise.view(np.int64), np.empty_like(noise)
    compiled.write_fractions(offset, bits)
    if not np.array_equal(offset, (bits.view(np.uint64) >> np.uint64(11)) * 2.0**-53):
        raise ArithmeticError("its offsets differ from NumPy's")
    units = np.rint((gradient.astype(np.float64) * 0.3 + noise) * 64 + offset).astype(np.int64)
    for word in (np.int16, np.int32, np.int64):
        mask: Any = bits.astype(word)
        message, average = np.empty_like(mask), np.empty_like(gradient)
        compiled.write_masked(message, gradient, noise, offset, mask, 0.3, 2.0**-6)
        compiled.write_average(average, mask, offset, 3, 2.0**-6 / 3)
        expected = ((mask - 3 * offset) * (2.0**-6 / 3)).astype(gradient.dtype)
        is_same = np.array_equal(message, units.astype(word) + mask)
        if not is_same or not np.array_equal(average, expected):
            raise ArithmeticError("its exact sums differ from NumPy's")
