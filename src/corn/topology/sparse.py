"""The speed of large mixing matrices, from products with their links alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy.fft
import scipy.sparse
import scipy.sparse.linalg

from corn.checks import FloatArray
from corn.errors import InvalidArgumentError
from corn.topology.gossip import GossipRound, apply_to_eigenvalues
from corn.topology.mixing import SparseMatrix
from corn.topology.spectrum import Spectrum

_TOLERANCE = 1e-12


def find_lattice(matrix: SparseMatrix) -> FloatArray | None:
    """Return the first row of W in the shape of the ring or torus that it mixes on, if it does.

    W_ij = row[(j − i) mod n] on a ring, and on a torus of r × c agents with row and column of each
    agent in the place of its number. The weights themselves are compared, not the graph's name.

    >>> ring = SparseMatrix(np.array([[0.5, 0.2, 0.3], [0.3, 0.5, 0.2], [0.2, 0.3, 0.5]]))
    >>> find_lattice(ring)
    array([0.5, 0.2, 0.3])
    """
    n = int(matrix.shape[0])
    first = matrix[[0]].toarray()[0]
    hops = np.flatnonzero(first)
    # A torus links agent 0 with that of the next row, whose number is the length of a row.
    sides = [(n,), *((n // int(c), int(c)) for c in hops if 1 < c < n and n % c == 0)]
    for side in sides:
        if _is_translated(matrix, first, hops, side):
            return np.asarray(first.reshape(side))
    return None


def _is_translated(
    matrix: SparseMatrix, first: FloatArray, hops: np.ndarray, sides: tuple[int, ...]
) -> bool:
    if matrix.nnz != len(hops) * matrix.shape[0]:
        return False
    agents = np.unravel_index(np.arange(matrix.shape[0]), sides)
    for hop in hops:
        moves = np.unravel_index(hop, sides)
        places = [(at + move) % side for at, move, side in zip(agents, moves, sides, strict=True)]
        targets = np.ravel_multi_index(tuple(places), sides)
        found = np.asarray(matrix[np.arange(len(targets)), targets])
        if not (np.abs(found - first[hop]) <= _TOLERANCE).all():
            return False
    return True


def lattice_eigenvalues(first_row: FloatArray) -> np.ndarray:
    """Return the eigenvalues of W, complex and in the shape of its first row."""
    # The transform of a real row is conjugate to that of W's eigenvalues: as a set, the same.
    return np.asarray(scipy.fft.fftn(first_row))


MOST_DENSE = 2000
"""Agents up to which all eigenvalues of a dense matrix take a second or two."""

_MOST_RESTARTS = 50
_BESIDE = 1e-7  # from ±1, where W shifted by so much is regular


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
    low = _search(scipy.sparse.linalg.aslinearoperator(matrix), "SA")
    high = _search(apart, "LA")
    # Inverses near −1 and 1 find what products do not. Networks that mix that slowly are long, and
    # have few links across any cut, so that the factors stay sparse.
    if low is None:
        low = _search_near(matrix, -1 - _BESIDE, 1)
    if high is None:
        high = _search_near(matrix, 1 + _BESIDE, 2)
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
    rate = float(np.abs(apply_to_eigenvalues(schedule, extremes)).max())
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


def _search(operator: scipy.sparse.linalg.LinearOperator, which: str) -> float | None:
    """Return the least or the largest eigenvalue, or None if it does not converge."""
    try:
        found = scipy.sparse.linalg.eigsh(
            operator,
            k=1,
            which=which,
            ncv=min(40, operator.shape[0]),
            maxiter=_MOST_RESTARTS,
            v0=_start(operator.shape[0]),
            return_eigenvectors=False,
        )
    except scipy.sparse.linalg.ArpackNoConvergence:
        return None
    return float(found[0])


def _search_near(matrix: SparseMatrix, shift: float, count: int) -> float:
    """Return the farthest of the eigenvalues nearest to a number just beyond all of them."""
    found = scipy.sparse.linalg.eigsh(
        scipy.sparse.csc_array(matrix),
        k=count,
        sigma=shift,
        v0=_start(matrix.shape[0]),
        return_eigenvectors=False,
    )
    return float(found[np.abs(found - shift).argmax()])


def _start(num_agents: int) -> FloatArray:
    """Return a fixed start of a search, so that a network's cool-down is the same each time."""
    return np.asarray(np.cos(np.arange(num_agents) ** 2.0))
