"""Whether noise is drawn by compiled code: where the extra ``fast`` is installed and works."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from corn.errors import CornWarning
from corn.noise.normals import NUM_BUFFERS, PAIRS_PER_BLOCK, precision_of, sum_normals


@cache
def find_compiled() -> ModuleType | None:
    """:mod:`corn.noise.compiled`, if it gives NumPy's bits here; None where Numba is not installed.

    Takes seconds the first time that Numba compiles for a machine: a process that others wait for
    calls it before they do. Where Numba is installed and does not work, a warning says so, once.
    """
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        compiled = importlib.import_module("corn.noise.compiled")
        for dtype in (np.float32, np.float64):
            _check_bits(compiled, dtype)
    except Exception as error:  # noqa: BLE001, as installations break in many ways
        warnings.warn(
            f"noise is drawn by NumPy, three times as slowly, as Numba does not work here: {error}",
            CornWarning,
            stacklevel=2,
        )
        return None
    return compiled


def _check_bits(compiled: Any, dtype: Any) -> None:
    """Compare with NumPy, whatever the processor, its compiler and kept machine code are."""
    shape = (2, 2, precision_of(dtype).words_per_block)
    words = np.random.Generator(np.random.SFC64(0)).integers(0, 1 << 32, shape, dtype=np.uint32)
    # Some blocks of nothing but tails, and some of which a part is.
    words[0, :, :PAIRS_PER_BLOCK] >>= np.array([[8], [14]], np.uint32)
    weights = np.array([0.3, -0.7], dtype)
    expected, found = np.empty((2, 2, 2, PAIRS_PER_BLOCK), dtype)
    buffers = np.empty((NUM_BUFFERS, 2, PAIRS_PER_BLOCK), dtype)
    sum_normals(words, weights, expected, buffers=buffers)
    compiled.sum_normals(words, weights, found)
    if not np.array_equal(found, expected):
        raise ArithmeticError(f"its {np.dtype(dtype)} differs from NumPy's")
