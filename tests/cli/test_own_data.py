"""Commands on the user's own files."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corn.distributed import AgentConfig

from .commands import Runner


@pytest.fixture
def clinics(tmp_path: Path) -> Path:
    """Two clinics with thirty patients each, and a public file of ten."""
    rng = np.random.default_rng(0)
    for name, count in (("agent-0", 30), ("agent-1", 30), ("public", 10)):
        ages = rng.uniform(20, 90, count)
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["age", "dose", "ill"])
            table.writerows([age, rng.normal(), "yes" if age > 55 else "no"] for age in ages)
    return tmp_path


def test_training_on_own_files(corn: Runner, clinics: Path) -> None:
    outcome = corn(
        *("train", "--data", clinics / "agent-{agent}.csv", "--target", "ill"),
        *("--bounds", "age=0:120", "--test-data", clinics / "public.csv", "--graph", "complete:2"),
        *("--steps", 30, "--epsilon", 50, "--mechanism", "corn,none", "--step-size", "0.5,1"),
        "--json",
    )
    assert outcome.exit_code == 0, outcome.stderr
    facts = json.loads(outcome.stdout)
    assert set(facts["mechanisms"]) == {"corn", "none"}
    assert 0 <= facts["mechanisms"]["none"]["test_accuracy"] <= 1
    assert facts["tuning"]["data_is_private"], "runs on the user's own data are not free"


OUTSIDE = "column 'dose' has 30 values outside public bounds"


def spoil(clinics: Path, *, dose: object = 7, ill: str = "") -> Path:
    """Give agent 1 a file with one dose, and perhaps one class, for all patients."""
    rows = [f"{age},{dose},{ill or ('yes' if age > 55 else 'no')}" for age in range(41, 71)]
    path = clinics / "agent-1.csv"
    path.write_text("\n".join(["age,dose,ill", *rows]) + "\n")
    return path


@pytest.mark.parametrize("command", ["train", "launch"])
def test_a_file_that_cannot_be_used_is_named_with_its_column(
    corn: Runner, clinics: Path, command: str
) -> None:
    path, plan = spoil(clinics, dose="high"), clinics / "plan.corn"
    data = ("--data", clinics / "agent-{agent}.csv", "--target", "ill", "--classes", "no,yes")
    if command == "launch":
        corn("plan", "--graph", "complete:2", "--steps", 2, "--out", plan)
        outcome = corn("launch", plan, *data, "--out", clinics / "out")
    else:
        outcome = corn("train", *data, "--graph", "complete:2", "--steps", 2)
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    line = "column 'dose' must have numbers, found 'high' in row 1"
    assert outcome.stderr.startswith(f"corn: {path}: {line}")
    assert outcome.stderr.count("\n") == 1


@pytest.mark.parametrize("ill", ["", "yes"], ids=["outside", "one class"])
def test_the_owner_of_all_data_reads_what_is_odd_about_a_file(
    corn: Runner, clinics: Path, ill: str
) -> None:
    path, out = spoil(clinics, ill=ill), clinics / "out"
    outcome = corn(
        *("train", "--data", clinics / "agent-{agent}.csv", "--target", "ill"),
        *("--bounds", "age=0:120,dose=-5:5", "--graph", "complete:2"),
        *("--steps", 2, "--step-size", 1),
        *("--mechanism", "none", "--out", out, "--json"),
    )
    assert outcome.exit_code == 0, outcome.stderr
    (note,) = [line for line in outcome.stderr.splitlines() if str(path) in line]
    assert note.startswith(f"note: private, do not publish: {path}: {OUTSIDE}")
    written = "".join(file.read_text() for file in out.rglob("*.*") if file.suffix != ".pt")
    assert OUTSIDE not in outcome.stdout + written


@pytest.mark.slow
def test_agents_in_processes_publish_scores_on_public_data_only(
    corn: Runner, clinics: Path
) -> None:
    plan, out = clinics / "plan.corn", clinics / "out"
    spoil(clinics, ill="yes")
    assert corn("plan", "--graph", "complete:2", "--steps", 6, "--out", plan).exit_code == 0
    options = ("--data", clinics / "agent-{agent}.csv", "--target", "ill", "--step-size", 0.5)
    refused = corn("launch", plan, *options, "--out", out)
    assert refused.exit_code == 2
    assert "--classes" in refused.stderr
    public = ("--classes", "no,yes", "--test-data", clinics / "public.csv")
    bounds = ("--bounds", "age=0:60,dose=-5:5")
    outcome = corn("launch", plan, *options, *public, *bounds, "--out", out)
    assert outcome.exit_code == 0, outcome.stderr
    with (out / "shared" / "metrics.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert last["test_accuracy"] != ""
    assert last["validation_loss"] == "", "validation samples are private"
    assert "outside public bounds" in (out / "private/agent-0/log").read_text()
    shared = "".join(path.read_text() for path in (out / "shared").rglob("*.json"))
    assert str(clinics) not in shared
    assert "outside public bounds" not in shared
    assert OUTSIDE in (out / "private/agent-1/log").read_text()
    assert OUTSIDE in outcome.stderr
    assert OUTSIDE not in shared + outcome.stdout


def test_an_agent_does_not_take_its_own_file_for_the_common_one(
    corn: Runner, clinics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would train on a part of its patients, and spend all of ε on them."""
    built: list[Any] = []

    def run(config: AgentConfig, _: object) -> None:
        built.append(config.workload)
        raise KeyboardInterrupt

    monkeypatch.chdir(clinics)
    monkeypatch.setattr("corn.distributed.agent.run_workload", run)
    monkeypatch.setattr("corn.distributed.launcher.listen_for_signals", lambda: None)
    data = ("--target", "ill", "--classes", "no,yes", "--data")
    assert corn("plan", "--graph", "path:2", "--steps", 3, "--out", "plan.corn").exit_code == 0
    agent = ("agent", "plan.corn", "--keys", "keys", "--agent", 0, "--store", "a:1", *data)
    refused = corn(*agent, "agent-0.csv")
    said = " ".join(refused.stderr.replace("│", " ").split())
    assert refused.exit_code == 2
    assert "put {agent}" in said
    assert "--partition iid" in said
    assert not built
    corn(*agent, "agent-{agent}.csv")
    corn(*agent, "agent-0.csv", "--partition", "iid")
    assert [own.has_file_per_agent for own in built] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("is_own", [True, False], ids=["own file", "task"])
