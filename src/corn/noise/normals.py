"""A keystream turned into normals, bit for bit the same on every machine.

Box–Muller: a pair of normals is r·(cos φ, sin φ), with r² = −2 ln u for a uniform u in (0, 1] and φ
a uniform angle. NumPy's and libm's log, sin and cos differ by an ulp between machines, so none is
called here: the polynomials below use only +, −, ×, ÷, √ and conversions from integers, which
IEEE 754 rounds in one way only, and each is a separate array operation that no compiler can fuse.
Two agents therefore draw identical values on any processor with IEEE arithmetic. (Were one ulp to
differ, a residue of 1e-7 of the noise would not cancel: that costs accuracy nothing one could
measure, and privacy nothing at all, as each agent's own noise keeps its distribution.)

Precision. u has 64 bits, kept with the relative precision of the type, so tails are right as far as
they go: the largest |z| is √(130 ln 2) ≈ 9.49, and what lies beyond weighs 2⁻⁶⁵ a pair. φ has 32
bits in float32 and 64 in float64. Near r = 0 the radius moves in steps: in float32 r² is a multiple
of 2⁻²³ there. Privacy is proved for real numbers; any sampler in floating point is an idealisation
of that, and the low bits of noise added to data can tell on the data (Mironov, CCS 2012). Here a
message sums many streams and is rounded once more, which blurs the pattern but is no proof.
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
NUM_BUFFERS = 4


@final
class Precision:
    """The constants of one floating point type.

    They are arrays of dimension 0: a Python number would be converted anew in each of the fifty
    operations, which on a short array takes longer than the operation.

    Attributes:
        real: the type of the normals; ``integer`` is the integer type of the same size.
        words_per_pair: 32-bit words of keystream a pair takes: two for u, the others for φ.
        log: P in −2 ln m = s·P(s²), where s = (m − 1)/(m + 1) and m is in [√½, √2].
        sine: P in sin πx = x·P(x²), where |x| ≤ ½.
        cosine: P in cos πx = P(x²), where |x| ≤ ½.
    """

    def __init__(
        self,
        real: np.dtype[np.floating[Any]],
        integer: np.dtype[np.signedinteger[Any]],
        *,
        words_per_pair: int,
        log: tuple[float, ...],
        sine: tuple[float, ...],
        cosine: tuple[float, ...],
    ) -> None:
        self.real, self.integer = real, integer
        self.words_per_pair = words_per_pair
        self.log, self.sine, self.cosine = map(self._constants, (log, sine, cosine))
        self.one, self.word, self.half_word = self._constants((1, 2**-32, 2**-33))
        self.angle_unit, self.low_angle_unit = self._constants((2**-32, 2**-63))
        # A float's bits, read as an integer, are its exponent followed by its mantissa.
        mantissa_bits = int(np.finfo(self.real).nmant)
        root_half, scaled_root_half = self._constants((math.sqrt(0.5), math.sqrt(0.5) * 2**32))
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
        words_per_pair=3,
        log=(-4.0, -1.3333364, -0.7994958, -0.5985158),
        sine=(3.1415927, -5.16771, 2.5500698, -0.5982421, 0.07756039),
        cosine=(1.0, -4.934802, 4.058709, -1.3352121, 0.23493756, -0.024396718),
    ),
    Precision(
        np.dtype(np.float64),
        np.dtype(np.int64),
        words_per_pair=4,
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


def transform_words(words: Words, out: NormalArray, *, buffers: NormalArray) -> None:
    """Write a block of normals for each block of uniform words.

    Shapes: words (blocks, words per pair, 512), out (blocks, 2, 512) of float32 or float64, buffers
    (4, blocks, 512) of the same type. Blocks do not depend on each other.
    """
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
    np.bitwise_and(words[:, 2].view(np.int32), constants.sign_mask, sign)
    np.bitwise_xor(value.view(constants.integer), sign, out[:, 0].view(constants.integer))


def _fill_radius(
    radius: NormalArray,
    words: Words,
    constants: Precision,
    *,
    buffers: tuple[NormalArray, NormalArray, NormalArray],
) -> None:
    # 2³²u: the second word is the fraction of the first, and its bits stay where that is small.
    ratio, square, exponent = buffers
    np.copyto(radius, words[:, 0], casting="same_kind")
    np.copyto(ratio, words[:, 1], casting="same_kind")
    np.multiply(ratio, constants.word, ratio)
    np.add(ratio, constants.half_word, ratio)
    np.add(radius, ratio, radius)
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
    high = np.left_shift(words[:, 2], 1).view(np.int32)
    np.copyto(angle, high, casting="same_kind")
    np.multiply(angle, constants.angle_unit, angle)
    for low in range(3, constants.words_per_pair):
        np.copyto(buffer, words[:, low])
        np.multiply(buffer, constants.low_angle_unit, buffer)
        np.add(angle, buffer, angle)


def _fill_polynomial(
    out: NormalArray, coefficients: tuple[NormalArray, ...], argument: NormalArray
) -> None:
    np.multiply(argument, coefficients[-1], out)
    for coefficient in coefficients[-2:0:-1]:
        np.add(out, coefficient, out)
        np.multiply(out, argument, out)
    np.add(out, coefficients[0], out)
