"""What benchmarks share: times in turns, means with intervals, tables, and files of runs."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from corn.checks import FloatArray


def best_seconds(
    programs: Mapping[str, Callable[[], object]],
    num_turns: int,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Return the least time of each program, measured in turns.

    Other work on the machine then slows all of them alike, and the ratios stay right. It disturbs
    the time of the processor less, which is the default.
    """
    best = dict.fromkeys(programs, math.inf)
    for _ in range(num_turns):
        for name, run in programs.items():
            start = clock()
            run()
            best[name] = min(best[name], clock() - start)
    return best


def half_width(values: Sequence[float] | FloatArray) -> float:
    """Return half the width of Student's 95 % interval of a mean; infinite for one value."""
    count = len(values)
    if count < 2:
        return math.inf
    return float(stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count))


def describe(values: Sequence[float] | FloatArray, sign: str = "") -> str:
    """Return mean ± half the width of its 95 % interval."""
    return f"{np.mean(values):{sign}.4f} ± {half_width(values):.4f}".replace("-", "−")


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, of which the first row is the head."""
    head, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *others))


def print_times(title: str, row: Mapping[str, float]) -> None:
    """Print numbers with their names below a title."""
    print(title)
    for name, value in row.items():
        print(f"    {name:<44}{value:10.2f}", flush=True)


def append_runs(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Add rows to a CSV file, which begins with the names of its columns."""
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(columns)
        for row in rows:
            writer.writerow([f"{x:.6g}" if isinstance(x, float) else x for x in row])


def read_runs(path: Path) -> list[dict[str, str]]:
    """Return the rows of such a file, if there is one."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
