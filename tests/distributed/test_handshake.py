"""Nobody starts unless all agree; whoever differs is named, to everyone."""

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from corn.covariance import Decomposition
from corn.distributed.handshake import (
    Agreement,
    HandshakeError,
    Hello,
    check_guarantee,
    compare_hellos,
    confirm,
    refusing_aloud,
    shake_hands,
)
from corn.distributed.links import LinkError
from corn.distributed.meeting import (
    AbsentError,
    Meeting,
    RefusalError,
    host_store,
    join,
    join_store,
)
from corn.errors import (
    CornError,
    FileFormatError,
    InfeasibleError,
    InvalidArgumentError,
    PublicError,
)
from corn.learn.monitor import Interruption
from corn.noise import BudgetSpentError
from corn.plan import Plan

from .harness import small_plan
from .threads import run_in_threads

HELLO = Hello("ab" * 32, "model", "start", "roster", {"steps": "10"}, "cd" * 32, 10)


def hello_of(agent: int) -> Hello:
    return replace(HELLO, nonce=f"{agent:064x}")


def test_all_come_to_the_same_agreement() -> None:
    def run(meeting: Meeting) -> Agreement:
        steps = {0: (0, 20, 40), 1: (0, 20), 2: (0, 10, 20, 40)}[meeting.agent]
        own = replace(
            hello_of(meeting.agent), checkpoints=steps, remaining=30 - 10 * (meeting.agent == 1)
        )
        agreement = shake_hands(meeting, own)
        confirm(meeting, agreement)
        return agreement

    results = run_in_threads(3, run)
    assert all(isinstance(result, Agreement) for result in results), results
    assert results[0] == results[1] == results[2]
    agreement = results[0]
    assert isinstance(agreement, Agreement)
    assert (agreement.first_step, agreement.max_steps, agreement.scarce) == (20, 20, 1)


