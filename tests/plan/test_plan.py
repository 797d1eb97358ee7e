"""Plans: what is saved is what is loaded, and nothing false gets past verification."""

import copy
import hashlib
import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corn import Horizon, PrivacyBudget, ThreatModel, load_network
from corn.covariance import FiniteRun, GivenObjective, Objective
from corn.errors import CornError, FileFormatError, InvalidArgumentError
from corn.noise import SecureSource, draw_all_shares, round_factors, simulated_keys
from corn.plan import SAFE_THREAT, Plan, load_plan, make_plan, save_plan, verify_plan
from corn.plan.codec import fingerprint
from corn.plan.verification import guarantees_against

BUDGET = PrivacyBudget(epsilon=3, delta=1e-5, num_steps=50, clip=1.0)
NETWORK = load_network(nx.wheel_graph(6))
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(NETWORK, BUDGET)


def rewrite(plan: Plan, path: Path, change: Change) -> Path:
    """Save a plan with changed content and a fingerprint that fits, as a forger would."""
    save_plan(plan, path)
    document = json.loads(path.read_text())
    change(document["content"])
    text = json.dumps(document["content"], sort_keys=True, separators=(",", ":"))
    document["fingerprint"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(document))
    return path


def test_a_plan_is_safe_by_default(plan: Plan) -> None:
    assert plan.threat == SAFE_THREAT == ThreatModel(1, "pairs")
    assert plan.objective == Horizon(10)
    found = verify_plan(plan)
    assert found.passed
    assert all(g.epsilon <= 3 for g in found.guarantees)
    assert max(g.epsilon for g in found.guarantees) == pytest.approx(3, rel=1e-5)
    assert found.gap <= 1.1e-3


@pytest.mark.parametrize(
    "objective",
    [Horizon(7.5, gossip_rounds=2), FiniteRun([0.1, 0.05]), GivenObjective(np.diag(range(1, 7)))],
)
@pytest.mark.parametrize(
    "threat",
    [ThreatModel(0, "global"), ThreatModel(0, ((0, 1, 2),)), ThreatModel(2, "pairs", "common")],
)
def test_plans_survive_the_file(tmp_path: Path, objective: Objective, threat: ThreatModel) -> None:
    made = make_plan(NETWORK, BUDGET, threat=threat, objective=objective, tolerance=0.05)
    save_plan(made, tmp_path / "a.corn")
    loaded = load_plan(tmp_path / "a.corn")
    save_plan(loaded, tmp_path / "b.corn")
    assert (tmp_path / "a.corn").read_bytes() == (tmp_path / "b.corn").read_bytes()
    assert fingerprint(loaded) == fingerprint(made)
    assert verify_plan(loaded) == verify_plan(made)
    assert verify_plan(loaded).passed


@pytest.mark.parametrize("mechanism", ["ldp", "decor", "zero-sum"])
@pytest.mark.parametrize("noise_type", ["float32", "float64"])
def test_every_mechanism_can_be_planned(tmp_path: Path, mechanism: Any, noise_type: Any) -> None:
    made = make_plan(
        load_network("directed-ring:5"),
        BUDGET,
        mechanism=mechanism,
        threat=ThreatModel(),
        noise_type=noise_type,
    )
    save_plan(made, tmp_path / "plan.corn")
    assert verify_plan(load_plan(tmp_path / "plan.corn")).passed


def test_names_of_agents_are_kept(tmp_path: Path) -> None:
    (tmp_path / "g.edges").write_text("oslo bergen\nbergen turku\nturku oslo\n")
    made = make_plan(load_network(tmp_path / "g.edges"), BUDGET)
    save_plan(made, tmp_path / "plan.corn")
    assert load_plan(tmp_path / "plan.corn").network.graph.nodes[2]["name"] == "turku"


def test_where_shared_noise_is_worthless_independent_noise_is_certified() -> None:
    found = verify_plan(make_plan(load_network("path:2"), BUDGET))
    assert found.passed
    assert found.gap <= 1e-6


def test_references_cannot_be_planned() -> None:
    with pytest.raises(InvalidArgumentError, match="reference without privacy"):
        make_plan(NETWORK, BUDGET, mechanism="central")


def test_what_is_drawn_is_what_was_verified(plan: Plan) -> None:
    """The weights in the plan are exactly those the draw uses, so no rounding is left out."""
    drawn = round_factors(plan.decomposition, plan.noise_type)
    np.testing.assert_array_equal(drawn.covariance, plan.decomposition.covariance)
    keys = simulated_keys(plan.decomposition, seed=1)
    shares = draw_all_shares(
        plan.decomposition, source=SecureSource(keys), nonce=bytes(32), step=0, stop=40_000
    )
    np.testing.assert_allclose(
        np.cov(shares),
        plan.decomposition.covariance,
        atol=0.05 * plan.decomposition.covariance.max(),
    )


