"""Every example runs without warnings and prints its result."""

import ast
import importlib
import runpy
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import corn

from .cli.commands import Runner

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
# The default is the figure of docs/audit.md, which takes minutes.
OPTIONS = {"reconstruct_images.py": ["--graph", "ring:6", "--steps", "20", "--images", "3"]}
CORN = [sys.executable, "-m", "corn"]
# Libraries that are in environments of their own.
NEEDED = {
    "flower_app.py": ["flwr", "ray"],
    "flower_hospitals.py": ["flwr", "ray"],
    "fine_tuning.py": ["transformers", "peft"],
}


def test_there_are_examples() -> None:
    assert EXAMPLES


def test_the_script_of_an_opacus_user_is_short_and_uses_public_names() -> None:
    path = next(path for path in EXAMPLES if path.name == "opacus_user.py")
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    tree = ast.parse(text)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [own for own in imports if getattr(own, "module", "").startswith("corn")]
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "corn"
    }
    assert used == {"make_private"} <= set(corn.__all__)


def test_the_script_of_a_researcher_needs_no_private_module() -> None:
    """Imports are from packages alone, of names that they list or document."""
    path = next(path for path in EXAMPLES if path.name == "researcher.py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    own = {node.module: node.names for node in found if (node.module or "").startswith("corn")}
    assert sorted(module or "" for module in own) == ["corn.learn", "corn.report"]
    for module, names in own.items():
        listed = dir(importlib.import_module(str(module)))
        assert all(name.name in listed and not name.name.startswith("_") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs_and_is_short(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # An attack is longer than what users start from.
    limits = {"reconstruct_images.py": 480, "researcher.py": 60}
    limit = limits.get(path.name, 130)
    assert len(path.read_text(encoding="utf-8").splitlines()) < limit
    if path.name == "demo.py":
        # As make demo runs it, with the six processes.
        command = [sys.executable, str(path), str(tmp_path)]
        process = subprocess.run(command, check=False, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        assert "Six processes without a server" in process.stdout
        assert (tmp_path / "run-1" / "accuracy.png").exists()
        return
    if path.name in NEEDED:
        if any(find_spec(name) is None for name in NEEDED[path.name]):
            pytest.skip(f"needs {', '.join(NEEDED[path.name])}")
        # In a process of its own, since these libraries warn of their own future.
        process = subprocess.run(
            [sys.executable, str(path)], check=False, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stderr
        assert process.stdout.strip()
        return
    corn = Runner(monkeypatch, capsys)
    # As Python does for a script: its directory has the modules that it imports.
    monkeypatch.syspath_prepend(path.parent)
    # Where a script writes its figure.
    monkeypatch.chdir(tmp_path)

    def run_here(command: Sequence[str], *, cwd: Path, **options: bool) -> None:
        """Run a command of an example in this process, which has imported everything already."""
        assert command[:3] == CORN
        assert options == {"check": True, "capture_output": True}
        monkeypatch.chdir(cwd)
        outcome = corn(*command[3:])
        assert outcome.exit_code == 0, outcome.stderr

    monkeypatch.setattr(subprocess, "run", run_here)
    monkeypatch.setattr(sys, "argv", [str(path), *OPTIONS.get(path.name, ())])
    with torch.random.fork_rng():
        runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
