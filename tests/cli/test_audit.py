"""``corn audit``."""

import json
from pathlib import Path

import pytest

from corn.plan import save_plan
from tests.audit.plans import agent_plan, sample_plan

from .commands import Runner


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    save_plan(agent_plan(), folder / "pairs.corn")
    save_plan(agent_plan(0, "global"), folder / "global.corn")
    save_plan(sample_plan("passes"), folder / "samples.corn")
    save_plan(agent_plan(mixing="sum"), folder / "sums.corn")
    return folder


def test_a_table_of_all_victims(corn: Runner, plans: Path) -> None:
    outcome = corn("audit", plans / "pairs.corn", "--trials", 1000)
    assert outcome.exit_code == 0, outcome.stderr
    assert "no violation found" in outcome.stdout
    assert "one agent's whole data set" in outcome.stdout
    assert outcome.stdout.count("tight") == 5


def test_json_has_promise_estimate_and_bounds(corn: Runner, plans: Path) -> None:
    outcome = corn("audit", plans / "pairs.corn", "--trials", 1000, "--victim", 2, "--json")
    facts = json.loads(outcome.stdout)
    (found,) = facts["findings"]
    assert found["victim"] == 2
    assert found["certified_epsilon"] < found["promised_epsilon"] == 8
    assert found["mu_low"] < found["mu"] < found["mu_high"]
    assert facts["smallest_break"]["verdict"] == "violated"
    assert (facts["mixing"], facts["messages"]) == ("gossip", None)
    assert not facts["violated"]


def test_exact_sums_report_the_test_of_messages(corn: Runner, plans: Path) -> None:
    outcome = corn("audit", plans / "sums.corn", "--trials", 1000)
    assert outcome.exit_code == 0, outcome.stderr
    assert "integers of 16 bits under masks" in outcome.stdout
    assert outcome.stdout.count("tight") == 5
    facts = json.loads(corn("audit", plans / "sums.corn", "--trials", 1000, "--json").stdout)
    assert facts["mixing"] == "sum"
    assert facts["messages"]["bits"] == 16
    assert facts["messages"]["num_words"] == 1000
    assert facts["messages"]["problems"] == []
    assert facts["smallest_break"]["coalition"] == [0, 1]


def test_a_violated_promise_exits_with_1(corn: Runner, plans: Path) -> None:
    outcome = corn("audit", plans / "global.corn", "--view", "coalition:1", "--trials", 500)
    assert outcome.exit_code == 1
    assert "VIOLATED" in outcome.stdout
    assert "agent 0 is exposed to insider 1" in outcome.stderr


def test_samples_are_audited_through_the_step(corn: Runner, plans: Path) -> None:
    arguments = ("--trials", 500, "--victim", 0, "--json")
    outcome = corn("audit", plans / "samples.corn", *arguments)
    assert outcome.exit_code == 0, outcome.stderr
    facts = json.loads(outcome.stdout)
    assert (facts["through"], facts["unit"]) == ("step", "sample")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--victim", "9"), "--victim must be a number of an agent, 0 … 4, found '9'"),
        (("--view", "nobody"), "view must be eavesdropper"),
    ],
)
def test_wrong_options_are_one_line(
    corn: Runner, plans: Path, arguments: tuple[str, ...], message: str
) -> None:
    outcome = corn("audit", plans / "pairs.corn", *arguments)
    assert outcome.exit_code == 1
    assert message in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_one_run_of_a_task(corn: Runner, plans: Path) -> None:
    arguments = ("--one-run", "--task", "digits", "--canaries", 100)
    outcome = corn("audit", plans / "samples.corn", *arguments)
    assert outcome.exit_code == 0, outcome.stderr
    assert "certified ε" in outcome.stdout
    facts = json.loads(corn("audit", plans / "samples.corn", *arguments, "--json").stdout)
    assert facts["num_canaries"] == 100
    assert facts["certified_epsilon"] <= facts["promised_epsilon"] == 4
    for options, message in (
        (("--one-run", "--trials", 500), "must be left out with --one-run"),
        (("--one-run", "--view", "coalition:1"), "must be left out with --one-run"),
        (("--canaries", 100), "needs --one-run"),
    ):
        misuse = corn("audit", plans / "samples.corn", *options)
        assert misuse.exit_code == 2
        assert message in " ".join(misuse.stderr.split())
    refused = corn("audit", plans / "pairs.corn", "--one-run")
    assert refused.exit_code == 1
    assert "needs a plan for samples" in refused.stderr
