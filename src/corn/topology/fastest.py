"""The symmetric weights that mix fastest on a graph: a semidefinite program for small networks."""

from __future__ import annotations

import numpy as np

from corn.arrays import FloatArray, IntArray
from corn.errors import InfeasibleError, MissingExtraError


def fastest_mixing_weights(links: FloatArray) -> FloatArray:
    """Minimise ‖W − 11ᵀ/n‖₂ over symmetric doubly stochastic W supported on ``links``.

    ``links`` is a symmetric (n, n) matrix of 0 and 1. Boyd, Diaconis and Xiao's fastest mixing
    Markov chain. Some links may get weight zero. Meant for up to about a hundred agents.
    """
    rows, columns = np.nonzero(np.triu(links, 1))
    if len(rows) == 0:
        return np.eye(len(links))
    weights = _solve(len(links), rows, columns)
    W = np.zeros_like(links)
    W[rows, columns] = W[columns, rows] = weights
    # The solver leaves the constraints by its tolerance; shrinking puts the weights inside again.
    W /= max(1.0, float(W.sum(axis=1).max()))
    np.fill_diagonal(W, 1 - W.sum(axis=1))
    return W


def _solve(num_agents: int, rows: IntArray, columns: IntArray) -> FloatArray:
    try:
        import cvxpy as cp
    except ImportError as error:
        raise MissingExtraError("fastest-mixing weights", extra="sdp") from error
    incidence = np.zeros((num_agents, len(rows)))
    incidence[rows, np.arange(len(rows))] = 1
    incidence[columns, np.arange(len(rows))] = -1
    weights = cp.Variable(len(rows), nonneg=True)
    W = np.eye(num_agents) - incidence @ cp.diag(weights) @ incidence.T
    spread = cp.norm(W - 1 / num_agents, 2)
    problem = cp.Problem(cp.Minimize(spread), [np.abs(incidence) @ weights <= 1])
    problem.solve(solver=cp.CLARABEL)
    if problem.status != cp.OPTIMAL:
        raise InfeasibleError(
            f"the solver for the fastest-mixing weights ended with status {problem.status!r}; "
            "try metropolis weights"
        )
    # Weights below the solver's accuracy are zeros of the true solution.
    return np.where(weights.value < 1e-7, 0.0, weights.value)
