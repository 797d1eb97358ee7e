"""What is proved about a plan's noise: no split on the seeds that the threat allows does better."""

from __future__ import annotations

import numpy as np

from corn.arrays import FloatArray
from corn.covariance import Decomposition, MechanismName, ThreatModel
from corn.covariance.assembly import Assembly
from corn.covariance.certificate import certify
from corn.covariance.coalitions import list_coalitions
from corn.covariance.dual import solve_dual
from corn.covariance.groups import SeedGroups
from corn.topology import Graph

_ITERATIONS = 100
_TOLERANCE = 1e-6


def allowed_groups(graph: Graph, threat: ThreatModel, mechanism: MechanismName) -> SeedGroups:
    """The seed groups that a mechanism may use under a threat: DECOR's are always the links."""
    if mechanism == "decor":
        return tuple(sorted({tuple(sorted(edge)) for edge in graph.edges}))
    return threat.seed_groups(graph)


def prove_lower_bound(
    A: FloatArray,
    decomposition: Decomposition,
    threat: ThreatModel,
    seed_groups: SeedGroups,
    multipliers: FloatArray | None,
) -> float:
    """The highest bound on Tr(A R), for b = 1, that can be proved; it trusts nothing it is given.

    Against an eavesdropper by the dual, block by block where groups are disjoint; against insiders
    by the multipliers, of which any are valid.
    """
    n = len(A)
    bounds = [_eavesdropper_bound(A)]
    members = [agent for group in seed_groups for agent in group]
    if threat.max_colluders == 0 and len(members) == len(set(members)):
        # Disjoint groups make the problem separate; whoever is in none draws alone.
        blocks = sum(_eavesdropper_bound(A[np.ix_(group, group)]) for group in seed_groups)
        bounds.append(blocks + float(np.delete(np.diag(A), members).sum()))
    coalitions = list_coalitions(seed_groups, num_agents=n, max_colluders=threat.max_colluders)
    if not coalitions.unknown.any():
        # Every coalition knows every seed: independent noise is the best there is.
        bounds.append(float(np.trace(A)))
    elif multipliers is not None and multipliers.shape == coalitions.protected.shape:
        # Only non-negative multipliers of those at stake prove anything.
        proof = np.where(coalitions.protected, np.maximum(multipliers, 0), 0)
        assembly = Assembly(seed_groups, coalitions, n)
        common = threat.private_noise == "common"
        bounds.append(certify(A, assembly, decomposition, proof, common=common))
    return max(bounds)


def _eavesdropper_bound(A: FloatArray) -> float:
    if not np.trace(A) > 0:
        return 0.0
    return solve_dual(A, tolerance=_TOLERANCE, max_iterations=_ITERATIONS).lower_bound
