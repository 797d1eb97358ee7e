"""The catalogue of data sets: their files, their pinned content, and their place in the cache."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import math
import os
import shutil
import struct
import sys
import urllib.error
import urllib.request
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, cast, final

import numpy as np
from numpy.typing import NDArray

from corn.checks import IntArray, require, require_choice
from corn.errors import CornError, CornWarning, FileFormatError

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


Float32Array: TypeAlias = NDArray[np.float32]

_A9A_FEATURES = 123
_IDX_UNSIGNED_BYTE = 0x08
_SYNTHETIC_ROWS, _SYNTHETIC_FEATURES = 200_000, 20


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled samples.

    Attributes:
        name: the data set that the samples come from.
        inputs: shape (samples, features), float32; images are flattened.
        targets: shape (samples,), classes 0 … num_classes − 1.
        image_shape: (height, width) where the features are an image.
        stand_in_for: the absent data set that was asked for; None where this is the one.
    """

    name: str
    inputs: Float32Array = field(repr=False)
    targets: IntArray = field(repr=False)
    num_classes: int
    image_shape: tuple[int, int] | None = None
    stand_in_for: str | None = None

    def __post_init__(self) -> None:
        is_table = self.inputs.ndim == 2 and len(self.inputs) == len(self.targets) > 0
        shapes = f"shapes {self.inputs.shape} and {self.targets.shape}"
        require(is_table, "inputs", "a table with one row per target and at least one", shapes)
        least, most = int(self.targets.min()), int(self.targets.max())
        is_class = least >= 0 and most < self.num_classes
        require(is_class, "targets", f"in 0 … {self.num_classes - 1}", f"{least} to {most}")

    @property
    def num_features(self) -> int:
        """The number of features of a sample."""
        return int(self.inputs.shape[1])

    def describe(self) -> str:
        """Return one line with the data set's name and size, and the data set it stands in for."""
        what = f"{self.name}: {len(self.inputs)} samples, {self.num_features} features"
        if self.stand_in_for is None:
            return what
        return f"{what} (STANDS IN FOR {self.stand_in_for}, which is absent)"


def load_dataset(
    name: str, *, directory: Path | str | None = None, stand_in: bool = True
) -> Dataset:
    """Load ``a9a``, ``mnist``, ``digits``, ``breast-cancer`` or ``synthetic``: all parts as one.

    The first two are read from the cache (``corn data get``). If one is absent, its stand-in among
    the next two is returned, with a ``CornWarning`` and ``stand_in_for`` set. With
    ``stand_in=False`` an absent data set is an error.

    >>> load_dataset("digits").describe()
    'digits: 1797 samples, 64 features'
    """
    if name in EMBEDDED:
        return _EMBEDDED_LOADERS[name](None)
    require_choice("data set", name, [*DOWNLOADABLE, *EMBEDDED])
    dataset = DOWNLOADABLE[name]
    if is_cached(dataset, directory=directory):
        return _CACHED_LOADERS[name](directory)
    return _stand_in(dataset, directory, stand_in)


def _stand_in(dataset: DownloadableDataset, directory: Path | str | None, allowed: bool) -> Dataset:
    absent = f"{dataset.name} is not in {cache_directory(directory)}"
    remedy = f"download it with: corn data get {dataset.name}"
    if not allowed:
        raise FileFormatError(f"{absent}; {remedy}")
    warnings.warn(
        f"{absent}; {dataset.stand_in} STANDS IN FOR IT, so results are not those of "
        f"{dataset.name}; {remedy}",
        CornWarning,
        stacklevel=3,
    )
    return _EMBEDDED_LOADERS[dataset.stand_in](dataset.name)


