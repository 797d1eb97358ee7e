"""``corn agent`` starts one agent as ``corn launch`` would, and misuse is refused."""

import inspect
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from corn.cli.agent import RunOptions, agent
from corn.cli.launch import launch
from corn.cli.learning import LearningOptions
from corn.distributed import AgentConfig, AgentResult, Reports, RunStatus
from corn.distributed.settings import RunSettings
from corn.learn import SHARED_COLUMNS
from corn.learn.metrics import Row
from corn.plan import Plan, fingerprint
from tests.distributed.harness import small_plan

from .commands import Runner

TASK = ("--task", "breast-cancer")
PLACE = ("--agent", "0", "--agents", "2", "--store", "127.0.0.1:1")


def test_agent_and_launch_have_the_same_options_of_learning_and_of_a_run() -> None:
    """With other defaults an agent on another host would be refused by launched ones."""
    for command in (agent, launch):
        types = {
            p.annotation for p in inspect.signature(command, eval_str=True).parameters.values()
        }
        assert {LearningOptions, RunOptions} <= types
    settings = RunOptions().make_settings(LearningOptions("breast-cancer"), batch_size=None)
    usual = RunSettings(settings.schedule)
    assert settings == usual


@pytest.mark.parametrize(
    ("options", "batch_size"),
    [((), None), (("--batch-size", "64"), 64), (("--batch-size", "128"), 128)],
)
def test_a_batch_size_that_is_not_given_is_left_to_the_plan(
    corn: Runner,
    options: tuple[str, ...],
    batch_size: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[AgentConfig] = []

    def run(config: AgentConfig, _: Reports) -> tuple[Plan, AgentResult]:
        found.append(config)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("corn.distributed.agent.run_workload", run)
    monkeypatch.setattr("corn.distributed.processes.listen_for_signals", lambda: None)
    corn("agent", "--plan", "plan.corn", "--keys", "keys", *PLACE, *TASK, *options)
    (config,) = found
    assert config.settings.batch_size == batch_size
    assert config.default_batch_size == 128


def test_the_promise_is_of_the_plan_that_was_run(
    corn: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the plan may be gone, or another one, when the run ends."""
    plan = small_plan("ring:4", 12)
    row: Row = dict.fromkeys(SHARED_COLUMNS, 0.0)
    result = AgentResult(0, RunStatus.COMPLETE, num_steps=12, measured=row)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("corn.distributed.agent.run_workload", lambda *_: (plan, result))
    monkeypatch.setattr("corn.distributed.processes.listen_for_signals", lambda: None)
    gone = str(tmp_path / "gone.corn")
    done = corn("agent", "--plan", gone, "--keys", "keys", *PLACE, *TASK, "--json")
    assert done.exit_code == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["plan"] == fingerprint(plan).hex()
    assert facts["promise"] == plan.budget.describe()
    result = replace(result, simulation="labels decide")
    done = corn("agent", "--plan", gone, "--keys", "keys", *PLACE, *TASK, "--json")
    facts = json.loads(done.stdout)
    assert facts["promise"] == f"simulated: {plan.budget.describe()}"
    assert facts["simulation"] == "labels decide"
    assert "simulated ε spent 0 of " in done.stderr
    assert "; labels decide" in done.stderr


def test_scores_on_private_samples_are_not_printed(
    corn: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: Row = dict.fromkeys(SHARED_COLUMNS, 0.4321)
    shared: Row = own | {"test_loss": math.nan, "validation_loss": math.nan, "epsilon": 1.0}
    result = AgentResult(0, RunStatus.COMPLETE, num_steps=12, rows=(own,), measured=shared)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "corn.distributed.agent.run_workload", lambda *_: (small_plan("ring:4", 12), result)
    )
    monkeypatch.setattr("corn.distributed.processes.listen_for_signals", lambda: None)
    done = corn("agent", "--plan", "plan.corn", "--keys", "keys", *PLACE, *TASK, "--json")
    assert done.exit_code == 0, done.stderr
    assert {"test_loss", "validation_loss"}.isdisjoint(json.loads(done.stdout)["measured"])
    assert "complete after 12 steps, " in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--plan", "plan.corn", "--request", "request.json"],
        ["--request", "request.json", "--neighbours", "1,x"],
    ],
    ids=["neither plan nor request", "both", "neighbours"],
)
def test_misuse_exits_with_2(corn: Runner, arguments: list[str]) -> None:
    assert corn("agent", *arguments, "--keys", "keys", *PLACE, *TASK).exit_code == 2
