"""Releases on the grid: float64 errors and their effects stay within their bounds."""

import itertools
import math
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy.stats import norm

from corn import Plan, PrivacyBudget, load_network, make_plan
from corn.covariance import ThreatModel
from corn.covariance.decomposition import Decomposition
from corn.errors import InfeasibleError, InvalidArgumentError
from corn.noise import Owner, SecureSource, StreamAddress, draw_share, simulated_keys
from corn.noise.masks import (
    VARIANCE_SHARE,
    _bound_errors,
    bound_loss,
    check_grid,
    choose_grid,
    count_parameters,
    require_provable,
)
from tests.noise.test_normals import exact_block

BUDGET = PrivacyBudget(1, 1e-5, num_steps=1000, clip=0.1)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(load_network("er:n=6,p=0.5,seed=2"), BUDGET)


def exact_share(decomposition: Decomposition, agent: int, source: Any, step: int) -> list[Any]:
    """Return the first block of an agent's noise in 300 bits, from the cipher's bytes alone."""
    weights = [(Owner((agent,)), 0, mpmath.sqrt(decomposition.private_variance[agent]))]
    groups = zip(decomposition.seed_groups, decomposition.factors, strict=True)
    for number, (group, factor) in enumerate(groups):
        if agent in group:
            row = factor[group.index(agent)]
            weights += [(Owner(group, number), k, mpmath.mpf(w)) for k, w in enumerate(row)]
    total = [mpmath.mpf(0)] * 1024
    for owner, stream, weight in weights:
        address = StreamAddress(owner, bytes(32), step, stream)
        data = source.start(address, 2112 * 4).update(bytes(2112 * 4))
        pairs = exact_block(np.frombuffer(data, dtype="<u4").tolist(), 0.5)
        values = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
        total = [have + weight * value for have, value in zip(total, values, strict=True)]
    return total


@pytest.mark.parametrize("agent", [0, 5])
def test_a_share_is_within_its_error_bound(agent: int, plan: Plan) -> None:
    parts = plan.decomposition
    source = SecureSource(simulated_keys(parts, seed=1))
    found = draw_share(parts, agent, source=source, nonce=bytes(32), step=3, stop=1024)
    with mpmath.workprec(300):
        exact = exact_share(parts, agent, source, 3)
        worst = max(float(abs(f - e)) for f, e in zip(found.tolist(), exact, strict=True))
    bound = _bound_errors(parts, BUDGET.clip)[agent]
    assert worst < bound / 4
    assert bound < 1e4 * worst  # not so wide that it says nothing


@pytest.mark.parametrize("ratio", [2.0**-3, 2.0**-6])
@pytest.mark.parametrize("error", [1e-4, 1e-6])
def test_cell_probabilities_are_within_the_ratio_for_worst_case_errors(
    ratio: float, error: float
) -> None:
    """One agent, σ = 1: the worst effect of errors of this size on the probability of a cell."""
    edges = np.arange(-24, 24, ratio)
    low, high = edges[:-1], edges[1:]
    # Exact differences of tails, on the side on which they do not cancel.
    flip = low + high > 0

    def probability(a: Any, b: Any) -> Any:
        return np.where(flip, norm.sf(a) - norm.sf(b), norm.cdf(b) - norm.cdf(a))

    exact = probability(low, high)
    bound = error * (2.01 / ratio + (24 + ratio + 1))
    for sign in (1, -1):
        moved = probability(low - sign * error, high + sign * error)
        assert np.abs(np.log(moved / exact)).max() <= bound


