"""Imports point one way, down the list of packages; imports inside functions count too."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import corn

ROOT = Path(corn.__file__).parent
PACKAGES = [
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
    "transport",
    "plan",
    "learn",
    "distributed",
    "engines",
    "flower",
    "nvflare",
    "audit",
    "report",
    "cli",
]
TORCH_FREE = ["topology", "privacy", "covariance", "noise", "transport"]


def package_of(module: str) -> str:
    """Return ``topology`` for ``corn.topology.mixing``, and nothing for ``corn`` itself."""
    return [*module.split("."), ""][1]


def imported_modules(source: str) -> set[str]:
    """Return every ``corn`` module that a source file imports, at its top or anywhere inside."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where an import points"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {module for module in found if module.split(".")[0] == "corn"}


def violations(source: str, package: str) -> list[str]:
    """Return the imports from packages that come later in the list than ``package``."""
    later = PACKAGES[PACKAGES.index(package) + 1 :]
    return sorted(module for module in imported_modules(source) if package_of(module) in later)


# ``corn`` itself and its entry point belong to no package and may import all.
SOURCES = sorted(
    p for p in ROOT.rglob("*.py") if p.name not in ("__main__.py",) and p.parent != ROOT
)
SOURCES += sorted(p for p in ROOT.glob("*.py") if not p.name.startswith("__"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_to_earlier_packages(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert package in PACKAGES, f"{package} is not in the list of packages"
    assert violations(path.read_text(encoding="utf-8"), package) == []


def test_a_deferred_import_of_a_later_package_is_found() -> None:
    source = "def f():\n    from corn.privacy import budget\n    import corn.cli\n"
    assert violations(source, "topology") == ["corn.cli", "corn.privacy.budget"]
    assert violations(source, "plan") == ["corn.cli"]
    assert violations("from corn import topology", "privacy") == []


def test_the_package_does_not_need_the_reproduction() -> None:
    """The wheel does not contain it."""
    sources = [path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")]
    assert not [
        text for text in sources if re.search(r"^\s*(from|import) reproduction", text, re.M)
    ]


def test_packages_of_mathematics_and_the_help_need_no_torch() -> None:
    imports = ", ".join(f"corn.{package}" for package in [*TORCH_FREE, "plan", "cli"])
    code = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
