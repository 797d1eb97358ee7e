"""A small file cannot fill the memory, and ordinary compressed data is read."""

import gzip
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from corn.errors import FileFormatError
from corn.learn import file_data
from corn.learn.file_data import read_file
from corn.learn.schema import Column, Schema

LIMIT = 1 << 20
ROWS = 3 * LIMIT // 8  # of one number each: three times the limit


def write_text(path: Path) -> None:
    path.write_bytes(gzip.compress(b"x,y\n" + b"0,1\n" * ROWS))


def write_line(path: Path) -> None:
    path.write_bytes(gzip.compress(b"x" * 3 * LIMIT))


def write_image(path: Path) -> None:
    (path / "cat").mkdir(parents=True)
    Image.new("RGB", (1024, 1024)).save(path / "cat" / "black.png")


def write_parquet(path: Path) -> None:
    parquet.write_table(pa.table({"x": np.zeros(ROWS), "y": np.zeros(ROWS)}), path)


FILES = {
    "text.csv.gz": write_text,
    "line.csv.gz": write_line,
    "images": write_image,
    "table.parquet": write_parquet,
}


@pytest.mark.parametrize(("name", "write"), FILES.items(), ids=FILES)
def test_a_file_that_decompresses_to_far_more_is_refused(
    name: str, write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    write(path)
    monkeypatch.setattr(file_data, "_MOST_UNPACKED_BYTES", LIMIT)
    with pytest.raises(FileFormatError, match=r"must be at most 1,048,576 bytes.*without compress"):
        read_file(path)


def test_short_rows_take_little_more_memory_than_their_numbers(tmp_path: Path) -> None:
    """Below the limit too, a text for each row would take 15 times the bytes of a short row."""
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(b"x,y\n" + b"0,yes\n" * 100_000))
    tracemalloc.start()
    try:
        found = Schema("y", (Column("x"),), ("no", "yes")).read(path, read_file(path).cells)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.targets is not None
    assert found.targets.tolist() == [1] * 100_000
    assert most < 60 * 100_000


def test_ordinary_compressed_data_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits that are random compress by less than a hundred, whatever the size of the file."""
    monkeypatch.setattr(file_data, "_MOST_UNPACKED_BYTES", 0)
    numbers = np.random.default_rng(0).integers(0, 9, 5000)
    text = "x,y\n" + "".join(f"{number},1\n" for number in numbers)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    found = read_file(tmp_path / "a.csv.gz").cells["x"].to_pylist()
    assert found == [str(number) for number in numbers]
