"""Training problems from users' files: one file per agent, or one that is dealt out.

A file becomes a :class:`Table`; a :class:`Schema`, which is public, turns tables into tensors; a
:class:`FileWorkload` joins both to a training problem. Everything about a file except the schema is
its owner's. Errors name the file with all of its problems and may quote private values, so they are
for the owner alone. Accounting counts on neighbouring files that differ in one sample for training
too, so each row's own coins decide what it is for.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyarrow import compute
from pyarrow import csv as arrow_csv
from pyarrow.parquet import ParquetFile
from torch import Tensor

from corn.checks import FloatArray, IntArray, require, require_fraction
from corn.errors import FileFormatError, InvalidArgumentError
from corn.learn.batches import AgentData
from corn.learn.columns import MISSING, Column, DataSchema, read_schema
from corn.learn.metrics import Samples
from corn.learn.partition import deal_by_coins, partition_samples, split_by_coins, toss_coins
from corn.learn.problem import TrainingProblem
from corn.learn.tasks import Task, place_task
from corn.learn.workloads import flattens_inputs, make_named_task

_TABLE_SUFFIXES = (".csv", ".tsv", ".txt", ".parquet", ".npz")
_IMAGE_SUFFIXES = frozenset(
    [".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"]
)
_SEPARATORS = ",;\t|"
_BOOLEANS = {"true": 1.0, "false": 0.0}
_LARGEST = float(np.finfo(np.float32).max)
# Pillow's modes of 16 and 32 bits, of which its conversion to 8 bits makes all bright pixels white.
_WIDE_MODES = ("I", "F")
# A header may also claim an array for which there is no memory.
_ARCHIVE_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    MemoryError,
    TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
_MOST_UNPACKED_BYTES, _MOST_SHRINKING = 1 << 28, 100
_MOST_LISTED = 5


@dataclass(frozen=True, eq=False)
class Table:
    """Samples of one file as it has them, checked but not scaled.

    Attributes:
        path: the file or folder.
        inputs: shape (rows, …), float64; of images (rows, height, width) or with channels first.
        targets: the target of each row, in no type of its own.
        features: the names of the columns of a table; empty for arrays and images.
        is_image: whether a sample is an image.
        notes: what the owner should know of how cells were read.
    """

    path: Path
    inputs: FloatArray
    targets: pa.ChunkedArray
    features: tuple[str, ...] = ()
    is_image: bool = False
    notes: tuple[str, ...] = ()

    @cached_property
    def classes(self) -> tuple[list[str], IntArray]:
        """The names of the classes that occur, and for each row the number of its name."""
        coded = _as_text(self.targets).combine_chunks().dictionary_encode()
        texts = [_name_class(text) for text in coded.dictionary.to_pylist()]
        names = sorted(set(texts))
        numbers = np.array([names.index(text) for text in texts], np.int64)
        return names, numbers[coded.indices.to_numpy()]


def read_table(
    path: Path,
    target: str | None,
    features: Sequence[str] = (),
    *,
    columns: Sequence[Column] = (),
    id_column: str | None = None,
    needs_targets: bool = True,
) -> Table:
    """Read a file of samples, or a folder of images with one sub-folder per class.

    Args:
        path: ``.csv`` (also compressed), ``.tsv``, ``.parquet``, ``.npz`` or a folder.
        target: the column, or array, of the targets; None for a folder of images.
        features: the columns of the inputs, in order; by default all others in order of their
            names, so that files with the same columns in another order agree. For ``.npz`` the
            one array of the inputs.
        columns: the public description of the inputs, by which categories, dates and missing
            values become numbers; it replaces ``features``.
        id_column: a column that must have another value in every row.
        needs_targets: whether a table must have targets; without them, its targets are empty text.
    """
    if path.is_dir():
        return _read_images(path)
    if not path.exists():
        raise FileFormatError(f"{path}: no such file")
    name = path.name.lower().removesuffix(".gz")
    if not name.endswith(_TABLE_SUFFIXES):
        raise FileFormatError(
            f"{path}: data must be a .csv, .tsv, .parquet or .npz file, or a folder of images"
        )
    if target is None:
        raise FileFormatError(f"{path}: name the column of the targets with --target")
    if name.endswith(".npz"):
        return _read_arrays(path, target, features)
    found = read_columns(path)
    has_targets = needs_targets or target in found
    if not has_targets:
        rows = len(next(iter(found.values())))
        found[target] = pa.chunked_array([pa.array([""] * rows)])
    chosen = tuple(column.name for column in columns) or tuple(features)
    chosen = chosen or tuple(sorted(set(found) - {target, id_column}))
    _require_columns(path, found, target, chosen, id_column)
    problems = _find_missing(target, found[target]) if has_targets else []
    if id_column is not None:
        problems += _find_repeated_people(id_column, found[id_column])
    # In the order of ``chosen``, which all agents share: parameter k means the same column to all.
    if columns:
        read = [own.read(_as_text(found[own.name]).to_pylist()) for own in columns]
        problems += [problem for _, own, _ in read for problem in own]
        _report(path, problems)
        return Table(
            path,
            np.hstack([values for values, _, _ in read]),
            found[target],
            tuple(name for own in columns for name in own.features),
            notes=tuple(note for _, _, own in read for note in own),
        )
    numbers = [_read_numbers(name, found[name]) for name in chosen]
    _report(path, [*(problem for _, own in numbers for problem in own), *problems])
    return Table(path, np.column_stack([values for values, _ in numbers]), found[target], chosen)


def _find_repeated_people(name: str, column: pa.ChunkedArray) -> list[str]:
    """Return the problem of a person with several rows, of whom ε would protect one row only."""
    counts = Counter(text or "" for text in _as_text(column).to_pylist())
    repeated = [count for count in counts.values() if count > 1]
    if not repeated:
        return []
    return [
        f"column {name!r} must have another value in every row, found {len(repeated)} that occur "
        f"up to {max(repeated)} times: ε protects one row, so keep one row of each person"
    ]


def read_columns(path: Path) -> dict[str, pa.ChunkedArray]:
    """Return the columns of a ``.csv``, ``.tsv`` or ``.parquet`` file, of CSV as text."""
    is_parquet = path.name.lower().endswith(".parquet")
    return _read_parquet(path) if is_parquet else _read_csv(path)


def _report(path: Path, problems: Sequence[str]) -> None:
    """Raise with all problems of a file in one line, if there are any."""
    if problems:
        raise FileFormatError(f"{path}: {'; '.join(problems[:10])}")


def _require_columns(
    path: Path,
    columns: Mapping[str, pa.ChunkedArray],
    target: str,
    chosen: Sequence[str],
    id_column: str | None = None,
) -> None:
    problems = [
        f"column {name!r} is missing; its columns are {', '.join(list(columns)[:20])}"
        for name in (target, *([] if id_column is None else [id_column]), *chosen)
        if name not in columns
    ]
    if target in chosen:
        problems.append(f"column {target!r} is the target and cannot be a feature")
    if not chosen:
        problems.append(f"must have a column besides {target!r}, found none")
    _report(path, [*problems, *_find_repeated(chosen)])
    if not len(columns[target]):
        raise FileFormatError(f"{path}: must have at least one row, found none")


def _find_repeated(names: Sequence[str]) -> list[str]:
    return [f"column {name!r} occurs twice" for name, n in Counter(names).items() if n > 1]


def _as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return values as text; those that have none, such as lists, as the name of their type."""
    try:
        # A duration would become a plain number.
        if not pa.types.is_duration(column.type):
            return compute.utf8_trim_whitespace(column.cast(pa.string()))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        pass
    return pa.chunked_array([pa.array([str(column.type)] * len(column), pa.string())])


