"""What a design minimises: the matrix A of Tr(A R), the energy that noise leaves in the models.

Privacy is read off R⁻¹ alone, so every choice of A below costs the same budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
from numpy.typing import ArrayLike

from corn.arrays import FloatArray, as_square_matrix, as_symmetric_matrix
from corn.errors import InvalidArgumentError

_SYMMETRY_TOLERANCE = 1e-12
_MOST_ROUNDS = 10**6
_LONGEST, _LARGEST = 1e9, 1e50
_SEMIDEFINITE_TOLERANCE = 1e-10
_MAX_DOUBLINGS = 64


class Objective(Protocol):
    """A way to weigh noise: from a mixing matrix to the matrix A of Tr(A R)."""

    def matrix(self, mixing_matrix: ArrayLike) -> FloatArray:
        """Return A, symmetric positive semidefinite, of the shape (n, n) of the mixing matrix."""
        ...

    def describe(self) -> str:
        """Say in one line what is minimised."""
        ...


@final
@dataclass(frozen=True)
class Horizon:
    """Noise energy over a discounted horizon of ``length`` steps; length 1 is the paper's.

    After k mixing steps the noise v has become Wᵏv. With perturbations that contract by ρ a step,
    ρ² = 1 − 1/length, the stationary energy is Tr(A R) with A = Σ_{k≥1} ρ^{2(k−1)} (Wᵏ)ᵀWᵏ.
    Length 1 keeps the first term, WᵀW: eq. (13a) of the paper.

    ``gossip_rounds`` r mixes r times a step (W becomes Wʳ); ``cooldown_rounds`` K mixes K times
    more after the last step (A becomes (Wᴷ)ᵀ A Wᴷ). Both are post-processing: no privacy is spent.

    >>> Horizon().matrix([[0.5, 0.5], [0.5, 0.5]])
    array([[0.5, 0.5],
           [0.5, 0.5]])
    """

    length: float = 1.0
    gossip_rounds: int = 1
    cooldown_rounds: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.length <= _LONGEST:
            raise InvalidArgumentError(
                f"length must be from 1 to {_LONGEST:g}, found {self.length}: beyond that "
                "rounding in W would count"
            )
        _check_rounds(self.gossip_rounds, self.cooldown_rounds)

    def matrix(self, mixing_matrix: ArrayLike) -> FloatArray:
        """Return A, from the eigenvalues of a symmetric W and by doubling for any other."""
        W = as_square_matrix(mixing_matrix, name="mixing_matrix")
        if self.length == 1:
            V = np.linalg.matrix_power(W, self.gossip_rounds + self.cooldown_rounds)
            return np.asarray(V.T @ V)
        contraction = 1 - 1 / self.length
        if not _is_symmetric(W):
            V = np.linalg.matrix_power(W, self.gossip_rounds)
            return _cool_down(_sum_by_doubling(V, contraction), W, self.cooldown_rounds)
        w, U = np.linalg.eigh(W)
        q = w ** (2 * self.gossip_rounds)
        _check_converges(bool(contraction * q.max() < 1))
        return _rebuild(U, q / (1 - contraction * q) * w ** (2 * self.cooldown_rounds))

    def describe(self) -> str:
        """Say in one line what is minimised."""
        what = "one step" if self.length == 1 else f"horizon of {self.length:g} steps"
        return what + _describe_rounds(self.gossip_rounds, self.cooldown_rounds)


@final
@dataclass(frozen=True)
class FiniteRun:
    """Noise energy in the models at the end of a run with the given step sizes η_1 … η_T.

    A = Σ_t η_t² (W^{T−t+1})ᵀ W^{T−t+1}; ``gossip_rounds`` and ``cooldown_rounds`` as in `Horizon`.
    For a non-symmetric W the cost is 2T products of n×n matrices.

    >>> FiniteRun([2.0]).matrix([[0.5, 0.5], [0.5, 0.5]])
    array([[2., 2.],
           [2., 2.]])
    """

    step_sizes: Sequence[float]
    gossip_rounds: int = 1
    cooldown_rounds: int = 0

    def __post_init__(self) -> None:
        steps = tuple(float(step) for step in self.step_sizes)
        if not steps or not all(0 <= step <= _LARGEST for step in steps):
            raise InvalidArgumentError(
                f"step_sizes must be one or more numbers from 0 to {_LARGEST:g}, found "
                f"{self.step_sizes!r:.80}"
            )
        if not any(steps):
            raise InvalidArgumentError("step_sizes must not all be zero: no noise would be added")
        object.__setattr__(self, "step_sizes", steps)
        _check_rounds(self.gossip_rounds, self.cooldown_rounds)

    def matrix(self, mixing_matrix: ArrayLike) -> FloatArray:
        """Return A by Horner's rule: A ← Wᵀ(A + η_t² I)W, on eigenvalues where W is symmetric."""
        W = as_square_matrix(mixing_matrix, name="mixing_matrix")
        if _is_symmetric(W):
            w, U = np.linalg.eigh(W)
            q, a = w ** (2 * self.gossip_rounds), np.zeros_like(w)
            for step in self.step_sizes:
                a = q * (a + step**2)
            return _rebuild(U, a * w ** (2 * self.cooldown_rounds))
        V = np.linalg.matrix_power(W, self.gossip_rounds)
        A = np.zeros_like(W)
        for step in self.step_sizes:
            A[np.diag_indices_from(A)] += step**2
            A = V.T @ A @ V
        return _cool_down(A, W, self.cooldown_rounds)

    def describe(self) -> str:
        """Say in one line what is minimised."""
        what = f"end of a run of {len(self.step_sizes)} steps"
        return what + _describe_rounds(self.gossip_rounds, self.cooldown_rounds)


