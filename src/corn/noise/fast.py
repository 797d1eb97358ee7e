"""Whether noise is drawn by compiled code: where Numba is installed and works."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from corn.errors import CornWarning
from corn.noise.normals import NUM_BUFFERS, PAIRS_PER_BLOCK, WORDS_PER_BLOCK, sum_normals


@cache
def find_compiled() -> ModuleType | None:
    """Return :mod:`corn.noise.compiled` if it gives NumPy's bits here, None without Numba.

    Takes seconds the first time that Numba compiles for a machine: a process that others wait for
    calls it before they do. Where Numba is installed and does not work, a warning says so, once.
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


def _check_bits(compiled: Any) -> None:
    """Compare with NumPy, whatever the processor, its compiler and kept machine code are."""
    shape = (2, 2, WORDS_PER_BLOCK)
    words = np.random.Generator(np.random.SFC64(0)).integers(0, 1 << 32, shape, dtype=np.uint32)
    # Some blocks in which all pairs need spares, and some in which a part does, at both ends of u.
    upper = words[0, :, :PAIRS_PER_BLOCK]
    upper >>= np.array([[16], [14]], np.uint32)
    upper[:, ::2] ^= np.uint32(0xFFFFFFFF)
    weights = np.array([0.3, -0.7])
    expected, found = np.empty((2, 2, 2, PAIRS_PER_BLOCK))
    buffers = np.empty((NUM_BUFFERS, 2, PAIRS_PER_BLOCK))
    sum_normals(words, weights, expected, buffers=buffers)
    compiled.sum_normals(words, weights, found)
    if not np.array_equal(found, expected):
        raise ArithmeticError("its normals differ from NumPy's")
    noise = found.ravel()
    for real in (np.float32, np.float64):
        gradient: Any = noise[::-1].astype(real)
        step, model = np.empty_like(gradient), np.zeros_like(gradient)
        compiled.take_half_step(step, model, gradient, noise, 0.3, 2.0**-6, -1.0)
        released = np.rint((gradient.astype(np.float64) * 0.3 + noise) * 64) / 64
        if not np.array_equal(step, released):
            raise ArithmeticError("its releases differ from NumPy's")