def _load_a9a(directory: Path | str | None) -> Dataset:
    parts = [
        read_libsvm(cached_path("a9a", file, directory=directory), num_features=_A9A_FEATURES)
        for file in A9A.files
    ]
    inputs = np.concatenate([features for features, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    # Labels of a9a are −1 and 1; classes count from 0.
    return Dataset("a9a", inputs, (labels > 0).astype(np.int64), 2)


def _load_mnist(directory: Path | str | None) -> Dataset:
    paths = [cached_path("mnist", file, directory=directory) for file in MNIST.files]
    # Files are in the catalogue's order: images and labels for training, then for testing.
    images = np.concatenate([read_idx(paths[0]), read_idx(paths[2])])
    labels = np.concatenate([read_idx(paths[1]), read_idx(paths[3])])
    inputs = images.reshape(len(images), -1).astype(np.float32) / np.float32(255)
    return Dataset("mnist", inputs, labels.astype(np.int64), 10, (28, 28))


def _load_digits(stand_in_for: str | None) -> Dataset:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    # Grey levels of this data set are 0 … 16.
    inputs = (bunch.data / 16).astype(np.float32)
    return Dataset("digits", inputs, bunch.target.astype(np.int64), 10, (8, 8), stand_in_for)


def _load_breast_cancer(stand_in_for: str | None) -> Dataset:
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    # Scales differ by a factor of 10⁵ between features: one clipping norm would then keep the
    # gradients of a few features and lose all others.
    standardised = (bunch.data - bunch.data.mean(axis=0)) / bunch.data.std(axis=0)
    targets = bunch.target.astype(np.int64)
    return Dataset("breast-cancer", standardised.astype(np.float32), targets, 2, None, stand_in_for)


def _draw_synthetic(stand_in_for: str | None) -> Dataset:
    """Draw labels from logistic regression on normal features, always the same."""
    # A fixed seed: agents in several processes must draw the same rows.
    random = np.random.default_rng(0)
    inputs = random.standard_normal((_SYNTHETIC_ROWS, _SYNTHETIC_FEATURES), dtype=np.float32)
    logits = inputs @ random.standard_normal(_SYNTHETIC_FEATURES, dtype=np.float32)
    targets = random.random(_SYNTHETIC_ROWS) < 1 / (1 + np.exp(-logits))
    return Dataset("synthetic", inputs, targets.astype(np.int64), 2, None, stand_in_for)


def read_libsvm(path: Path, *, num_features: int) -> tuple[Float32Array, IntArray]:
    """Read rows of ``label index:value …``: features (rows, num_features), labels (rows,).

    The number of features is stated, never inferred: a9a's feature 123 does not occur in its test
    file, which would come out a column short.
    """
    # Scikit-learn takes a second to import, which commands without data need not wait for.
    from sklearn.datasets import load_svmlight_file

    try:
        with open_content(path) as stream:
            features, labels = load_svmlight_file(stream, n_features=num_features, dtype=np.float32)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise FileFormatError(f"{path}: not a LIBSVM file: {error}") from error
    return features.toarray(), labels.astype(np.int64)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an idx file of bytes, compressed or not, as an array of the shape in its header."""
    try:
        with open_content(path) as stream:
            content = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        raise FileFormatError(f"{path}: cannot be read: {error}") from error
    if len(content) < 4 or content[:3] != bytes([0, 0, _IDX_UNSIGNED_BYTE]):
        raise FileFormatError(f"{path}: not an idx file of bytes: it begins {content[:4].hex(' ')}")
    # Two zero bytes, the type, the number of dimensions, then each dimension in 4 bytes.
    header = 4 + 4 * content[3]
    if len(content) < header:
        raise FileFormatError(f"{path}: the idx header is cut off")
    shape: tuple[Any, ...] = struct.unpack(f">{content[3]}I", content[4:header])
    if len(content) - header != math.prod(shape):
        raise FileFormatError(
            f"{path}: must have {shape} bytes according to its header, found "
            f"{len(content) - header}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


_CACHED_LOADERS: dict[str, Callable[[Path | str | None], Dataset]] = {
    "a9a": _load_a9a,
    "mnist": _load_mnist,
}
_EMBEDDED_LOADERS: dict[str, Callable[[str | None], Dataset]] = {
    "digits": _load_digits,
    "breast-cancer": _load_breast_cancer,
    "synthetic": _draw_synthetic,
}

_DOWNLOAD_BYTES = 1 << 16
_TIMEOUT_SECONDS = 30
_RANGE_NOT_SATISFIABLE = 416


class DownloadError(CornError):
    """A download that failed. The bytes that arrived are kept, and the next attempt resumes."""


ByteCounter: TypeAlias = Callable[[str, int, int | None], None]
"""A callback for progress: (file, bytes arrived, total or None if unknown)."""


def fetch_dataset(
    name: str,
    *,
    directory: Path | str | None = None,
    base_urls: Sequence[str] | None = None,
    on_progress: ByteCounter | None = None,
) -> Path:
    """Download the files of a data set that are not in the cache yet; return their directory.

    Each file is checked against the SHA-256 of its decompressed content before it gets its name, so
    every file in the cache is correct. An interrupted download resumes where it stopped.

    Args:
        name: ``a9a`` or ``mnist``.
        directory: the cache; see :func:`corn.learn.datasets.cache_directory`.
        base_urls: servers to try instead of those of the catalogue.
        on_progress: called as bytes arrive.
    """
    dataset = find_downloadable(name)
    for file in dataset.files:
        target = cached_path(name, file, directory=directory)
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            _fetch_file(file, target, base_urls or dataset.base_urls, on_progress)
    return cache_directory(directory) / name


def _fetch_file(
    file: RemoteFile, target: Path, base_urls: Sequence[str], on_progress: ByteCounter | None
) -> None:
    # Beside the target, so that the rename is atomic.
    partial = target.with_name(target.name + ".part")
    failures: list[str] = []
    wrong: FileFormatError | None = None
    for base_url in base_urls:
        try:
            _transfer(f"{base_url.rstrip('/')}/{file.name}", partial, on_progress)
            check_content(partial, file)
        except DownloadError as error:
            failures.append(str(error))
        except FileFormatError as error:
            # The server sent something else, such as a login page. The next attempt must not
            # resume it, and another server may have the right file.
            partial.unlink()
            wrong = error
        else:
            partial.replace(target)
            return
    if wrong is not None:
        raise wrong
    raise DownloadError(
        "; ".join(failures) + ". The bytes that arrived are kept: run the same command again to "
        "resume, or copy the files from elsewhere with: corn data import"
    )


def _transfer(url: str, partial: Path, on_progress: ByteCounter | None) -> None:
    """Append the missing bytes to ``partial``, or start over where the server cannot resume."""
    # A server that ignores the range sends the whole file with status 200, which must replace the
    # bytes that arrived and not follow them.
    have = partial.stat().st_size if partial.is_file() else 0
    try:
        with _open(url, have) as response:
            resumed = have > 0 and response.status == http.HTTPStatus.PARTIAL_CONTENT
            _receive(response, partial, have if resumed else 0, on_progress)
    except urllib.error.HTTPError as error:
        # The server has no bytes beyond those that arrived; the checksum decides if they are right.
        if error.code == _RANGE_NOT_SATISFIABLE and have > 0:
            return
        raise DownloadError(f"{url}: the server answered {error.code} {error.reason}") from error
    # urllib raises ``ValueError`` for an address that is none.
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise DownloadError(f"{url}: {reason}") from error


@contextmanager
def _open(url: str, have: int) -> Any:
    request = urllib.request.Request(url)  # noqa: S310  # URLs are the catalogue's or the caller's
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310
        yield response


def _receive(response: Any, partial: Path, have: int, on_progress: ByteCounter | None) -> None:
    length = response.headers.get("Content-Length")
    # Of a resumed transfer the header counts the remaining bytes only.
    total = None if length is None else have + int(length)
    with partial.open("ab" if have else "wb") as stream:
        while chunk := response.read(_DOWNLOAD_BYTES):
            stream.write(chunk)
            have += len(chunk)
            if on_progress:
                on_progress(partial.name.removesuffix(".part"), have, total)
    # A connection that breaks off ends the stream without an error.
    if total is not None and have < total:
        raise DownloadError(f"{response.url}: the connection ended after {have} of {total} bytes")
