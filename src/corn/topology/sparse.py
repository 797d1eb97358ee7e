"""The speed of large mixing matrices, from products with their links alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy.sparse
import scipy.sparse.linalg

from corn.arrays import FloatArray
from corn.errors import InvalidArgumentError
from corn.topology.gossip import GossipRound
from corn.topology.lattice import find_lattice, lattice_eigenvalues
from corn.topology.mixing import SparseMatrix
from corn.topology.spectrum import Spectrum

MOST_DENSE = 2000
"""Agents up to which all eigenvalues of a dense matrix take a second or two."""

_MOST_RESTARTS = 300
_ABOVE_ONE = 1e-7  # where the shift of an inverse stays regular


def find_extremes(matrix: SparseMatrix) -> FloatArray:
    """Return the least and the largest eigenvalue of a symmetric W, without the average's 1.

    >>> ring = SparseMatrix(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]))
    >>> find_extremes(ring).round(6).tolist()
    [0.25, 0.25]
    """
    if not is_symmetric_sparse(matrix):
        raise InvalidArgumentError(
            f"mixing weights of more than {MOST_DENSE} agents must be symmetric for their speed to "
            "be measured, found others: try metropolis weights and plain rounds"
        )
    row = find_lattice(matrix)
    if row is not None:
        eigenvalues = lattice_eigenvalues(row).real.ravel()[1:]
        return np.array([eigenvalues.min(), eigenvalues.max()])
    n = int(matrix.shape[0])
    # The average's eigenvalue 1 becomes −1, the least that W can have, where it hides no other.
    apart = scipy.sparse.linalg.LinearOperator(
        (n, n), matvec=lambda x: matrix @ x - 2 * x.mean(), dtype=np.float64
    )
    low = _solve(scipy.sparse.linalg.aslinearoperator(matrix), "SA")
    try:
        high = _solve(apart, "LA")
    except scipy.sparse.linalg.ArpackNoConvergence:
        # Slow networks are long, and so have few links across any cut: factors stay sparse.
        near = scipy.sparse.linalg.eigsh(
            scipy.sparse.csc_array(matrix), k=2, sigma=1 + _ABOVE_ONE, return_eigenvectors=False
        )
        high = float(min(near))
    return np.array([low, high])


def is_symmetric_sparse(matrix: SparseMatrix) -> bool:
    """Return whether W equals its transpose up to rounding."""
    difference = abs(matrix - matrix.T)
    return not difference.nnz or float(difference.max()) <= 1e-12


def sparse_spectrum(
    matrix: SparseMatrix, schedule: Sequence[GossipRound], *, accuracy: float = 0.01
) -> Spectrum:
    """Return the spectrum of a step without the parts that need all eigenvalues.

    Those are NaN, or empty: singular values, the least of them, and the rank.
    """
    extremes = find_extremes(matrix)
    # The polynomial of the rounds is largest at an end: powers, and Chebyshev's within its range.
    rate = float(np.abs(_apply(schedule, extremes)).max())
    rate = 1.0 if rate > 1 - 8 * matrix.shape[0] * np.finfo(float).eps else rate
    time = math.inf if rate == 1 else max(1, math.ceil(math.log(accuracy) / math.log(rate)))
    return Spectrum(
        singular_values=np.empty(0),
        second_singular_value=rate,
        second_eigenvalue=rate,
        spectral_gap=1 - rate,
        rank=None,
        smallest_singular_value=math.nan,
        mixing_time=time,
        accuracy=accuracy,
    )


def _solve(operator: scipy.sparse.linalg.LinearOperator, which: str) -> float:
    found = scipy.sparse.linalg.eigsh(
        operator,
        k=1,
        which=which,
        ncv=min(40, operator.shape[0]),
        maxiter=_MOST_RESTARTS,
        # A fixed start, so that a network's cool-down is the same each time.
        v0=np.cos(np.arange(operator.shape[0]) ** 2),
        return_eigenvectors=False,
    )
    return float(found[0])


def _apply(schedule: Sequence[GossipRound], eigenvalues: FloatArray) -> FloatArray:
    change, current = np.zeros_like(eigenvalues), np.ones_like(eigenvalues)
    for momentum, gain in schedule:
        change = momentum * change + gain * (eigenvalues - 1) * current
        current = current + change
    return current
