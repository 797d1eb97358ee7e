"""Documentation names files and modules that exist; the architecture page has every package."""

import re
from pathlib import Path

import pytest

import corn
from tests.test_import_order import PACKAGES as ORDER

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "corn"
PACKAGES = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = [ARCHITECTURE, ROOT / "CONTRIBUTING.md"]
MARKDOWN = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "benchmarks" / "README.md",
]


def named_paths(text: str) -> set[str]:
    """Return the paths of Python files in backticks, such as ``learn/step.py``."""
    return set(re.findall(r"`([\w/]+/\w+\.py)`", text))


def named_modules(text: str) -> set[str]:
    """Return the dotted modules in a text, such as ``corn.noise.normals``."""
    return set(re.findall(r"\bcorn(?:\.[a-z]\w*)+\b", text))


def exists(path: str) -> bool:
    """Return whether a path exists in the repository, in ``src`` or in ``src/corn``."""
    return any((base / path).is_file() for base in (ROOT, SOURCE.parent, SOURCE))


def is_known(dotted: str) -> bool:
    """Return whether a dotted name is a public name of ``corn``, a module or a package."""
    path = SOURCE.parent / dotted.replace(".", "/")
    is_module = path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
    return is_module or dotted.removeprefix("corn.") in corn.__all__


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_file_exists(page: Path) -> None:
    paths = named_paths(page.read_text(encoding="utf-8"))
    assert paths, f"{page.name} names no files"
    assert sorted(path for path in paths if not exists(path)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_module_exists(page: Path) -> None:
    modules = named_modules(page.read_text(encoding="utf-8"))
    assert sorted(module for module in modules if not is_known(module)) == []


def test_the_diagram_has_every_package_in_the_order_of_imports() -> None:
    diagram = ARCHITECTURE.read_text(encoding="utf-8").split("```")[1]
    drawn = [name for name in re.findall(r"^\w+", diagram, re.MULTILINE) if name in PACKAGES]
    assert drawn == [name for name in ORDER if name in PACKAGES]
    assert sorted(drawn) == PACKAGES


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    targets = [link for link in links if "://" not in link]
    assert [target for target in targets if not (page.parent / target).exists()] == []
