"""One agent that breaks the protocol loses its own links, and nothing of the others is lost."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from corn.distributed import agent as agent_module
from corn.distributed import messages, rounds, summing
from corn.distributed.exchange import Exchange, Received
from corn.distributed.keyring import make_keys
from corn.distributed.membership import Membership
from corn.distributed.messages import (
    Header,
    Kind,
    News,
    NewsKeys,
    Saying,
    Subject,
    decode_message,
    encode_piece,
    is_piece,
)
from corn.distributed.rendezvous import Rendezvous
from corn.distributed.results import AgentResult, StopReason
from corn.distributed.summing import STEPS_BETWEEN_COMPARISONS, digest_model
from corn.learn.step import AgentStepper
from corn.plan import Plan
from corn.topology import Mixing
from corn.transport import Link

from .harness import small_plan
from .test_agent import train
from .threads import run_in_threads

STEPS, FIRST = 24, 5
"""The steps of a run, and the first one at which the insider attacks."""
PLANS = {
    "gossip": small_plan("ring:6", STEPS, mixing="gossip"),
    "sum": small_plan("grid:2x3", STEPS, mixing="sum"),
}
AGENT = threading.local()


@dataclass
class Sent:
    """A message that the insider is about to send.

    Attributes:
        memory: of the insider, over all its messages.
    """

    peer: int
    header: Header
    values: Tensor
    memory: dict[Any, Any] = field(default_factory=dict)

    def encode(self, **changes: Any) -> bytes:
        """Return the message with other fields of its header."""
        return replace(self.header, **changes).encode() + self.values.numpy().tobytes()

    def with_values(self, values: Tensor) -> bytes:
        """Return the message with other numbers."""
        header = replace(self.header, payload_bytes=values.nbytes)
        return header.encode() + values.numpy().tobytes()

    def with_news(self, news: News) -> bytes:
        """Return the message with more news."""
        return self.encode(news={**self.header.news, **news})


Attack = Callable[[Sent], Iterator[bytes]]


def attack_network(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    plan: Plan,
    insider: int,
    attack: Attack,
    **options: Any,
) -> dict[int, AgentResult | BaseException]:
    """Run agents in threads, of which one sends other messages, and return the honest results."""
    make_keys(folder / "keys", plan.num_agents)
    send, memory, attacked = Link.send, dict[Any, Any](), set[int]()

    def alter(link: Link, message: bytes | memoryview) -> None:
        if getattr(AGENT, "number", None) != insider or not len(message):
            send(link, message)
            return
        if is_piece(memoryview(message)):
            if link.peer not in attacked:  # attacks send pieces of their own
                send(link, message)
            return
        dtype = AGENT.dtype
        header, values = decode_message(
            memoryview(bytearray(message)), num_agents=plan.num_agents, sender=insider, dtype=dtype
        )
        if header.step < FIRST:
            send(link, message)
            return
        attacked.add(link.peer)
        for altered in attack(Sent(link.peer, header, values, memory)):
            send(link, altered)

    def make_news_keys(*given: Any) -> NewsKeys:
        keys = AGENT.keys = NewsKeys(*given)
        return keys

    monkeypatch.setattr(Link, "send", alter)
    monkeypatch.setattr(agent_module, "NewsKeys", make_news_keys)

    def run_one(rendezvous: Rendezvous) -> AgentResult:
        AGENT.number, AGENT.dtype = rendezvous.agent, torch.float32
        if plan.network.mixing == "sum":
            AGENT.dtype = torch.int16
        chosen = {"on_dropout": "replan", "timeout": 5, **options}
        return train(rendezvous, folder, plan=plan, **chosen)

    results = run_in_threads(plan.num_agents, run_one)
    return {agent: own for agent, own in enumerate(results) if agent != insider}


def require_unharmed(
    results: dict[int, AgentResult | BaseException], insider: int, *, is_sum: bool
) -> None:
    """Fail if the honest agents lost more than their links to the insider."""
    models = set()
    for agent, own in results.items():
        assert isinstance(own, AgentResult), (agent, own)
        assert own.num_steps == STEPS, (agent, own.num_steps, own.stop, own.notes)
        assert set(own.lost) | set(own.cut_links) <= {insider}, (agent, own.lost, own.notes)
        assert torch.isfinite(own.parameters).all()
        assert own.parameters.abs().max() < 100
        models.add(own.parameters.numpy().tobytes())
    assert len(models) == 1 or not is_sum


def send_garbage(_: Sent) -> Iterator[bytes]:
    yield b"garbage" * 40


def send_a_shorter_model(sent: Sent) -> Iterator[bytes]:
    yield sent.with_values(sent.values[:-2].clone())


def send_an_odd_number_of_bytes(sent: Sent) -> Iterator[bytes]:
    size = sent.header.payload_bytes + 1
    yield replace(sent.header, payload_bytes=size).encode() + bytes(size)


def send_the_next_step(sent: Sent) -> Iterator[bytes]:
    yield sent.encode(step=sent.header.step + 1)


def send_a_far_step(sent: Sent) -> Iterator[bytes]:
    yield sent.encode(step=2**32 - 2)


def send_another_round(sent: Sent) -> Iterator[bytes]:
    yield sent.encode(mixing_round=sent.header.mixing_round + 1)


def send_another_plan(sent: Sent) -> Iterator[bytes]:
    yield sent.encode(plan=b"another!")


def send_as_another_agent(sent: Sent) -> Iterator[bytes]:
    yield sent.encode(sender=sent.peer)


def repeat_an_old_message(sent: Sent) -> Iterator[bytes]:
    yield sent.memory.setdefault(sent.peer, sent.encode())


def send_everything_twice(sent: Sent) -> Iterator[bytes]:
    yield sent.encode()
    yield sent.encode()


def say(kind: Kind, step: int, first: int, second: int | None = None) -> News:
    """Return news in another agent's name, without its signature."""
    last = first if second is None else second
    return {Subject(kind, first, last, last): Saying(step)}