def test_verification_equals_a_count_of_every_coalition(plan: Plan) -> None:
    found = verify_plan(plan)
    for guarantee in found.guarantees:
        by_coalition = {
            coalition: {g.agent: g.epsilon for g in guarantees_against(plan, coalition)}
            for coalition in combinations(range(6), 1)
            if guarantee.agent not in coalition
        }
        worst = max(by_coalition.values(), key=lambda e: e[guarantee.agent])[guarantee.agent]
        assert guarantee.epsilon == pytest.approx(worst, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["budget"].update(epsilon=-1), "epsilon must be positive"),
        (lambda c: c["budget"].pop("delta"), "'delta' is missing"),
        (lambda c: c["budget"].update(extra=1), "unknown entry 'extra'"),
        (lambda c: c["network"]["mixing_matrix"][0].__setitem__(0, 0.9), "doubly stochastic"),
        (lambda c: c["network"]["mixing_matrix"].pop(), "square"),
        (lambda c: c["network"]["links"].pop(), "no link"),
        (lambda c: c["network"]["links"].append([0, 9]), "not both agents"),
        (lambda c: c["decomposition"]["private_variance"].__setitem__(0, -1), "≥ 0 per agent"),
        (lambda c: c["decomposition"]["factors"].pop(), "argument 2 is shorter"),
        (lambda c: c["decomposition"]["seed_groups"].__setitem__(0, [1, 0]), "increasing order"),
        (lambda c: c["decomposition"]["factors"].__setitem__(0, [[0.1], [0.3]]), "float32 numbers"),
        (lambda c: c.update(mechanism_version=2), "unknown entry"),
        (lambda c: c["objective"].update(kind="magic"), "unknown kind of objective"),
        (lambda c: c["threat"].update(max_colluders=-1), "max_colluders"),
        (lambda c: c.update(noise_type="float16"), "noise_type"),
        (lambda c: c.pop("network"), "'network' is missing"),
    ],
)
def test_impossible_content_is_refused_in_one_line(
    plan: Plan, tmp_path: Path, change: Change, message: str
) -> None:
    with pytest.raises(FileFormatError) as caught:
        load_plan(rewrite(plan, tmp_path / "forged.corn", change))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_forged_promises_are_found(plan: Plan, tmp_path: Path) -> None:
    def halve_noise(content: dict[str, Any]) -> None:
        theta = content["decomposition"]["private_variance"]
        theta[2] = float(np.float32(np.sqrt(theta[2] / 4))) ** 2

    def promise_more(content: dict[str, Any]) -> None:
        content["budget"]["epsilon"] = 2.0

    def claim_better(content: dict[str, Any]) -> None:
        content["certificate"]["value"] /= 2

    def claim_more_insiders(content: dict[str, Any]) -> None:
        content["threat"]["max_colluders"] = 2

    def hide_global_seed(content: dict[str, Any]) -> None:
        content["threat"]["seeds"] = "edges"

    for change, words in (
        (halve_noise, "agent 2 gets ε"),
        (promise_more, "instead of 2"),
        (claim_better, "noise energy"),
        (claim_more_insiders, "against insiders"),
        (hide_global_seed, "rules out"),
    ):
        found = verify_plan(load_plan(rewrite(plan, tmp_path / "forged.corn", change)))
        assert not found.passed
        assert any(words in problem for problem in found.problems), (words, found.problems)


def test_forged_multipliers_cannot_raise_the_bound(plan: Plan, tmp_path: Path) -> None:
    honest = verify_plan(plan)

    def forge(content: dict[str, Any]) -> None:
        rows = content["certificate"]["multipliers"]
        content["certificate"]["multipliers"] = [[1e3 * x + 1 for x in row] for row in rows]
        content["certificate"]["lower_bound"] *= 2

    forged = verify_plan(load_plan(rewrite(plan, tmp_path / "forged.corn", forge)))
    assert forged.lower_bound <= honest.value


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"corn_plan": 2}', '{"a": NaN}', "[" * 9999]
)
def test_damaged_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.corn").write_text(text)
    with pytest.raises(FileFormatError) as caught:
        load_plan(tmp_path / "bad.corn")
    assert "\n" not in str(caught.value)


def test_missing_changed_truncated_and_infinite(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="no such file"):
        load_plan(tmp_path / "none.corn")
    path = tmp_path / "plan.corn"
    save_plan(plan, path)
    text = path.read_text()
    path.write_text(text.replace('"epsilon": 3', '"epsilon": 4'))
    with pytest.raises(FileFormatError, match="another fingerprint"):
        load_plan(path)
    path.write_text(text[: len(text) // 2])
    with pytest.raises(FileFormatError, match="cut short"):
        load_plan(path)
    path.write_text(text.replace('"epsilon": 3', '"epsilon": 1e999'))
    with pytest.raises(FileFormatError, match="not a valid plan"):
        load_plan(path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_change_crashes_or_passes_unseen(
    plan: Plan, tmp_path: Path, data: st.DataObject
) -> None:
    """Replace any one value anywhere: refused, or a sound plan, or found out; never a crash."""

    def mutate(content: dict[str, Any]) -> None:
        node: Any = content
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = data.draw(st.sampled_from(keys))
            child = node[key]
            if isinstance(child, dict | list) and child and data.draw(st.integers(0, 9)):
                node = child
                continue
            odd: list[Any] = [None, -1, 0, 0.5, 1e308, "x", [], {}, True, [[1.0]]]
            node[key] = data.draw(st.sampled_from(odd))
            return

    path = rewrite(plan, tmp_path / "fuzzed.corn", lambda content: mutate(content))
    try:
        loaded = load_plan(path)
        found = verify_plan(loaded)
    except CornError:
        return
    if found.passed:
        assert all(g.epsilon <= loaded.budget.epsilon for g in found.guarantees)


def test_plans_are_records(plan: Plan) -> None:
    with pytest.raises(AttributeError):
        plan.mechanism = "ldp"  # type: ignore[misc]
    assert "one insider" in plan.describe()
    assert copy.copy(plan).num_agents == 6
