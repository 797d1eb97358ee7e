"""Circulant networks and tori: the optimum by FFT, for a million agents.

All agents of a circulant are alike, so R = (Tr A^{1/2}/(n b)) · A^{-1/2} is optimal, with value
(Tr A^{1/2})²/(n b), and every matrix involved is diagonal in the Fourier basis.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.fft
from numpy.typing import ArrayLike, NDArray

from corn.arrays import FloatArray
from corn.checks import require, require_positive
from corn.covariance.objective import ONE_STEP, Horizon
from corn.covariance.problem import DesignProblem
from corn.topology.gossip import ONE_ROUND, Gossip, accelerate, apply_to_eigenvalues
from corn.topology.mixing import STOCHASTIC_TOLERANCE

# Of log t in [log 10⁻¹², 0]: far more than float64 can tell apart, at no cost.
_BISECTIONS = 100


@dataclass(frozen=True, eq=False)
class CirculantDesign:
    """A circulant covariance as its first row, shape (n,); the other fields as in `Design`.

    On a torus the first row has the shape of the torus, and so have the eigenvalues.

    ``eigenvalues`` are those of R in the order of the discrete Fourier transform. Every agent has
    the same noise, of standard deviation ``noise_std``.
    """

    first_row: FloatArray
    eigenvalues: FloatArray
    precision_cap: float
    value: float
    lower_bound: float
    noise_std: float

    @property
    def num_agents(self) -> int:
        """The number of agents n."""
        return self.first_row.size

    @property
    def gap(self) -> float:
        """The largest relative distance from the optimum."""
        return self.value / self.lower_bound - 1

    @property
    def average_noise_variance(self) -> float:
        """1ᵀR1/n²."""
        return float(self.eigenvalues.flat[0]) / self.num_agents

    @property
    def central_ratio(self) -> float:
        """The variance above, over the floor 1/(n² b)."""
        return self.average_noise_variance * self.num_agents**2 * self.precision_cap


def design_circulant(
    first_row: ArrayLike,
    precision_cap: float,
    *,
    objective: Horizon = ONE_STEP,
    gossip: Gossip = ONE_ROUND,
    max_noise_std: float | None = None,
) -> CirculantDesign:
    """Return the design for W_ij = first_row[(j − i) mod n], in O(n log n).

    On a torus of r × c agents ``first_row`` has shape (r, c), and j − i is taken in each direction.

    A directed circulant is as good as any: A is symmetric either way. All agents have one promise:
    with different ones they are not alike, and `design` must be used. Privacy holds exactly as for
    `design`: the mean of the eigenvalues of R⁻¹ is its diagonal, and is at most b. ``gossip`` are
    the mixing rounds of a step (default: one).

    >>> ring = np.zeros(20); ring[[0, 1, -1]] = 1 / 3
    >>> round(design_circulant(ring, 1.0).value, 6)
    4.60252
    """
    row = np.array(first_row, dtype=np.float64)
    is_row = row.ndim >= 1 and row.size > 0 and bool(np.isfinite(row).all())
    require(is_row, "first_row", "one or more finite numbers", f"shape {row.shape}")
    a = horizon_spectrum(row, objective, gossip)
    # Only for its checks and its noise limit: the problem is solved by formula.
    caps = np.array([require_positive("precision_cap", precision_cap)])
    problem = DesignProblem(np.array([[a.sum()]]), caps, max_noise_std=max_noise_std)
    # Eigenvalues of R⁻¹ are proportional to √a; of mean 1 they have the diagonal of the cap b = 1.
    root = np.sqrt(a)
    theta = _blend(root / root.mean(), float(problem.variance_ratio_limits[0]))
    r = _scale_to_mean(1 / theta, precision_cap)
    value = float((a * r).sum())
    return CirculantDesign(
        first_row=scipy.fft.ifftn(r).real,
        eigenvalues=r,
        precision_cap=precision_cap,
        value=value,
        lower_bound=min(float(root.sum()) ** 2 / (a.size * precision_cap), value),
        noise_std=float(np.sqrt(r.mean())),
    )


def horizon_spectrum(row: FloatArray, objective: Horizon, gossip: Gossip) -> FloatArray:
    """Return the eigenvalues of A; W is normal, so it has the moduli of those of W alone."""
    w = gossip_spectrum(row, gossip)
    largest = float(np.abs(w).max())
    require(
        objective.contraction * largest < 1,
        "first_row",
        "without an eigenvalue that this horizon does not discount",
        f"one of modulus {largest:.6g}",
        advice="use weights that sum to 1",
    )
    a = objective.weigh_disagreement(w)
    if objective.disagreement_weight != 1:
        a = np.where(_mean_modes(row, gossip.rounds), objective.average_energy, a)
    return a


def gossip_spectrum(row: FloatArray, gossip: Gossip) -> NDArray[np.complex128]:
    """Return the eigenvalues of the polynomial of W that a step applies."""
    w = scipy.fft.fftn(row)
    if gossip.kind == "plain":
        return np.asarray(w**gossip.rounds)
    is_symmetric = bool((np.abs(w.imag) <= 1e-12).all())
    require(is_symmetric, "first_row", "symmetric for Chebyshev rounds", row.ravel()[:5])
    # The first Fourier mode is the average, which the polynomial must leave alone.
    return apply_to_eigenvalues(accelerate(w.real.ravel()[1:], gossip.rounds), w)


def _mean_modes(row: FloatArray, rounds: int) -> NDArray[np.bool_]:
    """Return which Fourier modes are averages of connected parts; the first always is."""
    total = float(row.sum())
    is_stochastic = bool((row >= 0).all()) and abs(total - 1) <= STOCHASTIC_TOLERANCE
    require(is_stochastic, "first_row", "weights that sum to 1", f"a sum of {total:.9g}")
    # The hops of r rounds are the sums of r hops. Agents that they lead to from one another form a
    # part, whose average are the modes k with k·h a whole number of turns for each of these hops.
    sides = row.shape
    hops = np.argwhere(row)
    apart = np.vstack([rounds * hops[:1], np.diff(hops, axis=0)])
    modes = np.indices(sides, sparse=True)
    found = np.ones(sides, dtype=bool)
    for hop in np.unique(apart % sides, axis=0):
        # Turns in units of 1/n: whole numbers, without rounding.
        turns = sum(modes[k] * int(hop[k]) * (row.size // side) for k, side in enumerate(sides))
        found &= turns % row.size == 0
    return found


def _blend(theta: FloatArray, variance_limit: float) -> FloatArray:
    """Blend the eigenvalues of R⁻¹, of mean 1, with 1 until R_ii, the mean of 1/θ, is allowed.

    As in `limit_noise`: the mean of the eigenvalues, and with it the privacy, stays as it is.
    """
    if theta.min() > 0 and (1 / theta).mean() <= variance_limit:
        return theta
    low, high = np.log(1e-12), 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        t = np.exp(middle)
        fits = (1 / ((1 - t) * theta + t)).mean() <= variance_limit
        low, high = (low, middle) if fits else (middle, high)
    return np.asarray((1 - np.exp(high)) * theta + np.exp(high))


def _scale_to_mean(eigenvalues: FloatArray, precision_cap: float) -> FloatArray:
    """Scale the eigenvalues of R until the mean of their inverses is at most the cap."""
    r = eigenvalues / precision_cap
    # Division rounds either way: repeat until the mean is on the private side.
    while (excess := float((1 / r).mean()) / precision_cap) > 1:
        r = r * (excess * (1 + np.finfo(np.float64).eps))
    return r
