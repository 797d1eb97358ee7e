"""The catalogue, its cache and the file formats."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.errors import FileFormatError, InvalidArgumentError
from corn.learn.datasets import (
    DOWNLOADABLE,
    cache_directory,
    fetch_dataset,
    is_cached,
    load_dataset,
    read_idx,
    read_libsvm,
)

from .places import SHARED_DATA, needs_a9a, needs_mnist


@needs_a9a
def test_real_a9a_is_imported_and_loaded(tmp_path: Path) -> None:
    fetch_dataset("a9a", source=SHARED_DATA / "a9a", directory=tmp_path)
    data = load_dataset("a9a", directory=tmp_path)
    assert data.inputs.shape == (48842, 123)
    assert np.bincount(data.targets).tolist() == [37155, 11687]
    assert set(np.unique(data.inputs)) == {0.0, 1.0}
    assert data.inputs[32561:, 122].max() == 0  # feature 123 never occurs in the test file


@needs_mnist
@pytest.mark.slow
def test_real_mnist_is_imported_and_loaded(tmp_path: Path) -> None:
    fetch_dataset("mnist", source=SHARED_DATA / "mnist", directory=tmp_path)
    data = load_dataset("mnist", directory=tmp_path)
    assert data.inputs.shape == (70000, 784)
    assert (data.image_shape, data.num_classes) == ((28, 28), 10)
    assert data.targets[:5].tolist() == [5, 0, 4, 1, 9]
    assert (data.inputs.min(), data.inputs.max()) == (0.0, 1.0)


@pytest.mark.parametrize("name", DOWNLOADABLE)
def test_an_absent_data_set_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileFormatError, match=f"corn data get {name}"):
        load_dataset(name, directory=tmp_path)


def test_breast_cancer_is_standardised() -> None:
    np.testing.assert_allclose(load_dataset("breast-cancer").inputs.std(axis=0), 1, rtol=1e-4)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="a9a, mnist, breast-cancer, digits"):
        load_dataset("cifar")
    with pytest.raises(InvalidArgumentError, match="one of a9a, mnist"):
        fetch_dataset("digits")


def test_the_cache_directory_is_configurable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CORN_DATA", raising=False)
    assert cache_directory().name == "corn"
    monkeypatch.setenv("CORN_DATA", str(tmp_path / "elsewhere"))
    assert cache_directory() == tmp_path / "elsewhere"
    assert cache_directory(tmp_path) == tmp_path


def test_files_of_a_folder_are_checked(tmp_path: Path) -> None:
    source, cache = tmp_path / "source", tmp_path / "cache"
    source.mkdir()
    with pytest.raises(FileFormatError, match="with a file a9a"):
        fetch_dataset("a9a", source=source, directory=cache)
    (source / "a9a").write_text("+1 3:1\n")
    with pytest.raises(FileFormatError, match="sha256"):
        fetch_dataset("a9a", source=source, directory=cache)
    assert list((cache / "a9a").iterdir()) == []


@needs_mnist
def test_a_folder_may_have_files_decompressed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in DOWNLOADABLE["mnist"].files:
        content = gzip.decompress((SHARED_DATA / "mnist" / file).read_bytes())
        (source / file.removesuffix(".gz")).write_bytes(content)
    fetch_dataset("mnist", source=source, directory=tmp_path / "cache")
    assert is_cached(DOWNLOADABLE["mnist"], directory=tmp_path / "cache")


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_libsvm_keeps_columns_that_never_occur(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    """``corn data get`` copies a9a.gz of a folder to the name a9a."""
    (tmp_path / "f").write_bytes(compress(b"+1 1:1 3:0.5\n-1 2:1\n"))
    features, labels = read_libsvm(tmp_path / "f", num_features=5)
    assert features.tolist() == [[1, 0, 0.5, 0, 0], [0, 1, 0, 0, 0]]
    assert labels.tolist() == [1, -1]
    (tmp_path / "f").write_text("not a row\n")
    with pytest.raises(FileFormatError, match="not a LIBSVM file"):
        read_libsvm(tmp_path / "f", num_features=5)


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_idx_round_trip(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], seed: int
) -> None:
    values = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    header = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    path = tmp_path_factory.mktemp("idx") / "f.gz"
    path.write_bytes(gzip.compress(header + values.tobytes()))
    np.testing.assert_array_equal(read_idx(path), values)


@pytest.mark.parametrize(
    "content",
    [
        b"\0\0\x0d\1\0\0\0\1\0\0\0\0",
        b"\0\0\x08\3\0\0",
        b"\0\0\x08\1\0\0\0\5abc",
        b"\0\0\x08\4" + b"\0\1\0\0" * 4,  # 2⁶⁴ bytes
        # Without a time: all processes of a test session must collect the same names.
        gzip.compress(b"\0\0\x08\1\0\0\0\5abcde", mtime=0)[:-9],
    ],
)
def test_damaged_idx_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(FileFormatError, match="not an idx file"):
        read_idx(tmp_path / "f")
