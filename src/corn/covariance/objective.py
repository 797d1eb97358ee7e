"""Objectives of a design: the matrix A of Tr(A R), the energy that noise leaves in the models; κ.

Privacy is read off R⁻¹ alone, so every choice of A below costs the same budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, final

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph
from numpy.typing import ArrayLike

from corn.checks import FloatArray, as_square_matrix, as_symmetric_matrix, require, require_in_range
from corn.covariance.decomposition import Decomposition
from corn.topology.mixing import STOCHASTIC_TOLERANCE, Mixing, Network, require_symmetric, spectrum

DISAGREEMENT_WEIGHT = 0.1  # by default, for runs that end with a cool-down

LARGE_DISAGREEMENT = 0.35
"""κ above which models that are not linear lose accuracy (measured in docs/results/gossip.md)."""

# Not zero, or A would be singular in all directions but the average, and noise unbounded.
_LEAST_WEIGHT = 1e-6
_LONGEST = 1e9
_MOST_MOMENTUM = 0.999  # a memory of a thousand steps
_MOST_DEFAULT_MOMENTUM = 0.97
_LARGEST = 1e50  # products of such numbers stay far from overflow
_SEMIDEFINITE_TOLERANCE = 1e-10


@final
@dataclass(frozen=True)
class Horizon:
    """Noise energy over a discounted horizon of ``length`` steps; length 1 is the paper's.

    After k mixing steps the noise v has become Wᵏv. With perturbations that contract by ρ a step,
    ρ² = 1 − 1/length, the stationary energy is Tr(A R) with A = Σ_{k≥1} ρ^{2(k−1)} (Wᵏ)ᵀWᵏ.
    Length 1 keeps the first term, WᵀW: eq. (13a) of the paper.

    Write P for the projection on the averages of connected parts of the network. Rows and columns
    of W sum to one, so WP = PW = P, Wᵏ = P + (W − P)ᵏ, and A splits into the energy of averages and
    that of disagreement: A = length·P + Σ_{k≥1} ρ^{2(k−1)} ((W − P)ᵏ)ᵀ(W − P)ᵏ. Mixing after the
    last step removes disagreement but not noise in averages, so ``disagreement_weight`` scales
    the second part down. It is never zero: gradients are computed at models that disagree.

    With ``momentum`` β, agents step along the average m ← β m + (1 − β)(g + v) of what they
    released. It passes slow noise, which accumulates in averages, and damps fast noise, which is
    most of what mixing turns into disagreement. A is then the stationary energy of noise that
    passes through both.

    >>> Horizon().matrix([[0.5, 0.5], [0.5, 0.5]]).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """

    length: float = 1.0
    disagreement_weight: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        # Beyond the longest horizon, rounding in W would count for as much as its eigenvalues.
        require_in_range("length", self.length, 1, _LONGEST)
        require_in_range("disagreement_weight", self.disagreement_weight, _LEAST_WEIGHT, 1)
        check_momentum(self.momentum)

    def matrix(self, mixing_matrix: ArrayLike) -> FloatArray:
        """Return A; a weight other than 1 needs a W whose rows sum to one."""
        W = _read_weights(mixing_matrix)
        A = _accumulate(W, self._discount, self.momentum)
        gamma = self.disagreement_weight
        if gamma == 1:
            return A
        # Of all of A, only the energy of averages keeps its full weight.
        # That of unit noise in an average is the length, without momentum.
        energy = self.length * float(momentum_gain(math.sqrt(self._discount), self.momentum))
        return np.asarray(gamma * A + (1 - gamma) * energy * _project_on_averages(W))

    @property
    def _discount(self) -> float:
        return 1 - 1 / self.length  # ρ², without the rounding of a root

    def describe(self) -> str:
        """Return the objective in one line of words."""
        what = "one step" if self.length == 1 else f"horizon of {self.length:g} steps"
        if self.disagreement_weight != 1:
            what += f", disagreement weighted by {self.disagreement_weight:g}"
        return what + (f", momentum {self.momentum:g}" if self.momentum else "")


@final
@dataclass(frozen=True)
class FiniteRun:
    """Noise energy in the models at the end of a run with the given step sizes η_1 … η_T.

    A = Σ_t η_t² (W^{T−t+1})ᵀ W^{T−t+1}, without momentum.

    >>> FiniteRun([2.0]).matrix([[0.5, 0.5], [0.5, 0.5]]).round(9).tolist()
    [[2.0, 2.0], [2.0, 2.0]]
    """

    step_sizes: Sequence[float]
    momentum: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        try:
            steps = tuple(float(step) for step in self.step_sizes)
        except (TypeError, ValueError):
            steps = ()
        is_valid = any(steps) and all(0 <= step <= _LARGEST for step in steps)
        rule = f"one or more numbers from 0 to {_LARGEST:g}, not all of them zero"
        require(is_valid, "step_sizes", rule, f"{self.step_sizes!r:.80}")
        object.__setattr__(self, "step_sizes", steps)

    def matrix(self, mixing_matrix: ArrayLike) -> FloatArray:
        """Return A by Horner's rule: A ← Wᵀ(A + η_t² I)W, on eigenvalues of W."""
        w, U = np.linalg.eigh(_read_weights(mixing_matrix))
        a = np.zeros_like(w)
        for step in self.step_sizes:
            a = w**2 * (a + step**2)
        return _rebuild(U, a)

    def describe(self) -> str:
        """Return the objective in one line of words."""
        return f"end of a run of {len(self.step_sizes)} steps"


