"""A certified first-order method for splits that colluding insiders cannot undo: Problem (16).

The problem is scale-free: any candidate becomes exactly private when it is multiplied by
max x / b, where x are all the [(R^(I))⁻¹]_ii at stake. So the method minimises

    log Tr(A R) + (1/p) log Σ_{I,i} π_Ii x_Ii^p

over log θ and factors of the group covariances, by L-BFGS, and rescales. The weights π are updated
to the softmax weights w after each round (the exponential method of multipliers), which removes
the smoothing error at a moderate p; raising p instead would ruin the conditioning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import numpy as np
import scipy.optimize

from corn.checks import FloatArray, require_count, require_positive
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
from corn.errors import CornWarning
from corn.threads import one_thread

_SHARPNESS = (10.0, 30.0, 60.0)  # p: first smooth and easy, then sharp enough for the weights
_ITERATIONS_PER_ROUND = 50
_PRIOR_FLOOR = -40.0  # of log π, so that a constraint without weight can gain some again
_USUAL_EVALUATIONS = 2500
_SECONDS_PER_FLOP = 1e-9  # of n³ per inverse, measured for n from 50 to 200 on one thread
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
        common = threat.private_noise == "common"
        search = _Search(A, assembly, common=common, ridge=problem.ridge)
        with one_thread():
            best = search.run(self.tolerance, self.max_evaluations)
        conclude = partial(
            conclude_split,
            problem,
            lower_bound=search.lower_bound / problem.strictest_cap,
            tolerance=self.tolerance,
            evaluations=search.evaluations,
            num_coalitions=len(coalitions),
            multipliers=best.multipliers,
        )
        # Fewer streams to draw, unless leaving them out costs the tolerance.
        weak = _silence_weakest(best.factors, best.theta, share=_SILENT_SHARE * self.tolerance)
        lean = conclude(scale_split(problem, best.theta, weak, assembly))
        if lean.converged:
            return lean
        full = conclude(scale_split(problem, best.theta, best.factors, assembly))
        return full if full.converged else lean


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
class _Point:
    """A candidate with what the objective, the bound and the next round need.

    ``pressure`` is Σ_I (R^(I))⁻¹ Λ_I (R^(I))⁻¹ with Λ = diag(w/x): per agent for private noise and
    per block for groups. At the optimum it equals A/Tr(AR) wherever there is noise.
    """

    theta: FloatArray
    factors: tuple[FloatArray, ...]
    trace: float
    largest: float
    mean: float
    smooth: float
    weights: FloatArray
    multipliers: FloatArray
    pressure_private: FloatArray
    pressure: list[FloatArray]

    @property
    def value(self) -> float:
        """Tr(A R) for b = 1 after the rescaling that makes this candidate feasible."""
        return self.trace * self.largest


class _Search:
    """L-BFGS in rounds; ``A`` has the ridge and is minimised, ``true_A`` has the final bound."""

    def __init__(
        self, true_A: FloatArray, assembly: Assembly, *, common: bool, ridge: float
    ) -> None:
        n = len(true_A)
        self.true_A = true_A
        self.A = true_A + ridge * float(np.trace(true_A)) / n * np.eye(n)
        self.assembly = assembly
        self.common = common
        self.evaluations = 0
        self.lower_bound = 0.0
        self._blocks = [bucket.take(self.A) for bucket in assembly.buckets]
        self._metrics = [scale_blocks(block) for block in self._blocks]
        # −∞ removes a member's own privacy from every sum: it is not at stake against itself.
        self._log_prior = np.where(assembly.coalitions.protected, 0.0, -np.inf)

    def run(self, tolerance: float, max_evaluations: int) -> _Point:
        """Run rounds of L-BFGS until a candidate's own bound is close, or evaluations run out.

        The candidate returned and the bound kept belong together, so that the candidate's
        multipliers prove the bound.
        """
        z = self._start()
        best: _Point | None = None
        sharpness = _SHARPNESS[0]
        while True:
            z = self._minimise(z, sharpness)
            point = self._evaluate(z, sharpness)
            # By the ridged A, which is what is minimised. The bound that is reported is that of the
            # true A.
            converged = point.value <= (1 + tolerance) * self._bound(point, self.A)
            if converged or best is None or point.value < best.value:
                best = point
                self.lower_bound = self._bound(point, self.true_A)
            if converged or self.evaluations >= max_evaluations:
                return best
            if sharpness < _SHARPNESS[-1]:
                sharpness = _SHARPNESS[_SHARPNESS.index(sharpness) + 1]
            else:
                self._update_prior(point.weights)
            z = self._revive(point)

    def _start(self) -> FloatArray:
        """Return independent noise plus weakly anti-correlated groups."""
        n = self.assembly.num_agents
        factors = []
        for bucket in self.assembly.buckets:
            k, m = bucket.members.shape
            centred = np.eye(m) - 1 / m
            # With private noise per agent a pair needs only one stream: any diagonal part of its
            # covariance is worth more as private noise, which fewer coalitions know.
            columns = centred[:, :1] if m == 2 and not self.common else centred
            factors.append(np.broadcast_to(columns / np.sqrt(n), (k, *columns.shape)))
        return self._pack(np.ones(n), tuple(factors))

    def _minimise(self, z: FloatArray, sharpness: float) -> FloatArray:
        def fun(z: FloatArray) -> tuple[float, FloatArray]:
            point = self._evaluate(z, sharpness)
            return float(np.log(point.trace)) + point.smooth, self._gradient(point)

        return descend(fun, z)

    def _evaluate(self, z: FloatArray, sharpness: float) -> _Point:
        self.evaluations += 1
        theta, factors = self._unpack(z)
        blocks = [F @ F.transpose(0, 2, 1) for F in factors]
        total = self.assembly.total(theta, blocks)
        x = np.empty_like(self._log_prior)
        exponents = np.empty_like(x)
        top = -np.inf
        private = np.zeros(len(theta))
        pressure = [np.zeros_like(block) for block in blocks]
        for number, chunk in enumerate(self.assembly.chunks):
            M = np.linalg.inv(self.assembly.hidden(theta, blocks, number))
            x[chunk] = np.diagonal(M, axis1=1, axis2=2)
            exponents[chunk] = sharpness * np.log(x[chunk]) + self._log_prior[chunk]
            # A running maximum, as in a streamed softmax: earlier sums are scaled down to it.
            new_top = max(top, float(exponents[chunk].max()))
            shrink, top = np.exp(top - new_top), new_top
            Lambda = np.exp(exponents[chunk] - top) / x[chunk]
            G = (M * Lambda[:, None, :]) @ M
            private = shrink * private + np.einsum("cii->i", G)
            pulled = self.assembly.pull_back(G, number)
            pressure = [shrink * old + new for old, new in zip(pressure, pulled, strict=True)]
        weights = np.exp(exponents - top)
        mass = float(weights.sum())
        return _Point(
            theta=theta,
            factors=factors,
            trace=float((self.A * total).sum()),
            largest=float(x[self.assembly.coalitions.protected].max()),
            mean=float((weights * x).sum()) / mass,
            smooth=(top + float(np.log(mass))) / sharpness,
            weights=weights / mass,
            multipliers=weights / mass / x,
            pressure_private=private / mass,
            pressure=[block / mass for block in pressure],
        )

    def _gradient(self, point: _Point) -> FloatArray:
        # d/d log θ = θ d/dθ: variances stay positive without constraints.
        private = (np.diag(self.A) / point.trace - point.pressure_private) * point.theta
        slack = self._slack(point)
        factors = tuple(
            2 * C.transpose(0, 2, 1) @ S @ F
            for C, S, F in zip(self._metrics, slack, point.factors, strict=True)
        )
        head = [private.sum()] if self.common else private
        return np.concatenate([head, *(gradient.ravel() for gradient in factors)])

    def _slack(self, point: _Point) -> list[FloatArray]:
        """Return A/Tr(AR) − pressure on each block; negative directions would lower the value."""
        return [A / point.trace - S for A, S in zip(self._blocks, point.pressure, strict=True)]

    def _bound(self, point: _Point, A: FloatArray) -> float:
        """Return a lower bound on Tr(A R) for b = 1 over all splits: see ``relative_pressure``."""
        pressure = relative_pressure(
            A,
            self.assembly,
            private=point.pressure_private,
            blocks=point.pressure,
            common=self.common,
        )
        return point.mean / pressure

    def _update_prior(self, weights: FloatArray) -> None:
        with np.errstate(divide="ignore"):
            log_weights = np.maximum(np.log(weights), _PRIOR_FLOOR)
        self._log_prior = np.where(self.assembly.coalitions.protected, log_weights, -np.inf)

    def _revive(self, point: _Point) -> FloatArray:
        """Return the point with a little noise in directions that would help but have died out.

        A factor's gradient vanishes with the factor, and that of log θ with θ, so noise near zero
        cannot grow again by itself even where more of it would lower the value.
        """
        size = _REVIVAL_SIZE * float(point.theta.mean())
        helps = point.pressure_private > np.diag(self.A) / point.trace
        if self.common:
            # One θ for all helps or not as a whole: its derivative is the sum over agents.
            helps = point.pressure_private.sum() > np.trace(self.A) / point.trace
        theta = np.where(helps, np.maximum(point.theta, size), point.theta)
        revived = []
        for F, slack in zip(point.factors, self._slack(point), strict=True):
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
        return self._pack(theta, tuple(revived))

    # L-BFGS sees log θ and the coordinates C⁻¹F of each factor in the metric C.

    def _pack(self, theta: FloatArray, factors: tuple[FloatArray, ...]) -> FloatArray:
        head = np.log(theta[:1] if self.common else theta)
        coordinates = [np.linalg.solve(C, F) for C, F in zip(self._metrics, factors, strict=True)]
        return np.concatenate([head, *(block.ravel() for block in coordinates)])

    def _unpack(self, z: FloatArray) -> tuple[FloatArray, tuple[FloatArray, ...]]:
        n = self.assembly.num_agents
        head = 1 if self.common else n
        theta = np.broadcast_to(np.exp(z[:head]), (n,))
        factors, start = [], head
        for bucket, metric in zip(self.assembly.buckets, self._metrics, strict=True):
            k, m = bucket.members.shape
            columns = 1 if m == 2 and not self.common else m
            factors.append(metric @ z[start : start + k * m * columns].reshape(k, m, columns))
            start += k * m * columns
        return theta, tuple(factors)


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
