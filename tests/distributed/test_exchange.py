"""Messages over real links: checked, overlapped, counted, and never waiting for a lost agent."""

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corn.distributed.exchange import Exchange, StepStopped
from corn.distributed.messages import (
    Header,
    Kind,
    News,
    ProtocolError,
    Saying,
    Subject,
    check_header,
    decode_message,
    message_limit,
)
from corn.distributed.rendezvous import Rendezvous
from corn.transport import Dropout, LinkError, open_links

from .threads import make_membership, run_in_threads

D = 1000
HEADER = Header(b"p" * 8, 1, 7, 0, 400, {Subject(Kind.CUT, 0, 1, 0): Saying(5)})
SUBJECTS = [Subject(Kind.CUT, i, j, a) for i, j in [(0, 1), (0, 2), (1, 2)] for a in (i, j)]
SUBJECTS += [
    Subject(kind, a, a, a) for kind in list(Kind)[Kind.LEAVE : Kind.WAIT] for a in range(3)
]


def decode(data: bytes, *, sender: int = 1, num_agents: int = 3) -> Header:
    view = memoryview(bytearray(data))
    return decode_message(view, num_agents=num_agents, sender=sender, dtype=torch.float32)[0]


@given(
    step=st.integers(0, 2**32 - 2),
    news=st.dictionaries(
        st.sampled_from(SUBJECTS),
        st.builds(Saying, st.integers(0, 2**32 - 1), st.binary(min_size=64, max_size=64)),
    ),
)
def test_a_header_is_decoded_as_it_was_encoded(step: int, news: News) -> None:
    sent = replace(HEADER, step=step, news=news)
    data = sent.encode()
    assert len(data) % 64 == 0  # parameters are aligned
    assert decode(data + bytes(400)) == sent


def test_headers_are_small_where_nothing_happened() -> None:
    assert len(replace(HEADER, news={}).encode()) == 192
    everything = replace(HEADER, news=dict.fromkeys(SUBJECTS, Saying(5)))
    assert len(everything.encode()) == message_limit(3, 3, 0)
    assert len(HEADER.encode()) <= message_limit(3, 3, 0)


def test_bytes_that_are_not_a_message_of_the_sender_are_refused() -> None:
    body = HEADER.encode() + bytes(400)
    for damaged in (bytes(500), b"", body[:40]):
        with pytest.raises(ProtocolError, match="agent 1 sent bytes that are not a message"):
            decode(damaged)
    with pytest.raises(ProtocolError, match="agent 2's link carries a message of agent 1"):
        decode(body, sender=2)
    for stranger in ((0, 1, 2), (1, 0, 0), (0, 3, 0)):
        false = replace(HEADER, news={Subject(Kind.CUT, *stranger): Saying(9)})
        with pytest.raises(ProtocolError, match="news that no agent may say"):
            decode(false.encode() + bytes(400))
    for cut in (body[:-4], body + b"more"):
        with pytest.raises(ProtocolError, match="cut short or is damaged"):
            decode(cut)


