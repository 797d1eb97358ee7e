"""Keys of streams: derived for one agent, agreed on by two, sealed to the members of larger groups.

Two agents' identities agree on a pair key without a message. The keys of streams follow from those
by HKDF-SHA256, bound to the plan's fingerprint and to the purpose of each.

The seed of a group of three or more is made by its lowest member and sealed to each of the others.
A package opens only with the receiver's identity, for the plan, run, group, sender and receiver
that it was sealed for. Any other is refused, with the reason. It is sealed with ChaCha20-Poly1305
under a key of its own, derived from the pair key and from all of these, and a random nonce: sealing
twice is safe.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from corn.errors import CornError, InvalidArgumentError
from corn.noise.keys import SECRET_BYTES, Identity, Secret
from corn.noise.roster import Roster
from corn.noise.stream import Owner, check_fingerprint, check_nonce, decode_fields, encode_fields

_PACKAGE_FORMAT = b"corn seed package 1"
_PACKAGE_NONCE_BYTES = 12
_TAG_BYTES = 16


class RefusedPackageError(CornError):
    """A seed package is damaged or for another purpose: ask its sender for another, or stop."""


@dataclass(frozen=True)
class Delivery:
    """The purpose of a seed package. All of it is public, and all of it is authenticated.

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
        # One sender per group: two seeds of one group would be noise that does not cancel.
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
        """Return the delivery as bytes, under the names that error messages use."""
        return {
            "format": _PACKAGE_FORMAT,
            "plan": self.plan_fingerprint,
            "run": self.run_nonce,
            "group": self.group.encoded,
            "sender": str(self.sender).encode(),
            "receiver": str(self.receiver).encode(),
        }


def pair_key(
    identity: Identity, agent: int, peer: int, *, roster: Roster, plan_fingerprint: bytes
) -> Secret:
    """Return the key that two agents share under a plan: equal for both, secret to all others.

    It is bound to the plan, the agents' numbers and their public keys. With another plan, roster or
    place in it the two derive different keys, and neither can open a package of the other.
    """
    check_identity(identity, agent, roster=roster)
    if agent == peer:
        raise InvalidArgumentError(f"a pair key needs two agents, found {agent} twice")
    # Sorted, because both agents must derive the same key from the same fields.
    low, high = sorted((agent, peer))
    return derive_key(
        identity.agree(roster.public_key(peer)),
        "pair",
        low,
        high,
        roster.public_key(low),
        roster.public_key(high),
        plan_fingerprint=plan_fingerprint,
    )


def agent_keys(
    identity: Identity,
    agent: int,
    *,
    seed_groups: Sequence[tuple[int, ...]],
    roster: Roster,
    plan_fingerprint: bytes,
    group_seeds: Mapping[int, Secret] | None = None,
) -> dict[Owner, Secret]:
    """Return the keys of every stream that an agent can draw, for its secure source.

    Keys of private noise and of groups of one follow from the agent's identity, keys of groups of
    two from the pair key. ``group_seeds`` has the seeds of all larger groups that the agent is in.
    """
    check_identity(identity, agent, roster=roster)
    private = derive_key(identity.secret, "private noise", agent, plan_fingerprint=plan_fingerprint)
    keys = {Owner((agent,)): private}
    for number, group in enumerate(seed_groups):
        if agent not in group:
            continue
        owner = Owner(group, number)
        # A secret that all members have, and nobody else: no message is needed for up to two.
        if len(group) == 1:
            root = private
        elif len(group) == 2:
            (peer,) = set(group) - {agent}
            root = pair_key(identity, agent, peer, roster=roster, plan_fingerprint=plan_fingerprint)
        elif number in (group_seeds or {}):
            root = (group_seeds or {})[number]
        else:
            raise InvalidArgumentError(
                f"group_seeds must have the seed of {owner}, which agent {owner.members[0]} makes"
            )
        # Derived once more, under the owner: two groups with the same root, such as two groups of
        # the same pair, must not draw the same noise.
        keys[owner] = derive_key(
            root, "group noise", owner.encoded, plan_fingerprint=plan_fingerprint
        )
    return keys


def check_identity(identity: Identity, agent: int, *, roster: Roster) -> None:
    """Raise unless the identity is the one that the roster has for this agent."""
    if roster.public_key(agent) != identity.public_key:
        raise InvalidArgumentError(
            f"this identity is not agent {agent}'s: the roster has another public key for it"
        )


def derive_key(root: Secret, purpose: str, *fields: bytes | int, plan_fingerprint: bytes) -> Secret:
    """Return HKDF-SHA256 of a secret, for one purpose under one plan."""
    hkdf = HKDF(
        algorithm=SHA256(),
        length=SECRET_BYTES,
        salt=check_fingerprint(plan_fingerprint),
        # The purpose separates domains: a key for sealing is never a key for noise.
        info=encode_fields("corn 1", purpose, *fields),
    )
    return Secret(hkdf.derive(root.reveal()))


def seal_seed(seed: Secret, delivery: Delivery, *, identity: Identity, roster: Roster) -> bytes:
    """Return a group's seed, sealed to one receiver; ``identity`` is the sender's."""
    header = encode_fields(*delivery.fields().values())
    key = _package_key(delivery, delivery.sender, delivery.receiver, identity, roster)
    # The key is used for this delivery alone, so 96 random bits suffice for any number of retries.
    nonce = secrets.token_bytes(_PACKAGE_NONCE_BYTES)
    sealed = ChaCha20Poly1305(key.reveal()).encrypt(nonce, seed.reveal(), header)
    return encode_fields(header, nonce, sealed)


def open_seed(package: bytes, delivery: Delivery, *, identity: Identity, roster: Roster) -> Secret:
    """Return the seed of a package sealed for this very delivery; ``identity`` is the receiver's.

    Raises:
        RefusedPackageError: it is damaged, forged, or for another plan, run, group or agent.
    """
    header, nonce, sealed = _split_package(package)
    # The tag below covers the header, and would refuse it too. Comparing first names the field
    # that differs, which distinguishes a replay of an old run from damage.
    _check_package_header(header, delivery)
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
    # All fields of the delivery are in the key, and in the header that the tag authenticates.
    # Either alone would bind them.
    plan = delivery.plan_fingerprint
    shared = pair_key(identity, agent, peer, roster=roster, plan_fingerprint=plan)
    return derive_key(shared, "seed package", *delivery.fields().values(), plan_fingerprint=plan)


def _split_package(package: bytes) -> tuple[bytes, bytes, bytes]:
    fields = decode_fields(package)
    lengths = [_PACKAGE_NONCE_BYTES, SECRET_BYTES + _TAG_BYTES]
    if fields is None or [len(field) for field in fields[1:]] != lengths:
        raise RefusedPackageError("not a seed package, or one cut short")
    return fields[0], fields[1], fields[2]


def _check_package_header(header: bytes, delivery: Delivery) -> None:
    expected, found = delivery.fields(), decode_fields(header)
    if found is None or len(found) != len(expected):
        raise RefusedPackageError("not a seed package, or one of another version of CorN")
    for (name, value), part in zip(expected.items(), found, strict=True):
        if part != value:
            raise RefusedPackageError(
                f"the seed package is for another {name}, not the one for {delivery.group}, from "
                f"agent {delivery.sender} to agent {delivery.receiver}: it cannot be used here"
            )
