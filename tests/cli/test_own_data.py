"""Commands on the user's own files."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

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
    assert set(facts["contenders"]) == {"corn", "none"}
    assert 0 <= facts["contenders"]["none"]["test_accuracy"] <= 1
    assert facts["tuning"]["data_is_private"], "runs on the user's own data are not free"
    assert "the classes were read from the data" in outcome.stderr


@pytest.mark.slow
def test_agents_in_processes_publish_scores_on_public_data_only(
    corn: Runner, clinics: Path
) -> None:
    plan, out = clinics / "plan.corn", clinics / "out"
    assert corn("plan", "--graph", "complete:2", "--steps", 6, "--out", plan).exit_code == 0
    options = ("--data", clinics / "agent-{agent}.csv", "--target", "ill", "--step-size", 0.5)
    refused = corn("launch", plan, *options, "--out", out)
    assert refused.exit_code == 2
    assert "--classes" in refused.stderr
    public = ("--classes", "no,yes", "--bounds", "age=0:60", "--test-data", clinics / "public.csv")
    outcome = corn("launch", plan, *options, *public, "--out", out)
    assert outcome.exit_code == 0, outcome.stderr
    with (out / "shared" / "metrics.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert last["test_accuracy"] != ""
    assert last["validation_loss"] == "", "validation samples are private"
    assert "outside its public bounds" in (out / "private/agent-0/notes.txt").read_text()
    shared = "".join(path.read_text() for path in (out / "shared").rglob("*.json"))
    assert str(clinics) not in shared
    assert "outside its public bounds" not in shared


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--graph", "ring:3"), 2, "give either a task or --data"),
        (("--data", "x.csv", "--task", "digits", "--graph", "ring:3"), 2, "either a task or"),
        (("--task", "digits", "--bounds", "0:1", "--graph", "ring:3"), 2, "belongs to --data"),
        (("--data", "x.csv", "--target", "y", "--graph", "ring:3"), 1, "corn: x.csv: no such file"),
        (("--task", "digits", "--model", "own.py:f", "--graph", "ring:3"), 1, "own.py: no such"),
        (("--task", "digits", "--model", "tree", "--graph", "ring:3"), 1, "linear, network, cnn"),
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
