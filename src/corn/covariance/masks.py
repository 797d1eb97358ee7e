"""Noise for exact sums: masks that cancel, beside private noise that is optimal in closed form.

Where every agent gets the exact sum of a step's releases, noise that cancels in the sum costs
nothing, so it can be infinite: masks, uniform on the grid. What remains is private noise. With n
agents of which q collude, variance θ = 1/((n − q) b) each is enough, because the honest agents'
private noise adds up to 1/b. No arrangement of seeds does better (docs/theory.md, "Exact mixing").
"""

from __future__ import annotations

import math
import secrets
from itertools import combinations

import networkx as nx
import numpy as np
import scipy.linalg
import scipy.sparse

from corn.checks import FloatArray
from corn.covariance.decomposition import Decomposition, masked_precision
from corn.covariance.threat import SeedGroups
from corn.errors import InfeasibleError
from corn.topology.mixing import adjacency

_MOST_LISTED = 20_000
_MOST_AGENTS_LISTED = 40
_MOST_DENSE = 2000  # agents: an eigendecomposition takes a second
_LANCZOS_STEPS = 120
_FAILURE = 1e-15  # the probability that the bound of a Lanczos iteration is wrong
_ROUNDING = 1e-9  # relative, far beyond the rounding of either method


def design_masks(
    precision_caps: FloatArray, seed_groups: SeedGroups, max_colluders: int
) -> Decomposition:
    """Return masks on these seeds and the least private noise that keeps the strictest cap.

    For every coalition I of ``max_colluders`` agents, the masks of the other agents H make their
    messages uniform given their sum, which has private noise of variance at least 1/min b. Raises
    ``InfeasibleError`` unless the seeds that I does not know join all of H.
    """
    n = len(precision_caps)
    cap = float(precision_caps.min())
    # Rounded up, beyond the allowance of the check for its own rounding.
    theta = (1 + 1e-14 * n) / ((n - max_colluders) * cap)
    noise = Decomposition(np.full(n, theta), seed_groups, is_masked=True)
    if not (worst_masked_precision(noise, max_colluders) <= precision_caps).all():
        raise InfeasibleError(
            f"seeds must join all agents that are left without any {max_colluders} of them, found "
            f"{len(seed_groups)} seed groups that do not: use --seeds pairs or partners:K with a "
            "larger K, or fewer insiders"
        )
    return noise


def least_variance(num_agents: int, precision_cap: float, max_colluders: int) -> float:
    """Return the least 1ᵀR1 of any noise on any seeds: n/((n − q) b).

    Noise that a coalition does not know must have a sum of variance at least 1/b. A random
    coalition does not know a seed group with probability at most (n − q)/n, so that on average it
    does not know more than this part of 1ᵀR1.
    """
    return num_agents / ((num_agents - max_colluders) * precision_cap)


def worst_masked_precision(noise: Decomposition, max_colluders: int) -> FloatArray:
    """Return a bound on each agent's largest precision over all coalitions, shape (n,).

    It is infinite where the coalitions are too many to list, and the connectivity of the seeds
    is not proved to be sufficient.
    """
    n = noise.num_agents
    if lists_coalitions(noise, max_colluders):
        worst = np.zeros(n)
        for coalition in combinations(range(n), max_colluders):
            precision = masked_precision(noise, coalition)
            precision[list(coalition)] = 0
            worst = np.maximum(worst, precision)
        return worst
    if not has_connectivity(noise, max_colluders):
        return np.full(n, math.inf)
    # Any coalition learns the sum of all honest agents alone; that of those with most private noise
    # leaves the least.
    left = np.sort(noise.private_variance)[: n - max_colluders]
    return np.full(n, float(1 / left.sum()) * (1 + 2 * (n + 2) * 2.0**-52))


def lists_coalitions(noise: Decomposition, max_colluders: int) -> bool:
    """Return whether all coalitions are checked one by one: in small networks, and for groups.

    For seeds of pairs in larger networks, the connectivity of the graph of seeds is bounded.
    """
    is_few = math.comb(noise.num_agents, max_colluders) <= _MOST_LISTED
    is_small = noise.num_agents <= _MOST_AGENTS_LISTED
    return is_few and (is_small or any(len(group) != 2 for group in noise.seed_groups))


def has_connectivity(noise: Decomposition, max_colluders: int) -> bool:
    """Return whether seeds of pairs are proved to stay connected without any q agents."""
    n, groups = noise.num_agents, noise.seed_groups
    if any(len(group) != 2 for group in groups):
        return False
    # Of all pairs, whoever is left is joined. The connectivity of a graph that is not complete is
    # at least its second eigenvalue (Fiedler 1973).
    return len(groups) == math.comb(n, 2) or bound_second_eigenvalue(groups, n) > max_colluders


def check_connectivity(noise: Decomposition, max_colluders: int) -> bool:
    """Return whether seeds of pairs stay connected without any q agents, by paths between them.

    It shares no code with :func:`has_connectivity`: the smallest set of agents that separates two
    others is found by maximum flows (Menger's theorem).
    """
    graph = nx.empty_graph(noise.num_agents)
    graph.add_edges_from(noise.seed_groups)
    return int(nx.node_connectivity(graph)) > max_colluders


def bound_second_eigenvalue(pairs: SeedGroups, num_agents: int) -> float:
    """Return a lower bound on λ₂ of the Laplacian of a graph on agents 0 … n−1.

    Above 2000 agents a Lanczos iteration from a random start bounds it. The bound is wrong with a
    probability of at most 10⁻¹⁵ over the start, whatever the graph is (Kuczyński and Woźniakowski
    1992, Theorem 3.2).
    """
    A = adjacency(pairs, num_agents)
    L = scipy.sparse.csr_array(scipy.sparse.diags_array(A.sum(axis=1)) - A)
    largest = 2 * float(L.diagonal().max(initial=0))  # at least λ_n, by Gershgorin
    if num_agents <= _MOST_DENSE:
        return float(scipy.linalg.eigvalsh(L.toarray())[1]) - _ROUNDING * largest
    # The largest eigenvalue of c − L among vectors that sum to zero is c − λ₂.
    found = _lanczos(L, largest)
    root = math.log(1.648 * math.sqrt(num_agents) / _FAILURE) / (2 * _LANCZOS_STEPS - 1)
    return largest - found * (1 + _ROUNDING) / (1 - root**2)


def _lanczos(L: scipy.sparse.csr_array, shift: float) -> float:
    """Return the largest Ritz value of shift − L among vectors of sum zero."""
    n = L.shape[0]
    # New randomness in each call, so that nobody can make a graph for which the start is bad.
    q = np.random.default_rng(secrets.randbits(128)).standard_normal(n)
    q -= q.mean()
    q /= np.linalg.norm(q)
    before = np.zeros(n)
    beta = 0.0
    alphas, betas = [], []
    for _ in range(_LANCZOS_STEPS):
        v = shift * q - L @ q - beta * before
        alphas.append(float(q @ v))
        v -= alphas[-1] * q
        v -= v.mean()
        beta = float(np.linalg.norm(v))
        betas.append(beta)
        # An invariant subspace: all eigenvalues that the start can reach are found.
        if beta < _ROUNDING * shift:
            break
        before = q
        q = v / beta
    values = scipy.linalg.eigh_tridiagonal(alphas, betas[: len(alphas) - 1], eigvals_only=True)
    return float(values.max())
