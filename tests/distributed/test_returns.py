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
from torch import nn

from corn.distributed.membership import Membership
from corn.distributed.messages import Header, Kind, News, NewsKeys, ProtocolError, Subject
from corn.distributed.rejoin import (
    RejoinError,
    Returns,
    Welcome,
    decode_state,
    encode_state,
    load_addresses,
    request_return,
)
from corn.distributed.rendezvous import Hello, Meeting
from corn.distributed.settings import RunSettings
from corn.errors import FileFormatError, InvalidArgumentError
from corn.learn.optimizers import restore_state, save_state
from corn.noise.stream import encode_fields
from corn.transport import (
    NO_SESSION,
    Channel,
    ChannelClosedError,
    MemoryStore,
    Purpose,
    dial,
)

from .threads import make_credentials, make_rendezvous

N, LAST_STEP, SESSION = 4, 100, bytes.fromhex("ef" * 32)
HELLO = Hello("ab" * 32, {"the model": "linear"}, "cd" * 32, remaining=LAST_STEP)
WELCOME = Welcome(SESSION.hex(), HELLO.nonce, return_step=0, last_step=LAST_STEP)


def lose(agent: int, peer: int, step: int) -> News:
    """Return an agent's news that its link to another broke."""
    keys = NewsKeys(make_credentials(agent, N), SESSION)
    own = Membership(nx.cycle_graph(N), agent, keys)
    own.note(Kind.CUT, step, peer)
    return own.news


class Sponsor:
    """Agent 0 of a ring of four that has lost agent 1."""

    def __init__(self) -> None:
        self.rendezvous = make_rendezvous(0, N, MemoryStore())
        self.rendezvous.adopt(Meeting(SESSION, {}))
        keys = NewsKeys(make_credentials(0, N), SESSION)
        self.membership = Membership(nx.cycle_graph(N), 0, keys)
        self.membership.note(Kind.CUT, 5, 1)
        self.membership.merge(lose(2, 1, 5))
        run: Any = SimpleNamespace(
            hello=HELLO,
            rendezvous=self.rendezvous,
            agreement=SimpleNamespace(nonce=bytes.fromhex(HELLO.nonce)),
            last_step=LAST_STEP,
            settings=RunSettings(),
        )
        opener: Any = None
        self.returns = Returns(run, opener)

    def connect(self, agent: int, hello: Hello = HELLO) -> Channel:
        """Return the connection of an agent that has sent its request."""
        channel = dial(
            self.rendezvous.address,
            make_credentials(agent, N),
            0,
            Purpose.REJOIN,
            session=NO_SESSION,
            timeout=60,
        )
        channel.send(json.dumps(asdict(hello)).encode())
        channel.set_timeout(60.0)
        return channel

    def ask(self, hello: Hello, *, signs: int | None = None) -> Channel:
        """Return the connection of agent 1, once its request has arrived.

        It signs its return at a step, or nothing.
        """
        before = len(self.returns._callers.waiting)
        channel = self.connect(1, hello)
        if signs is not None:
            channel.send(
                NewsKeys(make_credentials(1, N), SESSION).sign(Subject(Kind.CALL, 1, 1, 1), signs)
            )
        deadline = time.monotonic() + 60
        while len(self.returns._callers.waiting) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        return channel

    def serve(self, step: int) -> None:
        self.returns.serve(step, self.membership)


def read(channel: Channel) -> Any:
    return json.loads(bytes(channel.receive(max_bytes=10_000)))


@pytest.fixture
def sponsor() -> Iterator[Sponsor]:
    own = Sponsor()
    yield own
    own.returns.close()
    own.rendezvous.close()


def test_an_agent_that_is_gone_again_is_not_announced(sponsor: Sponsor) -> None:
    """And it may ask again."""
    sponsor.ask(HELLO).close()
    time.sleep(0.1)
    sponsor.serve(10)
    assert sponsor.membership.calls == {}
    channel = sponsor.ask(HELLO, signs=13)
    sponsor.serve(11)
    assert read(channel)["refusal"] == ""
    channel.close()


def test_all_others_may_ask_at_the_same_time(sponsor: Sponsor) -> None:
    channels = [sponsor.connect(agent) for agent in (1, 2, 3)]
    deadline = time.monotonic() + 60
    while len(sponsor.returns._callers.waiting) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(sponsor.returns._callers.waiting) == {1, 2, 3}
    sponsor.returns.close()
    for channel in channels:
        assert "the run ends" in read(channel)["refusal"]
        channel.close()


def test_a_second_request_waits_until_the_step_of_the_first_is_over(sponsor: Sponsor) -> None:
    first = sponsor.ask(replace(HELLO, first_free_step=17), signs=17)
    sponsor.serve(10)
    assert read(first)["return_step"] == 17
    first.close()
    second = sponsor.ask(HELLO, signs=20)
    for step in range(11, 18):
        sponsor.serve(step)
        assert sponsor.membership.calls == {1: 17}
    header = Header(bytes(8), 0, 17, 0, 4)
    sponsor.returns.hand_over(17, header, torch.zeros(1), {}, None)
    sponsor.membership.forget_before(17)  # it did not come
    sponsor.serve(18)
    assert read(second)["return_step"] == 20
    assert sponsor.membership.calls == {1: 20}
    second.close()


