"""The launcher reports on agents in one line each, and places them on hosts."""

import io
import math
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from corn.distributed.launcher import LaunchDisplay, Placement, draw_table, launch
from corn.distributed.logs import LogSettings
from corn.distributed.processes import AgentProcesses, Note, is_suspended
from corn.distributed.results import (
    AgentResult,
    Failure,
    FailureKind,
    RunStatus,
    StopNotice,
    StopReason,
    describe_exit,
    describe_lost,
    describe_notes,
    raise_common_failure,
    require_done,
)
from corn.distributed.settings import RunSettings
from corn.distributed.state import AgentState, LocalState
from corn.errors import CornError, InvalidArgumentError, StoppedByUserError
from corn.plan import save_plan

from .harness import WORKLOAD, small_plan
from .monitored import make_state

KILLED = Failure(FailureKind.ENDED, exit_code=-signal.SIGKILL)


def done(
    agent: int, notes: tuple[str, ...] = (), lost: dict[int, int] | None = None
) -> AgentResult:
    return AgentResult(agent, RunStatus.COMPLETE, notes=notes, lost=lost or {})


def failed(agent: int, failure: Failure, notes: tuple[str, ...] = ()) -> AgentResult:
    return AgentResult(agent, RunStatus.FAILED, failure=failure, notes=notes)


