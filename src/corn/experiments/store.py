"""Where finished cells are kept: one small file each, named by its configuration."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corn.experiments.cells import Cell, CellResult, configuration_of, key_of
from corn.version import __version__


@dataclass(frozen=True)
class CellStore:
    """Finished cells in a directory.

    A file that is torn, of another configuration or made by another version counts as absent.
    """

    directory: Path

    def load(self, cell: Cell) -> CellResult | None:
        """The result of a cell, if it is there and whole."""
        record = self._read(cell)
        return None if record is None else record["result"]

    def seconds(self, cell: Cell) -> float:
        """How long it took to compute; 0 if it is not there."""
        record = self._read(cell)
        return 0.0 if record is None else float(record["seconds"])

    def save(self, cell: Cell, result: CellResult, *, seconds: float) -> None:
        """Keep a result; another process never sees half of it."""
        record = {
            "corn_version": __version__,
            "configuration": configuration_of(cell),
            "seconds": round(seconds, 3),
            "result": result,
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self._path(cell)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.replace(path)

    def _path(self, cell: Cell) -> Path:
        return self.directory / f"{key_of(cell)}.json"

    def _read(self, cell: Cell) -> dict[str, Any] | None:
        try:
            record = json.loads(self._path(cell).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        fits = (
            isinstance(record, dict)
            and record.get("corn_version") == __version__
            and record.get("configuration") == configuration_of(cell)
            and isinstance(record.get("result"), dict)
            and isinstance(record.get("seconds"), float | int)
        )
        return record if fits else None