def cut_an_honest_agent_off(sent: Sent) -> Iterator[bytes]:
    """All links of agent 4, in both plans."""
    edges = {"gossip": [(3, 4), (4, 5)], "sum": [(1, 4), (3, 4), (4, 5)]}[_mixing_of(sent)]
    cuts = [say(Kind.CUT, sent.header.step, *edge) for edge in edges]
    yield sent.with_news({**cuts[0], **cuts[1], **cuts[-1]})


def announce_far_cuts(sent: Sent) -> Iterator[bytes]:
    yield sent.with_news(say(Kind.CUT, 2**32 - 2, 0, 1))


def announce_the_leave_of_another(sent: Sent) -> Iterator[bytes]:
    yield sent.with_news(say(Kind.LEAVE, sent.header.step, 4))


def announce_far_returns(sent: Sent) -> Iterator[bytes]:
    yield sent.with_news(say(Kind.RETURN, 2**32 - 2, 0))


def announce_the_return_of_another(sent: Sent) -> Iterator[bytes]:
    yield sent.with_news(say(Kind.RETURN, sent.header.step, 4))


def call_another_back(sent: Sent) -> Iterator[bytes]:
    yield sent.with_news(say(Kind.CALL, sent.header.step + 2, 4))


def leave_and_stay(sent: Sent) -> Iterator[bytes]:
    """It signs that it leaves, and goes on as if it had not."""
    yield sent.with_news(sign(Kind.LEAVE, sent.header.step, 2))


def leave_and_call_itself_back(sent: Sent) -> Iterator[bytes]:
    """It was not lost, and its broken links would count as whole."""
    step = sent.header.step
    yield sent.with_news({**sign(Kind.CALL, step, 2), **sign(Kind.RETURN, step, 2)})


def sign(kind: Kind, step: int, agent: int) -> News:
    """Return news that the insider signed in its own name."""
    subject = Subject(kind, agent, agent, agent)
    return {subject: Saying(step, AGENT.keys.sign(subject, step))}


def send_nan(sent: Sent) -> Iterator[bytes]:
    yield sent.with_values(torch.full_like(sent.values, torch.nan))


def send_huge_numbers(sent: Sent) -> Iterator[bytes]:
    yield sent.with_values(torch.full_like(sent.values, 1e38))


