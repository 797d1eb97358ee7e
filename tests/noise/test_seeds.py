"""A seed package opens for the delivery it was sealed for, and for nothing else."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.errors import InvalidArgumentError
from corn.noise import (
    Delivery,
    Owner,
    RefusedPackageError,
    Roster,
    Secret,
    generate_identity,
    open_seed,
    seal_seed,
)

from ..leaks import shows

IDENTITIES = [generate_identity() for _ in range(4)]
ROSTER = Roster(tuple(identity.public_key for identity in IDENTITIES))
SEED = Secret.random()
DELIVERY = Delivery(
    plan_fingerprint=bytes(32), run_nonce=bytes(32), group=Owner((0, 1, 3), 5), receiver=3
)
PACKAGE = seal_seed(SEED, DELIVERY, identity=IDENTITIES[0], roster=ROSTER)


def test_the_receiver_gets_the_seed() -> None:
    assert open_seed(PACKAGE, DELIVERY, identity=IDENTITIES[3], roster=ROSTER) == SEED
    assert SEED.reveal() not in PACKAGE


def test_sealing_again_gives_another_package_with_the_same_seed() -> None:
    again = seal_seed(SEED, DELIVERY, identity=IDENTITIES[0], roster=ROSTER)
    assert again != PACKAGE
    assert open_seed(again, DELIVERY, identity=IDENTITIES[3], roster=ROSTER) == SEED


@pytest.mark.parametrize(
    ("change", "agent", "message"),
    [
        ({"plan_fingerprint": b"\x01" * 32}, 3, "for another plan"),
        ({"run_nonce": b"\x01" * 32}, 3, "for another run"),
        ({"group": Owner((0, 1, 3), 6)}, 3, "for another group"),
        ({"group": Owner((0, 2, 3), 5)}, 3, "for another group"),
        ({"group": Owner((1, 2, 3), 5)}, 3, "for another group"),
        ({"receiver": 1}, 1, "for another receiver"),
    ],
)
def test_a_replayed_package_is_refused(change: dict[str, Any], agent: int, message: str) -> None:
    with pytest.raises(RefusedPackageError, match=message):
        open_seed(PACKAGE, replace(DELIVERY, **change), identity=IDENTITIES[agent], roster=ROSTER)


def test_a_header_rewritten_for_a_replay_is_refused() -> None:
    other = replace(DELIVERY, run_nonce=b"\x01" * 32)
    donor = seal_seed(SEED, other, identity=IDENTITIES[0], roster=ROSTER)
    split = len(PACKAGE) - (4 + 12 + 4 + 48)
    with pytest.raises(RefusedPackageError, match="was changed on its way"):
        open_seed(donor[:split] + PACKAGE[split:], other, identity=IDENTITIES[3], roster=ROSTER)


@given(position=st.integers(0, len(PACKAGE) - 1), flip=st.integers(1, 255))
def test_any_changed_byte_is_refused(position: int, flip: int) -> None:
    changed = bytearray(PACKAGE)
    changed[position] ^= flip
    with pytest.raises(RefusedPackageError):
        open_seed(bytes(changed), DELIVERY, identity=IDENTITIES[3], roster=ROSTER)


@given(length=st.integers(0, len(PACKAGE) - 1))
def test_any_truncated_package_is_refused(length: int) -> None:
    for package in (PACKAGE[:length], PACKAGE[length + 1 :], PACKAGE + PACKAGE[:length] + b"x"):
        with pytest.raises(RefusedPackageError):
            open_seed(package, DELIVERY, identity=IDENTITIES[3], roster=ROSTER)


@given(package=st.binary(max_size=300))
def test_random_bytes_are_refused(package: bytes) -> None:
    with pytest.raises(RefusedPackageError):
        open_seed(package, DELIVERY, identity=IDENTITIES[3], roster=ROSTER)


def test_a_sender_without_the_rosters_key_is_refused() -> None:
    stranger = generate_identity()
    keys = (stranger.public_key, *ROSTER.public_keys[1:])
    forged = seal_seed(SEED, DELIVERY, identity=stranger, roster=Roster(keys))
    with pytest.raises(RefusedPackageError, match="agent 0 sealed it with a key other than"):
        open_seed(forged, DELIVERY, identity=IDENTITIES[3], roster=ROSTER)


def test_the_wrong_identity_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="this identity is not agent 3's"):
        open_seed(PACKAGE, DELIVERY, identity=IDENTITIES[1], roster=ROSTER)
    with pytest.raises(InvalidArgumentError, match="this identity is not agent 0's"):
        seal_seed(SEED, DELIVERY, identity=IDENTITIES[3], roster=ROSTER)


@pytest.mark.parametrize(
    "change", [{"receiver": 0}, {"receiver": 2}, {"group": Owner((3,))}, {"group": Owner((3,), 1)}]
)
def test_deliveries_outside_the_group_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="from the lowest member"):
        replace(DELIVERY, **change)


def test_errors_do_not_show_the_seed() -> None:
    changed = PACKAGE[:-1] + bytes([PACKAGE[-1] ^ 1])
    with pytest.raises(RefusedPackageError) as caught:
        open_seed(changed, DELIVERY, identity=IDENTITIES[3], roster=ROSTER)
    assert not shows(SEED, str(caught.value) + repr(caught.value))
