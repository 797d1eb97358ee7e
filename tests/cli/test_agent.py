"""``corn agent`` starts one agent as ``corn launch`` would, and misuse is refused."""

import inspect
import json
import math
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from corn.cli.agent import RunOptions, agent
from corn.cli.launch import launch
from corn.cli.learning import LearningOptions
from corn.distributed import AgentConfig, AgentResult, PlanningRequest, Reports, Requirements
from corn.distributed.keyring import make_keys
from corn.distributed.results import RunStatus
from corn.distributed.settings import RunSettings
from corn.errors import CornError, PublicError
from corn.learn import SHARED_COLUMNS
from corn.learn.datasets import USUAL_BATCH_SIZE
from corn.learn.metrics import Row
from corn.plan import Plan, fingerprint, save_plan
from corn.privacy import PrivacyBudget
from tests.distributed.harness import small_plan

from .commands import Runner

TASK = ("--task", "breast-cancer")
PLACE = ("--agent", "0", "--store", "127.0.0.1:1")


def test_agent_and_launch_have_the_same_options_of_learning_and_of_a_run() -> None:
    """With other defaults an agent on another host would be refused by launched ones."""
    for command in (agent, launch):
        types = {
            p.annotation for p in inspect.signature(command, eval_str=True).parameters.values()
        }
        assert {LearningOptions, RunOptions} <= types
    budget = PrivacyBudget(1, 1e-5, num_steps=5, clip=1)
    settings = RunOptions().make_settings(LearningOptions("breast-cancer"), budget)
    usual = RunSettings(settings.schedule, batch_size=USUAL_BATCH_SIZE)
    assert settings == usual


@pytest.mark.parametrize(("options", "batch_size"), [((), 128), (("--batch-size", "64"), 64)])
def test_a_request_needs_neighbours_and_counts_agents_by_the_roster(
    corn: Runner,
    options: tuple[str, ...],
    batch_size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[AgentConfig] = []

    def run(config: AgentConfig, _: Reports) -> tuple[Plan, AgentResult]:
        found.append(config)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORN_OTHER_KEYS", "old.keys:older.keys")
    monkeypatch.setattr("corn.distributed.agent.run_workload", run)
    monkeypatch.setattr("corn.distributed.launcher.listen_for_signals", lambda: None)
    make_keys(tmp_path / "keys", 3)
    assert corn("plan", "--steps", 5, "--out", "request.json").exit_code == 0
    arguments = ("agent", "request.json", "--keys", "keys", *PLACE, *TASK, *options)
    refused = corn(*arguments)
    assert refused.exit_code == 1
    assert refused.stderr.count("\n") == 1
    asked = ("--require", "steps=20", "--require", "insiders=1")
    assert corn(*arguments, "--neighbours", "1,2", *asked).exit_code == 130
    (config,) = found
    folders = (Path("old.keys"), Path("older.keys"))
    assert config.requirements == Requirements(steps=20, insiders=1, other_keys=folders)
    assert isinstance(config.source, PlanningRequest)
    assert (config.neighbours, config.num_agents) == ((1, 2), 3)
    assert config.settings.batch_size == batch_size


def test_the_promise_is_of_the_plan_that_was_run(
    corn: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the plan may be another one when the run ends."""
    plan = small_plan("ring:4", 12)
    row: Row = dict.fromkeys(SHARED_COLUMNS, 0.0)
    result = AgentResult(0, RunStatus.COMPLETE, num_steps=12, measured=row)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("corn.distributed.agent.run_workload", lambda *_: (plan, result))
    monkeypatch.setattr("corn.distributed.launcher.listen_for_signals", lambda: None)
    save_plan(plan, tmp_path / "plan.corn")
    done = corn("agent", "plan.corn", "--keys", "keys", *PLACE, *TASK, "--json")
    assert done.exit_code == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["plan"] == fingerprint(plan).hex()
    assert facts["promise"] == plan.budget.describe()
    result = replace(result, simulation="labels decide")
    done = corn("agent", "plan.corn", "--keys", "keys", *PLACE, *TASK, "--json")
    facts = json.loads(done.stdout)
    assert facts["promise"] == f"simulated: {plan.budget.describe()}"
    assert facts["simulation"] == "labels decide"


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
    monkeypatch.setattr("corn.distributed.launcher.listen_for_signals", lambda: None)
    save_plan(small_plan("ring:4", 12), tmp_path / "plan.corn")
    done = corn("agent", "plan.corn", "--keys", "keys", *PLACE, *TASK, "--json")
    assert done.exit_code == 0, done.stderr
    assert {"test_loss", "validation_loss"}.isdisjoint(json.loads(done.stdout)["measured"])


@pytest.mark.parametrize(
    ("error", "mark"),
    [(CornError, "private, do not publish: "), (PublicError, "")],
    ids=["of the data", "of the run"],
)
def test_failures_that_may_quote_data_are_marked(
    corn: Runner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[CornError],
    mark: str,
) -> None:
    def fail(*_: object) -> None:
        raise error("row 3 has 37.25")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("corn.distributed.agent.run_workload", fail)
    monkeypatch.setattr("corn.distributed.launcher.listen_for_signals", lambda: None)
    save_plan(small_plan("ring:4", 12), tmp_path / "plan.corn")
    failed = corn("agent", "plan.corn", "--keys", "keys", *PLACE, *TASK)
    assert failed.exit_code == 1
    assert failed.stderr.splitlines()[-1] == f"corn: {mark}row 3 has 37.25"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["plan.corn", "--steps", "3"],
    ],
    ids=["no plan", "what the plan decides"],
)
def test_misuse_exits_with_2(
    corn: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_keys(tmp_path / "keys", 3)
    save_plan(small_plan("ring:3", 5), tmp_path / "plan.corn")
    assert corn("agent", *arguments, "--keys", "keys", *PLACE, *TASK).exit_code == 2


@pytest.mark.slow
def test_agents_started_by_themselves_plan_together(tmp_path: Path) -> None:
    """Each knows its neighbours only, and a path of three is a plan of all of them."""
    make_keys(tmp_path / "keys", 3)
    corn = [sys.executable, "-m", "corn"]
    plan = ["plan", "--steps", "6", "--mechanism", "ldp", "--out", "request.json"]
    subprocess.run([*corn, *plan], cwd=tmp_path, check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        store = f"127.0.0.1:{free.getsockname()[1]}"
    command = [*corn, "agent", "request.json", "--keys", "keys", *TASK, "--store", store, "--json"]
    agents = [
        subprocess.Popen(
            [*command, "--agent", str(agent), "--neighbours", neighbours],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for agent, neighbours in enumerate(("1", "0,2", "1"))
    ]
    printed = [process.communicate(timeout=300) for process in agents]
    assert [process.returncode for process in agents] == [0, 0, 0], printed
    facts = [json.loads(stdout) for stdout, _ in printed]
    assert len({own["plan"] for own in facts}) == 1
    for own in facts:
        assert (own["status"], own["num_steps"], own["stop_reason"]) == ("complete", 6, "none")
        assert own["measured"]["epsilon"] <= 10
        assert "train_loss" not in own["measured"]
