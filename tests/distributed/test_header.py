"""Messages say what they are; anything else is refused with the sender's name."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.distributed.header import (
    Header,
    ProtocolError,
    check_header,
    decode_header,
    header_bytes,
)
from corn.distributed.membership import NEVER, StopNotice

HEADER = Header(b"p" * 8, bytes(8), 1, 7, 0, 2, 400, (NEVER, 5, NEVER))


@given(
    step=st.integers(0, 2**32 - 2),
    noticed=st.lists(st.integers(0, NEVER), min_size=3, max_size=3),
    stop=st.builds(
        StopNotice, st.integers(0, NEVER), st.integers(0, 2), st.sampled_from(["loss", "diverged"])
    ),
    is_wait=st.booleans(),
)
def test_a_header_survives_the_way(
    step: int, noticed: list[int], stop: StopNotice, is_wait: bool
) -> None:
    sent = replace(HEADER, step=step, noticed=tuple(noticed), stop=stop, is_wait=is_wait)
    data = sent.encode()
    assert len(data) == header_bytes(3)
    assert decode_header(data, num_agents=3, sender=1) == sent


def test_headers_are_small_and_keep_parameters_aligned() -> None:
    assert header_bytes(20) <= 200
    assert all(header_bytes(n) % 64 == 0 for n in range(1, 200))


def test_something_else_is_refused() -> None:
    with pytest.raises(ProtocolError, match="agent 1 sent something that is not a message"):
        decode_header(bytes(header_bytes(3)), num_agents=3, sender=1)
    with pytest.raises(ProtocolError, match="agent 2's link carries a message of agent 1"):
        decode_header(HEADER.encode(), num_agents=3, sender=2)
    stranger = replace(HEADER, stop=StopNotice(9, 3, "loss"))
    with pytest.raises(ProtocolError, match="agent 1 sent something that is not a message"):
        decode_header(stranger.encode(), num_agents=3, sender=1)


@pytest.mark.parametrize(
    ("found", "seal", "message"),
    [
        (replace(HEADER, plan=b"q" * 8), HEADER.seal, "agent 1 runs another plan"),
        (replace(HEADER, step=8), HEADER.seal, "agent 1 is at step 8, round 0, not at step 7"),
        (replace(HEADER, mixing_round=1), HEADER.seal, "at step 7, round 1, not at step 7"),
        (replace(HEADER, payload_bytes=404), HEADER.seal, "agent 1 sent 404 bytes of parameters"),
        (HEADER, bytes(8), "agent 1 sent a message that was cut short"),
    ],
)
def test_a_message_of_another_step_or_size_is_refused(
    found: Header, seal: bytes, message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        check_header(found, replace(HEADER, sender=0), seal)


def test_the_seal_is_never_what_an_empty_buffer_holds() -> None:
    assert replace(HEADER, step=0, mixing_round=0).seal != bytes(8)
