"""Load a data set by name, with an embedded stand-in, loudly, where the real one is absent."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from corn.arrays import IntArray
from corn.errors import CornWarning, FileFormatError, InvalidArgumentError
from corn.learn.datasets.cache import cache_directory, cached_path, is_cached
from corn.learn.datasets.catalogue import A9A, DOWNLOADABLE, EMBEDDED, MNIST, DownloadableDataset
from corn.learn.datasets.formats import Float32Array, read_idx, read_libsvm

A9A_FEATURES = 123


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled samples.

    Attributes:
        name: what the samples really are.
        inputs: shape (samples, features), float32; images are flattened.
        targets: shape (samples,), classes 0 … num_classes − 1.
        image_shape: (height, width) where the features are an image.
        stand_in_for: the data set that was asked for and is absent; None where this is the one.
    """

    name: str
    inputs: Float32Array = field(repr=False)
    targets: IntArray = field(repr=False)
    num_classes: int
    image_shape: tuple[int, int] | None = None
    stand_in_for: str | None = None

    def __post_init__(self) -> None:
        if self.inputs.ndim != 2 or len(self.inputs) != len(self.targets) or not len(self.inputs):
            raise InvalidArgumentError(
                "inputs must have a row for each target and at least one, found shapes "
                f"{self.inputs.shape} and {self.targets.shape}"
            )
        if self.targets.min() < 0 or self.targets.max() >= self.num_classes:
            raise InvalidArgumentError(
                f"targets must be in 0 … {self.num_classes - 1}, found {self.targets.min()} to "
                f"{self.targets.max()}"
            )

    @property
    def num_features(self) -> int:
        """The number of features of a sample."""
        return int(self.inputs.shape[1])

    def describe(self) -> str:
        """Say in one line what this is, and for what it stands in."""
        what = f"{self.name}: {len(self.inputs)} samples, {self.num_features} features"
        if self.stand_in_for is None:
            return what
        return f"{what} (STANDS IN FOR {self.stand_in_for}, which is absent)"


def load_dataset(
    name: str, *, directory: Path | str | None = None, stand_in: bool = True
) -> Dataset:
    """Load ``a9a``, ``mnist``, ``digits`` or ``breast-cancer``: training and test part as one.

    The first two are read from the cache (``corn data get``). Where one is absent, its stand-in
    among the other two is returned with a ``CornWarning`` and its ``stand_in_for`` set; with
    ``stand_in=False`` that is an error.

    >>> load_dataset("digits").describe()
    'digits: 1797 samples, 64 features'
    """
    if name in EMBEDDED:
        return _EMBEDDED_LOADERS[name](None)
    if name not in DOWNLOADABLE:
        raise InvalidArgumentError(
            f"data set must be one of {', '.join([*DOWNLOADABLE, *EMBEDDED])}, found {name!r}"
        )
    dataset = DOWNLOADABLE[name]
    if is_cached(dataset, directory=directory):
        return _CACHED_LOADERS[name](directory)
    return _stand_in(dataset, directory, stand_in)


def _stand_in(dataset: DownloadableDataset, directory: Path | str | None, allowed: bool) -> Dataset:
    absent = f"{dataset.name} is not in {cache_directory(directory)}"
    remedy = f"get it with: corn data get {dataset.name}"
    if not allowed:
        raise FileFormatError(f"{absent}; {remedy}")
    warnings.warn(
        f"{absent}; {dataset.stand_in} STANDS IN FOR IT, so results are not {dataset.name}'s; "
        f"{remedy}",
        CornWarning,
        stacklevel=3,
    )
    return _EMBEDDED_LOADERS[dataset.stand_in](dataset.name)


def _load_a9a(directory: Path | str | None) -> Dataset:
    parts = [
        read_libsvm(cached_path("a9a", file, directory=directory), num_features=A9A_FEATURES)
        for file in A9A.files
    ]
    inputs = np.concatenate([features for features, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    return Dataset("a9a", inputs, (labels > 0).astype(np.int64), 2)


def _load_mnist(directory: Path | str | None) -> Dataset:
    paths = [cached_path("mnist", file, directory=directory) for file in MNIST.files]
    images = np.concatenate([read_idx(paths[0]), read_idx(paths[2])])
    labels = np.concatenate([read_idx(paths[1]), read_idx(paths[3])])
    inputs = images.reshape(len(images), -1).astype(np.float32) / np.float32(255)
    return Dataset("mnist", inputs, labels.astype(np.int64), 10, (28, 28))


def _load_digits(stand_in_for: str | None) -> Dataset:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    inputs = (bunch.data / 16).astype(np.float32)
    return Dataset("digits", inputs, bunch.target.astype(np.int64), 10, (8, 8), stand_in_for)


def _load_breast_cancer(stand_in_for: str | None) -> Dataset:
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    # Scales differ by a factor of 10⁵ between measurements, which one clipping norm cannot serve.
    standardised = (bunch.data - bunch.data.mean(axis=0)) / bunch.data.std(axis=0)
    targets = bunch.target.astype(np.int64)
    return Dataset("breast-cancer", standardised.astype(np.float32), targets, 2, None, stand_in_for)


_CACHED_LOADERS: dict[str, Callable[[Path | str | None], Dataset]] = {
    "a9a": _load_a9a,
    "mnist": _load_mnist,
}
_EMBEDDED_LOADERS: dict[str, Callable[[str | None], Dataset]] = {
    "digits": _load_digits,
    "breast-cancer": _load_breast_cancer,
}
