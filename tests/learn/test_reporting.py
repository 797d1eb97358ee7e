"""Tables and progress of a sweep."""

import csv
from pathlib import Path

import pytest
from pyarrow import parquet

from corn.errors import FileFormatError
from corn.learn import COLUMNS, write_table

from .sweeps import sweep


def test_csv_has_every_measurement(tmp_path: Path) -> None:
    result = sweep("corn", "none")
    write_table(result.rows, tmp_path / "new" / "t.csv")
    with (tmp_path / "new" / "t.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == len(result.rows)
    assert float(rows[-1]["test_loss"]) == result.rows[-1]["test_loss"]
    assert rows[-1]["epsilon"] == ""


def test_parquet_has_every_measurement(tmp_path: Path) -> None:
    rows = sweep("corn").rows
    write_table(rows, tmp_path / "t.parquet")
    table = parquet.read_table(tmp_path / "t.parquet")
    assert table.column_names == list(COLUMNS)
    assert table.column("test_loss").to_pylist() == [row["test_loss"] for row in rows]


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"must end in \.csv"):
        write_table([], tmp_path / "t.txt")


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
