"""The roster is the root of trust: pinned, fingerprinted, and changed only by signatures."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from corn.errors import CornError, FileFormatError, InvalidArgumentError
from corn.noise import (
    Roster,
    Site,
    generate_identity,
    list_used_plans,
    load_identity,
    load_roster,
    pin_roster,
    record_use,
    rotate_key,
    save_identity,
    save_roster,
)
from corn.noise import roster as roster_module
from corn.noise.keys import find_pinned_roster

IDENTITIES = [generate_identity() for _ in range(3)]
ROSTER = Roster(tuple(own.public_key for own in IDENTITIES))


def fill(folder: Path) -> None:
    for agent, own in enumerate(IDENTITIES):
        save_identity(own, folder / f"agent-{agent}.key")
    save_roster(ROSTER, folder / "roster.json")


def test_the_fingerprint_covers_every_key_and_their_order() -> None:
    others = [
        Roster(ROSTER.public_keys[::-1]),
        Roster(ROSTER.public_keys[:2]),
        Roster((*ROSTER.public_keys[:2], generate_identity().public_key)),
    ]
    assert len({ROSTER.fingerprint, *(other.fingerprint for other in others)}) == 4
    assert len(ROSTER.fingerprint) == 32


def test_an_agents_signature_is_verified_by_its_own_key_only() -> None:
    signature = IDENTITIES[1].sign(b"word")
    assert ROSTER.verify(1, signature, b"word")
    assert not ROSTER.verify(0, signature, b"word")
    assert not ROSTER.verify(1, signature, b"other word")
    assert not ROSTER.verify(1, signature[:-1] + b"x", b"word")
    assert not ROSTER.verify(1, b"", b"word")


def test_a_key_stays_with_the_first_roster_it_was_used_with(tmp_path: Path) -> None:
    fill(tmp_path)
    key = tmp_path / "agent-0.key"
    pin_roster(ROSTER, key)
    pin_roster(ROSTER, key)
    swapped = Roster((*ROSTER.public_keys[:2], generate_identity().public_key))
    with pytest.raises(FileFormatError, match="has other public keys than the roster"):
        pin_roster(swapped, key)
    assert find_pinned_roster(key) == ROSTER.fingerprint.hex()


def test_a_roster_with_signed_rotations_is_accepted(tmp_path: Path) -> None:
    fill(tmp_path)
    key = tmp_path / "agent-0.key"
    pin_roster(ROSTER, key)
    new = [generate_identity(), generate_identity()]
    once = ROSTER.rotate(2, old=IDENTITIES[2], new=new[0])
    twice = once.rotate(1, old=IDENTITIES[1], new=new[1])
    assert twice.follows(ROSTER.fingerprint)
    assert twice.follows(once.fingerprint)
    assert not ROSTER.follows(twice.fingerprint)
    pin_roster(twice, key)
    assert find_pinned_roster(key) == twice.fingerprint.hex()
    # Back to the keys of before, whose secrets may be known to others by now.
    with pytest.raises(FileFormatError):
        pin_roster(ROSTER, key)


def test_a_rotation_that_the_old_key_did_not_sign_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    thief = generate_identity()
    with pytest.raises(InvalidArgumentError, match="is not agent 2's: the roster has another"):
        ROSTER.rotate(2, old=thief, new=generate_identity())
    other = Roster((ROSTER.public_keys[0], ROSTER.public_keys[1], thief.public_key))
    forged = other.rotate(2, old=thief, new=generate_identity())
    lie = Roster(
        forged.public_keys,
        tuple(
            type(one)(one.agent, IDENTITIES[2].public_key.hex(), one.signature)
            for one in forged.rotations
        ),
    )
    assert not lie.follows(ROSTER.fingerprint)
    # A rotation of another network, with the same key in the same place, proves nothing here.
    elsewhere = Roster((generate_identity().public_key, *ROSTER.public_keys[1:]))
    new = generate_identity()
    moved = elsewhere.rotate(2, old=IDENTITIES[2], new=new)
    here = Roster((*ROSTER.public_keys[:2], new.public_key), moved.rotations)
    assert not here.follows(ROSTER.fingerprint)


@pytest.mark.parametrize(
    "rotation",
    [
        {"agent": 9, "old_key": "ab", "signature": "cd"},
        {"agent": 1, "old_key": "zz", "signature": "cd"},
        {"agent": 1, "old_key": "ab", "signature": "cd"},
        {"agent": -1, "old_key": "ab" * 64, "signature": "cd" * 64},
    ],
)
def test_a_damaged_rotation_is_one_clear_line(rotation: dict[str, object], tmp_path: Path) -> None:
    fill(tmp_path)
    key = tmp_path / "agent-0.key"
    record_use(key, b"f" * 32, "roster")
    document = json.loads((tmp_path / "roster.json").read_text(encoding="utf-8"))
    document["rotations"] = [rotation]
    (tmp_path / "roster.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(CornError):
        pin_roster(load_roster(tmp_path / "roster.json"), key)


def test_a_key_is_replaced_and_keeps_its_record_of_plans(tmp_path: Path) -> None:
    fill(tmp_path)
    key = tmp_path / "agent-1.key"
    pin_roster(ROSTER, key)
    record_use(key, b"p" * 32)
    for number in range(2):
        before = load_identity(key)
        rotated = rotate_key(tmp_path, 1)
        new = load_identity(key)
        assert new.public_key != before.public_key
        assert rotated.public_key(1) == new.public_key
        assert load_roster(tmp_path / "roster.json") == rotated
        # Releases under its plans count as before, so a lost ledger is still noticed.
        assert list_used_plans(key) == ((b"p" * 32).hex(),)
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        kept = tmp_path / ("agent-1.old" if number == 0 else "agent-1.old1")
        assert load_identity(kept).public_key == before.public_key
        pin_roster(rotated, key)
    # Every other agent that pinned the first roster accepts the new one.
    pin_roster(ROSTER, tmp_path / "agent-0.key")
    pin_roster(load_roster(tmp_path / "roster.json"), tmp_path / "agent-0.key")


@pytest.mark.parametrize(
    "crashes_in", ["save_identity", "record_use", "os.link", "Path.replace", "save_roster"]
)
def test_a_rotation_that_crashed_is_completed_by_the_next(
    crashes_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    key = tmp_path / "agent-1.key"
    pin_roster(ROSTER, key)
    record_use(key, b"p" * 32)
    before = load_identity(key).public_key
    for is_late in (False, True):  # before the call has an effect, or right after
        with monkeypatch.context() as patch:
            owner = {"os.link": os, "Path.replace": Path}.get(crashes_in, roster_module)
            name = crashes_in.split(".")[-1]
            original = getattr(owner, name)

            def crash(
                *arguments: Any, call: Any = original, waits: bool = is_late, **options: Any
            ) -> None:
                if waits:
                    call(*arguments, **options)
                raise KeyboardInterrupt

            patch.setattr(owner, name, crash)
            with pytest.raises(KeyboardInterrupt):
                rotate_key(tmp_path, 1)
    rotated = rotate_key(tmp_path, 1)
    assert rotated.public_key(1) == load_identity(key).public_key != before
    assert list_used_plans(key) == ((b"p" * 32).hex(),)
    pin_roster(load_roster(tmp_path / "roster.json"), key)
    pin_roster(ROSTER, tmp_path / "agent-0.key")
    pin_roster(rotated, tmp_path / "agent-0.key")
    with pytest.raises(FileFormatError, match="has other public keys"):
        pin_roster(ROSTER, tmp_path / "agent-0.key")  # the roster of before does not come back
    assert any(load_identity(old).public_key == before for old in tmp_path.glob("agent-1.old*"))


def test_a_roster_keeps_who_accepts_connections_and_where(tmp_path: Path) -> None:
    sites = (Site(), Site(accepts=False), Site(address="[fe80::1]:41431"))
    roster = Roster(ROSTER.public_keys, sites=sites)
    save_roster(roster, tmp_path / "roster.json")
    found = load_roster(tmp_path / "roster.json")
    assert found == roster
    assert found.accepts == (True, False, True)
    # People compare keys; an agent that moves keeps its fingerprint.
    assert found.fingerprint == ROSTER.fingerprint


def test_accepts_and_address_may_be_left_out_of_a_roster(tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    save_roster(ROSTER, path)
    document = json.loads(path.read_text())
    for entry in document["agents"].values():
        del entry["accepts"], entry["address"]
    path.write_text(json.dumps(document))
    assert load_roster(path).sites == (Site(),) * 3


@pytest.mark.parametrize(
    ("accepts", "address"), [(False, "10.0.0.1:29500"), (True, "10.0.0.1:port"), (True, "")]
)
def test_a_site_that_cannot_be_reached_at_its_address_is_refused(
    accepts: bool, address: str
) -> None:
    with pytest.raises(InvalidArgumentError):
        Site(accepts, address)


def test_the_first_site_that_accepts_opens_the_store() -> None:
    sites = (Site(accepts=False), Site(), Site())
    assert Roster(ROSTER.public_keys, sites=sites).store_host == 1
