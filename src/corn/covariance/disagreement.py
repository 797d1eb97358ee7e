"""κ: the disagreement between agents that mix by gossip, which predicts what it costs accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corn.checks import FloatArray
from corn.covariance.decomposition import Decomposition
from corn.covariance.lattice import LatticeNoise, gossip_spectrum
from corn.covariance.objective import (
    Horizon,
    default_momentum,
    disagreement_matrix,
    mode_energies,
)
from corn.errors import InvalidArgumentError
from corn.topology import Gossip, Network
from corn.topology.gossip import accelerate, apply_to_eigenvalues
from corn.topology.sparse import MOST_DENSE, find_lattice
from corn.topology.spectrum import find_mixing_time, is_symmetric

LARGE_DISAGREEMENT = 0.35
"""κ above which models that are not linear lose accuracy: docs/mixing.md has the measurements."""

_MOST_ROUNDS = 100


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


def list_remedies(
    network: Network, objective: Horizon | None, *, num_steps: int, ratio: float
) -> dict[str, float]:
    """Return options that lower κ of CorN's noise, with about the κ that each leads to.

    They are the fewest rounds that lead to 0.35, the default momentum if it is larger than the
    objective's, and exact sums; exact sums alone without an ``objective``. ``ratio`` is κ of the
    noise as it is.

    CorN's noise would be another one, and need not be designed to tell κ. Where all agents are
    alike, R = (Tr A^{1/2}/(n b)) A^{-1/2} is optimal against an eavesdropper. Elsewhere, and
    against insiders, κ is larger by a factor that depends little on rounds and momentum.
    """
    found: dict[str, float] = {}
    has_modes = network.num_agents <= MOST_DENSE and is_symmetric(network.mixing_matrix)
    if objective is not None and has_modes and math.isfinite(ratio):
        # Without the largest, which is 1 and belongs to the average.
        w = np.asarray(np.linalg.eigvalsh(network.mixing_matrix)[:-1], dtype=np.float64)
        modes = _step_modes(w, network.gossip)
        scale = ratio / _expect_ratio(modes, objective, num_steps)
        for gossip in _list_gossip(network.gossip.rounds):
            expected = scale * _expect_ratio(_step_modes(w, gossip), objective, num_steps)
            if expected <= LARGE_DISAGREEMENT:
                found[f"--gossip {gossip}"] = expected
                break
        momentum = default_momentum(num_steps)
        if momentum > objective.momentum:
            other = replace(objective, momentum=momentum)
            found[f"--momentum {momentum:g}"] = scale * _expect_ratio(modes, other, num_steps)
    if not network.graph.is_directed():
        found["--mixing sum"] = 0.0
    return found


def _list_gossip(least: int) -> Iterator[Gossip]:
    for rounds in range(least, _MOST_ROUNDS + 1):
        yield Gossip(rounds, "plain")
        yield Gossip(rounds, "chebyshev")


def _step_modes(eigenvalues: FloatArray, gossip: Gossip) -> FloatArray:
    """Return the eigenvalues of a step in modes of disagreement, from those of W."""
    if gossip.kind == "plain":
        return np.asarray(eigenvalues**gossip.rounds)
    return apply_to_eigenvalues(accelerate(eigenvalues, gossip.rounds), eigenvalues)


def _expect_ratio(modes: FloatArray, objective: Horizon, num_steps: int) -> float:
    """Return κ of the noise in closed form, from the eigenvalues of a step."""
    n = len(modes) + 1
    if _never_decays(modes):
        return math.inf
    root = np.sqrt(objective.weigh_disagreement(modes))
    mean_root = (root.sum() + math.sqrt(objective.average_energy)) / n
    # Eigenvalues of b R are mean_root/root. A mode that mixing removes at once leaves nothing.
    seen = root > 0
    energy = float((mode_energies(modes[seen], 1.0, objective.momentum) / root[seen]).sum())
    return math.sqrt(energy * mean_root * n / num_steps)


def _never_decays(modes: NDArray[Any]) -> bool:
    """Return whether a mode of disagreement keeps its size up to rounding: of periodic weights."""
    limit = 1 - 8 * (1 + modes.size) * np.finfo(float).eps
    return bool(np.abs(modes).max(initial=0.0) >= limit)
