"""Imports point one way, down the list of rooms; imports inside functions count too."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import corn

ROOT = Path(corn.__file__).parent
ROOMS = [
    "version",
    "errors",
    "checks",
    "arrays",
    "files",
    "parsing",
    "threads",
    "topology",
    "privacy",
    "covariance",
    "noise",
    "plan",
    "learn",
    "distributed",
    "audit",
    "experiments",
    "report",
    "cli",
]
TORCH_FREE = ["topology", "privacy", "covariance", "noise"]


def room_of(module: str) -> str:
    """``corn.topology.mixing`` is in ``topology``; ``corn`` itself has no room."""
    return [*module.split("."), ""][1]


def imported_modules(source: str) -> set[str]:
    """Every ``corn`` module that a source file imports, at its top or anywhere inside."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where an import points"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {module for module in found if module.split(".")[0] == "corn"}


def violations(source: str, room: str) -> list[str]:
    """The imports that point up the list of rooms from ``room``."""
    below = ROOMS[ROOMS.index(room) + 1 :]
    return sorted(module for module in imported_modules(source) if room_of(module) in below)


# The front door and the entry point belong to no room and may import all.
SOURCES = sorted(
    p for p in ROOT.rglob("*.py") if p.name not in ("__main__.py",) and p.parent != ROOT
)
SOURCES += sorted(p for p in ROOT.glob("*.py") if not p.name.startswith("__"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert room in ROOMS, f"{room} has no place in the order of rooms"
    assert violations(path.read_text(encoding="utf-8"), room) == []


def test_a_deferred_import_upwards_is_found() -> None:
    source = "def f():\n    from corn.privacy import budget\n    import corn.cli\n"
    assert violations(source, "topology") == ["corn.cli", "corn.privacy.budget"]
    assert violations(source, "plan") == ["corn.cli"]
    assert violations("from corn import topology", "privacy") == []


def test_mathematics_imports_without_torch() -> None:
    imports = ", ".join(f"corn.{room}" for room in TORCH_FREE)
    code = f"import sys, corn, {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
