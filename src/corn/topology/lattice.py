"""Rings and tori: networks that look the same from every agent, known by their first row of W.

Their matrices are diagonal in the Fourier basis, so that no matrix of n × n numbers is needed.
"""

from __future__ import annotations

import numpy as np
import scipy.fft

from corn.arrays import FloatArray
from corn.topology.mixing import SparseMatrix

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
