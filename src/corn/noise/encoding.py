"""Several fields as one byte string, so that different fields never give the same bytes."""

from __future__ import annotations

from corn.errors import InvalidArgumentError

FINGERPRINT_BYTES = 32
NONCE_BYTES = 32
_LENGTH_BYTES = 4


def encode_fields(*fields: bytes | str | int) -> bytes:
    """Join fields, each after its length: the basis of all domain separation in this room.

    Two calls whose fields differ in any place or number give different bytes, because the result
    can be split again: see :func:`decode_fields`.

    >>> encode_fields("ab", "c") == encode_fields("a", "bc")
    False
    """
    parts = [field if isinstance(field, bytes) else str(field).encode() for field in fields]
    return b"".join(len(part).to_bytes(_LENGTH_BYTES, "big") + part for part in parts)


def decode_fields(data: bytes) -> list[bytes] | None:
    """Split what :func:`encode_fields` joined; None if ``data`` is not such a string.

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
    """Return the plan's fingerprint if it is 32 bytes, or say what it is."""
    return _check_length(plan_fingerprint, FINGERPRINT_BYTES, "plan_fingerprint")


def check_nonce(nonce: bytes) -> bytes:
    """Return the nonce of a run if it is 32 bytes, or say what it is."""
    return _check_length(nonce, NONCE_BYTES, "nonce")


def _check_length(value: bytes, length: int, name: str) -> bytes:
    if not isinstance(value, bytes) or len(value) != length:
        found = f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__
        raise InvalidArgumentError(f"{name} must be {length} bytes, found {found}")
    return value
