"""A group's seed, sealed by the member that made it to each of the others.

A package opens only with the receiver's identity, for the plan, run, group, sender and receiver it
was sealed for; anything else is refused with what is wrong. Sealed with ChaCha20-Poly1305 under a
key of its own, derived from the pair key and from all of these, and a random nonce: sealing twice
is safe.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from corn.errors import CornError, InvalidArgumentError
from corn.noise.address import Owner
from corn.noise.encoding import check_fingerprint, check_nonce, decode_fields, encode_fields
from corn.noise.keys import Identity, derive_key, pair_key
from corn.noise.roster import Roster
from corn.noise.secret import SECRET_BYTES, Secret

_FORMAT = b"corn seed package 1"
_NONCE_BYTES = 12
_TAG_BYTES = 16


class RefusedPackageError(CornError):
    """A seed package is not what it should be: ask its sender for another, or stop."""


@dataclass(frozen=True)
class Delivery:
    """What a package is for. All of it is public, and all of it is authenticated.

    Attributes:
        plan_fingerprint: 32 bytes that identify the plan.
        run_nonce: the nonce that all agents agreed on for this run.
        group: the seed group, whose lowest member is the sender.
        receiver: another member of the group.
    """

    plan_fingerprint: bytes
    run_nonce: bytes
    group: Owner
    receiver: int

    def __post_init__(self) -> None:
        check_fingerprint(self.plan_fingerprint)
        check_nonce(self.run_nonce)
        if self.group.group is None or self.receiver not in self.group.members[1:]:
            raise InvalidArgumentError(
                f"a seed goes from the lowest member of a seed group to another member, found "
                f"receiver {self.receiver} for {self.group}"
            )

    @property
    def sender(self) -> int:
        """The agent that makes the group's seed."""
        return self.group.members[0]

    def fields(self) -> dict[str, bytes]:
        """The delivery as bytes, by what a person would call them."""
        return {
            "format": _FORMAT,
            "plan": self.plan_fingerprint,
            "run": self.run_nonce,
            "group": self.group.encoded,
            "sender": str(self.sender).encode(),
            "receiver": str(self.receiver).encode(),
        }


def seal_seed(seed: Secret, delivery: Delivery, *, identity: Identity, roster: Roster) -> bytes:
    """Seal a group's seed to one receiver; ``identity`` is the sender's."""
    header = encode_fields(*delivery.fields().values())
    key = _package_key(delivery, delivery.sender, delivery.receiver, identity, roster)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sealed = ChaCha20Poly1305(key.reveal()).encrypt(nonce, seed.reveal(), header)
    return encode_fields(header, nonce, sealed)


def open_seed(package: bytes, delivery: Delivery, *, identity: Identity, roster: Roster) -> Secret:
    """The seed in a package sealed for exactly this delivery; ``identity`` is the receiver's.

    Raises:
        RefusedPackageError: it is damaged, forged, or for another plan, run, group or agent.
    """
    header, nonce, sealed = _split(package)
    _check_header(header, delivery)
    key = _package_key(delivery, delivery.receiver, delivery.sender, identity, roster)
    try:
        return Secret(ChaCha20Poly1305(key.reveal()).decrypt(nonce, sealed, header))
    except InvalidTag:
        raise RefusedPackageError(
            f"the seed package for {delivery.group} was changed on its way, or agent "
            f"{delivery.sender} sealed it with a key other than the roster's"
        ) from None


def _package_key(
    delivery: Delivery, agent: int, peer: int, identity: Identity, roster: Roster
) -> Secret:
    plan = delivery.plan_fingerprint
    shared = pair_key(identity, agent, peer, roster=roster, plan_fingerprint=plan)
    return derive_key(shared, "seed package", *delivery.fields().values(), plan_fingerprint=plan)


def _split(package: bytes) -> tuple[bytes, bytes, bytes]:
    fields = decode_fields(package)
    if fields is None or [len(field) for field in fields[1:]] != [
        _NONCE_BYTES,
        SECRET_BYTES + _TAG_BYTES,
    ]:
        raise RefusedPackageError("not a seed package, or one cut short")
    return fields[0], fields[1], fields[2]


def _check_header(header: bytes, delivery: Delivery) -> None:
    expected = delivery.fields()
    found = decode_fields(header)
    if found is None or len(found) != len(expected):
        raise RefusedPackageError("not a seed package, or one of another version of CorN")
    for (name, value), part in zip(expected.items(), found, strict=True):
        if part != value:
            raise RefusedPackageError(
                f"the seed package is for another {name}, not the one for {delivery.group}, from "
                f"agent {delivery.sender} to agent {delivery.receiver}: it cannot be used here"
            )
