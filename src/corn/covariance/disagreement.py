"""κ: the disagreement between agents that mix by gossip, which predicts what it costs accuracy."""

from __future__ import annotations

import math

from corn.checks import FloatArray
from corn.covariance.decomposition import Decomposition
from corn.covariance.objective import disagreement_matrix
from corn.topology import Network
from corn.topology.spectrum import MOST_DENSE, find_mixing_time

LARGE_DISAGREEMENT = 0.35
"""κ above which models that are not linear lose accuracy (measured in docs/results/gossip.md)."""


def disagreement_ratio(
    network: Network,
    noise: Decomposition | FloatArray,
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

    None for more than 2000 agents, where D is too large. The server's ``precision_cap`` b is the
    strictest.

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
    if n > MOST_DENSE:
        return None
    if math.isinf(find_mixing_time(network.step_matrix)):
        energy = math.inf
    else:
        R = noise.covariance if isinstance(noise, Decomposition) else noise
        energy = float((disagreement_matrix(network.step_matrix, momentum) * R).sum())
    # Rounding may leave a little below zero of noise that all agents share.
    return math.sqrt(max(energy, 0.0) * n * precision_cap / num_steps)