def call_for_a_far_recovery(sent: Sent) -> Iterator[bytes]:
    yield sent.encode(attempt=2**32 - 1)


def fill_the_header(sent: Sent) -> Iterator[bytes]:
    links = [(i, j) for i in range(6) for j in range(i + 1, 6)]
    yield sent.with_news({k: v for edge in links for k, v in say(Kind.CUT, 3, *edge).items()})


def call_for_recoveries_without_a_loss(sent: Sent) -> Iterator[bytes]:
    attempt = sent.memory.setdefault("attempt", 0)
    if not sent.header.attempt:
        header = replace(sent.header, attempt=attempt + 1, mixing_round=0, payload_bytes=0)
        yield header.encode()
    else:
        sent.memory["attempt"] = sent.header.attempt
        yield sent.encode()


def begin_recoveries_again(sent: Sent) -> Iterator[bytes]:
    """It loses a link, and in the recovery calls for another one in every round."""
    if not sent.header.attempt:
        yield sent.encode(plan=b"another!") if sent.peer in (1, 3) else sent.encode()
        return
    attempt = sent.header.attempt + sent.header.mixing_round
    yield sent.encode(attempt=attempt, mixing_round=0)


def claim_a_later_step(sent: Sent) -> Iterator[bytes]:
    """It loses a link, and in the recovery says that it has begun many more steps."""
    if not sent.header.attempt:
        yield sent.encode(plan=b"another!") if sent.peer in (1, 3) else sent.encode()
        return
    yield sent.with_news(sign(Kind.BEGUN, sent.header.step + 10, 2))


def _mixing_of(sent: Sent) -> Mixing:
    return "gossip" if sent.values.dtype.is_floating_point else "sum"


ATTACKS: list[Attack] = [
    send_garbage,
    send_a_shorter_model,
    send_an_odd_number_of_bytes,
    send_the_next_step,
    send_a_far_step,
    send_another_round,
    send_another_plan,
    send_as_another_agent,
    repeat_an_old_message,
    send_everything_twice,
    cut_an_honest_agent_off,
    announce_far_cuts,
    announce_the_leave_of_another,
    announce_far_returns,
    announce_the_return_of_another,
    call_another_back,
    leave_and_stay,
    leave_and_call_itself_back,
    fill_the_header,
    call_for_a_far_recovery,
    call_for_recoveries_without_a_loss,
    begin_recoveries_again,
    claim_a_later_step,
]


# One of each family; together they would take more than a minute.
QUICK = (send_a_shorter_model, cut_an_honest_agent_off, call_for_recoveries_without_a_loss)


