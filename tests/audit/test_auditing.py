"""Audits of correct plans: tight where they should be, and rarely an alarm."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom

from corn.audit import View, audit_plan
from corn.audit.checks import check_keys, check_noise
from corn.audit.run import AuditedRun
from corn.errors import InvalidArgumentError
from corn.plan import make_plan
from corn.privacy import PrivacyBudget
from corn.topology import Mixing, load_network
from tests.audit.plans import agent_plan, sample_plan

GRAPH = "er:n=12,p=0.4,seed=1"


@pytest.mark.parametrize("insiders", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_correct_code_is_tight(insiders: int) -> None:
    plan = agent_plan(insiders, graph=GRAPH)
    report = audit_plan(plan)
    assert not report.violated, report.problems
    assert {one.verdict for one in report.findings} == {"tight"}
    for one in report.findings:
        assert len(one.view.coalition) == insiders
        assert 0.97 < one.mu.estimate / one.exact_mu < 1.03
        assert one.certified_epsilon <= one.promise.epsilon


def test_one_global_seed_is_broken_by_one_insider() -> None:
    report = audit_plan(agent_plan(0, "global", graph=GRAPH), view=View((3,)))
    assert {one.verdict for one in report.findings} == {"violated"}
    assert not any(one.is_promised for one in report.findings)
    # Without any assumption about scores: more than the whole promise was seen.
    assert all(len(one.excess) == 4 for one in report.findings)


MECHANISMS: dict[str, dict[str, Any]] = {
    "ldp": {"mechanism": "ldp"},
    "decor": {"mechanism": "decor", "colluders": 0},
    "zero-sum": {"mechanism": "zero-sum", "colluders": 0},
    "corn global": {"seeds": "global", "colluders": 0},
    "corn groups": {"seeds": "groups:2", "colluders": 0},
    "corn edges": {"seeds": "edges"},
    "corn pairs": {"seeds": "pairs"},
    "corn sparse": {"seeds": "sparse:1"},
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_and_arrangement_of_seeds(name: str) -> None:
    plan = agent_plan(**MECHANISMS[name])
    report = audit_plan(plan, num_trials=2000)
    assert not report.violated, (report.problems, [one.excess for one in report.findings])
    for one in report.findings:
        assert abs(one.mu.estimate / one.exact_mu - 1) < 0.1


@pytest.mark.parametrize(
    ("sampling", "adjacency", "mixing"),
    [
        pytest.param("poisson", "replace", "gossip", marks=pytest.mark.slow),
        ("poisson", "add-remove", "gossip"),
        ("passes", "replace", "gossip"),
        ("passes", "add-remove", "gossip"),
        ("every-step", "replace", "gossip"),
        ("poisson", "add-remove", "sum"),
        ("passes", "replace", "sum"),
    ],
)
def test_every_sampling(sampling: str, adjacency: str, mixing: Mixing) -> None:
    plan = sample_plan(sampling, adjacency, mixing=mixing)
    report = audit_plan(plan, victims=[1], through="step", num_trials=1000, num_releases=8, seed=1)
    assert not report.violated, (report.problems, [one.excess for one in report.findings])
    assert abs(report.findings[0].mu.estimate / report.findings[0].exact_mu - 1) < 0.15
    assert report.findings[0].verdict == "tight"


def test_agents_with_different_promises_are_compared_with_their_own() -> None:
    budget = PrivacyBudget((2, 8, 8, 8), 1e-5, num_steps=20, clip=0.1)
    plan = make_plan(load_network("ring:4", mixing="gossip"), budget)
    report = audit_plan(plan, num_trials=2000)
    assert not report.violated
    assert {one.victim: one.promise.epsilon for one in report.findings} == {0: 2, 1: 8, 2: 8, 3: 8}
    assert {one.verdict for one in report.findings} == {"tight"}


def test_a_seed_repeats_an_audit() -> None:
    first, second = (audit_plan(agent_plan(), num_trials=300, seed=5) for _ in range(2))
    assert [one.mu for one in first.findings] == [one.mu for one in second.findings]
    other = audit_plan(agent_plan(), num_trials=300, seed=6)
    assert first.findings[0].mu != other.findings[0].mu


@pytest.mark.slow
@pytest.mark.parametrize("mixing", ["gossip", "sum"])
def test_false_alarms_are_as_rare_as_the_confidence_says(mixing: Mixing) -> None:
    """Audits of correct code at 90 %, in which the promise is tight."""
    plan, alarms = agent_plan(graph="complete:3", mixing=mixing), 0
    for seed in range(150):
        alarms += audit_plan(
            plan, victims=[0], confidence=0.9, num_trials=200, num_releases=2, seed=seed
        ).violated
    # Tests share the level (Bonferroni), so that 10 % is the most, not the mean.
    assert alarms <= binom.isf(1e-3, 150, 0.1)


def test_the_check_of_noise_has_its_level() -> None:
    generator = np.random.default_rng(0)
    R = np.array([[2.0, -1.0], [-1.0, 2.0]])
    root = np.linalg.cholesky(R)
    alarms = sum(
        bool(check_noise(root @ generator.standard_normal((3, 2, 200)), R, alpha=0.1))
        for _ in range(1000)
    )
    assert 30 < alarms <= binom.isf(1e-3, 1000, 0.1)


@pytest.mark.parametrize("mixing", ["gossip", "sum"])
def test_messages_follow_from_keys_in_two_ways(mixing: Mixing) -> None:
    """Shares of pairs come from keys that only the two of them can derive."""
    plan = agent_plan(mixing=mixing)
    run = AuditedRun(plan, 2, 50, seed=1)
    assert check_keys(run) == []
    gradients = torch.linspace(-0.1, 0.1, 50)
    for agent in range(plan.num_agents):
        found = run.send(gradients, 1, agent)
        np.testing.assert_array_equal(found, run.recompute(gradients, 1, agent))
    noise = run.draw_known(View(tuple(range(plan.num_agents))))
    assert np.abs(run.released - noise).max() <= plan.grid * (0.5 if mixing == "gossip" else 1.5)
    assert not np.allclose(run.draw_known(View((2,)))[:, 0], noise[:, 0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"victims": []}, "victims must be at least one agent"),
        ({"view": View(), "victims": [9]}, "victim must be one of 5 agents"),
        ({"victims": [9]}, "victim must be one of 5 agents"),
        ({"victims": [2], "view": View((2,))}, "victim must be one of 5 agents, outside"),
        ({"view": View((9,))}, "agents 0 … 4"),
        ({"num_trials": 10}, "trials must be"),
        ({"num_releases": 1}, "releases must be"),
        ({"confidence": 1.0}, "confidence must be"),
    ],
)
def test_impossible_audits_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        audit_plan(agent_plan(), **given)
