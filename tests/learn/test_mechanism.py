"""Mechanisms: noise that keeps its budget, against the adversary that is named."""

import numpy as np
import pytest

from corn.covariance import (
    DEFAULT_THREAT,
    EAVESDROPPER,
    Decomposition,
    Horizon,
    ThreatModel,
    design,
)
from corn.errors import InvalidArgumentError
from corn.learn import Mechanism, make_mechanisms
from corn.privacy import ClippedQuery, PrivacyBudget
from corn.topology import load_network

from .problems import BUDGET, NETWORK, SAMPLE_BUDGET, make_mechanism


def test_central_noise_is_accounted_like_an_agent_at_the_cap() -> None:
    budget = PrivacyBudget(10, 1e-5, num_steps=40, clip=0.5)
    spent = Mechanism.central(budget, 6).epsilon_spent(40)
    assert spent is not None
    np.testing.assert_allclose(spent, 10, rtol=1e-6)


def test_noise_that_does_not_keep_the_budget_is_refused() -> None:
    with pytest.raises(InvalidArgumentError):
        Mechanism.private("weak", Decomposition(np.ones(6)), BUDGET)
    factor = 3e4 * (np.eye(6) - 1 / 6)
    zero_sum = Decomposition(np.zeros(6), (tuple(range(6)),), (factor,))
    with pytest.raises(InvalidArgumentError):
        Mechanism.private("zero-sum", zero_sum, BUDGET)


def test_clipping_must_match_the_budget() -> None:
    """Samples clipped one by one give no privacy to an agent, nor does noise of another unit."""
    shares = make_mechanism("ldp").noise
    for queries in (SAMPLE_BUDGET.queries, (ClippedQuery(0.6),), ()):
        with pytest.raises(InvalidArgumentError, match="must clip as its budget states"):
            Mechanism("wrong", shares, queries, BUDGET)
    with pytest.raises(InvalidArgumentError, match="both noise and the budget"):
        Mechanism("wrong", shares, BUDGET.queries)
    with pytest.raises(InvalidArgumentError, match="has no guarantee"):
        Mechanism.private("none", design(NETWORK, BUDGET, mechanism="none"), BUDGET)


def test_noise_for_an_eavesdropper_is_refused_against_insiders() -> None:
    network = load_network("ring:4", mixing="gossip")
    made = design(network, BUDGET, objective=Horizon(5), threat=EAVESDROPPER)
    with pytest.raises(InvalidArgumentError):
        Mechanism.private("corn", made, BUDGET, threat=ThreatModel(1))


def test_methods_by_name() -> None:
    network = load_network("ring:4", mixing="gossip")
    names = ["corn", "central", "none", "unclipped"]
    found = make_mechanisms(names, network, BUDGET, objective=Horizon())
    assert [mechanism.name for mechanism in found] == names
    assert [mechanism.clip for mechanism in found] == [0.5, 0.5, 0.5, float("inf")]
    with pytest.raises(InvalidArgumentError, match="one of corn"):
        make_mechanisms(["magic"], network, BUDGET, objective=Horizon())


def test_mechanisms_with_seeds_of_their_own_hold_against_an_eavesdropper_only() -> None:
    names = ["corn", "ldp", "decor", "zero-sum"]
    mechanisms = make_mechanisms(names, NETWORK, BUDGET, objective=Horizon(5))
    insider, outsider = DEFAULT_THREAT.describe(), EAVESDROPPER.describe()
    assert [mechanism.against for mechanism in mechanisms] == [insider, insider, outsider, outsider]


@pytest.mark.slow
def test_designs_of_large_networks_are_trained() -> None:
    """On a large network the independent check of [R⁻¹]_ii rounds up by more than the solver."""
    budget = PrivacyBudget(10, 1e-5, num_steps=100, clip=0.1)
    network = load_network("torus:20x20", mixing="gossip")
    mechanisms = make_mechanisms(
        ["corn", "decor"], network, budget, objective=Horizon(20), threat=EAVESDROPPER
    )
    for own in mechanisms:
        assert budget.precision_cap * (1 - 1e-6) < own.precision.max() <= budget.precision_cap


@pytest.mark.parametrize("name", ["corn", "decor", "ldp", "zero-sum", "central"])
def test_every_agent_spends_at_most_its_own_promise(name: str) -> None:
    epsilons = np.array([0.5, *[4.0] * (NETWORK.num_agents - 1)])
    budget = PrivacyBudget(tuple(epsilons), 1e-5, num_steps=40, clip=0.5)
    (mechanism,) = make_mechanisms([name], NETWORK, budget, objective=Horizon(10))
    spent = mechanism.epsilon_spent(40)
    assert spent is not None
    assert (spent <= epsilons * (1 + 1e-6)).all()
    assert spent[0] == pytest.approx(0.5, rel=1e-3)
    assert mechanism.central_ratio is not None
    assert mechanism.central_ratio >= 1 - 1e-9
    if name == "central":
        assert mechanism.central_ratio == pytest.approx(1)
    # Noise for one agent's promise is refused for another's.
    turned = PrivacyBudget(tuple(epsilons[::-1]), 1e-5, num_steps=40, clip=0.5)
    if name in ("corn", "ldp"):
        with pytest.raises(InvalidArgumentError, match=rf"agent {len(epsilons) - 1} is"):
            Mechanism.private(name, mechanism.noise, turned, threat=mechanism.threat)  # type: ignore[arg-type]
