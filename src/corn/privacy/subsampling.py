"""Privacy of one sample under Poisson sampling, by privacy loss distributions (``dp_accounting``).

Each step includes the sample with probability p and hides it in Gaussian noise. Whitening the noise
of all agents leaves a shift of norm c·√y, with c the sample's contribution and y = [R⁻¹]_jj: the
subsampled Gaussian mechanism with noise multiplier 1/(c√y).

If neighbours replace the sample, opposite shifts are the worst of all shifts u and u′ of norm at
most s = c√y: for any event S of probability α without the sample, N(u)(S) ≤ Φ(Φ⁻¹(α) + s) and
N(u′)(S) ≥ Φ(Φ⁻¹(α) − s) by Neyman and Pearson, and one half-space attains both. So the noise
multiplier is that of the contribution c = C/B under both adjacencies, not of the sensitivity 2C/B.

Losses are rounded up to a grid, so that in real numbers all results are upper bounds. Composition
in floating point loses a little of δ, for which there is an allowance (``allow_for_rounding``).
Compared to finer grids, in the few settings tried, ε was overstated by less than 1e-4 relative for
p ≥ 0.01 and by about 2e-3 for p = 1e-4.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.fft import irfft, rfft
from scipy.optimize import brentq
from scipy.special import ndtr

from corn.checks import FloatArray, require, require_count
from corn.errors import InfeasibleError
from corn.privacy import gaussian
from corn.privacy.budget import Adjacency, ClippedQuery
from corn.privacy.rounding import write_exactly

ROUNDING = 2.0**-45  # of a few operations on μ and δ
# The grid of losses, relative to the standard deviation of one step's loss.
DISCRETISATION = 0.02
# Composition truncates tails of about 1e-15 and counts them as lost, so no smaller δ is possible.
SMALLEST_DELTA = 1e-12
# The allowance for rounding in each step: a part of 1, and a part of δ. See ``allow_for_rounding``.
LOST_PER_STEP = 1e-15
_LOST_OF_DELTA = 1e-12
_SEARCH_TOLERANCE = 2e-4
_MOST_ESTIMATES = 3
_WIDEST_SEARCH = 15.0

# The estimate of δ(ε): points of one step's noise, standard deviations that they cover, and points
# of the grid on which losses are composed.
_TABLE_SIZE = 8001
_TABLE_END = 9.0
_GRID_SIZE = 1 << 16
_FINEST_OF_REST = 1e-6
_LARGEST_LOG_SHIFT = 4.0
_MOST_STEPS = 10**6


@dataclass(frozen=True)
class Releases:
    """Releases of real numbers: a Gaussian part of this μ, and phases of Poisson sampling.

    ``phases`` has (shift, sampling rate, number of steps) of each.
    """

    mu: float
    phases: tuple[tuple[float, float, int], ...]
    adjacency: Adjacency

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on ε(δ)."""
        if not self.phases:
            return gaussian.epsilon_from(self.mu, delta) if delta > 0 else math.inf
        left = delta - self._allow(delta)
        if self._is_exposed or left <= 0:
            return math.inf
        losses = compose_phases(self.phases, self.adjacency, mu=self.mu)
        return float(losses.get_epsilon_for_delta(left))

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on δ(ε)."""
        if not self.phases:
            return gaussian.delta_from(self.mu, epsilon) * (1 + ROUNDING)
        if self._is_exposed:
            return 1.0
        losses = compose_phases(self.phases, self.adjacency, mu=self.mu)
        found = float(losses.get_delta_for_epsilon(epsilon))
        return min(1.0, found + self._allow(found))

    @property
    def _is_exposed(self) -> bool:
        return any(math.isinf(shift) for shift, _, _ in self.phases)

    def _allow(self, delta: float) -> float:
        """Return what δ is raised by for rounding in the composition, with the Gaussian part."""
        num_steps = sum(steps for _, _, steps in self.phases)
        return allow_for_rounding(delta, num_steps + (self.mu > 0))


def repeat_steps(precision: float, num_steps: int, query: ClippedQuery) -> Releases:
    """Return this many steps at [R⁻¹]_jj = ``precision``."""
    _require_few_steps(num_steps)
    shift = query.contribution * math.sqrt(precision)
    return Releases(0.0, ((shift, query.sampling_rate or 1.0, num_steps),), query.adjacency)


def allow_for_rounding(delta: float, num_steps: int) -> float:
    """Return what δ is raised by because the steps are composed in floating point.

    **This allowance is measured, with a margin; it is not proved.** Rounding the probabilities of
    one step's losses changes δ in proportion to δ, and Fourier transforms change it by a part of 1;
    both grow with the number of steps. Compared to extended precision on the same grid, for rates
    from 0.001 to next to 1, up to 10⁶ steps and both adjacencies, one step took at most 9e-17 from
    a small δ, and 3e-14 of a large one, where the allowance is 1e-15 and 1e-12.
    ``tests/privacy/test_subsampling.py`` repeats a part of these measurements.
    """
    return num_steps * (LOST_PER_STEP + _LOST_OF_DELTA * delta)


def calibrate_precision(
    epsilon: float, delta: float, *, num_steps: int, query: ClippedQuery
) -> float:
    """Return a [R⁻¹]_jj whose bound on ε is at most ``epsilon``, and nearly the largest.

    It comes from an estimate, which is much faster than the bound. The bound at the result corrects
    the target of another estimate until it is within 2e-4 below ``epsilon`` (6e-4 at a rate of
    1e-3). A search by the bound alone is the last resort.
    """
    require_meaningful(delta, num_steps=num_steps, query=query)

    def excess(log_precision: float) -> float:
        spent = repeat_steps(math.exp(log_precision), num_steps, query).epsilon(delta)
        # Bounded, so that ε = 0 and ε = ∞ are numbers that a root finder can use.
        return math.log(min(max(spent / epsilon, 0.1), 10.0))

    # At low rates the bound exceeds the estimate by more. With this tolerance one bound suffices,
    # for 4e-4 more noise variance; a second one would take half a second.
    tolerance = _SEARCH_TOLERANCE * min(max(3e-3 / (query.sampling_rate or 1.0), 1.0), 5.0)
    target = aim = epsilon * (1 - tolerance / 2)
    for _ in range(_MOST_ESTIMATES):
        shift = _estimate_shift(target, delta, num_steps=num_steps, query=query)
        start = 2 * math.log(shift / query.contribution)
        found = excess(start)
        if -tolerance <= found <= 0:
            return math.exp(start)
        # Bound and estimate differ by nearly the same factor in the neighbourhood.
        target *= aim / epsilon / math.exp(found)
    return math.exp(_search(excess, start, epsilon=epsilon))


def require_meaningful(delta: float, *, num_steps: int, query: ClippedQuery) -> None:
    """Raise if δ is too small to resolve, or so large that no noise is needed at all."""
    rate = query.sampling_rate or 1.0
    require(rate < 1, "sampling_rate", "below 1 here", query.sampling_rate)
    _require_few_steps(num_steps)
    drawn = -math.expm1(num_steps * math.log1p(-rate))
    least = max(SMALLEST_DELTA, 10 * LOST_PER_STEP * num_steps)
    rule = f"in [{least:g}, {drawn:.3g}) with sampling_rate={rate:g} and {num_steps} steps"
    advice = "below, accounting cannot resolve it; above, releases need no noise"
    require(least <= delta < drawn, "delta", rule, write_exactly(delta), advice=advice)


def _require_few_steps(num_steps: int) -> None:
    advice = "composing more takes minutes; plan larger batches, or sampling 'passes'"
    require_count("num_steps", num_steps, most=_MOST_STEPS, advice=advice)


def _search(excess: Callable[[float], float], start: float, *, epsilon: float) -> float:
    """Return a point near a root of the increasing ``excess``, at which it is at most 0."""
    found = excess(start)
    step = 2 * _SEARCH_TOLERANCE
    private = start
    exposed = start
    while found <= 0:
        private, exposed = exposed, exposed + step
        found = excess(exposed)
        step = 2 * step
    while excess(private) > 0:
        private, exposed, step = private - step, private, 2 * step
        if private < start - _WIDEST_SEARCH:
            what = write_exactly(epsilon)
            raise InfeasibleError(f"no noise brings epsilon to {what} by numerical accounting")
    root = float(brentq(excess, private, exposed, xtol=_SEARCH_TOLERANCE / 2))
    while excess(root) > 0:
        root -= _SEARCH_TOLERANCE / 2
    return root


def _estimate_shift(epsilon: float, delta: float, *, num_steps: int, query: ClippedQuery) -> float:
    """Return about the largest shift s whose δ(ε) after all steps is ``delta``."""

    def excess(log_shift: float) -> float:
        found = _estimate_delta(math.exp(log_shift), epsilon, delta, num_steps, query)
        return math.log(max(found, 1e-300) / delta)

    # Noise that is private without subsampling is private with it.
    mu = gaussian.mu_from(epsilon, delta)
    private = math.log(mu / math.sqrt(num_steps) * query.contribution / query.sensitivity)
    exposed = private + 0.5
    while exposed < _LARGEST_LOG_SHIFT and excess(exposed) < 0:
        private, exposed = exposed, exposed + 0.5
    if exposed >= _LARGEST_LOG_SHIFT or excess(private) > 0:
        return math.exp(private)  # out of the estimate's range: only a place to start from
    return math.exp(float(brentq(excess, private, exposed, xtol=_SEARCH_TOLERANCE / 10)))


def _estimate_delta(
    shift: float, epsilon: float, delta: float, num_steps: int, query: ClippedQuery
) -> float:
    """Return an estimate of δ(ε) after all steps, from the loss of one on a grid of fixed size.

    One step's loss is tabulated over x ~ (1 − p) N(0, 1) + p N(s, 1), spread over the two grid
    points next to it, which keeps its mean, and composed by one Fourier transform.
    """
    rate = query.sampling_rate or 1.0
    x = np.linspace(-_TABLE_END, shift + _TABLE_END, _TABLE_SIZE)
    mass = np.diff((1 - rate) * ndtr(x) + rate * ndtr(x - shift))
    losses = _losses((x[1:] + x[:-1]) / 2, shift, rate, query)
    mean = float(mass @ losses)
    total_std = math.sqrt(num_steps * float(mass @ (losses - mean) ** 2))
    # Losses beyond this one are so rare that all steps together hardly ever have one.
    tail = (1 - rate) * ndtr(-x[1:]) + rate * ndtr(shift - x[1:])
    rare = int(np.searchsorted(-tail, -1e-4 * delta / num_steps))
    highest = float(losses[min(rare, len(losses) - 1)])
    below = 9 * total_std - float(losses[0])
    above = 10 * total_std + 2 * (highest - mean)
    interval = (below + above) / _GRID_SIZE
    places = (np.minimum(losses, highest) - mean) / interval
    left = np.floor(places).astype(np.int64)
    fraction = places - left
    step = np.zeros(_GRID_SIZE)
    np.add.at(step, left % _GRID_SIZE, mass * (1 - fraction))
    np.add.at(step, (left + 1) % _GRID_SIZE, mass * fraction)
    # Spreading adds variance, which would be the main error of many steps: a Gaussian of as much
    # variance is divided out. The loss of few steps is not smooth enough for that.
    frequency = 2 * math.pi * np.arange(_GRID_SIZE // 2 + 1) / _GRID_SIZE
    added = num_steps * float(mass @ (fraction * (1 - fraction))) * frequency**2 / 2
    correction = np.exp(np.minimum(added, 1.0)) if num_steps > 1000 else 1.0
    total = irfft(rfft(step) ** num_steps * correction, _GRID_SIZE)
    # The grid is cyclic: its upper end stands for losses below the mean.
    numbers = np.arange(_GRID_SIZE)
    numbers[_GRID_SIZE - int(below / interval) :] -= _GRID_SIZE
    excess = numbers * interval + num_steps * mean - epsilon
    return float(total @ -np.expm1(-np.maximum(excess, 0.0)))


def _losses(x: FloatArray, shift: float, rate: float, query: ClippedQuery) -> FloatArray:
    """Return the log-likelihood ratio of one step at x, against no sample or the opposite one."""
    present = np.logaddexp(math.log1p(-rate), math.log(rate) + shift * x - shift**2 / 2)
    if query.adjacency == "add-remove":
        return np.asarray(present)
    opposite = np.logaddexp(math.log1p(-rate), math.log(rate) - shift * x - shift**2 / 2)
    return np.asarray(present - opposite)


@lru_cache(maxsize=16)
def compose_phases(
    phases: tuple[tuple[float, float, int], ...],
    adjacency: Adjacency,
    *,
    mu: float = 0.0,
    interval: float | None = None,
) -> Any:
    """Return the privacy loss distribution of phases with Poisson sampling, and a Gaussian rest.

    Phases are shift, sampling rate and number of steps. μ is that of all releases without sampling,
    for the sensitivity of this adjacency. Losses are on a grid, by default of a chosen interval.
    """
    # Imported here, because it takes half a second that other accounting saves.
    distributions = importlib.import_module("dp_accounting.pld.privacy_loss_distribution")
    if interval is None:
        # All losses must lie on one grid. The finest is accurate for all; the Gaussian part, whose
        # losses spread furthest, limits how fine it can be.
        finest = min(choose_interval(shift, rate) for shift, rate, _ in phases)
        interval = max(finest, _FINEST_OF_REST * mu * (mu / 2 + 10))
    total = distributions.identity(value_discretization_interval=interval)
    for shift, rate, count in phases:
        if shift == 0:
            continue  # nothing is released, which no noise multiplier expresses
        step = make_step(shift, rate, adjacency, interval=interval)
        total = total.compose(step.self_compose(count))
    if mu > 0:
        rest = distributions.from_gaussian_mechanism(
            standard_deviation=1 / mu, value_discretization_interval=interval
        )
        total = total.compose(rest)
    return total


def make_step(shift: float, rate: float, adjacency: Adjacency, *, interval: float) -> Any:
    """Return the privacy loss distribution of one step, rounded up to the grid of losses."""
    distributions = importlib.import_module("dp_accounting.pld.privacy_loss_distribution")
    relations = importlib.import_module("dp_accounting").NeighboringRelation
    replace = adjacency == "replace"
    return distributions.from_gaussian_mechanism(
        standard_deviation=1 / shift,
        sampling_prob=rate,
        value_discretization_interval=interval,
        neighboring_relation=relations.REPLACE_ONE if replace else relations.ADD_OR_REMOVE_ONE,
    )


def choose_interval(shift: float, sampling_rate: float) -> float:
    """Return the interval of the grid of losses, for steps of this shift."""
    # One step's loss has variance about p²(exp(s²) − 1), to which rounding to the grid adds about
    # interval²/4. Below 1e-5 the rounding of floats, added up over the steps, is the larger error.
    step_std = sampling_rate * math.sqrt(math.expm1(min(shift * shift, 50.0)))
    # Ten standard deviations of noise bound the loss: at most 1000/DISCRETISATION points for it,
    # and never more than a million, however little noise there is.
    furthest = shift * (shift / 2 + 10)
    loss_range = furthest if furthest > 700 else math.log1p(sampling_rate * math.expm1(furthest))
    interval = DISCRETISATION * max(step_std, 1e-3 * loss_range)
    return max(min(interval, 1e-3), 1e-6 * loss_range, 1e-5)
