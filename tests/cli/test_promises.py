"""A promise for each agent on the command line: lists, plans and every refusal."""

import json
from pathlib import Path

import pytest

from .commands import Runner, run_quietly

PLAN = ["plan", "--graph", "ring:3", "--steps", 50]
TRAIN = ["train", "--task", "breast-cancer", "--step-size", 0.1]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.corn"
    assert run_quietly(*PLAN, "--epsilon", "1,8,4", "--out", path) == 0
    return path


def test_a_plan_keeps_each_agents_promise(corn: Runner, plan: Path) -> None:
    facts = json.loads(corn("verify", plan, "--json").stdout)
    assert facts["passed"]
    assert [own["promised_epsilon"] for own in facts["agents"]] == [1, 8, 4]
    assert all(own["epsilon"] <= own["promised_epsilon"] for own in facts["agents"])
    # The strict agent's promise is used up: its cap binds.
    assert facts["agents"][0]["epsilon"] > 0.99
    text = " ".join(corn("verify", plan).stdout.split())
    assert "ε = 1 to 8, δ = 1e-05, each agent with its own" in text


def test_training_keeps_the_promises_of_a_plan(corn: Runner, plan: Path) -> None:
    outcome = corn(*TRAIN, "--plan", plan, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    own = json.loads(outcome.stdout)["mechanisms"]["plan"]
    spent = own["simulated_epsilon_of_each_agent"]
    assert all(epsilon <= most for epsilon, most in zip(spent, (1, 8, 4), strict=True))
    # Also the plan's own: it is not an option beside the plan.
    refused = corn(*TRAIN, "--plan", plan, "--epsilon", "1,8,4")
    assert refused.exit_code == 2
    assert "the plan decides this" in refused.stderr


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (["--epsilon", "1,8"], 1, "must be 3, one for each agent, found 2"),
        (["--epsilon", "1,8,-4"], 1, "epsilon must be positive"),
        (["--epsilon", "1,,4"], 1, "must be numbers separated by commas, found '1,,4'"),
    ],
)
def test_bad_promises_are_refused_in_one_line(
    corn: Runner, tmp_path: Path, options: list[str], exit_code: int, message: str
) -> None:
    outcome = corn(*PLAN, *options, "--out", tmp_path / "plan.corn")
    assert outcome.exit_code == exit_code
    assert message in " ".join(outcome.stderr.replace("│", " ").split())
    assert not (tmp_path / "plan.corn").exists()
