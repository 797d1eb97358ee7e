"""``corn plan``, ``verify`` and ``keys``."""

import json
import stat
from pathlib import Path

import numpy as np
import pytest

from corn import load_plan
from corn.covariance import ThreatModel, default_objective
from corn.distributed import PlanningRequest, read_request
from corn.noise import load_identity, load_roster
from corn.privacy import PrivacyBudget

from ..leaks import shows
from .commands import Runner, run_quietly

PLAN = ["plan", "--graph", "ring:6", "--steps", 100]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.corn"
    assert run_quietly(*PLAN, "--out", path) == 0
    return path


def test_the_default_plan_is_verified_against_one_insider(corn: Runner, plan: Path) -> None:
    outcome = corn("verify", plan, "--json")
    assert outcome.exit_code == 0
    facts = json.loads(outcome.stdout)
    assert facts["passed"]
    assert facts["max_colluders"] == 1
    assert facts["mixing"] == "sum"
    assert facts["seeds"] == "partners:6"
    assert all(agent["epsilon"] <= 10 for agent in facts["agents"])
    assert all(len(agent["worst_coalition"]) == 1 for agent in facts["agents"])
    assert facts["gap"] < 2e-3


def test_the_table_names_unit_and_adversary(corn: Runner, plan: Path) -> None:
    text = " ".join(corn("verify", plan, "--agent", 2).stdout.split())
    for words in ("verified", "one agent's whole data set", "one insider", "insider"):
        assert words in text


def test_a_coalition_may_be_larger_than_the_threat(corn: Runner, plan: Path) -> None:
    outcome = corn("verify", plan, "--coalition", "1,4", "--json")
    assert outcome.exit_code == 0
    agents = json.loads(outcome.stdout)["agents"]
    assert {agent["agent"] for agent in agents} == {0, 2, 3, 5}
    assert max(agent["epsilon"] for agent in agents) > 10


def test_noise_without_protection_against_agents_is_noted(corn: Runner, tmp_path: Path) -> None:
    plan = tmp_path / "g.corn"
    options = ["--mixing", "gossip", "--graph", "ring:6", "--colluders", 0]
    warning = "private against an eavesdropper only; an agent can subtract"
    for command in (
        [*PLAN, *options, "--seeds", "global", "--out", plan],
        ["verify", plan],
        ["compare", *options],
        [*PLAN, *options, "--mechanism", "decor", "--out", plan],
    ):
        assert warning in corn(*command).stderr


def test_a_changed_plan_is_refused(corn: Runner, plan: Path, tmp_path: Path) -> None:
    changed = tmp_path / "plan.corn"
    changed.write_text(plan.read_text().replace('"epsilon":10.0', '"epsilon":9.0'))
    outcome = corn("verify", changed)
    assert outcome.exit_code == 1
    assert "another fingerprint" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--agent", "6"], "--agent must be a number of an agent, 0 … 5, found '6'"),
        (["--coalition", "a,b"], "--coalition must be a number of an agent, 0 … 5, found 'a'"),
        (["--coalition", "9"], "--coalition must be a number of an agent, 0 … 5, found '9'"),
        (["--coalition", "3", "--agent", "3"], "agent 3 is one of the insiders"),
        (["--coalition", "0,1,2,3,4,5"], "nobody to protect"),
    ],
)
def test_bad_agents_and_coalitions_are_refused(
    corn: Runner, plan: Path, options: list[str], message: str
) -> None:
    outcome = corn("verify", plan, *options)
    assert outcome.exit_code == 1
    assert message in outcome.stderr


