"""Estimates and certificates against scores whose privacy is known."""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, binomtest, chi2, norm

from corn.audit.attacks import (
    TrialScores,
    bound_epsilon_by_errors,
    compute_auc,
    estimate_mu,
    estimate_mu_by_auc,
    ideal_mu,
    limit_errors,
    mixture_score,
    place_thresholds,
    simulate_mixture,
)
from corn.privacy import gaussian


def draw_scores(mu: float, trials: int, seed: int, *, own_part: float = 0.0) -> TrialScores:
    """Draw scores with the same noise in a trial of both, but for a part of the variance."""
    noise, *own = np.random.default_rng(seed).standard_normal((3, trials))
    null, alternative = (
        math.sqrt(1 - own_part) * noise + math.sqrt(own_part) * each for each in own
    )
    return TrialScores(null, alternative + mu)


def is_covered(count: int, num: int, level: float) -> bool:
    """Return whether so many are neither too few nor too many for a level."""
    return float(binomtest(count, num, level).pvalue) > 1e-3


# Where the error of the difference, or that of the deviation, is all there is. With both, the
# interval is wider than it need be: it counts the trials of two samples as one.
@pytest.mark.parametrize(("mu", "own_part"), [(0.0, 0.4), (0.0, 1.0), (0.3, 0.0), (6.0, 0.0)])
def test_intervals_and_limits_hold_as_often_as_they_say(mu: float, own_part: float) -> None:
    scores = [draw_scores(mu, 400, seed, own_part=own_part) for seed in range(1000)]
    found = [estimate_mu(one) for one in scores]
    assert is_covered(sum(one.low <= mu <= one.high for one in found), 1000, 0.95)
    assert is_covered(sum(estimate_mu(one, confidence=0.9).low > mu for one in scores), 1000, 0.05)


def test_the_interval_is_as_wide_as_that_of_a_standard_deviation() -> None:
    """With common noise the mean is exact, and (N − 1) s² is χ²."""
    for seed in range(20):
        found = estimate_mu(draw_scores(2.0, 2000, seed))
        exact = [found.estimate * math.sqrt(chi2.ppf(p, 1999) / 1999) for p in (0.025, 0.975)]
        assert found.high - found.low == pytest.approx(exact[1] - exact[0], rel=1e-2)
        assert found.low == pytest.approx(exact[0], rel=2e-3)


def test_noise_of_both_samples_makes_the_interval_no_narrower_than_it_must_be() -> None:
    found = [estimate_mu(draw_scores(2.0, 400, seed, own_part=0.4)) for seed in range(1000)]
    covered = sum(one.low <= 2.0 <= one.high for one in found)
    assert binomtest(covered, 1000, 0.95, alternative="less").pvalue > 1e-3, covered
    # The error of the difference is counted exactly, that of the deviation at most double.
    width = np.mean([one.high - one.low for one in found])
    assert width < 2 * 1.96 * math.sqrt(2) * np.std([one.estimate for one in found])


@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_the_interval_by_the_auc_holds_as_often_as_it_says(mu: float) -> None:
    found = [estimate_mu_by_auc(draw_scores(mu, 400, seed, own_part=1.0)) for seed in range(500)]
    assert is_covered(sum(one.low <= mu <= one.high for one in found), 500, 0.95)


def test_equal_noise_cancels_in_the_difference() -> None:
    noise = np.random.default_rng(0).standard_normal(400)
    found = estimate_mu(TrialScores(noise, noise))
    assert found.low == found.high == 0


@cache
def find_limit(count: int, trials: int, confidence: float) -> float:
    return float(binomtest(count, trials).proportion_ci(confidence).high)


