"""Compiled loops: normals as :mod:`corn.noise.normals` defines them, releases, and averages.

NumPy would walk through memory once for each of the fifty operations that a pair of normals takes.
LLVM neither reorders nor fuses floating-point operations unless it is allowed to (``fastmath``),
which it is not. Importing this module compiles it, which takes a few seconds the first time. Numba
keeps the machine code until this file, or a constant that the loop uses, changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.extending import intrinsic

from corn.noise.normals import (
    COSINE,
    FEW_BITS,
    LOG,
    LOG_OF_EXPONENT,
    MANTISSA_MASK,
    NEAR_ONE,
    OFFSET_BITS,
    PAIRS_PER_BLOCK,
    ROOT_HALF_BITS,
    SCALED_ROOT_HALF_BITS,
    SINE,
    SPARES_PER_BLOCK,
    WORDS_PER_SPARE,
)

_SETTINGS: Any = {"error_model": "numpy", "nogil": True}

if numba.config.DISABLE_JIT:
    raise ImportError("Numba's compiler is disabled (NUMBA_DISABLE_JIT)")


def _compile(*signatures: str) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator: machine code for some types, which is cached where that is possible."""

    def compile_for(kernel: Callable[..., None]) -> Any:
        try:
            return numba.njit(list(signatures), cache=True, **_SETTINGS)(kernel)
        except Exception:  # noqa: BLE001, as cached code fails to load or save in many ways
            return numba.njit(list(signatures), **_SETTINGS)(kernel)

    return compile_for


