"""Run ``corn`` commands in this process, as the installed entry point does."""

import sys
from dataclasses import dataclass
from typing import Any

import pytest

from corn.cli import run_command


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
