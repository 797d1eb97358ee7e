"""Advice without data: the model's plateau, its limits, its agreement with exact calibration."""

import math
from dataclasses import replace

import pytest
from scipy.optimize import minimize_scalar

from corn.covariance import ThreatModel
from corn.errors import InfeasibleError, InvalidArgumentError
from corn.plan.advice import (
    TrainingScale,
    bound_gradient_variance,
    expect,
    expect_step_size,
    list_prospects,
    propose,
)
from corn.topology import load_network

SCALE = TrainingScale(20, 2800, 7850, epsilon=1, delta=1e-5)


def bound(step_size: float, num_steps: int, chance: float, distance: float = 3.0) -> float:
    """Return the bound on the loss of SGD that step sizes are chosen by."""
    return distance**2 / (2 * step_size * num_steps) + step_size * chance / 2


@pytest.mark.parametrize("noise_variance", [0.0, 1e-5, 1e-2])
def test_the_step_size_minimises_the_bound(noise_variance: float) -> None:
    gradient_variance = bound_gradient_variance(1.0, 20, 128)
    chance = gradient_variance + 7850 * noise_variance
    found = expect_step_size(num_steps=300, clip=1.0, randomness=chance)
    best = minimize_scalar(
        lambda log: bound(math.exp(log), 300, chance), bounds=(-12, math.log(3)), method="bounded"
    )
    assert bound(found, 300, chance) == pytest.approx(best.fun, rel=1e-4)
    assert found <= 3.0


def test_the_central_limit_is_near_the_exact_cap() -> None:
    """Prospects of little noise per step are left out: there the limit would be wrong."""
    for prospect in list_prospects(SCALE, central_ratio=1.0)[::9]:
        budget = SCALE.make_budget(prospect.batch_size, prospect.num_steps)
        exact = expect(
            SCALE,
            prospect.batch_size,
            prospect.num_steps,
            precision_cap=budget.precision_cap,
            central_ratio=1.0,
        )
        assert prospect.excess == pytest.approx(exact.excess, rel=0.1)


def test_more_steps_and_larger_rates_stop_paying() -> None:
    prospects = list_prospects(SCALE, central_ratio=1.2)
    excess = {(own.num_steps, own.batch_size): own.excess for own in prospects}
    for (steps, size), value in excess.items():
        for more in ((steps, 2 * size), (10 * steps, size)):
            assert excess.get(more, 0.0) <= value
    # The plateau, which depends on neither rate nor steps.
    mu = 0.26805112
    plateau = 3.0 * math.sqrt(4 * 7850 * 1.2) / (mu * 20 * 2800)
    assert min(excess.values()) == pytest.approx(plateau, rel=0.01)


def test_twice_the_data_halves_the_excess() -> None:
    """In the plateau, samples, agents and ε count alike; four times the parameters doubles it."""
    base = min(own.excess for own in list_prospects(SCALE, central_ratio=1.0))
    changes = [({"samples": 5600}, 0.5), ({"num_agents": 40}, 0.5), ({"num_parameters": 31400}, 2)]
    for change, factor in changes:
        other = list_prospects(replace(SCALE, **change), central_ratio=1.0)  # type: ignore[arg-type]
        assert min(own.excess for own in other) == pytest.approx(factor * base, rel=0.02)


def test_a_proposal_keeps_its_promise() -> None:
    network = load_network("ring:6")
    scale = TrainingScale(6, 500, 50, epsilon=1, delta=1e-5)
    proposal = propose(network, scale, threat=ThreatModel(1))
    assert proposal.budget.batch_size == proposal.prospect.batch_size
    assert proposal.budget.sampling == "poisson"
    assert proposal.central_ratio == pytest.approx(6 / 5)
    chosen, best = proposal.prospect, min(own.excess for own in proposal.prospects)
    assert chosen.excess <= 1.11 * best
    cheaper = [
        own
        for own in proposal.prospects
        if own.batch_size * own.num_steps < chosen.batch_size * chosen.num_steps
    ]
    assert all(own.excess > 1.1 * best for own in cheaper)
    by_agent = propose(network, replace(scale, unit="agent", clip=0.1), threat=ThreatModel(0))
    assert by_agent.budget.batch_size is None
    gossip = propose(load_network("ring:6", mixing="gossip"), scale, threat=ThreatModel(1))
    assert gossip.central_ratio > proposal.central_ratio


def test_bad_scales_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="epsilon must be positive"):
        replace(SCALE, epsilon=0)
    with pytest.raises(InvalidArgumentError, match="samples"):
        replace(SCALE, samples=0)
    with pytest.raises(InfeasibleError, match="too large for advice"):
        list_prospects(replace(SCALE, epsilon=1e6), central_ratio=1.0)
