"""Noise that colluding insiders cannot undo: Problem (16), on seeds of any groups.

R = diag(θ) + Σ_e f_e f_eᵀ, where the stream e has weights f_e on the members of its group. A
coalition I knows the streams of its members' groups; R^(I) is the covariance of all others. A group
of m agents needs m streams, and a pair one: any diagonal part of a pair's covariance is worth more
as private noise, which fewer coalitions know.

**The search.** The problem is scale-free: any candidate becomes exactly private when it is
multiplied by max x / b, where x are all the [(R^(I))⁻¹]_ii at stake. So the search minimises

    log Tr(A R) + (1/p) log Σ_{I,i} π_Ii x_Ii^p

over log θ and the factors f_e, by L-BFGS, and rescales. The weights π are updated to the softmax
weights w after each round (the exponential method of multipliers), which removes the smoothing
error at a moderate p; raising p instead would ruin the conditioning.

**The certificate** needs no search: for any matrices Y_I with Σ_{I: k unknown} [Y_I Y_Iᵀ]_{H_k} ⪯
A_{H_k} for every group and every agent's private noise,

    Tr(A R) ≥ Σ_I Tr(Y_Iᵀ R^(I) Y_I) ≥ Σ_{I,i} (Y_I)_ii² / [(R^(I))⁻¹]_ii ≥ Σ_{I,i} (Y_I)_ii² / b,

the second step by Cauchy and Schwarz. Near the optimum Y_I = (R^(I))⁻¹ Λ_I^{1/2}, Λ = w/x, makes it
tight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import scipy.optimize
from numpy.typing import NDArray

from corn.checks import FloatArray, IntArray
from corn.covariance.coalitions import require_few_coalitions, worst_precisions
from corn.covariance.decomposition import Decomposition
from corn.covariance.dual import solve_dual
from corn.covariance.problem import Design, DesignProblem, Status, invert_definite, scale_to_cap
from corn.covariance.threat import SeedGroups
from corn.errors import InvalidArgumentError
from corn.threads import one_thread

_LEAST_FOR_UPDATES = 24  # agents: below it inverses are faster, and the tolerance is tighter
_TOLERANCE, _TOLERANCE_WITH_UPDATES = 1e-3, 1e-2
_SMOOTHEST = 10.0  # p: smooth and easy at first
_SHARPNESS = (30.0, 60.0)  # p: then sharp enough for weights
_ITERATIONS_PER_ROUND = 50
_PRIOR_FLOOR = -40.0  # of log π, so that a constraint without weight can gain some again
_FAR = 1e10  # the value of a point at which R is not definite
_FARTHEST_LOG = 60.0  # of log θ
_REVIVAL_SIZE = 1e-3  # variance of revived noise, relative to the mean private variance
_SMALLEST_RELATIVE_EIGENVALUE = 1e-8  # of A in the metric; a singular A has no root to invert
_STALL = 5e-4  # relative: less progress in a round than this, twice, ends a search with updates
_LEAST_COEFFICIENT = 1e-30  # its square does not underflow
_SILENT_SHARE = 0.01  # of the tolerance: streams with so much of all power are not worth drawing
_EVALUATIONS_OF_INVERSES = 20_000
_FIRST_SHARED = 100.0  # the first ratio in the search for a start
_SHARED_FACTOR = 4.0  # between the ratios of that search

_SINGULAR = 1e-12  # smallest eigenvalue of A, relative to the largest
_SMALLEST_RIDGE = 1e-6
_BOUND_ITERATIONS = 30  # any point of the dual is a bound, so it need not converge
_MOST_MULTIPLIERS = 100_000  # of a proof that is worth carrying along: about 2 MB of text
_CHUNK_ENTRIES = 4_000_000  # 32 MB of float64 for the matrices of a chunk


def solve_split(problem: DesignProblem, seed_groups: SeedGroups) -> Design:
    """Minimise Tr(A R) over private and shared noise, so that all coalitions meet the caps.

    The search stops at a relative gap of 1e-3, or of 1e-2 for pairs of 24 agents or more, or after
    as many evaluations as take minutes: the noise is private all the same, and its status says so.
    """
    n = problem.num_agents
    q = problem.threat.max_colluders
    # Before a search of hours whose result could not be checked.
    require_few_coalitions(n, q)
    streams = Streams.list_all(seed_groups, n)
    limits = problem.variance_ratio_limits / problem.precision_caps
    # With an A that is singular on a group, noise grows without bound and no bound is proved.
    values = np.linalg.eigvalsh(streams.take(problem.scaled_objective))
    is_singular = (values[:, 0] <= _SINGULAR * values[:, -1]).any()
    ridge = _SMALLEST_RIDGE if is_singular else 0.0
    while True:
        with one_thread():
            found = _search(problem, streams, q, ridge)
            shares = _scale(problem, seed_groups, found)
        if (shares.covariance.diagonal() <= limits * (1 + 1e-9)).all():
            break
        # Noise variance falls about as the root of the ridge, and each search is expensive.
        ridge = max(10 * ridge, _SMALLEST_RIDGE)
    value = problem.value(shares.covariance)
    # Insiders only ask for more noise, so the bound against an eavesdropper holds as well. It is
    # the better one where A is singular on a group: the bound for insiders is then 0.
    dual = solve_dual(problem.scaled_objective, tolerance=1e-6, max_iterations=_BOUND_ITERATIONS)
    bound = max(found.lower_bound, dual.lower_bound) / problem.strictest_cap
    status: Status = "noise limited" if ridge else "iteration limit"
    if value <= (1 + found.tolerance) * bound:
        status = "optimal"
    elif found.lower_bound < dual.lower_bound:
        status = "loose bound"
    # Rounding can leave the bound above the value, and the smaller of the two is still a bound.
    bound = min(bound, value)
    R, caps = shares.covariance, problem.precision_caps
    made = Design("corn", "split", status, R, caps, value, bound, found.evaluations, problem.threat)
    is_short = found.proof is not None and found.proof.size <= _MOST_MULTIPLIERS
    return replace(made, shares=shares, multipliers=found.proof if is_short else None)


@dataclass(frozen=True, eq=False)
class Streams:
    """All streams of shared noise: one for a pair, and m for a group of m agents.

    ``members`` are the agents of each stream's group, shape (streams, width), filled up with n;
    ``ranks`` the number of a stream within its group, shape (streams,); ``groups`` the seed groups,
    each with its streams.
    """

    members: IntArray
    ranks: IntArray
    groups: tuple[tuple[tuple[int, ...], slice], ...]
    num_agents: int

    @classmethod
    def list_all(cls, seed_groups: SeedGroups, num_agents: int) -> Streams:
        """Return the streams that the best noise on these groups needs at most."""
        width = max(map(len, seed_groups))
        rows: list[tuple[int, ...]] = []
        groups = []
        for group in seed_groups:
            count = 1 if len(group) == 2 else len(group)
            groups.append((group, slice(len(rows), len(rows) + count)))
            rows += [group + (num_agents,) * (width - len(group))] * count
        ranks = np.concatenate([np.arange(own.stop - own.start) for _, own in groups])
        return cls(np.array(rows, dtype=int), ranks, tuple(groups), num_agents)

    @property
    def are_of_pairs(self) -> bool:
        """Whether all groups are pairs."""
        return bool(self.members.shape[1] == 2)

    @property
    def are_filled(self) -> NDArray[np.bool_]:
        """Whether a place of ``members`` is that of an agent."""
        return np.asarray(self.members < self.num_agents)

    def take(self, A: FloatArray) -> FloatArray:
        """Return the blocks of A on each stream's group, shape (streams, width, width).

        Places that are filled up have no coupling, and the mean of A's diagonal.
        """
        padded = np.pad(A, ((0, 1), (0, 1)))
        blocks: FloatArray = padded[self.members[:, :, None], self.members[:, None, :]]
        places = np.arange(blocks.shape[1])
        blocks[:, places, places] += np.where(self.are_filled, 0.0, np.trace(A) / len(A))
        return blocks

    def split(self, factors: FloatArray) -> tuple[FloatArray, ...]:
        """Return the factor of each group, shape (m, streams of it)."""
        return tuple(factors[own, : len(group)].T for group, own in self.groups)

    def join(self, noise: Decomposition) -> FloatArray:
        """Return the weights of all streams that are listed, zero where a split has none."""
        given = dict(zip(noise.seed_groups, noise.factors, strict=True))
        factors = np.zeros(self.members.shape)
        for group, own in self.groups:
            if group in given:
                columns = given[group][:, : own.stop - own.start].T
                factors[own.start : own.start + len(columns), : len(group)] = columns
        return factors

    def hide(
        self, theta: FloatArray, factors: FloatArray, outside: NDArray[np.bool_]
    ) -> FloatArray:
        """Return R^(I) of each coalition, shape (c, n, n); members keep their private noise."""
        n = self.num_agents
        agents = np.arange(n)
        if not self.are_of_pairs:
            F = np.zeros((n + 1, len(factors)))
            F[self.members, np.arange(len(factors))[:, None]] = factors
            F = F[:n]
            hidden = (F * self._find_unknown(outside)[:, None, :]) @ F.T
            hidden[:, agents, agents] += theta
            return np.asarray(hidden)
        # Without a product over streams, of which large networks have very many.
        i, j = self.members.T
        R = np.zeros((n, n))
        R[i, j] = R[j, i] = factors[:, 0] * factors[:, 1]
        # Agent i has this variance of noise in common with agent j.
        power = np.zeros((n, n))
        power[i, j] = factors[:, 0] ** 2
        power[j, i] = factors[:, 1] ** 2
        # A pair is unknown if both of its agents are outside.
        hidden = R * (outside[:, :, None] & outside[:, None, :])
        hidden[:, agents, agents] = theta + outside * (outside @ power.T)
        return hidden

    def pull_back(self, matrices: FloatArray, outside: NDArray[np.bool_]) -> FloatArray:
        """Sum matrices on each stream, over coalitions that do not know it: adjoint of ``hide``."""
        blocks = np.zeros((len(self.members), *2 * self.members.shape[1:]))
        if self.are_of_pairs:
            # In one pass over all coalitions.
            i, j = self.members.T
            unknown = outside[:, i] & outside[:, j]
            diagonal = np.diagonal(matrices, axis1=1, axis2=2)
            blocks[:, 0, 0] = (diagonal[:, i] * unknown).sum(axis=0)
            blocks[:, 1, 1] = (diagonal[:, j] * unknown).sum(axis=0)
            blocks[:, 0, 1] = blocks[:, 1, 0] = (matrices[:, i, j] * unknown).sum(axis=0)
            return blocks
        for matrix, counts in zip(matrices, self._find_unknown(outside), strict=True):
            padded = np.pad(matrix, ((0, 1), (0, 1)))
            own = self.members[counts]
            blocks[counts] += padded[own[:, :, None], own[:, None, :]]
        return blocks

    def _find_unknown(self, outside: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return whether no member of a stream is in a coalition, shape (coalitions, streams)."""
        padded = np.pad(outside, ((0, 0), (0, 1)), constant_values=True)
        return np.asarray(padded[:, self.members].all(axis=2))


