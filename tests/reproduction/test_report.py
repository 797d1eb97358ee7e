"""A reproduction is written as tables, figures and one self-contained page."""

import csv
import html
import re
from dataclasses import replace
from pathlib import Path

import pytest

from reproduction.cells import CellStore
from reproduction.mechanisms import MECHANISMS
from reproduction.report import write_report
from reproduction.run import Reproduction, reproduce

from .scales import PILOTS, TINY

NAMES = ["fig1a", "fig4b"]


@pytest.mark.slow
def test_tables_figures_and_page_are_complete(tmp_path: Path) -> None:
    made = reproduce(NAMES, TINY, store=CellStore(tmp_path / "cells"), jobs=1)
    # Of fig1a the panel that is not the paper's.
    panels = [(panel, points) for panel, points in made.panels if panel.name != "fig1a"]
    made = replace(made, panels=tuple(panels))
    write_report(
        made, tmp_path, command="python -m reproduction fig1a", timing="This run took 1.5 s."
    )
    with (tmp_path / "runs.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # Two places, two step sizes, two seeds and all mechanisms.
    assert sum(row["panel"] == "fig4b" for row in rows) == 2 * 2 * 2 * len(MECHANISMS)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    # Panels with more than six lines have a drawing of all of them behind a fold.
    folded = page.count("<details>")
    assert page.count("<img ") > 1 + 2
    assert 0 < folded <= 2
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "python -m reproduction fig1a" in page
    assert "unit: agent" in page
    assert "This run took 1.5 s." in page
    for claim in made.claims:
        assert claim.evidence.split(";")[0] in html.unescape(page)
    for name in ("fig1a-accumulated-added", "fig4b", "fig4b-added"):
        assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 10_000
        assert (tmp_path / "figures" / f"{name}.svg").exists()
    table = (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert len(table.splitlines()) == 2 + len(made.claims)


def test_the_page_states_which_seeds_chose_step_sizes(tmp_path: Path) -> None:
    for scale, is_said in ((PILOTS, True), (TINY, False), (PILOTS.restrict(num_seeds=1), False)):
        write_report(Reproduction(scale, (), (), (), 0.0), tmp_path, command="", timing="")
        words = " ".join((tmp_path / "report.html").read_text(encoding="utf-8").split())
        said = "step sizes are chosen on 1 of them" in words
        assert said == is_said
