"""The solver for pair seeds in large networks: one inverse per evaluation, whatever the insiders.

Like `FirstOrder` it minimises log Tr(A R) + (1/p) log Σ_{I,i} π_Ii x_Ii^p by L-BFGS, updates the
weights π, and proves a lower bound from the same weights. It is restricted to one stream per pair
and private noise per agent, which loses nothing, and in return evaluates all coalitions by
low-rank updates (`PairUpdates`): n³ instead of n⁴ for one insider.

Noise of pairs against insiders: all coalitions by low-rank updates of one inverse.

With one stream per pair, R = diag(θ) + Σ_e f_e f_eᵀ, f_e = f_ei e_i + f_ej e_j. An insider c knows
the streams of its own pairs. With these as the columns of B_c, and Y = R⁻¹,

    M_c = (R − B_c B_cᵀ)⁻¹ = Y + Y B_c K⁻¹ B_cᵀ Y,   K = I − B_cᵀ Y B_c,

so that diag(M_c) costs n k² for an insider with k pairs, and all n insiders cost n² k² after one
inverse. Derivatives cost as much: with Z = K⁻¹ B_cᵀ Y, the sum of M_c Λ_c M_c over all c is

    Y (Σ_c (I + B_c Z) Λ_c (I + B_c Z)ᵀ) Y,

and Z = B_cᵀ M_c has the rows of M_c that belong to the pairs of c. Larger coalitions are the same
computation once for each set of all members but the last, whose streams are left out of R.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar, final

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from corn.checks import FloatArray, IntArray, require_count, require_positive
from corn.covariance.certificate import SplitSolution, conclude_split
from corn.covariance.coalitions import list_coalitions, worst_precisions
from corn.covariance.decomposition import Decomposition
from corn.covariance.feasibility import invert_definite, scale_to_cap
from corn.covariance.first_order import Candidate, Pressure, SplitSearch
from corn.covariance.problem import DesignProblem, SolverName, Status
from corn.covariance.threat import SeedGroups, ThreatModel
from corn.errors import InvalidArgumentError
from corn.threads import one_thread

_CHUNK_ROWS = 300  # of n numbers each: larger arrays leave the cache, smaller ones cost overhead


@dataclass(frozen=True, eq=False)
class Insiders:
    """Insiders with about the same number of pairs, stacked.

    Attributes:
        members: the insiders, shape (m,).
        pairs: the numbers of their pairs, shape (m, k); a pair without noise fills up the rows.
        own: which end of a pair the insider is, 0 or 1, shape (m, k).
        partners: the other end, shape (m, k); the insider itself in the places filled up.
    """

    members: IntArray
    pairs: IntArray
    own: IntArray
    partners: IntArray


class PairUpdates:
    """The coalitions of q insiders among n agents, of whom some pairs share a seed."""

    def __init__(self, pairs: IntArray, *, num_agents: int, max_colluders: int) -> None:
        self.pairs = pairs
        self.num_agents = num_agents
        self.max_colluders = max_colluders
        self.num_coalitions = math.comb(num_agents, max_colluders)
        ends = np.concatenate([pairs[:, 0], pairs[:, 1]])
        numbers = np.tile(np.arange(len(pairs)), 2)
        sides = np.repeat([0, 1], len(pairs))
        # Pairs by agent, in compressed rows: those of agent c are at starts[c] … starts[c + 1].
        order = np.argsort(ends, kind="stable")
        starts = np.searchsorted(ends[order], np.arange(num_agents + 1))
        self._numbers = numbers[order]
        self._sides = sides[order]
        self._starts = starts

    def covariance(self, theta: FloatArray, factors: FloatArray) -> FloatArray:
        """Return R, shape (n, n)."""
        n, (i, j) = self.num_agents, self.pairs.T
        R = np.zeros((n, n))
        R[i, j] = R[j, i] = factors[:, 0] * factors[:, 1]
        diagonal = theta + np.bincount(i, factors[:, 0] ** 2, n)
        R[np.diag_indices(n)] = diagonal + np.bincount(j, factors[:, 1] ** 2, n)
        return R

    @property
    def protected(self) -> NDArray[np.bool_]:
        """Whose privacy is at stake against each coalition: its members' is not."""
        n, q = self.num_agents, self.max_colluders
        members = np.array(list(combinations(range(n), q)), dtype=int)
        members = members.reshape(self.num_coalitions, q)
        protected = np.ones((self.num_coalitions, n), dtype=bool)
        np.put_along_axis(protected, members, False, axis=1)
        return protected

    def press_candidate(
        self, candidate: Candidate, log_prior: FloatArray, sharpness: float
    ) -> Pressure | None:
        """Return the pressure on a candidate, of whose factors none vanishes altogether."""
        (factors,) = candidate.factors
        # The pressure on a pair is divided by these numbers.
        tiny = abs(factors) < _LEAST_COEFFICIENT
        kept = np.where(tiny, _LEAST_COEFFICIENT, factors)[:, :, 0]
        return self.press(candidate.theta, kept, log_prior, sharpness)

    def press(
        self, theta: FloatArray, factors: FloatArray, log_prior: FloatArray, sharpness: float
    ) -> Pressure | None:
        """Return the pressure of all coalitions on a candidate, or None if it is singular.

        ``log_prior`` has shape (coalitions, n): −∞ for members, whose privacy is not at stake.
        """
        sums = _Sums(self.num_agents, len(self.pairs), sharpness)
        x = np.empty_like(log_prior)
        for first, outer, last in self._split():
            # The outer members' streams are left out; those of each last member are updates.
            is_known: NDArray[np.bool_] = np.isin(self.pairs, outer).max(axis=1)
            unknown = np.where(is_known[:, None], 0.0, factors)
            Y = invert_definite(self.covariance(theta, unknown))
            if Y is None:
                return None
            if not last:
                x[first] = Y.diagonal()
                sums.weigh(x[[first]], log_prior[[first]])
            for insiders in self._stack(last):
                rows = first + insiders.members - last.start
                try:
                    x[rows] = self._add_insiders(sums, Y, unknown, insiders, log_prior[rows])
                except np.linalg.LinAlgError:
                    return None
            sums.end_base(Y, self.pairs, ~is_known)
        return sums.finish(x, log_prior, factors)

    def _split(self) -> Iterator[tuple[int, tuple[int, ...], range]]:
        """Yield the number of a first coalition, all its members but the last, and the last ones.

        Coalitions are numbered in lexicographic order.
        """
        n, q = self.num_agents, self.max_colluders
        if q == 0:
            yield 0, (), range(0)
            return
        first = 0
        for outer in combinations(range(n), q - 1):
            inner = range(outer[-1] + 1 if outer else 0, n)
            if inner:
                yield first, outer, inner
            first += len(inner)

    def _stack(self, inner: range) -> Iterator[Insiders]:
        agents = np.arange(inner.start, inner.stop)
        counts = np.diff(self._starts)[agents]
        # In order of their number of pairs, so that few places must be filled up.
        agents = agents[np.argsort(counts, kind="stable")]
        counts = np.diff(self._starts)[agents]
        start = 0
        while start < len(agents):
            size = 1
            while start + size < len(agents) and (
                (size + 1) * int(counts[start + size]) <= _CHUNK_ROWS
            ):
                size += 1
            yield self._stack_some(agents[start : start + size])
            start += size

    def _stack_some(self, members: IntArray) -> Insiders:
        begin, end = self._starts[members], self._starts[members + 1]
        width = int((end - begin).max())
        places = begin[:, None] + np.arange(width)
        filled = places < end[:, None]
        places = np.where(filled, places, 0)
        # The number one past the last pair has a factor of zero, so it adds nothing anywhere.
        pairs = np.where(filled, self._numbers[places], len(self.pairs))
        own = np.where(filled, self._sides[places], 0)
        partners = self.pairs[np.where(filled, pairs, 0), 1 - own]
        return Insiders(members, pairs, own, np.where(filled, partners, members[:, None]))

    def _add_insiders(
        self,
        sums: _Sums,
        Y: FloatArray,
        factors: FloatArray,
        insiders: Insiders,
        log_prior: FloatArray,
    ) -> FloatArray:
        """Add the pressure of some insiders and return their x, shape (m, n)."""
        d, J = insiders.members, insiders.partners
        m, k = J.shape
        padded = np.vstack([factors, np.zeros(2)])
        own = padded[insiders.pairs, insiders.own]
        other = padded[insiders.pairs, 1 - insiders.own]
        P = other[:, :, None] * Y[J]
        P += own[:, :, None] * Y[d][:, None, :]
        at_partners = np.take_along_axis(P, np.broadcast_to(J[:, None, :], (m, k, k)), axis=2)
        at_own = np.take_along_axis(P, d[:, None, None], axis=2)
        K = np.eye(k) - at_partners * other[:, None, :] - at_own * own[:, None, :]
        # K is k × k and definite as long as the noise that the insider does not know is.
        Z = np.linalg.inv(K) @ P
        x: FloatArray = Y.diagonal() + np.einsum("mkn,mkn->mn", P, Z)
        # Where a step of the search went too far, K is not definite and x is no precision.
        x = np.where(x > 0, x, np.finfo(np.float64).max ** 0.25)
        Lambda = sums.weigh(x, log_prior)
        W = Z * Lambda[:, None, :]
        H = W @ Z.transpose(0, 2, 1)
        sums.known[insiders.pairs, 1 - insiders.own] += np.einsum("mkk->mk", H)
        # (I + BZ) Λ (I + BZ)ᵀ = Λ + B V + (B V)ᵀ with V = ZΛ + HBᵀ/2.
        rows = np.arange(m)[:, None, None], np.arange(k)[None, :, None]
        W[(*rows, J[:, None, :])] += H * other[:, None, :] / 2
        W[(*rows, d[:, None, None])] += (H @ own[:, :, None]) / 2
        places = np.arange(m * k)
        scatter = scipy.sparse.csr_array(
            (
                np.concatenate([own.ravel(), other.ravel()]),
                (np.concatenate([np.repeat(d, k), J.ravel()]), np.tile(places, 2)),
            ),
            shape=(self.num_agents, m * k),
        )
        sums.inner += scatter @ W.reshape(m * k, -1)
        return x


