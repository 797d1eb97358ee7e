"""Readers of a user's own samples: CSV, Parquet and .npz files, and folders of images.

Every defect is a ``FileFormatError`` that names the file and the column. Its text may quote values
of private data, so it is for the owner of the file alone.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import math
import zipfile
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pyarrow.parquet import ParquetFile

from corn.checks import FloatArray
from corn.errors import FileFormatError
from corn.learn.datasets import open_content, require_unpacked

Column: TypeAlias = NDArray[Any]
"""One value per row: numbers, or text."""

_TABLE_SUFFIXES = (".csv", ".tsv", ".txt", ".parquet", ".npz")
_IMAGE_SUFFIXES = (
    ".png",
    ".jpg",
    ".jpeg",
    ".bmp",
    ".gif",
    ".tif",
    ".tiff",
    ".webp",
    ".pgm",
    ".ppm",
)
_SEPARATORS = ",;\t|"
# What spreadsheets and data frames write for a value that is not there.
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
_BOOLEANS = {"true": 1.0, "false": 0.0}
_LARGEST_PIXEL = 255
_MOST_SHARED_TEXTS = 1000  # targets of regression all differ, and gain nothing
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


@dataclass(frozen=True, eq=False)
class RawSamples:
    """Samples of one file as it has them, checked but not scaled.

    Attributes:
        path: the file or folder.
        inputs: shape (rows, …), float64; of images (rows, height, width) or with channels first.
        targets: the target of each row, numbers or text.
        features: the names of the columns of a table; empty for arrays and images.
        is_image: whether a sample is an image.
    """

    path: Path
    inputs: FloatArray
    targets: Column
    features: tuple[str, ...] = ()
    is_image: bool = False


def read_own_samples(path: Path, target: str | None, features: Sequence[str] = ()) -> RawSamples:
    """Read a file of samples, or a folder of images with one sub-folder per class.

    Args:
        path: ``.csv`` (also compressed), ``.tsv``, ``.parquet``, ``.npz`` or a folder.
        target: the column, or array, of the targets; None for a folder of images.
        features: the columns of the inputs, in order; by default all others in order of their
            names, so that files with the same columns in another order agree. For ``.npz`` the
            one array of the inputs.
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
    if name.endswith(".parquet"):
        columns = _read_parquet(path)
    else:
        columns = _read_csv(path, target, features)
    return _assemble(path, columns, target, features)


def _assemble(
    path: Path, columns: Mapping[str, Column], target: str, features: Sequence[str]
) -> RawSamples:
    chosen = _choose_features(path, tuple(columns), target, features)
    if not len(columns[target]):
        raise FileFormatError(f"{path}: must have at least one row, found none")
    targets = columns[target]
    _require_present(path, target, targets)
    # In the order of ``chosen``, which all agents share: parameter k means the same column to all.
    table = np.column_stack([read_numbers(path, name, columns[name]) for name in chosen])
    return RawSamples(path, table, targets, chosen)


def _choose_features(
    path: Path, columns: Sequence[str], target: str, features: Sequence[str]
) -> tuple[str, ...]:
    """Return the columns of the inputs, all of which must be there."""
    chosen = tuple(features) or tuple(sorted(name for name in columns if name != target))
    present = set(columns)
    for name in (target, *chosen):
        if name not in present:
            known = ", ".join(columns[:20])
            raise FileFormatError(f"{path}: column {name!r} is missing; its columns are {known}")
    if target in chosen:
        raise FileFormatError(f"{path}: column {target!r} is the target and cannot be a feature")
    if not chosen:
        raise FileFormatError(f"{path}: must have a column besides {target!r}, found none")
    _require_once(path, chosen)
    return chosen


def read_numbers(path: Path, name: str, values: Column) -> FloatArray:
    """Return a column as finite numbers; raise with file, column and row where there is none."""
    _require_present(path, name, values)
    if values.dtype.kind in "iufb":
        numbers = np.asarray(values, dtype=np.float64)
    else:
        # Not by NumPy, which reads 1_2 as 12, and does not name the row of a text.
        texts = [str(value) for value in values]
        numbers = np.array([_parse_number(path, name, t, k + 1) for k, t in enumerate(texts)])
    broken = np.flatnonzero(~np.isfinite(numbers))
    if len(broken):
        raise FileFormatError(
            f"{path}: column {name!r} must be finite, found {numbers[broken[0]]} in row "
            f"{broken[0] + 1}"
        )
    return numbers


def _not_a_number(path: Path, name: str, text: str, row: int) -> FileFormatError:
    return FileFormatError(
        f"{path}: column {name!r} must have numbers, found {text[:40]!r} in row {row}: encode it "
        "as numbers, or leave the column out with --features"
    )