def _search(
    problem: DesignProblem, streams: Streams, max_colluders: int, ridge: float
) -> SplitSearch:
    """Search for the best candidate against so many insiders."""
    n = problem.num_agents
    search = SplitSearch(problem, streams, max_colluders, ridge)
    if not search.uses_updates:
        # Independent noise plus weakly anti-correlated groups: columns of I − 11ᵀ/m.
        sizes = streams.are_filled.sum(axis=1, keepdims=True)
        columns = np.where(streams.are_filled, -1 / sizes, 0.0)
        columns[np.arange(len(columns)), streams.ranks] += 1
        start = Candidate(np.ones(n), columns / np.sqrt(n))
        search.run(start, (_SMOOTHEST, *_SHARPNESS), _EVALUATIONS_OF_INVERSES)
        return search
    limit = affordable_evaluations(n, max_colluders)
    if max_colluders <= 1:
        search.run(_find_uniform_noise(search), _SHARPNESS, limit)
        return search
    # Noise against one insider less is a good start, and far cheaper to find. A smooth objective
    # would lead away from it.
    before = _search(problem, streams, max_colluders - 1, ridge)
    search.run(before.best, _SHARPNESS[-1:], limit)
    search.evaluations += before.evaluations
    return search


def affordable_evaluations(num_agents: int, max_colluders: int = 1) -> int:
    """Return how many evaluations take minutes: n³ operations each, n⁴ against two insiders."""
    # Evaluations of a full search, which takes minutes up to so many agents, and the fewest of all.
    two = (83, 200, 20, 4)
    most, agents, least, power = two if max_colluders > 1 else (500, 1000, 40, 3)
    return min(most, max(least, int(most * (agents / num_agents) ** power)))


