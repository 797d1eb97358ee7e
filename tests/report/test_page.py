"""A reproduction is written as tables, figures and one page that needs nothing else."""

import csv
import html
import re
from pathlib import Path

import numpy as np
import pytest
from tests.experiments.scales import PILOTS, TINY

from corn.experiments import CellStore, Panel, Point, Reproduction, reproduce
from corn.experiments.methods import CORN_PAPER, NONE
from corn.report.page import write_reproduction
from corn.report.panels import plot_panel
from corn.report.style import save_figure

NAMES = ["fig1a", "fig2", "fig4b"]


@pytest.mark.slow
def test_everything_is_written(tmp_path: Path) -> None:
    made = reproduce(NAMES, TINY, store=CellStore(tmp_path / "cells"), jobs=1)
    write_reproduction(made, tmp_path, command="corn reproduce fig1a", timing="It took 1.5 s.")
    with (tmp_path / "runs.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # Two places, two step sizes, two seeds and eleven methods.
    assert sum(row["panel"] == "fig4b" for row in rows) == 2 * 2 * 2 * 11
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<img ") == 2 + 1 + 2 + 1 + 1 + 2
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "corn reproduce fig1a" in page
    assert "unit: agent" in page
    for claim in made.claims:
        assert claim.evidence.split(";")[0] in html.unescape(page)
    for name in ("fig1a", "fig1a-added", "fig1a-accumulated-added", "fig4b", "fig4b-added"):
        assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 10_000
        assert (tmp_path / "figures" / f"{name}.svg").exists()
    table = (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert len(table.splitlines()) == 2 + len(made.claims)


def test_the_page_says_which_seeds_chose_step_sizes(tmp_path: Path) -> None:
    for scale, is_said in ((PILOTS, True), (TINY, False), (PILOTS.restrict(num_seeds=1), False)):
        write_reproduction(Reproduction(scale, (), (), (), 0.0), tmp_path, command="", timing="")
        words = " ".join((tmp_path / "report.html").read_text(encoding="utf-8").split())
        said = "3; step sizes chosen on 1 of them, the others run at those only" in words
        assert said == is_said


def test_a_panel_without_a_finished_run_is_drawn_all_the_same(tmp_path: Path) -> None:
    for log_y, values in ((True, ()), (False, ()), (True, (0.0, 0.0)), (True, (1.0, 1.0))):
        panel = Panel("fig3a", "fig3a", "title", "x", "y", log_y=log_y, is_random=True)
        figure = plot_panel(panel, [Point(NONE, 3.0, values)], broken_promises=[3.0])
        save_figure(figure, tmp_path / "figure.png")


def test_points_beyond_the_promise_are_crossed_out() -> None:
    panel = Panel("fig4a", "fig4a", "title", "ε", "y", log_x=True)
    points = [Point(CORN_PAPER, x, (1 / x,)) for x in (10.0, 40.0)]
    (axes,) = plot_panel(panel, points, broken_promises=[40.0]).axes
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [np.asarray(line.get_xdata()).tolist() for line in crosses] == [[40.0]]
