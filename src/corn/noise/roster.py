"""The public roster: which public key is which agent's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from corn.errors import FileFormatError, InvalidArgumentError
from corn.parsing import build_fields, parse_hex, read_json

_FORMAT = "corn roster 1"
_KEY_BYTES = 32
_FIELD_PRIME = 2**255 - 19
_PROBE = X25519PrivateKey.from_private_bytes(b"\x01" * _KEY_BYTES)


@dataclass(frozen=True)
class Roster:
    """The public keys of agents 0 … n−1: 32 bytes each, usable, all different."""

    public_keys: tuple[bytes, ...]

    def __post_init__(self) -> None:
        for agent, key in enumerate(self.public_keys):
            _check_public_key(key, agent)
        owners: dict[bytes, int] = {}
        for agent, key in enumerate(self.public_keys):
            if owners.setdefault(key, agent) != agent:
                raise InvalidArgumentError(
                    f"agents {owners[key]} and {agent} have the same public key: each needs its own"
                )

    @property
    def num_agents(self) -> int:
        """The number of agents n."""
        return len(self.public_keys)

    def public_key(self, agent: int) -> bytes:
        """An agent's public key."""
        if not 0 <= agent < self.num_agents:
            raise InvalidArgumentError(
                f"the roster has agents 0 … {self.num_agents - 1}, found agent {agent}"
            )
        return self.public_keys[agent]


def save_roster(roster: Roster, path: Path) -> None:
    """Write the roster as JSON: agent's number → public key in hexadecimal."""
    agents = {str(agent): key.hex() for agent, key in enumerate(roster.public_keys)}
    text = json.dumps({"format": _FORMAT, "agents": agents}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def load_roster(path: Path) -> Roster:
    """Read and check a roster: agents 0 … n−1, each once, each with a public key of its own."""
    document = read_json(path, kind="a roster")
    try:
        return _decode(document)
    except InvalidArgumentError as error:
        raise FileFormatError(f"{path}: not a roster: {error}") from error


def _decode(document: object) -> Roster:
    fields = build_fields({"format": str, "agents": Mapping[str, str]}, document, "the roster")
    keys: dict[str, str] = fields["agents"]
    numbers = [str(agent) for agent in range(len(keys))]
    if fields["format"] != _FORMAT or set(keys) != set(numbers):
        raise InvalidArgumentError(f"agents 0, 1, 2, … in the format {_FORMAT!r} were expected")
    return Roster(tuple(parse_hex(keys[number], "a public key") for number in numbers))


def _check_public_key(key: bytes, agent: int) -> None:
    if not isinstance(key, bytes) or len(key) != _KEY_BYTES:
        raise InvalidArgumentError(f"agent {agent}'s public key must be {_KEY_BYTES} bytes")
    # Other encodings of a point, and the few points that make every shared secret zero, are only
    # ever sent by an attacker.
    if int.from_bytes(key, "little") >= _FIELD_PRIME or not _can_agree(key):
        raise InvalidArgumentError(f"agent {agent}'s public key is not a usable X25519 key")


def _can_agree(key: bytes) -> bool:
    try:
        _PROBE.exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError:
        return False
    return True
