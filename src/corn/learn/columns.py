"""Columns of a public schema: how the text of a cell becomes numbers, row by row.

Every rule is a constant that all sites agree on before they look at data, so that a row's numbers
depend on no other row: a missing value becomes the stated constant, an unknown category gives
zeros, and bounds clamp what is outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, datetime
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np

from corn.checks import FloatArray, require, require_choice
from corn.errors import InvalidArgumentError, list_some
from corn.parsing import quote

ColumnKind: TypeAlias = Literal["number", "category", "date", "boolean"]
Constant: TypeAlias = float | str | bool

MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
"""What spreadsheets and data frames write for a value that is not there, in lower case."""

_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "y", "1", "1.0"), 1.0),
    **dict.fromkeys(("false", "no", "n", "0", "0.0"), -1.0),
}
_EPOCH = date(1970, 1, 1)
_LARGEST = float(np.finfo(np.float32).max)
_RULES = {
    "number": "a number",
    "date": "a date such as 2024-03-31",
    "boolean": "true or false, yes or no, 1 or 0",
}


@dataclass(frozen=True)
class Column:
    """A column of inputs, as all sites declare it.

    Attributes:
        name: its name in the files.
        kind: ``number``; ``date``, which counts days; ``boolean``, which is 1 or −1; or
            ``category``, which becomes one indicator of 0 or 1 for each of its categories.
        bounds: the least and the largest value of a number or a date, which scale to [−1, 1].
            Values outside count as the nearest bound.
        categories: the public list of a category. Any other value has zeros in all indicators.
        missing: the constant that stands for a missing value. Without one, a missing value is an
            error, and for a category it has zeros in all indicators.

    >>> Column("ward", "category", categories=("a", "b")).read(["b", "?", "c"])[0].tolist()
    [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    """

    name: str
    kind: ColumnKind = "number"
    bounds: tuple[Constant, Constant] | None = None
    categories: tuple[str, ...] = ()
    missing: Constant | None = None

    def __post_init__(self) -> None:
        where = f"column {quote(self.name)}: "
        require_choice(f"{where}kind", self.kind, get_args(ColumnKind))
        has_bounds = self.kind in ("number", "date")
        if self.bounds is not None:
            require(has_bounds, f"{where}bounds", "given for numbers and dates only", self.kind)
            least, most = (self._require_constant("bounds", value) for value in self.bounds)
            require(least < most, f"{where}bounds", "[least, most]", list(self.bounds))
        if (self.kind == "category") != bool(self.categories):
            state = "listed" if self.kind == "category" else "left out"
            raise InvalidArgumentError(
                f"{where}categories must be {state} for kind {self.kind!r}, found "
                f"{list(self.categories)}"
            )
        names = [_name(value) for value in self.categories]
        require(len(set(names)) == len(names), f"{where}categories", "different", names)
        if self.missing is None:
            return
        if self.kind == "category":
            require(
                _name(str(self.missing)) in names, f"{where}missing", "a category", self.missing
            )
        else:
            self._require_constant("missing", self.missing)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the inputs that it becomes."""
        if self.kind != "category":
            return (self.name,)
        return tuple(f"{self.name}={_name(value)}" for value in self.categories)

    @property
    def limits(self) -> tuple[float, float] | None:
        """The bounds as numbers: of dates, days since 1970."""
        if self.bounds is None:
            return None
        least, most = (self._require_constant("bounds", value) for value in self.bounds)
        return least, most

    def read(self, texts: Sequence[str | None]) -> tuple[FloatArray, list[str], list[str]]:
        """Return the inputs of all rows, shape (rows, features), problems, and notes for the owner.

        Inputs are not scaled yet. Problems and notes may quote values, so they are private.
        """
        # Few different texts, or each different: either way each is read once.
        cells = [(text or "").strip() for text in texts]
        is_missing = [cell.lower() in MISSING for cell in cells]
        fill = None if self.missing is None else str(self.missing)
        values = [fill if gone else cell for cell, gone in zip(cells, is_missing, strict=True)]
        problems: list[str] = []
        notes: list[str] = []
        if self.kind == "category":
            numbers, unknown = self._indicate(values)
            if len(unknown):
                found = list_some(sorted({cells[row] for row in unknown}))
                notes.append(
                    f"column {self.name!r} has {len(unknown)} values outside the public "
                    f"categories, such as {found}, which count as none of them"
                )
        else:
            parsed = {text: self._parse(text) for text in set(values) if text is not None}
            numbers = np.array(
                [[math.nan if text is None else parsed[text]] for text in values], dtype=np.float64
            ).reshape(len(values), 1)
            if fill is None and any(is_missing):
                problems.append(
                    f"column {self.name!r} has no value in row {is_missing.index(True) + 1} "
                    f"(number of such rows: {sum(is_missing)}): agree on a public constant "
                    "missing = …, or remove these rows"
                )
            wrong = [
                row for row, text in enumerate(values) if text is not None and parsed[text] is None
            ]
            if wrong:
                problems.append(
                    f"column {self.name!r} must have {_RULES[self.kind]}, found "
                    f"{cells[wrong[0]][:40]!r} in row {wrong[0] + 1} (number of such rows: "
                    f"{len(wrong)})"
                )
        if any(is_missing) and fill is not None:
            notes.append(
                f"column {self.name!r} has no value in {sum(is_missing)} rows, which count as "
                f"{fill}"
            )
        return numbers, problems, notes

    def _indicate(self, values: Sequence[str | None]) -> tuple[FloatArray, list[int]]:
        places = {_name(value): place for place, value in enumerate(self.categories)}
        indicators = np.zeros((len(values), len(places)))
        unknown = []
        for row, value in enumerate(values):
            place = None if value is None else places.get(_name(value))
            if place is not None:
                indicators[row, place] = 1.0
            elif value is not None:
                unknown.append(row)
        return indicators, unknown

    def _parse(self, text: str) -> float | None:
        if self.kind == "boolean":
            return _BOOLEANS.get(text.lower())
        if self.kind == "date":
            return _count_days(text)
        try:
            # Python also reads 1_2 as 12, as no other program that writes tables does.
            number = math.nan if "_" in text else float(text)
        except ValueError:
            return None
        return number if abs(number) <= _LARGEST else None

    def _require_constant(self, name: str, value: Constant) -> float:
        number = self._parse(str(value))
        if number is None:
            raise InvalidArgumentError(
                f"column {quote(self.name)}: {name} must be {_RULES[self.kind]}, found "
                f"{quote(value)}"
            )
        return number


@dataclass(frozen=True)
class DataSchema:
    """What all sites declare publicly about their files.

    Attributes:
        target: the column to predict.
        columns: the columns of the inputs, in the order of the model's parameters.
        classes: the names of the classes; empty where the target is a number.
        target_bounds: of a target that is a number; None leaves it as it is.
        id: a column that names the person of a row. Each may occur once, which is checked; it is
            no input.
    """

    target: str
    columns: tuple[Column, ...]
    classes: tuple[str, ...] = ()
    target_bounds: tuple[float, float] | None = None
    id: str | None = None

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        require(bool(names), "columns", "at least one column", "none")
        for name, what in ((self.target, "target"), (self.id, "id")):
            require(name not in names, what, "no column of the inputs", name)
        features = [name for column in self.columns for name in column.features]
        repeated = sorted({name for name in features if features.count(name) > 1})
        require(not repeated, "columns", "of different names", repeated)
        require(self.id != self.target, "id", "another column than the target", self.id)
        if self.classes:
            require(
                len(set(self.classes)) == len(self.classes) >= 2,
                "classes",
                "at least two different names",
                list(self.classes),
            )
            require(self.target_bounds is None, "target-bounds", "left out with classes", "both")

    def to_json(self) -> dict[str, Any]:
        """Return the schema as plain data, which ``read_schema`` reads."""
        plain = asdict(self)
        columns = {column.pop("name"): _drop_empty(column) for column in plain.pop("columns")}
        return {**_drop_empty(plain), "columns": columns}


def read_schema(content: Mapping[str, Any]) -> tuple[DataSchema | None, list[str]]:
    """Return the schema in a table ``data`` of a file, or all of its problems."""
    problems = list(_find_unknown("data", content, ("target", "classes", "target-bounds", "id")))
    columns: list[Column] = []
    given = content.get("columns")
    for name, fields in given.items() if isinstance(given, Mapping) else ():
        try:
            columns.append(_read_column(str(name), fields))
        except InvalidArgumentError as error:
            problems.append(str(error))
    target = content.get("target")
    if not isinstance(target, str):
        problems.append("[data] target must be the name of a column")
    if not isinstance(given, Mapping) or not given:
        problems.append("[data.columns] must have a table for each column of the inputs")
    bounds = content.get("target-bounds", content.get("target_bounds"))
    if problems:
        return None, problems
    try:
        schema = DataSchema(
            target=str(target),
            columns=tuple(columns),
            classes=tuple(map(_as_text, content.get("classes") or ())),
            target_bounds=None if bounds is None else (float(bounds[0]), float(bounds[1])),
            id=content.get("id"),
        )
    except (TypeError, ValueError, IndexError) as error:
        return None, [f"[data] {error}"]
    return schema, []


def _read_column(name: str, fields: object) -> Column:
    # A bare word is the kind: sex = "boolean".
    table = {"kind": fields} if isinstance(fields, str) else fields
    if not isinstance(table, Mapping):
        raise InvalidArgumentError(f"column {quote(name)}: must be a table, found {quote(fields)}")
    known = ("kind", "bounds", "categories", "missing")
    unknown = [key for key in table if key not in known]
    if unknown:
        raise InvalidArgumentError(
            f"column {quote(name)}: unknown entry {quote(unknown[0])}: entries are "
            f"{', '.join(known)}"
        )
    kind = table.get("kind", "category" if "categories" in table else "number")
    bounds = table.get("bounds")
    if bounds is not None and not (isinstance(bounds, list | tuple) and len(bounds) == 2):
        raise InvalidArgumentError(
            f"column {quote(name)}: bounds must be [least, most], found {quote(bounds)}"
        )
    listed = table.get("categories", ())
    if not isinstance(listed, list | tuple):
        raise InvalidArgumentError(
            f"column {quote(name)}: categories must be a list, found {quote(listed)}"
        )
    missing = table.get("missing")
    return Column(
        name=name,
        kind=cast("ColumnKind", kind),
        bounds=None if bounds is None else (_plain(bounds[0]), _plain(bounds[1])),
        categories=tuple(map(_as_text, listed)),
        missing=None if missing is None else _plain(missing),
    )


def _find_unknown(table: str, given: Mapping[str, Any], known: Sequence[str]) -> Iterator[str]:
    for name in given:
        if name.replace("_", "-") not in (*known, "columns"):
            yield f"[{table}] unknown entry {quote(name)}: entries are {', '.join(known)}"


def _drop_empty(fields: dict[str, Any]) -> dict[str, Any]:
    plain = {
        key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()
    }
    return {key: value for key, value in plain.items() if value not in (None, [])}


def _plain(value: Any) -> Constant:
    """Return a constant of TOML, whose dates are dates, as JSON has it."""
    return value.isoformat() if isinstance(value, date) else cast("Constant", value)


def _as_text(value: object) -> str:
    # True and 1 in TOML stand for what files write.
    return str(value).lower() if isinstance(value, bool) else str(value)


def _name(text: str) -> str:
    """Return the one name of a category that files write in several ways: 1 and 1.0."""
    text = text.strip()
    try:
        number = float(text)
    except ValueError:
        return text
    return (
        str(int(number)) if "_" not in text and number.is_integer() and abs(number) < 1e15 else text
    )


def _count_days(text: str) -> float | None:
    """Return the days from 1970 to a date in ISO 8601, with or without a time of day."""
    try:
        return float((datetime.fromisoformat(text).date() - _EPOCH).days)
    except ValueError:
        return None
