"""The roster: public key, address and reachability of all agents; and the keys that they share.

The roster is the root of trust of a run. People compare its fingerprint, and each agent's key keeps
the one that it was last used with. Another roster is accepted only if the agents whose keys changed
have signed their new keys with the old ones.

Two agents' identities agree on a pair key without a message. Keys of streams follow from those by
HKDF-SHA256, bound to the plan's fingerprint and to their purpose. The seed of a group of three or
more is made by its lowest member and sealed to each of the others, with ChaCha20-Poly1305.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from corn.checks import require, require_in_range, require_length
from corn.errors import CornError, FileFormatError, InvalidArgumentError
from corn.files import writing_whole
from corn.noise.keys import (
    AGREEMENT_KEY_BYTES,
    PUBLIC_KEY_BYTES,
    SECRET_BYTES,
    Identity,
    Secret,
    find_pinned_roster,
    generate_identity,
    list_used_plans,
    load_identity,
    record_use,
    save_identity,
)
from corn.noise.stream import Owner, check_fingerprint, check_nonce, encode_fields
from corn.parsing import build, build_fields, parse_address, parse_hex, read_json
from corn.topology.graphs import check_names

_FORMAT = "corn roster 3"
_FIELD_PRIME = 2**255 - 19
_SEAL_NONCE_BYTES = 12
# Any private key: only whether an exchange with it fails is of interest.
_PROBE = X25519PrivateKey.from_private_bytes(b"\x01" * AGREEMENT_KEY_BYTES)


@dataclass(frozen=True)
class KeyRotation:
    """The statement of an agent that it has a new key, signed with its old one; in hexadecimal."""

    agent: int
    old_key: str
    signature: str


@dataclass(frozen=True)
class Site:
    """The place of an agent in the network.

    An agent that does not accept connections only connects outward. ``address`` is the HOST:PORT at
    which others connect; None leaves it to the agent's start. ``name`` is that in the plan's graph.
    """

    accepts: bool = True
    address: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.address is not None:
            parse_address(self.address)
            require(self.accepts, "accepts", "true for an agent with an address", "false")


@dataclass(frozen=True)
class Roster:
    """The public keys of agents 0 … n−1: 64 bytes each, usable, all different.

    ``rotations`` are signed replacements of keys, the oldest first. ``sites`` are not part of the
    fingerprint: an agent may move, and its key proves who it is.
    """

    public_keys: tuple[bytes, ...]
    rotations: tuple[KeyRotation, ...] = ()
    sites: tuple[Site, ...] = ()

    def __post_init__(self) -> None:
        if not self.sites:
            object.__setattr__(self, "sites", (Site(),) * len(self.public_keys))
        require_length("sites", len(self.sites), len(self.public_keys), per="agent")
        check_names({agent: own.name for agent, own in enumerate(self.sites) if own.name})
        owners: dict[bytes, int] = {}
        for agent, key in enumerate(self.public_keys):
            _check_public_key(key, agent)
            # One key for two agents makes them one party, while a threat counts insiders by agents.
            other = owners.setdefault(key[:AGREEMENT_KEY_BYTES], agent)
            require(other == agent, f"agent {agent}'s public key", "its own", f"agent {other}'s")

    @property
    def num_agents(self) -> int:
        """The number of agents n."""
        return len(self.public_keys)

    @property
    def names(self) -> list[str]:
        """The name of each agent, or its number."""
        return [site.name or str(agent) for agent, site in enumerate(self.sites)]

    @property
    def accepts(self) -> tuple[bool, ...]:
        """Whether others can connect to each agent."""
        return tuple(site.accepts for site in self.sites)

    @property
    def store_host(self) -> int:
        """The agent that opens the rendezvous store: the first one that accepts connections."""
        return next((agent for agent, accepts in enumerate(self.accepts) if accepts), 0)

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that stand for all public keys: people compare them before the first run."""
        return hashlib.sha256(encode_fields("corn roster", *self.public_keys)).digest()

    def public_key(self, agent: int) -> bytes:
        """Return an agent's public key."""
        # Checked, because a negative number would be another agent's place from the end.
        require_in_range("an agent of the roster", agent, 0, self.num_agents - 1)
        return self.public_keys[agent]

    def require_names(self, names: Sequence[str]) -> None:
        """Raise unless the roster calls agents as a plan does, as far as both have names."""
        for agent, (own, planned) in enumerate(zip(self.names, names, strict=True)):
            if own != planned and str(agent) not in (own, planned):
                raise InvalidArgumentError(
                    f"roster and plan must have the same names, found {own!r} and {planned!r} for "
                    f"agent {agent}: one site would have the key or the links of another"
                )

    def verify(self, agent: int, signature: bytes, message: bytes) -> bool:
        """Return whether an agent signed a message."""
        key = Ed25519PublicKey.from_public_bytes(self.public_key(agent)[AGREEMENT_KEY_BYTES:])
        try:
            key.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    def rotate(self, agent: int, *, old: Identity, new: Identity) -> Roster:
        """Return the roster with an agent's new key, signed with its old one."""
        check_identity(old, agent, roster=self)
        signature = old.sign(_rotation_message(self, agent, new.public_key))
        rotation = KeyRotation(agent, old.public_key.hex(), signature.hex())
        keys = self.replace_key(agent, new.public_key)
        return replace(self, public_keys=keys, rotations=(*self.rotations, rotation))

    def replace_key(self, agent: int, key: bytes) -> tuple[bytes, ...]:
        """Return all public keys, with another one of this agent."""
        return (*self.public_keys[:agent], key, *self.public_keys[agent + 1 :])

    def follows(self, fingerprint: bytes) -> bool:
        """Return whether signed rotations lead from a roster with this fingerprint to this one."""
        current = self
        # Undone from the newest on: each signature must be of the key that the roster before had.
        for rotation in reversed(self.rotations):
            if current.fingerprint == fingerprint:
                return True
            agent = rotation.agent
            new_key = current.public_key(agent)
            old_key = parse_hex(rotation.old_key, "old_key")
            before = Roster(current.replace_key(agent, old_key))
            signature = parse_hex(rotation.signature, "signature")
            if not before.verify(agent, signature, _rotation_message(before, agent, new_key)):
                return False
            current = before
        return current.fingerprint == fingerprint


