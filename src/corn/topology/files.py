"""Graphs and matrices from files: edge list, GraphML, node-link JSON, CSV and ``.npy``."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from tokenize import TokenError
from typing import Any
from xml.etree.ElementTree import ParseError

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from corn.checks import FloatArray
from corn.errors import FileFormatError, make_printable
from corn.parsing import MAX_DIGITS, quote, read_json

EDGE_LIST_SUFFIXES = (".edges", ".edgelist", ".txt")
GRAPH_SUFFIXES = (*EDGE_LIST_SUFFIXES, ".graphml", ".json")
MATRIX_SUFFIXES = (".csv", ".npy")
SUFFIXES = GRAPH_SUFFIXES + MATRIX_SUFFIXES

_MAX_REASON = 200
_MAX_BYTES = 1 << 30  # of a graph in JSON, with millions of links
# Exceptions that networkx and NumPy raise for files that are not in the expected format.
_GRAPH_ERRORS = (ParseError, nx.NetworkXError, LookupError, ValueError, TypeError, AttributeError)
_MATRIX_ERRORS = (ValueError, TypeError, EOFError, OverflowError, SyntaxError, TokenError)


def read_graph(path: Path) -> nx.Graph:
    """Read a graph file by its suffix: a graph of any labels, not yet checked.

    - ``.edges``, ``.edgelist``, ``.txt``: two labels per line and an optional weight, separated by
      blanks or commas. ``#`` starts a comment, and so does ``%`` at the start of a line. The empty
      data that networkx writes (``0 1 {}``) is skipped;
    - ``.graphml``; ``.json`` in networkx's node-link form.
    """
    _require_file(path, SUFFIXES, kind="graph")
    if path.suffix in EDGE_LIST_SUFFIXES:
        return _read_edge_list(path)
    return _read_graphml(path) if path.suffix == ".graphml" else _read_node_link(path)


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
        raise FileFormatError(f"{path}: not a matrix of numbers: {_explain(error)}") from error
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


def _read_edge_list(path: Path) -> nx.Graph:
    graph = nx.Graph()
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        fields = line.partition("#")[0].replace(",", " ").split()
        fields = [] if line.lstrip().startswith("%") else fields
        fields = fields[:-1] if fields[2:] == ["{}"] else fields
        if not fields:
            continue
        is_edge = len(fields) == 2 or (len(fields) == 3 and _is_number(fields[2]))
        if not is_edge:
            raise FileFormatError(
                f"{path}, line {number}: an edge is two labels and perhaps a weight, found "
                f"{quote(line)}"
            )
        weight = {"weight": float(fields[2])} if len(fields) == 3 else {}
        graph.add_edge(*fields[:2], **weight)
    return _number_labels(graph)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_graphml(path: Path) -> nx.Graph:
    try:
        with warnings.catch_warnings():  # about attributes, which are not used
            warnings.simplefilter("ignore")
            graph: nx.Graph = nx.read_graphml(path)
    except _GRAPH_ERRORS as error:
        raise FileFormatError(f"{path}: not valid GraphML: {_explain(error)}") from error
    return _number_labels(graph)


def _number_labels(graph: nx.Graph) -> nx.Graph:
    """Turn labels into numbers if all are numbers; those of too many digits count as names."""
    labels = [str(label) for label in graph]
    if all(label.isdecimal() and len(label) <= MAX_DIGITS for label in labels):
        return nx.relabel_nodes(graph, {label: int(str(label)) for label in graph})
    return graph


def _read_node_link(path: Path) -> nx.Graph:
    kind = "a graph in node-link JSON (keys 'nodes' and 'edges' or 'links')"
    data = read_json(path, kind=kind, max_bytes=_MAX_BYTES)
    if not isinstance(data, dict):
        raise FileFormatError(f"{path}: not {kind}: found {quote(data)}")
    try:
        edges = "links" if "links" in data else "edges"
        named = {node["id"] for node in data["nodes"]}
        # Attributes of the graph as a whole are not used, so they are not checked.
        graph: nx.Graph = nx.node_link_graph({**data, "graph": {}}, edges=edges)
    except _GRAPH_ERRORS as error:
        raise FileFormatError(f"{path}: not {kind}: {_explain(error)}") from error
    # networkx adds nodes that only edges mention, so a misspelt name would become an agent.
    unknown = sorted(str(node) for node in graph if node not in named)
    if unknown:
        who = make_printable(", ".join(unknown[:5]), limit=_MAX_REASON)
        raise FileFormatError(f"{path}: every edge must join listed nodes, but {who} is not listed")
    return graph


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path}: not a text file: {error.reason}") from error


def _explain(error: Exception) -> str:
    return make_printable(str(error) or type(error).__name__, limit=_MAX_REASON)
