"""Estimates and certificates from the scores of a test: what an attacker achieved, and how surely.

An attacker scores observations; a high score is evidence for the data set with the canary. The
scores under both data sets give:

- an estimate of μ, the distance of the two score distributions in standard deviations, with a
  confidence interval that assumes normal scores (linear scores of Gaussian noise are normal);
- error rates at thresholds that were **fixed beforehand**, with Clopper–Pearson limits, from which
  a lower bound on ε follows that assumes nothing about the scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.special import ndtri

from corn.arrays import FloatArray
from corn.checks import require


@dataclass(frozen=True, eq=False)
class TrialScores:
    """Scores of independent trials under two neighbouring data sets.

    Attributes:
        null: scores under the data set without the canary (or with its negation), shape (trials,).
        alternative: scores under the data set with the canary, shape (trials,).
        is_paired: whether trial k of both has the same noise. Each of the two is a sample of
            independent trials still, and their difference has a much smaller error.
    """

    null: FloatArray
    alternative: FloatArray
    is_paired: bool = False

    def __post_init__(self) -> None:
        least = min(len(self.null), len(self.alternative))
        require(least >= 2, "trials", "at least 2 of each data set", least)

    @property
    def auc(self) -> float:
        """The probability that a score of the alternative exceeds one of the null."""
        # The Mann–Whitney statistic; ``rankdata`` counts ties as one half.
        ranks = stats.rankdata(np.concatenate([self.null, self.alternative]))
        n0, n1 = len(self.null), len(self.alternative)
        return float((ranks[n0:].sum() - n1 * (n1 + 1) / 2) / (n0 * n1))

    def power_at(self, false_positive_rate: float) -> float:
        """Return the true positive rate at the threshold with this empirical rate of alarms."""
        # The next larger score, so that the rate of alarms is not exceeded.
        threshold = np.quantile(self.null, 1 - false_positive_rate, method="higher")
        return float((self.alternative > threshold).mean())

    def roc(self, num_points: int = 201) -> tuple[FloatArray, FloatArray]:
        """Return rates of false and true positives at evenly spaced thresholds."""
        both = np.concatenate([self.null, self.alternative])
        thresholds = np.quantile(both, np.linspace(1, 0, num_points))
        false = np.array([(self.null >= t).mean() for t in thresholds])
        true = np.array([(self.alternative >= t).mean() for t in thresholds])
        return false, true


@dataclass(frozen=True)
class Interval:
    """An estimate with its two-sided confidence interval."""

    estimate: float
    low: float
    high: float


def estimate_mu(scores: TrialScores, *, confidence: float = 0.95) -> Interval:
    """Estimate μ = (difference of means) / (standard deviation), for normal scores.

    The interval is by the delta method: the error of the difference, and that of the deviation.
    Where trials are paired, the deviation counts them once, because both samples share its error.
    """
    null, alternative = scores.null, scores.alternative
    n0, n1 = len(null), len(alternative)
    pooled = (null.var(ddof=1) * (n0 - 1) + alternative.var(ddof=1) * (n1 - 1)) / (n0 + n1 - 2)
    difference = float(alternative.mean() - null.mean())
    # A program without noise has scores without spread: any difference shows the canary.
    if pooled == 0:
        mu = math.copysign(math.inf, difference) if difference else 0.0
        return Interval(mu, mu, mu)
    if scores.is_paired:
        # Common noise cancels in the difference of a pair.
        variance = float((alternative - null).var(ddof=1)) / n0
        freedom = n0 - 1
    else:
        variance = float(null.var(ddof=1) / n0 + alternative.var(ddof=1) / n1)
        freedom = n0 + n1 - 2
    mu = difference / math.sqrt(pooled)
    # Var(s)/s² is 1/(2 · freedom) for a standard deviation s of normal scores.
    error = math.sqrt(variance / pooled + mu**2 / (2 * freedom))
    z = float(ndtri((1 + confidence) / 2))
    return Interval(mu, mu - z * error, mu + z * error)


def bound_mu(scores: TrialScores, *, alpha: float) -> float:
    """Return a lower confidence limit of μ at level 1 − α, assuming normal scores."""
    # One side of a two-sided interval at 1 − 2α has the level 1 − α.
    return estimate_mu(scores, confidence=1 - 2 * alpha).low


@dataclass(frozen=True, eq=False)
class ErrorRates:
    """Confidence limits of the error rates at several thresholds, all valid together.

    Attributes:
        false_low: lower limits of the rates of false positives, shape (thresholds,).
        false_high: upper limits of them.
        missed_low: lower limits of the rates of false negatives.
        missed_high: upper limits of them.
    """

    false_low: FloatArray
    false_high: FloatArray
    missed_low: FloatArray
    missed_high: FloatArray

    def bound_epsilon(self, delta: float) -> float:
        """Return the largest ε that (ε, δ)-DP must at least have, at these rates; at least 0.

        Privacy bounds both directions: TPR ≤ e^ε FPR + δ and TNR ≤ e^ε FNR + δ.
        """
        ratios = np.concatenate(
            [
                # Upper limits of both errors make the ratio smallest: the bound holds at the stated
                # level.
                (1 - self.missed_high - delta) / self.false_high,
                (1 - self.false_high - delta) / self.missed_high,
            ]
        )
        return max(0.0, float(np.log(np.maximum(ratios, 1.0)).max()))

    def bound_mu(self) -> float:
        """Return the least μ whose trade-off curve allows these rates; no scores are assumed."""
        # On the trade-off curve of μ: Φ⁻¹(1 − α) − Φ⁻¹(β) = μ, where α and β are the two errors.
        return max(0.0, float((-ndtri(self.false_high) - ndtri(self.missed_high)).max()))


def count_errors(scores: TrialScores, thresholds: FloatArray, *, alpha: float) -> ErrorRates:
    """Return Clopper–Pearson limits of both error rates, which hold together at level 1 − α.

    Thresholds must not depend on the scores. With k of them there are 4k limits, each at level
    1 − α/(4k).
    """
    each = alpha / (4 * len(thresholds))
    false = np.array([(scores.null >= t).sum() for t in thresholds])
    missed = np.array([(scores.alternative < t).sum() for t in thresholds])
    false_low, false_high = _clopper_pearson(false, len(scores.null), each)
    missed_low, missed_high = _clopper_pearson(missed, len(scores.alternative), each)
    return ErrorRates(false_low, false_high, missed_low, missed_high)


def _clopper_pearson(
    counts: FloatArray, trials: int, alpha: float
) -> tuple[FloatArray, FloatArray]:
    """Return one-sided lower and upper limits of binomial rates, each at level 1 − α."""
    # The quantiles are undefined where none or all are counted: the limits there are 0 and 1.
    low = np.where(counts > 0, stats.beta.ppf(alpha, counts, trials - counts + 1), 0.0)
    high = np.where(counts < trials, stats.beta.isf(alpha, counts + 1, trials - counts), 1.0)
    return low, high


def place_thresholds(mu: float, num_thresholds: int = 9) -> FloatArray:
    """Return thresholds for scores that are N(0, 1) without the canary, and N(μ, 1) with it.

    They reach 2.5 standard deviations beyond both means, where ratios of rates are largest that a
    few thousand trials can still certify.

    >>> place_thresholds(1.0, 3).tolist()
    [-2.5, 0.5, 3.5]
    """
    return np.linspace(-2.5, min(mu, 20.0) + 2.5, num_thresholds)
