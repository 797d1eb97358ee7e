"""A seed package opens for the purpose it was sealed for, and for nothing else."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.errors import CornError, InvalidArgumentError
from corn.noise import Owner, Roster, Secret, SeedDelivery, generate_identity

from ..leaks import shows

IDENTITIES = [generate_identity() for _ in range(4)]
ROSTER = Roster(tuple(identity.public_key for identity in IDENTITIES))
SEED = Secret.random()
GROUP = Owner((0, 1, 3), 5)


def deliver(agent: int, **changes: Any) -> SeedDelivery:
    own: dict[str, Any] = {"identity": IDENTITIES[agent], "agent": agent, "roster": ROSTER}
    return SeedDelivery(**own | {"plan_fingerprint": bytes(32), "run_nonce": bytes(32)} | changes)


def seal(sender: int = 0, receiver: int = 3, group: Owner = GROUP, **changes: Any) -> bytes:
    return deliver(sender, **changes).seal(SEED, group, receiver)


def unseal(package: bytes, agent: int = 3, group: Owner = GROUP, **changes: Any) -> Secret:
    return deliver(agent, **changes).open(package, group)


PACKAGE = seal()


def test_the_receiver_gets_the_seed() -> None:
    assert unseal(PACKAGE) == SEED
    assert SEED.reveal() not in PACKAGE


def test_sealing_again_gives_another_package_with_the_same_seed() -> None:
    again = seal()
    assert again != PACKAGE
    assert unseal(again) == SEED


@pytest.mark.parametrize(
    ("change", "agent"),
    [
        ({"plan_fingerprint": b"\x01" * 32}, 3),
        ({"run_nonce": b"\x01" * 32}, 3),
        ({"group": Owner((0, 1, 3), 6)}, 3),
        ({"group": Owner((0, 2, 3), 5)}, 3),
        ({"group": Owner((1, 2, 3), 5)}, 3),
        ({}, 1),
    ],
)
def test_a_replayed_package_is_refused(change: dict[str, Any], agent: int) -> None:
    with pytest.raises(CornError, match="for another plan, run or agent"):
        unseal(PACKAGE, agent, **change)
    # The same purpose on both sides is accepted: it is the difference that is refused.
    sender = change.get("group", GROUP).members[0]
    assert unseal(seal(sender, agent, **change), agent, **change) == SEED


@given(position=st.integers(0, len(PACKAGE) - 1), flip=st.integers(1, 255))
def test_any_changed_byte_is_refused(position: int, flip: int) -> None:
    changed = bytearray(PACKAGE)
    changed[position] ^= flip
    with pytest.raises(CornError):
        unseal(bytes(changed))


@given(length=st.integers(0, len(PACKAGE) - 1))
def test_any_truncated_package_is_refused(length: int) -> None:
    for package in (PACKAGE[:length], PACKAGE[length + 1 :], PACKAGE + PACKAGE[:length] + b"x"):
        with pytest.raises(CornError):
            unseal(package)


def test_a_sender_without_the_rosters_key_is_refused() -> None:
    stranger = generate_identity()
    keys = (stranger.public_key, *ROSTER.public_keys[1:])
    forged = seal(identity=stranger, roster=Roster(keys))
    with pytest.raises(CornError, match="agent 0 sealed it with a key other than"):
        unseal(forged)


def test_the_wrong_identity_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="this identity is not agent 3's"):
        unseal(PACKAGE, identity=IDENTITIES[1])
    with pytest.raises(InvalidArgumentError, match="this identity is not agent 0's"):
        seal(identity=IDENTITIES[3])


@pytest.mark.parametrize("places", [(0, 2), (0, 0), (1, 3), (2, 3)])
def test_seeds_outside_a_group_are_refused(places: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"a later member|the first of"):
        seal(*places)


def test_errors_do_not_show_the_seed() -> None:
    changed = PACKAGE[:-1] + bytes([PACKAGE[-1] ^ 1])
    with pytest.raises(CornError) as caught:
        unseal(changed)
    assert not shows(SEED, str(caught.value) + repr(caught.value))
