"""Noise that colluding insiders cannot subtract: a certified first-order method for Problem (16).

The problem is scale-free: any candidate becomes exactly private when it is multiplied by
max x / b, where x are all the [(R^(I))⁻¹]_ii at stake. So we minimise

    log Tr(A R) + (1/p) log Σ_{I,i} π_Ii x_Ii^p

over log θ and factors of the group covariances, by L-BFGS, and rescale. The weights π are updated
to the softmax weights w after each round (the exponential method of multipliers), which removes
the smoothing error at a moderate p; raising p instead would ruin the conditioning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.optimize

from corn.arrays import FloatArray
from corn.covariance.assembly import Assembly
from corn.covariance.certificate import relative_pressure, scale_to_cap
from corn.covariance.coalitions import Coalitions, list_coalitions
from corn.covariance.decomposition import Decomposition
from corn.covariance.groups import SeedGroups
from corn.threads import one_thread

_SHARPNESS = (10.0, 30.0, 60.0)
_EVALUATIONS_PER_ROUND = 50
_PRIOR_FLOOR = -40.0
_REVIVAL_SIZE = 1e-3
_SILENT_SHARE = 0.01
"""Of the tolerance: streams that died out but for so much of all power are not worth drawing."""


@dataclass(frozen=True, eq=False)
class InsiderSolution:
    """A split that keeps the cap against every coalition, and how far from the best it can be.

    ``lower_bound`` holds for every split over the same seed groups and the same coalitions.
    ``multipliers``, shape (coalitions, n), let anyone compute it again: see ``certify``.
    """

    decomposition: Decomposition
    value: float
    lower_bound: float
    converged: bool
    evaluations: int
    coalitions: Coalitions
    multipliers: FloatArray


def solve_insiders(
    objective_matrix: FloatArray,
    precision_cap: float,
    *,
    seed_groups: SeedGroups,
    max_colluders: int,
    common_private_noise: bool = False,
    ridge: float = 0.0,
    tolerance: float = 1e-3,
    max_evaluations: int = 20_000,
) -> InsiderSolution:
    """Minimise Tr(A R) so that no coalition of ``max_colluders`` learns more than the cap allows.

    The result is feasible whatever happens; ``converged`` says whether the gap to the lower bound
    came below ``tolerance``. Independent noise (LDP) is always a candidate, so the value never
    exceeds Tr(A)/b. ``ridge`` γ adds γ·(Tr A/n)·I to the matrix that is minimised, which limits
    noise where A is singular; value and bound are those of A itself.
    """
    A = objective_matrix
    n = len(A)
    coalitions = list_coalitions(seed_groups, num_agents=n, max_colluders=max_colluders)
    if not coalitions.unknown.any():
        # Every seed is known to every coalition, so shared noise hides nothing and only costs.
        alone = Decomposition(np.full(n, 1 / precision_cap))
        value = float(np.trace(A)) / precision_cap
        multipliers = coalitions.protected.astype(np.float64)
        return InsiderSolution(alone, value, value, True, 0, coalitions, multipliers)
    search = _Search(
        A, Assembly(seed_groups, coalitions, n), common=common_private_noise, ridge=ridge
    )
    with one_thread():
        best = search.run(tolerance, max_evaluations)
    factors = _silence_weakest(best.factors, best.theta, share=_SILENT_SHARE * tolerance)
    decomposition = scale_to_cap(best.theta, factors, search.assembly, precision_cap)
    value = float((A * decomposition.covariance).sum())
    independent = float(np.trace(A)) / precision_cap
    if value >= independent:
        decomposition, value = Decomposition(np.full(n, 1 / precision_cap)), independent
    lower_bound = min(search.lower_bound / precision_cap, value)
    return InsiderSolution(
        decomposition=decomposition,
        value=value,
        lower_bound=lower_bound,
        converged=value <= (1 + tolerance) * lower_bound,
        evaluations=search.evaluations,
        coalitions=coalitions,
        multipliers=best.multipliers,
    )


def drop_weak_groups(solution: InsiderSolution, *, drop_share: float) -> SeedGroups:
    """The seed groups that remain without the weakest, which share ``drop_share`` of the power."""
    parts = solution.decomposition
    power = np.array([np.square(factor).sum() for factor in parts.factors])
    order = np.argsort(power)
    weak = order[np.cumsum(power[order]) <= drop_share * power.sum()]
    return tuple(group for k, group in enumerate(parts.seed_groups) if k not in weak)


def _silence_weakest(
    factors: Sequence[FloatArray], theta: FloatArray, *, share: float
) -> tuple[FloatArray, ...]:
    """Factors without their weakest streams, which together have at most ``share`` of all power.

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
    """A candidate with all that the objective, the bound and the next round need of it.

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
    """L-BFGS in rounds; ``A`` is what is minimised, ``true_A`` what the final bound is for."""

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
        self._log_prior = np.where(assembly.coalitions.protected, 0.0, -np.inf)

    def run(self, tolerance: float, max_evaluations: int) -> _Point:
        """Rounds of L-BFGS until a candidate's own bound is close, or evaluations run out.

        The candidate returned and the bound kept belong together, so that the candidate's
        multipliers prove the bound.
        """
        z = self._start()
        best: _Point | None = None
        sharpness = _SHARPNESS[0]
        while True:
            z = self._minimise(z, sharpness)
            point = self._evaluate(z, sharpness)
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
        """Independent noise plus weakly anti-correlated groups."""
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

        result = scipy.optimize.minimize(
            fun,
            z,
            jac=True,
            method="L-BFGS-B",
            options={
                "maxiter": _EVALUATIONS_PER_ROUND,
                "maxcor": _EVALUATIONS_PER_ROUND,
                "ftol": 0.0,
                "gtol": 1e-12,
            },
        )
        solution: FloatArray = result.x
        return solution

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
            # A running maximum, as in a streamed softmax: what came before is scaled down.
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
        private = (np.diag(self.A) / point.trace - point.pressure_private) * point.theta
        slack = self._slack(point)
        factors = tuple(2 * S @ F for S, F in zip(slack, point.factors, strict=True))
        head = [private.sum()] if self.common else private
        return np.concatenate([head, *(gradient.ravel() for gradient in factors)])

    def _slack(self, point: _Point) -> list[FloatArray]:
        """A/Tr(AR) − pressure on each block: negative directions would lower the value."""
        return [A / point.trace - S for A, S in zip(self._blocks, point.pressure, strict=True)]

    def _bound(self, point: _Point, A: FloatArray) -> float:
        """A value of Tr(A R), for b = 1, that no split goes below: see ``relative_pressure``."""
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
        """Give a little noise to directions that would help but have died out.

        A factor's gradient vanishes with the factor, and that of log θ with θ, so what came near
        zero cannot grow again by itself even where more of it would lower the value.
        """
        size = _REVIVAL_SIZE * float(point.theta.mean())
        helps = point.pressure_private > np.diag(self.A) / point.trace
        theta = np.where(helps, np.maximum(point.theta, size), point.theta)
        revived = []
        for F, slack in zip(point.factors, self._slack(point), strict=True):
            values, vectors = np.linalg.eigh(slack)
            norms = np.square(F).sum(axis=1)
            column = norms.argmin(axis=1)
            k = np.arange(len(F))
            wanted = (values[:, 0] < 0) & (norms[k, column] < size)
            grown = F.copy()
            grown[k[wanted], :, column[wanted]] = np.sqrt(size) * vectors[wanted, :, 0]
            revived.append(grown)
        return self._pack(theta, tuple(revived))

    def _pack(self, theta: FloatArray, factors: tuple[FloatArray, ...]) -> FloatArray:
        head = np.log(theta[:1] if self.common else theta)
        return np.concatenate([head, *(factor.ravel() for factor in factors)])

    def _unpack(self, z: FloatArray) -> tuple[FloatArray, tuple[FloatArray, ...]]:
        n = self.assembly.num_agents
        head = 1 if self.common else n
        theta = np.broadcast_to(np.exp(z[:head]), (n,))
        factors, start = [], head
        for bucket in self.assembly.buckets:
            k, m = bucket.members.shape
            columns = 1 if m == 2 and not self.common else m
            factors.append(z[start : start + k * m * columns].reshape(k, m, columns))
            start += k * m * columns
        return theta, tuple(factors)