@pytest.mark.parametrize(("mu", "delta"), [(0.5, 1e-3), (2.0, 1e-5), (2.0, 0.1)])
def test_certified_bounds_are_those_of_clopper_and_pearson(mu: float, delta: float) -> None:
    """Scipy's limits, and both inequalities of the definition, threshold by threshold."""
    thresholds, truth = place_thresholds(mu), gaussian.epsilon_from(mu, delta)
    wrong = 0
    for seed in range(100):
        scores = draw_scores(mu, 300, seed)
        limits = limit_errors(scores, thresholds, alpha=0.05)
        epsilons = [0.0]
        for threshold in thresholds:
            counts = [(scores.null >= threshold).sum(), (scores.alternative < threshold).sum()]
            # 18 limits share the level; a two-sided interval has half on each side.
            false, missed = (find_limit(int(k), 300, 1 - 2 * 0.05 / 18) for k in counts)
            for rate, other in ((false, missed), (missed, false)):
                if 1 - other > delta:
                    epsilons.append(math.log((1 - other - delta) / rate))
        assert bound_epsilon_by_errors(limits, delta) == pytest.approx(max(epsilons))
        wrong += max(epsilons) > truth
    assert wrong <= binom.isf(1e-3, 100, 0.05)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_limits_of_rates_are_exceeded_as_often_as_they_say(rate: float) -> None:
    """By the law of the count: the limit excludes a rate for as many counts as the level allows."""
    trials, level = 500, 0.01
    nulls = (np.repeat([1.0, 0.0], [k, trials - k]) for k in range(trials + 1))
    scores = (TrialScores(null, np.zeros(trials)) for null in nulls)
    limits = [limit_errors(one, np.array([0.5]), alpha=2 * level)[0][0] for one in scores]
    num_excluded = sum(limit < rate for limit in limits)
    assert (
        binom.cdf(num_excluded - 1, trials, rate) <= level < binom.cdf(num_excluded, trials, rate)
    )


def test_certified_bounds_approach_the_truth_with_many_trials() -> None:
    limits = limit_errors(draw_scores(1.0, 10**6, 0), place_thresholds(1.0), alpha=0.05)
    exact = gaussian.epsilon_from(1.0, 0.05)
    assert 0.8 * exact < bound_epsilon_by_errors(limits, 0.05) <= exact


def test_limits_of_rates_are_those_of_clopper_and_pearson() -> None:
    scores = TrialScores(np.array([0.0, 0.0, 2.0]), np.array([0.0, 2.0, 2.0]))
    for found, counts in zip(
        limit_errors(scores, np.array([-1.0, 1.0, 3.0]), alpha=0.06),
        [(3, 1, 0), (0, 1, 3)],
        strict=True,
    ):
        # Six limits share the level; that of a two-sided interval is half on each side.
        limits = [binomtest(k, 3).proportion_ci(1 - 2 * 0.01).high for k in counts]
        assert np.allclose(found, limits)


def test_both_directions_of_the_definition_count() -> None:
    """Few false negatives certify as much as few false positives."""
    few, many = np.array([0.001]), np.array([0.6])
    for limits in ((few, many), (many, few)):
        assert math.isclose(bound_epsilon_by_errors(limits, 0.01), math.log(0.39 / 0.001))


def test_the_auc_of_normal_scores() -> None:
    scores = draw_scores(1.2, 200_000, 3, own_part=0.4)
    found = compute_auc(scores.null, scores.alternative)
    assert abs(found - norm.cdf(1.2 / math.sqrt(2))) < 0.003


def test_scores_without_spread_are_separated_by_any_distance() -> None:
    same = TrialScores(np.zeros(9), np.zeros(9))
    apart = TrialScores(np.zeros(9), np.ones(9))
    assert estimate_mu(same).estimate == 0
    assert estimate_mu(apart).low == math.inf


@pytest.mark.parametrize("rate", [0.2, 1.0, np.array([[0.0, 1.0, 1.0]])], ids=str)
@pytest.mark.parametrize("is_replace", [False, True])
def test_the_mixture_score_is_the_log_likelihood_ratio(is_replace: bool, rate: Any) -> None:
    x, shift = np.array([[-1.0, 0.3, 2.5]]), 1.4
    low, high = (-shift / 2, shift / 2) if is_replace else (0.0, shift)

    likely, unlikely = ((1 - rate) * norm.pdf(x) + rate * norm.pdf(x, mean) for mean in (high, low))
    found = mixture_score(x, shift, rate, is_replace=is_replace)
    assert np.allclose(found, np.log(likely / unlikely))


def test_without_sampling_the_mixture_is_normal() -> None:
    assert abs(ideal_mu(4, 0.5, 1.0, is_replace=False) - 1.0) < 0.02
    scores = simulate_mixture(4, 0.5, 1.0, is_replace=True, num_trials=1000, seed=0)
    assert abs(estimate_mu(scores).estimate - 1.0) < 0.1
