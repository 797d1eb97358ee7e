"""Public bounds of columns, by which values are scaled to [−1, 1].

Means and standard deviations of private data would need privacy of their own, so CorN never
computes them: whoever publishes the bounds must know them without looking at the data.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from corn.arrays import FloatArray
from corn.errors import FileFormatError, InvalidArgumentError

_LEAST_WIDTH = 1e-300  # values are divided by it
_RULE = "LEAST:MOST for all columns, COLUMN=LEAST:MOST,… or a .csv file with column,least,most"


@dataclass(frozen=True)
class Bounds:
    """The least and the largest value of columns, as their owners declare them publicly.

    Attributes:
        by_column: bounds of columns by name.
        of_all: bounds of every other column; None leaves those columns as they are.

    >>> Bounds.parse("age=0:120").by_column
    {'age': (0.0, 120.0)}
    """

    by_column: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    of_all: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        named = [("all columns", self.of_all)] if self.of_all is not None else []
        for name, (least, most) in [*self.by_column.items(), *named]:
            # Not finite for numbers that are not, and for those too far apart to be scaled.
            if not _LEAST_WIDTH <= most - least < math.inf:
                raise InvalidArgumentError(
                    f"bounds of {name} must be two numbers, the first one smaller, whose "
                    f"difference is finite and at least {_LEAST_WIDTH:g}, found {least:g}:{most:g}"
                )

    @classmethod
    def parse(cls, text: str | None) -> Bounds:
        """Read bounds from an option's text."""
        if text is None:
            return cls()
        if text.endswith(".csv"):
            return cls(_read_file(Path(text)))
        by_column: dict[str, tuple[float, float]] = {}
        of_all = None
        for part in text.split(","):
            # The last equals sign separates: a column's own name may contain one.
            name, equals, interval = part.rpartition("=")
            pair, column = _parse_pair(interval, text), name.strip()
            if column in by_column or (not equals and of_all is not None):
                raise InvalidArgumentError(f"bounds of {column or 'all columns'} are given twice")
            if not equals:
                of_all = pair
            else:
                by_column[column] = pair
        return cls(by_column, of_all)

    def find(self, column: str) -> tuple[float, float] | None:
        """Return the bounds of a column, or None if it has none."""
        return self.by_column.get(column, self.of_all)

    def require_known(self, columns: Sequence[str], path: Path) -> None:
        """Raise if a column that has bounds is not in a file."""
        for name in self.by_column:
            if name not in columns:
                raise FileFormatError(f"{path}: column {name!r} has bounds, but is missing")

    def describe(self) -> str:
        """Return the bounds as text, for agents to compare."""
        # Sorted, and with every digit: agents that declare the same bounds in another order must
        # agree, and bounds that differ in the last digit must not.
        named = [f"{name}={low!r}:{high!r}" for name, (low, high) in sorted(self.by_column.items())]
        general = [] if self.of_all is None else [f"{self.of_all[0]!r}:{self.of_all[1]!r}"]
        return ",".join([*named, *general]) or "none"


def scale_values(values: FloatArray, bounds: tuple[float, float] | None) -> FloatArray:
    """Map values from their bounds to [−1, 1]; values outside move to the nearest bound.

    >>> scale_values(np.array([0.0, 60.0, 150.0]), (0, 120)).tolist()
    [-1.0, 0.0, 1.0]
    """
    if bounds is None:
        return values
    # Values outside are clipped, not refused: a refusal would tell others about private data.
    least, most = bounds
    return np.asarray((np.clip(values, least, most) - least) * (2 / (most - least)) - 1)


def narrow_values(
    values: FloatArray, path: Path, columns: Sequence[str] = ()
) -> NDArray[np.float32]:
    """Return scaled values in float32, or raise with the row of one that is too large for it."""
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(values, dtype=np.float32)
    broken = np.argwhere(~np.isfinite(narrow))
    if len(broken):
        row, *place = broken[0].tolist()
        name = f"column {columns[place[0] if place else 0]!r}" if columns else "inputs"
        raise FileFormatError(
            f"{path}: {name} must have values up to {np.finfo(np.float32).max:.2g}, found "
            f"{values[(row, *place)]:g} in row {row + 1}: give --bounds"
        )
    return narrow


def _parse_pair(text: str, whole: str) -> tuple[float, float]:
    least, colon, most = text.partition(":")
    try:
        if colon:
            return float(least), float(most)
    except ValueError:
        pass
    raise InvalidArgumentError(f"bounds must be {_RULE}, found {whole!r}")


def _read_file(path: Path) -> dict[str, tuple[float, float]]:
    try:
        # Spreadsheets begin a CSV file with a byte order mark, which would become a part of the
        # first column's name.
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = list(csv.DictReader(stream, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FileFormatError(f"{path}: cannot be read: {error}") from error
    try:
        found = {row["column"]: (float(row["least"]), float(row["most"])) for row in rows}
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(
            f"{path}: bounds must have the columns column,least,most with numbers in the last "
            f"two: {error}"
        ) from error
    if len(found) < len(rows):
        raise FileFormatError(f"{path}: bounds of a column are given twice")
    return found
