"""Sums at a server that agents ask: who is in them, what is void, and what a server cannot do."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corn.distributed.keyring import make_keys
from corn.engines import (
    AgentRelease,
    Hello,
    ServerSums,
    SumRounds,
    sum_releases,
)
from corn.errors import CornError, PublicError
from corn.learn.step import ClippedGradients, clip_gradients
from corn.learn.tasks import Gradients
from corn.noise import load_roster
from corn.noise.ledger import read_history
from corn.plan import Plan, make_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network

N, D = 4, 50
MODEL = b"m" * 32
BUDGET = PrivacyBudget(5, 1e-5, num_steps=6, clip=1.0)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(load_network("complete:4", mixing="sum"), BUDGET)


@pytest.fixture
def agents(plan: Plan, tmp_path: Path) -> list[AgentRelease]:
    make_keys(tmp_path, N)
    return [AgentRelease(plan, agent, tmp_path) for agent in range(N)]


@pytest.fixture
def rounds(agents: list[AgentRelease], tmp_path: Path) -> SumRounds:
    assert agents
    return SumRounds(load_roster(tmp_path / "roster.json"), wait=60.0)


@pytest.fixture
def impatient(rounds: SumRounds) -> SumRounds:
    rounds._wait = 2.0
    return rounds


def gradient(value: float) -> ClippedGradients:
    values = torch.full((1, 1, D), value, dtype=torch.float64)
    clip = torch.tensor([1.0], dtype=torch.float64)
    return clip_gradients(Gradients(values), clip, clips_samples=False)


def count_left(own: AgentRelease) -> int:
    """Return the releases that an agent's ledger allows."""
    history = read_history([own._keys], own.agent)
    return BUDGET.num_steps - sum(each.num_releases for each in history.expenses)


Answer = Callable[[int, dict[str, Any]], Mapping[str, Any] | None]


def run_all(
    agents: list[AgentRelease], answer: Answer, models: dict[int, bytes] | None = None
) -> list[Any]:
    """Return each agent's average, or its error."""

    def run(own: AgentRelease) -> Any:
        model = (models or {}).get(own.agent, MODEL)
        try:
            sums = ServerSums(partial(answer, own.agent), wait=0.5)
            return sum_releases(own, gradient(0.1), model=model, reduction=sums)
        except CornError as error:
            return error

    with ThreadPoolExecutor(len(agents)) as pool:
        return list(pool.map(run, agents))


def at(step: int) -> dict[int, bytes]:
    """Return the digest of the model at a step, the same for all agents."""
    return dict.fromkeys(range(N), bytes([step]) * 32)


def honest(rounds: SumRounds) -> Answer:
    return lambda agent, request: rounds.answer(request, f"site-{agent}")


def test_all_agents_get_the_same_average_with_the_noise_of_the_plan(
    agents: list[AgentRelease], rounds: SumRounds, plan: Plan
) -> None:
    sums = [run_all(agents, honest(rounds), at(k)) for k in range(3)]
    for averages in sums:
        assert all(np.array_equal(each, averages[0]) for each in averages)
    noise = np.concatenate([averages[0] - 0.1 for averages in sums])
    # n private shares of variance θ = 1/((n − q) b) for q insiders: their average has θ/n.
    theta = 1 / ((N - plan.threat.max_colluders) * plan.precision_caps[0])
    assert noise.std() / np.sqrt(theta / N) == pytest.approx(1, abs=0.25)
    assert not np.array_equal(sums[0][0], sums[1][0])
    assert count_left(agents[0]) == BUDGET.num_steps - 3


def test_a_sum_without_an_agent_begins_after_the_wait_and_then_at_once(
    agents: list[AgentRelease], impatient: SumRounds
) -> None:
    first, second, third = run_all(agents[:3], honest(impatient))
    assert first is not None
    assert np.array_equal(first, second)
    assert np.array_equal(first, third)
    # The absent agent is not awaited again. It may come back, and is awaited in the sum after.
    began = time.monotonic()
    run_all(agents[:3], honest(impatient), at(1))
    assert time.monotonic() - began < 1.9
    (late,) = run_all(agents[3:], honest(impatient), at(1))
    assert late is None
    assert count_left(agents[3]) == BUDGET.num_steps
    back = run_all(agents, honest(impatient), at(2))
    assert all(np.array_equal(each, back[0]) for each in back)


def test_an_agent_that_is_lost_on_the_way_makes_the_sum_void_for_all(
    agents: list[AgentRelease], impatient: SumRounds
) -> None:
    def lose(agent: int, request: dict[str, Any]) -> Mapping[str, Any] | None:
        is_lost = agent == 3 and "integers" in request
        return None if is_lost else impatient.answer(request, f"site-{agent}")

    *others, lost = run_all(agents, lose)
    assert others == [None, None, None]
    assert isinstance(lost, CornError)
    # The next sum is of the others, without a wait for the lost agent.
    averages = run_all(agents[:3], honest(impatient))
    assert all(np.array_equal(each, averages[0]) for each in averages)