def test_a_second_ctrl_c_ends_all_processes_and_reports_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents have spent budget and written checkpoints, so it is not as if nothing happened."""
    closed: list[AgentProcesses] = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(AgentProcesses, "start", lambda _: None)
    monkeypatch.setattr(AgentProcesses, "poll", interrupt)
    monkeypatch.setattr(AgentProcesses, "close", lambda own: closed.append(own))
    save_plan(small_plan("ring:3", 5), tmp_path / "plan.corn")
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = free.getsockname()
    # Twice, as the port of the store must be free again after the first time.
    for _ in range(2):
        with pytest.raises(StoppedByUserError, match="--resume continues from the newest check"):
            launch(
                tmp_path / "plan.corn",
                WORKLOAD,
                out=tmp_path / "out",
                settings=RunSettings(),
                placement=Placement(store=where),
            )
    assert len(closed) == 2


def test_the_table_shows_every_agent() -> None:
    states = {0: make_state(step=40), 1: make_state(step=41, test_loss=None)}
    local = LocalState(12.5, train_loss=0.77, gradient_norm=1.0, fraction_clipped=0.5)
    unknown = replace(local, fraction_clipped=math.nan)
    results = {1: failed(1, KILLED), 2: done(2)}
    public, private = ("40/500", "0.25", "3.21", "1.5", "lost", "done"), ("0.77", "50%", "clipped")
    for show_private in (False, True):
        written = io.StringIO()
        promise = "(10, 1e-5)-DP of an agent, clip [0.1]"
        shown = {0: local, 1: unknown} if show_private else None
        table = draw_table(states, results, 500, promise=promise, local_states=shown)
        Console(width=100, file=written).print(table)
        text = written.getvalue()
        assert "nan" not in text
        assert f"ε: {promise}" in text
        assert "simulated" not in text
        assert all(shown in text for shown in public)
        assert all((shown in text) == show_private for shown in private)


def test_the_table_names_a_simulated_epsilon() -> None:
    written = io.StringIO()
    states = {0: make_state(step=40)}
    Console(width=120, file=written).print(draw_table(states, {}, 500, epsilon="simulated ε"))
    assert "simulated ε spent" in written.getvalue()


def test_without_a_terminal_there_is_a_line_per_checkpoint_and_event(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def at(step: int) -> dict[int, AgentState]:
        return {agent: make_state(agent=agent, step=step + agent) for agent in range(2)}

    news = [(0, Note("agent 2 is gone")), (1, Note("agent 2 is gone")), (1, Note("odd", True))]
    display = LaunchDisplay(500, checkpoint_every=100, promise="the promise")
    with display.logging(LogSettings()), display:
        for step in (40, 99, 101, 130, 330, 370):
            display.update(at(step), {}, {}, news[: 3 if step > 99 else 0])
        display.update(at(400), {}, {0: failed(0, KILLED), 1: done(1)}, news)
    lines = capsys.readouterr().err.splitlines()
    ends = [line.partition(": ")[2] for line in lines]
    assert [text.partition(",")[0] for text in ends if "of 500" in text] == [
        "step 101 of 500",
        "step 330 of 500",
    ]
    assert all("ε spent at most 3.21: the promise" in text for text in ends if "of 500" in text)
    assert ends.count("agent 2 is gone") == 1
    assert ends.count("private, do not publish: odd") == 1
    assert "ended by SIGKILL" in ends
    assert "complete after 0 steps" in ends
    assert not any("0.77" in line for line in lines)


@pytest.mark.parametrize("cause", [Failure(FailureKind.ERROR, "agent 2: no key"), KILLED])
def test_the_reason_comes_from_an_agent_that_has_one_of_its_own(cause: Failure) -> None:
    because = Failure(FailureKind.FOLLOWED, "agent 0: does not start, because agent 2 refused")
    results = {0: failed(0, because), 2: failed(2, cause)}
    with pytest.raises(CornError, match=f"^{cause.describe(2)}$"):
        raise_common_failure(results)
    with pytest.raises(CornError, match="agent 2 refused"):
        raise_common_failure({0: failed(0, because)})
    raise_common_failure({0: done(0), 2: failed(2, cause)})


def test_a_person_who_stops_agents_before_the_first_step_is_the_reason() -> None:
    stopped = Failure(FailureKind.INTERRUPTED, "agent 1: interrupted before the first step")
    followed = Failure(FailureKind.FOLLOWED, "agent 0: does not start")
    with pytest.raises(StoppedByUserError, match=r"^agent 1: interrupted"):
        raise_common_failure({0: failed(0, followed), 1: failed(1, stopped)})


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (StopReason.NONE, None),
        (StopReason.BUDGET_SPENT, None),
        (StopReason.LOSS, CornError),
        (StopReason.DIVERGED, CornError),
        (StopReason.INTERRUPTED, StoppedByUserError),
    ],
)
def test_a_run_is_done_unless_a_person_or_its_agents_stopped_it(
    reason: StopReason, error: type[CornError] | None
) -> None:
    stop = StopNotice(8, 1, reason)
    results = [AgentResult(agent, RunStatus.INTERRUPTED, stop=stop) for agent in range(2)]
    if error is None:
        require_done(results, 8)
        return
    with pytest.raises(error, match="after 8 steps") as caught:
        require_done(results, 8)
    assert type(caught.value) is error


def test_equal_notes_are_listed_once() -> None:
    note = ("went on without agent 2",)
    results = {0: done(0, note), 1: done(1, note), 2: failed(2, KILLED)}
    assert describe_notes(results, 3) == [
        "only 2 of 3 agents finished: agents 0, 1",
        "agent 2: ended by SIGKILL",
        "agents 0, 1: went on without agent 2",
    ]


def test_a_lost_agent_is_named_with_the_step_at_which_the_loss_was_first_noticed() -> None:
    results = {
        0: done(0, lost={1: 40, 3: 35}),
        1: failed(1, KILLED),
        2: done(2, lost={1: 39, 3: 36}),
    }
    lost = {
        1: "agent 1: ended by SIGKILL, missed by the others from step 39 on",
        3: "agent 3: lost on another host, missed by the others from step 35 on",
    }
    assert describe_lost(results) == lost
    assert describe_notes(results, 4) == [
        "only 2 of 3 agents on this host finished: agents 0, 2",
        *lost.values(),
    ]


def test_there_are_no_notes_on_losses_where_all_finish() -> None:
    results = {agent: done(agent) for agent in range(2)}
    assert describe_notes(results, 2) == []
    assert describe_lost(results) == {}


def test_notes_of_a_lost_agent_are_kept() -> None:
    results = {0: done(0), 2: failed(2, KILLED, ("was slow",))}
    assert describe_notes(results, 3)[1:] == ["agent 2: ended by SIGKILL", "agent 2: was slow"]


def test_only_the_owner_reads_a_failure_that_may_depend_on_data() -> None:
    secret = "agent 1: targets must be classes, found 37.25"
    private = failed(1, Failure(FailureKind.ERROR, secret, is_private=True))
    results = {0: done(0, lost={1: 8}), 1: private}
    for text in (*describe_lost(results).values(), *describe_notes(results, 2)):
        assert "37.25" not in text
    with pytest.raises(CornError, match="found 37"):  # on the owner's own console
        raise_common_failure({1: private})


def test_the_end_of_a_process_is_explained() -> None:
    assert describe_exit(-signal.SIGKILL) == "ended by SIGKILL"
    assert describe_exit(-signal.SIGABRT) == "ended by SIGABRT"
    assert describe_exit(-35) == "ended by signal 35", "a real-time signal has no name"
    assert describe_exit(3) == "ended without a report (exit code 3)"


def test_a_suspended_process_is_recognised() -> None:
    with subprocess.Popen(["sleep", "90"]) as process:
        assert not is_suspended(process.pid)
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while not is_suspended(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_suspended(process.pid)
        process.kill()
    assert not is_suspended(process.pid)


def test_agents_are_assigned_to_hosts() -> None:
    store = ("10.0.0.1", 29500)
    assert [list(Placement(3, host, store).agents(7)) for host in range(3)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
    ]
    assert list(Placement().agents(2)) == [0, 1]
    with pytest.raises(InvalidArgumentError, match="host 3 has no agents"):
        Placement(3, 3, store).agents(7)
    with pytest.raises(InvalidArgumentError, match="store must be given"):
        Placement(3)
