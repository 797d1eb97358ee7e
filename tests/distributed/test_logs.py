"""Logs are lines of text, private lines are marked, and a log cannot end a run."""

import logging
from pathlib import Path

import pytest

from corn.distributed.logs import log_event, writing_log


def test_lines_have_time_level_and_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with writing_log(folder=tmp_path):
        log_event(3, "note", "agent 2 is\ngone \x1b[2J", level=logging.WARNING)
        log_event(3, "note", "the loss is 7", is_private=True)
        log_event(None, "checkpoint", "step 100")
    first, second, third = (tmp_path / "log").read_text().splitlines()
    assert capsys.readouterr().err.splitlines() == [first, second, third]
    time, _, rest = first.partition(" ")
    assert (time[10], time[-1], len(time)) == ("T", "Z", 24)
    assert rest == "WARNING agent 3: agent 2 is gone \\x1b[2J"
    assert second.endswith("INFO agent 3: private, do not publish: the loss is 7")
    assert third.endswith("INFO launch: step 100")
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_moved_log_is_made_anew_and_a_missing_folder_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "later"
    with writing_log(folder=folder, to_stderr=False):
        log_event(0, "note", "before")
    folder.mkdir()
    with writing_log(folder=folder, to_stderr=False):
        log_event(0, "note", "first")
        (folder / "log").rename(folder / "log.1")
        log_event(0, "note", "second")
    assert (folder / "log").stat().st_mode & 0o777 == 0o600
    # A log that cannot be opened costs the lines, and nothing else; none is printed elsewhere.
    (tmp_path / "other" / "log").mkdir(parents=True)
    with writing_log(folder=tmp_path / "other", to_stderr=False):
        log_event(0, "note", "private", is_private=True)
    assert (folder / "log.1").read_text().endswith("first\n")
    assert (folder / "log").read_text().endswith("second\n")
    assert capsys.readouterr().err == ""


def test_nothing_is_printed_where_no_log_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    log_event(0, "note", "unseen", level=logging.ERROR)
    assert capsys.readouterr().err == ""
