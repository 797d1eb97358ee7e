"""``python -m reproduction`` makes figures, checks claims, and resumes after an interruption."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from rich.progress import Progress

from corn.cli import run_command
from reproduction.__main__ import CellBar, app
from reproduction.cells import Cell, DesignCell
from tests.cli.commands import Outcome

ROOT = Path(__file__).parent.parent.parent

Runner: TypeAlias = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Runner]:
    def command(*arguments: Any) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["reproduction", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            run_command(app, name="reproduction")
        printed = capsys.readouterr()
        return Outcome(int(caught.value.code or 0), printed.out, printed.err)

    with warnings.catch_warnings():
        yield command


def stored_cells(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (out / "cells").rglob("output.pkl")}


@pytest.mark.slow
def test_a_figure_of_the_paper_is_reproduced_once(run: Runner, tmp_path: Path) -> None:
    arguments = ("fig1a", "--out", tmp_path, "--epsilons", "3,40", "--jobs", 1)
    outcome = run(*arguments, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    facts = json.loads(outcome.stdout)
    verdicts = {claim["statement"]: claim["verdict"] for claim in facts["claims"]}
    assert verdicts["CorN (paper) ≤ DECOR (paper) everywhere"] == "holds"
    broken = "the noise of eq. (13b) keeps ε = 40 at δ = 1e-05, unit: agent"
    assert verdicts[broken] == "does not hold"
    assert facts["scale"]["name"] == "quick, in part"
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "python -m reproduction fig1a --quick --epsilons 3,40\n" in page.replace("</pre>", "\n")
    cells = stored_cells(tmp_path)
    assert cells
    again = run(*arguments)
    assert again.exit_code == 0
    assert "does not hold" in again.stdout
    assert stored_cells(tmp_path) == cells


@pytest.mark.slow
def test_it_runs_as_a_module_with_several_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "reproduction", "fig1b", "--jobs", "2", "--json"]
    options = ["--agents", "5", "--connectivities", "1", "--mechanisms", "ldp,corn"]
    process = subprocess.run(
        [*command, *options, "--out", str(tmp_path)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["scale"]["num_agents"] == 5
    assert len(stored_cells(tmp_path)) == 2


def test_the_progress_bar_counts_a_cell_once_and_grows_with_the_plan() -> None:
    cells: list[Cell] = [DesignCell("ring:6", "corn", float(h), 1.0) for h in range(1, 4)]
    with Progress(disable=True) as progress:
        bar = CellBar(progress)
        bar.expect(cells)
        for cell in (*cells[:2], *cells[:2]):
            bar.finish(cell, cell == cells[0])
        (task,) = progress.tasks
        assert (task.fields["finished"], task.fields["cells"]) == (2, 3)
        assert task.completed == pytest.approx(sum(cell.cost for cell in cells[:2]))
        assert bar.num_stored == 1
        bar.expect(cells * 2)
        assert task.total == pytest.approx(2 * sum(cell.cost for cell in cells))


def test_wrong_options_are_refused_before_anything_is_written(run: Runner, tmp_path: Path) -> None:
    assert run("--quick", "--full").exit_code == 2
    assert run("--jobs", 0).exit_code == 2
    for wrong in (["fig9"], ["fig1a", "--epsilons", "many"], ["fig1a", "--connectivities", "2"]):
        outcome = run(*wrong, "--out", tmp_path / "out")
        assert outcome.exit_code == 1
        assert outcome.stderr.startswith("corn: ")
    assert not (tmp_path / "out").exists()
    absent = run("fig4a", "--full", "--out", tmp_path, "--cache", tmp_path)
    assert absent.exit_code == 1
    assert "corn data get a9a" in absent.stderr
    assert not (tmp_path / "report.html").exists()


def test_other_settings(run: Runner, tmp_path: Path) -> None:
    """Another graph, steps and mechanisms, one of them the user's covariance; also as PDF."""
    np.save(tmp_path / "R.npy", np.eye(5) + 2 * (np.eye(5) - 1 / 5))
    options = ("--graph", "ring:5", "--steps", 40, "--clip", 0.2, "--epsilons", "3,10", "--jobs", 1)
    lines = ("--mechanisms", f"ldp,corn,mine={tmp_path / 'R.npy'}")
    outcome = run("fig1a", *options, *lines, "--out", tmp_path / "out", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    scale = json.loads(outcome.stdout)["scale"]
    assert (scale["num_agents"], scale["clip"], scale["regression"]["num_steps"]) == (5, 0.2, 40)
    table = (tmp_path / "out" / "points.csv").read_text()
    assert {line.split(",")[1] for line in table.splitlines()[1:]} == {"ldp", "corn", "mine"}
    assert (tmp_path / "out" / "figures" / "fig1a-added.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("fig1b", "--graph", "ring:5"), "graph must contain {p} for fig1b"),
        (("fig1c", "--graph", "er:n=9,p={p},seed=1"), "graph must contain {n} for fig1c"),
        (("fig1a", "--graph", "ring:5", "--agents", "6"), "must be 5, as in the graph"),
        (("fig1a", "--mechanisms", "best"), "must be one of ldp-paper"),
        (("fig1a", "--mechanisms", "mine="), "must be NAME=R.npy"),
        (("fig1a", "--mechanisms", "mine=R.npy"), "no such file"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    run: Runner, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    outcome = run(*options, "--out", tmp_path)
    assert outcome.exit_code == 1
    assert message in outcome.stderr
    assert outcome.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["corn", "mine"])
def test_mechanisms_need_different_names(run: Runner, tmp_path: Path, name: str) -> None:
    np.save(tmp_path / "R.npy", np.eye(5))
    matrix = f"{name}={tmp_path / 'R.npy'}"
    outcome = run("fig1a", "--mechanisms", f"{matrix},{matrix}", "--out", tmp_path / "out")
    assert outcome.exit_code == 1
    assert f"must be given with different names, found '{name}'" in outcome.stderr