def _find_missing(name: str, column: pa.ChunkedArray) -> list[str]:
    text = compute.fill_null(compute.utf8_lower(_as_text(column)), "")
    rows = np.flatnonzero(compute.is_in(text, pa.array(MISSING)).to_numpy())
    if not len(rows):
        return []
    return [
        f"column {name!r} has no value in row {rows[0] + 1} (number of such rows: {len(rows)}): "
        "fill them in or remove these rows"
    ]


def _read_numbers(name: str, column: pa.ChunkedArray) -> tuple[FloatArray, list[str]]:
    """Return a column as numbers, and problems where it has none."""
    problems = _find_missing(name, column)
    if pa.types.is_temporal(column.type) or not pa.types.is_primitive(column.type):
        column = _as_text(column)
    try:
        numbers = column.cast(pa.float64(), safe=False).to_numpy()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        # One by one, to name the row of a text that is no number.
        texts = _as_text(column).to_pylist()
        numbers = np.array([_parse_number(text) for text in texts])
        wrong = [k for k, number in enumerate(numbers) if number is None]
        if wrong:
            problems.append(
                f"column {name!r} must have numbers, found {texts[wrong[0]][:40]!r} in row "
                f"{wrong[0] + 1}: encode it as numbers, or leave the column out with --features"
            )
        numbers = numbers.astype(np.float64)
    # Missing values are NaN here, and were named above.
    large = np.flatnonzero(np.abs(numbers) > _LARGEST)
    if len(large):
        problems.append(
            f"column {name!r} must have values up to {_LARGEST:.2g}, found {numbers[large[0]]:g} "
            f"in row {large[0] + 1}"
        )
    return numbers, problems


def _parse_number(text: str | None) -> float | None:
    """Return the number that a text stands for, NaN for a missing one, None for other text."""
    plain = (text or "").lower()
    if plain in MISSING:
        return math.nan
    return _BOOLEANS.get(plain, _as_float(plain))


def _as_float(text: str) -> float | None:
    try:
        # Python also reads 1_2 as 12, as no other program that writes tables does.
        return None if "_" in text else float(text)
    except ValueError:
        return None


def _require_names(path: Path, names: Sequence[str]) -> None:
    problems = [f"column {k + 1} must have a name" for k, name in enumerate(names) if not name]
    # A file without a header would lose its first sample, and have numbers for names.
    if all(_as_float(name) is not None for name in names):
        problems.append(
            "the first line must have the names of the columns, found numbers: "
            f"{', '.join(names)[:60]}"
        )
    _report(path, [*problems, *_find_repeated([name for name in names if name])])


