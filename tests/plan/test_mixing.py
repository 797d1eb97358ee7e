"""Gossip and cool-down in plans: agents agree on them, and privacy does not depend on them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from corn import PrivacyBudget, load_network
from corn.covariance import EAVESDROPPER, design
from corn.errors import InvalidArgumentError
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
    assert loaded.num_messages == 3 * (50 + plan.cooldown_steps)
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
    other = replace(
        plan, network=load_network("path:5", weights="lazy", gossip=Gossip(7)), cooldown_steps=999
    )
    ours, theirs = verify_plan(plan), verify_plan(other)
    assert ours.guarantees == theirs.guarantees
    assert (other.max_parameters, other.float_loss) == (plan.max_parameters, plan.float_loss)
    assert all("noise energy" in problem or "bound" in problem for problem in theirs.problems)


@pytest.mark.parametrize("steps", [-1, 10**7, 1.5])
def test_bad_cool_downs_are_refused(plan: Plan, steps: int) -> None:
    with pytest.raises(InvalidArgumentError, match="cooldown_steps"):
        replace(plan, cooldown_steps=steps)
