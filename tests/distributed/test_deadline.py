"""With a deadline nobody waits for a slow agent, and the average of all models stays."""

import random
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from corn.distributed.dropout.membership import Membership
from corn.distributed.dropout.survivors import ActivePlan, replan
from corn.distributed.processes import AgentProcesses
from corn.distributed.records.results import RunStatus
from corn.distributed.settings import RunSettings
from corn.distributed.startup.rendezvous import Rendezvous
from corn.distributed.steps.exchange import Exchange, LateMessage, Outcome, Received
from corn.distributed.steps.messages import Header, message_limit
from corn.distributed.steps.rounds import TrainingRounds
from corn.learn.schedule import Constant
from corn.learn.sweep import Interruption
from corn.plan import Plan
from corn.transport import Purpose, open_links

from .harness import Fault, is_suspended, run_processes, small_plan
from .threads import run_in_threads

D, N = 20, 4
NUM_STEPS = 60
PLAN = small_plan("ring:4", NUM_STEPS)


class SlowStep:
    """A half step that leaves the model as it is, after a random pause."""

    num_broken = 0

    def __init__(self, agent: int, seed: int) -> None:
        self._dice, self._longest = random.Random(100 * seed + agent), 0.02 * (agent == seed % N)

    def take(self, parameters: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        time.sleep(self._dice.choice([0, 0, 1]) * self._dice.random() * self._longest)
        return parameters, None


class Silence:
    """Stands for everything that only records, or never happens here."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


class NoReturns(Silence):
    """Stands for returns where nobody comes back."""

    to_dial: frozenset[int] = frozenset()


def make_rounds(agent: int, exchange: Any, *, last_step: int, seed: int = 0) -> TrainingRounds:
    def activate(plan: Plan, members: tuple[int, ...]) -> ActivePlan:
        return ActivePlan(plan, members, Silence())  # type: ignore[arg-type]

    return TrainingRounds(
        PLAN,
        RunSettings(Constant(0.1), timeout=20, deadline=0.002),
        agent=agent,
        activate=activate,
        half_step=SlowStep(agent, seed),  # type: ignore[arg-type]
        exchange=exchange,
        returns=NoReturns(),  # type: ignore[arg-type]
        membership=Membership(PLAN.network.graph, agent),
        ledger=Silence(),
        journal=Silence(),  # type: ignore[arg-type]
        first_step=0,
        last_step=last_step,
        parameters=make_model(agent),
    )


def make_model(agent: int) -> Tensor:
    generator = torch.Generator().manual_seed(agent)
    return torch.randn(D, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("stops_early", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_random_lags_keep_the_average_of_all_models(seed: int, *, stops_early: bool) -> None:
    num_missed = []

    def run(rendezvous: Rendezvous) -> tuple[int, Tensor]:
        agent = rendezvous.agent
        size = message_limit(N, 8 * D)
        desk = rendezvous.open_desk(Purpose.LINK, max_bytes=size)
        links = open_links(
            desk, PLAN.network.graph.neighbors(agent), timeout=20, check=lambda: None
        )
        exchange = Exchange(links, num_agents=N, dtype=torch.float64, timeout=20)
        rounds = make_rounds(agent, exchange, last_step=NUM_STEPS, seed=seed)
        interruption = Interruption()
        interruption.requested = stops_early and agent == 0
        rounds.run(interruption)
        num_missed.append(sum(exchange.num_missed.values()))
        exchange.close()
        return rounds.step, rounds.parameters

    results: list[Any] = run_in_threads(N, run)
    steps, models = zip(*results, strict=True)
    assert set(steps) == {9 * N if stops_early else NUM_STEPS}
    assert sum(num_missed) > 0, "nobody was late"
    total = sum(make_model(agent) for agent in range(N))
    torch.testing.assert_close(sum(models), total, rtol=0, atol=1e-12)


def test_a_late_message_is_mixed_by_the_plan_of_its_round() -> None:
    """The neighbour has mixed it by that plan, and a new one has other weights."""
    exchange = SimpleNamespace(neighbours=(1,))
    rounds = make_rounds(0, exchange, last_step=NUM_STEPS)
    before = rounds._plans.active
    new = replan(PLAN, (0, 1), steps_left=30, cuts={(1, 2): 3, (0, 3): 3})
    rounds._plans.switch(ActivePlan(new, (0, 1), Silence()), 5)  # type: ignore[arg-type]
    weight = before.weights_of(0)[1][0]
    assert rounds._plans.active.weights_of(0)[1][0] != pytest.approx(weight)
    own, theirs = (
        Received(Header(before.prefix, bytes(8), agent, 5, 0, 2, 8 * D), make_model(agent))
        for agent in (0, 1)
    )
    outcome = Outcome({}, late={1: (LateMessage(own, theirs),)})
    mixed = rounds._mix_late(torch.zeros(D, dtype=torch.float64), outcome)
    change = theirs.parameters - own.parameters
    torch.testing.assert_close(mixed, weight * change)


def test_a_cool_down_gives_news_at_every_step() -> None:
    """A long one would otherwise look like a stall to ``/healthz`` and ``corn status``."""
    news: list[int] = []
    silent = SimpleNamespace(
        neighbours=(), start=lambda *_: None, finish=lambda _: Outcome({}), drop=lambda _: None
    )
    rounds = make_rounds(0, silent, last_step=0)
    rounds._journal = SimpleNamespace(record_mixing=news.append)  # type: ignore[assignment]
    rounds.run(Interruption())
    assert len(news) == PLAN.cooldown_steps > 0


class Awakening:
    """Lets an agent go on some seconds after it has suspended itself."""

    def __init__(self, agent: int, seconds: float) -> None:
        self._agent, self._seconds = agent, seconds
        self._began: float | None = None

    def __call__(self, processes: AgentProcesses) -> None:
        pid = processes._processes[self._agent].pid
        if self._began is None and pid is not None and is_suspended(pid):
            self._began = time.monotonic()
        if self._began is not None and time.monotonic() > self._began + self._seconds:
            processes.send_signal(self._agent, signal.SIGCONT)


def test_nobody_is_lost_when_a_process_is_suspended_for_a_moment(tmp_path: Path) -> None:
    settings = RunSettings(
        Constant(0.2), batch_size=16, timeout=20, deadline=0.02, evaluate_at=(0,)
    )
    results = run_processes(
        small_plan("ring:3", NUM_STEPS),
        tmp_path,
        settings,
        faults=[Fault(2, 30, signal.SIGSTOP)],
        on_poll=Awakening(2, seconds=0.5),
    )
    for own in results.values():
        assert (own.status, own.num_steps) == (RunStatus.COMPLETE, NUM_STEPS)
        assert (own.lost, own.cut_links) == ({}, {})
    for neighbour in (0, 1):
        own = results[neighbour]
        # How often depends on how much data the late agent has.
        assert "was late" not in "\n".join(own.notes)
        found = re.search(r"agent 2 was late in (\d+) mixing", "\n".join(own.private_notes))
        assert found is not None
        assert int(found[1]) > 0