@final
@dataclass(frozen=True, eq=False)
class GivenObjective:
    """A positive semidefinite matrix A of the caller's choice, shape (n, n), without momentum."""

    given: FloatArray
    momentum: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        A = as_symmetric_matrix(self.given, name="objective")
        largest = float(np.abs(A).max())
        require(largest <= _LARGEST, "objective", f"without entries beyond {_LARGEST:g}", largest)
        w = np.linalg.eigvalsh(A)
        is_semidefinite = w[-1] > 0 and w[0] >= -_SEMIDEFINITE_TOLERANCE * w[-1]
        found = f"eigenvalues from {w[0]:.3g} to {w[-1]:.3g}"
        require(bool(is_semidefinite), "objective", "positive semidefinite and not zero", found)
        A.setflags(write=False)
        object.__setattr__(self, "given", A)

    def matrix(self, mixing_matrix: ArrayLike) -> FloatArray:
        """Return the matrix, whose size must be that of the mixing matrix."""
        shape = np.shape(mixing_matrix)
        rule = f"of the shape {shape} of the mixing matrix"
        require(self.given.shape == shape, "objective", rule, self.given.shape)
        w, U = np.linalg.eigh(self.given)
        # Rounding may have made some negative. The record itself must not change: it is in plans.
        return self.given.copy() if w[0] >= 0 else _rebuild(U, np.maximum(w, 0))

    def describe(self) -> str:
        """Return the objective in one line of words."""
        return f"given matrix of shape {self.given.shape}"


Objective: TypeAlias = Horizon | FiniteRun | GivenObjective

ObjectiveLike: TypeAlias = Objective | ArrayLike | Callable[[FloatArray], ArrayLike]
"""An objective, a matrix A, or a function that returns A for the mixing matrix of a step."""


def energy_of_average(objective: Objective, num_agents: int) -> float:
    """Return the energy of unit noise in the average: all that an objective weighs in exact sums.

    With W = 11ᵀ/n all noise is in the average at once, and A is this number times 11ᵀ/n.
    """
    if not isinstance(objective, GivenObjective):
        return float(objective.matrix(np.ones((1, 1)))[0, 0])
    A = objective.matrix(np.broadcast_to(1.0, (num_agents, num_agents)))
    total = float(A.sum())
    rule = "positive for noise in the average, the only noise that exact sums leave"
    require(total > _SEMIDEFINITE_TOLERANCE * np.trace(A), "objective", rule, f"1ᵀA1 = {total:.3g}")
    return total / num_agents


def disagreement_ratio(
    network: Network,
    noise: Decomposition | FloatArray,
    *,
    precision_cap: float,
    momentum: float,
    num_steps: int,
) -> float:
    """Return κ of noise, or of a covariance: 0 for exact sums, infinite where agents never agree.

    κ is the stationary standard deviation of disagreement, a coordinate of x_i minus the average
    model, over that of a trusted server's noise in all T steps, √T/(n √b), where ``precision_cap``
    b is the strictest. Both grow with the step size, which cancels: κ² = n b Tr(D R)/T, where
    η² Tr(D R)/n is the stationary variance of disagreement per coordinate (docs/theory.md,
    “Disagreement”). Disagreement follows x ← (W − 11ᵀ/n)(x − η m), m ← β m + (1 − β) v, without the
    discount of a horizon: nothing but mixing lowers it.
    """
    n = network.num_agents
    if network.mixing == "sum":
        return 0.0
    if math.isinf(spectrum(network.step_matrix).mixing_time):
        energy = math.inf
    else:
        R = noise.covariance if isinstance(noise, Decomposition) else noise
        W = _read_weights(network.step_matrix)
        energy = float((_accumulate(W - 1 / n, 1.0, momentum) * R).sum())
    # Rounding may leave a little below zero of noise that all agents share.
    return math.sqrt(max(energy, 0.0) * n * precision_cap / num_steps)


