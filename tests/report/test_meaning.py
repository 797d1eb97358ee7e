"""What (ε, δ) means for a guess, against the mechanism that is worst for every (ε, δ)."""

from itertools import product

import numpy as np
import pytest

from corn.report.privacy_page import bound_detection, bound_guess

CASES = [(0.0, 0.0), (0.5, 0.0), (1.0, 1e-5), (2.0, 0.1), (8.0, 1e-3), (0.0, 0.3)]


def worst_mechanism(epsilon: float, delta: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the output's distribution for two neighbours: randomised response that may fail."""
    kept = (1 - delta) * np.exp(epsilon) / (1 + np.exp(epsilon))
    changed = (1 - delta) / (1 + np.exp(epsilon))
    return np.array([delta, kept, changed, 0.0]), np.array([0.0, changed, kept, delta])


@pytest.mark.parametrize(("epsilon", "delta"), CASES)
def test_the_best_guess_about_the_worst_mechanism_reaches_the_bound(
    epsilon: float, delta: float
) -> None:
    used, unused = worst_mechanism(epsilon, delta)
    best = np.maximum(used, unused).sum() / 2
    assert bound_guess(epsilon, delta) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(("epsilon", "delta"), CASES)
@pytest.mark.parametrize("false_alarms", [0.0, 0.01, 0.3, 0.9])
def test_the_best_test_of_the_worst_mechanism_reaches_the_bound(
    epsilon: float, delta: float, false_alarms: float
) -> None:
    used, unused = worst_mechanism(epsilon, delta)
    # Neyman and Pearson: outputs in the order of their likelihood ratio, the last one at random.
    found, left = 0.0, false_alarms
    for p, q in sorted(
        zip(used, unused, strict=True), key=lambda each: -each[0] / (each[1] or 1e-300)
    ):
        share = 1.0 if q <= left else left / q
        found, left = found + share * p, left - share * q
    assert bound_detection(epsilon, delta, false_alarms) == pytest.approx(found, abs=1e-12)


def test_bounds_grow_with_both_numbers_and_never_exceed_one() -> None:
    epsilons, deltas = (0.0, 0.1, 1.0, 30.0, 1e4), (0.0, 1e-6, 0.5, 1.0)
    guesses = np.array([[bound_guess(e, d) for d in deltas] for e in epsilons])
    assert (np.diff(guesses, axis=0) >= 0).all()
    assert (np.diff(guesses, axis=1) >= 0).all()
    assert guesses.max() <= 1
    for epsilon, delta in product(epsilons, deltas):
        assert bound_detection(epsilon, delta, 0.01) <= 1
