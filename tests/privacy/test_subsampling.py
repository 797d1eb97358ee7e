"""Poisson sampling: the worst pair, the grid, and the search."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import ndtr

from corn.errors import InfeasibleError, InvalidArgumentError
from corn.privacy import (
    Adjacency,
    ClippedQuery,
    PrivacyBudget,
    account,
    account_precision,
    gaussian,
    subsampling,
)
from tests.oracles import loss_distribution


def sample_query(rate: float, adjacency: Adjacency = "replace") -> ClippedQuery:
    return ClippedQuery(0.1, unit="sample", adjacency=adjacency, batch_size=50, sampling_rate=rate)


def one_step_delta(noise: float, rate: float, epsilon: float, adjacency: Adjacency) -> float:
    """Return the hockey-stick divergence of one step: the best half-space in either direction."""
    ends = [(1.0, -1.0)] if adjacency == "replace" else [(1.0, 0.0), (0.0, 1.0)]

    def tail(threshold: Any, shift: float, side: float) -> Any:
        present = ndtr(-side * (threshold - shift) / noise)
        absent = ndtr(-side * threshold / noise)
        return rate * present + (1 - rate) * absent

    def gain(threshold: Any, here: float, there: float, side: float) -> Any:
        return tail(threshold, here, side) - math.exp(epsilon) * tail(threshold, there, side)

    best = 0.0
    for here, there in ends:
        side = 1.0 if here > there else -1.0
        grid = np.linspace(-12 * noise, 12 * noise, 2001)
        start = grid[np.argmax(gain(grid, here, there, side))]
        found = minimize_scalar(
            lambda t, a=here, b=there, s=side: -gain(t, a, b, s),
            bounds=(start - 0.02 * noise, start + 0.02 * noise),
            method="bounded",
            options={"xatol": 1e-12},
        )
        best = max(best, -float(found.fun))
    return best


@pytest.mark.parametrize("adjacency", ["replace", "add-remove"])
@pytest.mark.parametrize(("noise", "rate", "epsilon"), [(1.0, 0.1, 0.5), (0.7, 0.5, 1.0)])
def test_one_step_agrees_with_a_search_over_events(
    adjacency: Adjacency, noise: float, rate: float, epsilon: float
) -> None:
    query = sample_query(rate, adjacency)
    precision = 1 / (query.contribution * noise) ** 2
    found = subsampling.repeat_steps(precision, 1, query).delta(epsilon)
    exact = one_step_delta(noise, rate, epsilon, adjacency)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 1e-4)


def test_many_steps_and_a_small_delta_stay_on_the_private_side() -> None:
    """Rounding in the composition lowers δ; for a sampling rate next to 1 the exact ε is known."""
    query, num_steps, delta = sample_query(1 - 1e-13, "add-remove"), 10_000, 2e-11
    mu = gaussian.mu_from(1, delta)
    precision = mu * mu / num_steps / query.sensitivity**2
    assert subsampling.repeat_steps(precision, num_steps, query).epsilon(delta) >= 1
    with pytest.raises(InvalidArgumentError, match=r"delta must be in \[1e-08, "):
        subsampling.require_meaningful(1e-9, num_steps=10**6, query=query)


@pytest.mark.parametrize("adjacency", ["replace", "add-remove"])
def test_sampling_nearly_everyone_is_the_gaussian_mechanism(adjacency: Adjacency) -> None:
    query = sample_query(1 - 1e-9, adjacency)
    precision = 1.0 / (query.sensitivity**2 * 20)
    found = subsampling.repeat_steps(precision, 20, query).epsilon(1e-5)
    exact = gaussian.epsilon_from(1.0, 1e-5)
    assert exact <= found <= exact * (1 + 1e-3)


def test_agrees_with_the_accountant_of_dp_accounting() -> None:
    accounting = pytest.importorskip("dp_accounting")
    pld = pytest.importorskip("dp_accounting.pld")
    query = sample_query(0.02, "add-remove")
    event = accounting.PoissonSampledDpEvent(0.02, accounting.GaussianDpEvent(1.1))
    theirs = pld.PLDAccountant().compose(event, 2000).get_epsilon(1e-5)
    precision = 1 / (query.contribution * 1.1) ** 2
    ours = subsampling.repeat_steps(precision, 2000, query).epsilon(1e-5)
    assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("adjacency", ["replace", "add-remove"])
@pytest.mark.parametrize(("epsilon", "rate", "steps"), [(2.0, 0.05, 500), (0.2, 0.01, 3000)])
def test_the_search_ends_close_below_its_target(
    adjacency: Adjacency, epsilon: float, rate: float, steps: int
) -> None:
    sample: dict[str, Any] = {"unit": "sample", "batch_size": 50, "sampling_rate": rate}
    budget = PrivacyBudget(epsilon, 1e-5, steps, clip=0.1, adjacency=adjacency, **sample)
    loss = account_precision([budget.precision_cap], budget.query, num_steps=steps)
    assert epsilon * (1 - 2e-4) <= loss.worst_epsilon(1e-5) <= epsilon
    assert loss.delta(epsilon).max() <= 1e-5


@pytest.mark.slow
@settings(max_examples=8, derandomize=True)
@given(
    epsilon=st.floats(-1.3, 1.0).map(lambda power: 10**power),
    delta=st.floats(-8, -4).map(lambda power: 10**power),
    rate=st.floats(-3, -0.05).map(lambda power: 10**power),
    steps=st.floats(1, 5).map(lambda power: round(10**power)),
    adjacency=st.sampled_from(["replace", "add-remove"]),
)
def test_every_search_ends_at_or_below_its_target(
    epsilon: float, delta: float, rate: float, steps: int, adjacency: Adjacency
) -> None:
    query = ClippedQuery(1.0, unit="sample", adjacency=adjacency, batch_size=8, sampling_rate=rate)
    found = subsampling.calibrate_precision(epsilon, delta, num_steps=steps, query=query)
    loss = account_precision([found], query, num_steps=steps)
    assert epsilon * (1 - 1e-3) <= loss.worst_epsilon(delta) <= epsilon


def test_a_coarser_grid_overstates_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    query, spent = sample_query(0.05), []
    for discretisation in (0.01, 0.1, 0.5):
        monkeypatch.setattr(subsampling, "DISCRETISATION", discretisation)
        subsampling.compose_phases.cache_clear()
        spent.append(subsampling.repeat_steps(1e5, 500, query).epsilon(1e-5))
    subsampling.compose_phases.cache_clear()
    assert spent[0] <= spent[1] <= spent[2] <= spent[0] * 1.1


def test_a_target_that_no_noise_reaches_is_infeasible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subsampling.Releases, "epsilon", lambda *_: math.inf)
    with pytest.raises(InfeasibleError):
        subsampling.calibrate_precision(1.0, 1e-5, num_steps=100, query=sample_query(0.05))


@pytest.mark.parametrize("adjacency", ["replace", "add-remove"])
@pytest.mark.parametrize(("epsilon", "rate", "steps"), [(1.0, 0.05, 500), (1.0, 0.001, 10_000)])
def test_calibration_evaluates_the_bound_once(
    monkeypatch: pytest.MonkeyPatch, adjacency: Adjacency, epsilon: float, rate: float, steps: int
) -> None:
    evaluations = []
    bound = subsampling.Releases.epsilon

    def count(releases: subsampling.Releases, delta: float) -> float:
        evaluations.append(releases)
        return bound(releases, delta)

    monkeypatch.setattr(subsampling.Releases, "epsilon", count)
    query = ClippedQuery(1.0, unit="sample", adjacency=adjacency, batch_size=10, sampling_rate=rate)
    found = subsampling.calibrate_precision(epsilon, 1e-5, num_steps=steps, query=query)
    assert len(evaluations) == 1
    spent = bound(subsampling.repeat_steps(found, steps, query), 1e-5)
    assert epsilon * (1 - 6e-4) <= spent <= epsilon


def test_epsilon_is_per_agent_and_worst_is_their_maximum() -> None:
    loss = account(np.diag([1e-5, 2e-5, 1e-5]), sample_query(0.05), num_steps=200)
    epsilons = loss.epsilon(1e-5)
    assert epsilons[0] == epsilons[2] > epsilons[1] > 0
    assert loss.worst_epsilon(1e-5) == epsilons[0]
    assert loss.delta(0.0)[0] > loss.delta(1.0)[0] > loss.delta(5.0)[0]


def test_steps_without_a_shift_are_free_and_too_many_are_refused() -> None:
    query = sample_query(0.05)
    assert account_precision([0.0], query, num_steps=5).worst_epsilon(1e-5) == 0
    with pytest.raises(InvalidArgumentError):
        account_precision([1e5], query, num_steps=10**9).worst_epsilon(1e-5)


def test_agents_without_noise_are_exposed_at_any_sampling_rate() -> None:
    loss = account(np.eye(2) - 0.5, sample_query(0.05), num_steps=10)
    assert np.isinf(loss.epsilon(1e-5)).all()
    assert (loss.delta(3.0) == 1).all()


def test_a_subsampled_loss_has_no_mu_and_one_accountant() -> None:
    loss = account_precision([1e5], sample_query(0.05), num_steps=10)
    with pytest.raises(InvalidArgumentError):
        _ = loss.mu
    with pytest.raises(InvalidArgumentError):
        loss.epsilon(1e-5, accounting="rdp")
    query = ClippedQuery(0.1, unit="sample", batch_size=50, sampling="every-step")
    with pytest.raises(InvalidArgumentError):
        subsampling.calibrate_precision(1.0, 1e-5, num_steps=10, query=query)


def directions(adjacency: Adjacency) -> tuple[loss_distribution.Direction, ...]:
    return ("replace",) if adjacency == "replace" else ("remove", "add")


@pytest.mark.parametrize("adjacency", ["replace", "add-remove"])
@pytest.mark.parametrize(
    ("shift", "rate", "epsilon"), [(1.0, 0.02, 0.1), (0.5, 0.4, 1.0), (2.0, 0.9, 6.0)]
)
def test_two_steps_agree_with_an_integral(
    adjacency: Adjacency, shift: float, rate: float, epsilon: float
) -> None:
    query = sample_query(rate, adjacency)
    precision = (shift / query.contribution) ** 2
    found = subsampling.repeat_steps(precision, 2, query).delta(epsilon)
    exact = max(
        loss_distribution.two_steps_delta(epsilon, shift, rate, way)
        for way in directions(adjacency)
    )
    assert exact * (1 - 1e-12) <= found <= exact * (1 + 2e-3) + 1e-14


def measure_lost(
    query: ClippedQuery, shift: float, num_steps: int
) -> Iterator[tuple[float, float]]:
    """Yield δ at several ε and what floats take from it, against wider floats on the same grid.

    The mass that composition adds for truncated tails is left out.
    """
    rate, adjacency, interval = query.sampling_rate or 1.0, query.adjacency, 0.04 * shift
    step = subsampling.make_step(shift, rate, adjacency, interval=interval)
    total = subsampling.compose_phases(((shift, rate, num_steps),), adjacency, interval=interval)
    for way in directions(adjacency):
        side = "_pmf_add" if way == "add" else "_pmf_remove"
        one, found = (getattr(losses, side).to_dense_pmf() for losses in (step, total))
        exact, infinite = loss_distribution.compose_on_grid(
            one._lower_loss,
            one.size,
            interval,
            shift=shift,
            rate=rate,
            direction=way,
            num_steps=num_steps,
            window=(found._lower_loss, found._lower_loss + found.size - 1),
        )
        grid = (np.arange(found.size) + found._lower_loss).astype(np.longdouble)
        losses = grid * np.longdouble(interval)
        added = found._infinity_mass - float(infinite)
        for epsilon in np.linspace(0, float(losses[-1]), 20)[:-1]:
            kept = losses > epsilon
            true = infinite + (-np.expm1(epsilon - losses[kept]) * exact[kept]).sum()
            yield float(true), float(true) - found.get_delta_for_epsilon(epsilon) + added


@pytest.mark.skipif(
    bool(np.finfo(np.longdouble).eps > 1e-18), reason="needs floats wider than 64 bits"
)
@pytest.mark.parametrize("adjacency", ["replace", "add-remove"])
@pytest.mark.parametrize("rate", [0.01, 0.3, 0.95])
def test_composition_loses_a_tenth_of_what_is_allowed_for(
    adjacency: Adjacency, rate: float
) -> None:
    most = 0.0
    for num_steps, shift in ((1, 0.8), (20, 1.0), (200, 0.4), (50_000, 0.1)):
        for delta, lost in measure_lost(sample_query(rate, adjacency), shift, num_steps):
            # A few roundings do not depend on the number of steps.
            assert lost <= subsampling.allow_for_rounding(delta, num_steps) / 10 + 1e-15
            most = max(most, lost)
    # Something is lost, so that an allowance is needed.
    assert most > 0
