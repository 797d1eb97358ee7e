"""What the launcher says about agents, and where it puts them."""

import io
import math
import signal
import subprocess
import time

import pytest
from rich.console import Console

from corn.distributed.launcher import (
    Ending,
    Outcome,
    describe_exit,
    is_stopped,
    raise_common_failure,
)
from corn.distributed.launching import Placement, describe_notes, parse_address
from corn.distributed.progress_table import ProgressTable, draw_table
from corn.distributed.recording import Progress
from corn.errors import CornError, InvalidArgumentError


def test_the_table_shows_every_agent() -> None:
    progress = {
        0: Progress(40, 0.25, 3.21, 2, 1_500_000, 0.77, 0.5),
        1: Progress(41, math.nan, 3.3, 2, 0, 0.78, 1),
    }
    ends = {1: "lost", 2: "done"}
    public, private = ("40/500", "0.25", "3.21", "1.5", "lost", "done"), ("0.77", "50%", "clipped")
    for show_private in (False, True):
        written = io.StringIO()
        table = draw_table(progress, ends, 500, show_private=show_private)
        Console(width=100, file=written).print(table)
        text = written.getvalue()
        assert "nan" not in text
        assert all(shown in text for shown in public)
        assert all((shown in text) == show_private for shown in private)
    with ProgressTable(10) as live:  # no terminal here: it stays silent
        live.update(progress, {})


def test_the_reason_comes_from_the_agent_that_has_one() -> None:
    because = "agent 0: does not start, because agent 2 refused: agent 2: no key"
    outcome = Outcome({0: Ending(failure=because), 2: Ending(failure="agent 2: no key")}, 0, False)
    with pytest.raises(CornError, match=r"^agent 2: no key$"):
        raise_common_failure(outcome)
    raise_common_failure(Outcome({0: Ending({"notes": []}), 1: Ending(failure="x")}, 0, False))


def test_equal_notes_are_said_once() -> None:
    both = {"notes": ["went on without agent 2"]}
    endings = {0: Ending(both), 1: Ending(both), 2: Ending(failure="agent 2: ended by SIGKILL")}
    assert describe_notes(Outcome(endings, 0, False), 3) == [
        "only 2 of 3 agents finished: agents 0, 1",
        "agent 2: ended by SIGKILL",
        "agents 0, 1: went on without agent 2",
    ]


def test_who_is_lost_is_named_with_the_step_at_which_that_was_first_noticed() -> None:
    endings = {
        0: Ending({"notes": [], "lost": {"1": 40, "3": 35}}),
        1: Ending(failure="agent 1: ended by SIGKILL"),
        2: Ending({"notes": [], "lost": {"1": 39, "3": 36}}),
    }
    outcome = Outcome(endings, 0, False)
    assert outcome.lost == {
        1: "agent 1: ended by SIGKILL, missed by the others from step 39 on",
        3: "agent 3: lost on another host, missed by the others from step 35 on",
    }
    assert describe_notes(outcome, 4) == [
        "only 2 of 3 agents on this host finished: agents 0, 2",
        *outcome.lost.values(),
    ]


def test_nothing_is_said_of_losses_where_all_finish() -> None:
    outcome = Outcome({agent: Ending({"notes": [], "lost": {}}) for agent in range(2)}, 0, False)
    assert describe_notes(outcome, 2) == []
    assert outcome.lost == {}


def test_what_a_lost_agent_had_noted_is_kept() -> None:
    lost = Ending(failure="agent 2: ended by SIGKILL", notes=("saw it coming",))
    notes = describe_notes(Outcome({0: Ending({"notes": []}), 2: lost}, 0, False), 3)
    assert notes[1:] == ["agent 2: ended by SIGKILL", "agent 2: saw it coming"]


def test_others_do_not_read_a_failure_that_may_tell_of_data() -> None:
    secret = "agent 1: targets must be classes, found 37.25"
    failed = Ending(failure=secret, is_private=True)
    outcome = Outcome({0: Ending({"notes": [], "lost": {"1": 8}}), 1: failed}, 0, False)
    told = "agent 1: failed, and told its owner why, missed by the others from step 8 on"
    assert outcome.lost == {1: told}
    assert describe_notes(outcome, 2) == ["only 1 of 2 agents finished: agent 0", told]
    with pytest.raises(CornError, match="found 37"):  # on the owner's own console
        raise_common_failure(Outcome({1: failed}, 0, False))


def test_how_a_process_ended_is_explained() -> None:
    assert describe_exit(-signal.SIGKILL) == "ended by SIGKILL"
    assert "a message is far larger than agreed on" in describe_exit(-signal.SIGABRT)
    assert describe_exit(3) == "ended without a word (exit code 3)"


def test_a_stopped_process_is_recognised() -> None:
    with subprocess.Popen(["sleep", "30"]) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while not is_stopped(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid)


def test_agents_are_dealt_out_to_hosts() -> None:
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


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:", "10.0.0.1:x", "10.0.0.1:70000"])
def test_an_address_needs_a_port(text: str) -> None:
    with pytest.raises(CornError, match="an address must be HOST:PORT"):
        parse_address(text)