@intrinsic  # type: ignore[untyped-decorator]
def _fused(_context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a·b + c, rounded once, which IEEE 754 defines on every machine."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return a(a, b, c), generate


@numba.njit(**_SETTINGS)  # type: ignore[untyped-decorator]
def _polynomial(coefficients: Any, x: Any) -> Any:  # pragma: no cover, runs as machine code
    value = coefficients[-1]
    for k in range(len(coefficients) - 2, -1, -1):
        value = _fused(value, x, coefficients[k])
    return value


def _make_kernel() -> Callable[[Any, Any, Any, Any], None]:
    """Return the loop. Its constants are in its closure, and so in the key of Numba's cache."""
    log, sine, cosine, log_of_exponent = LOG, SINE, COSINE, LOG_OF_EXPONENT
    pairs, num_spares, spare_words = PAIRS_PER_BLOCK, SPARES_PER_BLOCK, WORDS_PER_SPARE
    # In the types in which the loop computes; others would make it convert.
    near_one, few_bits, ones = np.uint32(NEAR_ONE), np.uint32(FEW_BITS), np.uint32(0xFFFFFFFF)
    root_half, scaled_root_half = np.int64(ROOT_HALF_BITS), np.int64(SCALED_ROOT_HALF_BITS)
    mantissa_mask, exponent_mask = np.int64(MANTISSA_MASK), np.int64(~MANTISSA_MASK)
    sign_mask = np.int64(np.iinfo(np.int64).min)
    unit, half_unit, angle_unit, low_angle_unit = 2.0**-32, 2.0**-33, 2.0**-33, 2.0**-63

    # Inner loops have a fixed length, no branch that depends on k, and write to one half of ``out``
    # only, so that LLVM turns them into vector instructions. The exception is the rare one for
    # spares.
    def kernel(
        words: Any, start: Any, weights: Any, out: Any
    ) -> None:  # pragma: no cover, as above
        first, second, minus_x = np.empty(pairs), np.empty(pairs), np.empty(pairs)
        bits, other_bits = first.view(np.int64), second.view(np.int64)
        for block in range(len(out)):
            for stream in range(len(weights)):
                own, weight = words[stream, start + block], weights[stream]
                fewest = ones
                for k in range(pairs):
                    flip = ones if own[k] >= near_one else np.uint32(0)
                    upper, lower = own[k] ^ flip, own[2 * pairs + k] ^ flip
                    first[k] = np.float64(upper) + _fused(np.float64(lower), unit, half_unit)
                    fewest = min(fewest, upper)
                if fewest < few_bits:
                    rank = 0
                    for k in range(pairs):
                        flip = ones if own[k] >= near_one else np.uint32(0)
                        upper, lower = own[k] ^ flip, own[2 * pairs + k] ^ flip
                        if upper < few_bits:
                            spare = 4 * pairs + rank % num_spares * spare_words
                            fraction = (np.float64(own[spare + 3]) + 0.5) * unit
                            for place in range(spare + 2, spare - 1, -1):
                                fraction = (np.float64(own[place]) + fraction) * unit
                            first[k] = np.float64(upper) + (np.float64(lower) + fraction) * unit
                            rank += 1
                for k in range(pairs):
                    shifted = bits[k] - scaled_root_half
                    second[k] = np.float64(shifted & exponent_mask) * log_of_exponent
                    minus_x[k] = first[k] * -unit
                    bits[k] = (shifted & mantissa_mask) + root_half
                for k in range(pairs):
                    is_near_one = own[k] >= near_one
                    top = minus_x[k] if is_near_one else first[k] - 1.0
                    exponent = 0.0 if is_near_one else second[k]
                    ratio = top / (top + 2.0)
                    radius = np.sqrt(_fused(_polynomial(log, ratio * ratio), ratio, exponent))
                    angle = np.float64(np.int32(own[pairs + k] << np.uint32(2))) * angle_unit
                    angle = _fused(np.float64(own[3 * pairs + k]), low_angle_unit, angle)
                    square = angle * angle
                    first[k] = _polynomial(cosine, square) * radius
                    second[k] = _polynomial(sine, square) * angle * radius
                # A sign for the cosine, and an exchange of the two where the next bit is set: as
                # integers, because a choice between floats is slower.
                for k in range(pairs):
                    word = own[pairs + k]
                    signed = bits[k] ^ (np.int64(np.int32(word)) & sign_mask)
                    is_exchanged = np.int64(np.int32(word << np.uint32(1))) >> np.int64(63)
                    change = (signed ^ other_bits[k]) & is_exchanged
                    bits[k] = signed ^ change
                    other_bits[k] ^= change
                if stream == 0:
                    for k in range(pairs):
                        out[block, 0, k] = first[k] * weight
                    for k in range(pairs):
                        out[block, 1, k] = second[k] * weight
                else:
                    for k in range(pairs):
                        out[block, 0, k] += first[k] * weight
                    for k in range(pairs):
                        out[block, 1, k] += second[k] * weight

    return kernel


_REALS, _INTEGERS = ("float32", "float64"), ("int16", "int32", "int64")
_STREAMS = "uint32[:,:,::1], int64, float64[::1], float64[:,:,::1]"

sum_blocks = _compile(f"void({_STREAMS})")(_make_kernel())
"""Write weighted sums of streams, block by block; each block of words gives one of normals.

Shapes: words (streams, blocks or more, ``WORDS_PER_BLOCK``), the first block, weights (streams,),
out (blocks, 2, 512), all contiguous. Blocks do not depend on each other. Sums run from the first
stream to the last, because another order would round differently.
"""


@_compile(
    *(
        f"void({x}[::1], {x}[::1], {g}[::1], float64[::1], float64, float64, float64)"
        for x, g in itertools.product(_REALS, _REALS)
    )
)
def write_half_step(
    out: Any, parameters: Any, gradient: Any, noise: Any, factor: Any, grid: Any, step_size: Any
) -> None:  # pragma: no cover, as above
    """Write X − η·γ·rint((f g + v)/γ), shape (d,), in one pass: the half step of ``corn.learn``.

    Everything up to the grid is in float64, the rest in the type of the model.
    """
    per_grid, real = 1 / grid, out.dtype.type  # exact, as the grid is a power of two
    for k in range(len(out)):
        released = np.rint((gradient[k] * factor + noise[k]) * per_grid) * grid
        out[k] = parameters[k] - real(step_size) * real(released)


@numba.njit(**_SETTINGS)  # type: ignore[untyped-decorator]
def _fraction(word: Any) -> Any:  # pragma: no cover, as above
    return np.float64(word >> np.uint32(32 - OFFSET_BITS)) * 2.0**-OFFSET_BITS


@_compile(
    *(
        f"void({z}[::1], {g}[::1], uint32[:,:,::1], float64[::1], uint32[:,::1], {z}[:,::1], "
        "int64, float64, float64)"
        for z, g in itertools.product(_INTEGERS, _REALS)
    )
)
def write_message(
    out: Any,
    gradient: Any,
    words: Any,
    weights: Any,
    offset: Any,
    masks: Any,
    num_added: Any,
    factor: Any,
    grid: Any,
) -> None:  # pragma: no cover, as above
    """Write rint((f g + v)/γ + o) + Σ ± z, modulo 2^B as signed integers.

    Shapes: out and gradient (d,), in blocks of 1024 values of which the last may have fewer; words
    and weights as for :func:`sum_blocks`, of which v is the sum; offset (1, values), words of which
    the first 24 bits are o; masks (streams, values), of which the first ``num_added`` are added and
    the others subtracted.
    """
    # As many blocks at once as stay in a core's smallest cache.
    # Zeros, for noise of no stream.
    per_grid, noise = 1 / grid, np.zeros((4, 2, PAIRS_PER_BLOCK))
    size = noise.size
    for start in range(0, len(out), size):
        message, own = out[start : start + size], gradient[start : start + size]
        num_blocks = -(-len(message) // (2 * PAIRS_PER_BLOCK))
        sum_blocks(words, start // (2 * PAIRS_PER_BLOCK), weights, noise[:num_blocks])
        values, fractions = noise.reshape(-1), offset[0, start : start + size]
        for k in range(len(message)):
            units = (own[k] * factor + values[k]) * per_grid + _fraction(fractions[k])
            # Of signed integers of 64 bits, storing keeps the lowest: modulo 2^B.
            message[k] = np.int64(np.rint(units))
        for stream in range(len(masks)):
            mask = masks[stream, start : start + size]
            if stream < num_added:
                for k in range(len(message)):
                    message[k] += mask[k]
            else:
                for k in range(len(message)):
                    message[k] -= mask[k]


@_compile(
    *(
        f"void({x}[::1], {z}[::1], uint32[:,::1], int64, float64)"
        for x, z in itertools.product(_REALS, _INTEGERS)
    )
)
def write_average(
    out: Any, total: Any, offset: Any, num_agents: Any, scale: Any
) -> None:  # pragma: no cover, as above
    """Write (Σ − n o)·scale, shape (d,), from a sum of signed integers; offsets as above."""
    fractions = offset[0]
    for k in range(len(out)):
        out[k] = (np.float64(total[k]) - num_agents * _fraction(fractions[k])) * scale


@_compile("void(float64[::1], float32[:,::1])")
def sum_squares(out: Any, values: Any) -> None:  # pragma: no cover, as above
    """Write Σ x² of rows of float32, to a relative error below 10⁻¹⁰ for up to 10⁹ values.

    Shapes: out (rows,), values (rows, d).
    """
    # 64 sums side by side, in blocks of 4096 values: one sum of all would lose more digits, and
    # could not use vector instructions. Squares of float32 are exact in float64.
    sums = np.empty(64)
    whole = values.shape[1] // 64 * 64
    for row in range(len(out)):
        total, own = 0.0, values[row]
        for start in range(0, whole, 4096):
            sums[:] = 0
            for first in range(start, min(start + 4096, whole), 64):
                part = own[first : first + 64]
                for k in range(64):
                    sums[k] += np.float64(part[k]) * np.float64(part[k])
            for k in range(64):
                total += sums[k]
        for value in own[whole:]:
            total += np.float64(value) * np.float64(value)
        out[row] = total