def pin_roster(roster: Roster, key: Path) -> None:
    """Record in an agent's key that it is used with this roster, or raise for an exchanged one.

    The first roster is trusted, so people compare its fingerprint. A later one must follow from it
    by rotations that the owners of the old keys signed.
    """
    pinned = find_pinned_roster(key)
    if pinned is not None and not roster.follows(bytes.fromhex(pinned)):
        raise FileFormatError(
            f"{key.parent / 'roster.json'}: has other public keys than the roster that this key "
            f"was used with (fingerprint {pinned}), and no signatures of their owners lead to "
            "them: somebody exchanged it, or agents made new keys without corn keys rotate"
        )
    record_use(key, roster.fingerprint, "roster")


def rotate_key(folder: Path, agent: int) -> Roster:
    """Replace an agent's key in a folder and its roster, and return the roster.

    The new key keeps the record of plans, whose releases count as before. The old key, by which
    noise was drawn, gets another name. After a crash, call it again: it completes what was begun.
    """
    path = folder / f"agent-{agent}.key"
    roster_path = folder / "roster.json"
    current = load_identity(path)
    roster = load_roster(roster_path)
    known = roster.public_key(agent)
    # After a crash the roster may still have the old key.
    kept = [] if current.public_key == known else sorted(folder.glob(f"{path.stem}.old*"))
    old = next((own for own in map(load_identity, kept) if own.public_key == known), None)
    if old is None:
        check_identity(current, agent, roster=roster)
        old, current = current, _replace_identity(path)
    rotated = roster.rotate(agent, old=old, new=current)
    path.with_suffix(".pub").write_text(current.public_key.hex() + "\n", encoding="ascii")
    save_roster(rotated, roster_path)
    return rotated


def _replace_identity(path: Path) -> Identity:
    """Put a new key in the place of an agent's key, and return it."""
    # The new key is complete before it takes the old one's place, so that a crash leaves one of the
    # two. The roster follows: until then the agent refuses to start.
    partial = path.with_suffix(".new")
    new = generate_identity()
    # One that a crash left was never used, as it never came to its place.
    partial.unlink(missing_ok=True)
    save_identity(new, partial)
    for plan in list_used_plans(path):
        record_use(partial, bytes.fromhex(plan))
    pinned = find_pinned_roster(path)
    if pinned is not None:
        record_use(partial, bytes.fromhex(pinned), "roster")
    names = (path.with_suffix(f".old{number or ''}") for number in range(10_000))
    os.link(path, next(name for name in names if not name.exists()))
    partial.replace(path)
    return new


def save_roster(roster: Roster, path: Path) -> None:
    """Write the roster as JSON: agent's number → public key, accepts, address, name; rotations."""
    entries = zip(roster.public_keys, roster.sites, strict=True)
    document = {
        "format": _FORMAT,
        "agents": {
            str(k): {"public_key": key.hex(), **vars(own)} for k, (key, own) in enumerate(entries)
        },
        "rotations": [vars(rotation) for rotation in roster.rotations],
    }
    with writing_whole(path) as partial:
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def load_roster(path: Path) -> Roster:
    """Read and check a roster: agents 0 … n−1, each once, each with a public key of its own."""
    document = read_json(path, kind="a roster")
    agents = Mapping[str, Mapping[str, object]]
    kinds = {"format": str, "agents": agents, "rotations": tuple[KeyRotation, ...]}
    # People write these by hand, so they may leave them out.
    usual: dict[str, object] = {"accepts": True, "address": None, "name": None}
    try:
        fields = build_fields(kinds, document, "the roster")
        entries: dict[str, dict[str, object]] = fields["agents"]
        numbers = [str(agent) for agent in range(len(entries))]
        is_whole = fields["format"] == _FORMAT and set(entries) == set(numbers)
        require(is_whole, "agents", f"0, 1, 2, … in the format {_FORMAT!r}", "others")
        listed = [usual | entries[number] for number in numbers]
        keys = [build(str, own.pop("public_key", None), "a public key") for own in listed]
        sites = (build(Site, own, f"agent {number}") for number, own in enumerate(listed))
        public_keys = tuple(parse_hex(key, "a public key") for key in keys)
        return Roster(public_keys, fields["rotations"], tuple(sites))
    except InvalidArgumentError as error:
        raise FileFormatError(f"{path}: not a roster: {error}") from error


