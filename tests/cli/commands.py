"""Run ``corn`` commands in this process, as the installed entry point does."""

import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import pytest

from corn.cli import run_command


def run_quietly(*arguments: Any) -> int:
    """Run a command and return its exit code, for fixtures that several tests share."""
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
    ):
        patch.setattr(sys, "argv", ["corn", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            run_command()
    return int(caught.value.code or 0)


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    stdout: str
    stderr: str


class Runner:
    """Calls a command with arguments and keeps its output."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: Any) -> Outcome:
        self._monkeypatch.setattr(sys, "argv", ["corn", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            run_command()
        printed = self._capsys.readouterr()
        return Outcome(int(caught.value.code or 0), printed.out, printed.err)