def test_agents_with_different_models_are_never_in_one_sum(
    agents: list[AgentRelease], impatient: SumRounds
) -> None:
    found = run_all(agents, honest(impatient), {0: b"a" * 32, 1: b"a" * 32, 2: b"b" * 32})
    assert np.array_equal(found[0], found[1])
    assert isinstance(found[2], CornError)
    assert isinstance(found[3], CornError)


def test_a_server_that_shows_two_groups_different_sums_has_no_sum_of_both_again(
    agents: list[AgentRelease], rounds: SumRounds
) -> None:
    def lie(agent: int, request: dict[str, Any]) -> Mapping[str, Any]:
        answer = rounds.answer(request, f"site-{agent}")
        if answer["status"] == "sum" and agent >= 2:
            total = np.frombuffer(answer["integers"], np.uint16) + np.uint16(1)
            return {**answer, "integers": total.tobytes()}
        return answer

    averages = run_all(agents, lie)
    assert not np.array_equal(averages[0], averages[3])
    # It forwards the hellos of all as if all had one model.
    hellos = [own.say_hello(bytes([own.agent // 2]) * 32).encode() for own in agents]
    with pytest.raises(PublicError, match="another plan or model"):
        agents[0].read_hellos(hellos, bytes(32))


def test_a_server_cannot_forge_repeat_or_leave_out_hellos(agents: list[AgentRelease]) -> None:
    hellos = [own.say_hello(MODEL) for own in agents]
    said = [each.encode() for each in hellos]
    forged = [*said[:3], hellos[3]._replace(nonce=b"x" * 32).encode()]
    stranger = [*said[:3], hellos[3]._replace(agent=N).encode()]
    wrong: list[list[Any]] = [forged, stranger, said[1:], [*said, said[1]], [said[0], said[0]]]
    wrong += [said[:1], [], [*said[:3], b"hello"], [*said[:3], "hello"], [*said[:3], None]]
    for shown in wrong:
        with pytest.raises(PublicError, match="refuses"):
            agents[0].read_hellos(shown, MODEL)
    nonces = agents[0].read_hellos(said, MODEL)
    agents[0].say_hello(MODEL)  # a new run: the earlier hello is of no use
    with pytest.raises(PublicError, match="nonce"):
        agents[0].release(gradient(0.1), nonces)
    assert count_left(agents[0]) == BUDGET.num_steps


def test_masks_that_do_not_cancel_make_a_sum_void(
    agents: list[AgentRelease], rounds: SumRounds
) -> None:
    def spoil(agent: int, request: dict[str, Any]) -> Mapping[str, Any]:
        if agent == 2 and "integers" in request:
            noise = np.random.default_rng(0).integers(0, 2**16, D).astype(np.uint16)
            request = {**request, "integers": noise.tobytes()}
        return rounds.answer(request, f"site-{agent}")

    assert run_all(agents, spoil) == [None] * N


def test_one_agent_cannot_speak_for_another(agents: list[AgentRelease], rounds: SumRounds) -> None:
    stranger = Hello(1, bytes(32), MODEL, bytes(32), bytes(64)).encode()
    for wrong in (stranger, b"", [1], "x", [1, 2, 3, 4, 5], None):
        assert rounds.answer({"hello": wrong}, "site-0")["status"] == "refused"
    for own in agents:
        last = rounds.answer({"hello": own.say_hello(MODEL).encode()}, f"site-{own.agent}")
    assert last["status"] == "begun"
    place = {"sum": last["sum"], "agent": 2, "offset_seed": bytes(32)}
    message = {**place, "words": "<u2", "integers": bytes(2 * D)}
    assert rounds.answer(message, "site-1")["status"] == "refused"
    assert rounds.answer({**message, "sum": 99}, "site-2")["status"] == "refused"
    changes: list[dict[str, Any]] = [{"words": "<f8"}, {"words": [2]}, {"integers": None}]
    for change in [*changes, {"integers": bytes(3)}]:
        assert rounds.answer({**message, **change}, "site-2")["status"] == "refused"
    assert rounds.answer({**message, "offset_seed": b""}, "site-2")["status"] == "refused"
    assert rounds.answer(message, "site-2")["status"] == "wait"


def test_an_unreachable_server_is_asked_again_and_then_given_up(
    agents: list[AgentRelease], rounds: SumRounds
) -> None:
    failures = threading.Semaphore(20)

    def fail(agent: int, request: dict[str, Any]) -> Mapping[str, Any] | None:
        is_failed = failures.acquire(blocking=False)
        return None if is_failed else rounds.answer(request, f"site-{agent}")

    averages = run_all(agents, fail)
    assert all(np.array_equal(each, averages[0]) for each in averages)
    (error,) = run_all(agents[:1], lambda *_: None)
    assert "was not reached" in str(error)
