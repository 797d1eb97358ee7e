"""A keystream turned into normals, bit for bit the same on every machine.

Box–Muller: a pair of normals is r·(cos φ, sin φ), with r² = −2 ln u for a uniform u in (0, 1] and φ
a uniform angle. NumPy's and libm's log, sin and cos differ by an ulp between machines, so none is
called here: the polynomials below use only +, −, ×, ÷, √ and conversions from integers, which
IEEE 754 rounds in one way only, and each is a separate array operation that no compiler can fuse.
Two agents therefore draw identical values on any processor with IEEE arithmetic. (Were one ulp to
differ, a residue of 1e-7 of the noise would not cancel: that costs accuracy nothing one could
measure, and privacy nothing at all, as each agent's own noise keeps its distribution.)

Precision. u has 63 bits, so tails are right as far as they go: the largest |z| is √(128 ln 2) ≈
9.42, and what lies beyond weighs 2⁻⁶⁴ a pair. From 2⁻¹² on a float32 takes 31 of them and the
middle of what they leave open, which moves r by less than one step of its type. φ has 32 bits in
float32 and 64 in float64. Near r = 0 the radius moves in larger steps: in float32 r² is a multiple
of 2⁻²³ there. Privacy is proved for real numbers; any sampler in floating point is an idealisation
of that, and the low bits of noise added to data can tell on the data (Mironov, CCS 2012). Here a
message sums many streams and is rounded once more, which blurs the pattern but is no proof.

Words. A block of 512 pairs is made of 512 words for u, 512 for φ, and then lower words: in float64
another 512 for u and 512 for φ, in float32 16 for u, which go to the pairs with a u below 2⁻¹², one
after the other. (One block in 10³⁰ has more of them; there the first serve again.)
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from corn.errors import InvalidArgumentError

NormalArray: TypeAlias = NDArray[np.floating[Any]]
Words: TypeAlias = NDArray[np.uint32]

PAIRS_PER_BLOCK = 512
"""A block is 512 pairs: its first 512 values are r·cos φ, the other 512 are r·sin φ."""

VALUES_PER_BLOCK = 2 * PAIRS_PER_BLOCK
NUM_BUFFERS = 6

TAIL = 1 << 19
"""Where 2³¹u is below it, a pair takes a lower word in float32 too."""

TAIL_WORDS_PER_BLOCK = 16


@final
class Precision:
    """The constants of one floating point type.

    They are arrays of dimension 0: a Python number would be converted anew in each of the fifty
    operations, which on a short array takes longer than the operation.

    Attributes:
        real: the type of the normals, called ``name``; ``integer`` is the integer type of its size.
        has_all_low_words: whether each pair has lower words for u and φ.
        words_per_block: 32-bit words of keystream a block takes.
        log: P in −2 ln m = s·P(s²), where s = (m − 1)/(m + 1) and m is in [√½, √2].
        sine: P in sin πx = x·P(x²), where |x| ≤ ½.
        cosine: P in cos πx = P(x²), where |x| ≤ ½.
    """

    def __init__(
        self,
        real: np.dtype[np.floating[Any]],
        integer: np.dtype[np.signedinteger[Any]],
        *,
        has_all_low_words: bool,
        log: tuple[float, ...],
        sine: tuple[float, ...],
        cosine: tuple[float, ...],
    ) -> None:
        self.real, self.integer, self.name = real, integer, real.name
        self.has_all_low_words = has_all_low_words
        low_words = 2 * PAIRS_PER_BLOCK if has_all_low_words else TAIL_WORDS_PER_BLOCK
        self.words_per_block = 2 * PAIRS_PER_BLOCK + low_words
        self.log, self.sine, self.cosine = map(self._constants, (log, sine, cosine))
        self.one, self.half, self.word, self.half_word = self._constants((1, 0.5, 2**-32, 2**-33))
        self.angle_unit, self.low_angle_unit = self._constants((2**-32, 2**-63))
        # A float's bits, read as an integer, are its exponent followed by its mantissa.
        mantissa_bits = int(np.finfo(self.real).nmant)
        root_half, scaled_root_half = self._constants((math.sqrt(0.5), math.sqrt(0.5) * 2**31))
        self.root_half_bits = root_half.view(self.integer)
        self.scaled_root_half_bits = scaled_root_half.view(self.integer)
        self.exponent_mask = np.array(-(1 << mantissa_bits), self.integer)
        self.mantissa_mask = np.array((1 << mantissa_bits) - 1, self.integer)
        self.sign_mask = np.array(np.iinfo(self.integer).min, self.integer)
        (self.log_of_exponent,) = self._constants((-2 * _LN_2 / (1 << mantissa_bits),))

    def _constants(self, values: tuple[float, ...]) -> tuple[NormalArray, ...]:
        return tuple(np.array(value, self.real) for value in values)


_LN_2 = 0.6931471805599453

# Minimax polynomials (Remez), in increasing powers; their errors are below 1e-8 and 2e-18 relative
# to the function (absolute for the cosine), so that rounding is what is left.
_PRECISIONS = (
    Precision(
        np.dtype(np.float32),
        np.dtype(np.int32),
        has_all_low_words=False,
        log=(-4.0, -1.3333364, -0.7994958, -0.5985158),
        sine=(3.1415927, -5.16771, 2.5500698, -0.5982421, 0.07756039),
        cosine=(1.0, -4.934802, 4.058709, -1.3352121, 0.23493756, -0.024396718),
    ),
    Precision(
        np.dtype(np.float64),
        np.dtype(np.int64),
        has_all_low_words=True,
        log=(
            -4.0,
            -1.333333333333353,
            -0.799999999985969,
            -0.5714285752288728,
            -0.44444393955787004,
            -0.36367271313986294,
            -0.3062485739359751,
            -0.2962137444620596,
        ),
        sine=(
            3.141592653589793,
            -5.167712780049969,
            2.550164039877294,
            -0.5992645293187382,
            0.08214588656989281,
            -0.007370430478762746,
            0.00046629968877016405,
            -2.1903185407119565e-05,
            7.69472715744174e-07,
        ),
        cosine=(
            1.0,
            -4.934802200544679,
            4.058712126416768,
            -1.335262768854555,
            0.235330630357996,
            -0.02580689137660447,
            0.001929574187359324,
            -0.00010463741712642142,
            4.300724831675144e-06,
            -1.3435271519780108e-07,
        ),
    ),
)


def precision_of(dtype: DTypeLike) -> Precision:
    """The precision of float32 or float64; there is no other."""
    for precision in _PRECISIONS:
        if precision.real == np.dtype(dtype):
            return precision
    raise InvalidArgumentError(f"dtype must be float32 or float64, found {np.dtype(dtype)}")


def sum_normals(
    words: Words, weights: NormalArray, out: NormalArray, *, buffers: NormalArray
) -> None:
    """Write sums of weighted blocks of normals: one of each stream, from its block of words.

    Shapes: words (streams, blocks, words per block), weights (streams,), out (blocks, 2, 512) of
    float32 or float64, buffers (6, blocks, 512) of the same type. Blocks do not depend on each
    other. Sums run from the first stream to the last.
    """
    normals = buffers[4:].swapaxes(0, 1)
    _transform_words(words[0], normals, buffers=buffers[:4])
    np.multiply(normals, weights[0], out)
    for own, weight in zip(words[1:], weights[1:], strict=True):
        _transform_words(own, normals, buffers=buffers[:4])
        np.multiply(normals, weight, normals)
        np.add(out, normals, out)


def _transform_words(words: Words, out: NormalArray, *, buffers: NormalArray) -> None:
    """Write a block of normals for each block of uniform words."""
    constants = precision_of(out.dtype)
    radius, angle, square, value = buffers
    _fill_radius(radius, words, constants, buffers=(angle, square, value))
    _fill_angle(angle, words, constants, buffer=square)
    np.multiply(angle, angle, square)
    _fill_polynomial(value, constants.sine, square)
    np.multiply(value, angle, value)
    np.multiply(value, radius, out[:, 1])
    _fill_polynomial(value, constants.cosine, square)
    np.multiply(value, radius, value)
    # The angle spans half a circle; a sign for the cosine, its word's top bit, makes it whole.
    sign = angle.view(constants.integer)
    np.bitwise_and(_angle_words(words).view(np.int32), constants.sign_mask, sign)
    np.bitwise_xor(value.view(constants.integer), sign, out[:, 0].view(constants.integer))


def _fill_scaled_uniform(
    out: NormalArray, words: Words, constants: Precision, *, buffer: NormalArray
) -> None:
    # 2³¹u: the upper 31 bits are whole, the lower 32 a fraction, which is ½ where there are none.
    whole = np.right_shift(words[:, :PAIRS_PER_BLOCK], 1).view(np.int32)
    np.copyto(out, whole, casting="same_kind")
    low_words = words[:, VALUES_PER_BLOCK:]
    if constants.has_all_low_words:
        np.copyto(buffer, low_words[:, :PAIRS_PER_BLOCK], casting="same_kind")
        np.multiply(buffer, constants.word, buffer)
        np.add(buffer, constants.half_word, buffer)
        np.add(out, buffer, out)
        return
    block, pair = np.divmod(np.flatnonzero(whole < TAIL), PAIRS_PER_BLOCK)
    np.add(out, constants.half, out)
    rank = np.arange(len(block)) - np.searchsorted(block, block)
    low = low_words[block, rank % TAIL_WORDS_PER_BLOCK].astype(constants.real)
    fraction = low * constants.word + constants.half_word
    out[block, pair] = whole[block, pair].astype(constants.real) + fraction


def _fill_radius(
    radius: NormalArray,
    words: Words,
    constants: Precision,
    *,
    buffers: tuple[NormalArray, NormalArray, NormalArray],
) -> None:
    ratio, square, exponent = buffers
    _fill_scaled_uniform(radius, words, constants, buffer=ratio)
    # u = 2^e·m with m in [√½, √2): both are read off the bits, and −2 ln u = −2e ln 2 − 2 ln m.
    bits, exponent_bits = radius.view(constants.integer), square.view(constants.integer)
    np.subtract(bits, constants.scaled_root_half_bits, bits)
    np.bitwise_and(bits, constants.exponent_mask, exponent_bits)
    np.copyto(exponent, exponent_bits, casting="same_kind")
    np.multiply(exponent, constants.log_of_exponent, exponent)
    np.bitwise_and(bits, constants.mantissa_mask, bits)
    np.add(bits, constants.root_half_bits, bits)
    # For u near 1, e = 0 and m − 1 is exact: a small radius keeps its relative precision.
    np.subtract(radius, constants.one, ratio)
    np.add(radius, constants.one, radius)
    np.divide(ratio, radius, ratio)
    np.multiply(ratio, ratio, square)
    _fill_polynomial(radius, constants.log, square)
    np.multiply(radius, ratio, radius)
    np.add(radius, exponent, radius)
    np.sqrt(radius, radius)


def _fill_angle(
    angle: NormalArray, words: Words, constants: Precision, *, buffer: NormalArray
) -> None:
    # x = φ/π in [−½, ½] from the bits below the top one, which is kept for the sign.
    np.copyto(angle, np.left_shift(_angle_words(words), 1).view(np.int32), casting="same_kind")
    np.multiply(angle, constants.angle_unit, angle)
    if constants.has_all_low_words:
        np.copyto(buffer, words[:, -PAIRS_PER_BLOCK:])
        np.multiply(buffer, constants.low_angle_unit, buffer)
        np.add(angle, buffer, angle)


def _angle_words(words: Words) -> Words:
    return words[:, PAIRS_PER_BLOCK:VALUES_PER_BLOCK]


def _fill_polynomial(
    out: NormalArray, coefficients: tuple[NormalArray, ...], argument: NormalArray
) -> None:
    np.multiply(argument, coefficients[-1], out)
    for coefficient in coefficients[-2:0:-1]:
        np.add(out, coefficient, out)
        np.multiply(out, argument, out)
    np.add(out, coefficients[0], out)
