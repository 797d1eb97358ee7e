"""A small file cannot fill the memory, and ordinary compressed data is read."""

import gzip
import io
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from corn.errors import FileFormatError
from corn.learn import file_data
from corn.learn.file_data import read_table

LIMIT = 1 << 20
ROWS = 3 * LIMIT // 8  # of one number each: three times the limit


def write_arrays(path: Path) -> None:
    np.savez_compressed(path, x=np.zeros((ROWS, 1)), y=np.zeros(ROWS, np.uint8))


def write_overlapping_arrays(path: Path) -> None:
    """Let many members of an archive share the same compressed bytes."""
    content = io.BytesIO()
    np.save(content, np.zeros(LIMIT // 2, np.uint8))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", content.getvalue())
        first = archive.infolist()[0]
        for number in range(8):
            member = zipfile.ZipInfo(f"x{number}.npy")
            for name in ("compress_type", "CRC", "compress_size", "file_size", "header_offset"):
                setattr(member, name, getattr(first, name))
            archive.filelist.append(member)


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
    "arrays.npz": write_arrays,
    "overlapping.npz": write_overlapping_arrays,
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
        read_table(path, None if path.is_dir() else "y")


def test_short_rows_take_little_more_memory_than_their_numbers(tmp_path: Path) -> None:
    """Below the limit too, a text for each row would take 15 times the bytes of a short row."""
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(b"x,y\n" + b"0,yes\n" * 100_000))
    tracemalloc.start()
    try:
        samples = read_table(path, "y")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(samples.targets) == 100_000
    assert set(samples.targets.to_pylist()) == {"yes"}
    assert most < 60 * 100_000


def test_ordinary_compressed_data_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits that are random compress by less than a hundred, whatever the size of the file."""
    monkeypatch.setattr(file_data, "_MOST_UNPACKED_BYTES", 0)
    numbers = np.random.default_rng(0).integers(0, 9, 5000)
    text = "x,y\n" + "".join(f"{number},1\n" for number in numbers)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    np.savez_compressed(tmp_path / "a.npz", x=numbers[:, None], y=np.ones(5000))
    for name in ("a.csv.gz", "a.npz"):
        found = read_table(tmp_path / name, "y")
        assert np.array_equal(found.inputs[:, 0], numbers)


def test_an_array_without_memory_for_it_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 1)), y=np.zeros(3))

    def allocate(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 7 EiB")

    monkeypatch.setattr("numpy.lib.format.read_array", allocate)
    with pytest.raises(FileFormatError, match=r"not an \.npz file of plain arrays: Unable"):
        read_table(tmp_path / "a.npz", "y")
