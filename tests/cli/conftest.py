"""The ``corn`` fixture runs a command."""

import warnings
from collections.abc import Iterator

import pytest

from .commands import Runner


@pytest.fixture
def corn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Runner]:
    with warnings.catch_warnings():
        yield Runner(monkeypatch, capsys)
