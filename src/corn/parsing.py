"""Strict parsing of JSON from others, and of records by the types of their fields.

Files and messages of other agents can contain anything. Every defect becomes one
``InvalidArgumentError``, or for files one ``FileFormatError``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from corn.checks import FloatArray
from corn.errors import FileFormatError, InvalidArgumentError, make_printable

MAX_DIGITS = 20  # of a whole number: enough for 64 bits; longer ones overflow as floats

_MAX_DEPTH = 20
_MAX_FILE_BYTES, _MAX_MESSAGE_BYTES = 1 << 24, 1 << 20
_MAX_QUOTED = 60
_PORT_DIGITS = 5

DEFAULT_PORT = 29500
"""The port of an agent, unless its address names another."""


def read_json(path: Path, *, kind: str, max_bytes: int = _MAX_FILE_BYTES) -> Any:
    """Read a JSON file of at most 16 MiB; errors call it ``kind``, for example ``a plan``."""
    try:
        with path.open("rb") as file:
            # One byte more than allowed reveals a file that is too long, without reading all of it.
            data = file.read(max_bytes + 1)
    except FileNotFoundError as error:
        raise FileFormatError(f"{path}: no such file") from error
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return parse_json(data, max_bytes=max_bytes)
    except InvalidArgumentError as error:
        raise FileFormatError(f"{path}: not {kind}, or cut short: {error}") from error


def parse_json(data: bytes, *, max_bytes: int = _MAX_MESSAGE_BYTES) -> Any:
    """Parse JSON in UTF-8, or raise ``InvalidArgumentError``.

    Keys that occur twice, numbers that are not finite or too long, text that is not Unicode, deep
    nesting, and more than ``max_bytes`` are refused.
    """
    if len(data) > max_bytes:
        raise InvalidArgumentError(f"more than {max_bytes:,} bytes")
    try:
        document = json.loads(
            data.decode("utf-8-sig"),
            # Python keeps the last of two equal keys, other parsers the first: such a document
            # would mean different things to different readers.
            object_pairs_hook=_unique_keys,
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_parse_float,
        )
    except UnicodeDecodeError as error:
        raise InvalidArgumentError("not text in UTF-8") from error
    except RecursionError as error:
        raise InvalidArgumentError(f"nested more than {_MAX_DEPTH} deep") from error
    except json.JSONDecodeError as error:
        raise InvalidArgumentError(f"not JSON: {error}") from error
    _check_values(document)
    return document


def build(hint: Any, value: object, name: str) -> Any:
    """Convert a JSON value to a declared type; errors call it ``name``.

    Types are str, int, float, bool, None, literals, unions, sequences (as tuples), mappings with
    strings as keys, arrays of floats, dataclasses of all these, and ``object`` for any value. A
    dataclass needs all its fields and no others, and checks their values itself.
    """
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        names = [field.name for field in dataclasses.fields(hint)]
        return hint(**build_fields({name: hints[name] for name in names}, value, name))  # type: ignore[operator]
    # The types of a record's fields are the schema of its file, so that both cannot differ.
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for option in options:
            with suppress(InvalidArgumentError):
                return build(option, value, name)
    elif origin is np.ndarray:
        return _build_array(value, name)
    elif origin in (tuple, Sequence) and isinstance(value, list):
        if _is_table(value, options):
            return tuple(map(tuple, value))
        is_fixed = origin is tuple and options[-1] is not Ellipsis
        items = list(options) if is_fixed else [options[0]] * len(value)
        if len(items) == len(value):
            return tuple(build(item, part, name) for item, part in zip(items, value, strict=True))
    elif origin is Mapping and isinstance(value, dict):
        return {key: build(options[1], part, name) for key, part in value.items()}
    elif _fits(value, hint):
        return value
    raise InvalidArgumentError(f"{name} cannot be {quote(value)}")


def build_fields(hints: Mapping[str, Any], value: object, name: str) -> dict[str, Any]:
    """Convert a JSON object to values of declared types: all of these keys, and no others."""
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{name} must be a JSON object, found {quote(value)}")
    for key in hints:
        if key not in value:
            raise InvalidArgumentError(f"{name}: {key!r} is missing")
    for key in value:
        if key not in hints:
            raise InvalidArgumentError(f"{name}: unknown entry {quote(key)}")
    return {key: build(hint, value[key], key) for key, hint in hints.items()}


def parse_hex(text: str, name: str) -> bytes:
    """Parse bytes in hexadecimal; errors call them ``name``."""
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise InvalidArgumentError(f"{name} must be in hexadecimal, found {quote(text)}") from error


def parse_address(text: str, *, default_port: int | None = None) -> tuple[str, int]:
    """Return HOST:PORT as a pair; an IPv6 address is in brackets.

    >>> parse_address("10.0.0.1:41431"), parse_address("[::1]", default_port=29500)
    (('10.0.0.1', 41431), ('::1', 29500))
    """
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, "" if default_port is None else str(default_port)
    # Brackets belong to the text of an address only.
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    # Five digits, because Python refuses to read integers of thousands of them.
    is_number = port.isdecimal() and len(port) <= _PORT_DIGITS
    if not host or (":" in host) != is_bracketed or not is_number or not 0 < int(port) < 1 << 16:
        raise InvalidArgumentError(
            f"an address must be HOST:PORT, found {quote(text)}: try 10.0.0.1:{DEFAULT_PORT}, or "
            f"[::1]:{DEFAULT_PORT}"
        )
    return host, int(port)


def format_address(address: tuple[str, int]) -> str:
    """Return an address as HOST:PORT, with brackets around an IPv6 address."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def quote(value: object) -> str:
    """Return a short text of a value that is safe to print."""
    return make_printable(reprlib.repr(value), limit=_MAX_QUOTED)


