"""Noise of rings and tori without matrices of n × n numbers, for a million agents.

All agents are alike, so every matrix is diagonal in the Fourier basis of the ring or torus, and the
eigenvalues of R are all that a simulation needs. Rehearsals and plans, in which each agent draws
its own share, need `corn.covariance.design`, and so do insiders and different promises.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.fft
from numpy.typing import NDArray

from corn.checks import FloatArray, require
from corn.covariance.baselines import RatioFamily, search_ratio
from corn.covariance.objective import ONE_STEP, Horizon
from corn.covariance.problem import DEFAULT_NOISE_RATIO
from corn.covariance.threat import SeedGroups
from corn.topology.gossip import ONE_ROUND, Gossip, accelerate, apply_to_eigenvalues
from corn.topology.network import Mixing
from corn.topology.spectrum import lattice_eigenvalues

# Of log t in [log 10⁻¹², 0]: far more than float64 can tell apart, at no cost.
_BISECTIONS = 100


@dataclass(frozen=True, eq=False)
class LatticeNoise:
    """Noise whose covariance is the same from every agent of a ring or torus.

    ``eigenvalues`` are those of R, in the order of the discrete Fourier transform, shape (n,) on a
    ring and (rows, columns) on a torus.
    """

    eigenvalues: FloatArray

    def __post_init__(self) -> None:
        found = f"from {self.eigenvalues.min():.6g}"
        require(bool(self.eigenvalues.min() > 0), "eigenvalues", "positive", found)

    @property
    def num_agents(self) -> int:
        """The number of agents n."""
        return self.eigenvalues.size

    @property
    def seed_groups(self) -> SeedGroups:
        """One group of all: a participant could subtract all of the noise."""
        return (tuple(range(self.num_agents)),)

    @property
    def covariance(self) -> FloatArray:
        """R, shape (n, n): for comparisons, as its size is what this class avoids."""
        n, sides = self.num_agents, self.eigenvalues.shape
        # Row i of R is the convolution of the i-th unit vector with the first row.
        modes = np.eye(n).reshape(n, *sides)
        axes = tuple(range(1, modes.ndim))
        found = scipy.fft.ifftn(scipy.fft.fftn(modes, axes=axes) * self.eigenvalues, axes=axes)
        return np.asarray(found.real.reshape(n, n))

    @property
    def total_variance(self) -> float:
        """1ᵀR1: n times the eigenvalue of the average."""
        return float(self.eigenvalues.flat[0]) * self.num_agents

    @property
    def precision_diagonal(self) -> FloatArray:
        """[R⁻¹]_ii of each agent, shape (n,): the mean of the inverse eigenvalues."""
        return np.full(self.num_agents, float((1 / self.eigenvalues).mean()))


def design_lattice(
    first_row: FloatArray,
    precision_cap: float,
    *,
    objective: Horizon = ONE_STEP,
    gossip: Gossip = ONE_ROUND,
) -> LatticeNoise:
    """Return R = (Tr A^{1/2}/(n b)) · A^{-1/2} for a first row of ``find_lattice``.

    It is optimal against an eavesdropper, with the value (Tr A^{1/2})²/(n b), as far as the default
    limit on noise allows. Privacy holds exactly: the mean of the eigenvalues of R⁻¹ is its
    diagonal, and is at most b.

    >>> ring = np.zeros(20); ring[[0, 1, -1]] = 1 / 3
    >>> noise = design_lattice(ring, 1.0)
    >>> round(float((horizon_spectrum(ring, ONE_STEP, ONE_ROUND) * noise.eigenvalues).sum()), 6)
    4.60252
    """
    # Eigenvalues of R⁻¹ are proportional to √a; of mean 1 they have the diagonal of the cap b = 1.
    root = np.sqrt(horizon_spectrum(first_row, objective, gossip))
    r = 1 / _blend(root / root.mean(), DEFAULT_NOISE_RATIO**2) / precision_cap
    # Division rounds either way: repeat until the mean is on the private side.
    while (excess := float((1 / r).mean()) / precision_cap) > 1:
        r = r * (excess * (1 + np.finfo(np.float64).eps))
    return LatticeNoise(r)


def design_lattice_pairs(
    first_row: FloatArray,
    precision_cap: float,
    *,
    objective: Horizon,
    gossip: Gossip,
    mixing: Mixing = "gossip",
) -> LatticeNoise:
    """Return DECOR's best noise, R = c (I + r L), for a first row of ``find_lattice``."""
    links = np.where(first_row > 0, 1.0, 0.0)
    links.flat[0] = 0.0
    degree = links.sum()
    # The adjacency of a lattice is a convolution, so its transform has the eigenvalues.
    laplacian = degree - lattice_eigenvalues(links).real
    # An exact sum mixes as weights of 1/n do.
    weights = first_row if mixing == "gossip" else np.full_like(first_row, 1 / first_row.size)
    a = horizon_spectrum(weights, objective, gossip)
    family = RatioFamily(
        slack=np.ones(1),
        limits=np.array([DEFAULT_NOISE_RATIO**2]),
        degrees=np.array([degree]),
        eigenvalues=laplacian.ravel(),
        # Fourier modes have the same weight at every agent, so that one row stands for all.
        squared_vectors=np.full((1, first_row.size), 1 / first_row.size),
        traces=(float(a.sum()), float((a * laplacian).sum())),
    )
    ratio, scale, _ = search_ratio(family)
    return LatticeNoise(scale / precision_cap * (1 + ratio * np.maximum(laplacian, 0.0)))


def horizon_spectrum(first_row: FloatArray, objective: Horizon, gossip: Gossip) -> FloatArray:
    """Return the eigenvalues of A; W is normal, so it has the moduli of those of W alone."""
    a = objective.weigh_disagreement(gossip_spectrum(first_row, gossip))
    if objective.disagreement_weight != 1:
        a.flat[0] = objective.average_energy
    return a


def gossip_spectrum(first_row: FloatArray, gossip: Gossip) -> NDArray[np.complex128]:
    """Return the eigenvalues of the polynomial of W that a step applies, first the average's."""
    w = lattice_eigenvalues(first_row)
    if gossip.kind == "plain":
        return np.asarray(w**gossip.rounds)
    # A network has Chebyshev rounds only if W is symmetric: its eigenvalues are real.
    return apply_to_eigenvalues(accelerate(w.real.ravel()[1:], gossip.rounds), w)


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
