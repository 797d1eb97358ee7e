"""Graphs and matrices from files: edge lists, CSV and ``.npy``."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from tokenize import TokenError
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from corn.checks import FloatArray
from corn.errors import FileFormatError, make_printable
from corn.parsing import MAX_DIGITS, quote

EDGE_LIST_SUFFIXES = (".edges", ".edgelist", ".txt")
MATRIX_SUFFIXES = (".csv", ".npy")
SUFFIXES = EDGE_LIST_SUFFIXES + MATRIX_SUFFIXES

_MAX_REASON = 200
# Exceptions that NumPy raises for files that are not in the expected format.
_MATRIX_ERRORS = (ValueError, TypeError, EOFError, OverflowError, SyntaxError, TokenError)


def read_edge_list(path: Path) -> nx.Graph:
    """Read a graph of any labels, not yet checked: two labels per line, and comments after ``#``.

    Blanks or a comma separate the two.
    """
    _require_file(path, SUFFIXES, kind="graph")
    graph = nx.Graph()
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        fields = line.partition("#")[0].replace(",", " ").split()
        if len(fields) not in (0, 2):
            raise FileFormatError(
                f"{path}, line {number}: an edge is two labels, found {quote(line)}"
            )
        if fields:
            graph.add_edge(*fields)
    # Numbers if all are; those of too many digits count as names.
    if all(label.isdecimal() and len(label) <= MAX_DIGITS for label in graph):
        return nx.relabel_nodes(graph, int)
    return graph


def read_matrix(path: Path, *, name: str = "a matrix", advice: str = "") -> FloatArray:
    """Read a square matrix of numbers from ``.csv`` (comma-separated, no header) or ``.npy``.

    ``name`` is used in errors, for example ``a covariance``; ``advice`` follows if the shape is
    wrong.
    """
    _require_file(path, MATRIX_SUFFIXES, kind="matrix")
    try:
        matrix = _read_npy(path) if path.suffix == ".npy" else _read_csv(path)
        matrix = matrix.astype(np.float64, casting="same_kind")  # no complex numbers
    except _MATRIX_ERRORS as error:
        why = make_printable(str(error) or type(error).__name__, limit=_MAX_REASON)
        raise FileFormatError(f"{path}: not a matrix of numbers: {why}") from error
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        hint = f"; {advice}" if advice else ""
        raise FileFormatError(
            f"{path}: {name} must be square and not empty, found shape {matrix.shape}{hint}"
        )
    return matrix


def _read_npy(path: Path) -> NDArray[Any]:
    with path.open("rb") as file:
        magic = file.read(len(np.lib.format.MAGIC_PREFIX))
    # np.load would also open zip archives, which can decompress to any size.
    if magic != np.lib.format.MAGIC_PREFIX:
        raise ValueError("not in NumPy's format")
    # Mapped, because NumPy would otherwise allocate the size that a header claims.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _read_csv(path: Path) -> NDArray[Any]:
    lines = [line for line in _read_text(path).splitlines() if line.partition("#")[0].strip()]
    return np.loadtxt(lines, delimiter=",", ndmin=2) if lines else np.empty((0, 0))


def _require_file(path: Path, suffixes: tuple[str, ...], *, kind: str) -> None:
    if path.suffix not in suffixes:
        raise FileFormatError(
            f"{path}: unknown kind of {kind} file; accepted are {', '.join(suffixes)}"
        )
    # Not Path's own methods, which raise for names that are too long.
    if not os.path.isfile(path):
        raise FileFormatError(f"{path}: {'a folder' if os.path.isdir(path) else 'no such file'}")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path}: not a text file: {error.reason}") from error
