"""``corn reproduce`` makes figures, checks claims, and resumes after an interruption."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.progress import Progress

from corn.cli.reproduce import _CellBar
from corn.experiments import list_cells
from reproduction.cells import TrainingCell
from .scales import PILOTS

from .commands import Runner


@pytest.mark.slow
def test_a_figure_of_the_paper_is_reproduced_once(corn: Runner, tmp_path: Path) -> None:
    arguments = ("reproduce", "fig1a", "--out", tmp_path, "--epsilons", "3,40", "--jobs", 1)
    outcome = corn(*arguments, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    facts = json.loads(outcome.stdout)
    verdicts = {claim["statement"]: claim["verdict"] for claim in facts["claims"]}
    assert verdicts["CorN (paper) ≤ DECOR (paper) everywhere"] == "holds"
    broken = "the noise of eq. (13b) keeps ε = 40 at δ = 1e-05, unit: agent"
    assert verdicts[broken] == "does not hold"
    assert facts["scale"]["name"] == "quick, in part"
    assert (tmp_path / "report.html").exists()
    cells = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    again = corn(*arguments)
    assert again.exit_code == 0
    assert "does not hold" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()} == cells


@pytest.mark.slow
def test_an_interruption_between_pilots_and_further_seeds_keeps_the_pilots(
    corn: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("reproduce", "fig4b", "--out", tmp_path, "--jobs", 1)
    num_designs = len(list_cells(["fig4b"], PILOTS)) - 3

    def interrupt_repeats(self: TrainingCell, *arguments: Any) -> Any:
        if self.seeds != (0,):
            raise KeyboardInterrupt
        return compute(self, *arguments)

    compute = TrainingCell.compute
    monkeypatch.setattr("corn.experiments.QUICK", PILOTS)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingCell, "compute", interrupt_repeats)
        outcome = corn(*arguments)
    assert outcome.exit_code == 130
    # The designs and the pilot were finished; two further seeds were not.
    assert f"interrupted: {num_designs + 1} of " in outcome.stderr
    again = corn(*arguments, "--json")
    assert again.exit_code == 0, again.stderr
    facts = json.loads(again.stdout)
    assert facts["scale"]["regression"]["num_pilots"] == 1
    assert any("chosen on 1 pilot seed of 3" in note for note in facts["notes"])
    assert f"; {num_designs + 1} of " in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_progress_bar_counts_a_cell_once_and_grows_with_the_plan() -> None:
    cells = list_cells(["fig4b"], PILOTS)
    with Progress(disable=True) as progress:
        bar = _CellBar(progress)
        bar.expect(cells)
        for cell in (*cells[:2], *cells[:2]):
            bar.finish(cell)
        (task,) = progress.tasks
        assert (task.fields["finished"], task.fields["cells"]) == (2, len(cells))
        assert task.completed == pytest.approx(sum(cell.cost for cell in cells[:2]))
        bar.expect(cells * 2)
        assert task.total == pytest.approx(2 * sum(cell.cost for cell in cells))


def test_wrong_options_are_refused_before_anything_is_written(corn: Runner, tmp_path: Path) -> None:
    assert corn("reproduce", "--quick", "--full").exit_code == 2
    assert corn("reproduce", "--jobs", 0).exit_code == 2
    for wrong in (["fig9"], ["fig1a", "--epsilons", "many"], ["fig1a", "--connectivities", "2"]):
        outcome = corn("reproduce", *wrong, "--out", tmp_path)
        assert outcome.exit_code == 1
        assert outcome.stderr.startswith("corn: ")
    absent = corn("reproduce", "fig4a", "--full", "--out", tmp_path, "--cache", tmp_path)
    assert absent.exit_code == 1
    assert "corn data get a9a" in absent.stderr
    assert not (tmp_path / "report.html").exists()


def test_settings_of_ones_own(corn: Runner, tmp_path: Path) -> None:
    """Another graph, steps and lines, one of them a covariance of the user's own; also as PDF."""
    np.save(tmp_path / "R.npy", np.eye(5) + 2 * (np.eye(5) - 1 / 5))
    options = ("--graph", "ring:5", "--steps", 40, "--clip", 0.2, "--epsilons", "3,10", "--jobs", 1)
    lines = ("--mechanisms", "ldp,corn", "--mechanism", f"mine={tmp_path / 'R.npy'}")
    outcome = corn("reproduce", "fig1a", *options, *lines, "--out", tmp_path / "out", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    scale = json.loads(outcome.stdout)["scale"]
    assert (scale["num_agents"], scale["clip"], scale["regression"]["num_steps"]) == (5, 0.2, 40)
    table = (tmp_path / "out" / "points.csv").read_text()
    assert {line.split(",")[1] for line in table.splitlines()[1:]} == {"ldp", "corn", "mine"}
    assert (tmp_path / "out" / "figures" / "fig1a-added.pdf").read_bytes().startswith(b"%PDF")


def test_mechanisms_of_ones_own_need_different_names(corn: Runner, tmp_path: Path) -> None:
    np.save(tmp_path / "R.npy", np.eye(5))
    same = ("--mechanism", f"mine={tmp_path / 'R.npy'}")
    outcome = corn("reproduce", "fig1a", *same, *same, "--out", tmp_path / "out")
    assert outcome.exit_code == 1
    assert "--mechanism must be given with different names, found mine, mine" in outcome.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("fig1b", "--graph", "ring:5"), "--graph must contain {p} for fig1b"),
        (("fig1c", "--graph", "er:n=9,p={p},seed=1"), "--graph must contain {n} for fig1c"),
        (("fig1a", "--graph", "ring:5", "--agents", "6"), "must be 5, as in the graph"),
        (("fig1a", "--mechanisms", "best"), "must be one of ldp-paper"),
        (("fig1a", "--mechanism", "mine"), "must be NAME=R.npy"),
        (("fig1a", "--mechanism", "corn=R.npy"), "no such file"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    corn: Runner, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    outcome = corn("reproduce", *options, "--out", tmp_path)
    assert outcome.exit_code == 1
    assert message in outcome.stderr
    assert outcome.stderr.count("\n") == 1