@pytest.mark.parametrize("topic", ["hello", "ready"])
def test_a_store_that_replays_an_earlier_run_is_refused(
    topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or all agents would draw the noise of that run again, bit for bit."""
    earlier: dict[int, bytes] = {}
    hear_all, replays = Meeting.hear_all, False

    def hear(self: Meeting, about: str) -> dict[int, bytes]:
        words = hear_all(self, about)
        if about != topic:
            return words
        if not replays:
            earlier.update(words)
        return dict(earlier)

    def run(meeting: Meeting) -> Agreement:
        agreement = shake_hands(meeting, replace(HELLO, nonce=secrets.token_hex(32)))
        confirm(meeting, agreement)
        return agreement

    monkeypatch.setattr(Meeting, "hear_all", hear)
    assert all(isinstance(result, Agreement) for result in run_in_threads(3, run))
    replays = True
    for agent, result in enumerate(run_in_threads(3, run)):
        assert isinstance(result, HandshakeError), result
        assert f"the store has another word ({topic}) of agent {agent}" in str(result)


def test_a_resumed_run_never_starts_over_unasked() -> None:
    def run(meeting: Meeting) -> Agreement:
        steps = {0: (0, 600), 1: (0, 600, 700), 2: (0, 50)}[meeting.agent]
        return shake_hands(meeting, replace(hello_of(meeting.agent), checkpoints=steps))

    for result in run_in_threads(3, run):
        assert isinstance(result, HandshakeError), result
        assert "agent 2 came to step 50, others to step 700; a run without" in str(result)


def test_waiting_for_others_can_be_interrupted() -> None:
    def run(meeting: Meeting) -> object:
        if meeting.agent == 1:
            return None
        meeting.interruption = Interruption()
        threading.Timer(0.2, setattr, (meeting.interruption, "requested", True)).start()
        return shake_hands(meeting, HELLO)

    began = time.monotonic()
    result, _ = run_in_threads(2, run, timeout=20)
    assert str(result) == "agent 0: interrupted before the first step"
    assert time.monotonic() - began < 10


def test_waiting_for_a_store_can_be_interrupted() -> None:
    """Nobody listens at one address, and nobody answers at the other."""
    for host in ("127.0.0.1", "192.0.2.1"):
        interruption, began = Interruption(), time.monotonic()
        threading.Timer(0.2, setattr, (interruption, "requested", True)).start()
        with pytest.raises(CornError, match=r"^agent 3: interrupted before the first step$"):
            join(store=(host, 1), agent=3, num_agents=4, timeout=20, interruption=interruption)
        assert time.monotonic() - began < 10


def test_a_meeting_serves_one_run() -> None:
    def run(meeting: Meeting) -> Agreement:
        shake_hands(meeting, HELLO)
        return shake_hands(meeting, HELLO)

    (result,) = run_in_threads(1, run)
    assert isinstance(result, InvalidArgumentError)
    assert "agent 0: this meeting has served a run" in str(result)


def test_a_new_nonce_of_any_one_agent_makes_the_runs_nonce_new() -> None:
    def run(nonce: str) -> bytes:
        def meet(meeting: Meeting) -> Agreement:
            own = hello_of(meeting.agent)
            return shake_hands(meeting, replace(own, nonce=nonce) if meeting.agent == 2 else own)

        result = run_in_threads(3, meet)[0]
        assert isinstance(result, Agreement), result
        return result.nonce

    assert run("01" * 32) != run("02" * 32)
    assert run("01" * 32) == run("01" * 32)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(HELLO, plan="ff" * 32), "the plan's fingerprint: agent 2 has ffffffffffffffff"),
        (replace(HELLO, model="another"), "the model: agent 2 has another"),
        (replace(HELLO, start="elsewhere"), "the initial parameters: agent 2 has elsewhere"),
        (replace(HELLO, roster="strangers"), "the roster of public keys: agent 2 has strangers"),
        (replace(HELLO, settings={"steps": "9"}), "steps: agent 2 has 9; the rest 10"),
        (replace(HELLO, settings={}), "steps: agent 2 has ; the rest 10"),
    ],
)
def test_who_differs_is_named_to_everyone(other: Hello, message: str) -> None:
    def run(meeting: Meeting) -> Agreement:
        return shake_hands(meeting, other if meeting.agent == 2 else HELLO)

    for agent, result in enumerate(run_in_threads(4, run)):
        assert isinstance(result, HandshakeError)
        assert str(result).startswith(f"agent {agent}: agents differ in {message}")


def test_between_two_agent_0_is_the_measure() -> None:
    with pytest.raises(HandshakeError, match="agent 1 has b; the rest a"):
        compare_hellos({0: replace(HELLO, model="a"), 1: replace(HELLO, model="b")}, 0)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InfeasibleError("agent 1: the plan is weak"), "agent 1: the plan is weak"),
        (BudgetSpentError("agent 1: spent"), "agent 1: spent"),
        (CornError("agent 1: /data/HIV/doe.dcm: missing"), "CornError; only its owner sees"),
        (FileFormatError("agent 1: row 7 has 3.14"), "FileFormatError; only its owner sees"),
    ],
)
def test_a_refusal_reaches_everybody_without_what_tells_of_data(
    error: CornError, told: str
) -> None:
    def run(meeting: Meeting) -> object:
        with refusing_aloud(meeting):
            if meeting.agent == 1:
                raise error
        return shake_hands(meeting, HELLO)

    first, own, last = map(str, run_in_threads(3, run))
    assert own == str(error)
    for agent, heard in ((0, first), (2, last)):
        assert heard.startswith(f"agent {agent}: does not start, because agent 1 refused: {told}")
        assert "HIV" not in heard
        assert "3.14" not in heard


def test_who_comes_late_hears_that_the_others_gave_up() -> None:
    agreement = Agreement(bytes(32), 0, 10, 0)

    def run(meeting: Meeting) -> None:
        if meeting.agent == 2:
            meeting.store.wait(["refusal"])
        with refusing_aloud(meeting):
            confirm(meeting, agreement)

    results = run_in_threads(3, run, timeout=0.5)
    assert "no word (ready) from agents 2" in str(results[0]) + str(results[1])
    assert isinstance(results[2], RefusalError), results


@pytest.mark.parametrize("error", [LinkError("broken"), AbsentError("no word")])
def test_who_misses_one_that_refused_says_so(error: CornError) -> None:
    def run(meeting: Meeting) -> None:
        with refusing_aloud(meeting):
            if meeting.agent == 1:
                raise PublicError("agent 1: no key")
            time.sleep(0.3)
            raise error

    found = [str(result) for result in run_in_threads(2, run)]
    because = "agent 0: does not start, because agent 1 refused: agent 1: no key"
    assert found == [because, "agent 1: no key"]


def test_what_others_are_told_of_an_unexpected_failure_has_no_data_in_it() -> None:
    def run(meeting: Meeting) -> None:
        with refusing_aloud(meeting):
            if meeting.agent == 1:
                raise KeyError("a patient's name")
            shake_hands(meeting, HELLO)

    first, second = run_in_threads(2, run)
    assert str(first).endswith("because agent 1 refused: KeyError; only its owner sees the details")
    assert isinstance(second, KeyError)


def test_a_store_that_is_gone_does_not_hide_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise CornError("the store where agents meet is gone")

    def run(meeting: Meeting) -> None:
        monkeypatch.setattr(Meeting, "refuse", fail)
        with refusing_aloud(meeting):
            raise CornError("no key")

    assert str(run_in_threads(1, run)[0]) == "no key"


def test_who_does_not_come_is_named() -> None:
    def run(meeting: Meeting) -> object:
        return None if meeting.agent == 2 else shake_hands(meeting, HELLO)

    first, _, _ = run_in_threads(3, run, timeout=0.5)
    assert isinstance(first, AbsentError)
    assert "no word (hello) from agents 2 within 0.5 s" in str(first)


def test_the_host_of_the_store_leaves_last() -> None:
    def run(meeting: Meeting) -> None:
        own = Meeting(
            meeting.store, meeting.agent, 3, timeout=5, address="", is_host=meeting.agent == 0
        )
        time.sleep(0.2 * meeting.agent)
        with refusing_aloud(own):
            raise CornError("no")

    began = time.monotonic()
    assert [str(result) for result in run_in_threads(3, run)] == ["no"] * 3
    assert 0.4 <= time.monotonic() - began < 4


def test_a_plan_that_gives_less_than_promised_is_refused() -> None:
    plan = small_plan("ring:4", 10)
    assert check_guarantee(plan, 1).epsilon <= 10 * (1 + 1e-9)
    parts = plan.decomposition
    weak = Decomposition(
        (np.sqrt(parts.private_variance * 0.5).astype(np.float32).astype(np.float64)) ** 2,
        parts.seed_groups,
        parts.factors,
    )
    cheat = replace(plan, decomposition=weak)
    assert isinstance(cheat, Plan)
    with pytest.raises(InfeasibleError, match=r"agent 1: refuses to start.*agent 1 gets ε = "):
        check_guarantee(cheat, 1)


def test_a_taken_port_and_a_missing_store_are_one_line() -> None:
    store = host_store("127.0.0.1", 0, timeout=1)
    with pytest.raises(CornError, match="no store can be opened there, the port is taken"):
        host_store("127.0.0.1", store.port, timeout=1)
    with pytest.raises(CornError, match=r"agent 3: no store found at 127\.0\.0\.1:1 within 0.5 s"):
        join_store("127.0.0.1", 1, agent=3, timeout=0.5)


def test_a_port_that_another_program_holds_is_not_waited_for_in_vain() -> None:
    """It takes connections, never says a word, and lasts as long as the process."""
    other = socket.create_server(("127.0.0.1", 0))
    host, port = other.getsockname()
    other.detach()
    with pytest.raises(CornError, match=r"agent 3: what listens at .* does not answer as a store"):
        join_store(host, port, agent=3, timeout=0.5)
    interruption = Interruption()
    threading.Timer(0.2, setattr, (interruption, "requested", True)).start()
    with pytest.raises(CornError, match=r"^agent 3: interrupted before the first step$"):
        join_store(host, port, agent=3, timeout=20, interruption=interruption)
    with pytest.raises(CornError, match=r"^agent 0: .*the port is taken"):
        join(store=(host, port), agent=0, num_agents=4, timeout=1)


def test_the_store_listens_at_its_address_only() -> None:
    store = host_store("127.0.0.1", 0, timeout=1)
    socket.create_connection(("127.0.0.1", store.port), timeout=1).close()
    for elsewhere in ("127.0.0.2", "::1"):
        with pytest.raises(OSError, match=r"refused|Cannot assign"):
            socket.create_connection((elsewhere, store.port), timeout=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"RANK": "x"}, "RANK must be a number, found 'x'"),
    ],
)
def test_a_wrong_environment_is_one_line(
    changes: dict[str, str | None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**there, **changes}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(CornError, match=message):
        join(timeout=1)


def test_a_rank_that_never_comes_is_one_line_at_rank_0() -> None:
    """Torch gives up first: a process that left its thread there would be aborted."""
    code = (
        "from corn.distributed import join\n"
        "from corn.errors import CornError\n"
        "try: join(timeout=1)\n"
        "except CornError as error: print(error)"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    there = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | there,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "not all agents came within 1 s" in done.stdout


def test_an_agent_beyond_the_last_opens_nothing() -> None:
    with pytest.raises(InvalidArgumentError, match="agent must be from 0 to 3, found 7"):
        join(store=("127.0.0.1", 1), agent=7, num_agents=4)


def test_without_torchrun_and_address_there_is_nowhere_to_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(CornError, match="RANK is not set: start agents with torchrun"):
        join()
    with pytest.raises(CornError, match="must be given with a store"):
        join(store=("127.0.0.1", 1))
