"""Estimates and certificates against scores whose privacy is known."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest, norm

from corn.audit.attacks import (
    TrialScores,
    bound_epsilon_by_errors,
    bound_mu,
    bound_mu_by_errors,
    estimate_mu,
    estimate_mu_by_auc,
    ideal_mu,
    limit_errors,
    mixture_score,
    place_thresholds,
    simulate_mixture,
)
from corn.privacy import gaussian


def draw_scores(mu: float, trials: int, seed: int) -> TrialScores:
    """Draw scores with the same noise in a trial of both, and a little of their own."""
    noise, *own = np.random.default_rng(seed).standard_normal((3, trials))
    null, alternative = (0.8 * noise + 0.6 * each for each in own)
    return TrialScores(null, alternative + mu)


@pytest.mark.parametrize("mu", [0.0, 0.3, 2.0, 6.0])
def test_the_interval_covers_the_true_mu_as_often_as_it_says(mu: float) -> None:
    found = [estimate_mu(draw_scores(mu, 400, seed)) for seed in range(1000)]
    covered = sum(one.low <= mu <= one.high for one in found)
    # At least: two samples with noise of their own have a smaller error than was counted.
    assert binomtest(covered, 1000, 0.95, alternative="less").pvalue > 1e-3, covered
    assert covered < 1000


def test_the_interval_by_the_auc_covers_the_true_mu() -> None:
    found = [estimate_mu_by_auc(draw_scores(0.5, 400, seed)) for seed in range(500)]
    covered = sum(one.low <= 0.5 <= one.high for one in found)
    assert binomtest(covered, 500, 0.95, alternative="less").pvalue > 1e-3, covered


def test_the_lower_limit_of_mu_is_exceeded_no_more_often_than_it_says() -> None:
    high = sum(bound_mu(draw_scores(1.5, 400, seed), alpha=0.05) > 1.5 for seed in range(1000))
    assert binomtest(high, 1000, 0.05, alternative="greater").pvalue > 1e-3, high
    assert high > 0


def test_equal_noise_cancels_in_the_difference() -> None:
    noise = np.random.default_rng(0).standard_normal(400)
    found = estimate_mu(TrialScores(noise, noise))
    assert found.low == found.high == 0


@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_certified_bounds_are_rarely_above_the_truth(mu: float) -> None:
    """Clopper–Pearson and the union bound are conservative: fewer than 5 % may fail."""
    wrong_epsilon = wrong_mu = 0
    for seed in range(400):
        limits = limit_errors(draw_scores(mu, 300, seed), place_thresholds(mu), alpha=0.05)
        wrong_epsilon += bound_epsilon_by_errors(limits, 1e-3) > gaussian.epsilon_from(mu, 1e-3)
        wrong_mu += bound_mu_by_errors(limits) > mu
    assert wrong_epsilon <= 20
    assert wrong_mu <= 20


def test_certified_bounds_approach_the_truth_with_many_trials() -> None:
    limits = limit_errors(draw_scores(1.0, 10**6, 0), place_thresholds(1.0), alpha=0.05)
    assert 0.95 < bound_mu_by_errors(limits) <= 1.0
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


def test_auc_and_power_of_normal_scores() -> None:
    scores = draw_scores(1.2, 200_000, 3)
    assert abs(scores.auc - norm.cdf(1.2 / math.sqrt(2))) < 0.003
    assert abs(scores.power_at(0.01) - norm.sf(norm.isf(0.01) - 1.2)) < 0.01


def test_scores_without_spread_are_separated_by_any_distance() -> None:
    same = TrialScores(np.zeros(9), np.zeros(9))
    apart = TrialScores(np.zeros(9), np.ones(9))
    assert estimate_mu(same).estimate == 0
    assert estimate_mu(apart).low == math.inf


@pytest.mark.parametrize("is_replace", [False, True])
def test_the_mixture_score_is_the_log_likelihood_ratio(is_replace: bool) -> None:
    x, shift, rate = np.array([[-1.0, 0.3, 2.5]]), 1.4, 0.2
    low, high = (-shift / 2, shift / 2) if is_replace else (0.0, shift)

    likely, unlikely = ((1 - rate) * norm.pdf(x) + rate * norm.pdf(x, mean) for mean in (high, low))
    found = mixture_score(x, shift, rate, is_replace=is_replace)
    assert np.allclose(found, np.log(likely / unlikely))


def test_without_sampling_the_mixture_is_normal() -> None:
    assert abs(ideal_mu(4, 0.5, 1.0, is_replace=False) - 1.0) < 0.02
    scores = simulate_mixture(4, 0.5, 1.0, is_replace=True, num_trials=1000, seed=0)
    assert abs(estimate_mu(scores).estimate - 1.0) < 0.1
