"""Loaders of data sets by name, with an embedded stand-in and a warning where one is absent."""

from __future__ import annotations

import math
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from corn.arrays import IntArray
from corn.checks import require, require_choice
from corn.errors import CornWarning, FileFormatError
from corn.learn.datasets.catalogue import (
    A9A,
    DOWNLOADABLE,
    EMBEDDED,
    MNIST,
    DownloadableDataset,
    cache_directory,
    cached_path,
    is_cached,
    open_content,
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
