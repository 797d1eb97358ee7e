"""Who is who, and the keys agents agree on: identities, the public roster, and stream keys.

An agent has one X25519 identity. Two agents' identities agree on a pair key, without a message;
the keys of streams follow from those by HKDF-SHA256, bound to the plan's fingerprint and to what
each is for. Only public keys ever leave an agent.
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
from corn.noise.address import Owner, check_fingerprint, check_nonce, decode_fields, encode_fields
from corn.noise.keys import SECRET_BYTES, Identity, Roster, Secret

_FORMAT = b"corn seed package 1"
_NONCE_BYTES = 12
_TAG_BYTES = 16


def pair_key(
    identity: Identity, agent: int, peer: int, *, roster: Roster, plan_fingerprint: bytes
) -> Secret:
    """The key that two agents share under a plan: the same for both, and known to no one else.

    Bound to the plan, the agents' numbers and their public keys: with another plan, roster or
    place in it the two derive different keys, and what one sealed the other cannot open.
    """
    check_identity(identity, agent, roster=roster)
    if agent == peer:
        raise InvalidArgumentError(f"a pair key needs two agents, found {agent} twice")
    low, high = sorted((agent, peer))
    shared = identity.agree(roster.public_key(peer))
    return derive_key(
        shared,
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
    """The keys of every stream an agent can draw: what its secure source holds.

    Its private noise and groups of one follow from its identity, groups of two from the pair key.
    The seed of a larger group is made by its lowest member and sealed to the others (see
    :mod:`corn.noise.seeds`): ``group_seeds`` has those of all larger groups the agent is in.
    """
    check_identity(identity, agent, roster=roster)
    private = derive_key(identity.secret, "private noise", agent, plan_fingerprint=plan_fingerprint)
    keys = {Owner((agent,)): private}
    for number, group in enumerate(seed_groups):
        if agent not in group:
            continue
        owner = Owner(group, number)
        if len(group) == 1:
            root = private
        elif len(group) == 2:
            (peer,) = set(group) - {agent}
            root = pair_key(identity, agent, peer, roster=roster, plan_fingerprint=plan_fingerprint)
        else:
            root = _find_seed(owner, number, group_seeds or {})
        keys[owner] = derive_key(
            root, "group noise", owner.encoded, plan_fingerprint=plan_fingerprint
        )
    return keys


def check_identity(identity: Identity, agent: int, *, roster: Roster) -> None:
    """Refuse an identity that is not the one the roster has for this agent."""
    if roster.public_key(agent) != identity.public_key:
        raise InvalidArgumentError(
            f"this identity is not agent {agent}'s: the roster has another public key for it"
        )


def derive_key(root: Secret, purpose: str, *fields: bytes | int, plan_fingerprint: bytes) -> Secret:
    """HKDF-SHA256 of a secret, for one purpose under one plan."""
    hkdf = HKDF(
        algorithm=SHA256(),
        length=SECRET_BYTES,
        salt=check_fingerprint(plan_fingerprint),
        info=encode_fields("corn 1", purpose, *fields),
    )
    return Secret(hkdf.derive(root.reveal()))


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


def _find_seed(owner: Owner, number: int, group_seeds: Mapping[int, Secret]) -> Secret:
    if number not in group_seeds:
        raise InvalidArgumentError(
            f"group_seeds must have the seed of {owner}, which agent {owner.members[0]} makes"
        )
    return group_seeds[number]


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
