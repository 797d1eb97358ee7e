"""No agent starts unless all agree; an agent that differs or refuses is named to all."""

import secrets
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from corn.covariance import Decomposition
from corn.distributed.rendezvous import (
    AbsentError,
    Agreement,
    ForgedEntryError,
    HandshakeError,
    Hello,
    RefusalError,
    Rendezvous,
    announcing_failure,
    check_guarantee,
    shake_hands,
)
from corn.errors import (
    CornError,
    FileFormatError,
    InfeasibleError,
    PublicError,
    StoppedByUserError,
)
from corn.learn.sweep import Interruption
from corn.noise import BudgetSpentError
from corn.plan import Plan
from corn.transport import LinkError, StoreLostError

from .harness import small_plan
from .threads import run_in_threads

TERMS = {"the model": "linear", "steps": "10"}
HELLO = Hello("ab" * 32, TERMS, "cd" * 32, 10)


def hello_of(agent: int) -> Hello:
    return replace(HELLO, nonce=f"{agent:064x}")


def test_all_come_to_the_same_agreement() -> None:
    def run(rendezvous: Rendezvous) -> Agreement:
        steps = {0: (0, 20, 40), 1: (0, 20), 2: (0, 10, 20, 40)}[rendezvous.agent]
        own = replace(
            hello_of(rendezvous.agent),
            checkpoints=steps,
            remaining=30 - 10 * (rendezvous.agent == 1),
        )
        agreement = shake_hands(rendezvous, own)
        rendezvous.agree("ready", repr(agreement))
        return agreement

    results = run_in_threads(3, run)
    assert all(isinstance(result, Agreement) for result in results), results
    assert results[0] == results[1] == results[2]
    agreement = results[0]
    assert isinstance(agreement, Agreement)
    assert (agreement.first_step, agreement.max_steps) == (20, 20)