def _find_uniform_noise(search: SplitSearch) -> Candidate:
    """Return the best noise with one private variance and one of all pairs: a good start."""
    n = len(search.diagonal)
    num_pairs = len(search.streams.members)

    def measure(shared: float) -> Candidate:
        # ``shared`` is the variance of an agent's shared noise over that of its private noise.
        size = np.sqrt(shared * n / (2 * num_pairs))
        factors = np.tile([size, -size], (num_pairs, 1))
        return search.evaluate(Candidate(np.ones(n), factors), _SHARPNESS[0])[0]

    best = measure(_FIRST_SHARED)
    for factor in (_SHARED_FACTOR, 1 / _SHARED_FACTOR):
        shared = _FIRST_SHARED
        while (candidate := measure(shared := shared * factor)).value < best.value:
            best = candidate
    return best


def _scale(problem: DesignProblem, seed_groups: SeedGroups, search: SplitSearch) -> Decomposition:
    """Return the best candidate as a split, scaled by an independent check of every coalition."""
    caps = problem.precision_caps

    def scale(factors: FloatArray) -> Decomposition:
        noise = Decomposition(search.best.theta, seed_groups, search.streams.split(factors))
        # Back from units of the strictest cap: R = T R' T (docs/theory.md, "A promise for each
        # agent").
        noise = noise.rescale(problem.scales)

        def scaled(scale: float) -> Decomposition:
            # One factor on all noise keeps the ratios that the search chose.
            return noise.rescale(np.full(problem.num_agents, np.sqrt(scale)))

        def worst_ratio(scale: float) -> float:
            worst = worst_precisions(scaled(scale), problem.threat.max_colluders)
            return float((worst / caps).max())

        return scaled(scale_to_cap(worst_ratio))

    shares = scale(search.best.factors)
    value = problem.value(shares.covariance)
    if not search.uses_updates:
        # In small networks, streams that died out are left out if that costs less.
        lean = scale(_silence_weakest(search.best, share=_SILENT_SHARE * search.tolerance))
        bound = search.lower_bound / problem.strictest_cap
        if problem.value(lean.covariance) <= max(value, (1 + search.tolerance) * bound):
            shares = lean
            value = problem.value(lean.covariance)
    # LDP shares no seed, so it holds against every coalition.
    independent = float((problem.objective_matrix.diagonal() / caps).sum())
    return Decomposition(1 / caps) if value >= independent else shares


