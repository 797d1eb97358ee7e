"""The public schema: encoding, imputation, and problems of data that are reported together."""

import json
import tracemalloc
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.errors import FileFormatError, InvalidArgumentError
from corn.learn.file_data import FileWorkload, read_file
from corn.learn.schema import Column, Findings, Rows, Schema, read_schema

AGE = Column("age", bounds=(0, 100), missing=50)
WARD = Column("ward", "category", categories=("a", "b"))
DATE = Column("admitted", "date", bounds=("2020-01-01", "2020-01-11"))
SMOKER = Column("smoker", "boolean", missing=False)
SCHEMA = Schema("ill", (AGE, WARD, DATE, SMOKER), ("0", "1"), id="person")


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def read(path: Path) -> Rows:
    return SCHEMA.read(read_file(path), checks_people=True)


def test_cells_become_numbers_by_public_constants(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv",
        "person,age,ward,admitted,smoker,ill",
        "1,150,b,2020-01-06,yes,0",
        "2,NA,c,2020-01-11T12:00,?,1",
    )
    rows = read(path)
    assert SCHEMA.scale_inputs(rows).tolist() == [[1, 0, 1, 0, 1], [0, 0, 0, 1, -1]]
    assert SCHEMA.scale_targets(rows).tolist() == [0, 1]
    assert SCHEMA.features == ("age", "ward=a", "ward=b", "admitted", "smoker")
    # Unknown categories, filled cells and values outside are for the owner.
    assert len(rows.notes) == 4


def test_all_problems_of_a_file_are_reported_together(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv",
        "person,age,ward,admitted,smoker,ill",
        "1,old,b,yesterday,maybe,0",
        "1,3,b,,no,1",
    )
    with pytest.raises(FileFormatError) as caught:
        read(path)
    for name in ("person", "age", "admitted", "smoker"):
        assert f"column '{name}'" in str(caught.value)


@given(st.lists(st.floats(allow_nan=False) | st.integers(-(2**70), 2**70), min_size=1))
def test_a_column_of_numbers_is_read_as_its_cells_would_be(values: list[float]) -> None:
    """A whole column is cast at once, which must not change a number or accept another one."""
    floats = [float(value) for value in values]
    texts = [repr(value) for value in floats]
    most = float(np.finfo(np.float32).max)
    is_large = [abs(value) > most for value in floats]
    for cells in (floats, texts):
        found = Findings()
        numbers = Column("x").read(pa.chunked_array([cells]), found)
        assert bool(found.problems) == any(is_large)
        expected = np.where(is_large, np.nan, floats)
        np.testing.assert_array_equal(numbers[:, 0], expected)


@pytest.mark.parametrize(
    "kind", [pa.float16(), pa.float32(), pa.float64(), pa.int64(), pa.decimal128(30, 25)], ids=str
)
def test_a_missing_cell_changes_no_other_of_a_typed_column(kind: pa.DataType) -> None:
    """Before, it sent the whole column through text: float32 0.1 became 0.1 and got other coins."""
    numbers = np.random.default_rng(0).random(100).astype(np.float32)
    values: list[object]
    if pa.types.is_integer(kind):
        values = [2**60 + k for k in range(100)]
    elif pa.types.is_decimal(kind):
        values = [Decimal(f"0.{k:03}{k * 7919:022}") for k in range(100)]
    else:
        values = numbers.astype(kind.to_pandas_dtype()).tolist()
    full, gap = (pa.array(own, kind) for own in (values, [None, *values[1:]]))
    pairs = [(full, gap)]
    if kind == pa.float32():
        pairs.append((full.dictionary_encode(), gap.dictionary_encode()))
    for pair in pairs:
        column = Column("x", missing=0.5)
        before, after = (column.read(pa.chunked_array([own]), Findings()) for own in pair)
        np.testing.assert_array_equal(before[1:], after[1:])
        assert after[0] == 0.5


def test_a_missing_value_may_be_a_class_that_is_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "age,pain", "30,none", "40,mild", "50,NA")
    file = read_file(path)
    with pytest.raises(FileFormatError, match="column 'pain' has no value in row 3"):
        Schema("pain", (AGE,), ("none", "mild")).read(file)
    found = Schema("pain", (AGE,), ("none", "mild", "NA")).read(file)
    assert found.targets is not None
    assert found.targets.tolist() == [0, 1, 2]


def test_rows_take_little_more_memory_than_their_numbers(tmp_path: Path) -> None:
    """A text for each row would take 15 times the bytes of a short row."""
    path = write(tmp_path / "a.csv", "x,y", *["0,yes"] * 100_000)
    tracemalloc.start()
    try:
        found = Schema("y", (Column("x"),), ("no", "yes")).read(read_file(path))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.targets is not None
    assert found.targets.tolist() == [1] * 100_000
    assert most < 60 * 100_000


def test_public_test_data_needs_no_column_of_people(tmp_path: Path) -> None:
    people = "\n".join(f"{k},{k},{k % 2}" for k in range(40))
    path = write(tmp_path / "a.csv", "person,age,ill", people)
    test = write(tmp_path / "public.csv", "age,ill", "1,0", "1,0")
    schema = Schema("ill", (AGE,), ("0", "1"), id="person")
    problem = FileWorkload(path, schema=schema, sites=("only",), test_data=test).build(1)
    assert len(problem.parts["test"][1]) == 2
    assert problem.simulation == ""


cells = st.sampled_from(["", "NA", "a", "b", "zz", "1", "1.0", "true", "2020-01-05", "-3", "1e9"])


@given(st.lists(cells, min_size=1, max_size=6), cells, st.data())
def test_a_row_does_not_depend_on_other_rows(
    rows: list[str], other: str, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(rows) - 1))
    changed = [*rows[:place], other, *rows[place + 1 :]]
    for column in (AGE, WARD, DATE, SMOKER):
        before, after = (
            column.read(pa.chunked_array([own]), Findings()) for own in (rows, changed)
        )
        kept = [row for row in range(len(rows)) if row != place]
        np.testing.assert_array_equal(before[kept], after[kept])


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "colour"},
        {"bounds": (3, 1)},
        {"bounds": ("low", 1)},
        {"kind": "category"},
        {"kind": "category", "categories": ("1", "1.0")},
        {"kind": "category", "categories": ("a",), "missing": "b"},
        {"kind": "boolean", "bounds": (0, 1)},
        {"kind": "date", "missing": "spring"},
        {"categories": ("a",)},
    ],
)
def test_impossible_columns_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError):
        Column("x", **fields)  # type: ignore[arg-type]


def test_sites_compare_the_column_of_people() -> None:
    """A report says that each site's program checked it, so none may have left it out."""
    others = (replace(SCHEMA, id=None), replace(SCHEMA, id="patient"))
    assert len({own.describe() for own in (SCHEMA, *others)}) == 3


def test_a_schema_is_plain_data() -> None:
    for schema in (SCHEMA, Schema("dose", (AGE,), target_bounds=(0.0, 9.0))):
        assert read_schema(json.loads(json.dumps(schema.to_json()))) == schema
