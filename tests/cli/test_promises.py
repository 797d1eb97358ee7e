"""A promise for each agent on the command line: lists, tables, plans and every refusal."""

import json
from pathlib import Path

import pytest

from corn.plan import load_plan

from .commands import Runner, run_quietly

PLAN = ["plan", "--graph", "ring:3", "--steps", 50]
TRAIN = ["train", "--task", "breast-cancer", "--step-size", 0.1]
TABLE = "agent,epsilon,delta\n2,4,1e-5\n0,1,1e-6\n1,8,1e-5\n"


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


def test_a_table_gives_both_numbers_in_any_order(corn: Runner, tmp_path: Path) -> None:
    (tmp_path / "promises.csv").write_text(TABLE, encoding="utf-8")
    arguments = ["--epsilon", tmp_path / "promises.csv", "--delta", 0.5]
    assert corn(*PLAN, *arguments, "--out", tmp_path / "plan.corn").exit_code == 0
    budget = load_plan(tmp_path / "plan.corn").budget
    assert (budget.epsilon, budget.delta) == ((1, 8, 4), (1e-6, 1e-5, 1e-5))


def test_a_table_calls_agents_by_their_names_in_the_graph(corn: Runner, tmp_path: Path) -> None:
    (tmp_path / "graph.txt").write_text("north south\nsouth east\neast north\n", encoding="utf-8")
    table = tmp_path / "promises.csv"
    table.write_text("agent,epsilon\neast,4\nnorth,1\nsouth,8\n", encoding="utf-8")
    arguments = ["plan", "--graph", tmp_path / "graph.txt", "--steps", 50, "--epsilon", table]
    outcome = corn(*arguments, "--out", tmp_path / "plan.corn")
    assert outcome.exit_code == 0, outcome.stderr
    assert load_plan(tmp_path / "plan.corn").budget.epsilon == (1, 8, 4)
    table.write_text("agent,epsilon\neast,4\nnorth,1\nwest,8\n", encoding="utf-8")
    outcome = corn(*arguments, "--out", tmp_path / "plan.corn")
    assert outcome.exit_code == 1
    assert "found 'west': is it east?" in outcome.stderr


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
        (["--epsilon", "none.csv"], 1, "none.csv: No such file"),
    ],
)
def test_bad_promises_are_refused_in_one_line(
    corn: Runner, tmp_path: Path, options: list[str], exit_code: int, message: str
) -> None:
    outcome = corn(*PLAN, *options, "--out", tmp_path / "plan.corn")
    assert outcome.exit_code == exit_code
    assert message in " ".join(outcome.stderr.replace("│", " ").split())
    assert not (tmp_path / "plan.corn").exists()
