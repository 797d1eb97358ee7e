"""The workloads by name, and public data sets: files, pinned content, cache. Without torch."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import os
import struct
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from corn.checks import IntArray, require_choice
from corn.errors import FileFormatError
from corn.files import write_file
from corn.learn.schedule import ScheduleName

WorkloadName: TypeAlias = Literal[
    "quadratic", "a9a", "mnist", "digits", "breast-cancer", "synthetic"
]
ModelName: TypeAlias = Literal["linear", "network", "cnn"]

WORKLOADS: tuple[str, ...] = get_args(WorkloadName)

# As in the paper's experiments.
PAPER_PARTITION = "dirichlet:10"
USUAL_BATCH_SIZE = 128


def usual_schedule(workload: str) -> ScheduleName:
    """Return the paper's step-size schedule: 1/√t for the quadratic, constant for data sets."""
    return "inverse-sqrt" if workload == "quadratic" else "constant"


@dataclass(frozen=True)
class DownloadableDataset:
    """A data set in the folder ``url``, which is downloaded once and kept in the cache.

    ``files`` has the SHA-256 of the **decompressed** content of each file, training files first.
    """

    name: str
    files: dict[str, str]
    url: str


A9A = DownloadableDataset(
    name="a9a",
    files={
        "a9a": "f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906",
        "a9a.t": "1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9",
    },
    url="https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/",
)

