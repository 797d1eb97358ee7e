"""Exact Gaussian DP against oracles that share no formula with it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import ndtr, ndtri

from corn.errors import InvalidArgumentError
from corn.privacy import gaussian

EPSILONS = [0.01, 0.03, 0.1, 0.5, 1.0, 3.0, 10.0, 30.0, 100.0]
DELTAS = [1e-12, 1e-9, 1e-5, 1e-3, 0.1]
GRID = [(epsilon, delta) for epsilon in EPSILONS for delta in DELTAS]

epsilons = st.floats(-2, 2).map(lambda exponent: 10.0**exponent)
deltas = st.floats(-12, -1).map(lambda exponent: 10.0**exponent)
mus = st.floats(-3, 1.5).map(lambda exponent: 10.0**exponent)


def hockey_stick(mu: float, epsilon: float) -> float:
    """Return ∫ max(0, φ(x − μ) − e^ε φ(x)) dx by quadrature over its support."""
    start = epsilon / mu - mu / 2
    scale = math.exp(-start * start / 2) / math.sqrt(2 * math.pi)
    value, _ = quad(
        lambda u: math.exp(-u * (start + u / 2)) * -math.expm1(-mu * u),
        0,
        40,
        epsabs=0,
        epsrel=1e-12,
    )
    return float(scale * value)


def high_precision_delta(mu: float, epsilon: float) -> Any:
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@pytest.mark.parametrize(("epsilon", "delta"), GRID)
def test_delta_agrees_with_quadrature_of_the_hockey_stick(epsilon: float, delta: float) -> None:
    mu = gaussian.mu_from(epsilon, delta)
    assert gaussian.delta_from(mu, epsilon) == pytest.approx(hockey_stick(mu, epsilon), rel=1e-9)


@given(mu=st.floats(-12, 2).map(lambda exponent: 10.0**exponent), quantile=st.floats(-36, 8))
@settings(max_examples=300)
def test_delta_agrees_with_sixty_digits(mu: float, quantile: float) -> None:
    epsilon = mu * (mu / 2 - quantile)
    assume(epsilon >= 0)
    exact = high_precision_delta(mu, epsilon)
    assert abs(gaussian.delta_from(mu, epsilon) / exact - 1) < 1e-12 * (1 + mu)


@pytest.mark.parametrize(("epsilon", "delta"), GRID)
def test_epsilon_and_mu_solve_the_exact_equation(epsilon: float, delta: float) -> None:
    # δ falls when ε rises and rises with μ: a relative step of 1e-10 brackets the true root.
    mu = gaussian.mu_from(epsilon, delta)
    assert (
        high_precision_delta(mu, epsilon) <= delta < high_precision_delta(mu * (1 + 1e-10), epsilon)
    )
    back = gaussian.epsilon_from(mu, delta)
    assert high_precision_delta(mu, back) <= delta
    assert high_precision_delta(mu, back * (1 - 1e-9)) > delta


@pytest.mark.parametrize(("epsilon", "delta"), GRID)
def test_agrees_with_dp_accounting(epsilon: float, delta: float) -> None:
    mechanism = pytest.importorskip("dp_accounting.gaussian_mechanism")
    mu = gaussian.mu_from(epsilon, delta)
    assert mechanism.get_epsilon_gaussian(1 / mu, delta) == pytest.approx(epsilon, rel=1e-9)
    assert 1 / mechanism.get_sigma_gaussian(epsilon, delta) == pytest.approx(mu, rel=1e-9)


def test_agrees_with_the_privacy_loss_distribution_of_a_composition() -> None:
    accounting = pytest.importorskip("dp_accounting")
    pld = pytest.importorskip("dp_accounting.pld")
    accountant = pld.PLDAccountant().compose(accounting.GaussianDpEvent(35.0), 5000)
    ours = gaussian.epsilon_from(math.sqrt(5000) / 35.0, 1e-5)
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-4)
    assert ours <= accountant.get_epsilon(1e-5)


@pytest.mark.parametrize(
    ("epsilon", "mu"),
    [
        (0.5, 0.14221056),
        (1, 0.26805112),
        (3, 0.71911744),
        (5, 1.12124182),
        (10, 2.00044562),
        (20, 3.44778345),
        (40, 5.71905893),
    ],
)
def test_mu_matches_the_reference_table(epsilon: float, mu: float) -> None:
    assert gaussian.mu_from(epsilon, 1e-5) == pytest.approx(mu, abs=6e-9)


@given(epsilon=epsilons, delta=deltas)
@example(0.01, 0.1)
@example(100.0, 1e-12)
@settings(max_examples=300)
def test_round_trip_is_close_and_never_above_the_target(epsilon: float, delta: float) -> None:
    mu = gaussian.mu_from(epsilon, delta)
    assert gaussian.delta_from(mu, epsilon) <= delta
    back = gaussian.epsilon_from(mu, delta)
    assert epsilon * (1 - 1e-8) <= back <= epsilon


@given(mu=mus, delta=deltas)
def test_epsilon_ends_on_the_private_side(mu: float, delta: float) -> None:
    epsilon = gaussian.epsilon_from(mu, delta)
    assert gaussian.delta_from(mu, epsilon) <= delta
    if epsilon > 0:
        assert gaussian.delta_from(mu, epsilon * (1 - 1e-6)) > delta


@given(mu=mus, delta=deltas, factor=st.floats(1.001, 3))
def test_epsilon_rises_with_mu_and_falls_with_delta(mu: float, delta: float, factor: float) -> None:
    epsilon = gaussian.epsilon_from(mu, delta)
    assert gaussian.epsilon_from(mu * factor, delta) >= epsilon
    assert gaussian.epsilon_from(mu, delta * factor) <= epsilon


@pytest.mark.parametrize(
    ("mu", "epsilon", "delta"),
    [
        (0.0, 0.0, 0.0),
        (0.0, 5.0, 0.0),
        (0.0, math.inf, 0.0),
        (1.0, math.inf, 0.0),
        (1e-320, 1.0, 0.0),
        (1e-3, 1e6, 0.0),
        (math.inf, 5.0, 1.0),
        (1e200, 5.0, 1.0),
        (1e3, 1.0, 1.0),
    ],
)
def test_delta_at_the_ends_of_its_range(mu: float, epsilon: float, delta: float) -> None:
    assert gaussian.delta_from(mu, epsilon) == delta


@pytest.mark.parametrize(
    ("mu", "epsilon"),
    [
        (17.053893293997323, 0.001160833203391322),
        (16.795251820440182, 0.01316138591573045),
        (16.638557247965412, 0.05973647652384355),
        (18.098794243169962, 10.23335791259291),
    ],
)
def test_delta_is_never_above_one(mu: float, epsilon: float) -> None:
    # Where δ rounds to 1, the product of a tiny density and a huge erfcx went past it.
    assert gaussian.delta_from(mu, epsilon) == 1.0


def test_delta_of_a_tiny_mu_keeps_its_digits() -> None:
    assert gaussian.delta_from(1e-15, 0.0) == pytest.approx(
        1e-15 / math.sqrt(2 * math.pi), rel=1e-12
    )


@pytest.mark.parametrize(
    ("mu", "delta", "epsilon"),
    [
        (0.0, 0.0, 0.0),
        (0.0, 1e-5, 0.0),
        (1.0, 1.0, 0.0),
        (1.0, 0.5, 0.0),
        (1.0, 0.0, math.inf),
        (math.inf, 1e-5, math.inf),
        (1e200, 1e-5, math.inf),
    ],
)
def test_epsilon_at_the_ends_of_its_range(mu: float, delta: float, epsilon: float) -> None:
    assert gaussian.epsilon_from(mu, delta) == epsilon


@pytest.mark.parametrize(
    ("epsilon", "delta", "mu"),
    [(0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 1.0, math.inf), (math.inf, 1e-5, math.inf)],
)
def test_mu_at_the_ends_of_its_range(epsilon: float, delta: float, mu: float) -> None:
    assert gaussian.mu_from(epsilon, delta) == mu


@pytest.mark.parametrize("epsilon", [0.0, 1e-8, 1e4, 1e8, 1e300])
@pytest.mark.parametrize("delta", [1e-300, 1e-12, 0.1, 0.999])
def test_extreme_budgets_stay_finite_and_private(epsilon: float, delta: float) -> None:
    mu = gaussian.mu_from(epsilon, delta)
    assert 0 < mu < math.inf
    assert gaussian.delta_from(mu, epsilon) <= delta
    assert gaussian.epsilon_from(mu, delta) <= epsilon


@given(mu=mus, rate=st.floats(0, 1))
def test_tradeoff_is_above_the_lines_of_all_epsilon_delta(mu: float, rate: float) -> None:
    # Every (ε, δ) is a pair of lines below f (Dong, Roth and Su, Prop. 2.12).
    error = float(ndtr(-ndtri(rate) - mu))
    for epsilon in np.linspace(0, 20, 9):
        delta = gaussian.delta_from(mu, float(epsilon))
        assert 1 - delta - math.exp(epsilon) * rate <= error + 1e-12
        assert math.exp(-epsilon) * (1 - delta - rate) <= error + 1e-12


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_bad_arguments_are_named(bad: float) -> None:
    with pytest.raises(InvalidArgumentError, match=f"mu must be at least 0, found {bad}"):
        gaussian.delta_from(bad, 1.0)
    with pytest.raises(InvalidArgumentError, match="epsilon must be at least 0"):
        gaussian.delta_from(1.0, bad)
    with pytest.raises(InvalidArgumentError):
        gaussian.epsilon_from(1.0, bad)
