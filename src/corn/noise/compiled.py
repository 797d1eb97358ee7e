"""The sums of :mod:`corn.noise.normals` as one compiled loop, in the same bits, for speed.

Needs Numba, the extra ``fast``. NumPy walks through memory once for each of the fifty operations
that a pair of normals takes; this does them all while the values are in registers. LLVM neither
reorders nor fuses floating point operations unless told to, and is not told to here.

Importing this module compiles, a few seconds the first time; Numba keeps the machine code where
Python keeps its byte code, until this file or the numbers it takes from others change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import DTypeLike

from corn.noise.normals import (
    PAIRS_PER_BLOCK,
    TAIL,
    TAIL_WORDS_PER_BLOCK,
    NormalArray,
    Precision,
    Words,
    precision_of,
)

_SETTINGS: Any = {"error_model": "numpy", "nogil": True}

if numba.config.DISABLE_JIT:
    raise ImportError("Numba is told not to compile")


def sum_normals(words: Words, weights: NormalArray, out: NormalArray) -> None:
    """As :func:`corn.noise.normals.sum_normals`, for contiguous arrays, without buffers."""
    _KERNELS[out.dtype](words, weights, out)


@numba.njit(**_SETTINGS)  # type: ignore[untyped-decorator]
def _polynomial(coefficients: Any, x: Any) -> Any:  # pragma: no cover, runs as machine code
    value = x * coefficients[-1]
    for k in range(len(coefficients) - 2, 0, -1):
        value = (value + coefficients[k]) * x
    return value + coefficients[0]


def _make_kernel(own: Precision) -> Callable[[Any, Any, Any], None]:
    """The loop for one type. What it takes from here is known to the compiler, and to the cache."""
    real, integer = own.real.type, own.integer.type
    log, sine, cosine = (
        tuple(coefficient[()] for coefficient in polynomial)
        for polynomial in (own.log, own.sine, own.cosine)
    )
    one, half, word, half_word = own.one[()], own.half[()], own.word[()], own.half_word[()]
    angle_unit, low_angle_unit = own.angle_unit[()], own.low_angle_unit[()]
    log_of_exponent = own.log_of_exponent[()]
    scaled_root_half, root_half = own.scaled_root_half_bits[()], own.root_half_bits[()]
    exponent_mask, mantissa_mask = own.exponent_mask[()], own.mantissa_mask[()]
    sign_mask = own.sign_mask[()]
    has_all_low_words, num_pairs = own.has_all_low_words, PAIRS_PER_BLOCK
    tail, num_tail_words = np.int32(TAIL), TAIL_WORDS_PER_BLOCK

    # Step by step what the array operations do. The loops have a fixed length, and no branches that
    # depend on k but for tails, and none writes to both halves of ``out``: LLVM makes vector
    # instructions of all the others.
    def kernel(words: Any, weights: Any, out: Any) -> None:  # pragma: no cover, as above
        first, second = np.empty((2, num_pairs), out.dtype)
        bits = first.view(integer)
        for block in range(len(out)):
            for stream in range(len(weights)):
                block_words, weight = words[stream, block], weights[stream]
                if has_all_low_words:
                    for k in range(num_pairs):
                        fraction = real(block_words[2 * num_pairs + k]) * word + half_word
                        first[k] = real(np.int32(block_words[k] >> np.uint32(1))) + fraction
                else:
                    smallest = tail
                    for k in range(num_pairs):
                        whole = np.int32(block_words[k] >> np.uint32(1))
                        first[k] = real(whole) + half
                        smallest = min(smallest, whole)
                    if smallest < tail:
                        rank = 0
                        for k in range(num_pairs):
                            whole = np.int32(block_words[k] >> np.uint32(1))
                            if whole < tail:
                                low = block_words[2 * num_pairs + rank % num_tail_words]
                                first[k] = real(whole) + (real(low) * word + half_word)
                                rank += 1
                for k in range(num_pairs):
                    shifted = integer(bits[k] - scaled_root_half)
                    second[k] = real(integer(shifted & exponent_mask)) * log_of_exponent
                    bits[k] = integer((shifted & mantissa_mask) + root_half)
                for k in range(num_pairs):
                    ratio = (first[k] - one) / (first[k] + one)
                    radius = np.sqrt(_polynomial(log, ratio * ratio) * ratio + second[k])
                    angle = real(np.int32(block_words[num_pairs + k] << np.uint32(1))) * angle_unit
                    if has_all_low_words:
                        angle += real(block_words[3 * num_pairs + k]) * low_angle_unit
                    square = angle * angle
                    first[k] = _polynomial(cosine, square) * radius
                    second[k] = _polynomial(sine, square) * angle * radius
                for k in range(num_pairs):
                    bits[k] ^= integer(integer(np.int32(block_words[num_pairs + k])) & sign_mask)
                if stream == 0:
                    for k in range(num_pairs):
                        out[block, 0, k] = first[k] * weight
                    for k in range(num_pairs):
                        out[block, 1, k] = second[k] * weight
                else:
                    for k in range(num_pairs):
                        out[block, 0, k] += first[k] * weight
                    for k in range(num_pairs):
                        out[block, 1, k] += second[k] * weight

    return kernel


def _compile(dtype: DTypeLike) -> Any:
    kernel = _make_kernel(precision_of(dtype))
    examples = np.empty((1, 1, 1), np.uint32), np.empty(1, dtype), np.empty((1, 1, 1), dtype)
    signature = numba.void(*map(numba.typeof, examples))
    try:
        return numba.njit(signature, cache=True, **_SETTINGS)(kernel)
    except Exception:  # noqa: BLE001, as kept code fails to load or save in many ways
        return numba.njit(signature, **_SETTINGS)(kernel)


_KERNELS = {np.dtype(dtype): _compile(dtype) for dtype in (np.float32, np.float64)}