def _read_csv(path: Path) -> dict[str, pa.ChunkedArray]:
    """Return all columns as text."""
    try:
        content = _read_content(path).removeprefix(b"\xef\xbb\xbf")
        head = content.partition(b"\n")[0].decode()
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path}: must be text in UTF-8: {error.reason}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise FileFormatError(f"{path}: cannot be read: {error}") from error
    # The header decides: European spreadsheets write semicolons, and names rarely contain one.
    separator = max(_SEPARATORS, key=head.count)
    names = [name.strip() for name in next(csv.reader([head], delimiter=separator), [])]
    if not names:
        raise FileFormatError(f"{path}: must have a line with the names of its columns, found none")
    _require_names(path, names)
    short: list[tuple[int, int]] = []

    def note_row(row: Any) -> str:
        # Rows are counted from the header.
        short.append((row.number - 1, row.actual_columns))
        return "skip"

    try:
        table = arrow_csv.read_csv(
            pa.BufferReader(content),
            # In one thread, which knows the numbers of rows.
            read_options=arrow_csv.ReadOptions(column_names=names, skip_rows=1, use_threads=False),
            parse_options=arrow_csv.ParseOptions(
                delimiter=separator, newlines_in_values=True, invalid_row_handler=note_row
            ),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
            ),
        )
    except pa.ArrowInvalid as error:
        if "Empty CSV" in str(error):
            raise FileFormatError(f"{path}: must have at least one row, found none") from error
        raise FileFormatError(f"{path}: not a CSV file in UTF-8: {error}") from error
    _report(
        path,
        [
            f"row {row} must have {len(names)} values, one for each column, found {count}"
            for row, count in short
        ],
    )
    return {name: table.column(name) for name in names}


def _read_content(path: Path) -> bytes:
    with path.open("rb") as stream:
        # By content: programs differ in whether they decompress ``.gz``.
        is_compressed = stream.read(2) == b"\x1f\x8b"
    if not is_compressed:
        return path.read_bytes()
    content = bytearray()
    with gzip.open(path) as stream:
        while chunk := stream.read(1 << 20):
            content += chunk
            # While it grows: the header of a gzip file does not state a size.
            _require_unpacked(path, len(content))
    return bytes(content)


def _require_unpacked(path: Path, num_bytes: int) -> None:
    """Raise unless the content of a compressed file may have so many bytes.

    A small file can decompress to more than any memory holds. Ordinary data shrinks to a hundredth
    at best, and what is less than 256 MiB does no harm.
    """
    size = path.stat().st_size
    most = max(_MOST_UNPACKED_BYTES, _MOST_SHRINKING * size)
    if num_bytes > most:
        raise FileFormatError(
            f"{path}: decompressed content must be at most {most:,} bytes for a file of {size:,}, "
            f"found {num_bytes:,} or more: store genuine data without compression"
        )


def _read_parquet(path: Path) -> dict[str, pa.ChunkedArray]:
    try:
        with ParquetFile(path) as file:
            # A column of equal values has almost no bytes in the file, and eight a row in memory.
            shape = file.metadata
            _require_unpacked(path, 8 * shape.num_rows * max(shape.num_columns, 1))
            table = file.read()
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise FileFormatError(f"{path}: not a Parquet file: {error}") from error
    _require_names(path, table.column_names)
    return {name: table.column(name) for name in table.column_names}


def _read_arrays(path: Path, target: str, features: Sequence[str]) -> Table:
    try:
        # Pickled objects could run code, so only plain arrays are read.
        with zipfile.ZipFile(path) as packed, np.load(path, allow_pickle=False) as archive:
            # Sizes as declared: no more bytes than these are decompressed.
            _require_unpacked(path, sum(member.file_size for member in packed.infolist()))
            arrays: dict[str, NDArray[Any]] = {name: archive[name] for name in archive.files}
    except _ARCHIVE_ERRORS as error:
        raise FileFormatError(f"{path}: not an .npz file of plain arrays: {error}") from error
    chosen = list(features) or [name for name in arrays if name != target]
    _report(
        path,
        [
            f"array {name!r} is missing; its arrays are {', '.join(arrays)}"
            for name in (target, *chosen)
            if name not in arrays
        ],
    )
    if len(chosen) != 1:
        raise FileFormatError(
            f"{path}: must have one array of inputs besides {target!r}, found {len(chosen)}: name "
            "it with --features"
        )
    inputs, targets = arrays[chosen[0]], arrays[target]
    problems = []
    if inputs.dtype.kind not in "iufb" or inputs.ndim < 2 or not len(inputs):
        problems.append(
            f"array {chosen[0]!r} must have numbers in a row per sample, found {inputs.dtype} of "
            f"shape {inputs.shape}"
        )
    elif not (np.abs(inputs.astype(np.float64)) <= _LARGEST).all():
        problems.append(f"array {chosen[0]!r} must be finite, and at most {_LARGEST:.2g}")
    if targets.shape != inputs.shape[:1]:
        problems.append(
            f"array {target!r} must have one target for each sample, found shape {targets.shape}"
        )
    _report(path, problems)
    if targets.dtype.kind == "S":
        targets = np.char.decode(targets, "utf-8", "replace")
    column = pa.chunked_array([pa.array(targets)])
    _report(path, _find_missing(target, column))
    return Table(path, inputs.astype(np.float64), column, is_image=inputs.ndim > 2)


