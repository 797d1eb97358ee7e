"""A plan that somebody else made cannot cost more than its size, and is refused before it does."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corn.covariance import Decomposition, ThreatModel
from corn.errors import CornWarning, FileFormatError, InfeasibleError, InvalidArgumentError
from corn.parsing import read_json
from corn.plan import Plan, file, load_plan, make_plan, save_plan, verify_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network

Content = dict[str, Any]


@pytest.fixture(scope="module")
def plan() -> Plan:
    budget = PrivacyBudget(3, 1e-5, num_steps=100, clip=0.1)
    return make_plan(
        load_network("ring:4", mixing="gossip"), budget, threat=ThreatModel(1, "pairs")
    )


def repeat_group(content: Content) -> None:
    parts = content["decomposition"]
    for name in ("seed_groups", "factors"):
        parts[name] = [parts[name][0], *parts[name]]


def list_many_groups(content: Content) -> None:
    content["decomposition"]["seed_groups"] = [[0, 1]] * 200_000


def list_many_seeds(content: Content) -> None:
    content["threat"]["seeds"] = [list(pair) for pair in combinations(range(60), 2)]


def draw_many_streams(content: Content) -> None:
    content["decomposition"]["factors"][0] = [[0.1] * 1000] * 2


def name_many_agents(content: Content) -> None:
    content["network"]["agents"] = [str(agent) for agent in range(20_000)]


def widen_multipliers(content: Content) -> None:
    content["certificate"]["multipliers"] = [[0.1] * 1000] * 4


def link_truths(content: Content) -> None:
    content["network"]["links"][0] = [False, True]


def link_three(content: Content) -> None:
    content["network"]["links"][0] = [0, 1, 2]


def take_many_steps(content: Content) -> None:
    content["budget"] |= {"unit": "sample", "batch_size": 10, "sampling": "poisson"}
    content["budget"] |= {"samples_per_agent": 1000, "num_steps": 10**9}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (repeat_group, "seed groups must be different"),
        (list_many_groups, "the number of seed groups must be at most 1,000, found 200000"),
        (list_many_seeds, "the number of seed groups must be at most 1,000, found 1770"),
        (draw_many_streams, "weights of a group must be at most 6, found 2000"),
        (name_many_agents, "the number of agents must be at most 5,000, found 20000"),
        (widen_multipliers, "multipliers must be 4, one for each agent, found 1000"),
        (link_truths, "links cannot be False"),
        (link_three, r"links cannot be \[0, 1, 2\]"),
        (take_many_steps, "num_steps must be at most 1,000,000"),
    ],
)
def test_lists_that_no_plan_has_are_refused(
    plan: Plan, tmp_path: Path, change: Callable[[Content], None], message: str
) -> None:
    path = tmp_path / "plan.corn"
    save_plan(plan, path)
    document = json.loads(path.read_text())
    change(document["content"])
    # As whoever forges a plan would.
    text = json.dumps(document["content"], sort_keys=True, separators=(",", ":"))
    document["fingerprint"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(document))
    with pytest.raises(FileFormatError, match=message):
        load_plan(path)


def test_files_that_are_too_long_are_neither_read_nor_written(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.corn"
    save_plan(plan, path)
    monkeypatch.setattr(file, "_MAX_BYTES", path.stat().st_size - 1)
    with pytest.raises(FileFormatError, match="more than"):
        load_plan(path)
    with pytest.raises(InvalidArgumentError, match="the bytes of a plan must be at most"):
        save_plan(plan, tmp_path / "other.corn")
    assert not (tmp_path / "other.corn").exists()
    # Of another kind, such as a roster or a request.
    with (tmp_path / "long.json").open("wb") as stream:
        stream.truncate((1 << 24) + 1)
    with pytest.raises(FileFormatError, match="more than 16,777,216 bytes"):
        read_json(tmp_path / "long.json", kind="a roster")


def test_a_plan_with_almost_no_noise_is_judged_at_once() -> None:
    """Composition of Poisson sampling without noise takes minutes, and its ε says nothing."""
    budget = PrivacyBudget(
        1, 1e-5, num_steps=100, clip=1, unit="sample", batch_size=5, samples_per_agent=100
    )
    plan = make_plan(load_network("path:2", mixing="gossip"), budget, mechanism="ldp")
    silent = Decomposition(np.full(2, 1e-30))
    found = verify_plan(replace(plan, decomposition=silent))
    assert not found.passed
    assert [own.epsilon for own in found.guarantees] == [np.inf] * 2


def test_an_agent_of_an_exact_sum_needs_noise_that_hides_its_own_rounding() -> None:
    """The sum may have all its noise: an integer that is not blurred shows the gradient."""
    plan = make_plan(load_network("complete:4"), PrivacyBudget(1, 1e-5, num_steps=100, clip=1))
    theta = plan.decomposition.private_variance
    assert verify_plan(plan).passed
    # Any three agents together have the variance 1/b, as against one insider they must.
    total = 3 * theta[0]
    uneven = np.array([(1e-3 * plan.grid) ** 2, *[total / 2] * 3])
    forged = Decomposition(uneven, plan.decomposition.seed_groups, is_masked=True)
    found = verify_plan(replace(plan, decomposition=forged))
    assert not found.passed
    assert [own.epsilon for own in found.guarantees] == [np.inf] * 4
    # Uneven noise that hides the rounding of each is as good as even noise.
    other = np.array([(7 * plan.grid) ** 2, *[total / 2] * 3])
    hidden = Decomposition(other, plan.decomposition.seed_groups, is_masked=True)
    promised = [own.epsilon for own in verify_plan(replace(plan, decomposition=hidden)).guarantees]
    assert max(promised) <= 1


def test_plans_after_which_survivors_could_not_keep_the_promise_are_refused() -> None:
    """They plan anew by the mechanism and the caps, whatever noise the plan at hand has."""
    sums = load_network("complete:4")
    plan = make_plan(sums, PrivacyBudget(1, 1e-5, num_steps=100, clip=1))
    groups = ((0, 1, 2), (1, 2, 3), (0, 2, 3), (0, 1, 3))
    alone = make_plan(sums, plan.budget, mechanism="ldp").decomposition
    empty = tuple(np.zeros((3, 0)) for _ in groups)
    unmasked = Decomposition(alone.private_variance, groups, empty)
    with pytest.raises(InvalidArgumentError, match="is_masked must be True for 'corn'"):
        replace(plan, decomposition=unmasked, threat=ThreatModel(1, groups))
    with pytest.raises(InvalidArgumentError, match="is_masked must be False for 'decor'"):
        replace(plan, mechanism="decor")
    # Eq. (13b) has too large a cap there, though the noise at hand may be enough.
    beyond = PrivacyBudget(49, 1e-5, num_steps=100, clip=1)
    enough = make_plan(sums, beyond)
    with pytest.warns(CornWarning), pytest.raises(InfeasibleError, match="'paper' would give"):
        replace(enough, budget=replace(beyond, accounting="paper"))
