"""The transform of :mod:`corn.noise.normals` as one compiled loop, in the same bits, for speed.

Needs Numba, the extra ``fast``. NumPy walks through memory once for each of the fifty operations
that a pair of normals takes; this does them all while the values are in registers. LLVM neither
reorders nor fuses floating point operations unless told to, and is not told to here.

Importing this module compiles, a few seconds the first time; Numba keeps the machine code where
Python keeps its byte code, until this file changes. So no constant of another file is part of it:
they are arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from numpy.typing import DTypeLike

from corn.noise.normals import PAIRS_PER_BLOCK, NormalArray, Words, precision_of

_SETTINGS: Any = {"error_model": "numpy", "nogil": True}
_PAIRS = 512  # a number known when compiling, without which LLVM makes no vector instructions

if numba.config.DISABLE_JIT or PAIRS_PER_BLOCK != _PAIRS:
    raise ImportError("Numba does not compile, or blocks are not those that this file is for")


def transform_words(words: Words, out: NormalArray) -> None:
    """As :func:`corn.noise.normals.transform_words`, for contiguous arrays, without buffers."""
    _transform(words, out, out.dtype.type(1), False, *_constants(out.dtype))


def add_normals(words: Words, out: NormalArray, weight: float) -> None:
    """Add ``weight`` times what :func:`transform_words` would write."""
    _transform(words, out, out.dtype.type(weight), True, *_constants(out.dtype))


@lru_cache(maxsize=2)
def _constants(dtype: DTypeLike) -> tuple[Any, ...]:
    """What :class:`corn.noise.normals.Precision` has, in tuples of scalars."""
    own = precision_of(dtype)
    reals = (own.word, own.half_word, own.angle_unit, own.low_angle_unit, own.log_of_exponent)
    masks = (own.exponent_mask, own.mantissa_mask, own.sign_mask)
    integers = (own.scaled_root_half_bits, own.root_half_bits, *masks)
    groups = (own.log, own.sine, own.cosine, reals, integers)
    return tuple(tuple(value[()] for value in group) for group in groups)


def _signature(dtype: DTypeLike) -> Any:
    words, out = np.empty((1, 1, 1), np.uint32), np.empty((1, 1, 1), dtype)
    arguments = (words, out, out[0, 0, 0], True, *_constants(out.dtype))
    return numba.void(*map(numba.typeof, arguments))


def _inline(function: Callable[..., Any]) -> Any:
    return numba.njit(function, **_SETTINGS)


def _compile(function: Callable[..., Any]) -> Any:
    signatures = [_signature(np.float32), _signature(np.float64)]
    try:
        return numba.njit(signatures, cache=True, **_SETTINGS)(function)
    except Exception:  # noqa: BLE001, as kept code fails to load or save in many ways
        return numba.njit(signatures, **_SETTINGS)(function)


@_inline
def _polynomial(coefficients: Any, x: Any) -> Any:  # pragma: no cover, runs as machine code
    value = x * coefficients[-1]
    for k in range(len(coefficients) - 2, 0, -1):
        value = (value + coefficients[k]) * x
    return value + coefficients[0]


@_compile
def _transform(  # pragma: no cover, runs as machine code
    words: Any,
    out: Any,
    weight: Any,
    adds: Any,
    log: Any,
    sine: Any,
    cosine: Any,
    reals: Any,
    integers: Any,
) -> None:
    # Step by step what the array operations do. The loops have a fixed length and no branches that
    # depend on k, and none writes to both halves of ``out``: LLVM makes vector instructions of all.
    word, half_word, angle_unit, low_angle_unit, log_of_exponent = reals
    scaled_root_half, root_half, exponent_mask, mantissa_mask, sign_mask = integers
    real, integer = out.dtype.type, type(root_half)
    one = real(1)
    first, second = np.empty((2, _PAIRS), out.dtype)
    bits = first.view(integer)
    for block in range(len(words)):
        for k in range(_PAIRS):
            fraction = real(words[block, 1, k]) * word + half_word
            first[k] = real(words[block, 0, k]) + fraction
        for k in range(_PAIRS):
            shifted = integer(bits[k] - scaled_root_half)
            second[k] = real(integer(shifted & exponent_mask)) * log_of_exponent
            bits[k] = integer((shifted & mantissa_mask) + root_half)
        for k in range(_PAIRS):
            ratio = (first[k] - one) / (first[k] + one)
            radius = np.sqrt(_polynomial(log, ratio * ratio) * ratio + second[k])
            angle = real(np.int32(words[block, 2, k] << np.uint32(1))) * angle_unit
            if words.shape[1] == 4:
                angle += real(words[block, 3, k]) * low_angle_unit
            square = angle * angle
            first[k] = _polynomial(cosine, square) * radius
            second[k] = _polynomial(sine, square) * angle * radius
        for k in range(_PAIRS):
            bits[k] ^= integer(integer(np.int32(words[block, 2, k])) & sign_mask)
        if adds:
            for k in range(_PAIRS):
                out[block, 0, k] += first[k] * weight
            for k in range(_PAIRS):
                out[block, 1, k] += second[k] * weight
        else:
            for k in range(_PAIRS):
                out[block, 0, k] = first[k]
            for k in range(_PAIRS):
                out[block, 1, k] = second[k]