@pytest.mark.parametrize("mixing", ["gossip", "sum"])
@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(one, id=one.__name__, marks=[] if one in QUICK else [pytest.mark.slow])
        for one in ATTACKS
    ],
)
def test_what_one_neighbour_sends_costs_its_own_links_at_most(
    attack: Attack, mixing: Mixing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = attack_network(monkeypatch, tmp_path, PLANS[mixing], 2, attack)
    require_unharmed(results, 2, is_sum=mixing == "sum")


@pytest.mark.parametrize("attack", [send_nan, send_huge_numbers], ids=lambda one: one.__name__)
def test_a_model_that_is_no_model_is_refused(
    attack: Attack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = attack_network(monkeypatch, tmp_path, PLANS["gossip"], 2, attack)
    require_unharmed(results, 2, is_sum=False)


@pytest.mark.parametrize("mixing", ["gossip", "sum"])
def test_the_network_without_an_attack_is_unharmed(
    mixing: Mixing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison would be of no use otherwise."""

    def send_as_agreed(sent: Sent) -> Iterator[bytes]:
        yield sent.encode()

    results = attack_network(monkeypatch, tmp_path, PLANS[mixing], 2, send_as_agreed)
    require_unharmed(results, 2, is_sum=mixing == "sum")
    for own in results.values():
        assert isinstance(own, AgentResult)
        assert not own.lost
        assert own.notes == ()


def send_wrong_sums(sent: Sent) -> Iterator[bytes]:
    """Random words, in every partial sum."""
    values = torch.randint_like(sent.values, -(2**15), 2**15)
    yield sent.with_values(values) if len(values) and not sent.header.attempt else sent.encode()


def test_wrong_sums_stop_the_run_after_three_void_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell whose sum is wrong, as all are under masks."""
    results = attack_network(monkeypatch, tmp_path, PLANS["sum"], 5, send_wrong_sums)
    models = set()
    for own in results.values():
        assert isinstance(own, AgentResult), own
        assert (own.num_steps, own.stop.reason) == (FIRST + 3, StopReason.VOID_SUMS)
        assert own.stop.step == FIRST + 2
        assert any("sums of 3 steps were void" in note for note in own.notes)
        assert any("agents 0, 1, 2, 3, 4, 5 sends wrong" in note for note in own.notes)
        models.add(own.parameters.numpy().tobytes())
    assert len(models) == 1


def test_an_agent_that_tells_neighbours_different_totals_loses_its_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root changes the total that it sends to agent 4, by one unit of the grid."""

    def change_one_total(sent: Sent) -> Iterator[bytes]:
        values = sent.values.clone()
        if sent.peer == 4 and len(values) and not sent.header.attempt:
            values[0] += 1
        yield sent.with_values(values)

    results = attack_network(monkeypatch, tmp_path, PLANS["sum"], 1, change_one_total)
    assert PLANS["sum"].network.tree.root == 1
    require_left_behind(results, 4, insider=1)


def require_left_behind(
    results: dict[int, AgentResult | BaseException], victim: int, *, insider: int
) -> None:
    """Fail unless all others end with one model, and lose no other agent.

    The victim has another model than the others, and nobody can know who is to blame.
    """
    models, notes = set(), ""
    for agent, own in results.items():
        assert isinstance(own, AgentResult), (agent, own)
        notes += "\n".join(own.notes)
        if agent != victim:
            assert own.num_steps == STEPS, (agent, own.notes)
            assert set(own.lost) | set(own.cut_links) <= {insider, victim}, (agent, own.notes)
            models.add(own.parameters.numpy().tobytes())
    assert len(models) == 1
    assert "is no longer linked, as it has another model" in notes


def hide_the_model_of(
    victim: int, insider: int, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Header, int], Header]:
    """Let the insider take the victim's digest for its own, and return what it tells the victim.

    The digest that the victim expects, signed by the insider, who may be the root.
    """
    receive, sign = Exchange.receive, Membership.sign_model
    memory: dict[str, Any] = {}

    def read(self: Exchange, peer: int, check: Any, **options: Any) -> Received:
        found = receive(self, peer, check, **options)
        if AGENT.number == insider and peer == victim and not found.header.attempt:
            memory["model"] = found.header.model
            return found._replace(header=replace(found.header, model=AGENT.model))
        return found

    def note(parameters: Tensor) -> bytes:
        digest = AGENT.model = digest_model(parameters)
        return digest

    def sign_own(self: Membership, header: Header) -> Header:
        if AGENT.number == insider:
            memory["membership"] = self
        return sign(self, header)

    def tell(header: Header, peer: int) -> Header:
        if peer != victim or header.attempt or "model" not in memory:
            return header
        told = replace(header, model=memory["model"])
        return sign(memory["membership"], told) if "membership" in memory else told

    monkeypatch.setattr(Exchange, "receive", read)
    monkeypatch.setattr(Membership, "sign_model", sign_own)
    monkeypatch.setattr(rounds, "digest_model", note)
    return tell


@pytest.mark.parametrize("tells_truth", [False, True], ids=["false digest", "root's digest"])
def test_an_insider_cannot_hide_that_models_below_it_differ(
    tells_truth: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes the total for its child, and tells each side the digest that it expects."""
    tree, insider, victim = PLANS["sum"].network.tree, 2, 5
    assert tree.parents[victim] == insider
    assert tree.parents[insider] == tree.root
    tell = hide_the_model_of(victim, insider, monkeypatch)

    def split_models(sent: Sent) -> Iterator[bytes]:
        values = sent.values.clone()
        if sent.peer == victim and len(values) and not sent.header.attempt:
            values[0] += sent.header.step == FIRST
        header = sent.header if tells_truth else tell(sent.header, sent.peer)
        yield header.encode() + values.numpy().tobytes()

    results = attack_network(monkeypatch, tmp_path, PLANS["sum"], insider, split_models)
    require_left_behind(results, victim, insider=insider)


def test_agents_behind_an_insider_leave_it_where_the_root_has_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other link could tell agent 0."""
    plan = small_plan("path:5", STEPS, mixing="sum")
    assert plan.network.tree.root == 2
    tell = hide_the_model_of(0, 1, monkeypatch)

    def split_models(sent: Sent) -> Iterator[bytes]:
        values = sent.values.clone()
        if sent.peer == 0 and len(values) and not sent.header.attempt:
            values[0] += sent.header.step == FIRST
        yield tell(sent.header, sent.peer).encode() + values.numpy().tobytes()

    results = attack_network(monkeypatch, tmp_path, plan, 1, split_models)
    for agent, own in results.items():
        assert isinstance(own, AgentResult), (agent, own)
        lost = {1} if agent == 0 else {0}
        assert set(own.lost) == lost, (agent, own.lost, own.notes)
        # The others hear of it one step later.
        assert min(own.lost.values()) == STEPS_BETWEEN_COMPARISONS - (agent == 0)
        is_told = any("digest of the model that agent 2" in note for note in own.notes)
        assert is_told == (agent == 0)


def test_a_root_that_signs_two_models_is_found_out_over_other_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, victim = PLANS["sum"].network.tree, 4
    assert tree.parents[victim] == tree.root
    assert not tree.children[victim]
    tell = hide_the_model_of(victim, tree.root, monkeypatch)

    def split_models(sent: Sent) -> Iterator[bytes]:
        values = sent.values.clone()
        if sent.peer == victim and len(values) and not sent.header.attempt:
            values[0] += sent.header.step == FIRST
        yield tell(sent.header, sent.peer).encode() + values.numpy().tobytes()

    results = attack_network(monkeypatch, tmp_path, PLANS["sum"], tree.root, split_models)
    require_left_behind(results, victim, insider=tree.root)


def send_pieces_in_another_order(sent: Sent) -> Iterator[bytes]:
    yield sent.encode()
    yield encode_piece(2) + bytes(4)


def send_one_piece_alone(sent: Sent) -> Iterator[bytes]:
    yield sent.encode()
    yield sent.encode()


def send_short_pieces(sent: Sent) -> Iterator[bytes]:
    yield sent.encode()
    yield encode_piece(1) + bytes(2)


@pytest.mark.parametrize(
    "attack",
    [send_pieces_in_another_order, send_one_piece_alone, send_short_pieces],
    ids=lambda one: one.__name__,
)
def test_wrong_pieces_cost_the_links_of_their_sender(
    attack: Attack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (messages, summing):
        monkeypatch.setattr(module, "PIECE_BYTES", 4)
    results = attack_network(monkeypatch, tmp_path, PLANS["sum"], 2, attack)
    require_unharmed(results, 2, is_sum=True)


@pytest.mark.slow
@pytest.mark.parametrize(("mixing", "insider"), [("sum", 1), ("gossip", 2)])
def test_endless_heartbeats_cost_the_links_of_their_sender(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mixing: Mixing, insider: int
) -> None:
    """The attack: from some step on the insider sends heartbeats and nothing else.

    Its neighbours begin to wait late, after agents that wait for them.
    """
    begin = AgentStepper.begin

    def begin_late(stepper: AgentStepper, step: int, *arguments: Any) -> None:
        if AGENT.number in (insider - 1, insider + 1) and step == FIRST:
            time.sleep(1.5)
        begin(stepper, step, *arguments)

    monkeypatch.setattr(AgentStepper, "begin", begin_late)
    results = attack_network(
        # Honest agents on a busy machine may stand still for a second.
        *(monkeypatch, tmp_path, PLANS[mixing], insider, lambda _: iter(())),
        timeout=3,
    )
    require_unharmed(results, insider, is_sum=mixing == "sum")