def parse_float(text: str) -> float:
    """Return the number that a text stands for, or raise ``ValueError``.

    Python also reads 1_2 as 12, as no other program that writes tables does.
    """
    if "_" in text:
        raise ValueError("not a number")
    return float(text)


def _is_number(text: str) -> bool:
    try:
        parse_float(text)
    except ValueError:
        return False
    return True


def _require_present(path: Path, name: str, values: Column) -> None:
    # Whole numbers and booleans have no value that stands for a missing one.
    if values.dtype.kind in "iub":
        return
    if values.dtype.kind == "f":
        missing = np.flatnonzero(np.isnan(values))
    else:
        is_missing = [v is None or str(v).strip().lower() in _MISSING for v in values]
        missing = np.flatnonzero(is_missing)
    if len(missing):
        raise FileFormatError(
            f"{path}: column {name!r} has no value in row {missing[0] + 1} (number of such rows: "
            f"{len(missing)}): fill them in or remove these rows"
        )


def _read_csv(path: Path, target: str, features: Sequence[str]) -> dict[str, Column]:
    """Return the columns that are asked for, row by row: text takes more memory than numbers."""
    try:
        with open_content(path) as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as stream:
            head = stream.readline()
            # The header decides: European spreadsheets write semicolons, and names rarely contain
            # one.
            separator = max(_SEPARATORS, key=head.count)
            lines = itertools.chain([head], stream)
            # Empty lines, as at the end of many files, are not rows.
            rows = filter(None, csv.reader(lines, delimiter=separator, strict=True))
            names = [name.strip() for name in next(rows, [])]
            if not names:
                raise FileFormatError(
                    f"{path}: must have a line with the names of its columns, found none"
                )
            _require_names(path, names)
            chosen = _choose_features(path, names, target, features)
            return _read_rows(path, names, rows, target, chosen)
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path}: must be text in UTF-8: {error.reason}") from error
    except csv.Error as error:
        raise FileFormatError(f"{path}: not a CSV file: {error}") from error
    except (OSError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FileFormatError(f"{path}: cannot be read: {error}") from error


def _read_rows(
    path: Path,
    names: Sequence[str],
    rows: Iterator[list[str]],
    target: str,
    features: Sequence[str],
) -> dict[str, Column]:
    # Arrays of doubles grow at 8 bytes per value, where lists of floats take about 32.
    wanted = set(features)
    numbers = {name: (place, array("d")) for place, name in enumerate(names) if name in wanted}
    goal = names.index(target)
    targets: list[str] = []
    shared: dict[str, str] = {}
    for count, row in enumerate(rows, start=1):
        if len(row) != len(names):
            raise FileFormatError(
                f"{path}: row {count} must have {len(names)} values, one for each column, found "
                f"{len(row)}"
            )
        for name, (place, values) in numbers.items():
            values.append(_parse_number(path, name, row[place], count))
        text = row[goal].strip()
        # One object for each class: a text of its own in every row would take 60 bytes, many times
        # what the file has.
        if text in shared or len(shared) < _MOST_SHARED_TEXTS:
            text = shared.setdefault(text, text)
        targets.append(text)
    columns: dict[str, Column] = {name: np.array(own) for name, (_, own) in numbers.items()}
    return {**columns, target: np.array(targets, dtype=np.str_)}


def _parse_number(path: Path, name: str, text: str, row: int) -> float:
    try:
        return parse_float(text)
    except ValueError:
        plain = text.strip().lower()
        if plain in _BOOLEANS:
            return _BOOLEANS[plain]
        if plain in _MISSING:
            return math.nan  # counted and refused with all missing values of the column
        raise _not_a_number(path, name, text, row) from None


def _require_names(path: Path, names: Sequence[str]) -> None:
    for place, name in enumerate(names):
        if not name:
            raise FileFormatError(f"{path}: column {place + 1} must have a name, found none")
    _require_once(path, names)
    # A file without a header would lose its first sample, and have numbers for names.
    if all(map(_is_number, names)):
        raise FileFormatError(
            f"{path}: the first line must have the names of the columns, found numbers: "
            f"{', '.join(names)[:60]}"
        )


def _require_once(path: Path, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        name, _ = Counter(names).most_common(1)[0]
        raise FileFormatError(f"{path}: column {name!r} occurs twice")


def _read_parquet(path: Path) -> dict[str, Column]:
    try:
        with ParquetFile(path) as file:
            # A column of equal values has almost no bytes in the file, and eight a row in memory.
            shape = file.metadata
            require_unpacked(path, 8 * shape.num_rows * max(shape.num_columns, 1))
            table = file.read()
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise FileFormatError(f"{path}: not a Parquet file: {error}") from error
    _require_names(path, table.column_names)
    columns = {}
    for name in table.column_names:
        values = table.column(name).to_numpy()
        # As text: some units of time would become plain integers. NaT is a missing time.
        if values.dtype.kind in "mM":
            values = np.where(np.isnat(values), None, values.astype(np.str_))
        # Text, categories and columns with missing values come as Python objects.
        columns[name] = values if values.dtype.kind in "iufb" else values.astype(object)
    return columns


def _read_arrays(path: Path, target: str, features: Sequence[str]) -> RawSamples:
    try:
        # Pickled objects could run code, so only plain arrays are read.
        with zipfile.ZipFile(path) as packed, np.load(path, allow_pickle=False) as archive:
            # Sizes as declared: no more bytes than these are decompressed.
            require_unpacked(path, sum(member.file_size for member in packed.infolist()))
            arrays = {name: archive[name] for name in archive.files}
    except _ARCHIVE_ERRORS as error:
        raise FileFormatError(f"{path}: not an .npz file of plain arrays: {error}") from error
    others = [name for name in arrays if name != target]
    chosen = list(features) or others
    for name in (target, *chosen):
        if name not in arrays:
            raise FileFormatError(
                f"{path}: array {name!r} is missing; its arrays are {', '.join(arrays)}"
            )
    if len(chosen) != 1:
        raise FileFormatError(
            f"{path}: must have one array of inputs besides {target!r}, found {len(chosen)}: name "
            "it with --features"
        )
    inputs, targets = arrays[chosen[0]], arrays[target]
    if inputs.dtype.kind not in "iufb" or inputs.ndim < 2 or not len(inputs):
        raise FileFormatError(
            f"{path}: array {chosen[0]!r} must have numbers in a row per sample, found "
            f"{inputs.dtype} of shape {inputs.shape}"
        )
    if targets.shape != (len(inputs),):
        raise FileFormatError(
            f"{path}: array {target!r} must have {len(inputs)} targets, one for each sample, found "
            f"shape {targets.shape}"
        )
    numbers = inputs.astype(np.float64)
    if not np.isfinite(numbers).all():
        row, *place = np.argwhere(~np.isfinite(numbers))[0].tolist()
        raise FileFormatError(
            f"{path}: array {chosen[0]!r} must be finite, found {numbers[(row, *place)]} in row "
            f"{row + 1}, entry {place}"
        )
    _require_present(path, target, targets)
    if targets.dtype.kind == "S":
        targets = np.char.decode(targets, "utf-8", "replace")
    return RawSamples(path, numbers, targets, is_image=inputs.ndim > 2)


def _read_images(folder: Path) -> RawSamples:
    # Sorted, because the order of a folder differs between file systems.
    labels = sorted(child for child in folder.iterdir() if child.is_dir())
    if not labels:
        raise FileFormatError(f"{folder}: must have one sub-folder of images per class, found none")
    images: list[FloatArray] = []
    targets: list[str] = []
    first = folder
    for label in labels:
        for path in sorted(label.iterdir()):
            if path.suffix.lower() not in _IMAGE_SUFFIXES:
                continue
            image = _read_image(path)
            if images and image.shape != images[0].shape:
                raise FileFormatError(
                    f"{path}: images must have one size and number of channels, found "
                    f"{image.shape}, and {images[0].shape} of {first}: resize or convert them"
                )
            first = first if images else path
            images.append(image)
            targets.append(label.name)
    if not images:
        raise FileFormatError(f"{folder}: must have images in its sub-folders, found none")
    return RawSamples(folder, np.stack(images), np.array(targets, np.str_), is_image=True)


def _read_image(path: Path) -> FloatArray:
    """Return an image with values in [0, 1]: (height, width) if grey, else (3, height, width)."""
    # Pillow comes with Matplotlib; it takes a moment to import, which tables need not wait for.
    from PIL import Image

    try:
        with Image.open(path) as image:
            mode = image.mode
            # By its header, before a pixel is decompressed.
            require_unpacked(path, image.width * image.height * len(image.getbands()))
            if mode.startswith(_WIDE_MODES):
                raise FileFormatError(
                    f"{path}: an image must have 8 bits per channel, found mode {mode}: convert it"
                )
            # By the mode, not by the pixels: whether a colour image happens to be grey is private.
            is_grey = mode in ("1", "L", "LA")
            values = np.asarray(image.convert("L" if is_grey else "RGB"), dtype=np.float64)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise FileFormatError(f"{path}: not an image: {error}") from error
    # The range of pixels is a property of the format, not a statistic of the data.
    scaled = values / _LARGEST_PIXEL
    return scaled if is_grey else np.moveaxis(scaled, -1, 0)
