"""Measurements as data frames of pandas, and from the files of a run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corn.errors import FileFormatError, MissingExtraError

_TEXTS = ("contender", "step_size", "unit")


def make_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a ``pandas.DataFrame``; pandas is an extra."""
    try:
        pandas: Any = importlib.import_module("pandas")
    except ImportError as error:
        raise MissingExtraError("a data frame", extra="pandas") from error
    return pandas.DataFrame([dict(row) for row in rows])


def load_results(path: Path | str) -> Any:
    """Return the measurements of a run as a ``pandas.DataFrame``.

    Args:
        path: ``metrics.csv`` or ``metrics.parquet``, or the folder of a run: of ``corn train
            --out``, of ``corn launch --out`` (the shared measurements; see
            :func:`load_agent_results`), or of the reproduction of the paper (every run).

    >>> load_results("out/run")["test_loss"].min()  # doctest: +SKIP
    0.3742
    """
    place = Path(path)
    if place.is_file():
        return _read_table(place)
    # Only ``shared`` of a launched run: private measurements must be asked for by name.
    for name in ("metrics.csv", "metrics.parquet", "shared/metrics.csv", "runs.csv"):
        if (place / name).is_file():
            return _read_table(place / name)
    raise FileFormatError(
        f"{place}: must be a table or the folder of a run, with metrics.csv, found neither"
    )


def load_agent_results(path: Path | str) -> Any:
    """Return the measurements of every agent of ``corn launch --out``, in one data frame.

    Those in ``shared`` may be published. Give the folder ``private`` for those that may not.
    """
    place = Path(path)
    folders = (place / "shared" if (place / "shared").is_dir() else place).glob("agent-*")
    numbered = {folder.name.removeprefix("agent-"): folder / "metrics.csv" for folder in folders}
    # Others, such as a copy called agent-0-old, are no agent's.
    frames = {
        int(number): _read_table(table)
        for number, table in numbered.items()
        if number.isdecimal() and table.is_file()
    }
    if not frames:
        raise FileFormatError(f"{place}: must have folders agent-0, agent-1, …, found none")
    pandas: Any = importlib.import_module("pandas")
    return pandas.concat(
        [own.assign(agent=agent) for agent, own in sorted(frames.items())], ignore_index=True
    )


def _read_table(path: Path) -> Any:
    try:
        pandas: Any = importlib.import_module("pandas")
    except ImportError as error:
        raise MissingExtraError("a data frame", extra="pandas") from error
    try:
        if path.suffix == ".parquet":
            return pandas.read_parquet(path)
        # Step sizes may be formulas, such as 0.01/√t, so that they are text in every table.
        frame = pandas.read_csv(path, dtype=dict.fromkeys(_TEXTS, str))
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path}: not a table: {error}") from error
    return frame.fillna(dict.fromkeys(set(_TEXTS) & set(frame.columns), ""))
