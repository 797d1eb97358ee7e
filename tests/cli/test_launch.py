"""``corn launch`` runs real agents and writes what a simulation would write."""

import csv
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from corn.cli.learning import LearningOptions
from corn.distributed import agent
from corn.learn import COLUMNS
from corn.learn.schedule import make_schedule
from corn.plan import save_plan
from tests.distributed.harness import small_plan

from .commands import Runner

TASK = ("--task", "breast-cancer")


@pytest.mark.slow
def test_a_plan_is_run_and_its_results_written(corn: Runner, tmp_path: Path) -> None:
    save_plan(small_plan("ring:3", 30), tmp_path / "plan.corn")
    out = tmp_path / "run"
    arguments = ["launch", tmp_path / "plan.corn", "--out", out, "--step-size", "0.5", *TASK]
    outcome = corn(*arguments, "--json", "--plot", tmp_path / "training.png")
    assert outcome.exit_code == 0, outcome.stderr
    facts = json.loads(outcome.stdout)
    assert (facts["status"], facts["num_steps"], facts["lost"]) == ("complete", 30, {})
    assert facts["configuration"]["steps"] == 30  # the plan's, not the option's default
    assert facts["measured"]["epsilon"] <= 10
    assert 0 <= facts["measured"]["test_accuracy"] <= 1  # by noise that is new each time
    assert set(facts["agents"]["1"]["traffic"]) == {"0", "2"}
    with (out / "metrics.csv").open(encoding="utf-8") as stream:
        assert tuple(csv.DictReader(stream).fieldnames or ()) == COLUMNS
    for name in ("run.json", "agent-2/metrics.csv"):
        assert (out / name).exists()
    assert stat.S_IMODE((out / "agent-2").stat().st_mode) == 0o700
    assert (tmp_path / "training.png").exists()
    # Whoever is handed the results must not get what noise is made of.
    keys = tmp_path / "plan.keys"
    assert not [*out.rglob("*.key"), *out.rglob("*.ledger")]
    secret = (keys / "agent-1.key").read_text(encoding="ascii").split()[1]
    assert secret not in outcome.stdout + outcome.stderr
    assert not any(secret in path.read_text("latin-1") for path in out.glob("agent-*/*.c*"))
    over = corn(*arguments)
    assert over.exit_code == 1
    assert "has a run that came to step 30: go on with --resume" in over.stderr
    arguments[3] = tmp_path / "another folder for results"
    again = corn(*arguments)
    assert again.exit_code == 1
    assert again.stderr.count("\n") == 1
    assert "ledger allows no more releases under this plan" in again.stderr


@pytest.mark.slow
def test_a_rehearsal_promises_nothing(corn: Runner, tmp_path: Path) -> None:
    save_plan(small_plan("ring:3", 5), tmp_path / "plan.corn")
    arguments = ["launch", tmp_path / "plan.corn", "--out", tmp_path / "run", *TASK, "--json"]
    outcome = corn(*arguments, "--rehearse", "3")
    assert outcome.exit_code == 0, outcome.stderr
    facts = json.loads(outcome.stdout)
    assert facts["promise"] == "rehearsal: protects nothing"
    assert "inf" in str(facts["measured"]["epsilon"]).lower()
    resumed = corn(*arguments, "--resume")
    assert resumed.exit_code == 1
    assert "of a rehearsal, which protects nothing" in resumed.stderr


@pytest.mark.slow
def test_the_batch_is_the_plan_s(corn: Runner, tmp_path: Path) -> None:
    made = corn(
        *("plan", "--graph", "ring:3", "--steps", 5, "--unit", "sample", "--batch-size", 16),
        *("--out", tmp_path / "plan.corn"),
    )
    assert made.exit_code == 0, made.stderr
    arguments = ["launch", tmp_path / "plan.corn", "--out", tmp_path / "run", *TASK, "--json"]
    assert corn(*arguments, "--rehearse", 1).exit_code == 0
    outcome = corn(*arguments, "--batch-size", 16)
    assert outcome.exit_code == 0, outcome.stderr


@pytest.mark.slow
def test_agents_plan_for_themselves(
    corn: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where keys go without a plan
    outcome = corn(
        *("launch", "--decentralized-planning", "--graph", "ring:3", "--steps", 10),
        *("--mechanism", "ldp", "--colluders", 0, "--out", tmp_path),
        *TASK,
    )
    assert outcome.exit_code == 0, outcome.stderr
    assert "10 (complete)" in outcome.stdout
    assert (tmp_path / "request.json").exists()
    assert (tmp_path / "corn.keys" / "roster.json").exists()
    plans = {(tmp_path / f"agent-{agent}" / "plan.corn").read_bytes() for agent in range(3)}
    assert len(plans) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["launch"],
        ["launch", "--decentralized-planning"],
        ["launch", "plan.corn", "--decentralized-planning", "--graph", "ring:3"],
        ["launch", "plan.corn", "--on-dropout", "panic"],
    ],
)
def test_misuse_exits_with_2(corn: Runner, arguments: list[str]) -> None:
    assert corn(*arguments, *TASK).exit_code == 2


@pytest.mark.parametrize(
    "options",
    [
        ["--epsilon", "3"],
        ["--steps", "2"],
        ["--weights", "lazy"],
        ["--mechanism", "decor"],
        ["--sampling-rate", "0.1"],
        ["--seeds", "balls:1"],
    ],
)
def test_options_that_contradict_the_plan_are_misuse(
    corn: Runner, tmp_path: Path, options: list[str]
) -> None:
    save_plan(small_plan("ring:3", 5), tmp_path / "plan.corn")
    outcome = corn("launch", tmp_path / "plan.corn", *TASK, *options)
    assert outcome.exit_code == 2
    assert "the plan has" in " ".join(outcome.stderr.split())


def test_a_stand_in_can_be_refused(
    corn: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(small_plan("ring:3", 5), tmp_path / "plan.corn")
    outcome = corn("launch", "plan.corn", "--task", "a9a", "--cache", tmp_path, "--no-stand-in")
    assert outcome.exit_code == 1
    assert "corn data get a9a" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.corn"], "none.corn: no such file"),
        (["plan.corn", "--agents-per-host", "2"], "store must be given as HOST:PORT"),
        (["plan.corn", "--store", "nowhere"], "an address must be HOST:PORT, found 'nowhere'"),
        (["plan.corn", "--store", "192.0.2.1:80"], "192.0.2.1:80: no store can be opened there"),
        (
            ["plan.corn", "--agents-per-host", "2", "--host", "5", "--store", "127.0.0.1:2"],
            "host 5 has no agents: the plan has 3, and 2 run on each",
        ),
    ],
)
def test_expected_failures_exit_with_1_and_one_line(
    corn: Runner,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(small_plan("ring:3", 5), tmp_path / "plan.corn")
    outcome = corn("launch", *arguments, *TASK)
    assert outcome.exit_code == 1
    assert outcome.stderr.count("\n") == 1
    assert message in outcome.stderr


@pytest.mark.parametrize("task", ["breast-cancer", "quadratic"])
def test_an_agent_by_itself_has_the_defaults_of_launch(task: Any) -> None:
    """Otherwise one on another host would be refused by those that a launcher started."""
    options = agent._parser().parse_args(["--plan", "p", "--keys", "k", "--task", task])
    ours = LearningOptions(task)
    assert agent._make_workload(options) == ours.make_workload()
    assert agent._make_settings(options).schedule == make_schedule(0.1, ours.choose_schedule())