@pytest.mark.parametrize("topic", ["hello", "ready"])
def test_a_store_that_replays_an_earlier_run_is_refused(
    topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All agents would draw the noise of that run again, bit for bit."""
    earlier: dict[int, bytes] = {}
    wait, replays = Rendezvous._wait, False

    def hear(self: Rendezvous, about: str, session: bytes, seconds: float) -> dict[int, bytes]:
        words = wait(self, about, session, seconds)
        if about != topic:
            return words
        if not replays:
            earlier.update(words)
        return dict(earlier)

    def run(rendezvous: Rendezvous) -> Agreement:
        agreement = shake_hands(rendezvous, replace(HELLO, nonce=secrets.token_hex(32)))
        rendezvous.agree("ready", repr(agreement))
        return agreement

    monkeypatch.setattr(Rendezvous, "_wait", hear)
    assert all(isinstance(result, Agreement) for result in run_in_threads(3, run))
    replays = True
    for agent, result in enumerate(run_in_threads(3, run)):
        assert isinstance(result, ForgedEntryError), result
        assert f"message ({topic}) under the number of agent {agent} " in str(result)


def test_a_resumed_run_never_restarts_from_step_0() -> None:
    def run(rendezvous: Rendezvous) -> Agreement:
        steps = {0: (0, 600), 1: (0, 600, 700), 2: (0, 50)}[rendezvous.agent]
        return shake_hands(rendezvous, replace(hello_of(rendezvous.agent), checkpoints=steps))

    for result in run_in_threads(3, run):
        assert isinstance(result, HandshakeError), result
        assert "agent 2 came to step 50 only" in str(result)


def test_waiting_for_others_can_be_interrupted() -> None:
    def run(rendezvous: Rendezvous) -> object:
        if rendezvous.agent == 1:
            return None
        rendezvous.interruption = Interruption()
        threading.Timer(0.2, setattr, (rendezvous.interruption, "requested", True)).start()
        return shake_hands(rendezvous, HELLO)

    began = time.monotonic()
    result, _ = run_in_threads(2, run, timeout=50)
    assert isinstance(result, StoppedByUserError), result
    assert time.monotonic() - began < 30


def test_a_new_nonce_of_any_one_agent_makes_the_runs_nonce_new() -> None:
    def run(nonce: str) -> bytes:
        def meet(rendezvous: Rendezvous) -> Agreement:
            own = hello_of(rendezvous.agent)
            return shake_hands(
                rendezvous, replace(own, nonce=nonce) if rendezvous.agent == 2 else own
            )

        result = run_in_threads(3, meet)[0]
        assert isinstance(result, Agreement), result
        return result.nonce

    assert run("01" * 32) != run("02" * 32)
    assert run("01" * 32) == run("01" * 32)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(HELLO, plan="ff" * 32), "the plan's fingerprint: agent 2 has ffffffffffffffff"),
        (
            replace(HELLO, terms=TERMS | {"the model": "cnn"}),
            "the model: agent 2 has cnn; the rest",
        ),
        (replace(HELLO, terms=TERMS | {"steps": "9"}), "steps: agent 2 has 9; the rest 10"),
        (replace(HELLO, terms={"the model": "linear"}), "steps: agent 2 has nothing; the rest 10"),
        (replace(HELLO, terms=TERMS | {"odd": "1"}), "odd: agent 2 has 1; the rest nothing"),
        # In full: the classes of a file may differ in their order only.
        (
            replace(HELLO, terms=TERMS | {"classes": "a " * 400 + "b"}),
            f"classes: agent 2 has {'a ' * 400}b; the rest nothing",
        ),
    ],
)
def test_an_agent_that_differs_is_named_by_all(other: Hello, message: str) -> None:
    def run(rendezvous: Rendezvous) -> Agreement:
        return shake_hands(rendezvous, other if rendezvous.agent == 2 else HELLO)

    for result in run_in_threads(4, run):
        assert isinstance(result, HandshakeError)
        assert str(result).startswith(f"agents differ in {message}")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InfeasibleError("the plan is weak"), "the plan is weak"),
        (PublicError("spent"), "spent"),
        (BudgetSpentError("/data/HIV/keys: spent"), "BudgetSpentError; only its owner sees"),
        (CornError("agent 1: /data/HIV/doe.dcm: missing"), "CornError; only its owner sees"),
        (FileFormatError("agent 1: row 7 has 3.14"), "FileFormatError; only its owner sees"),
    ],
)
def test_a_refusal_reaches_all_agents_without_private_details(error: CornError, told: str) -> None:
    def run(rendezvous: Rendezvous) -> object:
        with announcing_failure(rendezvous):
            if rendezvous.agent == 1:
                raise error
        return shake_hands(rendezvous, HELLO)

    first, own, last = run_in_threads(3, run)
    assert own is error
    for result in (first, last):
        assert isinstance(result, RefusalError)
        assert f"because agent 1 refused: {told}" in str(result)
        assert "HIV" not in str(result)
        assert "3.14" not in str(result)


@pytest.mark.slow
def test_a_late_agent_learns_that_the_others_gave_up() -> None:
    agreement = Agreement(bytes(32), 0, 10)

    def run(rendezvous: Rendezvous) -> None:
        if rendezvous.agent == 2:
            while rendezvous.store.get(["refusal/0", "refusal/1"]) == [None, None]:
                time.sleep(0.01)
        with announcing_failure(rendezvous):
            rendezvous.agree("ready", repr(agreement))

    results = run_in_threads(3, run, timeout=6)
    absent = [result for result in results if isinstance(result, AbsentError)]
    assert absent
    assert all("no message (join) from agent 2 within" in str(error) for error in absent)
    assert isinstance(results[2], RefusalError), results


@pytest.mark.parametrize("error", [LinkError("broken"), AbsentError("no message")])
def test_a_missing_agent_that_refused_is_the_reason(error: CornError) -> None:
    def run(rendezvous: Rendezvous) -> None:
        with announcing_failure(rendezvous):
            if rendezvous.agent == 1:
                raise PublicError("no key")
            time.sleep(0.3)
            raise error

    first, second = run_in_threads(2, run)
    assert isinstance(first, RefusalError)
    # Each begins with its agent, as all failures of an agent do.
    assert str(first) == "agent 0: does not start, because agent 1 refused: no key"
    assert str(second) == "agent 1: no key"


def test_an_unexpected_failure_is_announced_without_data() -> None:
    def run(rendezvous: Rendezvous) -> None:
        with announcing_failure(rendezvous):
            if rendezvous.agent == 1:
                raise KeyError("a patient's name")
            shake_hands(rendezvous, HELLO)

    first, second = run_in_threads(2, run)
    assert isinstance(first, RefusalError)
    assert str(first).endswith("refused: KeyError; only its owner sees the details")
    assert isinstance(second, KeyError)


def test_a_lost_store_does_not_hide_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StoreLostError

    def run(rendezvous: Rendezvous) -> None:
        monkeypatch.setattr(Rendezvous, "refuse", fail)
        with announcing_failure(rendezvous):
            raise CornError("no key")

    assert str(run_in_threads(1, run)[0]) == "agent 0: no key"


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
    with pytest.raises(InfeasibleError, match=r"refuses to start.*agent 1 gets ε = "):
        check_guarantee(cheat, 1)
