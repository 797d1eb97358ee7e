"""Mutations of valid bytes, of the kinds that files and messages of others can have."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from corn.errors import CornError

NASTY_TEXTS = [
    "",
    "\x1b[2J",
    "a\nb\rc",
    "\u202eevil",
    "\x00\x07",
    "\ud800",
    "9" * 5000,
    "x" * 10**4,
]
ODD_VALUES: list[Any] = [
    *NASTY_TEXTS,
    None,
    True,
    -1,
    0.5,
    10**19,
    10**400,
    1e308,
    float("nan"),
    float("-inf"),
    [],
    {},
    [[1.0]],
    {"\x1b[2J": 1},
    list(range(2000)),
]


def mutate(content: bytes, random: Random) -> bytes:
    """Damage bytes in one way: their structure if they are JSON, or the bytes themselves."""
    ways = [
        _flip_bit,
        _truncate,
        _insert,
        _nest,
        _swap_value,
        _swap_value,
        _swap_value,
        _repeat_key,
    ]
    return random.choice(ways)(content, random)


def find_complaint(function: Callable[..., object], *arguments: object) -> CornError | None:
    """Return the ``CornError`` that a call raises, if any; other exceptions pass."""
    try:
        function(*arguments)
    except CornError as error:
        return error
    return None


def is_clear(error: BaseException, *, limit: int = 500) -> bool:
    """Return whether a message is one printable line of fewer characters than the limit."""
    return str(error).isprintable() and 0 < len(str(error)) < limit


def _flip_bit(content: bytes, random: Random) -> bytes:
    data = bytearray(content)
    for _ in range(random.randint(1, 3)):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(data)


def _truncate(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(len(content))]


def _insert(content: bytes, random: Random) -> bytes:
    at = random.randrange(len(content))
    junk = random.choice([*(text.encode("utf-8", "replace") for text in NASTY_TEXTS), b"\xff\xfe"])
    return content[:at] + junk + content[at:]


def _nest(content: bytes, random: Random) -> bytes:
    depth = random.choice([25, 900, 100_000])
    return random.choice([b"[" * depth, b'{"a":' * depth, b"[" * depth + content + b"]" * depth])


def _swap_value(content: bytes, random: Random) -> bytes:
    """Replace, add or remove one value anywhere."""
    try:
        document = json.loads(content)
    except ValueError:
        return _insert(content, random)
    node, places = document, []
    while isinstance(node, dict | list) and node:
        key = random.choice(list(node) if isinstance(node, dict) else list(range(len(node))))
        places.append((node, key))
        node = node[key]
    if not places:
        return json.dumps(random.choice(ODD_VALUES)).encode()
    node, key = random.choice(places)
    action = random.randrange(5)
    if action == 0:
        del node[key]
    elif action == 1 and isinstance(node, dict):
        node[random.choice(["extra", "\x1b[2J", "\ud800"])] = 1
    else:
        node[key] = random.choice(ODD_VALUES)
    return json.dumps(document).encode()


def _repeat_key(content: bytes, random: Random) -> bytes:
    return content.replace(b"{", random.choice([b'{"a":1,"a":2,', b'{"\\u001b":1,"\\u001b":2,']), 1)
