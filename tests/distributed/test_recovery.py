"""Survivors of lost agents go on or stop together; sums are applied by all of them or by none."""

import random
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from torch import Tensor

from corn.distributed import Reports, messages, rounds, summing
from corn.distributed.exchange import Exchange
from corn.distributed.keyring import make_keys
from corn.distributed.messages import Header
from corn.distributed.recovery import replan
from corn.distributed.rendezvous import Rendezvous
from corn.distributed.results import AgentResult, RunStatus, StopReason
from corn.distributed.rounds import TrainingRounds
from corn.distributed.settings import RunSettings
from corn.distributed.storage import Folders, list_checkpoints, read_model
from corn.distributed.summing import DOWN, UP
from corn.learn.perturbation import NoiseShare
from corn.learn.schedule import Constant
from corn.learn.step import AgentStepper
from corn.learn.sweep import Interruption
from corn.plan import Plan, verify_plan
from corn.privacy.floats import set_aside
from corn.topology import Mixing
from corn.transport import LinkError
from tests.oracles.deployed_release import read_noise

from .harness import Fault, failures, finished, run_processes, small_plan
from .test_agent import train
from .threads import run_in_threads

NUM_STEPS = 40
PLAN = small_plan("grid:2x3", NUM_STEPS, mixing="sum")
SETTINGS = RunSettings(Constant(0.2), batch_size=16, timeout=30, evaluate_at=(0,))
TREE = PLAN.network.tree
ROOT = TREE.root
LEAVES = [agent for agent, own in TREE.children.items() if not own]
INNER = next(agent for agent, own in TREE.children.items() if own and agent != ROOT)
AGENT = threading.local()


def read_models(folder: Path, agents: Iterable[int], step: int, plan: Plan = PLAN) -> set[bytes]:
    folders = Folders.of_run(folder)
    return {read_model(folders.of_agent(a).shared, step, plan).numpy().tobytes() for a in agents}


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost",
    [(ROOT,), (LEAVES[0], LEAVES[-1]), (INNER, ROOT)],
    ids=["root", "two leaves", "inner and root"],
)
def test_survivors_of_killed_agents_go_on_with_one_model(
    lost: Sequence[int], tmp_path: Path
) -> None:
    results = run_processes(PLAN, tmp_path, SETTINGS, faults=[Fault(agent, 15) for agent in lost])
    assert set(failures(results)) == set(lost)
    left = finished(results)
    for own in left.values():
        assert (own.status, own.num_steps) == (RunStatus.PARTIAL, NUM_STEPS)
        assert set(own.lost) == set(lost)
        notes = "\n".join(own.notes)
        assert f"for {6 - len(lost)} agents from step" in notes
        assert "is void without agent" in notes
    assert len(read_models(tmp_path, left, NUM_STEPS)) == 1


@pytest.mark.slow
def test_a_suspended_agent_is_left_behind(tmp_path: Path) -> None:
    settings = replace(SETTINGS, timeout=4)
    fault = Fault(INNER, 15, signal.SIGSTOP)
    results = run_processes(PLAN, tmp_path, settings, faults=[fault])
    left = finished(results)
    assert set(left) == set(range(6)) - {INNER}
    for own in left.values():
        assert (own.status, own.num_steps, set(own.lost)) == (RunStatus.PARTIAL, 40, {INNER})
    assert len(read_models(tmp_path, left, NUM_STEPS)) == 1


def test_all_stop_at_the_same_step_where_losses_stop_a_run_and_resume_from_there(
    tmp_path: Path,
) -> None:
    settings = replace(SETTINGS, on_dropout="stop", checkpoint_every=5)
    results = run_processes(PLAN, tmp_path, settings, faults=[Fault(ROOT, 22)])
    left = finished(results)
    assert set(left) == set(range(6)) - {ROOT}
    # If the root died before anybody had the total of the step before, the next one never began.
    last = left[min(left)].num_steps
    assert last in (22, 23)
    for own in left.values():
        assert (own.status, own.num_steps) == (RunStatus.INTERRUPTED, last)
        assert (own.stop.agent, own.stop.reason) == (ROOT, StopReason.LOSS)
        # A run that resumes goes on after the void step.
        assert last in list_checkpoints(Folders.of_run(tmp_path).of_agent(own.agent).private)
    assert len(read_models(tmp_path, left, last)) == 1
    results = run_processes(PLAN, tmp_path, replace(settings, resume=True))
    # The agent that was killed has an earlier checkpoint, and the steps since count twice.
    assert {(own.first_step, own.status) for own in results.values()} <= {
        (20, RunStatus.COMPLETE),
        (20, RunStatus.INTERRUPTED),
    }
    assert len(read_models(tmp_path, results, results[0].num_steps)) == 1


class Crash(Exception):  # noqa: N818
    """An agent dies here."""


