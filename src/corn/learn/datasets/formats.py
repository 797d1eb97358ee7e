"""Read the two file formats that data sets come in: LIBSVM text and MNIST's idx."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from corn.arrays import IntArray
from corn.errors import FileFormatError
from corn.learn.datasets.cache import open_content

Float32Array: TypeAlias = NDArray[np.float32]

_IDX_UNSIGNED_BYTE = 0x08


def read_libsvm(path: Path, *, num_features: int) -> tuple[Float32Array, IntArray]:
    """Read rows of ``label index:value …``: features (rows, num_features), labels (rows,).

    The number of features is stated, never inferred: a9a's feature 123 does not occur in its test
    file, which would come out a column short.
    """
    # Scikit-learn takes a second to import, which commands without data need not wait for.
    from sklearn.datasets import load_svmlight_file

    try:
        with open_content(path) as stream:  # compressed or not, whatever its name
            features, labels = load_svmlight_file(stream, n_features=num_features, dtype=np.float32)
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path}: not a LIBSVM file: {error}") from error
    return features.toarray(), labels.astype(np.int64)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an idx file of bytes, compressed or not, as an array of the shape its header states."""
    with open_content(path) as stream:
        content = stream.read()
    if len(content) < 4 or content[:3] != bytes([0, 0, _IDX_UNSIGNED_BYTE]):
        raise FileFormatError(f"{path}: not an idx file of bytes: it begins {content[:4].hex(' ')}")
    header = 4 + 4 * content[3]
    if len(content) < header:
        raise FileFormatError(f"{path}: the idx header is cut off")
    shape: tuple[Any, ...] = struct.unpack(f">{content[3]}I", content[4:header])
    if len(content) - header != int(np.prod(shape)):
        raise FileFormatError(
            f"{path}: its header promises {shape} bytes, found {len(content) - header}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
