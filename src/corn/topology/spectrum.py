"""The speed of a mixing matrix: singular values, eigenvalues and mixing time.

Of large networks it is found from products with their links alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse
import scipy.sparse.linalg

from corn.checks import FloatArray, as_square_matrix, require
from corn.errors import InvalidArgumentError
from corn.topology.gossip import GossipRound, apply_to_eigenvalues
from corn.topology.mixing import SparseMatrix, is_symmetric

MOST_DENSE = 2000
"""Agents up to which all eigenvalues of a dense matrix take a second or two."""

_MOST_RESTARTS = 50
_BESIDE = 1e-7  # from ±1, where W shifted by so much is regular


@dataclass(frozen=True)
class Spectrum:
    """The quantities that determine how fast disagreement between agents decays.

    Attributes:
        second_singular_value: σ₂ = ‖W − 11ᵀ/n‖₂, the worst contraction of disagreement in one step.
            The paper's λ₂(WᵀW) is its square.
        second_eigenvalue: |λ₂|, the contraction per step in the long run; equals σ₂ if W = Wᵀ.
        mixing_time: steps until at most ``accuracy`` of any disagreement is left; inf if never.
        accuracy: the remaining disagreement to which ``mixing_time`` refers.
    """

    second_singular_value: float
    second_eigenvalue: float
    mixing_time: float
    accuracy: float

    @property
    def spectral_gap(self) -> float:
        """1 − |λ₂|; zero if the agents never agree."""
        return 1 - self.second_eigenvalue


def spectrum(mixing_matrix: FloatArray, *, accuracy: float = 0.01) -> Spectrum:
    """Return the spectrum of a doubly stochastic mixing matrix.

    >>> complete = np.full((4, 4), 0.25)
    >>> spectrum(complete).mixing_time, spectrum(complete).spectral_gap
    (1, 1.0)
    """
    require(0 < accuracy < 1, "accuracy", "in (0, 1)", accuracy)
    W = as_square_matrix(mixing_matrix, name="mixing_matrix")
    time = find_mixing_time(W, accuracy=accuracy)
    return Spectrum(disagreement(W), _second_eigenvalue(W), time, accuracy)


def find_mixing_time(W: FloatArray, *, accuracy: float = 0.01) -> float:
    """Return the smallest t with ‖Wᵗ − 11ᵀ/n‖₂ ≤ accuracy; inf if there is none."""
    # A norm that equals the accuracy up to rounding counts as reached.
    accuracy *= 1 + 1e-12
    contraction = _second_eigenvalue(W)
    if contraction >= 1:
        return math.inf
    if len(W) == 1:
        return 0
    # For a symmetric W the norm of Wᵗ − 11ᵀ/n is |λ₂|ᵗ, which can be solved for t.
    if is_symmetric(W):
        steps = math.log(accuracy) / math.log(contraction) if contraction > 0 else 1
        return max(1, math.ceil(steps))
    # By doubling, then bit by bit.
    powers = [W - 1 / len(W)]
    while np.linalg.norm(powers[-1], 2) > accuracy:
        powers.append(powers[-1] @ powers[-1])
    # The norm never grows with t, so the largest t that still fails can be built bit by bit.
    failing, time = np.eye(len(W)), 0
    for bit in reversed(range(len(powers) - 1)):
        candidate = failing @ powers[bit]
        if np.linalg.norm(candidate, 2) > accuracy:
            failing, time = candidate, time + (1 << bit)
    return time + 1


def disagreement(W: FloatArray) -> float:
    """Return ‖W − 11ᵀ/n‖₂: the most that mixing with W leaves of a unit of disagreement."""
    deflated = W - 1 / len(W)
    # Eigenvalues of a symmetric matrix are several times faster than singular values.
    if is_symmetric(W):
        return _clean(float(np.abs(np.linalg.eigvalsh(deflated)).max()), len(W))
    return _clean(float(np.linalg.norm(deflated, 2)), len(W))


def _second_eigenvalue(W: FloatArray) -> float:
    if is_symmetric(W):
        return disagreement(W)
    # Subtracting 11ᵀ/n moves the eigenvalue 1 of the average to 0 and keeps the others.
    deflated = W - 1 / len(W)
    return _clean(float(np.abs(np.linalg.eigvals(deflated)).max()), len(W))


def _clean(value: float, n: int) -> float:
    """Return exactly one or zero for values that are so up to rounding: 1 means no mixing."""
    tolerance = 8 * n * np.finfo(float).eps
    nearest = float(round(value))
    return nearest if abs(value - nearest) <= tolerance else value


def find_extremes(matrix: SparseMatrix) -> FloatArray:
    """Return the least and the largest eigenvalue of a symmetric W, without the average's 1.

    >>> ring = SparseMatrix(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]))
    >>> find_extremes(ring).round(6).tolist()
    [0.25, 0.25]
    """
    if not is_symmetric(matrix):
        raise InvalidArgumentError(
            f"mixing weights of more than {MOST_DENSE} agents must be symmetric for their speed to "
            "be measured, found others: try metropolis weights and plain rounds"
        )
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


def sparse_spectrum(
    matrix: SparseMatrix, schedule: Sequence[GossipRound], *, accuracy: float = 0.01
) -> Spectrum:
    """Return the spectrum of a step from the extreme eigenvalues of a symmetric W."""
    extremes = find_extremes(matrix)
    # The polynomial of the rounds is largest at an end: powers, and Chebyshev's within its range.
    rate = float(np.abs(apply_to_eigenvalues(schedule, extremes)).max())
    rate = 1.0 if rate > 1 - 8 * matrix.shape[0] * np.finfo(float).eps else rate
    time = math.inf if rate == 1 else max(1, math.ceil(math.log(accuracy) / math.log(rate)))
    return Spectrum(rate, rate, time, accuracy)


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
