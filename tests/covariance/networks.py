"""Mixing matrices built without the topology package, and designs with the paper's defaults."""

import networkx as nx
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from corn.checks import FloatArray
from corn.covariance import (
    EAVESDROPPER,
    ONE_STEP,
    Design,
    Mechanism,
    MechanismName,
    ObjectiveLike,
    ThreatModel,
    design,
)
from corn.covariance.problem import invert_covariance
from corn.errors import InfeasibleError


def is_private(covariance: FloatArray, precision_caps: ArrayLike) -> bool:
    """Return whether R ≻ 0 and [R⁻¹]_ii ≤ b_i for every agent; one number is the cap of all."""
    try:
        precision = invert_covariance(covariance)
    except InfeasibleError:
        return False
    return bool((precision.diagonal() <= np.asarray(precision_caps)).all())


def metropolis(graph: nx.Graph) -> FloatArray:
    """w_ij = 1/(1 + max(d_i, d_j)) on links, the rest on the diagonal; weights are ignored."""
    A = nx.to_numpy_array(graph, weight=None)
    degrees = A.sum(axis=1)
    W = A / (1 + np.maximum.outer(degrees, degrees))
    return np.asarray(W + np.diag(1 - W.sum(axis=1)))


def random_network(num_agents: int, p: float, seed: int) -> FloatArray:
    return metropolis(nx.gnp_random_graph(num_agents, p, seed=seed))


def paper_design(
    W: FloatArray,
    cap: ArrayLike = 1.0,
    mechanism: Mechanism | MechanismName = "corn",
    *,
    objective: ObjectiveLike = ONE_STEP,
    threat: ThreatModel = EAVESDROPPER,
) -> Design:
    """Design as the paper does unless told otherwise: for one step, against an eavesdropper."""
    return design(W, cap, mechanism=mechanism, objective=objective, threat=threat)


PROPERTY = settings(max_examples=60)

NETWORKS = st.builds(random_network, st.integers(1, 8), st.floats(0.1, 1.0), st.integers(0, 2**16))
"""Small networks of all kinds: dense, sparse, disconnected, often with singular W."""

EDGE_CASES = {
    "one agent": np.ones((1, 1)),
    "two agents": np.full((2, 2), 0.5),
    "complete": np.full((20, 20), 0.05),
    "star": metropolis(nx.star_graph(19)),
    "ring of cliques": metropolis(nx.ring_of_cliques(4, 5)),
    "barbell": metropolis(nx.barbell_graph(8, 1)),
    "bipartite": metropolis(nx.complete_bipartite_graph(5, 15)),
    "disconnected": metropolis(nx.disjoint_union(nx.path_graph(4), nx.complete_graph(5))),
    "isolated agents": np.eye(5),
    "long path": metropolis(nx.path_graph(60)),
    "lollipop": metropolis(nx.lollipop_graph(12, 8)),
    "zero singular value": metropolis(nx.cycle_graph(3)),
}
