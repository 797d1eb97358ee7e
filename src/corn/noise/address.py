"""Addresses of noise values: the owner of a stream, the run, the step, the stream, the coordinate.

The same address gives the same value on any machine, whichever range of coordinates is drawn. So
nothing is stored, memory does not grow with the number of steps, and the noise of any past step can
be drawn again.

**Never release two messages with the noise of one address**: their difference is free of noise. The
release ledger (:mod:`corn.noise.ledger`) prevents that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from corn.checks import require, require_count
from corn.errors import InvalidArgumentError

NormalArray: TypeAlias = NDArray[np.floating[Any]]

# Streams end here, so that no counter of a keystream can wrap around and repeat its words.
MAX_COORDINATE = 1 << 62
FINGERPRINT_BYTES = 32
NONCE_BYTES = 32

_MAX_NUMBER = (1 << 63) - 1
_LENGTH_BYTES = 4  # part of every address and key: another number would change all of them


@dataclass(frozen=True)
class Owner:
    """The agents that can draw a stream: one agent for private noise, or a seed group.

    Attributes:
        members: the agents, in increasing order.
        group: the number of the seed group in its decomposition; None for private noise.
    """

    members: tuple[int, ...]
    group: int | None = None

    def __post_init__(self) -> None:
        # One order only: the members are part of the address, so two orders would be two streams.
        is_sorted = list(self.members) == sorted(set(self.members)) and bool(self.members)
        require(is_sorted, "members", "distinct agents in increasing order", self.members)
        is_owned = self.group is not None or len(self.members) == 1
        require(is_owned, "members", "one agent for private noise", self.members)

    def __str__(self) -> str:
        if self.group is None:
            return f"agent {self.members[0]}'s private noise"
        return f"seed group {self.group} of agents {', '.join(map(str, self.members))}"

    @cached_property
    def encoded(self) -> bytes:
        """A byte string that no other owner has."""
        # Members are encoded as one field, so that they cannot be mistaken for a group's number.
        kind = ("private",) if self.group is None else ("group", self.group)
        return encode_fields(*kind, encode_fields(*self.members))


@dataclass(frozen=True)
class StreamAddress:
    """The address of a stream: everything but the coordinate.

    Attributes:
        owner: the agents that can draw it.
        nonce: 32 bytes that are new for every run.
        step: the step of the run, from 0.
        stream: the column of the group's factor; 0 for private noise.
    """

    owner: Owner
    nonce: bytes
    step: int
    stream: int = 0

    def __post_init__(self) -> None:
        check_nonce(self.nonce)
        for name, number in (("step", self.step), ("stream", self.stream)):
            # An address is made for every stream of every step, so the usual case is kept cheap.
            if type(number) is not int or not 0 <= number <= _MAX_NUMBER:
                require_count(name, number, least=0, most=_MAX_NUMBER)

    def encode(self, kind: str) -> bytes:
        """Return bytes that no other address, and no other kind of source at this one, has."""
        return encode_fields(kind, self.owner.encoded, self.nonce, self.step, self.stream)


Terms: TypeAlias = Sequence[tuple[float, StreamAddress]]
"""Streams and their weights in a sum."""


class NoiseSource(ABC):
    """A source of streams: secure, simulated, or a wrapper around one of them."""

    def fill(self, out: NormalArray, address: StreamAddress, *, start: int = 0) -> None:
        """Fill ``out``, float64, with the stream's coordinates from ``start`` on."""
        self.fill_sum(out, [(1.0, address)], start=start)

    @abstractmethod
    def fill_sum(self, out: NormalArray, terms: Terms, *, start: int = 0) -> None:
        """Fill ``out`` with a sum of streams, each times its weight, term by term in this order."""


def check_range(out: NormalArray, start: int) -> int:
    """Return the end of a range of ``len(out)`` coordinates from ``start`` on, or raise."""
    require(out.ndim == 1, "out", "an array of one dimension", f"shape {out.shape}")
    require(out.flags.writeable, "out", "writable", "a read-only array")
    stop = start + len(out)
    if start < 0 or stop > MAX_COORDINATE:
        raise InvalidArgumentError(
            f"coordinates must be in [0, 2⁶²), found start={start} and stop={stop}"
        )
    return stop


def find_overlap(
    values: NormalArray, first: int, out: NormalArray, start: int
) -> tuple[NormalArray, NormalArray]:
    """Return views of the coordinates that ``values``, from ``first``, and ``out`` have in common.

    ``out`` begins at coordinate ``start``.

    >>> import numpy as np
    >>> found, wanted = find_overlap(np.arange(4.0), 10, np.zeros(3), 12)
    >>> found.tolist(), wanted.shape
    ([2.0, 3.0], (2,))
    """
    low, high = max(first, start), min(first + len(values), start + len(out))
    return values[low - first : high - first], out[low - start : high - start]


def encode_fields(*fields: bytes | str | int) -> bytes:
    """Join fields, each after its length: the basis of all domain separation in this package.

    Two calls whose fields differ in any place or in number give different bytes, because the result
    can be split again: see :func:`decode_fields`.

    >>> encode_fields("ab", "c") == encode_fields("a", "bc")
    False
    """
    # Without the lengths, moving a byte from one field to the next would give the same address, and
    # with it the same noise.
    parts = [field if isinstance(field, bytes) else str(field).encode() for field in fields]
    return b"".join(len(part).to_bytes(_LENGTH_BYTES, "big") + part for part in parts)


def decode_fields(data: bytes) -> list[bytes] | None:
    """Split a byte string that :func:`encode_fields` made; return None for any other.

    >>> decode_fields(encode_fields("group", 3))
    [b'group', b'3']
    >>> decode_fields(b"other") is None
    True
    """
    fields, end = [], 0
    while end < len(data):
        start = end + _LENGTH_BYTES
        end = start + int.from_bytes(data[end:start], "big")
        if len(data) < end:
            return None
        fields.append(data[start:end])
    return fields


def check_fingerprint(plan_fingerprint: bytes) -> bytes:
    """Return a plan's fingerprint if it is 32 bytes, or raise."""
    return _check_length("plan_fingerprint", plan_fingerprint, FINGERPRINT_BYTES)


def check_nonce(nonce: bytes) -> bytes:
    """Return the nonce of a run if it is 32 bytes, or raise."""
    return _check_length("nonce", nonce, NONCE_BYTES)


def _check_length(name: str, value: bytes, length: int) -> bytes:
    if isinstance(value, bytes) and len(value) == length:
        return value
    found = f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__
    raise InvalidArgumentError(f"{name} must be {length} bytes, found {found}")
