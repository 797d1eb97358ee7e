"""Upper bounds on [(R^(I))⁻¹]_ii for every coalition, from the noise weights, rounding included.

One coalition costs an eigendecomposition (`hidden_precision`). For many coalitions in a large
network there is a cheaper way, which does not depend on how a solver found the noise, and which is
as rigorous. In coordinates scaled by powers of two, so without rounding, R becomes

    S = diag(t) + B Bᵀ with t ≥ 1, and R^(I) becomes S_I = S − B_I B_Iᵀ ⪰ I,

where the columns of B_I are the streams that I knows. Hence, for **any** vector y and its residual
r = e_i − S_I y,

    [S_I⁻¹]_ii = y_i + yᵀr + rᵀ S_I⁻¹ r ≤ y_i + yᵀr + |r|².

With Y ≈ S⁻¹ computed once, Δ = I − S Y, and y = Y u, u = e_i + B_I q for any q, the residual is

    r = Δ u − B_I ρ,   ρ = q − B_Iᵀ Y u,

and q that solves (I − B_Iᵀ Y B_I) q = B_Iᵀ Y e_i (Woodbury) makes ρ vanish but for rounding. A
coalition that knows k streams costs n k². All rounding errors are bounded and added.

Under masks on seeds of pairs the connectivity of the graph of seeds is bounded instead.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from itertools import combinations

import networkx as nx
import numpy as np
import scipy.linalg
import scipy.sparse

from corn.checks import FloatArray, IntArray
from corn.covariance.decomposition import Decomposition, hidden_precision
from corn.covariance.problem import invert_definite
from corn.covariance.threat import SeedGroups
from corn.errors import InvalidArgumentError
from corn.topology.mixing import adjacency

# All of them must be checked for a guarantee, so the count bounds the time of every verification.
_MAX_COALITIONS = 200_000
_SMALL = 40  # agents: below it an eigendecomposition per coalition is as fast
_LOOSE = 1e-5  # relative: above it a bound is computed again by an eigendecomposition
_UNIT = 2.0**-53
_SECOND_ORDER = 1.01  # covers products of rounding errors, and the rounding of the bounds


def require_few_coalitions(num_agents: int, max_colluders: int) -> None:
    """Raise if the coalitions are too many to check every one of them."""
    count = math.comb(num_agents, max_colluders)
    if count > _MAX_COALITIONS:
        # Python does not print integers of more than 4300 digits.
        shown = f"{count:,}" if count < 10**20 else f"more than 10^{math.floor(math.log10(count))}"
        raise InvalidArgumentError(
            f"{shown} coalitions of {max_colluders} among {num_agents} agents are too many to "
            f"check one by one (at most {_MAX_COALITIONS:,}): reduce max_colluders"
        )


def coalition_precisions(
    decomposition: Decomposition, max_colluders: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], FloatArray]]:
    """Yield each coalition of this size, the honest agents, and their [(R^(I))⁻¹]_ii, rounded up.

    They come from the noise weights themselves, independently of the solvers.
    """
    n = decomposition.num_agents
    if decomposition.is_masked and not lists_coalitions(decomposition, max_colluders):
        # Every coalition learns the sum of all others and no more; any one of them is an example.
        coalition = tuple(range(max_colluders))
        everyone = tuple(range(n))
        yield coalition, everyone, worst_masked_precision(decomposition, max_colluders)
        return
    require_few_coalitions(n, max_colluders)
    is_large = n > _SMALL and bool(decomposition.seed_groups) and not decomposition.is_masked
    updates = CoalitionUpdates.try_make(decomposition) if is_large else None
    for coalition in combinations(range(n), max_colluders):
        bound = updates.bound(coalition) if updates else None
        if bound is None:
            yield coalition, *hidden_precision(decomposition, coalition)
        else:
            honest = tuple(agent for agent in range(n) if agent not in coalition)
            yield coalition, honest, bound[list(honest)]


def worst_precisions(decomposition: Decomposition, max_colluders: int) -> FloatArray:
    """Return each agent's largest [(R^(I))⁻¹]_ii over all coalitions of this size, shape (n,)."""
    worst = np.zeros(decomposition.num_agents)
    for _, honest, precision in coalition_precisions(decomposition, max_colluders):
        members = list(honest)
        worst[members] = np.maximum(worst[members], precision)
    return worst


