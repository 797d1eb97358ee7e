"""Attackers that score observations, and what their scores prove.

A high score is evidence for the data set with the canary. One attacker computes the likelihood
ratio of the plan's noise: no test is better if the program is right. Another learns a linear test,
so that it also uses noise that is not what the plan says, such as noise that is released twice.
Scores of both are normal where the noise is, and estimate μ, the distance of the two score
distributions in standard deviations. Error rates at thresholds that were **fixed beforehand** give
a lower bound on ε that assumes nothing about the scores.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.special import ndtri

from corn.audit.run import Signal, alternate
from corn.checks import FloatArray

# Of the largest variance: a direction with less noise than this counts as having as much.
_LEAST_VARIANCE = 1e-12
# Nine, as in ``place_thresholds``: dense in the tails, where ratios of rates are largest.
_QUANTILES = np.array([0.005, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 0.995])


class TrialScores(NamedTuple):
    """Scores of independent trials without the canary (or with its negation) and with it.

    Both have shape (trials,), and the same noise in the same trial.
    """

    null: FloatArray
    alternative: FloatArray


def attack_by_likelihood(
    hidden: FloatArray,
    signal: Signal,
    covariance: FloatArray,
    position: int,
    *,
    promised_mu: float,
    seed: int,
) -> tuple[TrialScores, FloatArray]:
    """Score by the likelihood ratio of noise with the plan's covariance.

    ``hidden`` is what the view observes of its parts, shape (releases, parts, trials), and
    ``position`` the victim's part. Thresholds are returned that do not depend on the scores.

    Where coins decide when the canary takes part, each release is a mixture, and thresholds are
    quantiles of scores that are simulated with a seed. Otherwise scores are N(0, 1) without the
    canary and N(μ, 1) with it, if the program keeps exactly what was promised.
    """
    # The log-likelihood ratio of a shift along e_j is linear in e_jᵀ Σ⁻¹ v: column j of Σ⁻¹.
    x = _solve(covariance, np.eye(len(covariance))[position])
    size = math.sqrt(float(x[position]))
    # In standard deviations. Axes: r releases, h parts, t trials.
    noise = np.einsum("h,rht->rt", x, hidden) / size
    # Signs of the canary alternate over releases. Turned back, all releases have one shift.
    signs, shift = alternate(len(hidden))[:, None], signal.shift * size
    # A canary of size c on part j adds c [Σ⁻¹]_jj to e_jᵀ Σ⁻¹ v.
    null, alternative = ((noise + size * own) * signs for own in (signal.null, signal.alternative))
    chances, is_replace = signal.participation, signal.is_replace
    if signal.rate is None:
        # The same number of releases for all trials: scores have variance one on average.
        scale = math.sqrt(max(float((chances**2).sum(axis=0).mean()), 1e-300))
        middle = promised_mu / 2 if is_replace else 0.0
        scores = ((chances * own).sum(axis=0) / scale + middle for own in (null, alternative))
        return TrialScores(*scores), place_thresholds(promised_mu)
    practice = simulate_mixture(
        len(null), shift, signal.rate, is_replace=is_replace, num_trials=20_000, seed=seed
    )
    thresholds = np.quantile(np.concatenate(practice), _QUANTILES)
    pair = (null, alternative)
    scores = (mixture_score(own, shift, chances, is_replace=is_replace) for own in pair)
    return TrialScores(*scores), thresholds


def attack_by_learning(
    released: FloatArray, known: FloatArray, signal: Signal, position: int
) -> TrialScores:
    """Score by Fisher's linear discriminant, trained on the first half of the trials.

    ``released`` is what the view reads without canary, and ``known`` the part of the noise that it
    can draw, both of shape (releases, parts, trials). ``position`` is the victim's part.
    """
    releases, parts, trials = released.shape
    half = trials // 2
    # The victim's row in every release, once releases and parts are one axis.
    rows = np.arange(releases) * parts + position
    drawn = known.reshape(-1, trials)
    # Noise that the view can draw is one more observation, from which the discriminant learns what
    # to subtract. Rows of zeros would make the covariance singular.
    flat = np.concatenate([released.reshape(-1, trials), drawn[drawn.any(axis=1)]])
    null, alternative = flat.copy(), flat
    null[rows] += signal.null
    alternative[rows] += signal.alternative
    # Learning and scoring use different trials, or the test would fit its own sample.
    gap = alternative[:, :half].mean(axis=1) - null[:, :half].mean(axis=1)
    w = _solve((np.cov(null[:, :half]) + np.cov(alternative[:, :half])) / 2, gap)
    practice = w @ null[:, :half]
    # A program without noise has scores without spread.
    scale = float(practice.std()) or 1.0
    # Shifted by what the practice shows, so that scores without the canary have mean zero.
    return TrialScores(
        (w @ null[:, half:] - practice.mean()) / scale,
        (w @ alternative[:, half:] - practice.mean()) / scale,
    )


def mixture_score(
    observed: FloatArray, shift: float, rate: float | FloatArray, *, is_replace: bool
) -> FloatArray:
    """Return the log-likelihood ratio over all releases, shape (trials,).

    Under add-remove a release is N(shift, 1) with probability ``rate`` if the canary is there, and
    N(0, 1) otherwise; under replace it is N(±shift/2, 1) with that probability.
    """
    half = shift / 2 if is_replace else shift

    def log_mean(sign: float) -> FloatArray:
        # ln N(x; m, 1)/N(x; 0, 1) = m x − m²/2.
        exponent = sign * half * observed - half**2 / 2
        # ln(p e^z + 1 − p) without overflow; at p = 0 and 1 one of the terms is −∞.
        with np.errstate(divide="ignore"):
            return np.asarray(np.logaddexp(np.log(rate) + exponent, np.log1p(-rate)))

    ratio = log_mean(1.0) - (log_mean(-1.0) if is_replace else 0.0)
    return np.asarray(ratio.sum(axis=0))


def simulate_mixture(
    num_releases: int,
    shift: float,
    rate: float,
    *,
    is_replace: bool,
    num_trials: int = 100_000,
    seed: int = 0,
) -> TrialScores:
    """Return scores of an ideal program with secret coins, from its model alone."""
    generator = np.random.default_rng(seed)
    normal = generator.standard_normal((num_releases, num_trials))
    taken = generator.random(normal.shape) < rate
    parts = (-shift / 2, shift / 2) if is_replace else (0.0, shift)
    null, alternative = (
        mixture_score(normal + taken * part, shift, rate, is_replace=is_replace) for part in parts
    )
    return TrialScores(null, alternative)


def _solve(covariance: FloatArray, vector: FloatArray) -> FloatArray:
    """Return Σ⁻¹ c."""
    values, vectors = np.linalg.eigh(covariance)
    # A direction without noise shows the canary at once: dropping it would hide the worst leak.
    floor = max(_LEAST_VARIANCE * float(values[-1]), 1e-30)
    solved: FloatArray = vectors @ ((vectors.T @ vector) / np.maximum(values, floor))
    return solved


# What scores prove.


class Interval(NamedTuple):
    """An estimate with its two-sided confidence interval."""

    estimate: float
    low: float
    high: float


def estimate_mu(scores: TrialScores, *, confidence: float = 0.95) -> Interval:
    """Estimate μ = (difference of means) / (standard deviation), for normal scores.

    The interval is by the delta method: the error of the difference, and that of the deviation.
    """
    null, alternative = scores
    pooled = float(null.var(ddof=1) + alternative.var(ddof=1)) / 2
    # Common noise cancels in the difference of the scores of one trial.
    difference = alternative - null
    mean, trials = float(difference.mean()), len(null)
    # A program without noise has scores without spread: any difference shows the canary.
    if pooled == 0:
        mu = math.copysign(math.inf, mean) if mean else 0.0
        return Interval(mu, mu, mu)
    mu = mean / math.sqrt(pooled)
    # Var(s)/s² is 1/(2 · freedom) for a standard deviation s of normal scores. Trials count once,
    # because both samples have the same noise.
    variance = float(difference.var(ddof=1)) / trials
    error = math.sqrt(variance / pooled + mu**2 / (2 * (trials - 1)))
    z = float(ndtri((1 + confidence) / 2))
    return Interval(mu, mu - z * error, mu + z * error)


def compute_auc(null: FloatArray, alternative: FloatArray) -> float:
    """Return the probability that a score of the alternative exceeds one of the null."""
    # ``mannwhitneyu`` counts ties as one half.
    found = stats.mannwhitneyu(alternative, null, method="asymptotic").statistic
    return float(found) / (len(null) * len(alternative))


def estimate_mu_by_auc(scores: TrialScores) -> Interval:
    """Return the μ of normal scores with the same AUC; the interval is Hanley and McNeil's."""
    area, n = compute_auc(*scores), len(scores.null)
    # Their exponential approximation, for equally many scores of both kinds.
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    variance = (area * (1 - area) + (n - 1) * (q1 + q2 - 2 * area**2)) / n**2
    error = 1.96 * math.sqrt(max(variance, 0.0))
    # AUC = Φ(μ/√2) for N(0, 1) and N(μ, 1). An AUC of 1 would give μ = ∞.
    areas = np.clip([area, area - error, area + error], 1e-12, 1 - 1e-12)
    return Interval(*(math.sqrt(2) * ndtri(areas)).tolist())