def _is_table(rows: list[Any], options: tuple[Any, ...]) -> bool:
    """Return whether rows of whole numbers fit ``tuple[row, ...]``, of which plans have millions.

    Anything else is left to the general rules, which find what is wrong.
    """
    row = options[0]
    inner = get_args(options[0])
    if options[1:] != (Ellipsis,) or get_origin(row) is not tuple or inner[0] is not int:
        return False
    # Not by isinstance: True is an int to Python.
    is_lists = set(map(type, rows)) <= {list}
    if not is_lists or set(map(type, chain.from_iterable(rows))) - {int}:
        return False
    if inner[1:] == (Ellipsis,):
        return True
    return set(inner) == {int} and set(map(len, rows)) <= {len(inner)}


def _build_array(value: object, name: str) -> FloatArray:
    try:
        found = np.asarray(value)
    except ValueError as error:
        raise InvalidArgumentError(f"{name} has rows of different lengths") from error
    # NumPy would also turn texts and booleans into numbers.
    if found.dtype.kind not in "iuf":
        raise InvalidArgumentError(f"{name} must be numbers, found {quote(value)}")
    return found.astype(np.float64)


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if hint in (int, float):
        # True is an int to Python, but not a number in JSON.
        accepted = (int,) if hint is int else (int, float)
        return isinstance(value, accepted) and not isinstance(value, bool)
    return hint in (str, bool, NoneType, object) and isinstance(value, hint)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
    raise InvalidArgumentError(f"the key {quote(twice)} occurs twice")


def _parse_int(text: str) -> int:
    # Checked before it is converted, which takes quadratic time.
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise InvalidArgumentError(f"a whole number of more than {MAX_DIGITS} digits")
    return int(text)


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise InvalidArgumentError(f"{quote(text)} is not a finite number")
    return number


def _check_values(value: object, depth: int = 0) -> None:
    """Raise for text that is not Unicode, and for values nested deeper than any record."""
    if isinstance(value, dict | list) and depth >= _MAX_DEPTH:
        raise InvalidArgumentError(f"nested more than {_MAX_DEPTH} deep")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()  # fails for halves of surrogate pairs, which cannot be printed
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"{quote(value)} is not Unicode text") from error
    elif isinstance(value, dict):
        for key, part in value.items():
            _check_values(key, depth)
            _check_values(part, depth + 1)
    elif isinstance(value, list):
        for part in value:
            # Plans have millions of numbers.
            if type(part) is not int and type(part) is not float:
                _check_values(part, depth + 1)
