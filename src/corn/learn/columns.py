"""Notes on the columns of a file for its owner: constant, large, outside public bounds, no sample.

These are facts about private data. They must reach its owner alone, and must not stop a run that
others take part in: a refusal would tell them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from corn.arrays import FloatArray, IntArray

_LARGE_VALUE = 10.0  # beside which columns of order 1 lose their part of a clipped gradient
_MOST_NAMES = 5


@dataclass(frozen=True, eq=False)
class Column:
    """One column of numbers, with its public bounds, if it has any."""

    name: str
    values: FloatArray
    bounds: tuple[float, float] | None

    @property
    def is_constant(self) -> bool:
        """Whether all rows have the same value."""
        return bool((self.values == self.values[0]).all())

    @property
    def is_large(self) -> bool:
        """Whether there are large values and no bounds to scale them by."""
        # With bounds every value is scaled to [−1, 1], so that no column is large.
        return self.bounds is None and float(np.abs(self.values).max()) > _LARGE_VALUE

    @property
    def num_outside(self) -> int:
        """The number of values outside the bounds."""
        if self.bounds is None:
            return 0
        return int(((self.values < self.bounds[0]) | (self.values > self.bounds[1])).sum())


def describe_columns(columns: Sequence[Column]) -> Iterator[str]:
    """Yield at most one note of each kind, which names the columns it is about."""
    if constant := [own.name for own in columns if own.is_constant]:
        yield (
            f"{_begin(constant)} the same value in every row: a model cannot learn its effect from "
            "this file"
        )
    if large := [own.name for own in columns if own.is_large]:
        yield (
            f"{_begin(large)} values beyond ±{_LARGE_VALUE:g} and no public bounds: they take most "
            "of a clipped gradient; give --bounds"
        )
    # Counted, because scaling changes them in silence: see ``scale_values``.
    if outside := [own.name for own in columns if own.num_outside]:
        count = sum(own.num_outside for own in columns)
        yield (
            f"{_begin(outside)} values outside public bounds, {count} in all, which count as the "
            "nearest bound"
        )


def describe_gaps(
    targets: IntArray, train: IntArray, parts: Mapping[int, IntArray], classes: Sequence[str]
) -> Iterator[str]:
    """Yield notes on classes that agents lack because one file was distributed.

    Args:
        targets: of all samples.
        train: of those that are not held out.
        parts: of those of some agents.
        classes: the names of the classes.

    >>> list(describe_gaps(np.array([0, 1, 2]), np.array([0, 1]), {4: np.array([1])}, "abc"))[1]
    'agent 4 got no sample of some class when the file was distributed; others have it'
    """
    trained = set(train.tolist())
    if unused := sorted(set(targets.tolist()) - trained):
        names = list_some([classes[number] for number in unused])
        yield f"only held-out samples have the class {names}: no agent trains on it"
    if lacking := [str(agent) for agent, own in parts.items() if trained - set(own.tolist())]:
        who = "agent" if len(lacking) == 1 else "agents"
        yield (
            f"{who} {list_some(lacking)} got no sample of some class when the file was "
            "distributed; others have it"
        )


def list_some(names: Sequence[str]) -> str:
    """Return names as text; of many, the first and how many more there are.

    >>> list_some("abcdefg")
    'a, b, c, d, e and 2 more'
    """
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _begin(names: Sequence[str]) -> str:
    """Return subject and verb of a note.

    >>> _begin(["age"]), _begin(["age", "dose"])
    ("column 'age' has", "columns 'age', 'dose' have")
    """
    quoted = list_some([repr(name) for name in names])
    return f"column {quoted} has" if len(names) == 1 else f"columns {quoted} have"