def test_keys_stay_private_and_the_roster_is_public(corn: Runner, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    outcome = corn("keys", "make", keys, "--agents", 3, "--json")
    assert outcome.exit_code == 0
    made = json.loads(outcome.stdout)["public_keys"]
    listed = json.loads(
        corn("keys", "roster", keys, "--out", tmp_path / "roster.json", "--json").stdout
    )
    roster = load_roster(tmp_path / "roster.json")
    public_keys = [key.hex() for key in roster.public_keys]
    assert [made[str(agent)] for agent in range(3)] == public_keys == listed["public_keys"]
    for agent in range(3):
        path = keys / f"agent-{agent}.key"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        identity = load_identity(path)
        assert identity.public_key == roster.public_key(agent)
        assert not shows(identity.secret, outcome.stdout + outcome.stderr)


def test_keys_are_never_overwritten(corn: Runner, tmp_path: Path) -> None:
    assert corn("keys", "make", tmp_path, "--agent", 4).exit_code == 0
    before = (tmp_path / "agent-4.key").read_bytes()
    outcome = corn("keys", "make", tmp_path, "--agents", 6)
    assert not (tmp_path / "agent-0.key").exists()
    assert outcome.exit_code == 1
    assert "exists" in outcome.stderr
    assert (tmp_path / "agent-4.key").read_bytes() == before


def test_a_roster_needs_the_keys_of_all_agents(corn: Runner, tmp_path: Path) -> None:
    corn("keys", "make", tmp_path, "--agent", 1)
    outcome = corn("keys", "roster", tmp_path, "--out", tmp_path / "r.json")
    assert outcome.exit_code == 1
    assert "agent-0.pub is missing" in outcome.stderr
    (tmp_path / "agent-0.pub").write_text("zz")
    assert (
        "not a public key" in corn("keys", "roster", tmp_path, "--out", tmp_path / "r.json").stderr
    )
    assert corn("keys", "make", tmp_path).exit_code == 2


def test_the_connections_of_a_plan_are_a_table_for_a_firewall(corn: Runner, tmp_path: Path) -> None:
    path = tmp_path / "plan.corn"
    assert corn("plan", "--graph", "star:4", "--steps", 5, "--out", path).exit_code == 0
    assert corn("keys", "make", tmp_path / "keys", "--agents", 4).exit_code == 0
    roster = tmp_path / "roster.json"
    assert corn("keys", "roster", tmp_path / "keys", "--out", roster).exit_code == 0
    document = json.loads(roster.read_text())
    document["agents"]["0"]["address"] = "10.88.0.14:41431"
    for agent in "123":
        document["agents"][agent]["accepts"] = False
    roster.write_text(json.dumps(document))
    outcome = corn("verify", path, "--connections", roster)
    assert outcome.exit_code == 0
    assert "10.88.0.14:41431" in outcome.stdout
    facts = json.loads(corn("verify", path, "--connections", roster, "--agent", 2, "--json").stdout)
    reached = {"agent": 2, "reaches": 0, "address": "10.88.0.14:41431"}
    assert facts["connections"] == [reached | {"for": "link"}, reached | {"for": "store"}]
    document["agents"]["0"] |= {"address": None, "accepts": False}
    roster.write_text(json.dumps(document))
    assert corn("verify", path, "--connections", roster).exit_code == 1


def test_every_site_can_print_the_fingerprint_of_its_roster(corn: Runner, tmp_path: Path) -> None:
    assert corn("keys", "make", tmp_path / "keys", "--agents", 2).exit_code == 0
    path = tmp_path / "keys" / "roster.json"
    made = json.loads(corn("keys", "roster", path.parent, "--out", path, "--json").stdout)
    shown = json.loads(corn("keys", "show", path.parent, "--json").stdout)
    assert (shown["agents"], shown["fingerprint"]) == (2, made["fingerprint"])


def test_options_of_another_action_of_keys_are_misuse(corn: Runner, tmp_path: Path) -> None:
    for arguments in (
        ("make", tmp_path, "--agent", 1, "--delta", 1e-6),
        ("make", tmp_path, tmp_path, "--agent", 1),
        ("rotate", tmp_path),
        ("rotate", tmp_path, "--agents", 2),
        ("roster", tmp_path),
        ("roster", tmp_path, "--out", tmp_path / "r.json", "--agent", 1),
        ("ledger", tmp_path, "--out", tmp_path / "r.json"),
    ):
        outcome = corn("keys", *arguments)
        assert outcome.exit_code == 2, arguments
    assert list(tmp_path.iterdir()) == []


def test_without_a_graph_a_request_is_written(corn: Runner, tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    outcome = corn("plan", "--epsilon", 3, "--steps", 40, "--colluders", 2, "--out", path)
    assert outcome.exit_code == 0, outcome.stderr
    request = read_request(path)
    assert request == PlanningRequest(
        budget=PrivacyBudget(3, 1e-5, num_steps=40, clip=0.1),
        objective=default_objective(40, mixing="sum"),
        threat=ThreatModel(2),
    )
    gossip = corn("plan", "--horizon", 1, "--steps", 40, "--out", path, "--json")
    assert json.loads(gossip.stdout)["mixing"] == "gossip"
    assert read_request(path).mixing == "gossip"
    refused = corn("plan", "--mechanism", "mine=R.npy", "--steps", 40, "--out", path)
    assert refused.exit_code == 1
    assert "mechanism must be one of" in refused.stderr


def test_an_own_objective_is_a_file_or_a_function(corn: Runner, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def weigh(W):\n    return W.T @ W + W.T @ W.T @ W @ W\n")
    options = ("--graph", "ring:4", "--steps", 5, "--mechanism", "ldp", "--out")
    made = corn("plan", *options, tmp_path / "a", "--objective", f"{tmp_path / 'mine.py'}:weigh")
    assert made.exit_code == 0, made.stderr
    found = load_plan(tmp_path / "a")
    W = found.network.mixing_matrix
    expected = W.T @ W + W.T @ W.T @ W @ W
    assert found.network.mixing == "gossip"
    assert np.allclose(found.objective.matrix(W), expected)
    energy = np.trace(expected @ found.decomposition.covariance)
    assert found.certificate.value == pytest.approx(energy)
    np.save(tmp_path / "A.npy", expected)
    given = ("--objective", tmp_path / "A.npy")
    assert corn("plan", *options, tmp_path / "b", *given).exit_code == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert corn("plan", *options, tmp_path / "c", *given, "--horizon", 3).exit_code == 2
    assert corn("plan", *options[2:], tmp_path / "c", *given).exit_code == 2
