"""The public schema of tables: how the text of a cell becomes numbers, row by row.

Every rule is a constant that all sites agree on before they look at data, so that a row's numbers
depend on no other row. Problems and notes may quote private values: they are for the owner alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import date, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args, get_type_hints

import numpy as np

from corn.checks import FloatArray, IntArray, require, require_choice
from corn.errors import FileFormatError, InvalidArgumentError, list_some
from corn.parsing import build, quote

if TYPE_CHECKING:  # pyarrow takes a moment to import, which corn plan need not wait for
    import pyarrow as pa
    from _typeshed import DataclassInstance

_Record = TypeVar("_Record", bound="DataclassInstance")
ColumnKind: TypeAlias = Literal["number", "category", "date", "boolean"]
Constant: TypeAlias = float | str | bool

_MISSING = frozenset(["", "na", "n/a", "nan", "null", "none", "?"])
_TRUTH = {"true": 1.0, "false": 0.0}
_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "y", "1", "1.0"), 1.0),
    **dict.fromkeys(("false", "no", "n", "0", "0.0"), -1.0),
}
_LARGEST = float(np.finfo(np.float32).max)
_LEAST_WIDTH = 1e-300  # values are divided by it
_LONGEST_TEXT = 200
_MOST_PROBLEMS = 10
_RULES = {
    "number": "numbers",
    "date": "dates such as 2024-03-31",
    "boolean": "true or false, yes or no, 1 or 0",
    "category": "its categories",
}


@dataclass(frozen=True)
class Findings:
    """The problems of a table, and notes on it for its owner."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Column:
    """A column of inputs, as all sites declare it.

    A ``date`` counts days, a ``boolean`` is 1 or −1, and a ``category`` becomes one indicator for
    each of its public categories. ``bounds`` of numbers and dates scale to [−1, 1], and values
    outside count as the nearest bound. The constant ``missing`` stands for a missing value, which
    without one is an error, and of a category has zeros in all indicators.
    """

    name: str
    kind: ColumnKind = "number"
    bounds: tuple[Constant, Constant] | None = None
    categories: tuple[str, ...] = ()
    missing: Constant | None = None

    def __post_init__(self) -> None:
        where = f"column {quote(self.name)}: "
        require_choice(f"{where}kind", self.kind, get_args(ColumnKind))
        if self.bounds is not None:
            has_bounds = self.kind in ("number", "date")
            require(has_bounds, f"{where}bounds", "given for numbers and dates only", self.kind)
            least, most = self.limits or (0.0, 0.0)
            is_wide = _LEAST_WIDTH <= most - least < math.inf
            rule = f"[least, most] with a finite difference of at least {_LEAST_WIDTH:g}"
            require(is_wide, f"{where}bounds", rule, list(self.bounds))
        is_category = self.kind == "category"
        rule = f"{'listed' if is_category else 'left out'} for kind {self.kind!r}"
        require(is_category == bool(self.categories), f"{where}categories", rule, self.categories)
        is_unique = len(self._places) == len(self.categories)
        require(is_unique, f"{where}categories", "different", list(self.categories))
        if self.missing is not None:
            self._read_constant("missing", self.missing)

    @cached_property
    def _places(self) -> dict[str, float]:
        """The number of each category."""
        return {name_value(name): float(place) for place, name in enumerate(self.categories)}

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the inputs that it becomes."""
        if self.kind != "category":
            return (self.name,)
        return tuple(f"{self.name}={value}" for value in self._places)

    @property
    def limits(self) -> tuple[float, float] | None:
        """The bounds as numbers: of dates, days since 1970."""
        if self.bounds is None:
            return None
        least, most = (self._read_constant("bounds", value) for value in self.bounds)
        return least, most

    def read(self, cells: pa.ChunkedArray, found: Findings) -> FloatArray:
        """Return the inputs of all rows, shape (rows, features), not scaled yet."""
        inputs = self._read_inputs(cells, found)
        if self.limits is not None:
            # Counted, because scaling changes them in silence.
            outside = int(((inputs < self.limits[0]) | (inputs > self.limits[1])).sum())
            if outside:
                found.notes.append(
                    f"column {self.name!r} has {outside} values outside public bounds, which count "
                    "as the nearest bound"
                )
        return inputs

    def _read_inputs(self, cells: pa.ChunkedArray, found: Findings) -> FloatArray:
        if self.kind == "number":
            cells, numbers = read_numbers(cells)
            if numbers is not None:
                return numbers[:, None]
        texts, rows = list_different(cells)
        is_gone = np.array([is_missing(text) for text in texts], bool)
        fill = "" if self.missing is None else str(self.missing)
        parsed = [
            self.parse(fill if gone else text) for text, gone in zip(texts, is_gone, strict=True)
        ]
        gone = np.flatnonzero(is_gone[rows])
        is_wrong = np.array([number is None for number in parsed], bool) & ~is_gone
        wrong = np.flatnonzero(is_wrong[rows])
        if len(gone) and fill:
            found.notes.append(
                f"column {self.name!r} has no value in {len(gone)} rows, which count as {fill}"
            )
        if self.kind == "category":
            if len(wrong):
                unknown = list_some(sorted(texts[k] for k in np.flatnonzero(is_wrong)))
                found.notes.append(
                    f"column {self.name!r} has values outside the public categories in "
                    f"{len(wrong)} rows, which count as none of them: {unknown}"
                )
            # The last row, of zeros, is for values that are none of the categories.
            count = len(self.categories)
            places = [count if number is None else int(number) for number in parsed]
            return np.eye(count + 1, count)[places][rows]
        if len(gone) and not fill:
            advice = "declare missing = …, in a consortium file, or remove these rows"
            found.problems.append(f"{_locate_missing(self.name, gone)}: {advice}")
        if len(wrong):
            first = texts[rows[wrong[0]]][:40]
            large = "" if as_number(first) is None else f", beyond ±{_LARGEST:.2g}"
            found.problems.append(
                f"column {self.name!r} must have {_RULES[self.kind]}, found {first!r} in row "
                f"{wrong[0] + 1} (number of such rows: {len(wrong)}){large}"
            )
        return np.array(parsed, np.float64)[rows][:, None]

    def scale(self, values: FloatArray) -> FloatArray:
        """Map values from the bounds to [−1, 1]."""
        if self.limits is None:
            return values
        # Values outside are clipped, not refused: a refusal would tell others about private data.
        least, most = self.limits
        return np.asarray((np.clip(values, least, most) - least) * (2 / (most - least)) - 1)

    def parse(self, text: str) -> float | None:
        """Return the number that a cell's text stands for; None for a text that is none."""
        if self.kind == "category":
            return self._places.get(name_value(text))
        if self.kind == "boolean":
            return _BOOLEANS.get(text.lower())
        if self.kind == "date":
            return _count_days(text)
        number = _TRUTH.get(text.lower(), as_number(text))
        return number if number is not None and abs(number) <= _LARGEST else None

    def _read_constant(self, name: str, value: Constant) -> float:
        number = self.parse(str(value))
        if number is None:
            raise InvalidArgumentError(
                f"column {quote(self.name)}: {name} must be among {_RULES[self.kind]}, found "
                f"{quote(value)}"
            )
        return number


