"""Noise of rings and tori without matrices of n × n numbers.

All agents are alike, so R is diagonal in the Fourier basis of the ring or torus: its eigenvalues
are all that a simulation needs. Designs against an eavesdropper are here, those against an insider
in `corn.covariance.lattice_pairs`. Rehearsals and plans, in which each agent draws its own share,
need `corn.covariance.design`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.fft

from corn.arrays import FloatArray
from corn.checks import require
from corn.covariance.baselines import RatioFamily, search_ratio
from corn.covariance.circulant import design_circulant, horizon_spectrum
from corn.covariance.objective import Horizon
from corn.covariance.problem import DEFAULT_NOISE_RATIO
from corn.covariance.threat import SeedGroups
from corn.topology import Gossip, Mixing
from corn.topology.sparse import lattice_eigenvalues


@dataclass(frozen=True, eq=False)
class LatticeNoise:
    """Noise whose covariance is the same from every agent of a ring or torus.

    Attributes:
        eigenvalues: of R, in the order of the discrete Fourier transform, shape (n,) on a ring and
            (rows, columns) on a torus.
        insider_precision: [(R^(c))⁻¹]_ii of the agent that one insider c, any agent of the network,
            learns most about; None for noise against an eavesdropper.
    """

    eigenvalues: FloatArray
    insider_precision: float | None = None

    def __post_init__(self) -> None:
        found = f"from {self.eigenvalues.min():.6g}"
        require(bool(self.eigenvalues.min() > 0), "eigenvalues", "positive", found)

    @property
    def num_agents(self) -> int:
        """The number of agents n."""
        return self.eigenvalues.size

    @property
    def seed_groups(self) -> SeedGroups:
        """One group of all: a simulation of a covariance says nothing about insiders."""
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
        """[R⁻¹]_ii of each agent, shape (n,): the mean of the inverse eigenvalues.

        Of noise against an insider, it is that of what the insider does not know.
        """
        known = self.insider_precision
        precision = float((1 / self.eigenvalues).mean()) if known is None else known
        return np.full(self.num_agents, precision)


def design_lattice(
    first_row: FloatArray, precision_cap: float, *, objective: Horizon, gossip: Gossip
) -> LatticeNoise:
    """Return CorN's optimum for a first row of `corn.topology.sparse.find_lattice`."""
    made = design_circulant(first_row, precision_cap, objective=objective, gossip=gossip)
    return LatticeNoise(made.eigenvalues)


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
    ratio, scale, _ = search_ratio(family, None)
    return LatticeNoise(scale / precision_cap * (1 + ratio * np.maximum(laplacian, 0.0)))
