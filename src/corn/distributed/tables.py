"""Read back the tables of measurements that agents wrote, shared or private."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from corn.errors import FileFormatError
from corn.learn.metrics import COLUMNS, SHARED_COLUMNS, Row

_TEXTS = ("contender", "step_size", "unit")


def read_rows(path: Path) -> dict[int, Row]:
    """An agent's measurements, by step; empty if it was lost before it had any."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        if tuple(reader.fieldnames or ()) not in (COLUMNS, SHARED_COLUMNS):
            raise FileFormatError(f"{path}: not a table of measurements")
        rows = [_parse(row) for row in reader]
    return {int(row["step"]): row for row in rows}


def _parse(row: dict[str, Any]) -> Row:
    parsed: Row = {}
    for name, text in row.items():
        if name in _TEXTS:
            parsed[name] = text
        elif name in ("seed", "step"):
            parsed[name] = int(text)
        else:
            parsed[name] = float(text) if text else math.nan
    return parsed