@final
@dataclass(frozen=True, eq=False)
class GivenObjective:
    """Any positive semidefinite matrix A of the caller's own, whatever the mixing matrix.

    Eigenvalues that rounding made slightly negative are set to zero.
    """

    given: ArrayLike

    def __post_init__(self) -> None:
        A = as_symmetric_matrix(self.given, name="given")
        if np.abs(A).max() > _LARGEST:
            raise InvalidArgumentError(f"given must have no entry beyond {_LARGEST:g}")
        w, U = np.linalg.eigh(A)
        if w[0] < -_SEMIDEFINITE_TOLERANCE * max(w[-1], 0.0) or not w[-1] > 0:
            raise InvalidArgumentError(
                "given must be positive semidefinite and not zero, found eigenvalues from "
                f"{w[0]:.3g} to {w[-1]:.3g}"
            )
        A = A if w[0] >= 0 else _rebuild(U, np.maximum(w, 0))
        A.setflags(write=False)
        object.__setattr__(self, "given", A)

    def matrix(self, mixing_matrix: ArrayLike) -> FloatArray:
        """Return a copy of the given matrix; its size must be that of the mixing matrix."""
        A = np.array(self.given, dtype=np.float64)
        shape = as_square_matrix(mixing_matrix, name="mixing_matrix").shape
        if A.shape != shape:
            raise InvalidArgumentError(
                f"the given objective must have the shape {shape} of mixing_matrix, found {A.shape}"
            )
        return A

    def describe(self) -> str:
        """Say in one line what is minimised."""
        return f"given matrix of shape {np.shape(self.given)}"


def _check_rounds(gossip_rounds: int, cooldown_rounds: int) -> None:
    for name, found, least in (
        ("gossip_rounds", gossip_rounds, 1),
        ("cooldown_rounds", cooldown_rounds, 0),
    ):
        # An eigenvalue of 1 is computed as 1 + 1e-16, whose power overflows in the end.
        if not least <= found <= _MOST_ROUNDS:
            raise InvalidArgumentError(
                f"{name} must be at least {least} and at most {_MOST_ROUNDS:,}, found {found}"
            )


def _describe_rounds(gossip_rounds: int, cooldown_rounds: int) -> str:
    gossip = f", {gossip_rounds} gossip rounds a step" if gossip_rounds > 1 else ""
    return gossip + (f", {cooldown_rounds} rounds at the end" if cooldown_rounds else "")


def _is_symmetric(W: FloatArray) -> bool:
    return bool(np.abs(W - W.T).max() <= _SYMMETRY_TOLERANCE * np.abs(W).max())


def _rebuild(eigenvectors: FloatArray, eigenvalues: FloatArray) -> FloatArray:
    A = (eigenvectors * eigenvalues) @ eigenvectors.T
    return (A + A.T) / 2


def _cool_down(A: FloatArray, W: FloatArray, rounds: int) -> FloatArray:
    V = np.linalg.matrix_power(W, rounds)
    A = V.T @ A @ V
    return (A + A.T) / 2


def _sum_by_doubling(V: FloatArray, contraction: float) -> FloatArray:
    """Sum ρ^{2(k−1)} (Vᵏ)ᵀVᵏ over k ≥ 1; each pass doubles the number of terms summed."""
    G, A = math.sqrt(contraction) * V, V.T @ V
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(_MAX_DOUBLINGS):
            term = G.T @ A @ G
            A = A + term
            if not np.isfinite(A).all():
                break
            if np.abs(term).max() <= np.finfo(np.float64).eps / 8 * np.abs(A).max():
                return A
            G = G @ G
    _check_converges(False)
    return A


def _check_converges(converges: bool) -> None:
    if not converges:
        raise InvalidArgumentError(
            "mixing_matrix must not amplify: its powers grow faster than this horizon discounts "
            "them; use weights whose rows and columns sum to 1, or a shorter length"
        )


def default_objective(num_steps: int, gossip_rounds: int = 1, cooldown_rounds: int = 0) -> Horizon:
    """Return the objective for a run of ``num_steps`` steps unless another one is given.

    Noise accumulates over a fifth of the run. The loss after training is flat in the length of the
    horizon between a fifteenth and a half of the run, so that a rule without tuning suffices.

    >>> default_objective(5000).length
    1000.0
    """
    return Horizon(max(1.0, num_steps / 5), gossip_rounds, cooldown_rounds)


ONE_STEP = Horizon()
"""The paper's objective, Tr(W R Wᵀ)."""
