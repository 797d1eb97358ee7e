"""Normals from a keystream: within 2⁻⁴⁵ of real ones, bit for bit the same on every machine.

Box–Muller: a pair of normals is r·(cos φ, sin φ), where r² = −2 ln u for a uniform u in (0, 1) and
φ is a uniform angle. NumPy's and libm's log, sin and cos differ by an ulp between machines, so none
is called here. The polynomials below use only +, −, ×, ÷, √, a·b + c with one rounding, and
conversions from integers, which IEEE 754 rounds in one way only, and no compiler is allowed to fuse
other operations. Two agents therefore draw identical values on any processor with IEEE arithmetic.

Accuracy. Read each pair's words as the leading bits of a real u and a real φ, whose further bits
are unknown. The exact transform of those is a pair of exact normals, and what is computed here
differs from it by at most ``ERROR``, except with probability ``FAILURE`` per pair. The privacy of
floating-point releases rests on these two numbers; ``docs/floats.md`` proves them. Two details
matter. Where u > ¾ the radius is computed from 1 − u, because u itself would round a small radius
away. Where u or 1 − u is below 2⁻¹⁶, 128 more bits are read, because 64 would leave the far tail,
and the smallest radii, with too few.

A block of 512 pairs is made of 512 upper words for u, 512 for φ, 512 lower words for u, 512 for φ,
and 16 spares of four words each, which the pairs that need more bits take in turn.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corn.errors import CornError

# A block's first 512 values are r·cos φ, the other 512 are r·sin φ.
PAIRS_PER_BLOCK = 512
VALUES_PER_BLOCK = 2 * PAIRS_PER_BLOCK
SPARES_PER_BLOCK = 16
WORDS_PER_SPARE = 4
WORDS_PER_BLOCK = 4 * PAIRS_PER_BLOCK + SPARES_PER_BLOCK * WORDS_PER_SPARE

OFFSET_BITS = 24  # of the public offset of the grid, for exact sums
ERROR = 2.0**-45  # the largest distance of a computed normal from the real one, failures aside
LARGEST = 14.2  # the largest |r|, failures aside: √(288 ln 2), where u = 2⁻¹⁴⁴
# Bounds the probability that a pair exceeds one of the two bounds above: either u is below 2⁻¹⁴⁴,
# or its block of 512 has over 16 pairs that need spares, with a chance below 2⁻¹⁴⁹, as each needs
# one with probability 2⁻¹⁵.
FAILURE = 2.0**-143

NEAR_ONE = 3 << 30  # upper words from here on belong to a u above ¾
FEW_BITS = 1 << 16  # upper words below, of u or of 1 − u, need a spare

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

# Of what compiled code gives on every machine: see :func:`digest_known`.
KNOWN_DIGEST = "384cfc721e6a22903357e3368de0aecf2ac76a14ba7c86fc4cf6ea9de553a38d"


@cache
def load_compiled() -> Any:
    """Return :mod:`corn.noise.compiled`, once it has given the known bits on this machine.

    The first call on a machine compiles for several seconds.
    """
    try:
        compiled = importlib.import_module("corn.noise.compiled")
        found = digest_known(compiled)
    except Exception as error:
        raise CornError(f"no noise can be drawn, as Numba does not work here: {error}") from error
    if found != KNOWN_DIGEST:
        raise CornError(
            "no noise can be drawn, as compiled code does not give the known numbers here: remove "
            "the files that Numba keeps (NUMBA_CACHE_DIR, or __pycache__ of corn.noise)"
        )
    return compiled


def digest_known(compiled: Any) -> str:
    """Return a digest of what compiled code makes of some given words.

    Numba may keep machine code of another version, or damaged, and all agents must draw the same.
    """
    shape = (2, 2, WORDS_PER_BLOCK)
    data = hashlib.shake_128(b"corn noise").digest(4 * math.prod(shape))
    words = np.frombuffer(data, "<u4").astype(np.uint32).reshape(shape)
    # Random words need a spare once in 32,768 pairs. Here all pairs of one block need one, and some
    # of another, at both ends of u.
    upper = words[0, :, :PAIRS_PER_BLOCK]
    upper >>= np.array([[16], [14]], np.uint32)
    upper[:, ::2] ^= np.uint32(0xFFFFFFFF)
    normals = np.empty((2, 2, PAIRS_PER_BLOCK))
    weights = np.array([0.3, -0.7])
    compiled.sum_blocks(words, 0, weights, normals)
    noise = normals.ravel()
    found = hashlib.sha256(normals.tobytes())
    # One value fewer than whole blocks have.
    offset = words[1, :, : len(noise) // 2].reshape(1, -1)
    none = np.zeros_like(offset)
    bits = noise.view(np.int64)
    squares = np.empty(2)
    compiled.sum_squares(squares, noise.astype(np.float32).reshape(2, -1))
    found.update(squares.tobytes())
    for real in (np.float32, np.float64):
        gradient = noise[::-1].astype(real)
        step: NDArray[Any] = np.empty_like(gradient)
        compiled.write_half_step(step, gradient, gradient, noise, 0.3, 2.0**-6, -1.0)
        found.update(step.tobytes())
        for integer in (np.int16, np.int32, np.int64):
            masks = np.stack([bits, bits[::-1], bits // 3]).astype(integer)
            message, average = np.empty(len(noise) - 1, integer), np.empty_like(gradient)
            compiled.write_message(
                message, gradient[1:], words, weights, offset, masks, 2, 0.3, 2.0**-6
            )
            compiled.write_average(average, masks[0], offset, 3, 2.0**-6 / 3)
            found.update(message.tobytes() + average.tobytes())
            # Without masks and offset.
            compiled.write_message(
                message, gradient[1:], words, weights, none, masks[:0], 0, 0.3, 2.0**-6
            )
            compiled.write_average(average, masks[0], none, 3, 2.0**-6 / 3)
            found.update(message.tobytes() + average.tobytes())
    return found.hexdigest()
