"""Plans: files round-trip, and verification detects every false claim."""

import dataclasses
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
from corn.covariance import DEFAULT_THREAT, Corn, Decomposition, FiniteRun, ObjectiveLike
from corn.errors import CornError, FileFormatError, InfeasibleError, InvalidArgumentError
from corn.noise import SecureSource, draw_all_shares, simulated_keys
from corn.plan import Plan, fingerprint, load_plan, make_plan, save_plan, verify_plan
from corn.plan.plan import prove_lower_bound
from corn.plan.verify import guarantees_against
from corn.privacy import subsampling
from corn.privacy.floats import set_aside

from ..mutations import find_complaint, is_clear
from ..oracles.sdp import solve_split

BUDGET = PrivacyBudget(epsilon=3, delta=1e-5, num_steps=50, clip=1.0)
NETWORK = load_network(nx.wheel_graph(6), mixing="gossip")
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(NETWORK, BUDGET, mechanism=Corn())


def rewrite(plan: Plan, path: Path, change: Change) -> Path:
    """Save a plan with changed content and a fingerprint that fits, as a forger would do."""
    save_plan(plan, path)
    document = json.loads(path.read_text())
    change(document["content"])
    text = json.dumps(document["content"], sort_keys=True, separators=(",", ":"))
    document["fingerprint"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(document))
    return path


def test_a_plan_takes_a_spec_or_a_graph_as_a_design_does() -> None:
    budget = PrivacyBudget(epsilon=10, delta=1e-5, num_steps=5, clip=0.1)
    expected = make_plan(load_network("ring:4", mixing="sum"), budget).decomposition.covariance
    networks: list[str | nx.Graph] = ["ring:4", nx.cycle_graph(4)]
    for network in networks:
        made = make_plan(network, budget)
        np.testing.assert_array_equal(made.decomposition.covariance, expected)


def test_the_default_threat_is_one_insider_with_pair_seeds(plan: Plan) -> None:
    assert plan.threat == DEFAULT_THREAT.resolve(plan.network.graph) == ThreatModel(1, "pairs")
    assert plan.objective == Horizon(10, 0.1, 0.88)
    found = verify_plan(plan)
    assert found.passed
    assert all(g.epsilon <= 3 for g in found.guarantees)
    assert max(g.epsilon for g in found.guarantees) == pytest.approx(3, rel=1e-5)
    assert found.gap <= 1.2e-3


@pytest.mark.parametrize(
    "objective",
    [
        Horizon(7.5, 0.3),
        FiniteRun([0.1, 0.05]),
        np.diag(range(1, 7)),
        lambda W: np.outer(W[0] - 0.1, W[0] - 0.1) + np.outer(W[1], W[1]),
    ],
    ids=["horizon", "finite run", "matrix", "function of rank two"],
)
@pytest.mark.parametrize(
    "threat", [ThreatModel(0, "global"), ThreatModel(0, ((0, 1, 2),)), ThreatModel(2, "pairs")]
)
def test_plans_round_trip_through_their_file(
    tmp_path: Path, objective: ObjectiveLike, threat: ThreatModel
) -> None:
    made = make_plan(NETWORK, BUDGET, threat=threat, objective=objective)
    save_plan(made, tmp_path / "a.corn")
    loaded = load_plan(tmp_path / "a.corn")
    save_plan(loaded, tmp_path / "b.corn")
    assert (tmp_path / "a.corn").read_bytes() == (tmp_path / "b.corn").read_bytes()
    assert fingerprint(loaded) == fingerprint(made)
    assert verify_plan(loaded) == verify_plan(made)
    assert verify_plan(loaded).passed


