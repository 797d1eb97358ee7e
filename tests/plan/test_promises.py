"""Plans with a promise for each agent: made, saved, verified and refused agent by agent."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corn.covariance import EAVESDROPPER, MechanismName, ThreatModel
from corn.errors import FileFormatError, InvalidArgumentError
from corn.noise.masks import bound_loss, choose_grid
from corn.plan import Plan, fingerprint, load_plan, make_plan, save_plan, verify_plan
from corn.privacy import PrivacyBudget, subsampling
from corn.privacy.floats import set_aside
from corn.topology import load_network

NETWORK = load_network("er:n=6,p=0.5,seed=2", mixing="gossip")
EPSILONS = (0.5, 2.0, 2.0, 8.0, 8.0, 2.0)
DELTAS = (1e-6, 1e-5, 1e-5, 1e-5, 1e-4, 1e-5)
BUDGET = PrivacyBudget(EPSILONS, DELTAS, num_steps=100, clip=0.1)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(NETWORK, BUDGET)


def test_every_agent_gets_what_it_was_promised(plan: Plan) -> None:
    found = verify_plan(plan)
    assert found.passed
    spent = np.array([guarantee.epsilon for guarantee in found.guarantees])
    assert (spent <= np.array(EPSILONS) * (1 + 1e-9)).all()
    # Those with a loose promise may be given more privacy: their noise cancels that of the others.
    assert spent[0] >= 0.999 * EPSILONS[0]
    assert found.central_ratio == plan.central_ratio >= 1
    assert found.gap < 0.01


def test_promises_survive_the_file_and_count_in_the_fingerprint(plan: Plan, tmp_path: Path) -> None:
    save_plan(plan, tmp_path / "plan.corn")
    loaded = load_plan(tmp_path / "plan.corn")
    assert loaded.budget == BUDGET
    assert fingerprint(loaded) == fingerprint(plan)
    np.testing.assert_array_equal(loaded.precision_caps, plan.precision_caps)
    other = dataclasses.replace(BUDGET, epsilon=(*EPSILONS[:-1], 2.5))
    assert fingerprint(dataclasses.replace(plan, budget=other)) != fingerprint(plan)


def test_a_stricter_promise_of_one_agent_is_refused_for_that_agent(plan: Plan) -> None:
    for agent, guarantee in enumerate(verify_plan(plan).guarantees):
        epsilons = list(EPSILONS)
        epsilons[agent] = 0.99 * guarantee.epsilon
        budget = dataclasses.replace(BUDGET, epsilon=tuple(epsilons))
        problems = verify_plan(dataclasses.replace(plan, budget=budget)).problems
        (problem,) = (text for text in problems if text.startswith(f"agent {agent} gets ε = "))
        assert float(problem.split()[5]) == pytest.approx(guarantee.epsilon, rel=0.01)
        assert not any(problem.startswith(f"agent {(agent + 1) % 6} ") for problem in problems)


def test_promises_must_be_as_many_as_agents(plan: Plan) -> None:
    fewer = dataclasses.replace(BUDGET, epsilon=EPSILONS[:5], delta=1e-5)
    with pytest.raises(InvalidArgumentError, match="promises must be 6, one for each agent"):
        dataclasses.replace(plan, budget=fewer)


def test_promises_belong_to_their_agents(plan: Plan) -> None:
    swapped = dataclasses.replace(BUDGET, epsilon=EPSILONS[::-1], delta=DELTAS[::-1])
    assert not verify_plan(dataclasses.replace(plan, budget=swapped)).passed


@pytest.mark.parametrize("mechanism", ["decor", "zero-sum", "ldp"])
def test_every_mechanism_keeps_every_promise(mechanism: MechanismName) -> None:
    made = make_plan(NETWORK, BUDGET, mechanism=mechanism, threat=EAVESDROPPER)
    assert verify_plan(made).passed
    if mechanism == "ldp":
        caps = set_aside(BUDGET).precision_caps(6)
        np.testing.assert_allclose(made.decomposition.private_variance * caps, 1, rtol=1e-9)
        assert made.central_ratio == pytest.approx(caps.min() * (1 / caps).sum(), rel=1e-9)


@pytest.mark.parametrize(
    "threat",
    [
        ThreatModel(0, "groups:2"),
        ThreatModel(0, "global"),
        ThreatModel(1, "edges"),
        ThreatModel(2, "pairs"),
    ],
)
def test_every_arrangement_of_seeds_keeps_every_promise(threat: ThreatModel) -> None:
    assert verify_plan(make_plan(NETWORK, BUDGET, threat=threat)).problems == ()


@pytest.mark.parametrize("difference", [-1e-3, 1e-3])
def test_sampled_promises_are_judged_by_their_epsilon(
    monkeypatch: pytest.MonkeyPatch, difference: float
) -> None:
    budget = PrivacyBudget(
        (0.5, 2, 2, 2), 1e-5, 100, 0.1, unit="sample", batch_size=8, sampling_rate=0.1
    )
    made = make_plan(load_network("ring:4", mixing="gossip"), budget)
    found = subsampling.calibrate_precision

    def calibrate(*args: Any, **options: Any) -> float:
        return (1 + difference) * found(*args, **options)

    monkeypatch.setattr(subsampling, "calibrate_precision", calibrate)
    again = dataclasses.replace(made, budget=dataclasses.replace(budget, num_steps=100))
    assert verify_plan(again).passed
    weaker = dataclasses.replace(
        again, decomposition=again.decomposition.rescale(np.sqrt([0.99, 1, 1, 1]))
    )
    assert verify_plan(weaker).problems[0].startswith("agent 0 gets ε")


def test_the_grid_is_fine_enough_for_the_loosest_agent(plan: Plan) -> None:
    caps = plan.precision_caps
    assert plan.grid <= 0.125 / np.sqrt(caps.max())
    assert choose_grid(plan.decomposition, caps) == plan.grid
    # One cap for all, the loosest, is a bound on the loss of floats that must not be exceeded.
    own = bound_loss(plan.decomposition, plan.grid, precision_caps=caps, budget=BUDGET)
    worst = np.full(6, caps.max())
    coarse = bound_loss(plan.decomposition, plan.grid, precision_caps=worst, budget=BUDGET)
    assert own.log_ratio < coarse.log_ratio
    assert own.failure == coarse.failure


def test_a_plan_too_large_for_memory_is_refused(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: object) -> None:
        raise MemoryError("unable to allocate 671 GiB")

    save_plan(plan, tmp_path / "plan.corn")
    monkeypatch.setattr("corn.plan.file._decode_weights", allocate)
    with pytest.raises(FileFormatError, match="not a valid plan: unable to allocate 671 GiB"):
        load_plan(tmp_path / "plan.corn")
