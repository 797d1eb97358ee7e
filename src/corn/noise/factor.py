"""Sparse factors of a covariance: each nonzero is a stream that an agent must draw."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from corn.arrays import FloatArray, as_symmetric_matrix
from corn.covariance.decomposition import Decomposition
from corn.errors import InvalidArgumentError

# The smallest pivot, relative to the largest. Smaller ones could keep the factor sparser, but the
# error of the elimination grows with the ratio.
_LEAST_PIVOT = 0.01
# Entries this small, relative to the variances, are rounding errors.
_TOLERANCE = 1e-12


def factor_covariance(covariance: ArrayLike) -> FloatArray:
    """Return F, shape (m, streams), with F Fᵀ equal to a positive semidefinite (m, m) matrix.

    Two methods are tried, and the factor with fewer nonzeros is returned: elimination (a Cholesky
    factor in an order that keeps it sparse where the covariance is, with as many streams as the
    rank), and, where the matrix is diagonally dominant, a stream per nonzero pair as in DECOR.

    An entry of F Fᵀ differs from R_ij by at most m·10⁻¹²·√(R_ii R_jj). A matrix without such a
    factor is not positive semidefinite and is refused.

    >>> factor_covariance([[4.0, -2.0], [-2.0, 1.0]]).tolist()  # rank 1: one stream
    [[2.0], [-1.0]]
    """
    R = as_symmetric_matrix(covariance, name="covariance")
    candidates = [_eliminate(R)]
    if _is_diagonally_dominant(R):
        candidates.append(_split_into_pairs(R))
    factor = min(candidates, key=np.count_nonzero)
    _check_factor(R, factor)
    return factor


def choose_factors(decomposition: Decomposition) -> Decomposition:
    """Return the same private noise and seed groups, with factors that need fewer streams.

    Each group keeps its members and its covariance. So the noise keeps its covariance, and so does
    the part of it that a coalition cannot reproduce. Done once, where the plan is made: the members
    of a group must all draw with the same factor, to the last bit.
    """
    # One stream is as few as can be.
    chosen = (
        factor if factor.shape[1] == 1 else factor_covariance(factor @ factor.T)
        for factor in decomposition.factors
    )
    return Decomposition(decomposition.private_variance, decomposition.seed_groups, tuple(chosen))


def pool_groups(decomposition: Decomposition) -> Decomposition:
    """Return one seed group of all agents with the same covariance R: **for simulations only**.

    The noise has the same distribution with far fewer streams (n, where pairs of agents share
    n(n−1)/2), but every agent could compute everyone's noise.
    """
    factor = factor_covariance(decomposition.covariance)
    everyone = tuple(range(decomposition.num_agents))
    return Decomposition(np.zeros(decomposition.num_agents), (everyone,), (factor,))


def _eliminate(R: FloatArray) -> FloatArray:
    """Return a Cholesky factor; each turn eliminates the agent with the fewest remaining links."""
    # Relative to the variances, so that agents with little noise are factored as accurately.
    rest, variance = R.copy(), np.maximum(np.diag(R), np.finfo(float).tiny)
    negligible = _TOLERANCE * np.outer(np.sqrt(variance), np.sqrt(variance))
    columns: list[FloatArray] = []
    while True:
        # Entries below the tolerance are rounding errors: a direction without noise, or no link.
        linked = np.abs(rest) > negligible
        pivots = np.where(np.diag(linked), np.diag(rest) / variance, 0.0)
        if pivots.max() <= 0:
            return np.column_stack(columns) if columns else np.zeros((len(R), 0))
        eligible = np.flatnonzero(pivots >= _LEAST_PIVOT * pivots.max())
        # Minimum degree: eliminating an agent links all its neighbours, so few neighbours mean
        # little fill-in.
        num_links = linked.sum(axis=1)
        pivot = min(eligible, key=lambda agent: (num_links[agent], -pivots[agent]))
        column = np.where(linked[pivot], rest[pivot], 0.0) / np.sqrt(rest[pivot, pivot])
        columns.append(column)
        members = np.flatnonzero(column)
        rest[np.ix_(members, members)] -= np.outer(column[members], column[members])
        # Exactly zero, despite rounding errors of the subtraction: nobody is eliminated twice.
        rest[pivot] = rest[:, pivot] = 0.0


def _is_diagonally_dominant(R: FloatArray) -> bool:
    return bool((2 * np.diag(R) >= np.abs(R).sum(axis=1)).all())


def _split_into_pairs(R: FloatArray) -> FloatArray:
    """Return a stream √|R_ij|·(e_i ± e_j) per nonzero pair, and one for the rest of each agent."""
    rows, columns = np.nonzero(np.triu(R, 1))
    weights = np.sqrt(np.abs(R[rows, columns]))
    pairs = np.zeros((len(R), len(rows)))
    pairs[rows, np.arange(len(rows))] = weights
    pairs[columns, np.arange(len(rows))] = weights * np.sign(R[rows, columns])
    # Diagonal dominance makes this root real: a pair adds |R_ij| to both variances.
    own = np.diag(np.sqrt(2 * np.diag(R) - np.abs(R).sum(axis=1)))
    return np.hstack([pairs, own[:, np.diag(own) > 0]])


def _check_factor(R: FloatArray, factor: FloatArray) -> None:
    # The factor is checked, not the input: an indefinite matrix has no factor, whatever the reason.
    scale = np.sqrt(np.maximum(np.diag(R), 0))
    error = np.abs(factor @ factor.T - R)
    allowed = len(R) * _TOLERANCE * np.outer(scale, scale)
    if (error > allowed).any():
        raise InvalidArgumentError(
            "covariance must be positive semidefinite: the closest factor found misses an entry "
            f"by {error.max():.3g}"
        )