def _read_images(folder: Path) -> Table:
    # Sorted, because the order of a folder differs between file systems.
    labels = sorted(child for child in folder.iterdir() if child.is_dir())
    paths = [
        path
        for label in labels
        for path in sorted(label.iterdir())
        if path.suffix.lower() in _IMAGE_SUFFIXES
    ]
    if not paths:
        raise FileFormatError(
            f"{folder}: must have one sub-folder of images per class, found no image in one"
        )
    images = [_read_image(path) for path in paths]
    usual = Counter(image.shape for image in images).most_common(1)[0][0]
    for path, image in zip(paths, images, strict=True):
        if image.shape != usual:
            raise FileFormatError(
                f"{path}: images must have one size and number of channels, found {image.shape}, "
                f"and {usual} of most others: resize or convert them"
            )
    targets = pa.chunked_array([pa.array([path.parent.name for path in paths])])
    return Table(folder, np.stack(images), targets, is_image=True)


def _read_image(path: Path) -> FloatArray:
    """Return an image with values in [0, 1]: (height, width) if grey, else (3, height, width)."""
    # Pillow comes with Matplotlib; it takes a moment to import, which tables need not wait for.
    from PIL import Image

    try:
        with Image.open(path) as image:
            # By its header, before a pixel is decompressed.
            _require_unpacked(path, image.width * image.height * len(image.getbands()))
            if image.mode.startswith(_WIDE_MODES):
                raise FileFormatError(
                    f"{path}: an image must have 8 bits per channel, found mode {image.mode}: "
                    "convert it"
                )
            # By the mode, not by the pixels: whether a colour image happens to be grey is private.
            is_grey = image.mode in ("1", "L", "LA")
            values = np.asarray(image.convert("L" if is_grey else "RGB"), dtype=np.float64)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise FileFormatError(f"{path}: not an image: {error}") from error
    # The range of pixels is a property of the format, not a statistic of the data.
    return values / 255 if is_grey else np.moveaxis(values / 255, -1, 0)


_LEAST_WIDTH = 1e-300  # values are divided by it
_BOUNDS_RULE = (
    "LEAST:MOST for all columns, COLUMN=LEAST:MOST,… or a .csv file with column,least,most"
)
_LARGE_VALUE = 10.0  # beside which columns of order 1 lose their part of a clipped gradient
# More different values than this suggest numbers to predict, not classes.
_MOST_CLASSES = 1000
_MOST_NAMES = 12
_MOST_COLUMNS = 1000  # that agents publish by name; of more, they compare a hash


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
            columns = _read_csv(Path(text))
            _require_columns(Path(text), columns, "column", ("least", "most"))
            rows = zip(*(_as_text(columns[k]).to_pylist() for k in columns), strict=True)
            found = [dict(zip(columns, row, strict=True)) for row in rows]
            parts = [(row["column"], f"{row['least']}:{row['most']}") for row in found]
        else:
            # The last equals sign separates: a column's own name may contain one.
            split = [part.rpartition("=") for part in text.split(",")]
            parts = [(name.strip() if equals else "", interval) for name, equals, interval in split]
        by_column: dict[str, tuple[float, float]] = {}
        for name, interval in parts:
            if name in by_column:
                raise InvalidArgumentError(f"bounds of {name or 'all columns'} are given twice")
            least, _, most = interval.partition(":")
            try:
                by_column[name] = float(least), float(most)
            except ValueError as error:
                raise InvalidArgumentError(f"bounds must be {_BOUNDS_RULE}, found {text!r}") from (
                    error
                )
        of_all = by_column.pop("", None)
        return cls(by_column, of_all)

    def scale(self, name: str, values: FloatArray) -> FloatArray:
        """Map the values of a column from its bounds to [−1, 1].

        >>> Bounds(of_all=(0, 120)).scale("age", np.array([0.0, 60.0, 150.0])).tolist()
        [-1.0, 0.0, 1.0]
        """
        bounds = self.find(name)
        if bounds is None:
            return values
        # Values outside are clipped, not refused: a refusal would tell others about private data.
        least, most = bounds
        return np.asarray((np.clip(values, least, most) - least) * (2 / (most - least)) - 1)

    def find(self, name: str) -> tuple[float, float] | None:
        """Return the bounds of a column, or None if it has none."""
        return self.by_column.get(name, self.of_all)

    def describe(self) -> str:
        """Return the bounds as text, for agents to compare."""
        # Sorted, and with every digit: agents that declare the same bounds in another order must
        # agree, and bounds that differ in the last digit must not.
        named = [f"{name}={low!r}:{high!r}" for name, (low, high) in sorted(self.by_column.items())]
        general = [] if self.of_all is None else [f"{self.of_all[0]!r}:{self.of_all[1]!r}"]
        return ",".join([*named, *general]) or "none"


