"""``corn advise`` proposes settings without data, and its commands run as they are printed."""

import json
import shlex
from pathlib import Path

import pytest
import typer

from corn.cli import app
from corn.learn.batches import note_batch_size, require_fitting_samples
from corn.plan import load_plan

from .commands import Runner

SMALL = ("advise", "--agents", 6, "--epsilon", 2, "--colluders", 0)


def test_a_proposal_from_numbers_alone(corn: Runner) -> None:
    outcome = corn(*SMALL, "--samples", 500, "--parameters", 40)
    assert outcome.exit_code == 0, outcome.stderr
    text = " ".join(outcome.stdout.split())
    for word in ("ε = 2", "one sample of one agent", "Poisson sampling", "eavesdropper"):
        assert word in text
    facts = json.loads(corn(*SMALL, "--samples", 500, "--parameters", 40, "--json").stdout)
    assert facts["sampling_rate"] == pytest.approx(facts["batch_size"] / 500)
    assert facts["central_ratio"] >= 1
    # Without a built-in task nothing can be trained.
    assert [command.split()[1] for command in facts["commands"]] == ["plan", "verify"]


def test_a_number_of_parameters_is_assumed_and_stated(corn: Runner) -> None:
    outcome = corn(*SMALL, "--samples", 500)
    assert outcome.exit_code == 0, outcome.stderr
    assert "parameters 10,000" in " ".join(outcome.stdout.split())
    assert "assumes a model of 10,000 parameters" in outcome.stderr
    # With a number given, nothing is assumed.
    assert "assumes" not in corn(*SMALL, "--samples", 500, "--parameters", 40).stderr


@pytest.mark.parametrize("unit", ["sample", "agent"])
def test_commands_run_as_printed(
    corn: Runner, unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task = ("--task", "breast-cancer", "--unit", unit)
    commands = json.loads(corn(*SMALL, *task, "--json").stdout)["commands"]
    assert [command.split()[1] for command in commands] == ["train", "plan", "verify", "launch"]
    parsers = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for command in commands:
        _, name, *arguments = shlex.split(command)
        # Parsing checks every option and value; training is left to the slow test.
        parsers[name].make_context(name, list(arguments))
        if name in ("plan", "verify"):
            outcome = corn(name, *arguments)
            assert outcome.exit_code == 0, outcome.stderr


@pytest.mark.slow
def test_training_commands_run_as_printed(
    corn: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("advise", "--agents", 3, "--epsilon", 2, "--task", "breast-cancer", "--json")
    for command in json.loads(corn(*options).stdout)["commands"]:
        outcome = corn(*shlex.split(command)[1:])
        assert outcome.exit_code == 0, outcome.stderr
    assert (tmp_path / "out" / "run" / "shared" / "run.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "digits", "--parameters", "3"], "--task or --parameters, not both"),
        (["--parameters", "9"], "--samples of an agent"),
    ],
)
def test_missing_or_contradicting_numbers(corn: Runner, options: list[str], message: str) -> None:
    outcome = corn("advise", "--agents", 4, "--epsilon", 1, *options)
    assert outcome.exit_code == 2
    assert message in " ".join(outcome.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    "sizes",
    [[9000, 3000, 1200, 400, 120, 40], [100] * 6, [5000, 4000, 1, 1, 1, 1]],
)
def test_plans_as_advised_are_accepted_by_agents_of_every_size(
    corn: Runner, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--samples", ",".join(map(str, sizes)), "--epsilon", 1, "--agents", 6)
    outcome = corn("advise", *options, "--parameters", 40, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    facts = json.loads(outcome.stdout)
    for command in facts["commands"]:
        outcome = corn(*shlex.split(command)[1:])
        assert outcome.exit_code == 0, outcome.stderr
    budget = load_plan(tmp_path / "plan.corn").budget
    require_fitting_samples(budget, sizes)
    for size in sizes:
        note = note_batch_size(budget.query, size) or ""
        assert "public width" not in note
    # The rate is the one that was advised, up to the rounding of a batch.
    assert budget.query.sampling_rate == pytest.approx(facts["sampling_rate"], abs=1 / max(sizes))
