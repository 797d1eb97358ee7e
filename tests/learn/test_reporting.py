"""Tables, TensorBoard files and progress of a sweep."""

import csv
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from corn.errors import (
    FileFormatError,
    MissingExtraError,
)
from corn.learn import (
    require_writers,
    write_table,
    write_tensorboard,
)
from corn.learn.metrics import Row, _split_runs
from corn.learn.sweep import summarize_rows

from .sweeps import sweep


def test_csv_has_every_measurement(tmp_path: Path) -> None:
    result = sweep("corn", "none")
    write_table(result.rows, tmp_path / "new" / "t.csv")
    with (tmp_path / "new" / "t.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == len(result.rows)
    assert float(rows[-1]["test_loss"]) == result.rows[-1]["test_loss"]
    assert rows[-1]["epsilon"] == ""


def test_missing_optional_libraries_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("pyarrow.parquet", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"corn-dsgd\[parquet\]"):
        write_table([], tmp_path / "t.parquet")
    with pytest.raises(MissingExtraError, match=r"corn-dsgd\[tensorboard\]"):
        write_tensorboard([], tmp_path)
    with pytest.raises(FileFormatError, match=r"must end in \.csv"):
        write_table([], tmp_path / "t.txt")


def test_parquet_and_tensorboard_get_every_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replacements stand for both libraries, which are not installed everywhere."""
    tables: list[dict[str, list[Any]]] = []
    scalars: list[tuple[str, str, float, int]] = []

    class Writer:
        def __init__(self, directory: str) -> None:
            self.directory = directory

        def __enter__(self) -> "Writer":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars.append((self.directory, name, value, step))

    arrow = types.SimpleNamespace(table=lambda columns: columns)

    def write(table: dict[str, list[Any]], path: Path) -> None:
        path.touch()
        tables.append(table)

    parquet = types.SimpleNamespace(write_table=write)
    board = types.SimpleNamespace(SummaryWriter=Writer)
    for name, module in (
        ("pyarrow", arrow),
        ("pyarrow.parquet", parquet),
        ("torch.utils.tensorboard", board),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    require_writers(parquet=True, tensorboard=True)
    rows = sweep("corn").rows
    write_table(rows, tmp_path / "t.parquet")
    assert tables[0]["test_loss"] == [row["test_loss"] for row in rows]
    write_tensorboard(rows, tmp_path / "board")
    assert {Path(where).name for where, *_ in scalars} == {"seed 0", "seed 1"}
    losses = [(value, step) for _, name, value, step in scalars if name == "test_loss"]
    assert sorted(losses) == sorted((row["test_loss"], row["step"]) for row in rows)


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


def test_the_progress_line_names_loss_and_epsilon() -> None:
    rows = sweep("corn", "none").last_rows
    assert summarize_rows(rows).startswith("best test loss 0.")
    assert re.search(r", simulated ε \(agent\) [23]\.", summarize_rows(rows))
    assert summarize_rows([]) == ""
    exact = max(float(row["simulated_epsilon"]) for row in rows[:1])
    shown = float(summarize_rows(rows[:1]).rsplit(" ", 1)[1])
    assert exact <= shown <= exact + 0.01


@pytest.mark.parametrize("name", ["../../mine", "..", "a/b", "a\\b"])
def test_runs_are_named_by_three_folders_whatever_the_name_of_a_method(name: str) -> None:
    rows: list[Row] = [{"contender": name, "step_size": "0.01/√t", "seed": 3}]
    (path,) = map(Path, _split_runs(rows))
    assert path.parts[1:] == ("0.01 over √t", "seed 3")
    assert ".." not in path.parts
