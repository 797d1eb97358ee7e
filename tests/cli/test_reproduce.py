"""``corn reproduce`` makes figures, checks claims, and goes on where it stopped."""

import json
from pathlib import Path

import pytest

from .commands import Runner


@pytest.mark.slow
def test_a_figure_of_the_paper(corn: Runner, tmp_path: Path) -> None:
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
    assert "these do not" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()} == cells


def test_misuse(corn: Runner, tmp_path: Path) -> None:
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