@dataclass(frozen=True)
class Schema:
    """What is public about the columns of tables, by which tables become tensors.

    Attributes:
        features: the columns of the inputs, in order; empty for arrays and images.
        target: the column of the targets.
        classes: the names of the classes; None where targets are numbers to predict.
        bounds: public bounds that scale columns.
        is_flat: whether the model takes samples as flat vectors.
        columns: how cells become inputs; empty where all columns are numbers.
    """

    features: tuple[str, ...]
    target: str
    classes: tuple[str, ...] | None
    bounds: Bounds
    is_flat: bool
    columns: tuple[Column, ...] = ()

    @property
    def file_columns(self) -> tuple[str, ...]:
        """The columns of a file that become the inputs."""
        return tuple(own.name for own in self.columns) or self.features

    def to_json(self) -> dict[str, Any]:
        """Return the schema as plain data."""
        public = DataSchema(self.target, self.columns).to_json() if self.columns else {}
        return {**asdict(self), "columns": public.get("columns", {})}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Schema:
        """Read what ``to_json`` has returned."""
        given, classes = content["bounds"], content["classes"]
        limits = {name: (float(a), float(b)) for name, (a, b) in given["by_column"].items()}
        of_all = None if given["of_all"] is None else tuple(map(float, given["of_all"]))
        return cls(
            features=tuple(content["features"]),
            target=str(content["target"]),
            classes=None if classes is None else tuple(classes),
            bounds=Bounds(limits, cast("tuple[float, float] | None", of_all)),
            is_flat=bool(content["is_flat"]),
            columns=_read_columns_of_model(content),
        )

    def require_bounds(self, path: Path) -> None:
        """Raise if a column that has bounds is not in a file."""
        if not self.features and self.bounds.by_column:
            raise FileFormatError(f"{path}: has no columns: give one --bounds LEAST:MOST for all")
        # The target of a regression may have bounds too, and is not among the features.
        known = {*self.features, *([self.target] if self.classes is None else [])}
        unknown = [name for name in self.bounds.by_column if name not in known]
        _report(path, [f"column {name!r} has bounds, but is missing" for name in unknown])

    def encode_inputs(self, table: Table) -> Tensor:
        """Return inputs scaled by their bounds."""
        scaled = [self.bounds.scale(name, values) for name, values in self._columns(table)]
        X = np.column_stack(scaled) if scaled else self.bounds.scale("", table.inputs)
        X = X.reshape(len(X), -1) if self.is_flat else X
        return torch.from_numpy(np.ascontiguousarray(X, np.float32))

    def decode_targets(self, values: FloatArray) -> FloatArray:
        """Return predicted numbers in the unit of the target."""
        bounds = self._target_bounds.find(self.target)
        return values if bounds is None else bounds[0] + (values + 1) * (bounds[1] - bounds[0]) / 2

    def encode(self, table: Table) -> Samples:
        """Return inputs scaled by their bounds, and targets as numbers."""
        inputs = self.encode_inputs(table)
        if self.classes is None:
            y = self._target_bounds.scale(self.target, self.read_targets(table))
            return inputs, torch.from_numpy(np.ascontiguousarray(y, np.float32))
        names, rows = table.classes
        numbers = {name: number for number, name in enumerate(self.classes)}
        found = np.array([numbers.get(name, -1) for name in names], np.int64)[rows]
        unknown = np.flatnonzero(found < 0)
        if len(unknown):
            raise FileFormatError(
                f"{table.path}: column {self.target!r} must be one of "
                f"{', '.join(self.classes[:20])}, found {names[rows[unknown[0]]][:40]!r} in row "
                f"{unknown[0] + 1}: --classes lists all classes"
            )
        return inputs, torch.from_numpy(found)

    def read_targets(self, table: Table) -> FloatArray:
        """Return targets that are numbers to predict, not yet scaled."""
        numbers, problems = _read_numbers(self.target, table.targets)
        _report(table.path, problems)
        return numbers

    def list_contents(self, table: Table) -> Iterator[bytes]:
        """Yield what tells the rows of a table apart: their inputs, and the names of their targets.

        Before scaling, so that a row keeps its coins when bounds change.
        """
        if self.classes is None:
            targets = [repr(value).encode() for value in (self.read_targets(table) + 0.0).tolist()]
        else:
            names, rows = table.classes
            targets = [names[row].encode() for row in rows.tolist()]
        for inputs, target in zip(table.inputs, targets, strict=True):
            # A sum with zero makes −0 and 0 one number, as formats of files do.
            yield (inputs + 0.0).astype("<f8").tobytes() + target

    def describe(self, table: Table) -> str:
        """Return columns, target and bounds as text, for agents to compare."""
        shape = table.inputs.shape[1:]
        shape = (math.prod(shape),) if self.is_flat else shape
        columns = _list_names("columns", self.features) if self.features else f"shape {shape}"
        goal = "numbers" if self.classes is None else _list_names("classes", self.classes)
        public = f"{columns}; target {self.target}: {goal}; bounds {self.bounds.describe()}"
        if not self.columns:
            return public
        # Kinds and constants too: the same file would become other inputs under others.
        digest = hashlib.sha256(json.dumps(self.to_json()["columns"]).encode()).hexdigest()[:12]
        return f"{public}; kinds and constants {digest}"

    def find_notes(self, table: Table) -> Iterator[str]:
        """Yield what the owner of a table should know about it, at most one note of each kind."""
        columns = self._columns(table)
        bounds = {name: self.bounds.find(name if self.features else "") for name, _ in columns}
        if self.classes is None and columns:
            columns.append((self.target, self.read_targets(table)))
            bounds[self.target] = self._target_bounds.find(self.target)
        constant = [name for name, values in columns if (values == values[0]).all()]
        if constant:
            yield (
                f"{_begin(constant)} the same value in every row: a model cannot learn its effect "
                "from this file"
            )
        large = [
            name
            for name, values in columns
            if bounds[name] is None and np.abs(values).max() > _LARGE_VALUE
        ]
        if large:
            yield (
                f"{_begin(large)} values beyond ±{_LARGE_VALUE:g} and no public bounds: they take "
                "most of a clipped gradient; give --bounds"
            )
        # Counted, because scaling changes them in silence.
        outside = {
            name: int(((values < limits[0]) | (values > limits[1])).sum())
            for name, values in columns
            if (limits := bounds[name]) is not None
        }
        if any(outside.values()):
            yield (
                f"{_begin([name for name, count in outside.items() if count])} values outside "
                f"public bounds, {sum(outside.values())} in all, which count as the nearest bound"
            )
        if absent := [name for name in self.classes or () if name not in table.classes[0]]:
            yield (
                f"column {self.target!r} lacks the class {_list_some(absent)}: its agent learns it "
                "from the others"
            )

    @property
    def _target_bounds(self) -> Bounds:
        # Bounds of all columns are for inputs: those of a target are stated by its name.
        return Bounds(self.bounds.by_column)

    def _columns(self, table: Table) -> list[tuple[str, FloatArray]]:
        """Return the columns of a table with their names, or places in arrays; images have none."""
        if table.inputs.ndim != 2:
            return []
        names = self.features or tuple(str(k + 1) for k in range(table.inputs.shape[1]))
        return list(zip(names, table.inputs.T, strict=True))


