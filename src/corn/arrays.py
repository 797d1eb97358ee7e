"""The array types that all packages share, and checks of matrices."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from corn.checks import require
from corn.errors import InvalidArgumentError

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]


def as_square_matrix(value: ArrayLike, *, name: str) -> FloatArray:
    """Return ``value`` as a new finite float64 matrix (n, n) with n ≥ 1, or raise."""
    try:
        matrix = np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{name} must be a matrix of numbers: {error}") from error
    is_square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] and matrix.size > 0
    found = f"shape {matrix.shape}"
    require(is_square, name, "a square matrix with at least one row", found)
    if not np.isfinite(matrix).all():
        i, j = np.argwhere(~np.isfinite(matrix))[0]
        raise InvalidArgumentError(f"{name} must be finite, found {matrix[i, j]} at ({i}, {j})")
    return matrix


def as_symmetric_matrix(
    value: ArrayLike, *, name: str, relative_tolerance: float = 1e-9
) -> FloatArray:
    """Return ``value`` as an exactly symmetric matrix if it is one to within the tolerance."""
    matrix = as_square_matrix(value, name=name)
    asymmetry = float(np.abs(matrix - matrix.T).max())
    if asymmetry > relative_tolerance * float(np.abs(matrix).max()):
        raise InvalidArgumentError(
            f"{name} must be symmetric, found mirrored entries that differ by {asymmetry:.3g}"
        )
    return (matrix + matrix.T) / 2
