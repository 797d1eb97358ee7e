"""A certified first-order method for splits that colluding insiders cannot undo: Problem (16).

The problem is scale-free: any candidate becomes exactly private when it is multiplied by
max x / b, where x are all the [(R^(I))⁻¹]_ii at stake. So the method minimises

    log Tr(A R) + (1/p) log Σ_{I,i} π_Ii x_Ii^p

over log θ and factors of the group covariances, by L-BFGS, and rescales. The weights π are updated
to the softmax weights w after each round (the exponential method of multipliers), which removes
the smoothing error at a moderate p; raising p instead would ruin the conditioning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, final

import numpy as np
import scipy.optimize
from numpy.typing import NDArray

from corn.checks import FloatArray, IntArray, require_count, require_positive
from corn.covariance.certificate import (
    SplitSolution,
    conclude_split,
    relative_pressure,
    scale_split,
)
from corn.covariance.coalitions import Assembly, list_coalitions
from corn.covariance.decomposition import Decomposition
from corn.covariance.problem import DesignProblem, SolverName, Status
from corn.covariance.threat import SeedGroups
from corn.errors import CornWarning, InvalidArgumentError
from corn.threads import one_thread

_SHARPNESS = (10.0, 30.0, 60.0)  # p: first smooth and easy, then sharp enough for the weights
_ITERATIONS_PER_ROUND = 50
_PRIOR_FLOOR = -40.0  # of log π, so that a constraint without weight can gain some again
_USUAL_EVALUATIONS = 2500
_SECONDS_PER_FLOP = 1e-9  # of n³ per inverse, measured for n from 50 to 200 on one thread
_FAR = 1e10  # the value of a point at which R is not definite
_FARTHEST_LOG = 60.0  # of log θ
_REVIVAL_SIZE = 1e-3  # variance of revived noise, relative to the mean private variance
_SMALLEST_RELATIVE_EIGENVALUE = 1e-8  # of A in the metric; a singular A has no root to invert
_SILENT_SHARE = 0.01
"""Of the tolerance: streams that died out but for so much of all power are not worth drawing."""


@final
@dataclass(frozen=True)
class FirstOrder:
    """The solver for overlapping seed groups and for insiders.

    ``tolerance`` is the relative gap to stop at. Out of ``max_evaluations``, the split is private
    all the same, and not converged.
    """

    tolerance: float = 1e-3
    max_evaluations: int = 20_000
    name: ClassVar[SolverName] = "first-order"
    shortfall: ClassVar[Status] = "iteration limit"

    def __post_init__(self) -> None:
        require_positive("tolerance", self.tolerance)
        require_count("max_evaluations", self.max_evaluations)

    def solve_split(self, problem: DesignProblem, seed_groups: SeedGroups) -> SplitSolution:
        """Minimise Tr(A R) so that no coalition learns more than the cap allows.

        The noise limit of the problem is left to the caller; its ridge limits noise where A is
        singular, while value and bound are those of A itself.
        """
        A, n, threat = problem.scaled_objective, problem.num_agents, problem.threat
        coalitions = list_coalitions(seed_groups, num_agents=n, max_colluders=threat.max_colluders)
        if not coalitions.unknown.any():
            # Every coalition knows every seed, so shared noise hides nothing and only costs.
            return conclude_split(
                problem,
                Decomposition(1 / problem.precision_caps),
                lower_bound=float(np.trace(A)) / problem.strictest_cap,
                tolerance=self.tolerance,
                evaluations=0,
                num_coalitions=len(coalitions),
                multipliers=coalitions.protected.astype(np.float64),
            )
        assembly = Assembly(seed_groups, coalitions, n)
        _warn_if_slow(len(coalitions), n)
        search = SplitSearch(
            problem,
            [bucket.members for bucket in assembly.buckets],
            coalitions.protected,
            partial(press, assembly),
            common=threat.private_noise == "common",
        )
        with one_thread():
            best = search.run(
                self._start(search), self.tolerance, self.max_evaluations, sharpness=_SHARPNESS
            )
        conclude = partial(
            conclude_split,
            problem,
            lower_bound=search.lower_bound / problem.strictest_cap,
            tolerance=self.tolerance,
            evaluations=search.evaluations,
            num_coalitions=len(coalitions),
            multipliers=search.proof,
        )
        # Fewer streams to draw, unless leaving them out costs the tolerance.
        weak = _silence_weakest(best.factors, best.theta, share=_SILENT_SHARE * self.tolerance)
        lean = conclude(scale_split(problem, best.theta, weak, assembly))
        if lean.converged:
            return lean
        full = conclude(scale_split(problem, best.theta, best.factors, assembly))
        return full if full.converged else lean

    @staticmethod
    def _start(search: SplitSearch) -> Candidate:
        """Return independent noise plus weakly anti-correlated groups."""
        n, factors = len(search.diagonal), []
        for members in search.members:
            k, m = members.shape
            # With private noise per agent a pair needs only one stream: any diagonal part of its
            # covariance is worth more as private noise, which fewer coalitions know.
            num_streams = 1 if m == 2 and not search.common else m
            columns = (np.eye(m) - 1 / m)[:, :num_streams]
            factors.append(np.broadcast_to(columns / np.sqrt(n), (k, *columns.shape)))
        return Candidate(np.ones(n), tuple(factors))


def _warn_if_slow(num_coalitions: int, num_agents: int) -> None:
    """Warn of a design that takes minutes: each evaluation inverts one matrix per coalition."""
    minutes = _USUAL_EVALUATIONS * _SECONDS_PER_FLOP * num_coalitions * num_agents**3 / 60
    if minutes > 1:
        warnings.warn(
            f"the design for {num_coalitions:,} coalitions of insiders among {num_agents} agents "
            f"takes about {minutes:,.0f} minutes; against an eavesdropper alone (--colluders 0) it "
            "takes seconds",
            CornWarning,
            stacklevel=2,
        )


def _silence_weakest(
    factors: Sequence[FloatArray], theta: FloatArray, *, share: float
) -> tuple[FloatArray, ...]:
    """Return factors without the weakest streams, which have ``share`` of all power at most.

    >>> strong, weak = np.array([[[1.0], [-1.0]]]), np.array([[[1e-4], [-1e-4]]])
    >>> [F.ravel().tolist() for F in _silence_weakest([strong, weak], np.ones(2), share=1e-6)]
    [[1.0, -1.0], [0.0, 0.0]]
    """
    powers = [np.square(F).sum(axis=1, keepdims=True) for F in factors]
    in_order = np.sort(np.concatenate([power.ravel() for power in powers]))
    sums = np.cumsum(in_order)
    num_weak = np.searchsorted(sums, share * (sums[-1] + theta.sum()), side="right")
    least = in_order[num_weak] if num_weak < len(in_order) else np.inf
    return tuple(np.where(power >= least, F, 0.0) for power, F in zip(powers, factors, strict=True))


@dataclass(frozen=True, eq=False)
class Candidate:
    """Noise in the scaled problem; factors (k, m, streams) for each size m of groups."""

    theta: FloatArray
    factors: tuple[FloatArray, ...]
    value: float = np.inf
    """Tr(A R) for b = 1 after the scaling that makes this candidate feasible."""


@dataclass(frozen=True, eq=False)
class Pressure:
    """Demands of the coalitions at a candidate, summed with the weights w of a softmax.

    Attributes:
        largest: The largest [(R^(I))⁻¹]_ii of an agent outside I.
        smooth: (1/p) log Σ π x^p.
        mean: Σ w x.
        log_weights: log w, shape (coalitions, n).
        multipliers: w/x, shape (coalitions, n).
        private: [Σ_I M_I Λ_I M_I]_ii with Λ = diag(w/x), shape (n,).
        blocks: The same sum on each group, over the coalitions that do not know its seed. At the
            optimum it equals A/Tr(AR) wherever there is noise.
    """

    largest: float
    smooth: float
    mean: float
    log_weights: FloatArray
    multipliers: FloatArray
    private: FloatArray
    blocks: tuple[FloatArray, ...]


def press(
    assembly: Assembly, candidate: Candidate, log_prior: FloatArray, sharpness: float
) -> Pressure | None:
    """Return the pressure of all coalitions by one inverse for each, or None if one is singular."""
    theta = candidate.theta
    blocks = [F @ F.transpose(0, 2, 1) for F in candidate.factors]
    x = np.empty_like(log_prior)
    exponents = np.empty_like(x)
    top = -np.inf
    private = np.zeros(len(theta))
    pressure = [np.zeros_like(block) for block in blocks]
    for number, chunk in enumerate(assembly.chunks):
        try:
            M = np.linalg.inv(assembly.hidden(theta, blocks, number))
        except np.linalg.LinAlgError:
            return None
        x[chunk] = np.diagonal(M, axis1=1, axis2=2)
        exponents[chunk] = sharpness * np.log(x[chunk]) + log_prior[chunk]
        # A running maximum, as in a streamed softmax: earlier sums are scaled down to it.
        new_top = max(top, float(exponents[chunk].max()))
        shrink, top = np.exp(top - new_top), new_top
        Lambda = np.exp(exponents[chunk] - top) / x[chunk]
        G = (M * Lambda[:, None, :]) @ M
        private = shrink * private + np.einsum("cii->i", G)
        pulled = assembly.pull_back(G, number)
        pressure = [shrink * old + new for old, new in zip(pressure, pulled, strict=True)]
    weights = np.exp(exponents - top)
    mass = float(weights.sum())
    log_mass = top + float(np.log(mass))
    return Pressure(
        largest=float(x[assembly.coalitions.protected].max()),
        smooth=log_mass / sharpness,
        mean=float((weights * x).sum()) / mass,
        log_weights=exponents - log_mass,
        multipliers=weights / mass / x,
        private=private / mass,
        blocks=tuple(block / mass for block in pressure),
    )


class SplitSearch:
    """L-BFGS in rounds on log θ and the coordinates C⁻¹F of each factor in a metric C.

    The ridge of the problem is on the A that is minimised, not on the A of the bound that is kept.

    Args:
        problem: The design problem.
        members: The members of the seed groups of each size, shape (k, m).
        protected: Whose privacy is at stake against each coalition, shape (coalitions, n).
        press: Returns the pressure of all coalitions on a candidate, given log π and p.
        common: Whether θ is one number for all agents.
    """

    def __init__(
        self,
        problem: DesignProblem,
        members: Sequence[IntArray],
        protected: NDArray[np.bool_],
        press: Callable[[Candidate, FloatArray, float], Pressure | None],
        *,
        common: bool = False,
    ) -> None:
        A = problem.scaled_objective
        ridge = problem.ridge * float(np.trace(A)) / len(A)
        self.members = members
        self.common = common
        self._press = press
        self._protected = protected
        self._true_diagonal = A.diagonal()
        self._true_blocks = [A[own[:, :, None], own[:, None, :]] for own in members]
        self.diagonal = self._true_diagonal + ridge
        self._blocks = [block + ridge * np.eye(block.shape[-1]) for block in self._true_blocks]
        self._metrics = [scale_blocks(block) for block in self._blocks]
        # −∞ removes a member's own privacy from every sum: it is not at stake against itself.
        self._log_prior = np.where(protected, 0.0, -np.inf)
        self._shapes: list[tuple[int, ...]] = []
        self.evaluations = 0
        self.lower_bound = 0.0
        self.proof: FloatArray | None = None
        self.best: Candidate | None = None

    def run(
        self,
        start: Candidate,
        tolerance: float,
        max_evaluations: int,
        *,
        sharpness: Sequence[float],
        stall: float = 0.0,
    ) -> Candidate:
        """Run rounds of L-BFGS until a candidate's own bound is close, or evaluations run out.

        A candidate that converged and its bound belong together, so that its multipliers prove the
        bound. Two rounds at the largest of ``sharpness`` that improve the value by less than
        ``stall``, relative, end the search too.
        """
        z, stalled, before, number = self._pack(start), 0, np.inf, 0
        while True:
            p = sharpness[min(number, len(sharpness) - 1)]
            number += 1
            z = self._minimise(z, p, max(1, max_evaluations - self.evaluations))
            candidate, pressure = self.evaluate(self._unpack(z), p)
            if pressure is None or self.best is None:
                raise InvalidArgumentError("the objective is too ill-conditioned for this solver")
            bound = self._bound(pressure, self._true_diagonal, self._true_blocks)
            # By the ridged A, which is what is minimised.
            own_bound = self._bound(pressure, self.diagonal, self._blocks)
            converged = candidate.value <= (1 + tolerance) * own_bound
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
                return self.best
            # The weights of a smooth maximum are too even to serve as multipliers.
            if is_sharp:
                log_weights = np.maximum(pressure.log_weights, _PRIOR_FLOOR)
                self._log_prior = np.where(self._protected, log_weights, -np.inf)
            z = self._revive(candidate, pressure)

    def evaluate(self, candidate: Candidate, sharpness: float) -> tuple[Candidate, Pressure | None]:
        """Return a candidate with its value, and the pressure on it, and keep the best."""
        self.evaluations += 1
        pressure = self._press(candidate, self._log_prior, sharpness)
        if pressure is not None:
            candidate = replace(candidate, value=self._trace(candidate) * pressure.largest)
            if self.best is None or candidate.value < self.best.value:
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
            slack = self._slack(candidate, pressure)
            factors = [
                2 * C.transpose(0, 2, 1) @ S @ F
                for C, S, F in zip(self._metrics, slack, candidate.factors, strict=True)
            ]
            head = [private.sum()] if self.common else private
            gradient = np.concatenate([head, *(part.ravel() for part in factors)])
            return float(np.log(trace)) + pressure.smooth, gradient

        return descend(fun, z, max_evaluations=max_evaluations)

    def _trace(self, candidate: Candidate) -> float:
        shared = sum(
            float(np.einsum("kms,kmn,kns->", F, A, F))
            for F, A in zip(candidate.factors, self._blocks, strict=True)
        )
        return float(candidate.theta @ self.diagonal) + shared

    def _slack(self, candidate: Candidate, pressure: Pressure) -> list[FloatArray]:
        """Return A/Tr(AR) − pressure on each block; negative directions would lower the value."""
        trace = self._trace(candidate)
        return [A / trace - S for A, S in zip(self._blocks, pressure.blocks, strict=True)]

    def _bound(
        self, pressure: Pressure, diagonal: FloatArray, blocks: Sequence[FloatArray]
    ) -> float:
        """Return a lower bound on Tr(A R) for b = 1 over all splits: see ``relative_pressure``."""
        t = relative_pressure(
            diagonal,
            blocks,
            private=pressure.private,
            pressure=pressure.blocks,
            common=self.common,
        )
        return pressure.mean / t if 0 < t < np.inf else 0.0

    def _revive(self, candidate: Candidate, pressure: Pressure) -> FloatArray:
        """Return the point with a little noise in directions that would help but have died out.

        A factor's gradient vanishes with the factor, and that of log θ with θ, so noise near zero
        cannot grow again by itself even where more of it would lower the value.
        """
        size = _REVIVAL_SIZE * float(candidate.theta.mean())
        wanted_private = self.diagonal / self._trace(candidate)
        helps = pressure.private > wanted_private
        if self.common:
            # One θ for all helps or not as a whole: its derivative is the sum over agents.
            helps = pressure.private.sum() > wanted_private.sum()
        theta = np.where(helps, np.maximum(candidate.theta, size), candidate.theta)
        revived = []
        for F, slack in zip(candidate.factors, self._slack(candidate, pressure), strict=True):
            values, vectors = np.linalg.eigh(slack)
            # A factor can lack a direction although none of its columns is small: parallel columns
            # are one stream drawn twice. Rotated to orthogonal columns, F V has the same F Fᵀ, and
            # what it lacks is a column near zero, free for the direction that would help.
            grown = F @ np.linalg.svd(F)[2].transpose(0, 2, 1)
            norms = np.square(grown).sum(axis=1)
            column = norms.argmin(axis=1)
            k = np.arange(len(F))
            wanted = (values[:, 0] < 0) & (norms[k, column] < size)
            grown[k[wanted], :, column[wanted]] = np.sqrt(size) * vectors[wanted, :, 0]
            revived.append(grown)
        return self._pack(Candidate(theta, tuple(revived)))

    def _pack(self, candidate: Candidate) -> FloatArray:
        self._shapes = [F.shape for F in candidate.factors]
        head = np.log(candidate.theta[:1] if self.common else candidate.theta)
        coordinates = [
            np.linalg.solve(C, F) for C, F in zip(self._metrics, candidate.factors, strict=True)
        ]
        return np.concatenate([head, *(block.ravel() for block in coordinates)])

    def _unpack(self, z: FloatArray) -> Candidate:
        n = len(self.diagonal)
        start = 1 if self.common else n
        # A step too long of the line search must not overflow.
        theta = np.exp(np.clip(z[:start], -_FARTHEST_LOG, _FARTHEST_LOG))
        factors = []
        for C, shape in zip(self._metrics, self._shapes, strict=True):
            stop = start + math.prod(shape)
            factors.append(C @ z[start:stop].reshape(shape))
            start = stop
        return Candidate(np.broadcast_to(theta, (n,)), tuple(factors))


def descend(
    fun: Callable[[FloatArray], tuple[float, FloatArray]],
    z: FloatArray,
    *,
    max_evaluations: int = 15_000,  # SciPy's own limit
) -> FloatArray:
    """Return a point near the minimum of a smoothed objective, from its value and gradient."""
    result = scipy.optimize.minimize(
        fun,
        z,
        jac=True,
        method="L-BFGS-B",
        options={
            # A minimum need not be exact: the weights π move it after every round.
            "maxiter": _ITERATIONS_PER_ROUND,
            "maxfun": max_evaluations,
            "maxcor": _ITERATIONS_PER_ROUND,
            # The search ends by its own certificate, not by a small change of the smoothed
            # objective.
            "ftol": 0.0,
            "gtol": 1e-12,
        },
    )
    solution: FloatArray = result.x
    return solution


def scale_blocks(blocks: FloatArray) -> FloatArray:
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
