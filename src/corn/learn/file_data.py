"""Training problems from users' files: one file per agent, or one that is dealt out.

Accounting counts on neighbouring files that differ in one sample for training too, so each row's
own coins decide what it is for.
"""

from __future__ import annotations

import csv
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from pyarrow import csv as arrow_csv
from pyarrow.parquet import ParquetFile

from corn.checks import FloatArray, require, require_fraction
from corn.errors import FileFormatError, InvalidArgumentError, list_some
from corn.learn.batches import AgentData
from corn.learn.metrics import Samples
from corn.learn.partition import TEST_FRACTION, deal_by_coins, split_by_coins, toss_coins
from corn.learn.problem import TrainingProblem, pick_samples
from corn.learn.schema import (
    Column,
    DataFile,
    Rows,
    Schema,
    as_number,
    is_missing,
    list_different,
    name_value,
    report_problems,
    require_columns,
)
from corn.learn.tasks import place_task
from corn.learn.workloads import make_named_task

Interval: TypeAlias = tuple[float, float]

_TABLE_SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")
_IMAGE_SUFFIXES = frozenset(
    [".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"]
)
_SEPARATORS = ",;\t|"
# Pillow's modes of 16 and 32 bits, of which its conversion to 8 bits makes all bright pixels white.
_WIDE_MODES = ("I", "F")
# More different values than this suggest numbers to predict, not classes.
_MOST_CLASSES = 1000
_FOLDER = "folder"
_READ_CLASSES = "the list of classes was read from the data, and no ε covers that"

AGENT_FIELD, SITE_FIELD = "{agent}", "{site}"


def read_file(path: Path) -> DataFile:
    """Read a table, or a folder of images with one sub-folder per class."""
    if path.is_dir():
        return _read_images(path)
    if not path.exists():
        raise FileFormatError(f"{path}: no such file")
    name = path.name.lower()
    if not name.endswith(_TABLE_SUFFIXES):
        raise FileFormatError(
            f"{path}: data must be a .csv, .tsv or .parquet file, or a folder of images"
        )
    cells = _read_parquet(path) if name.endswith(".parquet") else _read_csv(path)
    if not len(next(iter(cells.values()))):
        raise FileFormatError(f"{path}: must have at least one row, found none")
    return DataFile(path, cells)


def _require_names(path: Path, names: Sequence[str]) -> None:
    problems = [f"column {k + 1} must have a name" for k, name in enumerate(names) if not name]
    # A file without a header would lose its first sample, and have numbers for names.
    if all(as_number(name) is not None for name in names):
        found = ", ".join(names)[:60] or "nothing"
        problems.append(f"the first line must have the names of the columns, found {found}")
    repeated = [name for name, count in Counter(names).items() if name and count > 1]
    report_problems(path, [*problems, *(f"column {name!r} occurs twice" for name in repeated)])


def _read_csv(path: Path) -> dict[str, pa.ChunkedArray]:
    """Return all columns as text."""
    short: list[tuple[int, int]] = []

    def note_row(row: Any) -> str:
        # The text of pyarrow's own error has the cells of the row. Rows count from the header.
        short.append((row.number - 1, row.actual_columns))
        return "skip"

    try:
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
        # All of it: pyarrow would skip a short row that is not UTF-8 without a word.
        head = content.decode().partition("\n")[0]
        # The header decides: European spreadsheets write semicolons, and names rarely contain one.
        separator = max(_SEPARATORS, key=head.count)
        names = [name.strip() for name in next(csv.reader([head], delimiter=separator), [])]
        _require_names(path, names)
        table = arrow_csv.read_csv(
            pa.BufferReader(content),
            read_options=arrow_csv.ReadOptions(column_names=names, skip_rows=1, use_threads=False),
            parse_options=arrow_csv.ParseOptions(
                delimiter=separator, newlines_in_values=True, invalid_row_handler=note_row
            ),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
            ),
        )
    # Errors of pyarrow and of UTF-8 are ValueErrors.
    except (OSError, ValueError, csv.Error) as error:
        raise FileFormatError(
            f"{path}: must be CSV in UTF-8 with at least one row: {error}"
        ) from error
    if short:
        row, count = short[0]
        raise FileFormatError(
            f"{path}: row {row} must have {len(names)} values, one for each column, found {count} "
            f"(number of such rows: {len(short)})"
        )
    return {name: table.column(name) for name in names}


