"""Outputs with a promise for each agent: the strictest, its cost, and tables that stay short."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corn.covariance import Horizon
from corn.privacy import PrivacyBudget
from corn.topology import load_network
from tests.cli.commands import Runner

GRAPH, EPSILONS = "path:6", (0.5, 2.0, 2.0, 8.0, 2.0, 2.0)
PROMISES = ["--graph", GRAPH, "--epsilon", ",".join(map(str, EPSILONS)), "--steps", 50]
BUDGET = PrivacyBudget(EPSILONS, 1e-5, num_steps=50, clip=0.1)
CAPS = BUDGET.precision_caps(6)


def read(text: str) -> Any:
    return json.loads(text)


def ldp_cost() -> float:
    """Σ A_ii/b_i, over the same sum with agent 0 at the cap of agents with ε = 2."""
    A = Horizon(10, 0.1).matrix(load_network(GRAPH).mixing_matrix).diagonal()
    relaxed = np.where(CAPS.min() == CAPS, CAPS[1], CAPS)
    return float((A / CAPS).sum() / (A / relaxed).sum())


def test_compare_states_the_cost_of_the_strictest_promise(corn: Runner) -> None:
    facts = read(corn("compare", *PROMISES, "--json").stdout)
    assert facts["precision_caps"] == pytest.approx(CAPS)
    strictest = facts["strictest"]
    assert strictest["agents"] == [0]
    assert "ε = 0.5" in strictest["promise"]
    assert "ε = 2" in strictest["relaxed_promise"]
    costs = strictest["costs"]
    assert costs["ldp"]["ratio"] == pytest.approx(ldp_cost(), rel=1e-6)
    # A server's noise follows the strictest agent alone.
    assert costs["central"]["ratio"] == pytest.approx(CAPS[1] / CAPS[0], rel=1e-6)
    assert all(cost["ratio"] > 1 for cost in costs.values())
    rows = facts["objectives"]["horizon of 10 steps, disagreement weighted by 0.1"]
    assert costs["corn"]["relaxed_value"] < rows["corn"]["value"]
    assert rows["central"]["central_ratio"] == pytest.approx(1)
    assert rows["ldp"]["central_ratio"] == pytest.approx(CAPS.min() * (1 / CAPS).sum())
    assert rows["corn one-step"]["central_ratio"] > rows["corn"]["central_ratio"] >= 1

    shown = corn("compare", *PROMISES).stdout
    assert "agent 0: ε = 0.5" in shown
    assert "Cost of the strictest promise" in shown


def test_threat_states_the_cost_for_each_way_to_share_seeds(corn: Runner) -> None:
    options = ["--seeds", "pairs,global", "--colluders", "1"]
    facts = read(corn("threat", *PROMISES, *options, "--json").stdout)
    pairs, shared = facts["rows"]
    assert facts["strictest"].startswith("agent 0: ε = 0.5")
    assert "together with one insider" in pairs["adversary"]
    assert facts["strictest_cost_of_ldp"] == pytest.approx(ldp_cost(), rel=1e-6)
    assert facts["strictest_cost_of_central"] == pytest.approx(CAPS[1] / CAPS[0], rel=1e-6)
    # One seed for all is LDP against an insider.
    assert shared["strictest_cost"] == pytest.approx(ldp_cost(), rel=1e-3)
    assert pairs["strictest_cost"] > 1
    assert 1 <= pairs["central_ratio"] < shared["central_ratio"]
    assert "cost of the strictest" in corn("threat", *PROMISES, *options).stdout


@pytest.mark.parametrize("command", ["compare", "threat"])
def test_equal_promises_have_no_strictest(corn: Runner, command: str) -> None:
    same = ["--graph", "ring:4", "--epsilon", "2,2,2,2", "--steps", 50]
    options = ["--seeds", "global", "--colluders", "0"] if command == "threat" else []
    assert "strictest" not in corn(command, *same, *options).stdout
    assert "strictest" not in corn(command, *same, *options, "--json").stdout


def test_design_states_ranges_and_the_strictest_agent(corn: Runner) -> None:
    shown = " ".join(corn("design", *PROMISES, "--mechanism", "ldp").stdout.split())
    stds = 1 / np.sqrt(CAPS)
    assert f"{stds.min():.4g} to {stds.max():.4g} (LDP {stds.min():.4g} to" in shown
    assert "agent 0: ε = 0.5" in shown


def test_plan_and_verification_state_every_promise(corn: Runner, tmp_path: Path) -> None:
    made = read(corn("plan", *PROMISES, "--out", tmp_path / "plan.corn", "--json").stdout)
    found = read(corn("verify", tmp_path / "plan.corn", "--json").stdout)
    assert found["passed"]
    assert found["central_ratio"] == made["central_ratio"] >= 1
    for own, epsilon in zip(found["agents"], EPSILONS, strict=True):
        assert own["promised_epsilon"] == epsilon
        assert own["epsilon"] <= epsilon * (1 + 1e-9)
    shown = corn("verify", tmp_path / "plan.corn").stdout
    assert "× a trusted server's variance" in shown
    assert "agent 0: ε = 0.5" in shown


def test_a_hundred_agents_fit_a_table(corn: Runner, tmp_path: Path) -> None:
    epsilons = ",".join(["0.5"] + ["2"] * 98 + ["8"])
    plan = tmp_path / "plan.corn"
    options = ["--epsilon", epsilons, "--mechanism", "ldp", "--steps", 50, "--colluders", 0]
    corn("plan", "--graph", "ring:100", *options, "--out", plan)
    shown = corn("verify", plan)
    assert shown.exit_code == 0
    assert "agents 1, 2, 3, 4, 5 and 93 more" in " ".join(shown.stdout.split())
    assert len(shown.stdout.splitlines()) < 40
    assert "--agent N" in shown.stderr
    assert len(read(corn("verify", plan, "--json").stdout)["agents"]) == 100
    one = corn("verify", plan, "--agent", 99).stdout
    assert "promised" in one
