"""Every example runs without warnings and prints its result."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs_and_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 120
    process = subprocess.run(
        [sys.executable, "-W", "error", path], check=False, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip()
