"""Who is who, and the keys agents agree on: identities, the public roster, and stream keys.

An agent has one X25519 identity. Two agents' identities agree on a pair key, without a message;
the keys of streams follow from those by HKDF-SHA256, bound to the plan's fingerprint and to what
each is for. Only public keys ever leave an agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from corn.errors import InvalidArgumentError
from corn.noise.address import Owner
from corn.noise.encoding import check_fingerprint, encode_fields
from corn.noise.roster import Roster
from corn.noise.secret import SECRET_BYTES, Secret


@final
class Identity:
    """An agent's private key, which shows only its public half."""

    __slots__ = ("public_key", "secret")

    def __init__(self, secret: Secret) -> None:
        self.secret = secret
        self.public_key = _private_key(secret).public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"Identity(public key {self.public_key.hex()})"

    def agree(self, public_key: bytes) -> Secret:
        """The secret that this identity and the owner of ``public_key`` have in common."""
        peer = X25519PublicKey.from_public_bytes(public_key)
        return Secret(_private_key(self.secret).exchange(peer))


def generate_identity() -> Identity:
    """A new identity, from the operating system's randomness."""
    return Identity(Secret.random())


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
    :mod:`corn.noise.sealing`): ``group_seeds`` has those of all larger groups the agent is in.
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


def _private_key(secret: Secret) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(secret.reveal())


def _find_seed(owner: Owner, number: int, group_seeds: Mapping[int, Secret]) -> Secret:
    if number not in group_seeds:
        raise InvalidArgumentError(
            f"group_seeds must have the seed of {owner}, which agent {owner.members[0]} makes"
        )
    return group_seeds[number]