def run_with(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    plan: Plan,
    crashes: dict[int, Any],
    *,
    piece: int = 0,
    **more: Any,
) -> list[AgentResult | BaseException]:
    """Run agents in threads; ``crashes`` says of a piece whether its sender dies instead.

    It returns the neighbours that still get the message, or None to live on.
    """
    make_keys(folder / "keys", plan.num_agents)
    send = Exchange.send_piece

    def send_some(
        self: Exchange, peers: Iterable[int], header: Header, values: Tensor, number: int
    ) -> None:
        rule = crashes.get(header.sender) if number == piece else None
        left = None if rule is None else rule(header)
        if left is None:
            send(self, peers, header, values, number)
            return
        send(self, [peer for peer in peers if peer in left], header, values, number)
        for link in self._links.values():
            # The other end may die at the same time.
            with suppress(LinkError):
                link.wait_sent(10)
        raise Crash

    def run_one(rendezvous: Rendezvous) -> AgentResult:
        AGENT.number = rendezvous.agent
        return train(rendezvous, folder, plan=plan, **more)

    monkeypatch.setattr(Exchange, "send_piece", send_some)
    return run_in_threads(plan.num_agents, run_one)


def check_survivors(
    results: Sequence[AgentResult | BaseException], lost: set[int], num_steps: int
) -> list[AgentResult]:
    left = [own for own in results if isinstance(own, AgentResult)]
    assert {own.agent for own in left} == set(range(len(results))) - lost
    for agent in lost:
        assert isinstance(results[agent], Crash), results[agent]
    assert {own.num_steps for own in left} == {num_steps}
    assert len({own.parameters.numpy().tobytes() for own in left}) == 1
    return left


SMALL = small_plan("grid:2x3", 9, mixing="sum")