@pytest.mark.parametrize("mechanism", ["ldp", "decor", "zero-sum"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_mechanism_can_be_planned(tmp_path: Path, mechanism: Any, dtype: Any) -> None:
    made = make_plan(
        load_network("ring:5", mixing="gossip"),
        BUDGET,
        mechanism=mechanism,
        threat=ThreatModel(),
        dtype=dtype,
    )
    save_plan(made, tmp_path / "plan.corn")
    assert verify_plan(load_plan(tmp_path / "plan.corn")).passed


def test_independent_noise_is_certified_where_sharing_cannot_help() -> None:
    found = verify_plan(make_plan(load_network("path:2", mixing="gossip"), BUDGET))
    assert found.passed
    assert found.gap <= 1e-6


def test_drawn_noise_has_the_verified_covariance(plan: Plan) -> None:
    keys = simulated_keys(plan.decomposition, seed=1)
    shares = draw_all_shares(
        plan.decomposition, source=SecureSource(keys), nonce=bytes(32), step=0, stop=40_000
    )
    np.testing.assert_allclose(
        np.cov(shares),
        plan.decomposition.covariance,
        atol=0.05 * plan.decomposition.covariance.max(),
    )


def test_verification_equals_brute_force_over_coalitions(plan: Plan) -> None:
    found = verify_plan(plan)
    assert [guarantee.agent for guarantee in found.guarantees] == list(range(6))
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
        (lambda c: c["network"]["mixing_weights"][0].__setitem__(2, 0.9), "doubly stochastic"),
        (
            lambda c: c["network"]["mixing_weights"][0].__setitem__(1, -1),
            "mixing weights must be of two agents",
        ),
        (lambda c: c["network"]["mixing_weights"].append([0, 0, 0.1]), "each pair once"),
        (lambda c: c["network"]["mixing_weights"].reverse(), "canonical form"),
        (lambda c: c["network"]["links"].pop(), "no link"),
        (lambda c: c["network"]["links"].append([0, 9]), "links must be between agents"),
        (lambda c: c["decomposition"]["private_variance"].__setitem__(0, -1), "≥ 0 per agent"),
        (lambda c: c["decomposition"]["factors"].pop(), "one for each seed group"),
        (lambda c: c["decomposition"]["seed_groups"].__setitem__(0, [1, 0]), "increasing order"),
        (lambda c: c.update(mechanism_version=2), "unknown entry"),
        (lambda c: c["objective"].update(kind="magic"), "kind of objective must be one of"),
        (lambda c: c.update(grid=0.1), "grid must be a power of two"),
        (lambda c: c.pop("network"), "'network' is missing"),
        (lambda c: c["threat"].update(seeds=[["a", "b"]]), "seeds cannot be [['a', 'b']]"),
        (
            lambda c: c["decomposition"]["seed_groups"].__setitem__(0, [False, True]),
            "cannot be False",
        ),
        (lambda c: c["network"].update(source=123), "source cannot be 123"),
        (lambda c: c["network"]["agents"].__setitem__(0, "1"), "no number but its own, found '1'"),
        (
            lambda c: c["decomposition"]["factors"].__setitem__(
                0, [[x for row in c["decomposition"]["factors"][0] for x in row]]
            ),
            "canonical form",
        ),
    ],
)
def test_impossible_content_is_refused_in_one_line(
    plan: Plan, tmp_path: Path, change: Change, message: str
) -> None:
    with pytest.raises(FileFormatError) as caught:
        load_plan(rewrite(plan, tmp_path / "forged.corn", change))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_forged_promises_are_detected(plan: Plan, tmp_path: Path) -> None:
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
        (hide_global_seed, "excludes"),
    ):
        found = verify_plan(load_plan(rewrite(plan, tmp_path / "forged.corn", change)))
        assert not found.passed
        assert any(words in problem for problem in found.problems), (words, found.problems)


@pytest.mark.parametrize("difference", [-1e-4, 1e-4])
def test_a_plan_is_judged_by_its_epsilon_not_by_the_cap_that_another_search_finds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, difference: float
) -> None:
    sampled = dataclasses.replace(
        BUDGET, unit="sample", batch_size=8, sampling="poisson", sampling_rate=0.1
    )
    plan = make_plan(load_network("ring:4", mixing="gossip"), sampled)
    weaker = dataclasses.replace(plan, decomposition=_scale(plan.decomposition, 0.999))
    save_plan(plan, tmp_path / "plan.corn")
    save_plan(weaker, tmp_path / "weaker.corn")

    def calibrate(*args: Any, **options: Any) -> float:
        return (1 + difference) * found(*args, **options)

    found = subsampling.calibrate_precision
    monkeypatch.setattr(subsampling, "calibrate_precision", calibrate)
    loaded = load_plan(tmp_path / "plan.corn")
    assert set_aside(loaded.budget).precision_cap != plan.precision_caps[0]
    assert verify_plan(loaded).passed
    exposed = verify_plan(load_plan(tmp_path / "weaker.corn")).guarantees
    assert all(guarantee.epsilon > 3 for guarantee in exposed)


