"""Every example runs without warnings and prints its result."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs_and_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 120
    strict = ["-W", "error"]
    if path.name == "flower_app.py":
        if find_spec("flwr") is None or find_spec("ray") is None:
            pytest.skip("needs the extra flower and its simulation engine: flwr[simulation]")
        strict = []  # Ray warns of its own future
    process = subprocess.run(
        [sys.executable, *strict, path], check=False, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip()
