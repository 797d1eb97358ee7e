"""Exchanges over real links: overlapped, counted, and never waiting for the dead."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from corn.distributed.exchange import Dropout, LinkExchange, Received
from corn.distributed.header import SEAL_BYTES, Header, ProtocolError, header_bytes
from corn.distributed.links import (
    Link,
    choose_backend,
    find_address,
    open_links,
)
from corn.distributed.meeting import Meeting
from corn.distributed.membership import NEVER
from corn.errors import CornError, InvalidArgumentError

from .threads import run_in_threads

D = 1000


def header(agent: int, num_agents: int, step: int = 0) -> Header:
    return Header(bytes(8), bytes(8), agent, step, 0, 1, 4 * D, tuple([NEVER] * num_agents))


def connect(meeting: Meeting, neighbours: list[int], *, timeout: float = 20.0) -> LinkExchange:
    n = meeting.num_agents
    links = open_links(
        meeting.store,
        meeting.agent,
        neighbours,
        message_bytes=header_bytes(n) + 4 * D + SEAL_BYTES,
        timeout=timeout,
        address=meeting.address,
    )
    return LinkExchange(
        links,
        agent=meeting.agent,
        num_agents=n,
        num_parameters=D,
        dtype=torch.float32,
        timeout=timeout,
    )


def test_everyone_hears_its_neighbours_and_nobody_else() -> None:
    graph = {0: [1], 1: [0, 2], 2: [1]}

    def run(meeting: Meeting) -> tuple[list[dict[int, float]], dict[int, tuple[int, int, int]]]:
        exchange = connect(meeting, graph[meeting.agent])
        heard = []
        for step in range(5):
            exchange.start(header(meeting.agent, 3, step), torch.full((D,), meeting.agent + step))
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

    size = header_bytes(3) + 4 * D + SEAL_BYTES
    for agent, result in enumerate(run_in_threads(3, run)):
        assert isinstance(result, tuple), result
        heard, traffic = result
        assert heard == [{peer: float(peer + step) for peer in graph[agent]} for step in range(5)]
        assert traffic == dict.fromkeys(graph[agent], (5, 5, 5 * size))


def test_a_neighbour_that_leaves_is_noticed_at_once() -> None:
    def run(meeting: Meeting) -> object:
        exchange = connect(meeting, [1 - meeting.agent])
        exchange.start(header(meeting.agent, 2), torch.zeros(D))
        exchange.finish()
        if meeting.agent == 1:
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
    assert result[0] == {1: Dropout("agent 1 closed its connection")}
    assert result[1] < 10


def test_silence_times_out_and_does_not_spread() -> None:
    """0 – 1 – 2, where 0 falls silent: 1 gives it up, and 2 goes on waiting for 1."""
    is_over = threading.Event()
    graph = {0: [1], 1: [0, 2], 2: [1]}

    def run(meeting: Meeting) -> object:
        agent = meeting.agent
        exchange = connect(meeting, graph[agent], timeout=2.0)
        heard = []
        for step in range(3):
            if agent == 0 and step == 1:
                exchange.stop_beating()
                is_over.wait(20)
                break
            exchange.start(header(agent, 3, step), torch.zeros(D))
            heard.append(exchange.finish())
        waits = sum(own.waits for own in exchange.traffic.values())
        if agent == 2:
            is_over.set()
        exchange.close()
        return heard, waits

    results = run_in_threads(3, run)
    assert all(isinstance(result, tuple) for result in results), results
    heard: Any = results[1][0]  # type: ignore[index]
    assert heard[1][0] == Dropout("agent 0 sent nothing for 2 s (time-out)")
    assert isinstance(heard[2][2], Received)
    last: Any = results[2]
    assert all(isinstance(one[1], Received) for one in last[0])
    assert last[1] >= 1


def test_a_pause_is_forgotten_once_neighbours_have_answered() -> None:
    """Two of their messages may be older than the pause; a third is not."""

    def run(meeting: Meeting) -> list[bool]:
        exchange = connect(meeting, [1 - meeting.agent], timeout=3.0)
        with exchange._lock:  # keeps the beat waiting, as a stopped process would
            time.sleep(2.0)
            found = [exchange.was_suspended]
        for step in range(3):
            exchange.start(header(meeting.agent, 2, step), torch.zeros(D))
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
    def run(meeting: Meeting) -> object:
        exchange = connect(meeting, [1 - meeting.agent])
        try:
            if meeting.agent == 0:
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


def test_a_neighbour_that_does_not_come_is_named() -> None:
    def run(meeting: Meeting) -> object:
        return None if meeting.agent == 1 else connect(meeting, [1], timeout=0.5)

    result, _ = run_in_threads(2, run)
    assert isinstance(result, CornError)
    assert "agent 0: no connection to its neighbour agent 1 within 0.5 s" in str(result)


def test_the_backend_follows_the_device() -> None:
    assert (choose_backend("cpu"), choose_backend("cuda:1")) == ("gloo", "nccl")
    where = {"message_bytes": 8, "timeout": 1.0, "address": "", "backend": "nccl"}
    with pytest.raises(InvalidArgumentError, match="backend must be gloo"):
        open_links(HashStore(), 0, [1], **where)  # type: ignore[arg-type]


def test_the_address_is_the_one_on_the_way() -> None:
    assert find_address("127.0.0.1", 80) == "127.0.0.1"
    with pytest.raises(CornError, match="no way to this host"):
        find_address("no.such.host.invalid", 80)