@pytest.mark.parametrize("signed", [None, 13], ids=["nothing", "another step"])
def test_an_agent_that_does_not_sign_its_return_is_not_announced(
    signed: int | None, sponsor: Sponsor
) -> None:
    """And it costs the sponsor a wait once."""
    for refusal in ("", "did not confirm"):
        channel = sponsor.ask(HELLO, signs=signed)
        sponsor.serve(10)
        assert refusal in read(channel)["refusal"]
        assert sponsor.membership.calls == {}
        channel.close()


def test_an_agent_that_broke_the_protocol_is_not_let_in(sponsor: Sponsor) -> None:
    sponsor.returns.ban(1)
    channel = sponsor.ask(HELLO)
    sponsor.serve(10)
    assert "broke the protocol" in read(channel)["refusal"]
    channel.close()


def test_an_agent_that_is_not_lost_waits(sponsor: Sponsor) -> None:
    """Agent 1 asks before others have noticed that it is gone, or to have its links mended."""
    sponsor.membership.news = {}
    channel = sponsor.ask(HELLO, signs=12)
    sponsor.serve(10)
    assert sponsor.membership.news == {}
    assert set(sponsor.returns._callers.waiting) == {1}
    channel.close()


def test_a_ledger_must_allow_all_steps_that_are_left(sponsor: Sponsor) -> None:
    channel = sponsor.ask(replace(HELLO, remaining=87))
    sponsor.serve(10)
    assert "fewer releases than the 88 steps" in read(channel)["refusal"]
    channel.close()
    channel = sponsor.ask(replace(HELLO, remaining=88), signs=12)
    sponsor.serve(10)
    assert read(channel)["return_step"] == 12
    channel.close()


def test_a_stop_before_the_return_ends_the_wait(sponsor: Sponsor) -> None:
    channel = sponsor.ask(HELLO, signs=12)
    sponsor.serve(10)
    assert read(channel)["return_step"] == 12
    assert read(channel) == 10
    sponsor.returns.close()
    with pytest.raises(ChannelClosedError, match="closed the connection"):
        read(channel)
    channel.close()


@pytest.mark.parametrize(
    ("welcome", "reason"),
    [
        (asdict(replace(WELCOME, return_step=39)), "steps before 40 may have been released"),
        (asdict(WELCOME) | {"return_step": 50, "nonce": "zz"}, "cannot be read"),
        (asdict(WELCOME) | {"return_step": 50, "session": "-"}, "cannot be read"),
        (asdict(WELCOME) | {"return_step": 50, "present": ["x"]}, "cannot be read"),
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
        (Header(bytes(8), 0, 50, 0, 8).encode() + bytes(8), "sent 8 bytes of para"),
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
    for others in ('{"x": ["h", 1]}', '[[1, "h", 1]]', '{"1": ["h"]}'):
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
        run: Any = SimpleNamespace(
            rendezvous=own,
            hello=replace(HELLO, first_free_step=40),
            neighbours=frozenset([0]),
            start=torch.zeros(3),
            max_bytes=10_000,
        )
        request_return(run, {0: ("127.0.0.1", sponsor.listener.port)})
    finally:
        sponsor.close()
        own.close()


STATE = {
    "matrix": torch.randn(3, 2, generator=torch.Generator().manual_seed(0)),
    "step": torch.tensor(7.0),
    "flag": torch.tensor(True),
    "integers": torch.arange(4, dtype=torch.int16),
    "empty": torch.zeros(0, 3),
}


def test_every_tensor_keeps_its_bits_shape_and_type() -> None:
    found = decode_state(memoryview(encode_state(STATE)))
    assert found.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"0",
        lambda data: data[:10],
        lambda data: data[:0],
        lambda data: data.replace(b"float32", b"complex"),
        lambda data: data.replace(b"3,2", b"-32"),
        lambda data: data.replace(b"3,2", b"9,9"),
        lambda data: data.replace(b"3,2", b"3,x"),
        lambda _: encode_fields("corn state", "m", "float32", "1" + 30 * "0" + ",0", b""),
        # Sizes that take long to multiply.
        lambda _: encode_fields("corn state", "m", "float32", ",".join(9999 * ["9" * 99]), b""),
    ],
)
def test_a_damaged_state_is_refused(damage) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ProtocolError):
        decode_state(memoryview(damage(encode_state(STATE))))


@pytest.mark.parametrize(
    "wrong",
    [
        {"tensor 0 exp_avg": torch.zeros(5)},
        {"tensor 3 exp_avg": torch.zeros(2)},
        {"group 0 lr": torch.zeros(2)},
        {"group 0 params": torch.zeros(())},
        {"nonsense": torch.zeros(())},
        {"tensor -1 exp_avg": torch.zeros(2)},
    ],
)
def test_a_state_of_other_parameters_is_refused(wrong: dict[str, torch.Tensor]) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([parameter])
    with pytest.raises(InvalidArgumentError):
        restore_state(optimizer, save_state(optimizer) | wrong)


def test_whoever_asks_after_the_end_is_refused_at_once(sponsor: Sponsor) -> None:
    sponsor.returns.close()
    channel = sponsor.connect(1)
    assert "the run ends" in read(channel)["refusal"]
    channel.close()
