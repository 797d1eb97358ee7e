"""Reconstruction of gradients by agents that see only their neighbours' messages.

What an agent sends depends on what it received before, so that messages of neighbours carry the
gradients of agents far away. With step size η and gradients g that hardly change, neighbour j sends

    m_t = Wᵗ x₀ − η Σ_{k ≤ t} Wᵏ g      (row j),

which is linear in g. All these rows together are the knowledge matrix of the observers. Without
noise, every agent whose unit vector is in its row space is known exactly. With noise, generalised
least squares is the best linear estimate, and its covariance says how much of g it shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from corn.arrays import FloatArray
from corn.checks import require_count
from corn.errors import InvalidArgumentError

# Relative, of singular values: smaller ones are rounding errors of directions not observed.
_RANK_TOLERANCE = 1e-10
# A squared length this close to one counts as one.
_EXACT = 1e-6


def list_observed(mixing_matrix: FloatArray, coalition: Sequence[int]) -> list[int]:
    """Return the agents whose messages a coalition receives, and its own members."""
    members = sorted(set(coalition))
    if not members or members[0] < 0 or members[-1] >= len(mixing_matrix):
        raise InvalidArgumentError(
            f"coalition must be of agents 0 … {len(mixing_matrix) - 1}, found {members}"
        )
    # Agent i gives weight w_ij to messages of agent j: it receives those of nonzero columns.
    heard = np.flatnonzero(np.abs(mixing_matrix[members]).sum(axis=0)).tolist()
    return sorted({*heard, *members})


def make_knowledge(
    mixing_matrix: FloatArray, observed: Sequence[int], num_steps: int
) -> FloatArray:
    """Return the knowledge matrix, shape (steps · observed, n): the rows Σ_{k ≤ t} Wᵏ of each step.

    >>> W = np.full((2, 2), 0.5)
    >>> make_knowledge(W, [0], 2).tolist()
    [[1.0, 0.0], [1.5, 0.5]]
    """
    require_count("num_steps", num_steps)
    power, total, rows = np.eye(len(mixing_matrix)), np.zeros_like(mixing_matrix), []
    for _ in range(num_steps):
        # Message t has row Σ_{k ≤ t} Wᵏ, beginning with W⁰ = I: the first is sent before any
        # mixing.
        total = total + power
        rows.append(total[list(observed)])
        power = power @ mixing_matrix
    return np.concatenate(rows)


def find_recoverable(knowledge: FloatArray) -> list[int]:
    """Return the agents whose gradients follow from what is observed, without noise."""
    _, values, right = np.linalg.svd(knowledge, full_matrices=False)
    space = right[values > _RANK_TOLERANCE * values[0]]
    # The part of each unit vector within the row space has length one where all of it is inside.
    inside = (space**2).sum(axis=0)
    return np.flatnonzero(inside > 1 - _EXACT).tolist()


def recover_gradients(knowledge: FloatArray, observations: FloatArray) -> FloatArray:
    """Return all agents' gradients, shape (n, d), by least squares: exact where recoverable.

    ``observations`` are (Wᵗ x₀ − m_t)/η of the observed agents, shape (steps · observed, d), in the
    order of the knowledge matrix.
    """
    solved = np.linalg.lstsq(knowledge, observations, rcond=_RANK_TOLERANCE)[0]
    return np.asarray(solved, np.float64)


def sum_message_noise(
    mixing_matrix: FloatArray, covariance: FloatArray, observed: Sequence[int], num_steps: int
) -> FloatArray:
    """Return the covariance of the noise in all observations, in the order of the knowledge.

    Noise of step s has been mixed t − s times in the message of step t. Each step has new noise of
    this covariance, shape (n, n).
    """
    powers = [np.eye(len(mixing_matrix))]
    for _ in range(num_steps - 1):
        powers.append(powers[-1] @ mixing_matrix)
    # With a little more noise, because Cholesky fails where noise cancels exactly.
    root = np.linalg.cholesky(covariance + 1e-12 * np.trace(covariance) * np.eye(len(covariance)))
    size, n = len(observed), len(mixing_matrix)
    parts = np.zeros((num_steps * size, num_steps * n))
    for t in range(num_steps):
        for s in range(t + 1):
            # Block (t, s) maps the normals of step s to observation t; later noise has no part in
            # it.
            block = powers[t - s][list(observed)] @ root
            parts[t * size : (t + 1) * size, s * n : (s + 1) * n] = block
    total: FloatArray = parts @ parts.T
    return total


def estimate_gradients(
    knowledge: FloatArray, noise_covariance: FloatArray, observations: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the generalised least squares estimate, shape (n, d), and its standard errors, (n,).

    Errors are per coordinate; ∞ for agents that the observations do not determine.
    """
    values, vectors = np.linalg.eigh(noise_covariance)
    scale = 1 / np.sqrt(np.maximum(values, _RANK_TOLERANCE * values[-1]))
    # In whitened coordinates generalised least squares is ordinary least squares.
    whiten = scale[:, None] * vectors.T
    K, y = whiten @ knowledge, whiten @ observations
    left, singular, right = np.linalg.svd(K, full_matrices=False)
    kept = singular > _RANK_TOLERANCE * singular[0]
    # The covariance of the estimate is V S⁻² Vᵀ, whose diagonal is the sum of squares below.
    inverse = right[kept].T / singular[kept]
    estimate: FloatArray = inverse @ (left[:, kept].T @ y)
    errors = np.sqrt((inverse**2).sum(axis=1))
    known = np.isin(np.arange(knowledge.shape[1]), find_recoverable(knowledge))
    return estimate, np.where(known, errors, np.inf)