def _silence_weakest(candidate: Candidate, *, share: float) -> FloatArray:
    """Return factors without the weakest streams, which have ``share`` of all power at most."""
    power = np.square(candidate.factors).sum(axis=1, keepdims=True)
    in_order = np.append(np.sort(power.ravel()), np.inf)
    sums = np.cumsum(in_order[:-1])
    num_weak = np.searchsorted(sums, share * (sums[-1] + candidate.theta.sum()), side="right")
    return np.where(power >= in_order[num_weak], candidate.factors, 0.0)


def certify(
    A: FloatArray,
    seed_groups: SeedGroups,
    decomposition: Decomposition,
    multipliers: FloatArray,
    *,
    max_colluders: int,
) -> float:
    """Return the lower bound for b = 1, over all splits, that multipliers λ ≥ 0 prove.

    ``multipliers`` has shape (coalitions, n), coalitions in lexicographic order; Y_I is
    (R^(I))⁻¹ Λ_I^{1/2} of a split, which may leave out some groups. Any λ is valid, so a
    certificate needs no trust in its maker. Overflow, or a singular split, proves nothing: 0.
    """
    outside = list_outside(len(A), max_colluders)
    # Weak duality holds for non-negative multipliers of agents at stake only.
    weights = np.where(outside, np.maximum(multipliers, 0), 0)
    largest = float(weights.max(initial=0.0))
    if not 0 < largest < np.inf:
        return 0.0
    # The bound does not depend on the scale of λ; squares of it must not overflow.
    weights /= largest
    streams = Streams.list_all(seed_groups, len(A))
    factors = streams.join(decomposition)
    private = np.zeros(len(A))
    blocks = np.zeros_like(streams.take(A))
    squares = 0.0
    try:
        for chunk, M in _invert_all(streams, decomposition.private_variance, factors, outside):
            # Y Yᵀ is M Λ Mᵀ; rounding leaves an inverse not quite symmetric.
            G = (M * weights[chunk][:, None, :]) @ M.transpose(0, 2, 1)
            # A member adds nothing: its row of M is diagonal, and its own privacy has no weight.
            private += np.einsum("cii->i", G)
            blocks += streams.pull_back(G, outside[chunk])
            squares += float((np.diagonal(M, axis1=1, axis2=2) ** 2 * weights[chunk]).sum())
    except np.linalg.LinAlgError:
        return 0.0
    t = _relative_pressure(A.diagonal(), streams.take(A), private=private, blocks=blocks)
    return squares / t if 0 < t < np.inf and squares < np.inf else 0.0


