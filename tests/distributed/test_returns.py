"""A sponsor announces agents that will come; an agent returns to steps that it never released."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networkx as nx
import pytest
import torch

from corn.distributed.entry import (
    AgreedRun,
    Entry,
    make_exchange,
    make_membership,
    make_returns,
    return_to_run,
)
from corn.distributed.handshake import Agreement, Hello
from corn.distributed.membership import Membership
from corn.distributed.messages import Header, News, NewsKeys
from corn.distributed.recovery import ActivePlan
from corn.distributed.rejoin import (
    RejoinError,
    Request,
    Returns,
    Sponsor,
    Welcome,
    load_addresses,
    request_return,
)
from corn.distributed.rendezvous import Meeting, Rendezvous
from corn.distributed.requirements import Requirements
from corn.distributed.rounds import TrainingRounds
from corn.distributed.settings import RunSettings
from corn.errors import FileFormatError
from corn.learn.schedule import Constant
from corn.learn.sweep import Interruption
from corn.transport import (
    NO_SESSION,
    Channel,
    ChannelClosedError,
    MemoryStore,
    Purpose,
    dial,
    open_links,
)

from .harness import small_plan
from .test_rounds import Silence
from .threads import make_credentials, make_rendezvous, run_in_threads

N, LAST_STEP, NOTICE = 4, 100, 6
HELLO = Hello("ab" * 32, {"the model": "linear"}, "cd" * 32, remaining=LAST_STEP)
WELCOME = Welcome("ef" * 32, "cd" * 32, return_step=0, last_step=LAST_STEP, addresses={})


def lose(agent: int, peer: int, step: int) -> News:
    """Return an agent's news that its link to another broke."""
    own = Membership(nx.cycle_graph(N), agent)
    own.note_cut(peer, step)
    return own.news


class Desk:
    """A sponsor, agent 0 of a ring of four that has lost agent 1."""

    def __init__(self) -> None:
        self.rendezvous = make_rendezvous(0, N, MemoryStore())
        self.sponsor = Sponsor(self.rendezvous)
        self.membership = Membership(nx.cycle_graph(N), 0)
        self.membership.note_cut(1, 5)
        self.membership.merge(lose(2, 1, 5))
        self.returns = Returns(
            HELLO,
            self.sponsor,
            opener=None,  # type: ignore[arg-type]
            welcome=lambda step, present: replace(WELCOME, return_step=step, present=present),
            last_step=LAST_STEP,
            timeout=30.0,
        )

    def ask(self, request: Request, *, confirms: bool = True) -> Channel:
        """Return the connection of agent 1, once its request has arrived."""
        channel = dial(
            ("127.0.0.1", self.rendezvous.listener.port),
            make_credentials(1, N),
            0,
            Purpose.REJOIN,
            session=NO_SESSION,
            timeout=60,
        )
        before = len(self.sponsor._waiting)
        channel.send(json.dumps(asdict(request)).encode())
        if confirms:
            channel.send(b"")  # in the place of a signature
        deadline = time.monotonic() + 60
        while len(self.sponsor._waiting) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        channel.set_timeout(60.0)
        return channel

    def serve(self, step: int) -> None:
        self.returns.serve(step, self.membership, NOTICE)

    @property
    def announced(self) -> set[int]:
        return {when for agent, when in self.membership.news.returns if agent == 1}


def read(channel: Channel) -> Any:
    return json.loads(bytes(channel.receive(max_bytes=10_000)))


@pytest.fixture
def opener() -> Iterator[Desk]:
    own = Desk()
    yield own
    own.returns.close()
    own.rendezvous.close()


def test_an_agent_that_is_gone_again_is_not_announced(opener: Desk) -> None:
    opener.ask(Request(HELLO, 0), confirms=False).close()
    time.sleep(0.1)
    opener.serve(10)
    assert opener.announced == set()


def test_an_agent_that_trains_alone_helps_only_those_who_find_no_others(opener: Desk) -> None:
    opener.membership.note_cut(3, 6)
    in_company = opener.ask(Request(HELLO, 0, wants_company=True))
    opener.serve(10)
    assert read(in_company)["is_alone"]
    assert opener.announced == set()
    at_any_price = opener.ask(Request(HELLO, 0))
    opener.serve(11)
    assert read(at_any_price)["refusal"] == ""
    assert opener.announced == {18}
    in_company.close()
    at_any_price.close()


