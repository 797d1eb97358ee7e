"""Which data sets there are: their files, where to get them, and what they must contain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from corn.errors import InvalidArgumentError

FileFormat: TypeAlias = Literal["libsvm", "idx"]


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
    """A data set that is fetched once and kept in the cache.

    Attributes:
        files: the training file or files first, then those of the test set; CorN joins them and
            splits anew, as the paper does.
        base_urls: where the files are, tried in this order.
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
    # The authors' own server has refused downloads by programs for years; PyTorch's mirror is what
    # everyone uses, and the checksums are the originals'.
    base_urls=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://yann.lecun.com/exdb/mnist/",
    ),
    stand_in="digits",
    description="70,000 handwritten digits of 28×28 grey levels",
)

DOWNLOADABLE = {dataset.name: dataset for dataset in (A9A, MNIST)}
"""What ``corn data get`` fetches."""

EMBEDDED = {
    "breast-cancer": "is a tumour malignant? 569 rows of 30 measurements (scikit-learn)",
    "digits": "1,797 handwritten digits of 8×8 grey levels (scikit-learn)",
}
"""What comes with scikit-learn and is always there."""


def find_downloadable(name: str) -> DownloadableDataset:
    """Return the entry of a data set that can be fetched, or say which can."""
    if name not in DOWNLOADABLE:
        hint = f"; {name} is always there" if name in EMBEDDED else ""
        raise InvalidArgumentError(
            f"data set must be one of {', '.join(DOWNLOADABLE)}, found {name!r}{hint}"
        )
    return DOWNLOADABLE[name]