@given(st.integers(0, 2**32), st.binary(min_size=1, max_size=8))
def test_no_damaged_message_crashes_an_agent(place: int, change: bytes) -> None:
    body = bytearray(HEADER.encode() + bytes(400))
    begin = place % len(body)
    body[begin : begin + len(change)] = change
    try:
        decode(bytes(body))
    except ProtocolError:
        return


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (replace(HEADER, plan=b"q" * 8), "agent 1 runs another plan"),
        (replace(HEADER, step=8), "agent 1 is at step 8, round 0, not at step 7"),
        (replace(HEADER, mixing_round=1), "at step 7, round 1, not at step 7"),
        (replace(HEADER, payload_bytes=404), "agent 1 sent 404 bytes of parameters"),
    ],
)
def test_a_message_of_another_step_or_size_is_refused(found: Header, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        check_header(found, replace(HEADER, sender=0))


def header(agent: int, step: int = 0) -> Header:
    return Header(bytes(8), agent, step, 0, 4 * D)


def connect(
    rendezvous: Rendezvous, neighbours: Iterable[int], *, timeout: float = 20.0
) -> Exchange:
    n = rendezvous.num_agents
    opener = rendezvous.make_opener(rendezvous.meeting, max_bytes=message_limit(n, n**2, 8 * D))
    links = open_links(opener, neighbours, timeout=rendezvous.timeout, check=rendezvous.check)
    membership = make_membership(nx.complete_graph(n), rendezvous.agent)
    return Exchange(links, membership, dtype=torch.float32, timeout=timeout)


def find_lost(exchange: Exchange) -> Mapping[int, LinkError]:
    """Return the neighbours that are lost in a round, and how."""
    try:
        exchange.finish()
    except StepStopped as stopped:
        return stopped.dropouts
    return {}


def test_agents_receive_from_their_neighbours_only() -> None:
    graph = {0: [1], 1: [0, 2], 2: [1]}

    def run(
        rendezvous: Rendezvous,
    ) -> tuple[list[dict[int, float]], dict[int, tuple[int, int]]]:
        # Heartbeats show how long an agent computes, and must not add to the bytes.
        exchange = connect(rendezvous, graph[rendezvous.agent], timeout=600.0)
        for link in exchange._links.values():
            link.send_heartbeat()
        heard = []
        for step in range(5):
            exchange.start(
                header(rendezvous.agent, step), torch.full((D,), float(rendezvous.agent + step))
            )
            found = exchange.finish()
            heard.append({peer: float(one[-1]) for peer, one in found.items()})
        traffic = {
            peer: (own.messages_sent, own.bytes_sent) for peer, own in exchange.traffic.items()
        }
        exchange.close()
        return heard, traffic

    # Sealing adds 24 bytes for the length, and 16 for the message.
    size = 192 + 4 * D + 24 + 16
    for agent, result in enumerate(run_in_threads(3, run)):
        assert isinstance(result, tuple), result
        heard, traffic = result
        steps = range(5)
        assert heard == [{peer: float(peer + step) for peer in graph[agent]} for step in steps]
        assert traffic == dict.fromkeys(graph[agent], (5, 5 * size))


def test_a_neighbour_that_leaves_is_noticed_at_once() -> None:
    def run(rendezvous: Rendezvous) -> object:
        exchange = connect(rendezvous, [1 - rendezvous.agent])
        exchange.start(header(rendezvous.agent), torch.zeros(D))
        exchange.finish()
        if rendezvous.agent == 1:
            exchange.close()
            return None
        began = time.monotonic()
        exchange.start(header(0, 1), torch.zeros(D))
        lost = find_lost(exchange)
        assert exchange.neighbours == ()
        exchange.close()
        return lost, time.monotonic() - began

    result, other = run_in_threads(2, run)
    assert other is None
    assert isinstance(result, tuple), result
    assert result[0][1].dropout is Dropout.CLOSED
    assert result[1] < 15


@pytest.mark.slow
def test_a_silent_agent_times_out_and_its_neighbours_do_not() -> None:
    """On the path 0 – 1 – 2, 0 falls silent: 1 loses it, and 2 goes on waiting for 1."""
    is_over = threading.Event()
    graph = {0: [1], 1: [0, 2], 2: [1]}

    def run(rendezvous: Rendezvous) -> object:
        agent = rendezvous.agent
        exchange = connect(rendezvous, graph[agent], timeout=5.0)
        heard = []
        for step in range(3):
            if agent == 0 and step == 1:
                exchange.stop_heartbeats()
                is_over.wait(50)
                break
            exchange.start(header(agent, step), torch.zeros(D))
            heard.append(find_lost(exchange))
        heartbeats = sum(len(link.note) > 0 for link in exchange._links.values())
        if agent == 2:
            is_over.set()
        exchange.close()
        return heard, heartbeats

    results = run_in_threads(3, run)
    assert all(isinstance(result, tuple) for result in results), results
    heard: Any = results[1][0]  # type: ignore[index]
    assert heard[1][0].dropout is Dropout.SILENT
    assert heard[2] == {}
    last: Any = results[2]
    assert last[0] == [{}, {}, {}]
    assert last[1] >= 1


def test_several_silent_neighbours_cost_one_time_out_together() -> None:
    is_over, timeout, silent = threading.Event(), 3.0, range(1, 6)

    def run(rendezvous: Rendezvous) -> object:
        exchange = connect(rendezvous, silent if rendezvous.agent == 0 else [0], timeout=timeout)
        if rendezvous.agent:
            exchange.stop_heartbeats()
            is_over.wait(60)
            exchange.close()
            return None
        began = time.monotonic()
        exchange.start(header(0), torch.zeros(D))
        lost = {peer: error.dropout for peer, error in find_lost(exchange).items()}
        is_over.set()
        exchange.close()
        return lost, time.monotonic() - began

    result: Any = run_in_threads(6, run)[0]
    assert result[0] == dict.fromkeys(silent, Dropout.SILENT)
    # One after another they would cost five time-outs. The rest is for pauses of the machine.
    assert result[1] < 5 * timeout


def test_a_message_longer_than_agreed_breaks_the_link_and_nothing_else() -> None:
    def run(rendezvous: Rendezvous) -> Any:
        exchange = connect(rendezvous, [1 - rendezvous.agent])
        try:
            if rendezvous.agent == 1:
                exchange._links[0].send(bytes(10_000_000))
            exchange.start(header(rendezvous.agent), torch.zeros(D))
            return find_lost(exchange)
        finally:
            exchange.close()

    result, _ = run_in_threads(2, run)
    assert result[1].dropout is Dropout.TAMPERED  # type: ignore[index]