def test_all_others_may_ask_at_the_same_time() -> None:
    num_agents = 8
    own = make_rendezvous(0, num_agents, MemoryStore())
    sponsor, channels = Sponsor(own), list[Channel]()
    for agent in range(1, num_agents):
        credentials = make_credentials(agent, num_agents)
        channels.append(
            dial(own.address, credentials, 0, Purpose.REJOIN, session=NO_SESSION, timeout=60)
        )
        channels[-1].send(json.dumps(asdict(Request(HELLO, 0))).encode())
    deadline = time.monotonic() + 60
    while len(sponsor._waiting) < len(channels) and time.monotonic() < deadline:
        time.sleep(0.01)
    found = sponsor.take_applicants()
    assert {applicant.agent for applicant in found} == set(range(1, num_agents))
    for applicant in found:
        applicant.close()
    for channel in channels:
        channel.close()
    own.close()


def test_a_second_request_waits_until_the_step_of_the_first_is_over(opener: Desk) -> None:
    first = opener.ask(Request(HELLO, 0))
    opener.serve(10)
    assert read(first)["return_step"] == 17
    first.close()
    second = opener.ask(Request(HELLO, 0))
    for step in range(11, 18):
        opener.serve(step)
        assert opener.announced == {17}
    opener.returns.hand_over(17, Header(bytes(8), bytes(8), 0, 17, 0, 1, 4), torch.zeros(1))
    for peer in (0, 2):  # it did not come
        opener.membership.merge(lose(peer, 1, 17))
    opener.serve(18)
    assert read(second)["return_step"] == 25
    second.close()


def test_a_ledger_must_allow_all_steps_that_are_left(opener: Desk) -> None:
    channel = opener.ask(Request(replace(HELLO, remaining=82), 0))
    opener.serve(10)
    assert "fewer releases than the 83 steps" in read(channel)["refusal"]
    channel.close()
    channel = opener.ask(Request(replace(HELLO, remaining=83), 0))
    opener.serve(10)
    assert read(channel)["return_step"] == 17
    channel.close()


def test_a_stop_before_the_return_ends_the_wait(opener: Desk) -> None:
    channel = opener.ask(Request(HELLO, 0))
    opener.serve(10)
    assert read(channel)["return_step"] == 17
    assert read(channel) == 10
    opener.returns.close()
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
        (asdict(WELCOME) | {"return_step": 50, "addresses": {"1" * 99: ["h", 1]}}, "be read"),
    ],
)
def test_an_agent_believes_no_sponsor_that_names_old_steps(
    welcome: dict[str, object], reason: str
) -> None:
    with pytest.raises(RejoinError, match=reason):
        ask_to_return(json.dumps(welcome).encode())


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Header(bytes(8), bytes(8), 0, 50, 0, 1, 8).encode() + bytes(8), "sent 8 bytes of para"),
        (bytes(100), "bytes that are not a message"),
    ],
)
def test_a_model_of_another_size_is_refused_before_anything_is_reserved(
    message: bytes, reason: str
) -> None:
    welcome = json.dumps(asdict(replace(WELCOME, return_step=50))).encode()
    with pytest.raises(RejoinError, match=reason):
        ask_to_return(welcome, message)


def test_damaged_addresses_of_a_run_are_one_line(tmp_path: Path) -> None:
    for others in ('{"x": ["h", 1]}', '{"-1": ["h", 1]}', "[]", '{"1": ["h"]}'):
        document = f'{{"own": ["h", 1], "others": {others}}}'
        (tmp_path / "addresses.json").write_text(document, encoding="utf-8")
        with pytest.raises(FileFormatError, match=r"addresses.json: not addresses of a run"):
            load_addresses(tmp_path)


def ask_to_return(*answers: bytes) -> None:
    """Ask a sponsor that gives these answers."""
    sponsor, own = (make_rendezvous(agent, N, MemoryStore()) for agent in (0, 1))

    def answer(channel: Channel) -> None:
        channel.receive(max_bytes=10_000)
        for each in answers:
            channel.send(each)
        with suppress(ChannelClosedError):
            channel.receive(max_bytes=64)  # the signature of the return
        channel.close()

    sponsor.listener.handle(Purpose.REJOIN, NO_SESSION, answer)
    try:
        request_return(
            own,
            Request(HELLO, first_free_step=40),
            [0],
            {0: ("127.0.0.1", sponsor.listener.port)},
            start=torch.zeros(3),
            max_bytes=10_000,
        )
    finally:
        sponsor.close()
        own.close()


