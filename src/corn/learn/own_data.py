"""Training problems from the users' own files: one file per agent, or one that is dealt out.

Columns, classes and bounds are public: agents compare them, and the model's shape follows from
them. Everything else about a file is its owner's. Accounting counts on neighbouring files that
differ in one sample for training too, so each row's own coins decide what it is for.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from corn.checks import FloatArray, IntArray, require, require_fraction
from corn.errors import FileFormatError, InvalidArgumentError
from corn.learn.batches import AgentData
from corn.learn.metrics import Samples
from corn.learn.own_files import (
    RawSamples,
    parse_float,
    read_numbers,
    read_own_samples,
)
from corn.learn.partition import (
    PartitionSpec,
    Split,
    deal_by_coins,
    split_by_coins,
    toss_coins,
)
from corn.learn.problem import TrainingProblem
from corn.learn.tasks import place_task
from corn.learn.workloads import flattens_inputs, make_named_task

_LARGE_VALUE = 10.0  # beside which columns of order 1 lose their part of a clipped gradient
_MOST_LISTED = 5


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
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more


def _begin(names: Sequence[str]) -> str:
    """Return subject and verb of a note.

    >>> _begin(["age"]), _begin(["age", "dose"])
    ("column 'age' has", "columns 'age', 'dose' have")
    """
    quoted = list_some([repr(name) for name in names])
    return f"column {quoted} has" if len(names) == 1 else f"columns {quoted} have"


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


AGENT_FIELD = "{agent}"
"""The part of a path that stands for an agent's number."""