def ideal_mu(num_releases: int, shift: float, rate: float, *, is_replace: bool) -> float:
    """Return the μ with the same AUC as the best test of an ideal program, by simulation."""
    scores = simulate_mixture(num_releases, shift, rate, is_replace=is_replace)
    return estimate_mu_by_auc(scores).estimate


def place_thresholds(mu: float) -> FloatArray:
    """Return nine thresholds for scores N(0, 1) without the canary, and N(μ, 1) with it."""
    # 2.5 standard deviations beyond both means, ratios of rates are largest that a few thousand
    # trials can still certify.
    return np.linspace(-2.5, min(mu, 20.0) + 2.5, 9)


def limit_errors(
    scores: TrialScores, thresholds: FloatArray, *, alpha: float
) -> tuple[FloatArray, FloatArray]:
    """Return Clopper–Pearson limits of the rates of false positives and false negatives.

    All of them hold together at level 1 − α, as thresholds do not depend on the scores. With k
    thresholds there are 2k limits, each at level 1 − α/(2k).
    """
    trials, each = len(scores.null), alpha / (2 * len(thresholds))

    def limit(errors: NDArray[np.bool_]) -> FloatArray:
        counts = errors.sum(axis=1)
        # The quantile is undefined where all are counted: the limit there is 1.
        return np.where(counts < trials, stats.beta.isf(each, counts + 1, trials - counts), 1.0)

    columns = thresholds[:, None]
    return limit(scores.null >= columns), limit(scores.alternative < columns)


def bound_epsilon_by_errors(limits: tuple[FloatArray, FloatArray], delta: float) -> float:
    """Return the largest ε that (ε, δ)-DP must at least have, at these rates; at least 0.

    Privacy bounds both directions: TPR ≤ e^ε FPR + δ and TNR ≤ e^ε FNR + δ.
    """
    false, missed = limits
    # Upper limits of both errors make the ratio smallest: the bound holds at the stated level.
    ratios = np.concatenate([(1 - missed - delta) / false, (1 - false - delta) / missed])
    return max(0.0, float(np.log(np.maximum(ratios, 1.0)).max()))