class _Sums:
    """Sums over coalitions with softmax weights, relative to the largest exponent so far."""

    def __init__(self, num_agents: int, num_pairs: int, sharpness: float) -> None:
        self.sharpness = sharpness
        self.top = -np.inf
        self.mass = self.mean = 0.0
        self.inner = np.zeros((num_agents, num_agents))
        self.diagonal = np.zeros(num_agents)
        self.private = np.zeros(num_agents)
        self.blocks = np.zeros((num_pairs, 2, 2))
        # By pair and end: the pressure of the insider at the other end. The last row is a dummy.
        self.known = np.zeros((num_pairs + 1, 2))

    def weigh(self, x: FloatArray, log_prior: FloatArray) -> FloatArray:
        """Return Λ of some coalitions, shape (m, n), in units of the largest weight so far."""
        exponents = self.sharpness * np.log(x) + log_prior
        top = max(self.top, float(exponents.max()))
        # As in a streamed softmax, earlier sums are scaled down to the new unit.
        if (shrink := math.exp(self.top - top)) < 1:
            self.mass = shrink * self.mass
            self.mean = shrink * self.mean
            for earlier in (self.inner, self.diagonal, self.private, self.blocks, self.known):
                earlier *= shrink
        self.top = top
        weights = np.exp(exponents - top)
        self.mass += float(weights.sum())
        self.mean += float((weights * x).sum())
        Lambda: FloatArray = weights / x
        self.diagonal += Lambda.sum(axis=0)
        return Lambda

    def end_base(self, Y: FloatArray, pairs: IntArray, counted: NDArray[np.bool_]) -> None:
        """Add the pressure of all coalitions that were updates of Y = R⁻¹."""
        # B V and its transpose, as each insider added only the first.
        G = self.inner + self.inner.T
        G[np.diag_indices_from(G)] += self.diagonal
        T = Y @ G @ Y
        self.private += T.diagonal()
        self.blocks[counted] += T[pairs[counted][:, :, None], pairs[counted][:, None, :]]
        # Y of the next base is another one; what was summed under this Y is done.
        self.inner[:] = 0
        self.diagonal[:] = 0

    def finish(self, x: FloatArray, log_prior: FloatArray, factors: FloatArray) -> Pressure:
        """Return the pressure, without that of insiders on their own pairs."""
        # Row a of B_cᵀ M_c is f times the partner's row of M_c.
        squares = np.square(factors)
        for end in (0, 1):
            self.blocks[:, end, end] -= self.known[:-1, end] / squares[:, end]
        log_weights = self.sharpness * np.log(x) + log_prior - (self.top + math.log(self.mass))
        at_stake = log_prior > -np.inf
        return Pressure(
            largest=float(x[at_stake].max()),
            smooth=(self.top + math.log(self.mass)) / self.sharpness,
            mean=self.mean / self.mass,
            log_weights=log_weights,
            multipliers=np.exp(log_weights) / x,
            private=self.private / self.mass,
            blocks=(self.blocks / self.mass,),
        )