# More different values than this suggest numbers to predict, not classes.
_MOST_CLASSES = 1000
_MOST_NAMES = 12
_MOST_COLUMNS = 1000  # that agents publish by name; of more, they compare a hash


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
        return AGENT_FIELD in str(self.data)

    def build(self, num_agents: int, agents: Sequence[int] | None = None) -> TrainingProblem:
        """Return the problem with the data of some agents, by default of all.

        Only the files of these agents are opened.
        """
        owners = range(num_agents) if agents is None else agents
        files = self._read(owners)
        _require_same_columns(files)
        test = None if self.test_data is None else self._read_one(self.test_data)
        if test is not None:
            _require_same_columns([files[0], test])
        # Test data may have classes that no training file has, so it is read before they are
        # listed.
        classes = self._find_classes([*files, *([] if test is None else [test])])
        encoded = [self._encode(own, classes) for own in files]
        coins = [toss_coins(self._list_contents(own), seed=self.seed) for own in files]
        splits = [self._split(own, tossed[:, 0]) for own, tossed in zip(files, coins, strict=True)]
        notes = list(self._find_notes(files, classes))
        parts = [_pick_parts(*own) for own in zip(encoded, splits, strict=True)]
        if not self.has_file_per_agent:
            owned = coins[0][splits[0].train, 1]
            parts, gaps = self._deal_out(parts[0], owned, num_agents, owners, classes)
            notes += gaps
        # A part without samples is left out: a mean over no samples would be NaN.
        held_out = {
            name: _join([own[name] for own in parts if len(own[name][0])])
            for name in ("validation", "test")
            if any(len(own[name][0]) for own in parts)
        }
        if test is not None:
            held_out["test"] = self._encode(test, classes)
        num_classes = None if classes is None else len(classes)
        shape = tuple(encoded[0][0].shape[1:])
        task = make_named_task(
            self.model,
            shape,
            num_classes,
            is_image=files[0].is_image,
            l2=self.l2,
            of=str(self.data),
        )
        return TrainingProblem(
            task=place_task(task, self.device),
            data=AgentData.from_parts([own["train"] for own in parts]),
            parts=held_out,
            # Samples held out of agents' own files stay private, and so do scores on them.
            public_parts=() if test is None else ("test",),
            private_notes=tuple(notes),
            schema=self._describe(files[0], shape, classes, test),
            columns=files[0].features if len(files[0].features) <= _MOST_COLUMNS else (),
            simulation=self._explain_simulation(),
            is_dealt_out=not self.has_file_per_agent,
        )

    def describe(self, problem: TrainingProblem) -> str:
        """Describe columns, classes, bounds and partition, for agents to compare."""
        return problem.schema

    def _read(self, agents: Iterable[int]) -> list[RawSamples]:
        if not self.has_file_per_agent:
            return [self._read_one(self.data)]
        paths = [Path(str(self.data).replace(AGENT_FIELD, str(agent))) for agent in agents]
        for path in paths:
            if not path.exists():
                raise FileFormatError(
                    f"{path}: no such file; agents are numbered from 0, and each needs a file"
                )
        return [self._read_one(path) for path in paths]

    def _read_one(self, path: Path) -> RawSamples:
        found = read_own_samples(path, self.target, self.features)
        if found.features:
            # The target of a regression may have bounds too, and is not among the features.
            known = [*found.features, *([self.target or ""] if self.is_regression else [])]
            self.bounds.require_known(known, path)
        elif self.bounds.by_column:
            raise FileFormatError(f"{path}: has no columns: give one --bounds LEAST:MOST for all")
        return found

    def _find_classes(self, files: Sequence[RawSamples]) -> tuple[str, ...] | None:
        if self.is_regression:
            return None
        if self.classes is not None:
            return tuple(map(_name_class, self.classes))
        # A simulation may look at all files. A deployment must list the classes, see ``classes``.
        names = {_name_class(value) for own in files for value in np.unique(own.targets)}
        numbers = [name for name in names if _as_float(name) is not None]
        is_count = len(numbers) == len(names)
        if len(names) > _MOST_CLASSES or (
            is_count and any(not n.lstrip("-").isdecimal() for n in names)
        ):
            raise FileFormatError(
                f"{files[0].path}: column {self._target_name!r} must have classes, found "
                f"{len(names)} different values such as {sorted(names)[0]}: --regression predicts "
                "numbers"
            )
        if len(names) < 2:
            raise FileFormatError(
                f"{files[0].path}: column {self._target_name!r} must have at least two classes, "
                f"found {len(names)}: list them with --classes"
            )
        return tuple(sorted(names, key=int)) if is_count else tuple(sorted(names))

    @property
    def _target_name(self) -> str:
        return self.target or "folder"

    def _encode(self, samples: RawSamples, classes: Sequence[str] | None) -> Samples:
        """Return inputs scaled by their bounds, and targets as numbers."""
        X = samples.inputs
        if samples.features:
            X = np.column_stack(
                [scale_values(X[:, k], self.bounds.find(n)) for k, n in enumerate(samples.features)]
            )
        else:
            X = scale_values(X, self.bounds.of_all)
        if flattens_inputs(self.model, None if classes is None else len(classes)):
            X = X.reshape(len(X), -1)
        inputs = torch.from_numpy(narrow_values(X, samples.path, samples.features))
        if classes is not None:
            return inputs, torch.from_numpy(self._number_classes(samples, classes))
        y = read_numbers(samples.path, self._target_name, samples.targets)
        bounds = self.bounds.by_column.get(self._target_name)
        y = scale_values(y, bounds)
        return inputs, torch.from_numpy(narrow_values(y, samples.path, [self._target_name]))

    def _number_classes(self, samples: RawSamples, classes: Sequence[str]) -> IntArray:
        numbers = {name: number for number, name in enumerate(classes)}
        # Each distinct value is parsed once, not once per row.
        values, places = np.unique(samples.targets, return_inverse=True)
        known = [numbers.get(_name_class(value), -1) for value in values]
        found = np.array(known, np.int64)[places.reshape(-1)]
        unknown = np.flatnonzero(found < 0)
        if len(unknown):
            # The text quotes private data: it reaches the file's owner alone
            # (``datasets.own_files``).
            value = str(samples.targets[unknown[0]])[:40]
            raise FileFormatError(
                f"{samples.path}: column {self._target_name!r} must be one of "
                f"{', '.join(classes[:20])}, found {value!r} in row {unknown[0] + 1}: --classes "
                "lists all classes"
            )
        return found

    def _list_contents(self, samples: RawSamples) -> Iterator[bytes]:
        """Yield what tells the rows of a file apart: their inputs, and the names of their targets.

        Before scaling, so that a row keeps its coins when bounds change.
        """
        if self.is_regression:
            y = read_numbers(samples.path, self._target_name, samples.targets)
            targets = [repr(value).encode() for value in (y + 0.0).tolist()]
        else:
            values, places = np.unique(samples.targets, return_inverse=True)
            names = [_name_class(value).encode() for value in values]
            targets = [names[place] for place in places.reshape(-1).tolist()]
        for inputs, target in zip(samples.inputs, targets, strict=True):
            # A sum with zero makes −0 and 0 one number, as formats of files do.
            yield (inputs + 0.0).astype("<f8").tobytes() + target

    def _split(self, samples: RawSamples, coins: FloatArray) -> Split:
        # With test data of its own, nothing of the training files need be given up for it.
        test_fraction = self.held_out if self.test_data is None else 0.0
        split = split_by_coins(coins, test_fraction=test_fraction)
        if not len(split.train):
            raise FileFormatError(
                f"{samples.path}: must have a row to train on, found none of {len(coins)} after "
                "the split: hold out less, or add rows"
            )
        return split

    @property
    def _partition_spec(self) -> PartitionSpec:
        return PartitionSpec.parse(self.partition or "iid")

    def _explain_simulation(self) -> str:
        """Return why a run on this data is a simulation; empty if it is none."""
        if self._partition_spec.kind != "iid":
            return (
                f"{self._partition_spec.kind} looks at the labels of all rows to decide which "
                "agent has which, and no ε covers that"
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
        classes: Sequence[str] | None,
    ) -> tuple[list[dict[str, Samples]], list[str]]:
        """Return the parts of agents of one file, and notes on classes that they lack.

        ``coins`` are of the training samples. The first part has the samples held out for all.
        """
        # Held-out samples of one common file belong to nobody in particular: the first agent here
        # gets them and the others none, so that each is counted once.
        train, none = whole["train"], _pick(whole["train"], np.empty(0, np.int64))
        spec = self._partition_spec
        if self.is_regression and spec.kind != "iid":
            raise InvalidArgumentError(
                f"partition must be iid for regression, which has no classes, found {spec.kind!r}"
            )
        # The same seed in every process: agents deal out one file alike without talking.
        targets = train[1].numpy().astype(np.int64)
        if spec.kind == "iid":
            rows = deal_by_coins(coins, num_agents)
        else:
            rows = spec.assign(targets, num_agents, seed=self.seed)
        for agent in agents:
            if not len(rows[agent]):
                raise FileFormatError(
                    f"{self.data}: agent {agent} must get a row to train on, found none of "
                    f"{len(targets)} for {num_agents} agents: take fewer agents, or more rows"
                )
        dealt = [
            {"train": _pick(train, rows[agent]), "validation": none, "test": none}
            for agent in agents
        ]
        notes: list[str] = []
        if classes is not None:
            own = {agent: targets[rows[agent]] for agent in agents}
            column = f"{self.data}: column {self._target_name!r}"
            found = np.concatenate([y.numpy() for _, y in whole.values()])
            gaps = describe_gaps(found, targets, own, classes)
            notes += [f"{column}: {note}" for note in gaps]
        return [{**whole, "train": dealt[0]["train"]}, *dealt[1:]], notes

    def _find_notes(
        self, files: Sequence[RawSamples], classes: Sequence[str] | None
    ) -> Iterator[str]:
        """Yield facts about single files for their owners, one line for each file and kind."""
        for own in files:
            notes = [*describe_columns(self._find_columns(own)), self._note_absent(own, classes)]
            yield from (f"{own.path}: {note}" for note in notes if note)

    def _find_columns(self, own: RawSamples) -> list[Column]:
        """Return the columns of numbers of a table; images have none."""
        if own.inputs.ndim != 2:
            return []
        # Columns of arrays have no names, only places.
        names = own.features or tuple(f"{place + 1}" for place in range(own.inputs.shape[1]))
        found = [
            Column(name, values, self.bounds.find(name) if own.features else self.bounds.of_all)
            for name, values in zip(names, own.inputs.T, strict=True)
        ]
        if self.is_regression:
            y = read_numbers(own.path, self._target_name, own.targets)
            bounds = self.bounds.by_column.get(self._target_name)
            found.append(Column(self._target_name, y, bounds))
        return found

    def _note_absent(self, own: RawSamples, classes: Sequence[str] | None) -> str:
        present = {_name_class(value) for value in np.unique(own.targets)}
        absent = [name for name in classes or () if name not in present]
        if not absent:
            return ""
        return (
            f"column {self._target_name!r} lacks the class {list_some(absent)}: its agent learns "
            "it from the others"
        )

    def _describe(
        self,
        first: RawSamples,
        shape: tuple[int, ...],
        classes: Sequence[str] | None,
        test: RawSamples | None,
    ) -> str:
        columns = _list_names("columns", first.features) if first.features else f"shape {shape}"
        goal = "numbers" if classes is None else _list_names("classes", classes)
        files = "a file for each agent"
        if not self.has_file_per_agent:
            files = f"one file, {self.partition or 'iid'}"
        public = ""
        if test is not None:
            # Public, so that a hash of it may be compared: scores on other samples would not
            # compare.
            digest = hashlib.sha256(test.inputs.tobytes() + repr(test.targets.tolist()).encode())
            public = f"; public test data {digest.hexdigest()[:16]}"
        return (
            f"{columns}; target {self._target_name}: {goal}; bounds {self.bounds.describe()}; "
            f"{files}, seed {self.seed}, {self.held_out:g} held out{public}"
        )