_MNIST_FILES = {
    "train-images-idx3": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

MNIST = DownloadableDataset(
    name="mnist",
    files={f"{name}-ubyte.gz": sha256 for name, sha256 in _MNIST_FILES.items()},
    url="https://ossci-datasets.s3.amazonaws.com/mnist/",
)

DOWNLOADABLE = {dataset.name: dataset for dataset in (A9A, MNIST)}
# They come with scikit-learn or are drawn, and need no download.
EMBEDDED = ("breast-cancer", "digits", "synthetic")


def cache_directory(directory: Path | str | None = None) -> Path:
    """Return the directory given, else that of ``CORN_DATA``, else the user's cache directory."""
    chosen = directory or os.environ.get("CORN_DATA")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "corn"


def is_cached(dataset: DownloadableDataset, *, directory: Path | str | None = None) -> bool:
    """Return whether every file is in the cache. Its content was checked on arrival."""
    place = cache_directory(directory) / dataset.name
    return all((place / file).is_file() for file in dataset.files)


def fetch_dataset(
    name: str, *, source: Path | str | None = None, directory: Path | str | None = None
) -> Path:
    """Get missing files of a data set, from a folder or its server, and return their directory."""
    dataset = DOWNLOADABLE[require_choice("data set", name, DOWNLOADABLE)]
    place = cache_directory(directory) / name
    place.mkdir(parents=True, exist_ok=True)
    for file, sha256 in dataset.files.items():
        if (place / file).is_file():
            continue
        origin = str(source or dataset.url)
        try:
            content = _find(Path(source), file) if source else _download(origin + file)
            found = hashlib.sha256(_decompress(content)).hexdigest()
        except (OSError, EOFError, zlib.error, http.client.HTTPException) as error:
            raise FileFormatError(
                f"{origin}: {error}. Get {file} from elsewhere: corn data get {name} FOLDER"
            ) from error
        if found != sha256:
            raise FileFormatError(
                f"{origin}: the sha256 of {file} must be {sha256[:16]}…, found {found[:16]}…"
            )
        write_file(place / file, content)
    return place


def _download(url: str) -> bytes:
    # URLs are the catalogue's.
    with urllib.request.urlopen(url, timeout=30) as response:  # noqa: S310
        content: bytes = response.read()
    return content


def _find(folder: Path, file: str) -> bytes:
    plain = file.removesuffix(".gz")
    for path in (folder / plain, folder / f"{plain}.gz"):
        if path.is_file():
            return path.read_bytes()
    raise FileNotFoundError(f"must be a directory with a file {file}, compressed or not")


def _decompress(content: bytes) -> bytes:
    # By content: servers and archives differ in whether they decompress ``.gz``.
    return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content


Float32Array: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Inputs (samples, features) in float32, and classes from 0; images are flattened."""

    inputs: Float32Array
    targets: IntArray
    num_classes: int
    image_shape: tuple[int, int] | None = None


def load_dataset(name: str, *, directory: Path | str | None = None) -> Dataset:
    """Load ``a9a``, ``mnist``, ``digits``, ``breast-cancer`` or ``synthetic``: all parts as one.

    The first two are read from the cache (``corn data get``).
    """
    require_choice("data set", name, [*DOWNLOADABLE, *EMBEDDED])
    place = cache_directory(directory) / name
    if name in DOWNLOADABLE and not is_cached(DOWNLOADABLE[name], directory=directory):
        raise FileFormatError(
            f"{name} is not in {place.parent}; download it with: corn data get {name}"
        )
    return _LOADERS[name](place)


def _load_a9a(place: Path) -> Dataset:
    parts = [read_libsvm(place / file, num_features=123) for file in A9A.files]
    inputs = np.concatenate([features for features, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    return Dataset(inputs, (labels > 0).astype(np.int64), 2)


def _load_mnist(place: Path) -> Dataset:
    first_images, first_labels, images, labels = [read_idx(place / file) for file in MNIST.files]
    pixels = np.concatenate([first_images, images])
    inputs = pixels.reshape(len(pixels), -1).astype(np.float32) / np.float32(255)
    return Dataset(inputs, np.concatenate([first_labels, labels]).astype(np.int64), 10, (28, 28))


def _load_digits(_: Path) -> Dataset:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return Dataset((bunch.data / 16).astype(np.float32), bunch.target.astype(np.int64), 10, (8, 8))


def _load_breast_cancer(_: Path) -> Dataset:
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    # Features differ by a factor of 10⁵: one clipping norm would keep gradients of a few only.
    standardised = (bunch.data - bunch.data.mean(axis=0)) / bunch.data.std(axis=0)
    return Dataset(standardised.astype(np.float32), bunch.target.astype(np.int64), 2)


def _draw_synthetic(_: Path) -> Dataset:
    """Draw labels from logistic regression on normal features, always the same."""
    # A fixed seed: agents in several processes must draw the same rows.
    random = np.random.default_rng(0)
    inputs = random.standard_normal((200_000, 20), dtype=np.float32)
    logits = inputs @ random.standard_normal(20, dtype=np.float32)
    return Dataset(inputs, (random.random(200_000) < 1 / (1 + np.exp(-logits))).astype(np.int64), 2)


_LOADERS: dict[str, Callable[[Path], Dataset]] = {
    "a9a": _load_a9a,
    "mnist": _load_mnist,
    "digits": _load_digits,
    "breast-cancer": _load_breast_cancer,
    "synthetic": _draw_synthetic,
}


def read_libsvm(path: Path, *, num_features: int) -> tuple[Float32Array, IntArray]:
    """Read rows of ``label index:value …``: features (rows, num_features), labels (rows,)."""
    from sklearn.datasets import load_svmlight_file

    try:
        stream = io.BytesIO(_decompress(path.read_bytes()))
        features, labels = load_svmlight_file(stream, n_features=num_features, dtype=np.float32)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise FileFormatError(f"{path}: not a LIBSVM file: {error}") from error
    return features.toarray(), labels.astype(np.int64)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an idx file of bytes, compressed or not, as an array of the shape in its header."""
    try:
        content = _decompress(path.read_bytes())
        # Two zero bytes, the type, the number of dimensions, then each dimension in 4 bytes.
        _, kind, dimensions = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{dimensions}I", content, 4)
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise FileFormatError(f"{path}: not an idx file of bytes: {error}") from error
    if kind != 0x08:
        raise FileFormatError(f"{path}: not an idx file of bytes: its type is {kind}")
    return values
