"""Identities stay private, rosters are checked, and two agents agree on a secret key."""

import errno
import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corn.covariance.decomposition import Decomposition
from corn.errors import FileFormatError, InvalidArgumentError
from corn.noise import (
    Owner,
    Roster,
    Secret,
    SecureSource,
    agent_keys,
    draw_share,
    generate_identity,
    list_used_plans,
    load_identity,
    load_roster,
    owners,
    pair_key,
    record_use,
    save_identity,
    save_roster,
)

from ..leaks import shows

IDENTITIES = [generate_identity() for _ in range(4)]
ROSTER = Roster(tuple(identity.public_key for identity in IDENTITIES))
PLAN, OTHER_PLAN = bytes(32), b"\x01" * 32


def agree(agent: int, peer: int, *, roster: Roster = ROSTER, plan: bytes = PLAN) -> Secret:
    return pair_key(IDENTITIES[agent], agent, peer, roster=roster, plan_fingerprint=plan)


def test_both_agents_derive_the_same_key_and_others_another() -> None:
    assert agree(0, 1) == agree(1, 0)
    keys = [agree(0, 1), agree(0, 2), agree(1, 2), agree(0, 1, plan=OTHER_PLAN)]
    assert len({key.reveal() for key in keys}) == 4


def test_a_pair_key_is_bound_to_the_places_in_the_roster() -> None:
    identities = [IDENTITIES[i] for i in (1, 0, 2, 3)]
    swapped = Roster(tuple(identity.public_key for identity in identities))
    moved = pair_key(IDENTITIES[0], 1, 2, roster=swapped, plan_fingerprint=PLAN)
    assert moved != agree(0, 2)


def test_another_agents_identity_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="this identity is not agent 1's"):
        pair_key(IDENTITIES[0], 1, 2, roster=ROSTER, plan_fingerprint=PLAN)
    with pytest.raises(InvalidArgumentError, match="peer must be another agent, found 1"):
        agree(1, 1)
    with pytest.raises(InvalidArgumentError, match=r"in \[0, 3\], found 4"):
        agree(1, 4)
    with pytest.raises(InvalidArgumentError, match="plan_fingerprint must be 32 bytes"):
        agree(0, 1, plan=b"short")


def keys_of(agent: int, groups: Any, *, plan: bytes = PLAN, **seeds: Any) -> dict[Owner, Secret]:
    return agent_keys(
        IDENTITIES[agent], agent, seed_groups=groups, roster=ROSTER, plan_fingerprint=plan, **seeds
    )


GROUPS = ((0, 1), (1, 2, 3), (2,), (0, 1))


def test_members_agree_on_group_keys_and_private_ones_differ() -> None:
    seed = {1: Secret(bytes(32))}
    keys = [keys_of(agent, GROUPS, group_seeds=seed) for agent in range(4)]
    for number, group in enumerate(GROUPS):
        owner = Owner(group, number)
        assert [owner in held for held in keys] == [agent in group for agent in range(4)]
        first = keys[group[0]][owner]
        assert all(keys[agent][owner] == first for agent in group)
    values = [key.reveal() for held in keys for key in held.values()]
    # Two owners with the same members have different keys; a seed is not used as it is.
    assert len(set(values)) == 4 + len(GROUPS)
    assert bytes(32) not in values


def test_keys_depend_on_the_plan() -> None:
    here, there = (keys_of(0, GROUPS, plan=plan) for plan in (PLAN, OTHER_PLAN))
    assert all(here[owner] != there[owner] for owner in here)
    again = keys_of(0, GROUPS)
    assert here == again


def test_a_missing_group_seed_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="seed of seed group 1 of agents 1, 2, 3"):
        keys_of(2, GROUPS)