def _read_columns_of_model(content: Mapping[str, Any]) -> tuple[Column, ...]:
    if not content.get("columns"):
        return ()
    schema, problems = read_schema({"target": content["target"], "columns": content["columns"]})
    if schema is None:
        raise FileFormatError(f"the schema of a model is damaged: {'; '.join(problems)}")
    return schema.columns


AGENT_FIELD = "{agent}"
"""The part of a path that stands for an agent's number."""

SITE_FIELD = "{site}"
"""The part of a path that stands for the name of a site of a consortium."""


@dataclass(frozen=True)
class FileWorkload:
    """A training problem in files, of which every agent reads only its own.

    Attributes:
        data: a file or a folder of images; with ``{agent}`` in it, one for each agent.
        target: the column of the targets; None for folders of images.
        features: the columns of the inputs; by default all others, in order of their names.
        classes: the public list of classes. None reads them from the data, which makes every run
            a simulation: which classes occur is private.
        is_regression: whether targets are numbers to predict.
        bounds: public bounds of columns.
        columns: the public description of the inputs, see :func:`read_table`; it has bounds of its
            own and replaces ``features``.
        id_column: a column that names the person of a row, of whom each may have one.
        sites: the names of the agents, which stand for ``{site}`` in ``data``. With names, a file
            is always the file of one agent, and never distributed.
        model: see :func:`corn.learn.workloads.make_named_task`.
        test_data: a public file to measure on; every agent has it.
        held_out: the fraction of each file that is measured on, not trained on, without test data;
            each row is held out with this probability.
        partition: the partition of one file over the agents, by default ``iid``. Others look at
            all labels, which makes every run a simulation.
        seed: of split and partition.
        l2: the penalty λ of linear classifiers.
        device: where gradients are computed.
    """

    data: Path
    target: str | None = None
    features: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None
    is_regression: bool = False
    bounds: Bounds = field(default_factory=Bounds)
    columns: tuple[Column, ...] = ()
    id_column: str | None = None
    sites: tuple[str, ...] = ()
    model: str = "linear"
    test_data: Path | None = None
    held_out: float = 0.2
    partition: str | None = None
    seed: int = 0
    l2: float = 1e-4
    device: str = "cpu"

    def __post_init__(self) -> None:
        require_fraction("held_out", self.held_out)
        if self.is_regression and self.classes is not None:
            raise InvalidArgumentError("classes must be None for regression: leave them out")
        if self.classes is not None:
            is_list = len(set(map(_name_class, self.classes))) == len(self.classes) >= 2
            require(is_list, "classes", "at least two different names", ", ".join(self.classes))
        if self.has_file_per_agent and self.partition is not None:
            raise InvalidArgumentError(
                f"partition must be None where every agent has a file of its own ({AGENT_FIELD} in "
                "--data): leave it out"
            )

    @property
    def has_file_per_agent(self) -> bool:
        """Whether every agent has a file of its own."""
        return bool(self.sites) or AGENT_FIELD in str(self.data)

    def build(self, num_agents: int, agents: Sequence[int] | None = None) -> TrainingProblem:
        """Return the problem with the data of some agents, by default of all.

        Only the files of these agents are opened.
        """
        owners = range(num_agents) if agents is None else agents
        # Test data may have classes that no training file has, so it is read before they are
        # listed.
        tables = self._read(self._paths(owners), id_column=self.id_column)
        tests = self._read([] if self.test_data is None else [self.test_data])
        _require_same_columns([*tables, *tests])
        classes = self._find_classes([*tables, *tests])
        schema = self._make_schema(tables[0].features, classes)
        schema.require_bounds(tables[0].path)
        notes = [
            f"{own.path}: {note}"
            for own in tables
            for note in (*own.notes, *schema.find_notes(own))
        ]
        split = [self._split(schema, own) for own in tables]
        parts = [own for own, _ in split]
        if not self.has_file_per_agent:
            parts = self._deal_out(*split[0], num_agents, owners)
        # A part without samples is left out: a mean over no samples would be NaN.
        held_out = {
            name: _join([own[name] for own in parts if len(own[name][0])])
            for name in ("validation", "test")
            if any(len(own[name][0]) for own in parts)
        }
        for own in tests:
            held_out["test"] = schema.encode(own)
        inputs = parts[0]["train"][0]
        return TrainingProblem(
            task=self._make_task(schema, tuple(inputs.shape[1:]), is_image=tables[0].is_image),
            data=AgentData.from_parts([own["train"] for own in parts]),
            parts=held_out,
            # Samples held out of agents' own files stay private, and so do scores on them.
            public_parts=("test",) if tests else (),
            private_notes=tuple(notes),
            schema=self._describe(schema, tables[0], tests),
            preprocessing={**schema.to_json(), "id_column": self.id_column},
            columns=schema.features if len(schema.features) <= _MOST_COLUMNS else (),
            simulation=self._explain_simulation(),
            is_dealt_out=not self.has_file_per_agent,
        )

    def build_public(self) -> TrainingProblem:
        """Return the problem without anybody's rows, for a server: one row of zeros is in it.

        Model and preprocessing follow from ``columns`` and ``classes``, which must be given.
        """
        features = tuple(name for own in self.columns for name in own.features)
        require(bool(features), "columns", "given, as no file is read", "none")
        schema = self._make_schema(features, self._find_classes([]))
        row = torch.zeros(1, len(features)), torch.zeros(1)
        return TrainingProblem(
            task=self._make_task(schema, (len(features),)),
            data=AgentData.from_parts([row]),
            preprocessing={**schema.to_json(), "id_column": self.id_column},
        )

    def _make_schema(self, features: tuple[str, ...], classes: tuple[str, ...] | None) -> Schema:
        return Schema(
            features=features,
            target=self.target or "folder",
            classes=classes,
            bounds=self._bounds,
            is_flat=flattens_inputs(self.model, None if classes is None else len(classes)),
            columns=self.columns,
        )

    def _make_task(self, schema: Schema, shape: tuple[int, ...], *, is_image: bool = False) -> Task:
        num_classes = None if schema.classes is None else len(schema.classes)
        task = make_named_task(
            self.model, shape, num_classes, is_image=is_image, l2=self.l2, of=str(self.data)
        )
        return place_task(task, self.device)

    def describe(self, problem: TrainingProblem) -> str:
        """Describe columns, classes, bounds and partition, for agents to compare."""
        return problem.schema

    def _path_of(self, agent: int) -> Path:
        text = str(self.data).replace(AGENT_FIELD, str(agent))
        return Path(text.replace(SITE_FIELD, self.sites[agent]) if self.sites else text)

    @property
    def _bounds(self) -> Bounds:
        limits = {own.name: own.limits for own in self.columns}
        stated = {name: pair for name, pair in limits.items() if pair is not None}
        return Bounds({**self.bounds.by_column, **stated}, self.bounds.of_all)

    def _read(self, paths: Sequence[Path], *, id_column: str | None = None) -> list[Table]:
        """Read files, and report the problems of all of them together."""
        tables, problems = [], []
        for path in paths:
            try:
                tables.append(
                    read_table(
                        path, self.target, self.features, columns=self.columns, id_column=id_column
                    )
                )
            except FileFormatError as error:
                problems.append(str(error))
        if problems:
            raise FileFormatError("; ".join(problems))
        return tables

    def _paths(self, agents: Sequence[int]) -> list[Path]:
        if not self.has_file_per_agent:
            return [self.data]
        paths = [self._path_of(agent) for agent in agents]
        if len(set(paths)) < len(paths):
            raise FileFormatError(
                f"{self.data}: must have {SITE_FIELD} or {AGENT_FIELD} in its name, which stands "
                "for the site, as every site has a file of its own"
            )
        for path in paths:
            if not path.exists():
                raise FileFormatError(
                    f"{path}: no such file; agents are numbered from 0, and each needs a file"
                )
        return paths

    def _find_classes(self, tables: Sequence[Table]) -> tuple[str, ...] | None:
        if self.is_regression:
            return None
        if self.classes is not None:
            return tuple(map(_name_class, self.classes))
        # A simulation may look at all files. A deployment must list the classes, see ``classes``.
        names = sorted({name for own in tables for name in own.classes[0]})
        is_count = all(_as_float(name) is not None for name in names)
        is_whole = all(name.lstrip("-").isdecimal() for name in names)
        where = f"{tables[0].path}: column {self.target or 'folder'!r}"
        if len(names) > _MOST_CLASSES or (is_count and not is_whole):
            raise FileFormatError(
                f"{where} must have classes, found {len(names)} different values such as "
                f"{names[0]}: --regression predicts numbers"
            )
        if len(names) < 2:
            raise FileFormatError(
                f"{where} must have at least two classes, found {len(names)}: list them with "
                "--classes"
            )
        return tuple(sorted(names, key=int)) if is_count else tuple(names)

    def _split(self, schema: Schema, table: Table) -> tuple[dict[str, Samples], FloatArray]:
        """Return the samples of each part, and one more coin for each training sample."""
        coins = toss_coins(schema.list_contents(table), seed=self.seed)
        # With test data of its own, nothing of the training files need be given up for it.
        test_fraction = self.held_out if self.test_data is None else 0.0
        split = split_by_coins(coins[:, 0], test_fraction=test_fraction)
        if not len(split.train):
            raise FileFormatError(
                f"{table.path}: must have a row to train on, found none of {len(coins)} after the "
                "split: hold out less, or add rows"
            )
        samples = schema.encode(table)
        parts = {part: _pick(samples, rows) for part, rows in vars(split).items()}
        return parts, coins[split.train, 1]

    def _explain_simulation(self) -> str:
        """Return why a run on this data is a simulation; empty if it is none."""
        kind = (self.partition or "iid").partition(":")[0]
        if kind != "iid":
            return (
                f"{kind} looks at the labels of all rows to decide which agent has which, and no ε "
                "covers that"
            )
        if self.classes is None and not self.is_regression:
            return "the list of classes was read from the data, and no ε covers that"
        return ""

    def _deal_out(
        self,
        whole: dict[str, Samples],
        coins: FloatArray,
        num_agents: int,
        agents: Sequence[int],
    ) -> list[dict[str, Samples]]:
        """Return the parts of agents of one file, by the coins of its training samples."""
        train = whole["train"]
        # The same seed in every process: agents deal out one file alike without talking.
        if (self.partition or "iid") == "iid":
            rows = deal_by_coins(coins, num_agents)
        elif self.is_regression:
            raise InvalidArgumentError(
                "partition must be iid for regression, which has no classes, found "
                f"{self.partition!r}"
            )
        else:
            labels = train[1].numpy()
            rows = partition_samples(self.partition or "", labels, num_agents, seed=self.seed)
        for agent in agents:
            if not len(rows[agent]):
                raise FileFormatError(
                    f"{self.data}: agent {agent} must get a row to train on, found none of "
                    f"{len(coins)} for {num_agents} agents: take fewer agents, or more rows"
                )
        # Held-out samples of one common file belong to nobody in particular: the first agent here
        # gets them and the others none, so that each is counted once.
        nothing = _pick(train, np.empty(0, np.int64))
        held_out = [whole, *[{"validation": nothing, "test": nothing}] * (len(agents) - 1)]
        return [
            {**own, "train": _pick(train, rows[agent])}
            for agent, own in zip(agents, held_out, strict=True)
        ]

    def _describe(self, schema: Schema, first: Table, tests: Sequence[Table]) -> str:
        files = "a file for each agent"
        if not self.has_file_per_agent:
            files = f"one file, {self.partition or 'iid'}"
        public = ""
        for test in tests:
            # Public, so that a hash of it may be compared: scores on other samples would not
            # compare.
            content = test.inputs.tobytes() + repr(test.targets.to_pylist()).encode()
            public = f"; public test data {hashlib.sha256(content).hexdigest()[:16]}"
        return (
            f"{schema.describe(first)}; {files}, seed {self.seed}, {self.held_out:g} held out"
            f"{public}"
        )