def _relative_pressure(
    diagonal: FloatArray, blocks_of_A: FloatArray, *, private: FloatArray, blocks: FloatArray
) -> float:
    """Return the least t with Σ_I Y_I Y_Iᵀ ⪯ t A on every group and all private noise.

    ``private`` and ``blocks`` are those of the sum. Infinite where A is singular on a group.
    """
    with np.errstate(divide="ignore"):
        largest = float((private / diagonal).max())
    try:
        inverse = np.linalg.inv(np.linalg.cholesky(blocks_of_A))
    except np.linalg.LinAlgError:
        return np.inf
    relative = np.linalg.eigvalsh(inverse @ blocks @ inverse.transpose(0, 2, 1))
    return max(largest, float(relative.max()))


def list_outside(num_agents: int, max_colluders: int) -> NDArray[np.bool_]:
    """Return who is outside each coalition of q agents, in lexicographic order: (coalitions, n).

    A smaller coalition knows less, so it asks for nothing more.
    """
    outside = np.ones((math.comb(num_agents, max_colluders), num_agents), dtype=bool)
    for row, coalition in zip(outside, combinations(range(num_agents), max_colluders), strict=True):
        row[list(coalition)] = False
    return outside


def _invert_all(
    streams: Streams, theta: FloatArray, factors: FloatArray, outside: NDArray[np.bool_]
) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield (R^(I))⁻¹ of all coalitions, as many at a time as fit into memory together."""
    size = max(1, _CHUNK_ENTRIES // len(theta) ** 2)
    for start in range(0, len(outside), size):
        chunk = slice(start, start + size)
        yield chunk, np.linalg.inv(streams.hide(theta, factors, outside[chunk]))


@dataclass(frozen=True, eq=False)
class Candidate:
    """Noise in the scaled problem: θ, shape (n,), and the weights of streams, as their members."""

    theta: FloatArray
    factors: FloatArray
    value: float = np.inf
    """Tr(A R) for b = 1 after the scaling that makes this candidate feasible."""


class SplitSearch:
    """L-BFGS in rounds on log θ and the coordinates C⁻¹f of each factor in a metric C.

    The ridge is on the A that is minimised, not on the A of the bound that is kept.
    """

    def __init__(
        self, problem: DesignProblem, streams: Streams, max_colluders: int, ridge: float
    ) -> None:
        A = problem.scaled_objective
        added = ridge * float(np.trace(A)) / len(A)
        self.streams = streams
        self.uses_updates = streams.are_of_pairs and len(A) >= _LEAST_FOR_UPDATES
        self.tolerance = _TOLERANCE_WITH_UPDATES if self.uses_updates else _TOLERANCE
        self.outside = list_outside(len(A), max_colluders)
        self._true_diagonal = A.diagonal()
        self._true_blocks = streams.take(A)
        self.diagonal = self._true_diagonal + added
        self._blocks = self._true_blocks + added * np.eye(streams.members.shape[1])
        self._metric = _scale_blocks(self._blocks)
        # −∞ removes a member's own privacy from every sum: it is not at stake against itself.
        self._log_prior = np.where(self.outside, 0.0, -np.inf)
        self.evaluations = 0
        self.lower_bound = 0.0
        self.proof: FloatArray | None = None
        self.best = Candidate(np.empty(0), np.empty(0))

    def run(self, start: Candidate, sharpness: Sequence[float], max_evaluations: int) -> None:
        """Run rounds of L-BFGS until a candidate's own bound is close, or evaluations run out.

        A candidate that converged and its bound belong together, so that its multipliers prove the
        bound. With updates, two slow rounds at the largest of ``sharpness`` end the search too.
        """
        stall = _STALL if self.uses_updates else 0.0
        z = self._pack(start)
        stalled = 0
        before = np.inf
        number = 0
        while True:
            p = sharpness[min(number, len(sharpness) - 1)]
            number += 1
            z = self._minimise(z, p, max(1, max_evaluations - self.evaluations))
            candidate, pressure = self.evaluate(self._unpack(z), p)
            if pressure is None:
                raise InvalidArgumentError("the objective is too ill-conditioned for this solver")
            bound = pressure.bound(self._true_diagonal, self._true_blocks)
            # By the ridged A, which is what is minimised.
            own_bound = pressure.bound(self.diagonal, self._blocks)
            converged = candidate.value <= (1 + self.tolerance) * own_bound
            if converged:
                self.best = candidate
            if converged or self.proof is None or bound > self.lower_bound:
                self.lower_bound = bound
                self.proof = pressure.multipliers
            is_sharp = number >= len(sharpness)
            is_slow = is_sharp and self.best.value > (1 - stall) * before
            stalled = stalled + 1 if is_slow else 0
            before = self.best.value
            if converged or stalled == 2 or self.evaluations >= max_evaluations:
                return
            # The weights of a smooth maximum are too even to serve as multipliers.
            if is_sharp:
                log_weights = np.maximum(pressure.log_weights, _PRIOR_FLOOR)
                self._log_prior = np.where(self.outside, log_weights, -np.inf)
            z = self._revive(candidate, pressure)

    def evaluate(self, candidate: Candidate, sharpness: float) -> tuple[Candidate, Pressure | None]:
        """Return a candidate with its value and pressure, None if not definite; keep the best."""
        self.evaluations += 1
        pressure = Pressure(self.streams, self._log_prior, sharpness)
        press = press_by_updates if self.uses_updates else press_by_inverses
        try:
            press(pressure, candidate.theta, candidate.factors, self.outside)
        except np.linalg.LinAlgError:
            return candidate, None
        candidate = replace(candidate, value=self._trace(candidate) * pressure.largest)
        if candidate.value < self.best.value:
            self.best = candidate
        return candidate, pressure

    def _minimise(self, z: FloatArray, sharpness: float, max_evaluations: int) -> FloatArray:
        def fun(z: FloatArray) -> tuple[float, FloatArray]:
            candidate, pressure = self.evaluate(self._unpack(z), sharpness)
            if pressure is None:
                # Large but finite, as the line search interpolates between values.
                return _FAR, np.zeros_like(z)
            trace = self._trace(candidate)
            # d/d log θ = θ d/dθ: variances stay positive without constraints.
            private = (self.diagonal / trace - pressure.private) * candidate.theta
            slack = self._blocks / trace - pressure.blocks
            factors = 2 * np.einsum("kba,kbc,kc->ka", self._metric, slack, candidate.factors)
            gradient = np.concatenate([private, factors.ravel()])
            return float(np.log(trace)) + pressure.smooth, gradient

        # A minimum need not be exact: the weights π move it after every round. The search ends by
        # its own certificate, not by a small change of the smoothed objective.
        rounds = {"maxiter": _ITERATIONS_PER_ROUND, "maxcor": _ITERATIONS_PER_ROUND}
        options = {**rounds, "maxfun": max_evaluations, "ftol": 0.0, "gtol": 1e-12}
        result = scipy.optimize.minimize(fun, z, jac=True, method="L-BFGS-B", options=options)
        return np.asarray(result.x)

    def _trace(self, candidate: Candidate) -> float:
        F = candidate.factors
        shared = float(np.einsum("km,kmn,kn->", F, self._blocks, F))
        return float(candidate.theta @ self.diagonal) + shared

    def _revive(self, candidate: Candidate, pressure: Pressure) -> FloatArray:
        """Return the point with a little noise in directions that would help but have died out.

        A factor's gradient vanishes with the factor, and that of log θ with θ.
        """
        size = _REVIVAL_SIZE * float(candidate.theta.mean())
        trace = self._trace(candidate)
        helps = pressure.private > self.diagonal / trace
        theta = np.where(helps, np.maximum(candidate.theta, size), candidate.theta)
        # Negative directions of the slack would lower the value.
        values, vectors = np.linalg.eigh(self._blocks / trace - pressure.blocks)
        # Each stream of a group gets a direction of its own.
        own = np.arange(len(values)), self.streams.ranks
        wanted = (values[own] < 0) & (np.square(candidate.factors).sum(axis=1) < size)
        directions = np.where(self.streams.are_filled, vectors.transpose(0, 2, 1)[own], 0.0)
        factors = np.where(wanted[:, None], np.sqrt(size) * directions, candidate.factors)
        return self._pack(Candidate(theta, factors))

    def _pack(self, candidate: Candidate) -> FloatArray:
        coordinates = np.linalg.solve(self._metric, candidate.factors[:, :, None])
        return np.concatenate([np.log(candidate.theta), coordinates.ravel()])

    def _unpack(self, z: FloatArray) -> Candidate:
        n = len(self.diagonal)
        # A step too long of the line search must not overflow.
        theta = np.exp(np.clip(z[:n], -_FARTHEST_LOG, _FARTHEST_LOG))
        coordinates = z[n:].reshape(self.streams.members.shape)
        return Candidate(theta, np.einsum("kab,kb->ka", self._metric, coordinates))


def _scale_blocks(blocks: FloatArray) -> FloatArray:
    """Return A^(−1/4), scaled to be at least 1, for each block A of a stack.

    With one seed for all the optimum is R ∝ A^(−1/2), whose factor is A^(−1/4): in the coordinates
    G of F = A^(−1/4) G the solution is well-conditioned, however ill-conditioned A is. Otherwise
    directions of small eigenvalues of A, on which the lower bound depends most, converge last.
    """
    values, vectors = np.linalg.eigh(blocks)
    # A block of zeros, whose noise nobody receives, has the metric of any other constant.
    largest = np.where(values[:, -1:] > 0, values[:, -1:], 1.0)
    relative = np.maximum(values / largest, _SMALLEST_RELATIVE_EIGENVALUE)
    metric: FloatArray = (vectors * relative[:, None, :] ** -0.25) @ vectors.transpose(0, 2, 1)
    return metric


class Pressure:
    """The demands of the coalitions on a candidate: sums over them with the weights w of a softmax.

    As in a streamed softmax, sums are relative to the largest weight so far until ``finish``.
    ``private`` is [Σ_I M_I Λ_I M_I]_ii with M_I = (R^(I))⁻¹ and Λ = diag(w/x), shape (n,), and
    ``blocks`` the same sum on each stream, over the coalitions that do not know it: at the optimum
    A/Tr(AR) wherever there is noise. ``mean`` is Σ w x.
    """

    largest: float  # of all x of agents outside I
    smooth: float  # (1/p) log Σ π x^p
    log_weights: FloatArray  # log w, shape (coalitions, n)
    multipliers: FloatArray  # w/x, shape (coalitions, n)

    def __init__(self, streams: Streams, log_prior: FloatArray, sharpness: float) -> None:
        self.streams = streams
        self.x = np.empty_like(log_prior)  # all [(R^(I))⁻¹]_ii, shape (coalitions, n)
        self.private = np.zeros(streams.num_agents)
        self.blocks = np.zeros((*streams.members.shape, streams.members.shape[1]))
        self.sums = [self.private, self.blocks]
        self.mean = 0.0
        self._mass = 0.0
        self._top = -np.inf
        self._log_prior = log_prior
        self._sharpness = sharpness

    def weigh(self, chunk: slice, x: FloatArray) -> FloatArray:
        """Return Λ of some coalitions, shape (m, n), in units of the largest weight so far."""
        self.x[chunk] = x
        exponents = self._sharpness * np.log(x) + self._log_prior[chunk]
        top = max(self._top, float(exponents.max()))
        if (shrink := math.exp(self._top - top)) < 1:
            self._mass *= shrink
            self.mean *= shrink
            for earlier in self.sums:
                earlier *= shrink
        self._top = top
        weights = np.exp(exponents - top)
        self._mass += float(weights.sum())
        self.mean += float((weights * x).sum())
        return np.asarray(weights / x)

    def finish(self) -> None:
        """Normalise all sums, after the last coalition."""
        log_mass = self._top + math.log(self._mass)
        self.largest = float(self.x[self._log_prior > -np.inf].max())
        self.smooth = log_mass / self._sharpness
        self.log_weights = self._sharpness * np.log(self.x) + self._log_prior - log_mass
        self.multipliers = np.exp(self.log_weights) / self.x
        self.mean /= self._mass
        self.private /= self._mass
        self.blocks /= self._mass

    def bound(self, diagonal: FloatArray, blocks: FloatArray) -> float:
        """Return a lower bound on Tr(A R) for b = 1 over all splits, by A on agents and streams."""
        t = _relative_pressure(diagonal, blocks, private=self.private, blocks=self.blocks)
        return self.mean / t if 0 < t < np.inf else 0.0


def press_by_inverses(
    pressure: Pressure, theta: FloatArray, factors: FloatArray, outside: NDArray[np.bool_]
) -> None:
    """Sum the pressure of all coalitions, by one inverse for each."""
    for chunk, M in _invert_all(pressure.streams, theta, factors, outside):
        Lambda = pressure.weigh(chunk, np.diagonal(M, axis1=1, axis2=2))
        G = (M * Lambda[:, None, :]) @ M
        pressure.private += np.einsum("cii->i", G)
        pressure.blocks += pressure.streams.pull_back(G, outside[chunk])
    pressure.finish()


def press_by_updates(
    pressure: Pressure, theta: FloatArray, factors: FloatArray, outside: NDArray[np.bool_]
) -> None:
    """Sum the pressure of all coalitions, where groups are pairs, by updates of one inverse.

    An insider c knows the streams of its own pairs. With these as the columns of B_c, and Y = R⁻¹,

        M_c = (R − B_c B_cᵀ)⁻¹ = Y + Y B_c K⁻¹ B_cᵀ Y,   K = I − B_cᵀ Y B_c,

    so that diag(M_c) costs n k² for an insider with k pairs, and all n insiders cost n² k² after
    one inverse. Derivatives cost as much: with Z = K⁻¹ B_cᵀ Y, the sum of M_c Λ_c M_c over all c is

        Y (Σ_c (I + B_c Z) Λ_c (I + B_c Z)ᵀ) Y,

    and Z = B_cᵀ M_c has the rows of M_c that belong to the pairs of c. Larger coalitions are the
    same computation once for each set of all members but the last, whose streams are left out of R.
    """
    n = len(theta)
    pairs = pressure.streams.members
    q = n - int(outside[0].sum())
    # The pressure on a pair is divided by these numbers.
    factors = np.where(abs(factors) < _LEAST_COEFFICIENT, _LEAST_COEFFICIENT, factors)
    # The numbers of each agent's pairs, and which end of them it is.
    pairs_of = [np.nonzero(pairs == agent) for agent in range(n)]
    # Σ BV and Σ Λ over the insiders of a base, where (I + BZ) Λ (I + BZ)ᵀ is
    # Λ + BV + (BV)ᵀ with V = ZΛ + HBᵀ/2 and H = ZΛZᵀ.
    inner = np.zeros((n, n))
    diagonal = np.zeros(n)
    # By pair and end: the pressure of the insider at the other end.
    known = np.zeros((len(pairs), 2))
    pressure.sums += [inner, diagonal, known]
    number = 0
    for outer in combinations(range(n), max(q - 1, 0)):
        # The outer members' streams are left out; those of each last member are updates.
        last = range(outer[-1] + 1 if outer else 0, n) if q else (None,)
        is_known: NDArray[np.bool_] = np.isin(pairs, outer).max(axis=1)
        unknown = np.where(is_known[:, None], 0.0, factors)
        R = pressure.streams.hide(theta, unknown, np.ones((1, n), dtype=bool))[0]
        if (Y := invert_definite(R)) is None:
            raise np.linalg.LinAlgError
        for insider in last:
            row = slice(number, number + 1)
            number += 1
            if insider is None:
                diagonal += pressure.weigh(row, Y.diagonal()[None])[0]
                continue
            own, ends = pairs_of[insider]
            partners = pairs[own, 1 - ends]
            # The columns of B have f at the insider and g at the partner. P = BᵀY.
            f, g = unknown[own, ends], unknown[own, 1 - ends]
            P = g[:, None] * Y[partners] + f[:, None] * Y[insider]
            K = np.eye(len(own)) - P[:, partners] * g - P[:, [insider]] * f
            Z = np.linalg.solve(K, P)
            x = Y.diagonal() + np.einsum("kn,kn->n", P, Z)
            # Where a step of the search went too far, K is not definite and x is no precision.
            x = np.where(x > 0, x, np.finfo(np.float64).max ** 0.25)
            Lambda = pressure.weigh(row, x[None])[0]
            V = Z * Lambda
            H = V @ Z.T
            known[own, 1 - ends] += H.diagonal()
            V[:, partners] += H * g / 2
            V[:, insider] += H @ f / 2
            inner[partners] += g[:, None] * V
            inner[insider] += f @ V
            diagonal += Lambda
        G = inner + inner.T
        G[np.diag_indices_from(G)] += diagonal
        T = Y @ G @ Y
        pressure.private += T.diagonal()
        open_pairs = pairs[~is_known]
        pressure.blocks[~is_known] += T[open_pairs[:, :, None], open_pairs[:, None, :]]
        # Y of the next base is another one; what was summed under this Y is done.
        inner[:] = 0
        diagonal[:] = 0
    # Without the pressure of insiders on their own pairs: row a of B_cᵀ M_c is f times the
    # partner's row of M_c.
    for end in (0, 1):
        pressure.blocks[:, end, end] -= known[:, end] / np.square(factors[:, end])
    pressure.finish()
