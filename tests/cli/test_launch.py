"""``corn launch`` runs real agents and writes the files of a simulation."""

import csv
import json
import math
from pathlib import Path

import pytest

from corn.learn import PRIVATE_COLUMNS, SHARED_COLUMNS
from corn.plan import save_plan
from tests.distributed.harness import WORKLOAD, require_private, small_plan

from .commands import Runner

TASK = ("--task", "breast-cancer")
PRIVATE_NAMES = (*PRIVATE_COLUMNS, "train loss", "fraction clipped", "agent_samples", "seconds_")


@pytest.mark.slow
def test_a_plan_is_run_and_its_results_are_written(corn: Runner, tmp_path: Path) -> None:
    save_plan(small_plan("ring:3", 30), tmp_path / "plan.corn")
    out = tmp_path / "run"
    arguments = ["launch", tmp_path / "plan.corn", "--out", out, "--step-size", "0.5", *TASK]
    outcome = corn(*arguments, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    facts = json.loads(outcome.stdout)
    assert (facts["status"], facts["num_steps"], facts["lost"]) == ("complete", 30, {})
    assert facts["measured"]["epsilon"] <= 10
    assert 0 <= facts["measured"]["test_accuracy"] <= 1  # by noise that is new each time
    assert set(facts["agents"]["1"]["traffic"]) == {"0", "2"}
    with (out / "shared/metrics.csv").open(encoding="utf-8") as stream:
        assert tuple(csv.DictReader(stream).fieldnames or ()) == SHARED_COLUMNS
    for name in ("shared/run.json", "shared/agent-2/metrics.csv", "private/agent-2/metrics.csv"):
        assert (out / name).exists()
    states = json.loads(corn("status", out, "--json").stdout)["agents"]
    assert [(own["agent"], own["step"], own["condition"]) for own in states] == [
        (agent, 30, "complete") for agent in range(3)
    ]
    assert "complete: step 30 of 30" in (out / "private/agent-1/log").read_text(encoding="utf-8")
    # Whoever is handed the results must not get what noise is made of.
    keys = tmp_path / "plan.keys"
    assert not [*out.rglob("*.key"), *out.rglob("*.ledger")]
    secret = (keys / "agent-1.key").read_text(encoding="ascii").split()[1]
    assert secret not in outcome.stdout + outcome.stderr
    assert not any(secret in path.read_text("latin-1") for path in out.rglob("*.c*"))
    over = corn(*arguments)
    assert over.exit_code == 1
    assert "has a run that came to step 30 of 30: make a new plan" in over.stderr
    arguments[3] = tmp_path / "another folder for results"
    again = corn(*arguments)
    assert again.exit_code == 1
    assert again.stderr.count("\n") == 1
    assert "ledger allows no more releases: its budget is spent" in again.stderr


@pytest.mark.slow
@pytest.mark.parametrize("is_json", [False, True], ids=["table", "json"])
def test_nothing_private_is_shared_or_printed(corn: Runner, tmp_path: Path, is_json: bool) -> None:
    save_plan(small_plan("path:2", 6), tmp_path / "plan.corn")
    out = tmp_path / "run"
    arguments = ["launch", tmp_path / "plan.corn", "--out", out, "--step-size", "0.5", *TASK]
    outcome = corn(*arguments, *(["--json"] if is_json else []))
    assert outcome.exit_code == 0, outcome.stderr
    secrets = read_private_values(out)
    assert len(secrets) > 20
    assert_not_shared(out, secrets)
    # Whoever adds a file must decide whether it shows times, and so how much data an agent has.
    names = {path.name for path in out.glob("shared/**/*") if path.is_file()}
    names = {name for name in names if not name.startswith("step-")}
    assert names == {"metrics.csv", "model.pt", "run.json"}
    printed = outcome.stdout + outcome.stderr
    assert [text for text in (*secrets, *PRIVATE_NAMES) if text in printed] == []
    for path in out.rglob("shared/**/metrics.csv"):
        with path.open(encoding="utf-8") as stream:
            assert not set(csv.DictReader(stream).fieldnames or ()) & set(PRIVATE_COLUMNS)
    facts = json.loads((out / "shared/run.json").read_text(encoding="utf-8"))
    assert set(facts["measured"]) <= set(SHARED_COLUMNS)
    # Whoever adds to a summary must decide whether it may be published.
    known = {"agent", "first_step", "num_steps", "status", "stop", "stop_reason", "lost", "notes"}
    known |= {"cut_links", "traffic"}
    assert all(set(own) == known for own in facts["agents"].values())
    require_private(out / "private")
    assert f"publish {out / 'shared'}, but never" in outcome.stderr


def read_private_values(out: Path) -> set[str]:
    """Return nine digits of each private number as text, without those that public data gives too.

    With fewer, one of the many numbers that are shared agrees by chance once in a while.
    """
    found = set()
    for path in (out / "private").rglob("metrics.csv"):
        with path.open(encoding="utf-8") as stream:
            for row in csv.DictReader(stream):
                found |= {float(row[name]) for name in PRIVATE_COLUMNS if row[name]}
    # A model of zeros has the loss log 2 on all data, and accuracies are multiples of 1 / samples.
    sizes = [2 * len(targets) for _, targets in WORKLOAD.build(2).parts.values()]
    common = [
        value
        for value in found
        if math.isclose(value, math.log(2), rel_tol=1e-5)
        or any(math.isclose(value * size, round(value * size), abs_tol=1e-3) for size in sizes)
    ]
    return {f"{value:.10f}"[:11] for value in found.difference(common)}


def assert_not_shared(out: Path, secrets: set[str]) -> None:
    """Fail if the shared folder names a private column, or has private numbers."""
    content = b"".join(path.read_bytes() for path in (out / "shared").rglob("*") if path.is_file())
    assert [name for name in PRIVATE_NAMES if name.encode() in content] == []
    # Losses near log 2 have some 10⁵ values in single precision, so that one private loss may agree
    # with a public one by chance. A leak shows many.
    assert len([number for number in secrets if number.encode() in content]) <= 1


@pytest.mark.slow
def test_the_batch_size_is_the_plans(corn: Runner, tmp_path: Path) -> None:
    made = corn(
        *("plan", "--graph", "ring:3", "--steps", 5, "--unit", "sample", "--batch-size", 16),
        *("--sampling", "every-step"),
        *("--out", tmp_path / "plan.corn"),
    )
    assert made.exit_code == 0, made.stderr
    arguments = ["launch", tmp_path / "plan.corn", "--out", tmp_path / "run", *TASK, "--json"]
    outcome = corn(*arguments)
    assert outcome.exit_code == 0, outcome.stderr
    refused = corn(*arguments, "--batch-size", 16)
    assert refused.exit_code == 2
    assert "the plan decides this" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["launch"],
        ["launch", "plan.corn", "--epsilon", "10"],
        ["launch", "plan.corn", "--graph", "ring:3"],
        ["launch", "plan.corn", "--on-dropout", "panic"],
    ],
)
def test_misuse_exits_with_2(
    corn: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(small_plan("ring:3", 5), tmp_path / "plan.corn")
    assert corn(*arguments, *TASK).exit_code == 2


def test_a_file_that_is_no_plan_is_one_line(corn: Runner, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    outcome = corn("launch", tmp_path / "list.json", *TASK)
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith(f"corn: {tmp_path / 'list.json'}: ")
    assert outcome.stderr.count("\n") == 1


def test_a_status_that_is_no_address_is_one_line(corn: Runner, tmp_path: Path) -> None:
    save_plan(small_plan("ring:3", 5), tmp_path / "plan.corn")
    outcome = corn("launch", tmp_path / "plan.corn", "--status", "nowhere", *TASK)
    assert (outcome.exit_code, outcome.stderr.count("\n")) == (1, 1)
    assert "an address must be HOST:PORT, found 'nowhere'" in outcome.stderr


@pytest.mark.slow
def test_agents_run_exact_sums_together(corn: Runner, tmp_path: Path) -> None:
    plan = tmp_path / "plan.corn"
    made = corn("plan", "--mixing", "sum", "--graph", "path:3", "--steps", 6, "--out", plan)
    assert made.exit_code == 0, made.stderr
    planned = ["launch", plan]
    folders = ["--keys", tmp_path / "keys", "--out", tmp_path / "run"]
    outcome = corn(*planned, *folders, *TASK)
    assert outcome.exit_code == 0, outcome.stderr
    assert "exact sums over a tree of depth 1: 4 messages per step" in " ".join(
        outcome.stdout.split()
    )
    # n/(n − q) for three agents and one insider.
    last = outcome.stdout.strip().splitlines()[-1]
    assert last.endswith("with 1.5 × a trusted server's noise variance in the average model")
    facts = json.loads((tmp_path / "run/shared/run.json").read_text(encoding="utf-8"))
    assert (facts["mixing"], facts["status"]) == ("sum", "complete")
    # The rounding of a mean of equal models.
    assert facts["measured"]["consensus_distance"] < 1e-6


def test_a_plan_that_the_owner_refuses_leaves_nothing_behind(corn: Runner, tmp_path: Path) -> None:
    save_plan(small_plan("ring:3", 30), tmp_path / "plan.corn")
    arguments = ["launch", tmp_path / "plan.corn", "--out", tmp_path / "run", *TASK]
    outcome = corn(*arguments, "--require", "steps=20", "--require", "insiders=2")
    assert outcome.exit_code == 1
    assert "insiders must be at least 2, found 1; steps must be at most 20" in outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["plan.corn"]
