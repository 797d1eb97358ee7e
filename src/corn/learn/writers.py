"""Write a table of measurements: CSV, Parquet, TensorBoard."""

from __future__ import annotations

import csv
import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corn.errors import FileFormatError, MissingExtraError
from corn.files import writing_whole
from corn.learn.metrics import COLUMNS, Row

_NAMES = ("contender", "step_size", "seed", "step", "unit", "delta")


def write_table(
    rows: Sequence[Row],
    path: Path | str,
    *,
    columns: Sequence[str] = COLUMNS,
    is_private: bool = False,
) -> None:
    """Write these columns of rows to a ``.csv`` or ``.parquet`` file; NaN is an empty CSV field.

    A private file can be read by its owner only.

    Parquet needs pyarrow; its absence is a ``MissingExtraError``.
    """
    target = Path(path)
    writers = {".csv": _write_csv, ".parquet": _write_parquet}
    if target.suffix not in writers:
        raise FileFormatError(f"{target}: a table's name must end in .csv or .parquet")
    target.parent.mkdir(parents=True, exist_ok=True)
    with writing_whole(target, is_private=is_private) as partial:
        writers[target.suffix](rows, partial, columns)


def write_tensorboard(rows: Sequence[Row], directory: Path | str) -> None:
    """Write every run as an event file of its own below ``directory``; needs tensorboard."""
    board = _import("torch.utils.tensorboard", "writing for TensorBoard", extra="tensorboard")
    runs: dict[str, list[Row]] = {}
    for row in rows:
        name = f"{row['contender']}/{row['step_size']}/seed {row['seed']}".replace("/√", " over √")
        runs.setdefault(name, []).append(row)
    for name, own in runs.items():
        with board.SummaryWriter(str(Path(directory) / name)) as writer:
            _write_scalars(writer, own)


def require_writers(*, parquet: bool = False, tensorboard: bool = False) -> None:
    """Raise ``MissingExtraError`` now rather than after hours of training."""
    if parquet:
        _import("pyarrow.parquet", "writing Parquet", extra="parquet")
    if tensorboard:
        _import("torch.utils.tensorboard", "writing for TensorBoard", extra="tensorboard")


def _import(module: str, feature: str, *, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(feature, extra=extra) from error


def _write_scalars(writer: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        for column in COLUMNS:
            value = row[column]
            if column not in _NAMES and not math.isnan(float(value)):
                writer.add_scalar(column, float(value), int(row["step"]))


def _write_csv(rows: Sequence[Row], path: Path, columns: Sequence[str]) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        for row in rows:
            writer.writerow({name: "" if _is_nan(row[name]) else row[name] for name in columns})


def _write_parquet(rows: Sequence[Row], path: Path, columns: Sequence[str]) -> None:
    parquet = _import("pyarrow.parquet", "writing Parquet", extra="parquet")
    arrow = importlib.import_module("pyarrow")
    table = arrow.table({name: [row[name] for row in rows] for name in columns})
    parquet.write_table(table, path)


def _is_nan(value: str | int | float) -> bool:
    return isinstance(value, float) and math.isnan(value)