@pytest.mark.parametrize("step", [4, 8], ids=["middle", "last"])
@pytest.mark.parametrize("gets", [0, 1, 2], ids=["nobody", "one child", "all children"])
def test_a_sum_that_reached_some_agents_is_applied_by_all(
    gets: int, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root dies while it sends the total down."""
    children = SMALL.network.tree.children[ROOT]
    assert len(children) >= 2

    def die(header: Header) -> Sequence[int] | None:
        is_here = (header.step, header.mixing_round, header.attempt) == (step, DOWN, 0)
        return children[:gets] if is_here else None

    results = run_with(monkeypatch, tmp_path, SMALL, {ROOT: die})
    left = check_survivors(results, {ROOT}, 9)
    for own in left:
        notes = "\n".join(own.notes)
        # The step after it was begun by those that had the total, and is void for all.
        assert (f"step {step} is void" in notes) == (gets == 0)
        assert (f"step {step + 1} is void" in notes) == (gets > 0 and step == 4)


@pytest.mark.parametrize("piece", [1, 5], ids=["second", "last"])
@pytest.mark.parametrize("direction", [UP, DOWN], ids=["up", "down"])
def test_a_sum_whose_last_pieces_are_missing_is_applied_by_nobody(
    direction: int, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent dies after it has sent a part of its message."""
    # Twelve integers of two bytes, in six pieces.
    for module in (messages, summing):
        monkeypatch.setattr(module, "PIECE_BYTES", 4)
    dying = ROOT if direction == DOWN else SMALL.network.tree.children[ROOT][0]

    def die(header: Header) -> Sequence[int] | None:
        is_here = (header.step, header.mixing_round, header.attempt) == (4, direction, 0)
        return [] if is_here else None

    results = run_with(monkeypatch, tmp_path, SMALL, {dying: die}, piece=piece)
    for own in check_survivors(results, {dying}, 9):
        assert "step 4 is void" in "\n".join(own.notes)


@pytest.mark.parametrize("gets_more", [False, True])
def test_further_losses_during_a_recovery_start_it_again(
    gets_more: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root dies on the way down, and an agent that has the total while it passes it on."""
    first, second, *_ = SMALL.network.tree.children[ROOT]

    def die_in_step(header: Header) -> Sequence[int] | None:
        return [first] if (header.step, header.mixing_round) == (4, DOWN) else None

    def die_in_recovery(header: Header) -> Sequence[int] | None:
        is_here = header.attempt > 0 and header.mixing_round == 2
        return ([second] if gets_more else []) if is_here else None

    crashes = {ROOT: die_in_step, first: die_in_recovery}
    results = run_with(monkeypatch, tmp_path, SMALL, crashes)
    check_survivors(results, {ROOT, first}, 9)


def test_a_cut_link_costs_one_step_and_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = SMALL.network.tree.children[ROOT][0]
    receive = Exchange.receive

    def cut(self: Exchange, peer: int, check: Any, **options: Any) -> Any:
        AGENT.num_calls = getattr(AGENT, "num_calls", 0) + 1
        if AGENT.number == child and peer == ROOT and AGENT.num_calls == 8:
            self._links[ROOT].close()
        return receive(self, peer, check, **options)

    monkeypatch.setattr(Exchange, "receive", cut)
    results = run_with(monkeypatch, tmp_path, SMALL, {})
    left = check_survivors(results, set(), 9)
    for own in left:
        assert own.lost == {}
        assert set(own.cut_links) == {ROOT: {child}, child: {ROOT}}.get(own.agent, set())


def test_no_noise_is_used_twice_after_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[int, bytes]] = []
    take = NoiseShare.take

    def note(self: NoiseShare, step: int) -> Any:
        noise = take(self, step)
        drawn.append((AGENT.number, read_noise(noise)))
        return noise

    monkeypatch.setattr(NoiseShare, "take", note)

    def die(header: Header) -> Sequence[int] | None:
        return [] if (header.step, header.mixing_round) == (4, UP) else None

    results = run_with(monkeypatch, tmp_path, SMALL, {LEAVES[0]: die})
    left = check_survivors(results, {LEAVES[0]}, 9)
    assert len(set(drawn)) == len(drawn)
    for own in left:
        # Nine steps were released, the void one included.
        assert own.rows[-1]["epsilon"] == pytest.approx(10, rel=1e-6)
        assert float(own.rows[-1]["epsilon"]) <= 10 * (1 + 1e-9)


@pytest.mark.parametrize("mixing", ["gossip", "sum"])
def test_the_others_go_on_without_an_agent_that_is_asked_to_stop(
    mixing: Mixing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "_SECONDS_TO_GATHER", 0.0)
    plan = small_plan("ring:4", 12, mixing=mixing)
    interruptions = [Interruption() for _ in range(4)]
    begin = TrainingRounds._begin

    def interrupt(self: TrainingRounds) -> Iterator[AgentStepper]:
        if (self._run.agent, self.step) == (2, 4):
            interruptions[2].requested = True
        return begin(self)

    monkeypatch.setattr(TrainingRounds, "_begin", interrupt)
    make_keys(tmp_path / "keys", 4)

    def run_one(rendezvous: Rendezvous) -> AgentResult:
        reports = Reports(interruption=interruptions[rendezvous.agent])
        return train(rendezvous, tmp_path, plan=plan, reports=reports)

    for own in run_in_threads(4, run_one):
        assert isinstance(own, AgentResult), own
        if own.agent == 2:
            assert (own.status, own.stop.reason) == (RunStatus.INTERRUPTED, StopReason.INTERRUPTED)
            assert 5 <= own.num_steps <= 7
            assert own.lost == {}
        else:
            assert (own.status, own.num_steps) == (RunStatus.PARTIAL, 12)
            assert set(own.lost) == {2}
            assert any("agent 2 left the run at step" in note for note in own.notes)


def test_parts_that_are_cut_apart_go_on_by_themselves(tmp_path: Path) -> None:
    plan = small_plan("path:5", 12, mixing="sum")
    results = run_processes(plan, tmp_path, SETTINGS, faults=[Fault(2, 4)])
    assert set(finished(results)) == {0, 1, 3, 4}
    assert {own.num_steps for own in finished(results).values()} == {12}
    models = [read_models(tmp_path, part, 12, plan) for part in ((0, 1), (3, 4))]
    assert [len(own) for own in models] == [1, 1]
    assert models[0] != models[1]


def test_a_plan_for_survivors_keeps_every_cap_per_step() -> None:
    left = replan(PLAN, (1, 2, 4, 5), steps_left=20, cuts=[(1, 4)])
    assert left.network.mixing == "sum"
    assert left.decomposition.is_masked
    assert verify_plan(left).passed
    cap = float(set_aside(left.budget).precision_caps(4).max())
    assert cap <= float(PLAN.precision_caps.min())
    # Private noise grows as fewer agents share it.
    assert left.decomposition.private_variance[0] > PLAN.decomposition.private_variance[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_wherever_agents_die_survivors_agree(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to two agents die at any of their messages, which some neighbours still get."""
    dice = random.Random(seed)
    plan = small_plan(dice.choice(["grid:2x3", "ring:5", "complete:4", "path:4"]), 8, mixing="sum")
    n = plan.num_agents

    def make_rule(last: int, receivers: Sequence[int]) -> Any:
        count = iter(range(1, 1000))
        return lambda _: receivers if next(count) >= last else None

    crashes = {
        agent: make_rule(dice.randrange(1, 24), dice.sample(range(n), dice.randrange(n)))
        for agent in dice.sample(range(n), dice.choice([1, 2]))
    }
    results = run_with(monkeypatch, tmp_path, plan, crashes)
    for agent, own in enumerate(results):
        assert isinstance(own, AgentResult if agent not in crashes else AgentResult | Crash), own
    left = [own for own in results if isinstance(own, AgentResult)]
    graph = nx.Graph(plan.network.graph).subgraph([own.agent for own in left])
    for part in nx.connected_components(graph):
        ends = {(o.num_steps, o.parameters.numpy().tobytes()) for o in left if o.agent in part}
        assert len(ends) == 1
        # An agent that is alone stops.
        assert next(iter(ends))[0] == 8 or len(part) == 1
