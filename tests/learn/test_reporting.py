"""Tables and progress of a sweep."""

import csv
from pathlib import Path

import pytest

from corn.learn import write_table

from .sweeps import sweep


def test_csv_has_every_measurement(tmp_path: Path) -> None:
    result = sweep("corn", "none")
    write_table(result.rows, tmp_path / "new" / "t.csv")
    with (tmp_path / "new" / "t.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == len(result.rows)
    assert float(rows[-1]["test_loss"]) == result.rows[-1]["test_loss"]
    assert rows[-1]["epsilon"] == ""


def test_the_progress_bar_is_drawn_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep("corn")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    sweep("corn")
    shown = capsys.readouterr().err
    assert "training" in shown
    sweep("corn", show_progress=False)
    assert capsys.readouterr().err == ""
