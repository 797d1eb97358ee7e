"""Columns of a public schema: encoding, imputation, and problems that are reported together."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.errors import FileFormatError, InvalidArgumentError
from corn.learn.columns import Column, DataSchema, read_schema
from corn.learn.file_data import FileWorkload, Schema, read_table

AGE = Column("age", bounds=(0, 100), missing=50)
WARD = Column("ward", "category", categories=("a", "b"))
DATE = Column("admitted", "date", bounds=("2020-01-01", "2020-01-11"))
SMOKER = Column("smoker", "boolean", missing=False)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_cells_become_numbers_by_public_constants(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv",
        "person,age,ward,admitted,smoker,ill",
        "1,150,b,2020-01-06,yes,0",
        "2,NA,c,2020-01-11T12:00,?,1",
    )
    workload = FileWorkload(
        data=path,
        target="ill",
        classes=("0", "1"),
        columns=(AGE, WARD, DATE, SMOKER),
        id_column="person",
        sites=("only",),
        held_out=0,
    )
    table = read_table(path, "ill", columns=workload.columns, id_column="person")
    schema = Schema(
        table.features, "ill", ("0", "1"), workload._bounds, is_flat=True, columns=workload.columns
    )
    expected = [[1, 0, 1, 0, 1], [0, 0, 0, 1, -1]]
    assert schema.encode(table)[0].tolist() == expected
    assert table.features == ("age", "ward=a", "ward=b", "admitted", "smoker")
    # Unknown categories and filled cells are counted for the owner.
    assert len(table.notes) == 3
    restored = Schema.from_json(json.loads(json.dumps(schema.to_json())))
    assert restored == schema
    assert restored.encode(table)[0].tolist() == expected


def test_all_problems_of_a_file_are_reported_together(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv",
        "person,age,ward,admitted,smoker,ill",
        "1,old,b,yesterday,maybe,0",
        "1,3,b,,no,1",
    )
    with pytest.raises(FileFormatError) as caught:
        read_table(path, "ill", columns=(AGE, WARD, DATE, SMOKER), id_column="person")
    for name in ("person", "age", "admitted", "smoker"):
        assert f"column '{name}'" in str(caught.value)


def test_files_of_several_sites_are_reported_together(tmp_path: Path) -> None:
    for site in ("north", "south"):
        write(tmp_path / f"{site}.csv", "age,ill", "young,0")
    workload = FileWorkload(
        data=tmp_path / "{site}.csv",
        target="ill",
        classes=("0", "1"),
        columns=(AGE,),
        sites=("north", "south"),
    )
    with pytest.raises(FileFormatError) as caught:
        workload.build(2)
    assert "north.csv" in str(caught.value)
    assert "south.csv" in str(caught.value)
    assert [path.name for path in workload._paths([1])] == ["south.csv"]


cells = st.sampled_from(["", "NA", "a", "b", "zz", "1", "1.0", "true", "2020-01-05", "-3", "1e9"])


@given(st.lists(cells, min_size=1, max_size=6), cells, st.data())
def test_a_row_does_not_depend_on_other_rows(
    rows: list[str], other: str, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(rows) - 1))
    changed = [*rows[:place], other, *rows[place + 1 :]]
    for column in (AGE, WARD, DATE, SMOKER):
        before, after = column.read(rows)[0], column.read(changed)[0]
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


def test_a_schema_is_plain_data() -> None:
    schema = DataSchema("ill", (AGE, WARD, DATE, SMOKER), ("0", "1"), id="person")
    restored, problems = read_schema(json.loads(json.dumps(schema.to_json())))
    assert (restored, problems) == (schema, [])


def test_all_problems_of_a_schema_are_reported_together() -> None:
    schema, problems = read_schema(
        {"columns": {"a": {"kind": "colour"}, "b": {"bounds": [1]}}, "wrong": 1}
    )
    assert schema is None
    assert len(problems) == 4