def _project_on_averages(W: FloatArray) -> FloatArray:
    """Return P: every agent's value becomes the average of its connected part of the network."""
    sums = W.sum(axis=1)
    worst = float(sums[np.abs(sums - 1).argmax()])
    rule = "one whose rows sum to 1, which splits noise into averages and disagreement"
    is_split = abs(worst - 1) <= STOCHASTIC_TOLERANCE
    advice = "or take disagreement_weight=1"
    require(is_split, "mixing_matrix", rule, f"a sum of {worst:.9g}", advice=advice)
    # Parts that exchange nothing never agree, so each has an average of its own. From the links and
    # not from eigenvalues near 1, which a slow but connected network has too.
    _, part = scipy.sparse.csgraph.connected_components(scipy.sparse.csr_matrix(W != 0))
    together = part[:, None] == part
    return np.asarray(together / together.sum(axis=1))


def _read_weights(mixing_matrix: ArrayLike) -> FloatArray:
    W = as_square_matrix(mixing_matrix, name="mixing_matrix")
    require_symmetric(W)
    return W


def _rebuild(eigenvectors: FloatArray, eigenvalues: FloatArray) -> FloatArray:
    A = (eigenvectors * eigenvalues) @ eigenvectors.T
    # Solvers read one triangle only; rounding must not make the two differ.
    return (A + A.T) / 2


def check_momentum(momentum: float) -> None:
    """Raise unless a momentum is from 0 to 0.999."""
    require_in_range("momentum", momentum, 0, _MOST_MOMENTUM)


def momentum_gain(contraction: ArrayLike, momentum: float) -> FloatArray:
    """Return the energy that momentum leaves in modes x ← a x + m, over that without momentum.

    ``contraction`` has the numbers a of each mode. The impulse response with momentum β is (1 − β)
    times that of 1/((1 − az)(1 − βz)), of energy (1 − (aβ)²)/((1 − a²)(1 − β²)(1 − aβ)²).
    """
    ab = np.asarray(contraction) * momentum
    share = (1 - momentum) / (1 + momentum)
    return np.asarray(share * (1 - ab**2) / (1 - ab) ** 2)


def _accumulate(W: FloatArray, discount: float, momentum: float) -> FloatArray:
    """Return the energy of unit noise over all steps.

    Without momentum, it is the geometric series Σ_{k≥1} ρ^{2(k−1)} w^{2k} in each eigenvector of W,
    with the eigenvalue w and ρ² the discount.
    """
    # One term, without a series that must converge: W may be any symmetric matrix.
    if discount == 0:
        return np.asarray(W.T @ W) * float(momentum_gain(0.0, momentum))
    w, U = np.linalg.eigh(W)
    q = w**2
    rule = "without powers that grow faster than this horizon discounts them"
    is_bounded = bool((discount * q < 1).all())
    require(is_bounded, "mixing_matrix", rule, "a matrix that amplifies")
    gain = momentum_gain(math.sqrt(discount) * w, momentum)
    return _rebuild(U, q / (1 - discount * q) * gain)


def default_objective(
    num_steps: int, *, mixing: Mixing = "gossip", momentum: float | None = None
) -> Horizon:
    """Return the objective for a run of ``num_steps`` steps unless another one is given.

    Noise accumulates over a fifth of the run. The loss after training is flat in the length of the
    horizon between a fifteenth and a half of the run, and in the weight of disagreement between
    0.03 and 0.3 if the run ends with a cool-down. Momentum lowers disagreement, which exact sums do
    not have. β averages about 1/(1 − β) releases: a sixth of the run, and 33 steps at most.

    >>> default_objective(5000)
    Horizon(length=1000.0, disagreement_weight=0.1, momentum=0.97)
    >>> default_objective(5000, mixing="sum").momentum
    0.0
    """
    if momentum is None:
        usual = min(max(1 - 6 / num_steps, 0.0), _MOST_DEFAULT_MOMENTUM)
        momentum = usual if mixing == "gossip" else 0.0
    return Horizon(max(1.0, num_steps / 5), DISAGREEMENT_WEIGHT, momentum)


ONE_STEP = Horizon()
"""The paper's objective, Tr(W R Wᵀ)."""