def _scale(shares: Decomposition, scale: float) -> Decomposition:
    factors = tuple(np.sqrt(scale) * factor for factor in shares.factors)
    return Decomposition(scale * shares.private_variance, shares.seed_groups, factors)


@pytest.mark.parametrize("size", [0.0, 1e-300, 1.0, 1e300, 1e308])
@pytest.mark.parametrize("noise", ["good", "poor"])
def test_no_multipliers_prove_more_than_the_optimum(plan: Plan, size: float, noise: str) -> None:
    """The proof is compared with the optimum itself, before it is capped by the plan's value."""
    A = plan.objective.matrix(NETWORK.mixing_matrix)
    groups = DEFAULT_THREAT.seed_groups(NETWORK.graph)
    optimum = solve_split(A, groups, np.ones(len(A)), max_colluders=1)
    parts = plan.decomposition
    if noise == "poor":
        rng = np.random.default_rng(1)
        factors = tuple(rng.normal(size=factor.shape) for factor in parts.factors)
        parts = Decomposition(rng.uniform(1, 9, 6), parts.seed_groups, factors)
    for seed in range(5):
        shape = np.asarray(plan.certificate.multipliers).shape
        forged = size * np.random.default_rng(seed).uniform(size=shape)
        proved = prove_lower_bound(A, parts, DEFAULT_THREAT, groups, forged)
        assert 0 < proved <= optimum * (1 + 1e-6)
    honest = prove_lower_bound(
        A, plan.decomposition, DEFAULT_THREAT, groups, plan.certificate.multipliers
    )
    assert honest == pytest.approx(optimum, rel=2e-3)


def test_the_bound_covers_all_allowed_seeds_not_only_those_used() -> None:
    network = load_network("ring:8", mixing="gossip")
    ldp = make_plan(network, BUDGET, mechanism="ldp", threat=ThreatModel())
    relabelled = dataclasses.replace(ldp, mechanism="corn")
    assert verify_plan(relabelled).gap > 1


def test_claims_above_the_proved_bound_are_detected(plan: Plan) -> None:
    claim = dataclasses.replace(plan.certificate, lower_bound=1.01 * plan.certificate.value)
    found = verify_plan(dataclasses.replace(plan, certificate=claim))
    assert any("is proved" in problem for problem in found.problems)


def test_mechanism_and_threat_must_match_the_noise(plan: Plan) -> None:
    for mechanism, message in (("none", "reference"), ("ldp", "without shared seeds")):
        with pytest.raises(InvalidArgumentError, match=message):
            dataclasses.replace(plan, mechanism=mechanism)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="max_colluders must be at most 5 of 6"):
        dataclasses.replace(plan, threat=ThreatModel(6, "pairs"))


def test_too_many_coalitions_are_refused_at_once() -> None:
    made = make_plan(
        load_network("ring:30", mixing="gossip"), BUDGET, threat=ThreatModel(0, "edges")
    )
    forged = dataclasses.replace(made, threat=ThreatModel(10, "edges"))
    with pytest.raises(InvalidArgumentError, match="30,045,015 coalitions of 10"):
        verify_plan(forged)