def _rotation_message(before: Roster, agent: int, new_key: bytes) -> bytes:
    # The fingerprint of the roster before keeps a rotation from being used in another network.
    return encode_fields("corn key rotation", before.fingerprint, agent, new_key)


def _check_public_key(key: bytes, agent: int) -> None:
    is_key = isinstance(key, bytes) and len(key) == PUBLIC_KEY_BYTES
    require(is_key, f"agent {agent}'s public key", f"{PUBLIC_KEY_BYTES} bytes", "others")
    # Second encodings of a point, and the few points of low order that make every shared secret
    # zero, are only ever sent by an attacker.
    agreement = key[:AGREEMENT_KEY_BYTES]
    try:
        is_usable = int.from_bytes(agreement, "little") < _FIELD_PRIME
        _PROBE.exchange(X25519PublicKey.from_public_bytes(agreement))
    except ValueError:
        is_usable = False
    require(is_usable, f"agent {agent}'s public key", "a usable X25519 key", "another")


def pair_key(
    identity: Identity, agent: int, peer: int, *, roster: Roster, plan_fingerprint: bytes
) -> Secret:
    """Return the key that two agents share under a plan: equal for both, secret to all others.

    It is bound to the plan, the agents' numbers and their public keys.
    """
    check_identity(identity, agent, roster=roster)
    require(agent != peer, "peer", "another agent", peer)
    # Sorted, because both agents must derive the same key from the same fields.
    pair = sorted((agent, peer))
    secret = identity.agree(roster.public_key(peer))
    keys = map(roster.public_key, pair)
    return derive_key(secret, "pair", *pair, *keys, plan_fingerprint=plan_fingerprint)


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

    ``group_seeds`` has the seeds of all groups of three and more that the agent is in.
    """
    check_identity(identity, agent, roster=roster)
    private = derive_key(identity.secret, "private noise", agent, plan_fingerprint=plan_fingerprint)
    keys, seeds = {Owner((agent,)): private}, group_seeds or {}
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
        elif number in seeds:
            root = seeds[number]
        else:
            raise InvalidArgumentError(f"group_seeds must have the seed of {owner}")
        # Derived once more, under the owner: two groups with the same root, such as two groups of
        # the same pair, must not draw the same noise.
        fields = ("group noise", owner.encoded)
        keys[owner] = derive_key(root, *fields, plan_fingerprint=plan_fingerprint)
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


@dataclass(frozen=True)
class SeedDelivery:
    """An agent's part in the delivery of group seeds in a run, whose nonce all agents agreed on."""

    identity: Identity
    agent: int
    roster: Roster
    plan_fingerprint: bytes
    run_nonce: bytes

    def seal(self, seed: Secret, group: Owner, receiver: int) -> bytes:
        """Return the seed of a group, whose lowest member this agent is, sealed to another."""
        # One sender per group: two seeds of one group would be noise that does not cancel.
        require(self.agent == group.members[0], "sender", f"the first of {group}", self.agent)
        cipher = self._make_cipher(group, receiver, peer=receiver)
        # The key is used for this delivery alone, so 96 random bits suffice for any number of
        # retries.
        nonce = secrets.token_bytes(_SEAL_NONCE_BYTES)
        return nonce + cipher.encrypt(nonce, seed.reveal(), None)

    def open(self, package: bytes, group: Owner) -> Secret:
        """Return the seed of a package that the lowest member sealed to this agent, or raise."""
        sender = group.members[0]
        cipher = self._make_cipher(group, self.agent, peer=sender)
        nonce, sealed = package[:_SEAL_NONCE_BYTES], package[_SEAL_NONCE_BYTES:]
        try:
            return Secret(cipher.decrypt(nonce, sealed, None))
        # A package of another length has a wrong tag, a seed or a nonce of another length.
        except (InvalidTag, ValueError):
            raise CornError(
                f"the seed package for {group} was changed on its way, is for another plan, run or "
                f"agent, or agent {sender} sealed it with a key other than the roster's"
            ) from None

    def _make_cipher(self, group: Owner, receiver: int, *, peer: int) -> ChaCha20Poly1305:
        is_member = group.group is not None and receiver in group.members[1:]
        require(is_member, "receiver", f"a later member of {group}", receiver)
        plan: Any = {"plan_fingerprint": self.plan_fingerprint}
        # The pair key is bound to the sender too.
        shared = pair_key(self.identity, self.agent, peer, roster=self.roster, **plan)
        fields = (check_nonce(self.run_nonce), group.encoded, receiver)
        return ChaCha20Poly1305(derive_key(shared, "seed package", *fields, **plan).reveal())