PLAN, TIMEOUT = small_plan("ring:4", LAST_STEP), 30.0


class StandStill:
    """A half step that leaves the model as it is, after a moment."""

    num_broken = 0

    statistics = None

    def begin(self, _: int, __: object, parameters: torch.Tensor) -> None:
        self._parameters = parameters

    def release_half_step(self, **_: object) -> torch.Tensor:
        time.sleep(0.002)
        return self._parameters


def make_run(agent: int, *, first_free_step: int) -> AgreedRun:
    """Return an agent that keeps its model as it is, and releases nothing."""
    ledger = SimpleNamespace(
        first_free_step=first_free_step,
        remaining=LAST_STEP,
        join_run=lambda _: None,
        reserve=lambda step: step,
    )
    return AgreedRun(
        plan=PLAN,
        settings=RunSettings(Constant(0.1), timeout=TIMEOUT, on_dropout="continue"),
        agent=agent,
        hello=HELLO,
        credentials=make_credentials(agent, N),
        ledger=ledger,  # type: ignore[arg-type]
        stepper=StandStill(),  # type: ignore[arg-type]
        start=torch.zeros(3),
        folders=None,
        requirements=Requirements(),
        agreement=Agreement(bytes(32), 0, LAST_STEP, scarce=0),
    )


def begin_as_sponsor(run: AgreedRun, rendezvous: Rendezvous, others: list[int]) -> Entry:
    """Begin with agents 0 and 3, and wait until the other two have asked to return."""
    rendezvous.announce_address()
    while not set(others) <= (found := rendezvous.read_addresses()).keys():
        time.sleep(0.01)
    rendezvous.adopt(Meeting(b"session", found | {run.agent: rendezvous.address}))
    opener = rendezvous.make_link_opener(Purpose.LINK, max_bytes=run.max_message_bytes)
    links = open_links(opener, others, timeout=TIMEOUT, check=lambda: None)
    membership = make_membership(run, rendezvous)
    # As the agents at its ends would tell.
    for first, second in PLAN.network.graph.edges([1, 2]):
        for end, other in ((first, second), (second, first)):
            keys = NewsKeys(make_credentials(end, N), b"session")
            own = Membership(PLAN.network.graph, end, keys=keys)
            own.note_cut(other, 0)
            membership.merge(own.news)
    entry = Entry(
        make_exchange(run, links),
        membership,
        make_returns(run, rendezvous, opener),
    )
    while not entry.returns._sponsor._waiting:
        time.sleep(0.01)
    return entry


def train(run: AgreedRun, entry: Entry) -> TrainingRounds:
    def activate(plan: Any, members: tuple[int, ...]) -> ActivePlan:
        return ActivePlan(plan, members, Silence())  # type: ignore[arg-type]

    rounds = TrainingRounds(
        PLAN,
        run.settings,
        agent=run.agent,
        activate=activate,
        stepper=run.stepper,
        exchange=entry.exchange,
        returns=entry.returns,
        membership=entry.membership,
        journal=Silence(),  # type: ignore[arg-type]
        first_step=run.first_step,
        last_step=LAST_STEP,
        parameters=run.start,
    )
    for _ in rounds.run(Interruption()):
        pass
    entry.close()
    return rounds


@pytest.mark.parametrize("return_steps", [{1: 40, 2: 40}, {1: 40, 2: 43}, {1: 43, 2: 40}])
def test_neighbours_that_return_together_are_linked_again(
    return_steps: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents 1 and 2 ask before either is back, each another sponsor."""
    monkeypatch.setattr(AgreedRun, "check_total", lambda *_: None)
    monkeypatch.setattr(Rendezvous, "key_folder", Path())

    def take_part(rendezvous: Rendezvous) -> tuple[int, dict[int, int], dict[int, int]]:
        agent = rendezvous.agent
        run = make_run(agent, first_free_step=return_steps.get(agent, 0))
        if agent in return_steps:
            while not {0, 3} <= rendezvous.read_addresses().keys():
                time.sleep(0.01)
            run, entry = return_to_run(run, rendezvous)
            assert run.first_step == return_steps[agent]
        else:
            entry = begin_as_sponsor(run, rendezvous, [3 - agent])
        rounds = train(run, entry)
        return rounds.step, rounds.lost, rounds.cut_links

    began = time.monotonic()
    assert run_in_threads(N, take_part, timeout=TIMEOUT) == [(LAST_STEP, {}, {})] * N
    assert time.monotonic() - began < TIMEOUT, "agents waited for each other"
