"""The launcher reports on agents in one line each."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from corn.distributed.launcher import (
    AgentProcesses,
    ProgressLog,
    describe_lost,
    describe_notes,
    is_suspended,
    launch,
    raise_common_failure,
)
from corn.distributed.logs import writing_log
from corn.distributed.results import (
    AgentResult,
    Failure,
    RunStatus,
    StopNotice,
    StopReason,
    require_done,
)
from corn.distributed.settings import RunSettings
from corn.errors import CornError, StoppedByUserError
from corn.plan import save_plan

from .harness import WORKLOAD, small_plan
from .monitored import make_state

KILLED = Failure("ended", "agent 2: ended by SIGKILL")


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
    with pytest.raises(StoppedByUserError, match="--resume continues from the newest check"):
        launch(
            tmp_path / "plan.corn",
            WORKLOAD,
            out=tmp_path / "out",
            settings=RunSettings(),
            keys=tmp_path / "keys",
        )
    assert len(closed) == 1


def test_progress_is_that_of_the_slowest_agent_that_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = AgentProcesses({})
    progress = ProgressLog("the promise")
    monkeypatch.setattr("corn.distributed.launcher._SECONDS_BETWEEN_LINES", 0)
    with writing_log():
        for step in (101, 330, 400):
            for agent in range(2):
                processes.states[agent] = make_state(agent=agent, step=step + agent)
            if step == 400:
                processes.results = {0: failed(0, KILLED), 1: done(1)}
            progress.update(processes)
    lines = capsys.readouterr().err.splitlines()
    ends = [line.partition(": ")[2] for line in lines]
    assert [text.partition(",")[0] for text in ends if "of 400" in text] == [
        "step 101 of 400",
        "step 330 of 400",
    ]
    assert ends.count("the promise") == 1
    assert all("ε spent at most 3.21 of 10 (unit " in text for text in ends if "of 400" in text)
    assert sum("lost 1, " in text for text in ends) == 2


@pytest.mark.parametrize("cause", [Failure("error", "agent 2: no key"), KILLED])
def test_the_reason_comes_from_an_agent_that_has_one_of_its_own(cause: Failure) -> None:
    because = Failure("followed", "agent 0: does not start, because agent 2 refused")
    results = {0: failed(0, because), 2: failed(2, cause)}
    with pytest.raises(CornError, match=f"^{cause.message}$"):
        raise_common_failure(results)
    with pytest.raises(CornError, match="agent 2 refused"):
        raise_common_failure({0: failed(0, because)})
    raise_common_failure({0: done(0), 2: failed(2, cause)})


def test_a_person_who_stops_agents_before_the_first_step_is_the_reason() -> None:
    stopped = Failure("interrupted", "agent 1: interrupted before the first step")
    followed = Failure("followed", "agent 0: does not start")
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
    with pytest.raises(error, match=r"after (step 8|8 steps)") as caught:
        require_done(results, 8)
    assert type(caught.value) is error


def test_notes_are_listed_once_with_what_was_lost_when() -> None:
    same = ("went on without agent 2",)
    results = {
        0: done(0, same, lost={2: 40}),
        1: done(1, same, lost={2: 39}),
        2: failed(2, KILLED, ("was slow",)),
    }
    lost = "agent 2: ended by SIGKILL"
    assert describe_lost(results) == {2: lost}
    assert describe_notes(results) == [
        lost,
        "agents 0, 1: went on without agent 2",
        "agent 2: was slow",
    ]
    everyone = {agent: done(agent) for agent in range(2)}
    assert (describe_notes(everyone), describe_lost(everyone)) == ([], {})


def test_only_the_owner_reads_a_failure_that_may_depend_on_data() -> None:
    secret = "agent 1: targets must be classes, found 37.25"
    private = failed(1, Failure("error", secret, is_private=True))
    results = {0: done(0, lost={1: 8}), 1: private}
    for text in (*describe_lost(results).values(), *describe_notes(results)):
        assert "37.25" not in text
    with pytest.raises(CornError, match="found 37"):  # on the owner's own console
        raise_common_failure({1: private})


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
