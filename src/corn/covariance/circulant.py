"""Circulant networks: the optimum by FFT, for a million agents.

All agents of a circulant are alike, so R = (Tr A^{1/2}/(n b)) · A^{-1/2} is optimal, with value
(Tr A^{1/2})²/(n b), and every matrix involved is diagonal in the Fourier basis.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.fft
from numpy.typing import ArrayLike

from corn.arrays import FloatArray
from corn.checks import require, require_positive
from corn.covariance.objective import ONE_STEP, Horizon
from corn.covariance.problem import DesignProblem

_BISECTIONS = 100


@dataclass(frozen=True, eq=False)
class CirculantDesign:
    """A circulant covariance as its first row, shape (n,); the other fields as in `Design`.

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
        return len(self.first_row)

    @property
    def gap(self) -> float:
        """The largest relative distance from the optimum."""
        return self.value / self.lower_bound - 1

    @property
    def average_noise_variance(self) -> float:
        """1ᵀR1/n²."""
        return float(self.eigenvalues[0]) / self.num_agents

    @property
    def central_ratio(self) -> float:
        """The variance above, over the floor 1/(n² b)."""
        return self.average_noise_variance * self.num_agents**2 * self.precision_cap


def design_circulant(
    first_row: ArrayLike,
    precision_cap: float,
    *,
    objective: Horizon = ONE_STEP,
    max_noise_std: float | None = None,
) -> CirculantDesign:
    """Return the design for W_ij = first_row[(j − i) mod n], in O(n log n).

    A directed circulant is as good as any: A is symmetric either way. All agents have one promise:
    with different ones they are not alike, and `design` must be used. Privacy holds exactly as for
    `design`: the mean of the eigenvalues of R⁻¹ is its diagonal, and is at most b.

    >>> ring = np.zeros(20); ring[[0, 1, -1]] = 1 / 3
    >>> round(design_circulant(ring, 1.0).value, 6)
    4.60252
    """
    row = np.array(first_row, dtype=np.float64)
    is_row = row.ndim == 1 and row.size > 0 and bool(np.isfinite(row).all())
    require(is_row, "first_row", "one or more finite numbers", f"shape {row.shape}")
    a = _horizon_spectrum(np.abs(scipy.fft.fft(row)), objective)
    # Only for its checks and its noise limit: the problem is solved by formula.
    caps = np.array([require_positive("precision_cap", precision_cap)])
    problem = DesignProblem(np.array([[a.sum()]]), caps, max_noise_std=max_noise_std)
    # Eigenvalues of R⁻¹ are proportional to √a; of mean 1 they have the diagonal of the cap b = 1.
    root = np.sqrt(a)
    theta = _blend(root / root.mean(), float(problem.variance_ratio_limits[0]))
    r = _scale_to_mean(1 / theta, precision_cap)
    value = float((a * r).sum())
    return CirculantDesign(
        first_row=scipy.fft.ifft(r).real,
        eigenvalues=r,
        precision_cap=precision_cap,
        value=value,
        lower_bound=min(float(root.sum()) ** 2 / (len(a) * precision_cap), value),
        noise_std=float(np.sqrt(r.mean())),
    )


def _horizon_spectrum(moduli: FloatArray, objective: Horizon) -> FloatArray:
    """Return the eigenvalues of A from the moduli |w| of those of W, which is a normal matrix."""
    contraction = 1 - 1 / objective.length
    q = moduli ** (2 * objective.gossip_rounds)
    require(
        bool(contraction * q.max() < 1),
        "first_row",
        "without an eigenvalue that this horizon does not discount",
        f"one of modulus {moduli.max():.6g}",
        advice="use weights that sum to 1",
    )
    return np.asarray(q / (1 - contraction * q) * moduli ** (2 * objective.cooldown_rounds))


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
