"""``corn agent`` starts one agent as ``corn launch`` would, and misuse is refused."""

import inspect
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from corn.cli.agent import RunOptions, agent
from corn.cli.launch import launch
from corn.cli.learning import LearningOptions
from corn.distributed import AgentConfig, AgentResult, Reports, RunStatus
from corn.distributed.keyring import make_keys
from corn.distributed.settings import RunSettings
from corn.learn import SHARED_COLUMNS
from corn.learn.metrics import Row
from corn.plan import Plan, fingerprint, save_plan
from tests.distributed.harness import Forked, run_corn, small_plan

from .commands import Runner

TASK = ("--task", "breast-cancer")
PLACE = ("--agent", "0")


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
    result = AgentResult(0, RunStatus.COMPLETE, num_steps=12, rows=(row,))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("corn.distributed.agent.run_workload", lambda *_: (plan, result))
    monkeypatch.setattr("corn.distributed.processes.listen_for_signals", lambda: None)
    gone = str(tmp_path / "gone.corn")
    done = corn("agent", "--plan", gone, "--keys", "keys", *PLACE, *TASK, "--json")
    assert done.exit_code == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["plan"] == fingerprint(plan).hex()
    assert facts["promise"] == plan.budget.describe()


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
    assert corn("agent", *arguments, "--keys", "keys", *TASK).exit_code == 2


# Stands for an agent of torchrun: saves its environment, and ends with the agent's exit code.
STAND_IN = """
env -0 > new-$RANK
mv new-$RANK env-$RANK
until [ -s code-$RANK ]; do sleep 0.1; done
exit $(cat code-$RANK)
"""


@pytest.mark.slow
def test_agents_of_torchrun_run_a_plan(tmp_path: Path) -> None:
    """With the environment and the store of torchrun, in processes that have imported torch."""
    save_plan(small_plan("path:2", 12), tmp_path / "plan.corn")
    make_keys(tmp_path / "keys", 2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--no-python", "sh", "-c", STAND_IN]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE) as torchrun:
        try:
            environments = [read_environment(tmp_path / f"env-{rank}") for rank in range(2)]
            arguments = ["agent", "--plan", "plan.corn", "--json", "--keys", "keys", *TASK]
            agents = [
                Forked(tmp_path, run_corn, *arguments, "--timeout", "60", environment=there)
                for there in environments
            ]
            for rank, process in enumerate(agents):
                (tmp_path / f"code-{rank}").write_text(f"{process.wait()}\n")
            assert torchrun.wait(timeout=120) == 0, [process.stderr for process in agents]
        finally:
            torchrun.kill()
    for rank, process in enumerate(agents):
        own = json.loads(process.stdout)
        assert own["agent"] == rank
        assert (own["status"], own["num_steps"], own["stop_reason"]) == ("complete", 12, "none")
        assert own["measured"]["epsilon"] <= 10
        assert "train_loss" not in own["measured"]
        assert "one insider" in own["adversary"]
        assert f"agent {rank}: complete after 12 steps" in process.stderr
        for folder in ("shared", "private"):
            assert (tmp_path / "out" / folder / f"agent-{rank}" / "metrics.csv").exists()


def read_environment(path: Path) -> dict[str, str]:
    """Return an environment once it has been saved."""
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, "torchrun starts nothing"
        time.sleep(0.05)
    entries = path.read_text(encoding="utf-8").rstrip("\0").split("\0")
    return dict(entry.split("=", maxsplit=1) for entry in entries)