def test_epsilon_is_simulated_where_all_rows_decide_who_has_which(
    corn: Runner, clinics: Path, is_own: bool
) -> None:
    plan, out = clinics / "plan.corn", clinics / "out"
    assert corn("plan", "--graph", "complete:2", "--steps", 3, "--out", plan).exit_code == 0
    data: tuple[object, ...] = ("--task", "breast-cancer")
    if is_own:
        data = ("--data", clinics / "agent-0.csv", "--target", "ill", "--classes", "no,yes")
        data += ("--partition", "iid", "--test-data", clinics / "public.csv")
    outcome = corn("launch", plan, *data, "--out", out)
    assert outcome.exit_code == 0, outcome.stderr
    shared = json.loads((out / "shared/run.json").read_text())
    status = corn("status", out).stdout
    log = (out / "private/agent-1/log").read_text(encoding="utf-8")
    simulated = (
        "accuracy at simulated ε = " in outcome.stdout,
        "simulated ε spent" in outcome.stdout,
        "simulated ε: all rows of a public data set decide" in outcome.stderr,
        shared["promise"].startswith("simulated: "),
        bool(shared["simulation"]),
        "simulated" in status,
        "simulated ε spent at most" in log,
        "simulated: ε = 10" in log,
    )
    assert simulated == (not is_own,) * len(simulated)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--data", "x.csv", "--task", "digits", "--graph", "ring:3"), 2, "either a task or"),
        (("--task", "digits", "--bounds", "0:1", "--graph", "ring:3"), 2, "belongs to --data"),
        (("--data", "x.csv", "--target", "y", "--graph", "ring:3"), 1, "corn: x.csv: no such file"),
        (("--task", "digits", "--model", "own.py:f", "--graph", "ring:3"), 1, "own.py: no such"),
    ],
)
def test_misuse_is_one_line(
    corn: Runner, arguments: tuple[str, ...], code: int, message: str
) -> None:
    outcome = corn("train", *arguments)
    assert outcome.exit_code == code
    assert message in " ".join(outcome.stderr.split())
    if code == 1:
        assert outcome.stderr.count("\n") == 1
