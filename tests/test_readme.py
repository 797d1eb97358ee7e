"""The README's code and commands print what it shows, and its commands and figures exist."""

import csv
import re
import shlex
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest

import corn
from corn.cli import COMMANDS

from .cli.commands import Runner

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
PYTHON = [(code, shown) for (kind, code), (_, shown) in pairwise(BLOCKS) if kind == "python"]
SESSIONS = [text for kind, text in BLOCKS if kind == "console"]
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")
LEFT_OUT = "…"
# Processes draw secret noise, so that every run of them has another accuracy.
TOLERANCES = {"launch": 0.4}
TOLERANCE = 0.05


def test_python_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert PYTHON
    for code, shown in PYTHON:
        exec(compile(code, "README.md", "exec"), {})
        assert capsys.readouterr().out == shown


def split_session(text: str) -> list[tuple[str, list[str]]]:
    """Return each command of a session with the lines that it shows."""
    commands: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], []))
        else:
            commands[-1][1].append(line)
    return commands


def agrees(shown: str, printed: str, tolerance: float) -> bool:
    """Return whether two lines have the same words, and about the same numbers."""
    fingerprint = re.compile(r"\b[0-9a-f]{16}\b")
    lines = [fingerprint.sub("#", " ".join(line.split())) for line in (shown, printed)]
    if NUMBER.sub("0", lines[0]) != NUMBER.sub("0", lines[1]):
        return False
    numbers = zip(
        *([float(found) for found in NUMBER.findall(line)] for line in lines), strict=True
    )
    return all(a == pytest.approx(b, rel=tolerance) for a, b in numbers)


def follows(shown: list[str], printed: list[str], tolerance: float) -> bool:
    """Return whether the lines shown are those printed, but for those that were left out."""
    if not shown:
        return not printed
    if shown[0] == LEFT_OUT:
        return any(follows(shown[1:], printed[k:], tolerance) for k in range(len(printed) + 1))
    if not printed or not agrees(shown[0], printed[0], tolerance):
        return False
    return follows(shown[1:], printed[1:], tolerance)


@pytest.mark.slow
def test_commands_print_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (session,) = SESSIONS
    commands = split_session(session)
    assert [command.split()[1] for command, _ in commands] == ["plan", "train", "launch"]
    run = Runner(monkeypatch, capsys)
    monkeypatch.chdir(tmp_path)
    for command, shown in commands:
        name, *arguments = shlex.split(command)
        assert name == "corn"
        outcome = run(*arguments)
        assert outcome.exit_code == 0, outcome.stderr
        tolerance = TOLERANCES.get(arguments[0], TOLERANCE)
        assert follows(shown, outcome.stdout.splitlines(), tolerance), outcome.stdout


def test_a_stale_line_is_found() -> None:
    printed = ["a 1.00", "b", "accuracy 0.95"]
    assert follows(["a 1.01", LEFT_OUT, "accuracy 0.94"], printed, 0.05)
    assert not follows(["a 1.01", LEFT_OUT, "accuracy 0.64"], printed, 0.05)
    assert not follows(["a 1.01", "accuracy 0.94"], printed, 0.05)
    assert not follows(["a 1.01", LEFT_OUT, "loss 0.94"], printed, 0.05)


def test_commands_exist() -> None:
    named = set(re.findall(r"`corn (\w+)", README))
    assert {"plan", "train", "launch", "explore"} <= named <= set(COMMANDS)


def test_the_figure_is_that_of_its_table() -> None:
    """CorN is far above independent noise and near a trusted server, as the picture shows."""
    table = ROOT / "docs" / "results" / "one-sample" / "cnn.csv"
    accuracies: dict[tuple[str, str, str], list[float]] = {}
    with table.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            own = accuracies.setdefault((row["line"], row["epsilon"], row["step_size"]), [])
            own.append(float(row["test_accuracy"]))
    # Only the chosen step size was run with all seeds.
    found = {key[:2]: mean(own) for key, own in accuracies.items() if len(own) == 5}
    epsilons = {epsilon for name, epsilon in found if name == "corn"}
    assert len(epsilons) >= 5
    for epsilon in epsilons:
        alone, ldp, corn_, central = (
            found[name, epsilon] for name in ("alone", "ldp", "corn", "central")
        )
        assert alone + 0.05 < ldp < corn_ - 0.02
        assert abs(corn_ - central) < 0.01
        assert central < found["none", "inf"]


def test_versions_agree() -> None:
    assert f"version = {{{corn.__version__}}}" in README
    assert f"version: {corn.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