_SHARPNESS: tuple[float, ...] = (
    30.0,
    60.0,
)  # p: first smooth and easy, then sharp enough for the weights
_FIRST_SHARED, _SHARED_FACTOR = 100.0, 4.0  # of the search for a start: a ratio, and its steps
_MOST_EVALUATIONS, _LEAST_EVALUATIONS = 500, 40
_FULL_SEARCH = 1000  # agents: up to here the most evaluations take a few minutes
_LEAST_COEFFICIENT = 1e-30  # its square does not underflow
_MOST_MULTIPLIERS = 100_000  # of a proof that is worth carrying along: about 2 MB of text
_FEWER_FROM_A_START = 6  # times fewer evaluations against two insiders, of n⁴ each
_FULL_SEARCH_OF_TWO, _LEAST_FROM_A_START = 200, 20  # agents, evaluations
_STALL = 5e-4  # relative: less progress in a round than this, twice, ends the search


@final
@dataclass(frozen=True)
class LowRank:
    """The solver for pair seeds and private noise per agent, for hundreds of agents and more.

    ``tolerance`` is the relative gap to stop at. Out of ``max_evaluations``, or without progress,
    the split is private all the same, and not converged. None is 500 evaluations for up to 1000
    agents. Beyond, where an evaluation takes seconds to minutes, it is 500 (1000/n)³ and at least
    40, after which the noise is typically a tenth above that of a full search. Two insiders and
    more start from the noise against one less, with a sixth of the evaluations and fewer above 200
    agents.
    """

    tolerance: float = 1e-2
    max_evaluations: int | None = None
    name: ClassVar[SolverName] = "low-rank"
    shortfall: ClassVar[Status] = "iteration limit"

    def __post_init__(self) -> None:
        require_positive("tolerance", self.tolerance)
        if self.max_evaluations is not None:
            require_count("max_evaluations", self.max_evaluations)

    def solve_split(self, problem: DesignProblem, seed_groups: SeedGroups) -> SplitSolution:
        """Minimise Tr(A R) so that no coalition learns more than the caps allow.

        The noise limit of the problem is left to the caller; its ridge limits noise, while value
        and bound are those of A itself.
        """
        threat = problem.threat
        if not fits_pairs(seed_groups, threat):
            raise InvalidArgumentError(
                "solver LowRank (low-rank) is for seeds of pairs with private noise per agent, "
                f"found seeds={threat.seeds!r:.60} and private_noise={threat.private_noise!r}: use "
                "FirstOrder or Auto (--solver auto)"
            )
        pairs = np.array(seed_groups, dtype=int)
        with one_thread():
            search, updates, best = self._search(problem, pairs, threat.max_colluders)
            decomposition = _scale_pairs(problem, seed_groups, best)
        return conclude_split(
            problem,
            decomposition,
            lower_bound=search.lower_bound / problem.strictest_cap,
            tolerance=self.tolerance,
            evaluations=search.evaluations,
            num_coalitions=updates.num_coalitions,
            multipliers=_merge_multipliers(search.proof, seed_groups, updates),
        )

    def _search(
        self, problem: DesignProblem, pairs: IntArray, max_colluders: int
    ) -> tuple[SplitSearch, PairUpdates, Candidate]:
        """Return the best candidate against so many insiders, and the search that found it."""
        n = problem.num_agents
        updates = PairUpdates(pairs, num_agents=n, max_colluders=max_colluders)
        search = SplitSearch(problem, [pairs], updates.protected, updates.press_candidate)
        if max_colluders > 1:
            # Noise against one insider less is a good start, and far cheaper to find. A smooth
            # objective would lead away from it.
            before, _, start = self._search(problem, pairs, max_colluders - 1)
            sharpness, spent = _SHARPNESS[-1:], before.evaluations
        else:
            start, sharpness, spent = _find_uniform_noise(search), _SHARPNESS, 0
        limit = self._limit_evaluations(n, max_colluders)
        best = search.run(start, self.tolerance, limit, sharpness=sharpness, stall=_STALL)
        search.evaluations += spent
        return search, updates, best

    def _limit_evaluations(self, num_agents: int, max_colluders: int) -> int:
        if self.max_evaluations is None:
            return affordable_evaluations(num_agents, max_colluders)
        fewer = _FEWER_FROM_A_START if max_colluders > 1 else 1
        return max(1, self.max_evaluations // fewer)


def affordable_evaluations(num_agents: int, max_colluders: int = 1) -> int:
    """Return how many evaluations take minutes: n³ operations each, n⁴ against two insiders."""
    if max_colluders <= 1:
        most, least, full, power = _MOST_EVALUATIONS, _LEAST_EVALUATIONS, _FULL_SEARCH, 3
    else:
        most = _MOST_EVALUATIONS // _FEWER_FROM_A_START
        least, full, power = _LEAST_FROM_A_START, _FULL_SEARCH_OF_TWO, 4
    return min(most, max(least, int(most * (full / num_agents) ** power)))


def fits_pairs(seed_groups: SeedGroups, threat: ThreatModel) -> bool:
    """Return whether the low-rank method applies: seeds of pairs, private noise per agent."""
    has_pairs = bool(seed_groups) and all(len(group) == 2 for group in seed_groups)
    return has_pairs and threat.private_noise == "per-agent"


def _find_uniform_noise(search: SplitSearch) -> Candidate:
    """Return the best noise with one private variance and one variance of all pairs.

    One number is found in a few evaluations, after which each evaluation of the search is worth
    several of a search from an arbitrary point.
    """
    n, num_pairs = len(search.diagonal), len(search.members[0])
    opposite = np.tile([[1.0], [-1.0]], (num_pairs, 1, 1))

    def measure(shared: float) -> Candidate:
        # ``shared`` is the variance of an agent's shared noise over that of its private noise.
        factors = opposite * np.sqrt(shared * n / (2 * num_pairs))
        return search.evaluate(Candidate(np.ones(n), (factors,)), _SHARPNESS[0])[0]

    best = measure(_FIRST_SHARED)
    for factor in (_SHARED_FACTOR, 1 / _SHARED_FACTOR):
        shared = _FIRST_SHARED
        while (candidate := measure(shared := shared * factor)).value < best.value:
            best = candidate
    return best


def _scale_pairs(problem: DesignProblem, seed_groups: SeedGroups, best: Candidate) -> Decomposition:
    """Return the candidate as a split, restored and scaled until every coalition meets the caps.

    The check of every coalition shares no code with the search.
    """
    noise = Decomposition(best.theta, seed_groups, tuple(best.factors[0]))
    restored = noise.rescale(problem.scales)

    def scaled(scale: float) -> Decomposition:
        return restored.rescale(np.full(problem.num_agents, np.sqrt(scale)))

    def worst_ratio(scale: float) -> float:
        precisions = worst_precisions(scaled(scale), problem.threat.max_colluders)
        return float((precisions / problem.precision_caps).max())

    return scaled(scale_to_cap(worst_ratio))


def _merge_multipliers(
    multipliers: FloatArray | None, seed_groups: SeedGroups, updates: PairUpdates
) -> FloatArray | None:
    """Return the multipliers of the coalitions that ``list_coalitions`` keeps, if they are few."""
    if multipliers is None or multipliers.size > _MOST_MULTIPLIERS:
        return None
    n, q = updates.num_agents, updates.max_colluders
    coalitions = list_coalitions(seed_groups, num_agents=n, max_colluders=q)
    merged = np.zeros(coalitions.protected.shape)
    # Coalitions that leave the same noise unknown have the same inverses, so that multipliers add.
    np.add.at(merged, coalitions.merged, multipliers)
    return merged