def test_an_agents_keys_suffice_to_draw_its_share() -> None:
    pair = np.array([[1.0], [-1.0]])
    split = Decomposition(np.zeros(3), ((0, 1), (1, 2), (0, 2)), (pair, pair, pair))
    shares = []
    for agent in range(3):
        keys = keys_of(agent, split.seed_groups)
        assert set(owners(split, [agent])) <= set(keys)
        source = SecureSource(keys)
        shares.append(draw_share(split, agent, source=source, nonce=bytes(32), step=0, stop=100))
    np.testing.assert_allclose(sum(shares), 0, atol=1e-6)
    assert np.std(shares[0]) > 1


def test_an_identity_round_trips_through_its_file(tmp_path: Path) -> None:
    path = tmp_path / "agent.key"
    save_identity(IDENTITIES[0], path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_identity(path).secret == IDENTITIES[0].secret
    assert not shows(IDENTITIES[0].secret, repr(load_identity(path)))


def test_a_key_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "agent.key"
    save_identity(IDENTITIES[0], path)
    with pytest.raises(FileFormatError, match="exists"):
        save_identity(IDENTITIES[1], path)
    assert load_identity(path).public_key == IDENTITIES[0].public_key
    with pytest.raises(FileFormatError, match="cannot be written"):
        save_identity(IDENTITIES[1], tmp_path / "missing" / "agent.key")


def test_a_full_disk_leaves_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "agent.key"
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(FileFormatError, match="No space left"):
            save_identity(IDENTITIES[0], path)
    assert not path.exists()
    save_identity(IDENTITIES[0], path)
    record_use(path, PLAN)
    assert list_used_plans(path) == (PLAN.hex(),)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601, 0o777])
def test_a_key_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "my agent.key"
    save_identity(IDENTITIES[0], path)
    path.chmod(mode)
    with pytest.raises(FileFormatError, match=f"mode {mode:04o}; .* chmod 600 '/.*my agent.key'"):
        load_identity(path)


@pytest.mark.parametrize("damage", ["", "corn-identity-1 \n", "{hex}", "corn-identity-2 {hex}\n"])
def test_a_damaged_key_file_is_refused_without_showing_it(tmp_path: Path, damage: str) -> None:
    secret = IDENTITIES[0].secret.reveal().hex()
    path = tmp_path / "agent.key"
    path.touch(mode=0o600)
    path.write_text(damage.format(hex=secret))
    with pytest.raises(FileFormatError, match="not an identity") as caught:
        load_identity(path)
    error: BaseException | None = caught.value
    while error is not None:
        assert secret not in repr(vars(error)) + str(error)
        error = error.__context__
    with pytest.raises(FileFormatError, match="No such file"):
        load_identity(tmp_path / "missing")


def test_a_roster_round_trips_through_its_file(tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    save_roster(ROSTER, path)
    assert load_roster(path) == ROSTER
    for identity in IDENTITIES:
        assert identity.secret.reveal().hex() not in path.read_text()


KEYS = [identity.public_key.hex() for identity in IDENTITIES]


def show_roster(*keys: object, numbers: str = "012") -> str:
    agents = {number: {"public_key": key} for number, key in zip(numbers, keys, strict=False)}
    return json.dumps({"format": "corn roster 3", "agents": agents, "rotations": []})


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", "\udcff"),
        show_roster(*KEYS[:2]).replace("roster 3", "roster 2"),
        show_roster(*KEYS[:2], numbers="12"),
        show_roster(*KEYS[:2], numbers="02"),
        show_roster(KEYS[0], KEYS[0]),
        show_roster(KEYS[0][:-2]),
        show_roster(5),
        show_roster(*KEYS[:2]).replace('"1"', '"0"'),
    ],
)
def test_bad_rosters_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "roster.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(FileFormatError, match=r"roster\.json: "):
        load_roster(path)


def test_a_missing_roster_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="no such file"):
        load_roster(tmp_path / "roster.json")


@pytest.mark.parametrize(
    "key", [bytes(32), b"\x01" + bytes(31), b"\xff" * 32, (2**255 - 19).to_bytes(32, "little"), b""]
)
def test_unusable_public_keys_are_refused(key: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="agent 1's public key"):
        Roster((IDENTITIES[0].public_key, key))
