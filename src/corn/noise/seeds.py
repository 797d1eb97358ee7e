"""Keys of streams: derived for one agent, agreed on by two, sealed to the members of larger groups.

Two agents' identities agree on a pair key without a message. The keys of streams follow from those
by HKDF-SHA256, bound to the plan's fingerprint and to the purpose of each.

The seed of a group of three or more is made by its lowest member and sealed to each of the others,
with ChaCha20-Poly1305 and a random nonce: sealing twice is safe. Its key is derived from the pair
key and from the plan, run, group, sender and receiver. So a package opens only with the receiver's
identity, for the purpose that it was sealed for.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from corn.errors import CornError, InvalidArgumentError
from corn.noise.keys import SECRET_BYTES, Identity, Secret
from corn.noise.roster import Roster
from corn.noise.stream import Owner, check_fingerprint, check_nonce, encode_fields

_PACKAGE_NONCE_BYTES = 12
_PACKAGE_BYTES = _PACKAGE_NONCE_BYTES + SECRET_BYTES + 16


class RefusedPackageError(CornError):
    """A seed package is damaged or for another purpose: ask its sender for another, or stop."""


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


def seal_seed(
    seed: Secret,
    group: Owner,
    receiver: int,
    *,
    identity: Identity,
    roster: Roster,
    plan_fingerprint: bytes,
    run_nonce: bytes,
) -> bytes:
    """Return a group's seed, sealed to one receiver; ``identity`` is that of its lowest member.

    ``run_nonce`` is the nonce that all agents agreed on for this run.
    """
    shared = pair_key(
        identity, group.members[0], receiver, roster=roster, plan_fingerprint=plan_fingerprint
    )
    cipher = _make_cipher(shared, group, receiver, plan_fingerprint, run_nonce)
    # The key is used for this delivery alone, so 96 random bits suffice for any number of retries.
    nonce = secrets.token_bytes(_PACKAGE_NONCE_BYTES)
    return nonce + cipher.encrypt(nonce, seed.reveal(), None)


def open_seed(
    package: bytes,
    group: Owner,
    receiver: int,
    *,
    identity: Identity,
    roster: Roster,
    plan_fingerprint: bytes,
    run_nonce: bytes,
) -> Secret:
    """Return the seed of a package that :func:`seal_seed` made; ``identity`` is the receiver's.

    Raises:
        RefusedPackageError: it is damaged, forged, or for another plan, run, group or agent.
    """
    sender = group.members[0]
    shared = pair_key(identity, receiver, sender, roster=roster, plan_fingerprint=plan_fingerprint)
    cipher = _make_cipher(shared, group, receiver, plan_fingerprint, run_nonce)
    refusal = RefusedPackageError(
        f"the seed package for {group} was changed on its way, is for another plan, run or agent, "
        f"or agent {sender} sealed it with a key other than the roster's"
    )
    if len(package) != _PACKAGE_BYTES:
        raise refusal
    nonce, sealed = package[:_PACKAGE_NONCE_BYTES], package[_PACKAGE_NONCE_BYTES:]
    try:
        return Secret(cipher.decrypt(nonce, sealed, None))
    except InvalidTag:
        raise refusal from None


def _make_cipher(
    shared: Secret, group: Owner, receiver: int, plan_fingerprint: bytes, run_nonce: bytes
) -> ChaCha20Poly1305:
    # One sender per group: two seeds of one group would be noise that does not cancel.
    if group.group is None or receiver not in group.members[1:]:
        raise InvalidArgumentError(
            f"a seed goes from the lowest member of a seed group to another member, found "
            f"receiver {receiver} for {group}"
        )
    # The pair key is bound to the sender too.
    fields = (check_nonce(run_nonce), group.encoded, receiver)
    key = derive_key(shared, "seed package", *fields, plan_fingerprint=plan_fingerprint)
    return ChaCha20Poly1305(key.reveal())
