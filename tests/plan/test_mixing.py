"""Gossip and cool-down in plans: agents agree on them, and privacy does not depend on them."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from corn import PrivacyBudget, load_network
from corn.covariance import EAVESDROPPER, ThreatModel, design
from corn.plan import Plan, fingerprint, load_plan, make_plan, save_plan, verify_plan
from corn.privacy.floats import set_aside
from corn.topology import Gossip, choose_cooldown

BUDGET = PrivacyBudget(epsilon=3, delta=1e-5, num_steps=50, clip=1.0)
CHEBYSHEV = Gossip(3, "chebyshev")


@pytest.fixture(scope="module")
def plan() -> Plan:
    network = load_network("path:5", gossip=CHEBYSHEV, mixing="gossip")
    return make_plan(network, BUDGET, threat=EAVESDROPPER)


def test_the_file_has_gossip_and_cool_down(plan: Plan, tmp_path: Path) -> None:
    save_plan(plan, tmp_path / "plan.corn")
    loaded = load_plan(tmp_path / "plan.corn")
    assert loaded.network.gossip == CHEBYSHEV
    assert loaded.cooldown_steps == choose_cooldown(plan.network, 50) > 0
    num_messages = loaded.network.gossip.count_messages(50, plan.cooldown_steps)
    assert num_messages == 3 * (50 + plan.cooldown_steps)
    assert fingerprint(loaded) == fingerprint(plan)
    assert verify_plan(loaded).passed


def test_agents_with_other_rounds_have_another_plan(plan: Plan) -> None:
    others = [
        replace(plan, cooldown_steps=plan.cooldown_steps + 1),
        replace(plan, network=replace(plan.network, gossip=Gossip(3))),
    ]
    assert len({fingerprint(plan), *map(fingerprint, others)}) == 3


def test_the_noise_is_designed_for_the_rounds_of_a_step(plan: Plan) -> None:
    cap = set_aside(BUDGET).precision_cap
    step = plan.network.step_matrix
    expected = design(step, cap, objective=plan.objective, threat=EAVESDROPPER)
    np.testing.assert_allclose(plan.decomposition.covariance, expected.covariance, rtol=1e-6)
    assert plan.central_ratio == pytest.approx(expected.central_ratio, rel=1e-6)


def test_privacy_and_grid_do_not_depend_on_mixing(plan: Plan) -> None:
    """Mixing post-processes what was released: only claims about noise energy depend on it."""
    other = replace(plan, network=load_network("path:5", gossip=Gossip(7)), cooldown_steps=999)
    ours, theirs = verify_plan(plan), verify_plan(other)
    assert ours.guarantees == theirs.guarantees
    assert (other.max_parameters, other.float_loss) == (plan.max_parameters, plan.float_loss)
    assert all("noise energy" in problem or "bound" in problem for problem in theirs.problems)


@pytest.mark.parametrize(("agents", "colluders"), [(300, 1), (2500, 3)])
def test_files_of_exact_sums_grow_with_the_number_of_agents_alone(
    agents: int, colluders: int, tmp_path: Path
) -> None:
    network = load_network(f"ring:{agents}", mixing="sum")
    plan = make_plan(network, BUDGET, threat=ThreatModel(colluders))
    path = tmp_path / "plan.corn"
    save_plan(plan, path)
    # Sixteen masks, of which each is listed once for two agents, and two links.
    assert path.stat().st_size < 200 * agents + 5000
    loaded = load_plan(path)
    assert fingerprint(loaded) == fingerprint(plan)
    assert loaded.decomposition.seed_groups == plan.decomposition.seed_groups
    assert loaded.threat.seeds == "partners:16"
    assert verify_plan(loaded).passed


def test_weights_are_no_part_of_a_plan_of_exact_sums(tmp_path: Path) -> None:
    """Nobody mixes by them, so that agents with other weights have the same plan."""
    W = load_network("path:5").mixing_matrix
    plans = [
        make_plan(load_network(source, mixing="sum"), BUDGET) for source in (W, (W + np.eye(5)) / 2)
    ]
    assert fingerprint(plans[0]) == fingerprint(plans[1])
    save_plan(plans[1], tmp_path / "plan.corn")
    loaded = load_plan(tmp_path / "plan.corn")
    assert loaded.network.weights == "metropolis"
    np.testing.assert_array_equal(loaded.network.mixing_matrix, plans[0].network.mixing_matrix)


def test_seeds_that_sums_do_not_allow_are_found() -> None:
    plan = make_plan(load_network("ring:300", mixing="sum"), BUDGET)
    groups = plan.decomposition.seed_groups
    added = next(pair for pair in combinations(range(300), 2) if pair not in set(groups))
    other = replace(plan.decomposition, seed_groups=(*groups, added), factors=())
    problems = verify_plan(replace(plan, decomposition=other)).problems
    assert any("which seeds=partners:16 excludes" in problem for problem in problems)


@pytest.mark.slow
def test_twenty_thousand_agents_are_planned_and_verified(tmp_path: Path) -> None:
    """Of 100,000 agents, which ``benchmarks/scaling.py`` plans, it would take a minute."""
    network = load_network("er:n=20000,p=0.0008,seed=1", mixing="sum")
    plan = make_plan(network, BUDGET, threat=ThreatModel(3))
    save_plan(plan, tmp_path / "plan.corn")
    assert verify_plan(load_plan(tmp_path / "plan.corn")).passed
    assert plan.decomposition.most_masks == 16
    assert plan.central_ratio == pytest.approx(2e4 / (2e4 - 3), rel=1e-6)
