"""The user's own files: what is read, what is refused, and what agents have in common."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from corn.errors import CornError, FileFormatError, InvalidArgumentError
from corn.learn import ModelPromise, TrainedModel
from corn.learn.file_data import FileWorkload, parse_bounds
from corn.learn.tasks import LinearClassifier, ModuleTask

ROWS = [(20 + 3 * k, 1.5 * k, "yes" if k % 3 else "no") for k in range(20)]


def write_csv(path: Path, rows: list[tuple[Any, ...]], header: str = "age,dose,ill") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def write_images(folder: Path, size: tuple[int, ...] = (6, 5), count: int = 4) -> Path:
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for k in range(count):
            pixels = rng.integers(0, 256, size, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{k}.png")
    return folder


def test_a_file_is_dealt_out_and_every_row_is_used_once(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", ROWS)
    problem = FileWorkload(path, "ill").build(3)
    assert sum(problem.data.sizes) + sum(len(y) for _, y in problem.parts.values()) == len(ROWS)
    ages = torch.cat([problem.data.inputs, *(X for X, _ in problem.parts.values())])[:, 0]
    assert sorted(ages.tolist()) == [row[0] for row in ROWS]
    assert isinstance(problem.task, LinearClassifier)
    assert problem.public_parts == ()


def test_truth_values_are_one_class_however_they_are_written(tmp_path: Path) -> None:
    values = ["true", "False", "TRUE", "false"]
    path = write_csv(tmp_path / "a.csv", [(k, 5, values[k % 4]) for k in range(20)])
    assert '"classes": ["false", "true"]' in FileWorkload(path, "ill").build(2).description
    with pytest.raises(InvalidArgumentError, match="at least two different names"):
        FileWorkload(path, "ill", classes=("true", "True"))


def test_an_agent_opens_its_own_file_only(tmp_path: Path) -> None:
    write_csv(tmp_path / "agent-2.csv", ROWS)
    workload = FileWorkload(tmp_path / "agent-{agent}.csv", "ill", classes=("no", "yes"))
    assert workload.build(4, [2]).data.num_agents == 1
    with pytest.raises(FileFormatError, match=r"agent-0\.csv: no such file"):
        workload.build(4)


def test_an_agent_alone_and_all_agents_agree(tmp_path: Path) -> None:
    """Columns in another order, numbers written in another way, a class that one agent lacks."""
    write_csv(tmp_path / "agent-0.csv", ROWS)
    swapped = [(ill, dose, age) for age, dose, ill in ROWS if ill == "yes"]
    write_csv(tmp_path / "agent-1.csv", swapped, header="ill, dose, age")
    workload = FileWorkload(tmp_path / "agent-{agent}.csv", "ill", classes=("no", "yes"))
    everyone = workload.build(2)
    for agent in range(2):
        alone = workload.build(2, [agent])
        assert alone.description == everyone.description
        rows = slice(everyone.data.offsets[agent], everyone.data.offsets[agent + 1])
        assert torch.equal(alone.data.inputs, everyone.data.inputs[rows])
        assert torch.equal(alone.data.targets, everyone.data.targets[rows])


def test_bounds_scale_columns_without_looking_at_the_data(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [(0, 5, "a"), (120, 5, "b"), (150, 5, "a"), (60, 5, "b")])
    problem = FileWorkload(path, "ill", bounds=parse_bounds("age=0:120"), held_out=0).build(1)
    ages = sorted(torch.cat([problem.data.inputs, *(X for X, _ in problem.parts.values())])[:, 0])
    assert [float(age) for age in ages] == [-1.0, 0.0, 1.0, 1.0]


def test_notes_name_file_and_column(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [(k, k + 20) for k in range(20)], header="x,y")
    bounds = parse_bounds("x=0:9,y=0:38")
    notes = FileWorkload(path, "y", is_regression=True, bounds=bounds).build(2).private_notes
    assert len(notes) == 2
    for note, name, count in zip(notes, "xy", (10, 1), strict=True):
        assert f"{path}: column '{name}' has {count} values outside public bounds" in note


@pytest.mark.parametrize("suffix", ["tsv", "parquet"])
def test_formats_give_the_same_samples(suffix: str, tmp_path: Path) -> None:
    plain, other = write_csv(tmp_path / "a.csv", ROWS), tmp_path / f"b.{suffix}"
    if suffix == "tsv":
        other.write_text(plain.read_text().replace(",", "\t"))
    else:
        columns = dict(zip(("age", "dose", "ill"), zip(*ROWS, strict=True), strict=True))
        parquet.write_table(pa.table({k: list(v) for k, v in columns.items()}), other)
    first, second = (FileWorkload(path, "ill").build(2).data for path in (plain, other))
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.targets, second.targets)


def test_images(tmp_path: Path) -> None:
    nobody = ModelPromise(None, None, None, "", "", "", None, "", 1, 2, "none")
    for size, shape in (((6, 5), (6, 5)), ((6, 5, 3), (3, 6, 5))):
        folder = write_images(tmp_path / f"images-{len(size)}", size)
        problem = FileWorkload(folder).build(2)
        assert problem.data.inputs.shape[1:] == shape
        # A linear model flattens images itself, in training and in use.
        vector = torch.ones(problem.task.num_parameters)
        model = TrainedModel.from_problem(problem, vector, nobody)
        assert model is not None
        assert model.input_shape == (math.prod(shape),)
        quality = model.measure(problem.data.inputs, problem.data.targets)
        prepared = problem.task.prepare(problem.data.inputs)
        scores = problem.task.evaluate(vector[None], prepared, problem.data.targets)
        assert quality is not None
        assert scores.accuracy is not None
        assert quality.accuracy == pytest.approx(float(scores.accuracy[0]))
        assert 0 <= float(problem.data.inputs.min()) < float(problem.data.inputs.max()) <= 1
        assert problem.private_notes == (), "images have borders"
        colours = FileWorkload(folder, model="cnn").build(2)
        assert isinstance(colours.task, ModuleTask)
        assert torch.isfinite(colours.task.initialize(0)).all()


def test_public_test_data_is_the_only_public_part(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", ROWS)
    test = write_csv(tmp_path / "t.csv", ROWS[:5])
    problem = FileWorkload(path, "ill", test_data=test).build(2)
    assert problem.public_parts == ("test",)
    assert len(problem.parts["test"][1]) == 5
    assert {"validation", "test"} == set(problem.parts)
    other = FileWorkload(path, "ill", test_data=write_csv(tmp_path / "u.csv", ROWS[:4])).build(2)
    assert problem.description != other.description


def test_data_to_train_on_is_no_public_test_data(tmp_path: Path) -> None:
    """Its hash and scores are published."""
    own = write_csv(tmp_path / "agent-0.csv", ROWS)
    (tmp_path / "link.csv").symlink_to(own)
    for test in (own, tmp_path / "link.csv"):
        with pytest.raises(FileFormatError, match="is data to train on"):
            FileWorkload(tmp_path / "agent-{agent}.csv", "ill", test_data=test).build(1)
    folder = tmp_path / "images"
    (folder / "cat").mkdir(parents=True)
    with pytest.raises(FileFormatError, match="is data to train on"):
        FileWorkload(folder, test_data=folder / "cat").build(1)


def test_regression_and_own_models(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [(a, d, a / 2) for a, d, _ in ROWS])
    for model in ("linear", "network"):
        problem = FileWorkload(path, "ill", is_regression=True, model=model).build(2)
        vector = problem.task.initialize(0).float()[None]
        scores = problem.task.evaluate(vector, problem.data.inputs, problem.data.targets)
        assert torch.isfinite(scores.loss).all()
        assert scores.accuracy is None
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def make_model(input_shape, num_outputs):\n"
        "    return torch.nn.Linear(*input_shape, num_outputs), torch.nn.functional.l1_loss\n"
        "def plain(*_):\n    return torch.nn.Linear(2, 7)\n"
        "def text(*_):\n    return 'model'\n"
    )
    own = FileWorkload(path, "dose", is_regression=True, model=f"{tmp_path}/mine.py:make_model")
    first, second = (own.build(2).task for _ in range(2))
    assert first.num_parameters == 3
    assert torch.equal(first.initialize(0), second.initialize(0)), "agents start from one model"
    assert FileWorkload(path, "dose", is_regression=True, model=f"{tmp_path}/mine.py:plain").build(
        2
    )
    for name, message in (
        ("text", "must return a module"),
        ("absent", "must define a function 'absent'"),
    ):
        with pytest.raises(FileFormatError, match=message):
            FileWorkload(
                path, "dose", is_regression=True, model=f"{tmp_path}/mine.py:{name}"
            ).build(2)


BROKEN: dict[str, tuple[str, str]] = {
    "huge": (
        "age,dose,ill\n1,2,a\n1,1e39,b\n",
        "found '1e39' in row 2 (number of such rows: 1), beyond ±3.4e+38",
    ),
    "no target": ("age,dose\n1,2\n", "column 'ill' is missing; its columns are age, dose"),
    "short row": (
        "age,dose,ill\n1,2,a\n1,b\n",
        "row 2 must have 3 values, one for each column, found 2",
    ),
    "no rows": ("age,dose,ill\n", "at least one row"),
    "empty": ("", "the first line must have the names of the columns, found nothing"),
    "no header": ("1,2,3\n4,5,6\n", "the first line must have the names of the columns"),
    "twice": ("age,age,ill\n1,2,a\n", "column 'age' occurs twice"),
    "one class": ("age,dose,ill\n1,2,a\n1,2,a\n", "at least two classes"),
    "numbers": ("age,dose,ill\n1,2,.5\n1,2,.7\n", "--regression predicts numbers"),
    "quotes": ('age,dose,ill\n1,"2,a\n', "row 1 must have 3 values, one for each column, found 2"),
    "several": (
        "age,dose,ill\n,high,a\n1,inf,\n1,1,b\n",
        "column 'dose' must have numbers, found 'high' in row 1 (number of such rows: 2); column "
        "'ill' has no value in row 2",
    ),
}


@pytest.mark.parametrize("content", BROKEN)
def test_errors_name_the_file_and_the_column(content: str, tmp_path: Path) -> None:
    path = tmp_path / "clinic.csv"
    path.write_text(BROKEN[content][0])
    with pytest.raises(CornError) as caught:
        FileWorkload(path, "ill").build(1)
    assert str(caught.value).startswith(f"{path}: ")
    assert BROKEN[content][1] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unequal_columns_and_unknown_classes_are_named(tmp_path: Path) -> None:
    for agent in range(3):
        header = "age,weight,ill" if agent == 1 else "age,dose,ill"
        write_csv(tmp_path / f"agent-{agent}.csv", ROWS, header=header)
    data = tmp_path / "agent-{agent}.csv"
    with pytest.raises(FileFormatError, match=r"agent-1\.csv: .* a difference in dose, weight"):
        FileWorkload(data, "ill").build(3)
    assert FileWorkload(data, "ill", features=("age",)).build(3)
    with pytest.raises(
        FileFormatError, match=r"'ill' must be one of no, maybe, found 'yes' in row"
    ):
        FileWorkload(data, "ill", features=("age",), classes=("no", "maybe")).build(3, [0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parse_bounds("age"), "bounds must be LEAST:MOST"),
        (lambda: parse_bounds("age=3:3"), "a finite difference"),
        (lambda: parse_bounds("age=0:1,age=0:2"), "those of age twice"),
        (lambda: FileWorkload(Path("x"), classes=("a",)), "at least two different names"),
        (lambda: FileWorkload(Path("x"), classes=("a", "b"), is_regression=True), "regression"),
        (lambda: FileWorkload(Path("none.csv"), "y").build(2), "none.csv: no such file"),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(CornError, match=message):
        make()


def test_bounds_of_unknown_columns_and_images_of_two_sizes(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", ROWS)
    with pytest.raises(FileFormatError, match=r"a\.csv: column 'hight' has bounds, but is missing"):
        FileWorkload(path, "ill", bounds=parse_bounds("hight=0:1")).build(2)
    folder = write_images(tmp_path / "images")
    Image.fromarray(np.zeros((3, 3), np.uint8)).save(folder / "dog" / "small.png")
    with pytest.raises(FileFormatError, match=r"small\.png: images must have one size"):
        FileWorkload(folder).build(2)
    (folder / "dog" / "small.png").unlink()
    with pytest.raises(FileFormatError, match="has bounds, but is missing"):
        FileWorkload(folder, bounds=parse_bounds("0:1")).build(2)
    with pytest.raises(InvalidArgumentError, match="has none"):
        FileWorkload(path, "ill", model="cnn").build(2)
    write_images(tmp_path / "site-0", (4, 4))
    write_images(tmp_path / "site-1", (5, 4))
    with pytest.raises(FileFormatError, match=r"site-1: samples must have the shape"):
        FileWorkload(tmp_path / "site-{agent}").build(2)


def test_underscores_are_refused_in_targets_too(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [(1, 2, "1_0"), (3, 4, "5")])
    with pytest.raises(FileFormatError, match="column 'ill' must have numbers, found '1_0'"):
        FileWorkload(path, "ill", is_regression=True, held_out=0.0).build(1)


def test_long_codes_are_different_classes(tmp_path: Path) -> None:
    """As floats they would be one class."""
    codes = ("900000000000207008", "900000000000207009", "1_2", "12")
    path = write_csv(tmp_path / "a.csv", [(k, k, codes[k % 4]) for k in range(20)])
    schema = FileWorkload(path, "ill").build(1).schema
    assert schema is not None
    assert schema.classes == ("12", "1_2", "900000000000207008", "900000000000207009")


def test_wide_pixels_are_refused(tmp_path: Path) -> None:
    """Their conversion to 8 bits would make all bright pixels white."""
    (tmp_path / "cat").mkdir()
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(tmp_path / "cat" / "0.png")
    with pytest.raises(FileFormatError, match=r"0\.png: must have 8 bits per channel"):
        FileWorkload(tmp_path).build(1)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([[1], [2]]),
        pa.array([{"a": 1}, {"a": 2}]),
        pa.array([b"\xff", b"1"]),
        pa.array([1, 2], pa.duration("s")),
    ],
    ids=lambda values: str(values.type),
)
def test_columns_of_other_kinds_are_no_numbers(values: pa.Array, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"x": values, "y": [0, 1]}), path)
    with pytest.raises(FileFormatError, match="column 'x' must have numbers"):
        FileWorkload(path, "y").build(1)
    with pytest.raises(FileFormatError, match="column 'x' must"):
        FileWorkload(path, "x", features=("y",)).build(1)


@pytest.mark.parametrize("unit", ["us", "ns"])
def test_times_are_no_numbers(unit: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    times = pa.array([0, 1], pa.timestamp(unit))
    parquet.write_table(pa.table({"when": times, "ill": ["a", "b"]}), path)
    with pytest.raises(FileFormatError, match="column 'when' must have numbers, found '1970-01-01"):
        FileWorkload(path, "ill").build(1)
    times = pa.array([0, None, 1], pa.timestamp(unit))
    parquet.write_table(pa.table({"dose": [1.0, 2.0, 3.0], "when": times}), path)
    with pytest.raises(FileFormatError, match="column 'when' has no value in row 2"):
        FileWorkload(path, "when").build(1)
