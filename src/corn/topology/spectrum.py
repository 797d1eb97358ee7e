"""The speed of a mixing matrix: singular values, eigenvalues and mixing time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from corn.checks import FloatArray, as_square_matrix, require
from corn.topology.mixing import is_symmetric


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