def _list_names(what: str, names: Sequence[str]) -> str:
    """Return names as text; of many, some and a hash of all."""
    if len(names) <= _MOST_NAMES:
        return f"{what} {', '.join(names)}"
    digest = hashlib.sha256("\0".join(names).encode()).hexdigest()[:12]
    return f"{len(names)} {what} {', '.join(names[:_MOST_NAMES])}, … ({digest})"


def _list_some(names: Sequence[str]) -> str:
    """Return names as text; of many, the first and how many more there are.

    >>> _list_some("abcdefg")
    'a, b, c, d, e and 2 more'
    """
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more


def _begin(names: Sequence[str]) -> str:
    """Return subject and verb of a note.

    >>> _begin(["age"]), _begin(["age", "dose"])
    ("column 'age' has", "columns 'age', 'dose' have")
    """
    quoted = _list_some([repr(name) for name in names])
    return f"column {quoted} has" if len(names) == 1 else f"columns {quoted} have"


def _require_same_columns(tables: Sequence[Table]) -> None:
    """Raise for the columns that only some of the files have, and for unequal shapes."""
    # The columns of most files are the standard, so that the odd file is named.
    usual, _ = Counter(own.features for own in tables).most_common(1)[0]
    first = next(own for own in tables if own.features == usual)
    for own in tables:
        for name in sorted(set(usual) ^ set(own.features)):
            has, lacks = (own.path, first.path) if name in own.features else (first.path, own.path)
            raise FileFormatError(
                f"{lacks}: column {name!r} is missing, which {has} has: agents need the same "
                "columns; --features selects those that all have"
            )
        if own.inputs.shape[1:] != first.inputs.shape[1:]:
            raise FileFormatError(
                f"{own.path}: samples must have the shape {first.inputs.shape[1:]} of "
                f"{first.path}, found {own.inputs.shape[1:]}"
            )


def _name_class(text: str) -> str:
    """Return the one name of a class that files write in several ways: 1, 1.0, 01; true, True.

    >>> _name_class("1.0"), _name_class("01"), _name_class("TRUE"), _name_class("yes")
    ('1', '1', 'true', 'yes')
    """
    text = text.strip()
    if text.lower() in _BOOLEANS:
        return text.lower()
    number = _as_float(text)
    if number is None or not number.is_integer():
        return text
    # Long codes exactly: a float has 53 bits, and would make one class of several.
    return str(int(text if text.lstrip("+-").isdecimal() else number))


def _pick(samples: Samples, rows: IntArray) -> Samples:
    index = torch.from_numpy(rows)
    return samples[0][index], samples[1][index]


def _join(parts: Sequence[Samples]) -> Samples:
    return torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])
