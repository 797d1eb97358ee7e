"""Promises of single agents by name, from a mapping or a file, in the order of agents."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from corn.errors import FileFormatError, InvalidArgumentError, make_printable

_COLUMNS = (["agent", "epsilon"], ["agent", "epsilon", "delta"])
_MAX_FILE_BYTES = 1 << 24
_MOST_NAMED = 5


def order_promises(
    given: Mapping[str, float] | Mapping[int, float], names: Sequence[str] | None = None
) -> tuple[float, ...]:
    """Return the values that a mapping gives to agents, in the order of agents.

    Args:
        given: a value for each agent, by its name or its number; none may be missing.
        names: the names of the agents in order. Without them, agents are numbered from 0.

    >>> order_promises({"south": 8.0, "north": 1.0}, ["north", "south"])
    (1.0, 8.0)
    """
    return _order([(str(agent), value) for agent, value in given.items()], names)


def read_promises(
    path: Path, names: Sequence[str] | None = None
) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
    """Read ε of each agent, and δ if there is a column for it, from a table with a header.

    The columns are ``agent,epsilon`` or ``agent,epsilon,delta``, separated by commas; rows may have
    any order.

    Raises:
        FileFormatError: the file is missing, or is not such a table of all agents.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise FileFormatError(f"{path}: more than {_MAX_FILE_BYTES:,} bytes")
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        return _parse(lines, names)
    except FileNotFoundError as error:
        raise FileFormatError(f"{path}: no such file") from error
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path}: not text in UTF-8") from error
    except (InvalidArgumentError, csv.Error) as error:
        raise FileFormatError(f"{path}: {error}") from error


def _parse(
    lines: Iterable[str], names: Sequence[str] | None
) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
    rows = [[cell.strip() for cell in row] for row in csv.reader(lines)]
    header = rows[0] if rows else []
    if header not in _COLUMNS:
        found = make_printable(",".join(header), limit=60)
        raise InvalidArgumentError(
            f"the first line must be agent,epsilon or agent,epsilon,delta, found {found!r}"
        )
    agents: list[str] = []
    values: list[list[float]] = []
    for number, row in enumerate(rows[1:], start=2):
        if not any(row):
            continue
        if len(row) != len(header):
            raise InvalidArgumentError(
                f"line {number} must have {len(header)} entries, found {len(row)}"
            )
        agents.append(row[0])
        try:
            values.append([float(cell) for cell in row[1:]])
        except ValueError as error:
            found = make_printable(",".join(row), limit=60)
            raise InvalidArgumentError(
                f"line {number} must have numbers after the agent, found {found!r}"
            ) from error
    epsilons, *deltas = (
        _order([(agent, own[k]) for agent, own in zip(agents, values, strict=True)], names)
        for k in range(len(header) - 1)
    )
    return epsilons, deltas[0] if deltas else None


def _order(given: Sequence[tuple[str, float]], names: Sequence[str] | None) -> tuple[float, ...]:
    known = [str(agent) for agent in range(len(given))] if names is None else list(names)
    # Agents may be given by number too. A name that is a number takes precedence.
    places = {str(agent): agent for agent in range(len(known))}
    places |= {name: agent for agent, name in enumerate(known)}
    found: dict[int, float] = {}
    for name, value in given:
        if name not in places:
            raise InvalidArgumentError(
                f"there is no agent {make_printable(name, limit=60)!r}: the agents are "
                f"{_list_some(known)}"
            )
        if places[name] in found:
            raise InvalidArgumentError(f"agent {name!r} must have one promise, found two")
        found[places[name]] = value
    missing = [known[agent] for agent in range(len(known)) if agent not in found]
    if missing:
        raise InvalidArgumentError(
            f"every agent must have a promise, found none for {_list_some(missing)}"
        )
    return tuple(found[agent] for agent in range(len(known)))


def _list_some(names: Sequence[str]) -> str:
    shown = ", ".join(make_printable(name, limit=60) for name in names[:_MOST_NAMED])
    more = len(names) - _MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