def test_missing_changed_truncated_and_infinite_files_are_refused(
    plan: Plan, tmp_path: Path
) -> None:
    with pytest.raises(FileFormatError, match="no such file"):
        load_plan(tmp_path / "none.corn")
    path = tmp_path / "plan.corn"
    save_plan(plan, path)
    text = path.read_text()
    path.write_text(text.replace('"epsilon":3', '"epsilon":4'))
    with pytest.raises(FileFormatError, match="another fingerprint"):
        load_plan(path)
    path.write_text(text[: len(text) // 2])
    with pytest.raises(FileFormatError, match="cut short"):
        load_plan(path)
    path.write_text(text.replace('"epsilon":3', '"epsilon":1e999'))
    with pytest.raises(FileFormatError, match="'1e999' is not a finite number"):
        load_plan(path)
    path.write_text(text.replace('"epsilon":3', '"epsilon":9,"epsilon":3'))
    with pytest.raises(FileFormatError, match="the key 'epsilon' occurs twice"):
        load_plan(path)


@pytest.mark.parametrize("has_copies", [True, False])
def test_rounding_errors_do_not_count_as_noise(has_copies: bool) -> None:
    """Each stream adds one unit in the last place to one variance and nothing to a covariance."""
    plan = make_plan(
        load_network("ring:3", mixing="gossip"), PrivacyBudget(1, 1e-5, num_steps=1, clip=0.1)
    )
    limit, step, num_tiny = 2.0**-53, np.float32(1), 300
    x = np.float32(2**-26.5)
    while float(x) ** 2 <= limit:
        x = np.nextafter(x, step)
    y = x
    while float(x) * float(y) >= limit:
        y = np.nextafter(y, -step)
    size = 2.0**22
    large, tiny = size * np.array([[1.0], [-1.0]]), size * np.array([[float(x)], [-float(y)]])
    pairs, streams = ((0, 1), (0, 2), (1, 2)), [large, *[tiny] * num_tiny]
    shares = Decomposition(np.zeros(3), pairs, (np.hstack(streams),) * 3)
    if has_copies:
        copies = tuple(pair for pair in pairs for _ in streams)
        shares = Decomposition(np.zeros(3), copies, tuple(streams) * 3)
    seen = float(np.linalg.inv(shares.hidden_from([2])[:2, :2]).max())
    assert seen < plan.budget.precision_cap  # without an allowance for rounding
    found = verify_plan(dataclasses.replace(plan, decomposition=shares))
    assert not found.passed
    assert found.guarantees[0].epsilon == np.inf


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_value_is_refused_or_detected(
    plan: Plan, tmp_path: Path, data: st.DataObject
) -> None:
    """A changed value is refused, gives a sound plan or fails verification; it never crashes."""

    def mutate(content: dict[str, Any]) -> None:
        node: Any = content
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = data.draw(st.sampled_from(keys))
            child = node[key]
            if isinstance(child, dict | list) and child and data.draw(st.integers(0, 9)):
                node = child
                continue
            odd: list[Any] = [None, -1, 0, 0.5, 1e308, 10**19, 10**30, "x", [], {}, True, [[1.0]]]
            odd += ["\x1b[2J" * 200, {"\x1b[2J": 1}]
            node[key] = data.draw(st.sampled_from(odd))
            return

    path = rewrite(plan, tmp_path / "fuzzed.corn", lambda content: mutate(content))
    if complaint := find_complaint(load_plan, path):
        assert is_clear(complaint)
        return
    loaded = load_plan(path)
    try:
        found = verify_plan(loaded)
    except CornError:
        return
    if found.passed:
        assert all(g.epsilon <= loaded.budget.promise.epsilon for g in found.guarantees)


def test_a_grid_too_coarse_for_the_noise_is_detected(plan: Plan) -> None:
    """Releases would be noisier than the certificate states."""
    found = verify_plan(dataclasses.replace(plan, grid=4 * plan.grid))
    assert any("is coarser than" in problem for problem in found.problems)


def test_a_grid_too_fine_for_floats_proves_no_epsilon(plan: Plan) -> None:
    found = verify_plan(dataclasses.replace(plan, grid=plan.grid * 2.0**-50))
    assert not found.passed
    assert all(guarantee.epsilon == np.inf for guarantee in found.guarantees)


def test_an_epsilon_that_floats_cannot_keep_is_refused() -> None:
    budget = PrivacyBudget(100, 1e-5, num_steps=30, clip=0.1)
    with pytest.raises(InfeasibleError, match="models of up to 0 parameters"):
        make_plan(NETWORK, budget)


def test_epsilon_against_more_insiders_than_planned_is_proved(plan: Plan) -> None:
    beyond = guarantees_against(plan, [0, 1, 2])
    assert all(own.epsilon > plan.budget.promise.epsilon for own in beyond)
    assert any(own.epsilon < np.inf for own in beyond)


def test_whole_numbers_and_floats_are_one_promise() -> None:
    """Agents whose plans differ in the type of a number would have different keys."""
    whole, floats = (
        make_plan("ring:4", PrivacyBudget(epsilon, 1e-5, num_steps=10, clip=clip))
        for epsilon, clip in ((5, 1), (5.0, 1.0))
    )
    assert fingerprint(whole) == fingerprint(floats)