def test_cells_of_correlated_agents_are_within_the_ratio() -> None:
    """Two agents, by integration over stretched cells: the ratio is the sum over both."""
    R = np.array([[1.3, -0.7], [-0.7, 1.1]])
    Y = np.linalg.inv(R)
    cap, grid, error = Y.diagonal().max(), 0.125, 1e-4
    nodes, weights = np.polynomial.legendre.leggauss(12)

    def probability(centre: Any, half_width: float) -> float:
        points = centre[:, None] + half_width * nodes[None]
        x, y = np.meshgrid(points[0], points[1], indexing="ij")
        density = np.exp(-0.5 * (Y[0, 0] * x * x + 2 * Y[0, 1] * x * y + Y[1, 1] * y * y))
        return float(weights @ density @ weights) * half_width**2

    bound = 2 * error * (2.01 / grid + (24 + 2 * grid * math.sqrt(cap) + 1) * math.sqrt(cap))
    for centre in itertools.product(grid * np.arange(-40, 41, 8), repeat=2):
        at = np.array(centre)
        exact = probability(at, grid / 2)
        for half_width in (grid / 2 + error, grid / 2 - error):
            assert abs(math.log(probability(at, half_width) / exact)) <= bound


def test_the_grid_costs_next_to_no_accuracy(plan: Plan) -> None:
    R, n = plan.decomposition.covariance, plan.num_agents
    assert math.frexp(plan.grid)[0] == 0.5
    added = plan.grid**2 / 12 / n
    assert VARIANCE_SHARE / 4.1 < added / R.mean() <= VARIANCE_SHARE


def test_the_error_of_rounding_is_uniform_and_independent(plan: Plan) -> None:
    parts, grid = plan.decomposition, plan.grid
    source = SecureSource(simulated_keys(parts, seed=2))
    shares = [
        draw_share(parts, a, source=source, nonce=bytes(32), step=0, stop=200_000) for a in (0, 1)
    ]
    errors = [grid * np.rint((0.01 + v) / grid) - (0.01 + v) for v in shares]
    for own in errors:
        assert abs(own.mean()) < 4.5 * grid / math.sqrt(12 * 200_000)
        assert own.var() == pytest.approx(grid**2 / 12, rel=0.02)
    correlation = (errors[0] * errors[1]).mean() / (grid**2 / 12)
    assert abs(correlation) < 4.5 / math.sqrt(200_000)


def test_floating_point_takes_less_than_one_percent_at_usual_sizes() -> None:
    # Twenty agents, a thousand steps of a million parameters, ε = 1: the reserve covers it.
    large = make_plan(load_network("er:n=20,p=0.2,seed=1"), BUDGET, threat=ThreatModel(0, "global"))
    assert large.max_parameters > 10**6


def test_a_larger_model_is_refused_with_advice(plan: Plan) -> None:
    with pytest.raises(InfeasibleError, match="plan fewer steps or agents"):
        plan.check_parameters(plan.max_parameters + 1)
    plan.check_parameters(plan.max_parameters)


def test_too_fine_a_grid_proves_nothing(plan: Plan) -> None:
    at: Any = {"precision_caps": plan.precision_caps, "budget": BUDGET}
    coarse, fine = (
        count_parameters(bound_loss(plan.decomposition, grid, **at), BUDGET)
        for grid in (plan.grid, plan.grid * 2.0**-20)
    )
    assert fine < coarse / 2**30
    lost = bound_loss(plan.decomposition, 2.0**-60, **at)
    with pytest.raises(InfeasibleError, match="up to 0 parameters"):
        require_provable(lost, BUDGET, 1)


def test_the_grid_depends_on_the_covariance_alone() -> None:
    alone = Decomposition(np.full(4, 2.0))
    shared = Decomposition(np.zeros(4), ((0, 1, 2, 3),), (math.sqrt(2) * np.eye(4),))
    assert choose_grid(alone, np.full(4, 0.5)) == choose_grid(shared, np.full(4, 0.5))


@pytest.mark.parametrize("grid", [0.0, -1.0, 0.3, math.inf, math.nan])
def test_a_grid_is_a_power_of_two(grid: float) -> None:
    with pytest.raises(InvalidArgumentError, match="power of two"):
        check_grid(grid)


def test_large_batches_count_in_the_bound(plan: Plan) -> None:
    few, many = (
        PrivacyBudget(1, 1e-5, 100, 1.0, unit="sample", batch_size=10, sampling_rate=rate)
        for rate in (0.5, 1e-3)
    )
    small, large = (
        bound_loss(plan.decomposition, plan.grid, precision_caps=plan.precision_caps, budget=budget)
        for budget in (few, many)
    )
    assert small.log_ratio < large.log_ratio
