"""From a run to predictions, exports and the report, as a user would."""

import csv
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from .commands import Runner, run_quietly

FEATURES = ["age", "dose"]


def write_table(path: Path, rows: int, *, seed: int, without: tuple[str, ...] = ()) -> None:
    rng = np.random.default_rng(seed)
    ages = rng.uniform(20, 90, rows)
    table = {
        "age": ages.round(2),
        "dose": rng.normal(size=rows).round(3),
        "ill": np.where(ages > 55, "yes", "no"),
    }
    names = [name for name in table if name not in without]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(zip(*(table[name] for name in names), strict=True))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A launched run of two sites on their own files, in ``run``, with a public test file."""
    folder = tmp_path_factory.mktemp("site")
    for agent in (0, 1):
        write_table(folder / f"agent-{agent}.csv", 80, seed=agent)
    write_table(folder / "public.csv", 60, seed=7)
    plan = folder / "plan.corn"
    assert not run_quietly(
        *("plan", "--graph", "complete:2", "--steps", 40, "--unit", "sample", "--epsilon", 8),
        *("--batch-size", 10, "--samples-per-agent", 50, "--clip", 1, "--out", plan),
    )
    assert not run_quietly(
        *("launch", plan, "--data", folder / "agent-{agent}.csv", "--target", "ill"),
        *("--classes", "no,yes", "--bounds", "age=0:120,dose=-4:4", "--step-size", 1),
        *("--test-data", folder / "public.csv", "--out", folder / "run"),
    )
    return folder


@pytest.mark.slow
def test_a_launched_model_predicts_as_it_was_measured(corn: Runner, site: Path) -> None:
    run = json.loads((site / "run" / "shared" / "run.json").read_text())
    outcome = corn("predict", site / "run", site / "public.csv", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    facts = json.loads(outcome.stdout)
    assert facts["scores"]["accuracy"] == pytest.approx(run["measured"]["test_accuracy"])
    assert facts["scores"]["loss"] == pytest.approx(run["measured"]["test_loss"], rel=1e-4)
    quality = run["test_quality"]
    assert quality == {name: facts["scores"][name] for name in quality}
    assert facts["promise"]["plan"] == run["plan"]
    assert facts["promise"]["unit"] == "sample"
    assert not facts["promise"]["simulation"]
    assert "ε = 8" in outcome.stderr
    row = facts["rows"][0]
    assert row["class"] in ("no", "yes")
    assert row["probability of no"] + row["probability of yes"] == pytest.approx(1)


def test_agents_with_exact_sums_save_the_model_of_all(site: Path) -> None:
    shared = site / "run" / "shared"
    files = [shared / "model.pt", *shared.glob("agent-*/model.pt")]
    assert len(files) == 3
    # To the byte, so that agents can compare digests.
    assert len({path.read_bytes() for path in files}) == 1


def test_rows_without_targets_are_predicted_to_a_file(
    corn: Runner, site: Path, tmp_path: Path
) -> None:
    write_table(tmp_path / "new.csv", 5, seed=3, without=("ill",))
    out = tmp_path / "predicted.csv"
    outcome = corn("predict", site / "run", tmp_path / "new.csv", "--out", out)
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stdout == ""
    assert "scores" not in outcome.stderr
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert len(rows) == 5
    assert list(rows[0]) == ["class", "probability of no", "probability of yes"]
    assert out.stat().st_mode & 0o077 == 0, "predictions are as private as their rows"


def test_all_differences_of_columns_are_listed(corn: Runner, site: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("Age,weight,ill\n3,4,no\n")
    outcome = corn("predict", site / "run", path)
    assert outcome.exit_code == 1
    assert outcome.stderr.count("\n") == 1
    for name in ("age", "dose", "Age", "weight"):
        assert re.search(rf"\b{name}\b", outcome.stderr)


def test_a_model_of_a_task_has_no_columns_to_predict_by(corn: Runner, tmp_path: Path) -> None:
    arguments = ("--task", "breast-cancer", "--graph", "complete:2", "--steps", 3)
    out = tmp_path / "run"
    outcome = corn("train", *arguments, "--step-size", 0.1, "--out", out)
    assert outcome.exit_code == 0, outcome.stderr
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    assert corn("predict", out, tmp_path / "a.csv").exit_code == 1
    facts = json.loads(corn("export", out, "--out", tmp_path / "a.pt", "--json").stdout)
    assert facts["shapes"] == {"weight": [1, 30], "bias": [1]}
    assert facts["promise"]["simulation"]
    assert facts["promise"]["mechanism"] == "corn"


def test_regression_predicts_in_the_unit_of_the_target(corn: Runner, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 10, 200)
    with (tmp_path / "all.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["x", "y"])
        writer.writerows([a, 100 + 20 * a] for a in x)
    outcome = corn(
        *("train", "--data", tmp_path / "all.csv", "--target", "y", "--regression"),
        *("--bounds", "x=0:10,y=0:400", "--graph", "complete:2", "--mechanism", "none"),
        *("--steps", 300, "--clip", 10, "--step-size", 0.3, "--out", tmp_path / "run"),
    )
    assert outcome.exit_code == 0, outcome.stderr
    (tmp_path / "new.csv").write_text("x\n0\n5\n10\n")
    printed = corn("predict", tmp_path / "run", tmp_path / "new.csv").stdout.split()
    assert printed[0] == "prediction"
    np.testing.assert_allclose([float(line) for line in printed[1:]], [100, 200, 300], atol=2)


@pytest.mark.parametrize("form", ["torch", "json", "onnx"])
def test_exports_contain_weights_preprocessing_and_promise(
    corn: Runner, site: Path, tmp_path: Path, form: str
) -> None:
    if form == "onnx":
        pytest.importorskip("onnx", reason="the ONNX format is an extra")
    file = tmp_path / f"model.{form}"
    outcome = corn("export", site / "run", "--to", form, "--out", file, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    about: dict[str, Any] = json.loads(outcome.stdout)
    if form == "json":
        about = json.loads(file.read_text())
    elif form == "torch":
        about = json.loads(torch.load(file, weights_only=True)["about"])
    assert list(about["preprocessing"]["columns"]) == FEATURES
    assert about["classes"] == ["no", "yes"]
    assert about["promise"]["epsilon"] == 8
    assert "clipped to 1" in about["promise"]["clipping"]


def test_onnx_without_its_extra_is_refused_in_one_line(
    corn: Runner, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    outcome = corn("export", site / "run", "--to", "onnx", "--out", tmp_path / "a.onnx")
    assert outcome.exit_code == 1
    assert "corn-dsgd[onnx]" in outcome.stderr


def test_the_report_states_promise_total_and_fingerprint(
    corn: Runner, site: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    outcome = corn("report", site / "run", "--keys", site / "plan.keys", "--out", out, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    facts, page = json.loads(outcome.stdout), out.read_text()
    assert facts["holds"]
    guess = (math.exp(8) + 1e-5) / (math.exp(8) + 1)
    assert f"{math.ceil(1000 * guess) / 10}\xa0%" in page
    assert facts["promise"]["plan"] in page
    totals = next(own for own in facts["sections"] if own["heading"].startswith("Total"))
    assert [row[:3] for row in totals["rows"]] == [["0, 1", "1", "40"]]
    assert all(7 < float(row[3]) <= 8 for row in totals["rows"])
    files = next(own for own in facts["sections"] if own["heading"].startswith("What was"))
    assert "model.pt" in {row[0] for row in files["rows"]}


def test_keys_of_another_run_give_no_total(corn: Runner, site: Path, tmp_path: Path) -> None:
    """A total of zero would be a false one."""
    run_quietly("keys", "make", tmp_path / "keys", "--agents", 2)
    out = tmp_path / "report.html"
    outcome = corn("report", site / "run", "--keys", tmp_path / "keys", "--out", out)
    assert (outcome.exit_code, outcome.stderr.count("\n")) == (1, 1)
    assert "no ledger counts the releases of plan" in outcome.stderr
    assert not out.exists()


def test_a_lost_ledger_bounds_no_guess(corn: Runner, site: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    shutil.copytree(site / "plan.keys", keys)
    next(keys.glob("agent-1-*.ledger")).unlink()
    outcome = corn("report", site / "run", "--keys", keys, "--out", tmp_path / "a.html", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    sections = json.loads(outcome.stdout)["sections"]
    totals = next(own for own in sections if own["heading"].startswith("Total"))
    told = " ".join(totals["paragraphs"])
    assert "at least" in told
    assert "the total is unknown" in told
    assert "guesses right" not in told


def test_the_report_of_a_simulation_says_that_nobody_is_protected(
    corn: Runner, site: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    data = ("--data", site / "agent-{agent}.csv", "--target", "ill", "--graph", "complete:2")
    steps = ("--steps", 2, "--step-size", 1, "--out", run)
    assert corn("train", *data, *steps).exit_code == 0
    outcome = corn("report", run, "--out", tmp_path / "a.html", "--json")
    facts = json.loads(outcome.stdout)
    assert not facts["holds"]
    assert "protects nobody" in facts["verdict"]
    assert "no folder for publication" in (tmp_path / "a.html").read_text()


def test_the_report_as_pdf(corn: Runner, site: Path, tmp_path: Path) -> None:
    pytest.importorskip("fpdf", reason="PDF is an extra")
    out = tmp_path / "report.pdf"
    outcome = corn("report", site / "run", "--keys", site / "plan.keys", "--out", out)
    assert outcome.exit_code == 0, outcome.stderr
    content = out.read_bytes()
    assert content.startswith(b"%PDF-")
    assert content.count(b"/Type /Page\n") == 1, "the report has one page"


@pytest.mark.parametrize("name", ["report.doc", "report"])
def test_a_report_of_another_format_is_refused(
    corn: Runner, site: Path, tmp_path: Path, name: str
) -> None:
    assert corn("report", site / "run", "--out", tmp_path / name).exit_code == 1
