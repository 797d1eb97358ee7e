"""Key material that does not leave by accident: not by print, log, pickle, copy or JSON."""

from __future__ import annotations

import hmac
import secrets
from typing import NoReturn, final

from corn.errors import InvalidArgumentError

SECRET_BYTES = 32


@final
class Secret:
    """32 bytes that only :meth:`reveal` shows.

    Its text forms say nothing, it cannot be pickled, copied or hashed, and comparing takes the same
    time wherever two secrets differ. Python cannot wipe memory, so a secret stays in the process
    until its memory is used again.

    >>> secret = Secret.random()
    >>> f"{secret} {secret!r}"
    'Secret(hidden) Secret(hidden)'
    """

    __slots__ = ("_value",)
    __hash__ = None  # type: ignore[assignment]  # a hash table would compare in variable time

    def __init__(self, value: bytes) -> None:
        if not isinstance(value, bytes) or len(value) != SECRET_BYTES:
            raise InvalidArgumentError(f"a secret must be {SECRET_BYTES} bytes")
        self._value = value

    @classmethod
    def random(cls) -> Secret:
        """A new secret from the operating system."""
        return cls(secrets.token_bytes(SECRET_BYTES))

    def reveal(self) -> bytes:
        """The 32 bytes themselves: for a cipher or a key derivation, never for output."""
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a secret cannot be pickled or copied")
