"""Normals from words by NumPy, an operation at a time: the reference of ``corn.noise.compiled``.

Each operation is one that IEEE 754 rounds in one way only, so the bits are the same on any machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from corn.checks import FloatArray
from corn.noise.normals import (
    COSINE,
    FEW_BITS,
    LOG,
    LOG_OF_EXPONENT,
    MANTISSA_MASK,
    NEAR_ONE,
    PAIRS_PER_BLOCK,
    ROOT_HALF_BITS,
    SCALED_ROOT_HALF_BITS,
    SINE,
    SPARES_PER_BLOCK,
)

Words = NDArray[np.uint32]

_ONES = np.uint32(0xFFFFFFFF)
EXCHANGE = 1 << 30  # the bit of an angle's upper word that exchanges cosine and sine
_SIGN = np.int64(np.iinfo(np.int64).min)


def sum_normals(words: Words, weights: FloatArray, out: FloatArray) -> None:
    """Write weighted sums of streams, block by block; each block of words gives one of normals.

    Shapes: words (streams, blocks, ``WORDS_PER_BLOCK``), weights (streams,), out (blocks, 2, 512).
    """
    buffers = np.empty((6, len(out), PAIRS_PER_BLOCK))
    normals = buffers[4:].swapaxes(0, 1)
    _transform_words(words[0], normals, buffers=buffers[:4])
    np.multiply(normals, weights[0], out)
    for own, weight in zip(words[1:], weights[1:], strict=True):
        _transform_words(own, normals, buffers=buffers[:4])
        np.multiply(normals, weight, normals)
        np.add(out, normals, out)


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
    np.sqrt(fuse(radius, ratio, exponent), radius)


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
    out.fill(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        out[:] = fuse(out, argument, np.asarray(coefficient))


def fuse(a: FloatArray, b: FloatArray, c: FloatArray) -> FloatArray:
    """Return a·b + c, rounded once, by sums and products that are each rounded.

    A product and two sums are each split into the rounded value and its error, which is a float
    too. The last bits of the smaller two are rounded to odd, so that adding them to the largest
    rounds as the exact sum would (Boldo and Melquiond 2008).
    """
    product, small = _multiply_exactly(a, b)
    high, middle = _add_exactly(product, c)
    rest, error = _add_exactly(middle, small)
    # Odd: one ulp towards the error where the sum is inexact and its last bit is even.
    is_even = rest.view(np.int64) % 2 == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    odd = np.where((error != 0) & is_even, np.nextafter(rest, towards), rest)
    return np.asarray(high + odd)


def _multiply_exactly(a: FloatArray, b: FloatArray) -> tuple[FloatArray, FloatArray]:
    def split(x: FloatArray) -> tuple[FloatArray, FloatArray]:
        scaled = x * (2.0**27 + 1)
        high = scaled - (scaled - x)
        return high, x - high

    product = a * b
    (a_high, a_low), (b_high, b_low) = split(a), split(b)
    error = a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)
    return product, error


def _add_exactly(a: FloatArray, b: FloatArray) -> tuple[FloatArray, FloatArray]:
    total = a + b
    second = total - a
    return total, (a - (total - second)) + (b - second)
