"""Outputs with a promise for each agent: the strictest, its cost, and tables that stay short."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from corn.privacy import PrivacyBudget
from tests.cli.commands import Runner

GRAPH, EPSILONS = "path:6", (0.5, 2.0, 2.0, 8.0, 2.0, 2.0)
PROMISES = ["--mixing", "gossip", "--graph", GRAPH, "--steps", 50]
PROMISES += ["--epsilon", ",".join(map(str, EPSILONS))]
BUDGET = PrivacyBudget(EPSILONS, 1e-5, num_steps=50, clip=0.1)
CAPS = BUDGET.precision_caps(6)


def read(text: str) -> Any:
    return json.loads(text)


def best_weighted_gain(caps: Any) -> float:
    """Minimise max w_i²/b_i over weights that add up to 1, numerically."""
    scaled = caps / caps.min()
    n = len(scaled)
    # The bound of each agent is a linear constraint on (w, s): w_i ≤ s √b_i.
    found = linprog(
        [0.0] * n + [1.0],
        A_ub=np.c_[np.eye(n), -np.sqrt(scaled)],
        b_ub=np.zeros(n),
        A_eq=[[1.0] * n + [0.0]],
        b_eq=[1.0],
    )
    return 1 / (n * n * float(found.fun) ** 2)


def test_compare_states_the_strictest_promise(corn: Runner) -> None:
    facts = read(corn("compare", *PROMISES, "--json").stdout)
    assert facts["precision_caps"] == pytest.approx(CAPS)
    rows = {(row["mechanism"], row["max_colluders"]): row for row in facts["rows"]}
    assert rows["central", 0]["central_ratio"] == pytest.approx(1)
    assert rows["ldp", 1]["central_ratio"] == pytest.approx(CAPS.min() * (1 / CAPS).sum())
    shown = " ".join(corn("compare", *PROMISES).stdout.split())
    assert "keeps the promise of agent 0 for all" in shown


def test_plan_and_verification_state_every_promise(corn: Runner, tmp_path: Path) -> None:
    made = read(corn("plan", *PROMISES, "--out", tmp_path / "plan.corn", "--json").stdout)
    found = read(corn("verify", tmp_path / "plan.corn", "--json").stdout)
    assert found["passed"]
    assert found["central_ratio"] == made["central_ratio"] >= 1
    for own, epsilon in zip(found["agents"], EPSILONS, strict=True):
        assert own["promised_epsilon"] == epsilon
        assert own["epsilon"] <= epsilon * (1 + 1e-9)
    shown = " ".join(corn("verify", tmp_path / "plan.corn").stdout.split())
    assert "× the variance of a trusted server that keeps the promise of agent 0 for all" in shown
    weighted = made["central_ratio"] * best_weighted_gain(CAPS)
    assert made["weighted_central_ratio"] == pytest.approx(weighted, rel=1e-3)
    assert f"{made['weighted_central_ratio']:.4g} × that of a server that weights" in shown


def test_a_hundred_agents_fit_a_table(corn: Runner, tmp_path: Path) -> None:
    epsilons = ",".join(["0.5"] + ["2"] * 98 + ["8"])
    plan = tmp_path / "plan.corn"
    options = ["--epsilon", epsilons, "--mechanism", "ldp", "--steps", 50, "--colluders", 0]
    corn("plan", "--graph", "ring:100", *options, "--out", plan)
    shown = corn("verify", plan)
    assert shown.exit_code == 0
    assert "1, 2, 3, 4, 5 and 93 more" in " ".join(shown.stdout.split())
    assert len(shown.stdout.splitlines()) < 40
    assert len(read(corn("verify", plan, "--json").stdout)["agents"]) == 100
    one = corn("verify", plan, "--agent", 99).stdout
    assert "promised" in one


SIZES = (12, 400, 500)


@pytest.fixture
def sites(tmp_path: Path) -> list[str]:
    """Options for files of very different sizes, one for each agent."""
    rng = np.random.default_rng(0)
    for agent, size in enumerate(SIZES):
        rows = rng.uniform(-1, 1, (size, 2))
        lines = [f"{a:.4f},{b:.4f},{int(a > b)}" for a, b in rows]
        (tmp_path / f"{agent}.csv").write_text("\n".join(["a,b,y", *lines]), encoding="utf-8")
    files = ["--data", str(tmp_path / "{agent}.csv"), "--target", "y", "--bounds=-1:1"]
    budget = ["--unit", "sample", "--epsilon", "1", "--steps", "20", "--batch-size", "20"]
    run = ["--graph", "ring:3", "--mechanism", "corn", "--step-size", "0.1"]
    return [*files, *budget, *run]


def test_a_small_site_is_named_where_it_decides_the_noise_of_all(
    corn: Runner, sites: list[str]
) -> None:
    """A model full of noise is not reported as nearly as good as a trusted server's."""
    shown = " ".join(corn("train", *sites, "--sampling", "passes").stdout.split())
    # Agent 0 has less than one batch of 20, so all 20 steps may use a sample of it. The others have
    # more than 10 batches and fewer than 20, so two passes begin.
    caps = np.array([1 / 20, 1 / 2, 1 / 2])
    assert "keeps the promise of agent 0 for all" in shown
    assert "weights agents by their promises" in shown
    facts = read(corn("train", *sites, "--sampling", "passes", "--json").stdout)
    own = facts["mechanisms"]["corn"]
    gain = own["weighted_central_ratio"] / own["central_ratio"]
    assert gain == pytest.approx(best_weighted_gain(caps), rel=1e-6)
    assert gain > 5
    assert own["weighted_central_ratio"] > 5


def test_one_rate_for_all_needs_no_other_reference(corn: Runner, sites: list[str]) -> None:
    shown = " ".join(corn("train", *sites).stdout.split())
    assert "× a trusted server's noise variance in the average model" in shown
    assert "for all" not in shown
