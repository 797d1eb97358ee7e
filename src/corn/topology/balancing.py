"""Doubly stochastic scaling of a non-negative matrix (Sinkhorn), finished by Newton's method."""

from __future__ import annotations

import numpy as np
import scipy.linalg
import scipy.sparse
import scipy.sparse.csgraph

from corn.arrays import FloatArray, as_square_matrix
from corn.errors import InfeasibleError, InvalidArgumentError

_SINKHORN_SWEEPS = 50
_NEWTON_STEPS = 100


def balance(matrix: FloatArray, *, tolerance: float = 1e-13) -> FloatArray:
    """Return diag(r) · matrix · diag(c) whose rows and columns sum to one within ``tolerance``.

    Such r, c > 0 exist exactly if every positive entry lies on a permutation of positive entries
    (total support); otherwise :class:`InfeasibleError` names an entry that does not.

    >>> balance(np.array([[1.0, 1.0], [1.0, 3.0]])).sum(axis=0).round(12).tolist()
    [1.0, 1.0]
    """
    A = as_square_matrix(matrix, name="matrix")
    if (A < 0).any():
        raise InvalidArgumentError(f"matrix must not be negative, found {A.min():g}")
    _require_total_support(A)
    r, c = _sweep(A)
    return _polish(r[:, None] * A * c, tolerance)


def _sweep(A: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Sinkhorn's alternating scaling: safe from any start, but slow near the end on long graphs."""
    c = np.ones(len(A))
    r = c
    for _ in range(_SINKHORN_SWEEPS):
        r = 1 / (A @ c)
        c = 1 / (A.T @ r)
    return r, c


def _polish(P: FloatArray, tolerance: float) -> FloatArray:
    """Damped Newton on the convex potential Σ p_ij e^{u_i+v_j} − Σu − Σv: a few quadratic steps."""
    n = len(P)
    for _ in range(_NEWTON_STEPS):
        residual = np.concatenate([P.sum(axis=1), P.sum(axis=0)]) - 1
        if np.abs(residual).max() <= tolerance:
            return P
        hessian = np.block([[np.diag(P.sum(axis=1)), P], [P.T, np.diag(P.sum(axis=0))]])
        # (1, −1) changes nothing; filling that direction makes the system regular. One more such
        # direction per connected part is removed by the small ridge.
        gauge = np.concatenate([np.ones(n), -np.ones(n)])
        hessian += np.outer(gauge, gauge) / n + 1e-14 * np.eye(2 * n)
        step = -scipy.linalg.solve(hessian, residual, assume_a="pos")
        # Limiting the step to a factor e per entry keeps the potential decreasing.
        step /= max(1.0, float(np.abs(step).max()))
        P = np.exp(step[:n])[:, None] * P * np.exp(step[n:])
    raise InfeasibleError(
        f"no doubly stochastic scaling within {tolerance:g} after {_NEWTON_STEPS} Newton steps: "
        "are some edge weights many orders of magnitude apart?"
    )


def _require_total_support(A: FloatArray) -> None:
    # An entry lies on a positive permutation iff its row and column are in one strong component
    # after the columns are permuted by any perfect matching.
    pattern = scipy.sparse.csr_matrix(A > 0)
    match = scipy.sparse.csgraph.maximum_bipartite_matching(pattern, perm_type="column")
    if (match < 0).any():
        raise InfeasibleError(
            f"no doubly stochastic weights exist: row {int(np.argmin(match))} cannot be matched "
            "with a column of its own"
        )
    _, part = scipy.sparse.csgraph.connected_components(
        pattern[:, match], directed=True, connection="strong"
    )
    i, k = np.nonzero(A[:, match])
    stray = np.flatnonzero(part[i] != part[k])
    if len(stray):
        row, column = int(i[stray[0]]), int(match[k[stray[0]]])
        raise InfeasibleError(
            "no doubly stochastic weights exist that use every link: the one from agent "
            f"{column} to agent {row} lies on no cycle; remove it or add a way back"
        )
