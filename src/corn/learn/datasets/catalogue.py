"""The catalogue of data sets: their files, their pinned content, and their place in the cache."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, cast, final

from corn.checks import require_choice
from corn.errors import FileFormatError

FileFormat: TypeAlias = Literal["libsvm", "idx"]

CACHE_VARIABLE = "CORN_DATA"
"""The environment variable that names another cache directory."""

_CHUNK_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_MOST_UNPACKED_BYTES, _MOST_SHRINKING = 1 << 28, 100


@dataclass(frozen=True)
class RemoteFile:
    """A file of a data set.

    Attributes:
        name: its name, on the server and in the cache; ``.gz`` means compressed.
        sha256: of the **decompressed** content, so that a repacked archive is still recognised.
    """

    name: str
    sha256: str


@dataclass(frozen=True)
class DownloadableDataset:
    """A data set that is downloaded once and kept in the cache.

    Attributes:
        files: the training file or files first, then those of the test set. CorN joins them and
            splits them again, as the paper does.
        base_urls: the servers that have the files, tried in this order.
        stand_in: the embedded data set that takes its place when it is absent.
    """

    name: str
    file_format: FileFormat
    files: tuple[RemoteFile, ...]
    base_urls: tuple[str, ...]
    stand_in: str
    description: str


A9A = DownloadableDataset(
    name="a9a",
    file_format="libsvm",
    files=(
        RemoteFile("a9a", "f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906"),
        RemoteFile("a9a.t", "1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9"),
    ),
    base_urls=("https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/",),
    stand_in="breast-cancer",
    description="does a person earn over 50k? 48,842 rows of 123 yes-or-no features (LIBSVM)",
)

MNIST = DownloadableDataset(
    name="mnist",
    file_format="idx",
    files=(
        RemoteFile(
            "train-images-idx3-ubyte.gz",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        RemoteFile(
            "train-labels-idx1-ubyte.gz",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        RemoteFile(
            "t10k-images-idx3-ubyte.gz",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        RemoteFile(
            "t10k-labels-idx1-ubyte.gz",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    # The authors' own server has refused downloads by programs for years. PyTorch's mirror is in
    # common use, and the checksums are those of the originals.
    base_urls=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://yann.lecun.com/exdb/mnist/",
    ),
    stand_in="digits",
    description="70,000 handwritten digits of 28×28 grey levels",
)

DOWNLOADABLE = {dataset.name: dataset for dataset in (A9A, MNIST)}
"""The data sets that ``corn data get`` downloads."""

EMBEDDED = {
    "breast-cancer": "is a tumour malignant? 569 rows of 30 measurements (scikit-learn)",
    "digits": "1,797 handwritten digits of 8×8 grey levels (scikit-learn)",
    "synthetic": "200,000 rows of 20 normal features with logistic labels, for large networks",
}
"""The data sets that come with scikit-learn or are drawn, and need no download."""


def find_downloadable(name: str) -> DownloadableDataset:
    """Return the entry of a data set that can be downloaded."""
    advice = f"{name} comes with CorN and needs no download" if name in EMBEDDED else ""
    return DOWNLOADABLE[require_choice("data set", name, DOWNLOADABLE, advice=advice)]


def cache_directory(directory: Path | str | None = None) -> Path:
    """Return the directory given, else that of ``CORN_DATA``, else the user's cache directory.

    It need not exist yet.

    >>> cache_directory("/data").name
    'data'
    """
    if directory is not None:
        return Path(directory).expanduser()
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE]).expanduser()
    return _user_cache() / "corn"


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cached_path(name: str, file: RemoteFile, *, directory: Path | str | None = None) -> Path:
    """Return the path of a file of data set ``name`` in the cache, whether it exists or not."""
    return cache_directory(directory) / name / file.name


def is_cached(dataset: DownloadableDataset, *, directory: Path | str | None = None) -> bool:
    """Return whether every file is in the cache. Its content was checked on arrival."""
    paths = (cached_path(dataset.name, file, directory=directory) for file in dataset.files)
    return all(path.is_file() for path in paths)


def open_content(path: Path) -> IO[bytes]:
    """Open a file for reading its decompressed content, whatever its name.

    Reading raises ``FileFormatError`` where the content is larger than ``require_unpacked`` allows.
    """
    with path.open("rb") as stream:
        # By content: servers and archives differ in whether they decompress ``.gz``.
        is_compressed = stream.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    return (
        cast("IO[bytes]", io.BufferedReader(_Unpacked(path))) if is_compressed else path.open("rb")
    )


def require_unpacked(path: Path, num_bytes: int) -> None:
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


@final
class _Unpacked(io.RawIOBase):
    """The content of a gzip file, up to the size that is allowed: its header states none."""

    def __init__(self, path: Path) -> None:
        self._path, self._stream, self._num_bytes = path, gzip.GzipFile(path), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._stream.readinto(buffer)
        self._num_bytes += count
        require_unpacked(self._path, self._num_bytes)
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def check_content(path: Path, file: RemoteFile) -> None:
    """Raise ``FileFormatError`` unless the decompressed content is the one the catalogue pins."""
    digest = hashlib.sha256()
    try:
        with open_content(path) as stream:
            # In pieces: the decompressed content need not fit into memory.
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FileFormatError(f"{path}: not a complete gzip file ({error})") from error
    found = digest.hexdigest()
    if found != file.sha256:
        raise FileFormatError(
            f"{path}: the sha256 of {file.name} must be {file.sha256[:16]}…, found {found[:16]}…: "
            "the file is damaged or another version; download it again"
        )


def import_dataset(name: str, path: Path | str, *, directory: Path | str | None = None) -> Path:
    """Check a data set's files in a local directory, copy them to the cache, return their place.

    A file may be compressed or not, whatever its name in the catalogue. No file is copied unless
    all files are present and correct.
    """
    dataset = find_downloadable(name)
    sources = {file: _find_file(Path(path), file) for file in dataset.files}
    for file, source in sources.items():
        check_content(source, file)
    for file, source in sources.items():
        target = cached_path(name, file, directory=directory)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Copied beside the target and renamed: an interrupted copy must not pass for a cached file.
        partial = target.with_name(target.name + ".copy")
        shutil.copyfile(source, partial)
        partial.replace(target)
    return cache_directory(directory) / name


def _find_file(path: Path, file: RemoteFile) -> Path:
    plain = file.name.removesuffix(".gz")
    # torchvision keeps MNIST in a folder "raw"; some archives write ".idx" for "-idx".
    names = (file.name, plain, f"{plain}.gz", plain.replace("-idx", ".idx"))
    for candidate in (place / name for place in (path, path / "raw") for name in names):
        if candidate.is_file():
            return candidate
    raise FileFormatError(
        f"{path}: must be a directory with a file {file.name}, compressed or not; found none"
    )