@dataclass(frozen=True, eq=False)
class DataFile:
    """A file as it was written: columns of cells, of CSV as text, and images if it is a folder."""

    path: Path
    cells: Mapping[str, pa.ChunkedArray]
    images: FloatArray | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one file as numbers, not yet scaled, images in [0, 1], and private notes."""

    path: Path
    inputs: FloatArray
    targets: FloatArray | IntArray | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Schema:
    """The public declaration of all sites about their files.

    ``columns`` are those of the inputs, in the order of the model's parameters; none for images.
    The target is one of ``classes``, or a number with or without bounds. A column ``id`` names the
    person of a row. Each may occur once, which is checked; it is no input.
    """

    target: str
    columns: tuple[Column, ...] = ()
    classes: tuple[str, ...] = ()
    target_bounds: tuple[float, float] | None = None
    id: str | None = None

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        for name, what in ((self.target, "target"), (self.id, "id")):
            require(name not in names, what, "no column of the inputs", name)
        repeated = [name for name, count in Counter(self.features).items() if count > 1]
        require(not repeated, "columns", "of different names", repeated)
        require(self.id != self.target, "id", "another column than the target", self.id)
        if self.classes:
            object.__setattr__(self, "classes", tuple(map(name_value, self.classes)))
            is_list = len(set(self.classes)) == len(self.classes) >= 2
            require(is_list, "classes", "at least two different names", list(self.classes))
            require(self.target_bounds is None, "target-bounds", "left out with classes", "both")

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the inputs."""
        return tuple(name for column in self.columns for name in column.features)

    def to_json(self) -> dict[str, Any]:
        """Return the schema as plain data, which ``read_schema`` reads."""
        plain = asdict(self)
        columns = {column.pop("name"): _drop_empty(column) for column in plain.pop("columns")}
        return {**_drop_empty(plain), "columns": columns}

    def describe(self) -> str:
        """Return the schema as text, for sites to compare; of a long one a part, and a hash."""
        # With every digit: bounds that differ in the last one must not compare as equal.
        text = json.dumps(self.to_json(), ensure_ascii=False)
        if len(text) <= _LONGEST_TEXT:
            return text
        return f"{text[:_LONGEST_TEXT]}… ({hashlib.sha256(text.encode()).hexdigest()[:16]})"

    def read(
        self, file: DataFile, *, checks_people: bool = False, needs_targets: bool = True
    ) -> Rows:
        """Read the rows of a file, or raise with all of its problems in one line."""
        path, cells, images = file.path, file.cells, file.images
        person = [self.id] if checks_people and self.id is not None else []
        target = [self.target] if needs_targets or self.target in cells else []
        require_columns(path, cells, [*target, *person, *(own.name for own in self.columns)])
        found = Findings()
        inputs = [column.read(cells[column.name], found) for column in self.columns]
        targets = self._read_targets(cells[self.target], found) if target else None
        for name in person:
            _find_repeated_people(name, cells[name], found)
        report_problems(path, found.problems)
        whole = np.hstack(inputs) if images is None else images
        return Rows(path, whole, targets, tuple(found.notes))

    def scale_inputs(self, rows: Rows) -> FloatArray:
        """Return inputs scaled by their bounds."""
        if not self.columns:
            return rows.inputs
        ends = np.cumsum([len(column.features) for column in self.columns])
        pairs = zip(self.columns, np.split(rows.inputs, ends[:-1], axis=1), strict=True)
        return np.hstack([column.scale(block) for column, block in pairs])

    def scale_targets(self, rows: Rows) -> FloatArray | IntArray:
        """Return the numbers of classes as they are, and numbers to predict scaled."""
        if rows.targets is None:
            raise InvalidArgumentError(f"{rows.path}: must have the column {self.target!r}")
        if self.classes:
            return rows.targets
        return self._target_column.scale(rows.targets.astype(np.float64))

    def decode_targets(self, values: FloatArray) -> FloatArray:
        """Return predicted numbers in the unit of the target."""
        if self.target_bounds is None:
            return values
        least, most = self.target_bounds
        return least + (values + 1) * (most - least) / 2

    def list_contents(self, rows: Rows) -> Iterator[bytes]:
        """Yield what tells rows apart, before scaling: coins do not depend on bounds."""
        # A sum with zero makes −0 and 0 one number, as formats of files do.
        targets = [] if rows.targets is None else (rows.targets + 0).tolist()
        for inputs, target in zip(rows.inputs, targets, strict=True):
            name = self.classes[target] if self.classes else repr(target)
            yield (inputs + 0.0).astype("<f8").tobytes() + name.encode()

    @property
    def _target_column(self) -> Column:
        kind: ColumnKind = "category" if self.classes else "number"
        return Column(self.target, kind, self.target_bounds, self.classes)

    def _read_targets(self, cells: pa.ChunkedArray, found: Findings) -> FloatArray | IntArray:
        column = self._target_column
        if not self.classes:
            return column.read(cells, found)[:, 0]
        texts, rows = list_different(cells)
        parsed = [column.parse(text) for text in texts]
        places = np.array([-1 if place is None else place for place in parsed], np.int64)[rows]
        unknown = np.flatnonzero(places < 0)
        # A missing value may be a class that is listed.
        is_gone = np.array([is_missing(text) for text in texts], bool)[rows][unknown]
        if is_gone.any():
            where = _locate_missing(self.target, unknown[is_gone])
            found.problems.append(f"{where}: remove these rows")
        if not is_gone.all():
            row = unknown[~is_gone][0]
            found.problems.append(
                f"column {self.target!r} must be one of {', '.join(self.classes[:20])}, found "
                f"{texts[rows[row]][:40]!r} in row {row + 1}"
            )
        return places


