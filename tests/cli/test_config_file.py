"""``--config`` takes every option of a command from a TOML file; the command line wins."""

import inspect
from dataclasses import replace
from pathlib import Path

import pytest

from corn.cli import COMMANDS
from corn.distributed import AgentConfig, AgentResult, PlanningRequest, Reports, Requirements
from corn.learn import Workload
from corn.plan import Plan, save_plan
from tests.distributed.harness import small_plan

from .commands import Runner
from .test_conventions import options_of

AGENT = """
task = "breast-cancer"
plan = "plan.corn"
keys = "from-file"
agent = 3
store = "10.0.0.1:29500"
step-size = 1          # a whole number is a number
timeout = 30.5
resume = true
regression = false
batch-size = 64
other-keys = ["old.keys", "older.keys"]
log-format = "json"
status = "127.0.0.1:9100"
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[AgentConfig]:
    """Collect the configuration with which an agent would start."""
    found: list[AgentConfig] = []

    def run(config: AgentConfig, _: Reports) -> tuple[Plan, AgentResult]:
        found.append(config)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CORN_KEYS", raising=False)
    save_plan(small_plan("ring:4", 20), tmp_path / "plan.corn")
    monkeypatch.setattr("corn.distributed.agent.run_workload", run)
    monkeypatch.setattr("corn.distributed.processes.listen_for_signals", lambda: None)
    monkeypatch.setattr("corn.distributed.processes.protect_process", lambda _: None)
    return found


def write(text: str) -> str:
    Path("agent.toml").write_text(text, encoding="utf-8")
    return "agent.toml"


def test_every_option_may_be_in_the_file(corn: Runner, started: list[AgentConfig]) -> None:
    path = write(AGENT.replace('status = "127.0.0.1:9100"\n', ""))
    outcome = corn("agent", "--config", path)
    assert outcome.exit_code == 130, outcome.stderr
    (config,) = started
    assert (config.agent, config.num_agents, config.store) == (3, 4, ("10.0.0.1", 29500))
    assert (config.keys, config.plan) == (Path("from-file"), Path("plan.corn"))
    settings = config.settings
    assert (settings.timeout, settings.resume, settings.batch_size) == (30.5, True, 64)
    assert settings.schedule.at(1, 10) == 1
    assert isinstance(config.workload, Workload)
    assert config.requirements is not None
    assert config.requirements.other_keys == (Path("old.keys"), Path("older.keys"))
    assert config.log_format == "json"


def test_the_command_line_wins_and_then_the_environment(
    corn: Runner, started: list[AgentConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(AGENT.replace('status = "127.0.0.1:9100"\n', ""))
    monkeypatch.setenv("CORN_KEYS", "from-environment")
    corn("agent", "--config", path, "--timeout", "7")
    corn("agent", "--timeout", "8", "--keys", "given", "--config", path)
    assert [own.settings.timeout for own in started] == [7, 8]
    assert [str(own.keys) for own in started] == ["from-environment", "given"]


def test_the_environment_names_several_folders_of_keys(
    corn: Runner, started: list[AgentConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORN_OTHER_KEYS", "old.keys:older.keys")
    options = ("plan.corn", "--keys", "keys", "--agent", "0", "--store", "a:1", "--task", "digits")
    assert corn("agent", *options).exit_code == 130
    (config,) = started
    assert config.requirements is not None
    assert config.requirements.other_keys == (Path("old.keys"), Path("older.keys"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepsize = 0.1", "unknown option 'stepsize': names are those of the command line"),
        ("step_size = 0.1", "such as step-size"),
        ('config = "other.toml"', "unknown option 'config'"),
        ("[agent]\ntimeout = 3", "agent must be a text or a number, found {'timeout': 3}"),
        ("timeout = true", "timeout must be a text or a number, found True"),
        ("batch-size = 1.5", "agent.toml: batch-size: "),
        ("resume = 1", "resume must be true or false, found 1"),
        ('other-keys = "old"', "other-keys must be a list, found 'old'"),
        ("store = false", "store must be a text or a number, found False"),
        ("task = ['mnist']", "task must be one value, found ['mnist']"),
        ("timeout = -1", "agent.toml: timeout: "),
        ('on-dropout = "panic"', "'panic' is not one of"),
        ("timeout = ", "not TOML: Invalid value"),
        ("\x00", "not TOML: "),
    ],
)
def test_mistakes_in_the_file_are_one_line(
    corn: Runner, started: list[AgentConfig], text: str, message: str
) -> None:
    outcome = corn(
        *("agent", "plan.corn", "--config", write(text), "--task", "digits", "--keys", "keys"),
        *("--agent", 0, "--store", "a:1"),
    )
    assert (outcome.exit_code, outcome.stdout, started) == (1, "", [])
    assert outcome.stderr.startswith("corn: agent.toml: ")
    assert message in outcome.stderr
    assert outcome.stderr.count("\n") == 1


@pytest.mark.usefixtures("started")
def test_a_missing_file_is_one_line(corn: Runner) -> None:
    outcome = corn("agent", "--config", "none.toml")
    assert outcome.stderr == "corn: none.toml: cannot be read: No such file or directory\n"


@pytest.mark.usefixtures("started")
def test_a_launch_takes_a_file_too(corn: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[str, object] = {}

    def launch(source: object, *_: object, **options: object) -> None:
        taken.update(options, source=source)
        raise KeyboardInterrupt

    monkeypatch.setattr("corn.distributed.launcher.launch", launch)
    path = write(
        'graph = "ring:4"\nplan = "request.json"\n'
        'task = "breast-cancer"\nout = "runs"\nlog-format = "json"\n'
    )
    assert corn("plan", "--steps", 20, "--epsilon", 4, "--out", "request.json").exit_code == 0
    assert corn("launch", "--config", path).exit_code == 130
    assert taken["out"] == Path("runs")
    request = taken["source"]
    assert isinstance(request, PlanningRequest)
    assert request.budget.epsilon == 4


def test_options_that_a_plan_decides_are_refused_in_a_file(
    corn: Runner, started: list[AgentConfig]
) -> None:
    path = write('plan = "plan.corn"\ntask = "breast-cancer"\ngraph = "ring:4"\n')
    outcome = corn("launch", "--config", path)
    assert (outcome.exit_code, started) == (2, [])
    assert "which decides this" in " ".join(outcome.stderr.split())


def test_commands_with_a_file_can_take_all_their_options_from_it() -> None:
    """Names in a file are those of the command line, so each must be unambiguous."""
    for name, (command, _) in COMMANDS.items():
        if "config_file" in inspect.signature(command).parameters:
            names = [max(option.opts, key=len).removeprefix("--") for option in options_of(name)]
            assert len(names) == len(set(names))


def test_requirements_are_a_table_and_the_command_line_changes_single_ones(
    corn: Runner, started: list[AgentConfig]
) -> None:
    path = write(
        'plan = "plan.corn"\nkeys = "keys"\nagent = 0\nstore = "a:1"\ntask = "digits"\n'
        '[require]\nunit = "sample"\nepsilon = 3\ndelta = 1e-6\ntotal-epsilon = 8.5\n'
    )
    assert corn("agent", "--config", path).exit_code == 130
    options = ("--require", "epsilon=2", "--require", "insiders=1")
    assert corn("agent", "--config", path, *options).exit_code == 130
    expected = Requirements(unit="sample", epsilon=3, delta=1e-6, total_epsilon=8.5)
    # The rest of the table must not be dropped without a word.
    changed = replace(expected, epsilon=2, insiders=1)
    assert [own.requirements for own in started] == [expected, changed]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[require]\nepsilon = [1]", "[require] epsilon must be a text or a number, found [1]"),
        ("[require]\nsteps = true", "[require] steps must be a text or a number, found True"),
        ("[require]\nepsylon = 1", "found 'epsylon=1'"),
        ("[require]\nsteps = 1.5", "steps must be a whole number, found '1.5'"),
        ('require = "steps"', "require must be a list"),
        ('require = ["steps"]', "a requirement must be NAME=VALUE"),
        ('require = ["steps=1", "steps=2"]', "steps must be given once, found several"),
    ],
)
def test_requirements_that_are_none_are_refused(
    corn: Runner, started: list[AgentConfig], text: str, message: str
) -> None:
    path = write(
        f'plan = "plan.corn"\nkeys = "keys"\nagent = 0\nstore = "a:1"\ntask = "digits"\n{text}\n'
    )
    outcome = corn("agent", "--config", path)
    assert outcome.exit_code == 1
    assert message in outcome.stderr
    assert not started
