"""Estimates and certificates against scores whose privacy is known."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest, norm

from corn.audit.attacks import (
    ErrorRates,
    TrialScores,
    bound_mu,
    count_errors,
    estimate_mu,
    ideal_mu,
    mixture_score,
    place_thresholds,
    simulate_mixture,
)
from corn.privacy import gaussian


def draw_scores(mu: float, trials: int, seed: int, *, is_paired: bool = False) -> TrialScores:
    generator = np.random.default_rng(seed)
    noise = generator.standard_normal(trials)
    other = noise if is_paired else generator.standard_normal(trials)
    return TrialScores(noise, other + mu, is_paired=is_paired)


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("mu", [0.0, 0.3, 2.0, 6.0])
def test_the_interval_covers_the_true_mu_as_often_as_it_says(mu: float, is_paired: bool) -> None:
    found = [estimate_mu(draw_scores(mu, 400, seed, is_paired=is_paired)) for seed in range(1000)]
    if mu == 0 and is_paired:
        assert all(one.low == one.high == 0 for one in found)
        return
    covered = sum(one.low <= mu <= one.high for one in found)
    assert binomtest(covered, 1000, 0.95).pvalue > 1e-3, covered


def test_the_lower_limit_of_mu_is_exceeded_as_often_as_it_says() -> None:
    high = sum(bound_mu(draw_scores(1.5, 400, seed), alpha=0.05) > 1.5 for seed in range(1000))
    assert binomtest(high, 1000, 0.05).pvalue > 1e-3, high


@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_certified_bounds_are_rarely_above_the_truth(mu: float) -> None:
    """Clopper–Pearson and the union bound are conservative: fewer than 5 % may fail."""
    wrong_epsilon = wrong_mu = 0
    for seed in range(400):
        rates = count_errors(draw_scores(mu, 300, seed), place_thresholds(mu), alpha=0.05)
        wrong_epsilon += rates.bound_epsilon(1e-3) > gaussian.epsilon_from(mu, 1e-3)
        wrong_mu += rates.bound_mu() > mu
    assert wrong_epsilon <= 20
    assert wrong_mu <= 20


def test_certified_bounds_approach_the_truth_with_many_trials() -> None:
    rates = count_errors(draw_scores(1.0, 10**6, 0), place_thresholds(1.0), alpha=0.05)
    assert 0.95 < rates.bound_mu() <= 1.0
    exact = gaussian.epsilon_from(1.0, 0.05)
    assert 0.8 * exact < rates.bound_epsilon(0.05) <= exact


def test_both_directions_of_the_definition_count() -> None:
    """Few false negatives certify as much as few false positives."""
    one = ErrorRates(*(np.array([x]) for x in (0.001, 0.6)))
    other = ErrorRates(*(np.array([x]) for x in (0.6, 0.001)))
    assert one.bound_epsilon(0.01) == other.bound_epsilon(0.01)
    assert math.isclose(one.bound_epsilon(0.01), math.log(0.39 / 0.001))


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