def _list_names(what: str, names: Sequence[str]) -> str:
    """Return names as text; of many, some and a hash of all."""
    if len(names) <= _MOST_NAMES:
        return f"{what} {', '.join(names)}"
    digest = hashlib.sha256("\0".join(names).encode()).hexdigest()[:12]
    return f"{len(names)} {what} {', '.join(names[:_MOST_NAMES])}, … ({digest})"


def _require_same_columns(files: Sequence[RawSamples]) -> None:
    """Raise for the first column that only some of the files have, and for unequal shapes."""
    # The columns of most files are the standard, so that the odd file is named.
    usual, _ = Counter(own.features for own in files).most_common(1)[0]
    example = next(own.path for own in files if own.features == usual)
    for own in files:
        for name in sorted(set(usual) ^ set(own.features)):
            has, lacks = (own.path, example) if name in own.features else (example, own.path)
            raise FileFormatError(
                f"{lacks}: column {name!r} is missing, which {has} has: agents need the same "
                "columns; --features selects those that all have"
            )
        first = files[0]
        if own.inputs.shape[1:] != first.inputs.shape[1:]:
            raise FileFormatError(
                f"{own.path}: samples must have the shape {first.inputs.shape[1:]} of "
                f"{first.path}, found {own.inputs.shape[1:]}"
            )


def _as_float(text: str) -> float | None:
    try:
        return parse_float(text)
    except ValueError:
        return None


def _name_class(value: object) -> str:
    """Return the one name of a class that files write in several ways: 1, 1.0, 01; true, True.

    >>> _name_class(1.0), _name_class("01"), _name_class("TRUE"), _name_class("yes")
    ('1', '1', 'true', 'yes')
    """
    text = str(value).strip()
    if text.lower() in ("true", "false"):
        return text.lower()
    number = _as_float(text)
    if number is None or not number.is_integer():
        return text
    # Long codes exactly: a float has 53 bits, and would make one class of several.
    return str(int(text if text.lstrip("+-").isdecimal() else number))


def _pick_parts(samples: Samples, split: Split) -> dict[str, Samples]:
    return {part: _pick(samples, rows) for part, rows in vars(split).items()}


def _pick(samples: Samples, rows: IntArray) -> Samples:
    index = torch.from_numpy(rows)
    return samples[0][index], samples[1][index]


def _join(parts: Sequence[Samples]) -> Samples:
    return torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])