def read_schema(content: object) -> Schema:
    """Return the schema in a table ``data`` of a file."""
    table = _as_table(content)
    columns = _as_table(table.get("columns"))
    if not columns:
        raise InvalidArgumentError("[data.columns] must have a table for each column of the inputs")
    plain = {key: value for key, value in table.items() if key != "columns"}
    made = tuple(_read_column(str(name), rules) for name, rules in columns.items())
    return read_record(Schema, plain, "[data]", columns=made)


def _read_column(name: str, rules: object) -> Column:
    place = f"column {quote(name)}:"
    # A bare word is the kind: sex = "boolean".
    table = {"kind": rules} if isinstance(rules, str) else rules
    if not isinstance(table, Mapping):
        raise InvalidArgumentError(f"{place} must be a table, found {quote(table)}")
    kind = {"kind": "category"} if "categories" in table else {}
    return read_record(Column, {**kind, **table}, place, name=name)


def read_record(record: type[_Record], content: object, place: str, **given: Any) -> _Record:
    """Return the record of a table of TOML or JSON; errors begin with ``place``."""
    table = _as_table(content)
    declared = {own.name.replace("_", "-"): own for own in fields(record) if own.name not in given}
    unknown = ", ".join(quote(name) for name in table if name not in declared)
    if unknown:
        raise InvalidArgumentError(
            f"{place} unknown entry {unknown}: entries are {', '.join(declared)}"
        )
    for name, own in declared.items():
        if name not in table and own.default is own.default_factory:
            raise InvalidArgumentError(f"{place} {name} is missing")
    hints = get_type_hints(record)
    values = {}
    for name, value in table.items():
        hint = hints[declared[name].name]
        values[declared[name].name] = build(hint, _as_declared(value, hint), f"{place} {name}")
    try:
        return record(**given, **values)
    except InvalidArgumentError as error:
        text = str(error)
        raise InvalidArgumentError(text if text.startswith(place) else f"{place} {text}") from error


