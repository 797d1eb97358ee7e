"""A sponsor announces agents that will come; an agent returns to steps that it never released."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import networkx as nx
import pytest
import torch

from corn.distributed.handshake import Hello
from corn.distributed.membership import Membership
from corn.distributed.messages import Header
from corn.distributed.rejoin import RejoinError, Request, Sponsor, Welcome, request_return
from corn.distributed.rendezvous import Rendezvous
from corn.distributed.returns import Returns
from corn.transport import NO_SESSION, Channel, ChannelClosedError, MemoryStore, Purpose, dial

from .threads import make_credentials, make_rendezvous

N, LAST_STEP, NOTICE = 4, 100, 6
HELLO = Hello("ab" * 32, "model", "start", "roster", {}, "cd" * 32, remaining=LAST_STEP)
WELCOME = Welcome("ef" * 32, "cd" * 32, return_step=0, last_step=LAST_STEP, addresses={})


class Desk:
    """A sponsor, agent 0 of a ring of four that has lost agent 1."""

    def __init__(self) -> None:
        self.rendezvous = make_rendezvous(0, N, MemoryStore())
        self.sponsor = Sponsor(self.rendezvous)
        self.membership = Membership(nx.cycle_graph(N), 0)
        self.membership.note_cut(1, 5)
        self.membership.merge(Membership(nx.cycle_graph(N), 2, absent=[1], step=5).news)
        self.returns = Returns(
            HELLO,
            self.sponsor,
            desk=None,  # type: ignore[arg-type]
            welcome=lambda step, present: replace(WELCOME, return_step=step, present=present),
            last_step=LAST_STEP,
            timeout=1.0,
        )

    def ask(self, request: Request) -> Channel:
        """Return the connection of agent 1, once its request has arrived."""
        channel = dial(
            ("127.0.0.1", self.rendezvous.listener.port),
            make_credentials(1, N),
            0,
            Purpose.REJOIN,
            session=NO_SESSION,
            timeout=10,
        )
        before = self.sponsor._waiting.qsize()
        channel.send(json.dumps(asdict(request)).encode())
        deadline = time.monotonic() + 10
        while self.sponsor._waiting.qsize() == before and time.monotonic() < deadline:
            time.sleep(0.01)
        channel.set_timeout(5.0)
        return channel

    def serve(self, step: int) -> None:
        self.returns.serve(step, self.membership, NOTICE)

    @property
    def announced(self) -> set[int]:
        return {when for agent, when in self.membership.news.returns if agent == 1}


def read(channel: Channel) -> Any:
    return json.loads(bytes(channel.receive(max_bytes=10_000)))


@pytest.fixture
def desk() -> Iterator[Desk]:
    own = Desk()
    yield own
    own.returns.close()
    own.rendezvous.close()


def test_an_agent_that_is_gone_again_is_not_announced(desk: Desk) -> None:
    desk.ask(Request(HELLO, 0)).close()
    time.sleep(0.1)
    desk.serve(10)
    assert desk.announced == set()


def test_a_second_request_waits_until_the_step_of_the_first_is_over(desk: Desk) -> None:
    first = desk.ask(Request(HELLO, 0))
    desk.serve(10)
    assert read(first)["return_step"] == 17
    first.close()
    second = desk.ask(Request(HELLO, 0))
    for step in range(11, 18):
        desk.serve(step)
        assert desk.announced == {17}
    desk.returns.hand_over(17, Header(bytes(8), bytes(8), 0, 17, 0, 1, 4), torch.zeros(1))
    for peer in (0, 2):  # it did not come
        desk.membership.merge(Membership(nx.cycle_graph(N), peer, absent=[1], step=17).news)
    desk.serve(18)
    assert read(second)["return_step"] == 25
    second.close()


def test_a_ledger_must_allow_all_steps_that_are_left(desk: Desk) -> None:
    channel = desk.ask(Request(replace(HELLO, remaining=82), 0))
    desk.serve(10)
    assert "fewer releases than the 83 steps" in read(channel)["refusal"]
    channel.close()
    channel = desk.ask(Request(replace(HELLO, remaining=83), 0))
    desk.serve(10)
    assert read(channel)["return_step"] == 17
    channel.close()


def test_a_stop_before_the_return_ends_the_wait(desk: Desk) -> None:
    channel = desk.ask(Request(HELLO, 0))
    desk.serve(10)
    assert read(channel)["return_step"] == 17
    assert read(channel) == 10
    desk.returns.close()
    with pytest.raises(ChannelClosedError, match="closed the connection"):
        read(channel)
    channel.close()


@pytest.mark.parametrize(
    ("welcome", "reason"),
    [
        (asdict(replace(WELCOME, return_step=39)), "steps before 40 may have been released"),
        (asdict(WELCOME) | {"return_step": 50, "nonce": "zz"}, "cannot be read"),
        (asdict(WELCOME) | {"return_step": 50, "session": "-"}, "cannot be read"),
        (asdict(WELCOME) | {"return_step": 50, "addresses": {"x": ["h", 1]}}, "cannot be read"),
    ],
)
def test_an_agent_believes_no_sponsor_that_names_old_steps(
    welcome: dict[str, object], reason: str
) -> None:
    sponsor, own = (make_rendezvous(agent, N, MemoryStore(), timeout=5) for agent in (0, 1))

    def answer(channel: Channel) -> None:
        channel.receive(max_bytes=10_000)
        channel.send(json.dumps(welcome).encode())
        channel.close()

    sponsor.listener.handle(Purpose.REJOIN, NO_SESSION, answer)
    with pytest.raises(RejoinError, match=reason):
        ask_to_return(own, sponsor)
    sponsor.close()
    own.close()


def ask_to_return(own: Rendezvous, sponsor: Rendezvous) -> object:
    return request_return(
        own,
        Request(HELLO, first_free_step=40),
        [0],
        {0: ("127.0.0.1", sponsor.listener.port)},
        dtype=torch.float32,
        max_bytes=10_000,
    )
