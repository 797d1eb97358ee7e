"""Messages over real links: checked, overlapped, counted, and never waiting for a lost agent."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corn.distributed.exchange import (
    NEVER,
    Dropout,
    Exchange,
    Header,
    ProtocolError,
    Received,
    StopNotice,
    StopReason,
    check_header,
    decode_header,
    header_bytes,
    message_bytes,
)
from corn.distributed.links import Link, LinkError, open_links
from corn.distributed.rendezvous import Rendezvous

from .threads import run_in_threads

D = 1000
HEADER = Header(b"p" * 8, bytes(8), 1, 7, 0, 2, 400, (NEVER, 5, NEVER))


@given(
    step=st.integers(0, 2**32 - 2),
    noticed=st.lists(st.integers(0, NEVER), min_size=3, max_size=3),
    stop=st.builds(
        StopNotice, st.integers(0, NEVER), st.integers(0, 2), st.sampled_from(StopReason)
    ),
    is_heartbeat=st.booleans(),
)
def test_a_header_is_decoded_as_it_was_encoded(
    step: int, noticed: list[int], stop: StopNotice, is_heartbeat: bool
) -> None:
    sent = replace(HEADER, step=step, noticed=tuple(noticed), stop=stop, is_heartbeat=is_heartbeat)
    data = sent.encode()
    assert len(data) == header_bytes(3)
    assert decode_header(data, num_agents=3, sender=1) == sent


def test_headers_are_small_and_keep_parameters_aligned() -> None:
    assert header_bytes(20) <= 200
    assert all(header_bytes(n) % 64 == 0 for n in range(1, 200))


def test_bytes_that_are_not_a_message_of_the_sender_are_refused() -> None:
    with pytest.raises(ProtocolError, match="agent 1 sent bytes that are not a message"):
        decode_header(bytes(header_bytes(3)), num_agents=3, sender=1)
    with pytest.raises(ProtocolError, match="agent 2's link carries a message of agent 1"):
        decode_header(HEADER.encode(), num_agents=3, sender=2)
    stranger = replace(HEADER, stop=StopNotice(9, 3, StopReason.LOSS))
    with pytest.raises(ProtocolError, match="agent 1 sent bytes that are not a message"):
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


def test_the_seal_is_never_zero() -> None:
    assert replace(HEADER, step=0, mixing_round=0).seal != bytes(8)


def header(agent: int, num_agents: int, step: int = 0) -> Header:
    return Header(bytes(8), bytes(8), agent, step, 0, 1, 4 * D, tuple([NEVER] * num_agents))


def connect(rendezvous: Rendezvous, neighbours: list[int], *, timeout: float = 20.0) -> Exchange:
    n = rendezvous.num_agents
    links = open_links(
        rendezvous.store,
        rendezvous.agent,
        neighbours,
        message_bytes=message_bytes(n, 4 * D),
        timeout=timeout,
        address=rendezvous.address,
    )
    return Exchange(
        links,
        agent=rendezvous.agent,
        num_agents=n,
        num_parameters=D,
        dtype=torch.float32,
        timeout=timeout,
    )


def test_agents_receive_from_their_neighbours_only() -> None:
    graph = {0: [1], 1: [0, 2], 2: [1]}

    def run(
        rendezvous: Rendezvous,
    ) -> tuple[list[dict[int, float]], dict[int, tuple[int, int, int]]]:
        exchange = connect(rendezvous, graph[rendezvous.agent])
        heard = []
        for step in range(5):
            exchange.start(
                header(rendezvous.agent, 3, step), torch.full((D,), rendezvous.agent + step)
            )
            found = exchange.finish()
            heard.append(
                {peer: float(one.parameters[-1]) for peer, one in found.items()}  # type: ignore[union-attr]
            )
        traffic = {
            peer: (own.messages_sent, own.messages_received, own.bytes_sent)
            for peer, own in exchange.traffic.items()
        }
        exchange.close()
        return heard, traffic

    size = message_bytes(3, 4 * D)
    for agent, result in enumerate(run_in_threads(3, run)):
        assert isinstance(result, tuple), result
        heard, traffic = result
        assert heard == [{peer: float(peer + step) for peer in graph[agent]} for step in range(5)]
        assert traffic == dict.fromkeys(graph[agent], (5, 5, 5 * size))


def test_a_neighbour_that_leaves_is_noticed_at_once() -> None:
    def run(rendezvous: Rendezvous) -> object:
        exchange = connect(rendezvous, [1 - rendezvous.agent])
        exchange.start(header(rendezvous.agent, 2), torch.zeros(D))
        exchange.finish()
        if rendezvous.agent == 1:
            exchange.close()
            return None
        began = time.monotonic()
        exchange.start(header(0, 2, 1), torch.zeros(D))
        found = exchange.finish()
        assert exchange.neighbours == ()
        exchange.close()
        return found, time.monotonic() - began

    result, other = run_in_threads(2, run)
    assert other is None
    assert isinstance(result, tuple), result
    assert result[0] == {1: Dropout.CLOSED}
    assert result[1] < 10


def test_a_silent_agent_times_out_and_its_neighbours_do_not() -> None:
    """On the path 0 – 1 – 2, 0 falls silent: 1 loses it, and 2 goes on waiting for 1."""
    is_over = threading.Event()
    graph = {0: [1], 1: [0, 2], 2: [1]}

    def run(rendezvous: Rendezvous) -> object:
        agent = rendezvous.agent
        exchange = connect(rendezvous, graph[agent], timeout=2.0)
        heard = []
        for step in range(3):
            if agent == 0 and step == 1:
                exchange.stop_heartbeats()
                is_over.wait(20)
                break
            exchange.start(header(agent, 3, step), torch.zeros(D))
            heard.append(exchange.finish())
        heartbeats = sum(own.heartbeats for own in exchange.traffic.values())
        if agent == 2:
            is_over.set()
        exchange.close()
        return heard, heartbeats

    results = run_in_threads(3, run)
    assert all(isinstance(result, tuple) for result in results), results
    heard: Any = results[1][0]  # type: ignore[index]
    assert heard[1][0] is Dropout.SILENT
    assert isinstance(heard[2][2], Received)
    last: Any = results[2]
    assert all(isinstance(one[1], Received) for one in last[0])
    assert last[1] >= 1


def test_a_suspension_is_over_after_three_answers() -> None:
    """Two messages of a neighbour may be older than the suspension; a third is not."""

    def run(rendezvous: Rendezvous) -> list[bool]:
        exchange = connect(rendezvous, [1 - rendezvous.agent], timeout=3.0)
        with exchange._lock:  # keeps the beat waiting, as a stopped process would
            time.sleep(2.0)
            found = [exchange.was_suspended]
        for step in range(3):
            exchange.start(header(rendezvous.agent, 2, step), torch.zeros(D))
            exchange.finish()
            found.append(exchange.was_suspended)
        exchange.close()
        return found

    assert run_in_threads(2, run) == [[True, True, True, False]] * 2


@pytest.mark.parametrize(
    ("size", "step", "message"),
    [
        (D + 100, 0, "agent 1 sent 4400 bytes of parameters, not 4000"),
        (D - 100, 0, "agent 1 sent 3600 bytes of parameters, not 4000"),
        (D, 3, "agent 1 is at step 3"),
    ],
)
def test_a_message_of_the_wrong_size_or_step_is_one_clear_line(
    size: int, step: int, message: str
) -> None:
    def run(rendezvous: Rendezvous) -> object:
        exchange = connect(rendezvous, [1 - rendezvous.agent])
        try:
            if rendezvous.agent == 0:
                exchange.start(header(0, 2), torch.zeros(D))
                return exchange.finish()
            said = replace(header(1, 2, step), payload_bytes=4 * size)
            body = said.encode() + bytes(4 * size) + said.seal
            link: Link = exchange.link(0)
            link.post_receive()
            link.send(torch.frombuffer(bytearray(body), dtype=torch.uint8))
            link.wait_received(5)
            return None
        finally:
            exchange.close()

    result, _ = run_in_threads(2, run)
    assert isinstance(result, ProtocolError)
    assert message in str(result)


def test_a_neighbour_that_does_not_connect_is_named() -> None:
    def run(rendezvous: Rendezvous) -> object:
        return None if rendezvous.agent == 1 else connect(rendezvous, [1], timeout=0.5)

    result, _ = run_in_threads(2, run)
    assert isinstance(result, LinkError)
    assert "no connection to its neighbour agent 1 within 0.5 s" in str(result)