def _as_table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def require_columns(path: Path, cells: Mapping[str, object], names: Iterable[str]) -> None:
    """Raise with the names of all columns that a file lacks."""
    has = f"is missing; its columns are {list_some(cells, limit=20)}"
    report_problems(path, [f"column {name!r} {has}" for name in names if name not in cells])


def report_problems(path: Path, problems: Sequence[str]) -> None:
    """Raise with all problems of a file in one line, if there are any."""
    if problems:
        raise FileFormatError(f"{path}: {'; '.join(problems[:_MOST_PROBLEMS])}")


def list_different(cells: pa.ChunkedArray) -> tuple[list[str], IntArray]:
    """Return the different texts of cells, and for each row the number of its text."""
    import pyarrow as pa
    from pyarrow import compute

    try:
        # A duration would become a plain number.
        text = None if pa.types.is_duration(cells.type) else cells.cast(pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        text = None
    if text is None:
        # Values without a text, such as lists: the name of their type.
        return [str(cells.type)], np.zeros(len(cells), np.int64)
    plain = compute.fill_null(compute.utf8_trim_whitespace(text), "")
    coded = plain.combine_chunks().dictionary_encode()
    return coded.dictionary.to_pylist(), coded.indices.to_numpy().astype(np.int64)


def read_numbers(cells: pa.ChunkedArray) -> tuple[pa.ChunkedArray, FloatArray | None]:
    """Return a column with typed numbers in float64, and its values if every cell is a number.

    A narrower number as text is another number, so that one missing cell would change all coins.
    """
    import pyarrow as pa

    if pa.types.is_dictionary(cells.type):
        cells = cells.cast(cells.type.value_type)
    if pa.types.is_temporal(cells.type):
        return cells, None
    if pa.types.is_floating(cells.type) or pa.types.is_decimal(cells.type):
        cells = cells.cast(pa.float64(), safe=False)
    try:
        # The whole column at once, three times as fast as cell by cell.
        numbers = cells.cast(pa.float64(), safe=False).to_numpy()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return cells, None
    return cells, numbers if (np.abs(numbers) <= _LARGEST).all() else None


def is_missing(text: str) -> bool:
    """Return whether a cell has no value."""
    return text.lower() in _MISSING


def as_number(text: str) -> float | None:
    """Return the number that a text is, or None."""
    try:
        # Python also reads 1_2 as 12, as no other program that writes tables does.
        return None if "_" in text else float(text)
    except ValueError:
        return None


def name_value(text: str) -> str:
    """Return the one name of a class or category that files write in several ways.

    >>> name_value("1.0"), name_value("01"), name_value("TRUE"), name_value("yes")
    ('1', '1', 'true', 'yes')
    """
    text = text.strip()
    if text.lower() in _TRUTH:
        return text.lower()
    number = as_number(text)
    if number is None or not number.is_integer():
        return text
    # Long codes exactly: a float has 53 bits, and would make one class of several.
    return str(int(text if text.lstrip("+-").isdecimal() else number))


def _locate_missing(name: str, rows: IntArray) -> str:
    return f"column {name!r} has no value in row {rows[0] + 1} (number of such rows: {len(rows)})"


def _find_repeated_people(name: str, cells: pa.ChunkedArray, found: Findings) -> None:
    """Find people with several rows, of whom ε would protect one row only."""
    _, rows = list_different(cells)
    counts = np.bincount(rows)
    if counts.max() > 1:
        found.problems.append(
            f"column {name!r} must have another value in every row, found {(counts > 1).sum()} "
            f"that occur up to {counts.max()} times: ε protects one row of a person"
        )


def _drop_empty(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key.replace("_", "-"): list(value) if isinstance(value, tuple) else value
        for key, value in record.items()
        if value not in (None, ())
    }


def _as_declared(value: Any, hint: Any) -> Any:
    """Return a value of TOML as JSON has it, and lists of names as text."""
    if isinstance(value, list | tuple):
        items = [_as_declared(item, None) for item in value]
        if hint == tuple[str, ...]:
            # True and 1 in TOML stand for what files write.
            return [str(item).lower() if isinstance(item, bool) else str(item) for item in items]
        return items
    return value.isoformat() if isinstance(value, date) else value


def _count_days(text: str) -> float | None:
    """Return the days from 1970 to a date in ISO 8601, with or without a time of day."""
    try:
        return float((datetime.fromisoformat(text).date() - date(1970, 1, 1)).days)
    except ValueError:
        return None
