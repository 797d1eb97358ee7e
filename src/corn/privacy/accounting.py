"""Privacy of given noise: ε(δ) and δ(ε) of each agent, and of all agents with a promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse.csgraph import connected_components

from corn.checks import FloatArray, as_symmetric_matrix, require, require_count, require_length
from corn.privacy import gaussian, subsampling
from corn.privacy.budget import AgentPromise, ClippedQuery, PrivacyBudget

_EPS = float(np.finfo(np.float64).eps)
# The size of a negative eigenvalue, relative to the largest, up to which R counts as singular.
_NEGATIVE_TOLERANCE = 1e-9


def precision_diagonal(covariance: ArrayLike, *, num_terms: int = 0) -> FloatArray:
    """Return an upper bound on [R⁻¹]_jj for each agent j, shape (n,), tight to rounding.

    Agents whose noise is independent of that of all others are a part of their own. Where R is
    singular to rounding within a part, some combination of its messages may show gradients without
    noise, and each agent of the part counts as exposed, with ∞: rounding hides which of them are.

    The bound is above the true value by about 4·n·1e-16·κ relative, with κ the condition number of
    the correlation matrix; where that nears 1 the matrix counts as singular. ``num_terms`` products
    were summed for each entry of R, whose rounding errors must not count as noise; 0 if R is exact.

    >>> precision_diagonal([[2.0, 1.0], [1.0, 2.0]]).round(6)
    array([0.666667, 0.666667])
    """
    R = as_symmetric_matrix(covariance, name="covariance")
    variance = np.diag(R)
    least = float(variance.min())
    require(least >= 0, "covariance", "without negative variances", f"{least:.3g}")
    # Scaling to unit variances makes the error independent of the ratios between agents' variances.
    scale = np.where(variance > 0, np.sqrt(variance), 1.0)
    S = R / scale / scale[:, None]
    # Of booleans: SciPy takes small numbers for zeros.
    _, part_of = connected_components(R != 0, directed=False)
    sizes = np.bincount(part_of)
    # Agents that draw alone, all at once: there may be thousands.
    diagonal = np.where(variance > 0, _invert_correlation(np.eye(1), num_terms)[0], np.inf)
    for part in np.flatnonzero(sizes > 1):
        own = np.flatnonzero(part_of == part)
        diagonal[own] = _invert_correlation(S[np.ix_(own, own)], num_terms)
    return diagonal / scale / scale


def _invert_correlation(S: FloatArray, num_terms: int) -> FloatArray:
    """Return an upper bound on the diagonal of S⁻¹, ∞ where S is singular to rounding."""
    eigenvalues, vectors = np.linalg.eigh(S)
    # Slightly negative eigenvalues are the rounding of a singular R.
    is_possible = eigenvalues[0] >= -_NEGATIVE_TOLERANCE * max(eigenvalues[-1], 1.0)
    found = f"a correlation matrix with eigenvalue {eigenvalues[0]:.3g}"
    require(bool(is_possible), "covariance", "positive semidefinite", found)
    # The computed pair is exact for a matrix within `error` of the true one, S: S ⪰ VΛVᵀ − error·I.
    # The inverse of the right side is above S⁻¹, so it, and not the computed inverse, is reported.
    # A sum of k products is off by k·eps of the sum of their sizes at most, which in a correlation
    # matrix is at most 1 by Cauchy and Schwarz.
    error = eigenvalues.size * _EPS * (2 * max(eigenvalues[-1], 1.0) + num_terms)
    # An eigenvalue that is not provably positive may be arbitrarily small, and then even a tiny
    # part in its direction, such as rounding could have rotated there, is exposed.
    if eigenvalues[0] <= 2 * error:
        return np.full(len(S), np.inf)
    diagonal: FloatArray = vectors**2 @ (1 / (eigenvalues - error))
    return diagonal * (1 + eigenvalues.size * _EPS)


@dataclass(frozen=True, eq=False)
class PrivacyLoss:
    """The privacy loss of each agent's data in a run, to an adversary who observes every message.

    The run has ``num_steps`` steps with **fresh** noise of precision diagonal ``precision``, shape
    (n,). Changing agent j's data moves only row j, by at most Δ, so the run is exactly μ_j-GDP with
    μ_j² = Δ² T [R⁻¹]_jj, where the paper's Theorem 2 has an upper bound. In passes a sample moves
    one step of each pass begun, and T counts those. Made by ``account`` and ``account_precision``.
    """

    precision: FloatArray
    num_steps: int
    query: ClippedQuery

    @cached_property
    def mu(self) -> FloatArray:
        """μ of each agent, shape (n,); ∞ for an agent that the noise does not hide."""
        self.query.require_mu()
        # Gaussian mechanisms compose exactly: the squares of their μ add up.
        counted = self.query.participations(self.num_steps)
        return self.query.sensitivity * np.sqrt(counted * self.precision)

    @property
    def worst_agent(self) -> int:
        """The least protected agent: the one with the largest precision."""
        return int(self.precision.argmax())

    def epsilon(self, delta: float, *, accounting: gaussian.Accounting = "gdp") -> FloatArray:
        """Return ε at this δ for each agent, shape (n,); ∞ for an agent that is exposed."""
        accountant = gaussian.find_accountant(accounting)
        if self.query.is_subsampled:
            gaussian.require_exact(accounting)
            return self._of_each(lambda y: self._repeat(y).epsilon(delta), self.precision)
        epsilons = self._of_each(lambda mu: accountant.epsilon_from(mu, delta), self.mu)
        if accounting == "paper":
            gaussian.warn_if_unproved(float(epsilons.max()), delta)
        return epsilons

    def delta(self, epsilon: float) -> FloatArray:
        """Return the exact δ at this ε for each agent, shape (n,); 1 for one that is exposed."""
        if self.query.is_subsampled:
            return self._of_each(lambda y: self._repeat(y).delta(epsilon), self.precision)
        return self._of_each(lambda mu: gaussian.delta_from(mu, epsilon), self.mu)

    def worst_epsilon(self, delta: float, *, accounting: gaussian.Accounting = "gdp") -> float:
        """Return the largest ε of any agent at this δ."""
        worst = replace(self, precision=self.precision[[self.worst_agent]])
        return float(worst.epsilon(delta, accounting=accounting)[0])

    def _repeat(self, precision: float) -> subsampling.Releases:
        return subsampling.repeat_steps(precision, self.num_steps, self.query)

    @staticmethod
    def _of_each(loss_of: Callable[[float], float], values: FloatArray) -> FloatArray:
        # Agents with the same noise are computed once: on symmetric graphs that is all of them.
        distinct, group = np.unique(values, return_inverse=True)
        return np.array(list(map(loss_of, distinct.tolist())))[group]


def account(covariance: ArrayLike, query: ClippedQuery, *, num_steps: int) -> PrivacyLoss:
    """Return the privacy loss of a run with this noise.

    Args:
        covariance: R of the noise **really added** at each step, shape (n, n). For singular R see
            ``precision_diagonal``.
        query: The clipped gradient that the noise is added to.
        num_steps: The number of steps, each with noise drawn afresh.

    >>> loss = account([[50.0, 0.0], [0.0, 100.0]], ClippedQuery(0.1), num_steps=5000)
    >>> loss.mu.round(6), loss.epsilon(1e-5).round(3), loss.worst_agent
    (array([2.      , 1.414214]), array([9.997, 6.573]), 0)
    """
    return PrivacyLoss(precision_diagonal(covariance), require_count("num_steps", num_steps), query)


def account_precision(precision: ArrayLike, query: ClippedQuery, *, num_steps: int) -> PrivacyLoss:
    """Return the privacy loss of a run, given the diagonal of R⁻¹, shape (n,).

    An infinite entry is an agent without protection, zero an agent whose data is never used.
    """
    diagonal = np.array(precision, dtype=np.float64)
    shape = f"shape {diagonal.shape}"
    require(diagonal.ndim == 1 and diagonal.size > 0, "precision", "one for each agent", shape)
    # Written so that NaN, for which every comparison is false, is refused too.
    require(bool((diagonal >= 0).all()), "precision", "non-negative", f"{diagonal.min():g}")
    return PrivacyLoss(diagonal, require_count("num_steps", num_steps), query)


def account_promises(precision: ArrayLike, budget: PrivacyBudget, *, num_steps: int) -> FloatArray:
    """Return each agent's exact ε at its own δ, shape (n,), after ``num_steps`` of a budget's run.

    ``precision`` is [R⁻¹]_ii of each agent, shape (n,).
    """
    diagonal = np.array(precision, dtype=np.float64)
    spent = np.zeros(diagonal.size)
    if num_steps == 0:
        return spent
    for promise, agents in group_agents(budget, diagonal.size).items():
        loss = account_precision(diagonal[agents], promise.query, num_steps=num_steps)
        spent[agents] = loss.epsilon(promise.delta)
    return spent


def group_agents(budget: PrivacyBudget, num_agents: int) -> dict[AgentPromise, list[int]]:
    """Return the agents that have each of a budget's promises, in increasing order."""
    if budget.num_agents is None:
        return {budget.promise: list(range(num_agents))}
    require_length("precision", num_agents, budget.num_agents, per="agent")
    groups: dict[AgentPromise, list[int]] = {}
    for agent, promise in enumerate(budget.promises):
        groups.setdefault(promise, []).append(agent)
    return groups