class CoalitionUpdates:
    """An approximate inverse of R with its residual, and the bounds that follow from it."""

    def __init__(self, decomposition: Decomposition, scale: FloatArray, Y: FloatArray) -> None:
        self._scale = scale
        self._Y = Y
        self._t = decomposition.private_variance / scale**2
        self._B, self._streams = scale_streams(decomposition, scale)
        # By how much S Y misses the identity, entry by entry, with the rounding of computing it.
        B = _faster(self._B)
        # The same sum with absolute values: the standard bound on the rounding of a sum of
        # products.
        magnitude = self._t[:, None] * abs(Y) + abs(B) @ (abs(B).T @ abs(Y))
        magnitude[np.diag_indices_from(magnitude)] += 1
        residual = -self._t[:, None] * Y - B @ (B.T @ Y)
        residual[np.diag_indices_from(residual)] += 1
        by_stream, by_agent = (np.diff(m.indptr).max(initial=0) for m in (self._B.tocsc(), self._B))
        terms = int(by_stream + by_agent) + 4
        error = _SECOND_ORDER * (abs(residual) + _rounding(terms) * magnitude)
        self._error_norms = np.linalg.norm(error, axis=0)
        # Bounds uᵀ Y Δ u for any u by |u| alone, entry by entry: bound() knows no more of u.
        product = _SECOND_ORDER * (abs(Y) @ error)
        self._product = (product + product.T) / 2

    @classmethod
    def try_make(cls, decomposition: Decomposition) -> CoalitionUpdates | None:
        """Return the updates, or None where they do not apply: an agent without private noise."""
        theta = decomposition.private_variance
        # Negated, so that NaN fails too. The limit keeps scale² far from underflow.
        if not theta.min() > 1e-200:
            return None
        # Powers of two: dividing by them is exact, and t = θ/scale² is from 1 to 4.
        scale = np.exp2(np.floor(np.log2(theta) / 2))
        # log2 rounds, and may end one power too high. t ≥ 1 is what the proof rests on, so it is
        # enforced.
        scale[theta < scale**2] /= 2
        B = _faster(scale_streams(decomposition, scale)[0])
        Y = invert_definite(np.diag(theta / scale**2) + B @ B.T)
        if Y is None or not np.isfinite(Y).all():
            return None
        return cls(decomposition, scale, Y)

    def bound(self, coalition: tuple[int, ...]) -> FloatArray | None:
        """Return the bounds, shape (n,), of which members' mean nothing; None if they are loose."""
        Y = self._Y
        product = self._product
        own = [self._streams[agent] for agent in coalition]
        known = np.unique(np.concatenate(own)) if own else np.empty(0, dtype=int)
        # An eigendecomposition is faster only for coalitions that know most streams.
        if len(known) >= len(Y):
            return None
        columns = self._B[:, known]
        # The streams touch few agents, and everything below is on those rows only: n k² instead of
        # n³.
        T = np.unique(columns.nonzero()[0])
        B = columns[T].toarray()
        size = float(np.linalg.norm(B))
        terms = _rounding(len(T) + len(known) + 4)
        p = B.T @ Y[T]
        Q = p[:, T] @ B
        try:
            q = np.linalg.solve(np.eye(len(known)) - Q, p)
        except np.linalg.LinAlgError:
            return None
        # The error of p is terms · |B|ᵀ|Y|, and that of Q is twice that times |B|.
        p_norm, q_norm = np.linalg.norm(p, axis=0), np.linalg.norm(q, axis=0)
        p_error = terms * size * np.linalg.norm(Y[T], axis=0)
        Q_error = 2 * terms * size**2 * float(np.linalg.norm(Y[np.ix_(T, T)]))
        rho = np.linalg.norm(q - p - Q @ q, axis=0) + p_error
        rho += (terms * (1 + float(np.linalg.norm(Q))) + Q_error) * q_norm + terms * p_norm
        # uᵀ Y Δ u and |Δu|, with |u| at most e_i + |B||q|.
        v = abs(B) @ abs(q)
        first = product.diagonal() + np.einsum("tn,tn->n", v, 2 * product[T])
        first += np.einsum("tn,tn->n", v, product[np.ix_(T, T)] @ v)
        r = self._error_norms + self._error_norms[T] @ v + size * rho
        y = Y.diagonal() + np.einsum("kn,kn->n", p, q)
        error = (p_error + terms * p_norm) * q_norm + terms * abs(y)
        error += first + (q_norm + rho) * rho + r**2
        bound = y + _SECOND_ORDER * error
        # Never wrong, only loose: the caller then pays for an eigendecomposition.
        is_tight = np.delete(error <= _LOOSE * y, list(coalition)).all()
        return np.asarray(bound / self._scale**2) if is_tight else None


def _faster(B: scipy.sparse.csr_array) -> FloatArray | scipy.sparse.csr_array:
    """Return a matrix in the form whose products are faster: dense if a tenth is not zero."""
    # A seed group of all agents gives a full matrix, which sparse products take 20 × longer for.
    return B.toarray() if B.nnz > B.shape[0] * B.shape[1] / 10 else B


def scale_streams(
    decomposition: Decomposition, scale: FloatArray
) -> tuple[scipy.sparse.csr_array, list[IntArray]]:
    """Return all weights of streams over the scale, shape (n, streams), and who knows which."""
    none = np.empty(0)
    rows, columns, values = [none], [none], [none]
    known: list[list[IntArray]] = [[none.astype(int)] for _ in scale]
    start = 0
    for group, factor in zip(decomposition.seed_groups, decomposition.factors, strict=True):
        numbers = start + np.arange(factor.shape[1])
        start += factor.shape[1]
        for member in group:
            known[member].append(numbers)
        rows.append(np.repeat(group, factor.shape[1]))
        columns.append(np.tile(numbers, len(group)))
        values.append((factor / scale[list(group)][:, None]).ravel())
    places = np.concatenate(rows).astype(int), np.concatenate(columns).astype(int)
    shape = (len(scale), start)
    B = scipy.sparse.csr_array((np.concatenate(values), places), shape=shape)
    return B, [np.concatenate(numbers) for numbers in known]


def _rounding(num_terms: int) -> float:
    """Return the relative error of a sum of so many products."""
    return num_terms * _UNIT / (1 - num_terms * _UNIT)


_MOST_LISTED = 20_000
_MOST_AGENTS_LISTED = 40
_MOST_DENSE = 2000  # agents: an eigendecomposition takes a second
_LANCZOS_STEPS = 120
_FAILURE = 1e-15  # the probability that the bound of a Lanczos iteration is wrong
_ROUNDING = 1e-9  # relative, far beyond the rounding of either method


def worst_masked_precision(noise: Decomposition, max_colluders: int) -> FloatArray:
    """Return a bound on each agent's largest precision over coalitions too many to list.

    It is infinite unless the connectivity of the seeds is proved to be sufficient.
    """
    n = noise.num_agents
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