def _read_parquet(path: Path) -> dict[str, pa.ChunkedArray]:
    try:
        with ParquetFile(path) as file:
            table = file.read()
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise FileFormatError(f"{path}: not a Parquet file: {error}") from error
    _require_names(path, table.column_names)
    return {name: table.column(name) for name in table.column_names}


def _read_images(folder: Path) -> DataFile:
    # Sorted, because the order of a folder differs between file systems.
    paths = sorted(p for p in folder.glob("*/*") if p.suffix.lower() in _IMAGE_SUFFIXES)
    if not paths:
        raise FileFormatError(f"{folder}: must have one sub-folder of images per class")
    images = [_read_image(path) for path in paths]
    usual = Counter(image.shape for image in images).most_common(1)[0][0]
    for path, image in zip(paths, images, strict=True):
        if image.shape != usual:
            raise FileFormatError(
                f"{path}: images must have one size, {usual} of most, found {image.shape}"
            )
    labels_of = pa.chunked_array([pa.array([path.parent.name for path in paths])])
    return DataFile(folder, {_FOLDER: labels_of}, np.stack(images))


def _read_image(path: Path) -> FloatArray:
    """Return an image with values in [0, 1]: (height, width) if grey, else (3, height, width)."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.mode.startswith(_WIDE_MODES):
                raise FileFormatError(f"{path}: must have 8 bits per channel, not {image.mode}")
            # By the mode, not by the pixels: whether a colour image happens to be grey is private.
            is_grey = image.mode in ("1", "L", "LA")
            values = np.asarray(image.convert("L" if is_grey else "RGB"), dtype=np.float64)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise FileFormatError(f"{path}: not an image: {error}") from error
    # The range of pixels is a property of the format, not a statistic of the data.
    return values / 255 if is_grey else np.moveaxis(values / 255, -1, 0)


@dataclass(frozen=True)
class FileWorkload:
    """A training problem in files, of which every agent reads only its own.

    ``data`` is a file or a folder of images, with ``{agent}`` or ``{site}`` in it one for each
    agent; ``sites`` are the names of agents. ``target`` is a column, and ``features`` are columns
    of numbers, by default all others, in order of their names. Without the public list of
    ``classes`` it is read from the data, which makes every run a simulation: which classes occur is
    private. ``bounds`` of "" are for all columns of the inputs. A ``schema`` replaces all of these.
    ``test_data`` is a public file to measure on; without it, rows are held out with the
    probability ``held_out``.
    """

    data: Path
    target: str | None = None
    features: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None
    is_regression: bool = False
    bounds: Mapping[str, Interval] = field(default_factory=dict)
    schema: Schema | None = None
    sites: tuple[str, ...] = ()
    model: str = "linear"
    test_data: Path | None = None
    held_out: float = TEST_FRACTION
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        require_fraction("held_out", self.held_out)
        if self.is_regression and self.classes is not None:
            raise InvalidArgumentError("classes must be None for regression: leave them out")
        if self.classes is not None:
            Schema(self.target or _FOLDER, classes=self.classes or ("",))

    @property
    def has_file_per_agent(self) -> bool:
        """Whether every agent has a file of its own."""
        text = str(self.data)
        return bool(self.sites) or AGENT_FIELD in text or SITE_FIELD in text

    def build(self, num_agents: int, agents: Sequence[int] | None = None) -> TrainingProblem:
        """Return the problem with the data of some agents, whose files alone are opened."""
        owners = range(num_agents) if agents is None else agents
        for path in self._paths(owners):
            self._require_other_test_data(path)
        # Test data may have classes that no training file has.
        files = [read_file(path) for path in self._paths(owners)]
        tests = [] if self.test_data is None else [read_file(self.test_data)]
        schema = self.schema or self._find_schema([*files, *tests])
        tables = [schema.read(own, checks_people=True) for own in files]
        public = [schema.read(own) for own in tests]
        shape = tables[0].inputs.shape[1:]
        for own in (*tables, *public):
            if own.inputs.shape[1:] != shape:
                raise FileFormatError(
                    f"{own.path}: samples must have the shape {shape} of {tables[0].path}, found "
                    f"{own.inputs.shape[1:]}"
                )
        split = [self._split(schema, own) for own in tables]
        train = [parts["train"] for parts, _ in split]
        if not self.has_file_per_agent:
            train = self._deal_out(train[0], split[0][1], num_agents, owners)
        held_out: dict[str, Samples] = {}
        for name in ("validation", "test"):
            found = [parts[name] for parts, _ in split if len(parts[name][0])]
            if found:
                held_out[name] = torch.cat([X for X, _ in found]), torch.cat([y for _, y in found])
        for own in public:
            held_out["test"] = _encode(schema, own)
        is_declared = bool(self.schema or self.classes or self.is_regression)
        task = make_named_task(
            self.model,
            tuple(train[0][0].shape[1:]),
            len(schema.classes) or None,
            is_image=not schema.columns,
            of=str(self.data),
        )
        return TrainingProblem(
            task=place_task(task, self.device),
            data=AgentData.from_parts(train),
            parts=held_out,
            # Samples held out of agents' own files stay private, and so do scores on them.
            public_parts=("test",) if public else (),
            private_notes=tuple(f"{own.path}: {note}" for own in tables for note in own.notes),
            schema=schema,
            description=self._describe(schema, tables[0], public),
            simulation="" if is_declared else _READ_CLASSES,
            is_dealt_out=not self.has_file_per_agent,
        )

    def _require_other_test_data(self, path: Path) -> None:
        """Raise if the public test data is the file to train on, or is in that folder."""
        test = self.test_data
        if test is None or not test.exists() or not path.exists():
            return
        folders = [test, *test.resolve().parents] if path.is_dir() else [test]
        if any(path.samefile(own) for own in folders):
            raise FileFormatError(f"{test}: is data to train on, and test data is published")

    def _find_schema(self, files: Sequence[DataFile]) -> Schema:
        """Return the schema that the options and the names in the files make."""
        first = files[0]
        is_image = first.images is not None
        target = self.target or _FOLDER
        if not is_image and self.target is None:
            raise FileFormatError(f"{first.path}: name the column of the targets with --target")
        for own in files:
            require_columns(own.path, own.cells, [target])
        names = self.features
        if not names and not is_image:
            names = tuple(sorted(set(first.cells) - {target}))
            for own in files:
                differing = sorted(set(own.cells) ^ set(first.cells))
                if differing:
                    raise FileFormatError(
                        f"{own.path}: must have the columns of {first.path}, found a difference in "
                        f"{list_some(differing)}: select columns by --features"
                    )
        if not names and not is_image:
            raise FileFormatError(f"{first.path}: must have a column besides {target!r}")
        known = [*names, *([""] if names else []), *([target] if self.is_regression else [])]
        unknown = [name for name in self.bounds if name not in known]
        report_problems(
            first.path, [f"column {name!r} has bounds, but is missing" for name in unknown]
        )
        of_all = self.bounds.get("")
        return Schema(
            target,
            tuple(Column(name, bounds=self.bounds.get(name, of_all)) for name in names),
            () if self.is_regression else self.classes or self._find_classes(target, files),
            self.bounds.get(target) if self.is_regression else None,
        )

    def _paths(self, agents: Sequence[int]) -> list[Path]:
        if not self.has_file_per_agent:
            return [self.data]
        text, paths = str(self.data), []
        for agent in agents:
            name = self.sites[agent] if self.sites else str(agent)
            # A name from a file of others must not lead to another folder.
            if SITE_FIELD in text and ("/" in name or "\\" in name or name in (".", "..")):
                raise FileFormatError(
                    f"{self.data}: use {AGENT_FIELD}, as the name {name!r} has / or \\"
                )
            paths.append(Path(text.replace(AGENT_FIELD, str(agent)).replace(SITE_FIELD, name)))
        if len(set(paths)) < len(paths):
            raise FileFormatError(f"{text}: must have {SITE_FIELD} or {AGENT_FIELD} in its name")
        return paths

    def _find_classes(self, target: str, files: Sequence[DataFile]) -> tuple[str, ...]:
        texts = {text for own in files for text in list_different(own.cells[target])[0]}
        is_image = files[0].images is not None
        names = sorted({name_value(text) for text in texts if is_image or not is_missing(text)})
        is_count = all(as_number(name) is not None for name in names)
        is_whole = all(name.lstrip("-").isdecimal() for name in names)
        where = f"{files[0].path}: column {target!r}"
        if len(names) > _MOST_CLASSES or (is_count and not is_whole):
            raise FileFormatError(
                f"{where} must have classes, found {len(names)} different values such as "
                f"{names[0]}: --regression predicts numbers"
            )
        if len(names) < 2:
            raise FileFormatError(f"{where} must have at least two classes: list them by --classes")
        return tuple(sorted(names, key=int)) if is_count else tuple(names)

    def _split(self, schema: Schema, table: Rows) -> tuple[dict[str, Samples], FloatArray]:
        """Return the samples of each part, and one more coin for each training sample."""
        coins = toss_coins(schema.list_contents(table), seed=self.seed)
        test_fraction = self.held_out if self.test_data is None else 0.0
        split = split_by_coins(coins[:, 0], test_fraction=test_fraction)
        if not len(split.train):
            raise FileFormatError(
                f"{table.path}: must have a row to train on, found none of {len(coins)}"
            )
        samples = _encode(schema, table)
        parts = {part: pick_samples(samples, rows) for part, rows in vars(split).items()}
        return parts, coins[split.train, 1]

    def _deal_out(
        self, train: Samples, coins: FloatArray, num_agents: int, agents: Sequence[int]
    ) -> list[Samples]:
        """Return the samples of agents of one file, by a coin of each."""
        # The same seed in every process: agents deal out one file alike without talking.
        rows = deal_by_coins(coins, num_agents)
        for agent in agents:
            if not len(rows[agent]):
                raise FileFormatError(
                    f"{self.data}: agent {agent} of {num_agents} must get a row, found none"
                )
        return [pick_samples(train, rows[agent]) for agent in agents]

    def _describe(self, schema: Schema, first: Rows, tests: Sequence[Rows]) -> str:
        files = "a file for each agent" if self.has_file_per_agent else "one file, iid"
        public = ""
        for test in tests:
            content = b"".join(schema.list_contents(test))
            public = f"; public test data {hashlib.sha256(content).hexdigest()[:16]}"
        shape = "" if schema.columns else f" of shape {first.inputs.shape[1:]}"
        return (
            f"{schema.describe()}{shape}; {files}, seed {self.seed}, {self.held_out:g} held out"
            f"{public}"
        )


def parse_bounds(text: str | None) -> dict[str, Interval]:
    """Read bounds from an option's text; those of "" are for all columns.

    >>> parse_bounds("0:1"), parse_bounds("age=0:120,dose=0:9")
    ({'': (0.0, 1.0)}, {'age': (0.0, 120.0), 'dose': (0.0, 9.0)})
    """
    bounds: dict[str, Interval] = {}
    for part in () if text is None else text.split(","):
        # The last equals sign separates: a column's own name may contain one.
        name, _, interval = part.rpartition("=")
        least, _, most = interval.partition(":")
        require(name.strip() not in bounds, "bounds", "given once", f"those of {name} twice")
        try:
            found = float(least), float(most)
        except ValueError as error:
            raise InvalidArgumentError(
                f"bounds must be LEAST:MOST, or COLUMN=LEAST:MOST,…, found {text!r}"
            ) from error
        bounds[name.strip()] = Column(name or "all columns", bounds=found).limits or found
    return bounds


def _encode(schema: Schema, table: Rows) -> Samples:
    """Return inputs scaled by their bounds, and targets as numbers."""
    y = schema.scale_targets(table)
    targets = torch.from_numpy(y) if schema.classes else torch.from_numpy(y).float()
    return torch.from_numpy(np.ascontiguousarray(schema.scale_inputs(table), np.float32)), targets
