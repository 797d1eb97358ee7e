"""κ: the disagreement between agents that mix by gossip, which predicts what it costs accuracy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corn.checks import FloatArray
from corn.covariance.decomposition import Decomposition
from corn.covariance.lattice import LatticeNoise, gossip_spectrum
from corn.covariance.objective import disagreement_matrix, mode_energies
from corn.errors import InvalidArgumentError
from corn.topology import Network
from corn.topology.spectrum import MOST_DENSE, find_lattice, find_mixing_time

LARGE_DISAGREEMENT = 0.35
"""κ above which models that are not linear lose accuracy (measured in docs/results/gossip.md)."""


def disagreement_ratio(
    network: Network,
    noise: Decomposition | LatticeNoise | FloatArray,
    *,
    precision_cap: float,
    momentum: float,
    num_steps: int,
) -> float | None:
    """Return κ of noise, or of a covariance: 0 for exact sums, infinite where agents never agree.

    κ is the stationary standard deviation of disagreement, a coordinate of x_i minus the average
    model, over that of a trusted server's noise in all T steps, √T/(n √b). Both grow with the step
    size, which cancels: κ² = n b Tr(D R)/T with D of `disagreement_matrix` (docs/theory.md,
    “Disagreement”).

    None for more than 2000 agents, where D is too large, unless a Fourier transform diagonalises
    the noise. The server's ``precision_cap`` b is the strictest.

    >>> from corn.topology import load_network
    >>> ring = load_network("ring:4", mixing="gossip")
    >>> found = disagreement_ratio(
    ...     ring, np.eye(4), precision_cap=1, momentum=0, num_steps=100
    ... )
    >>> round(found, 6)  # W has the eigenvalues 1/3, 1/3 and −1/3 in disagreement
    0.122474
    """
    n = network.num_agents
    if network.mixing == "sum":
        return 0.0
    if isinstance(noise, LatticeNoise):
        energy = _lattice_energy(network, noise, momentum)
    elif n > MOST_DENSE:
        return None
    elif math.isinf(find_mixing_time(network.step_matrix)):
        energy = math.inf
    else:
        R = noise.covariance if isinstance(noise, Decomposition) else noise
        energy = float((disagreement_matrix(network.step_matrix, momentum) * R).sum())
    # Rounding may leave a little below zero of noise that all agents share.
    return math.sqrt(max(energy, 0.0) * n * precision_cap / num_steps)


def _lattice_energy(network: Network, noise: LatticeNoise, momentum: float) -> float:
    """Return Tr(D R) on a ring or torus, where both are diagonal in the Fourier basis."""
    row = find_lattice(network.sparse_matrix)
    if row is None or row.shape != noise.eigenvalues.shape:
        raise InvalidArgumentError(
            f"noise must be that of the network's own lattice, found {noise.eigenvalues.shape}"
        )
    # Without the first mode, the average.
    w = gossip_spectrum(row, network.gossip).ravel()[1:]
    if _never_decays(w):
        return math.inf
    return float((mode_energies(w, 1.0, momentum) * noise.eigenvalues.ravel()[1:]).sum())


def _never_decays(modes: NDArray[Any]) -> bool:
    """Return whether a mode of disagreement keeps its size up to rounding: of periodic weights."""
    limit = 1 - 8 * (1 + modes.size) * np.finfo(float).eps
    return bool(np.abs(modes).max(initial=0.0) >= limit)
