"""The documentation has every command, every option and every page; ``make docs`` builds it."""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from corn.cli import COMMANDS, app

DOCS = Path(__file__).parent.parent / "docs"
MORE_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")


def list_pages() -> list[Path]:
    """Return the pages of the documentation, without those that a build makes."""
    built = {"_build", "generated", "out"}
    return [page for page in DOCS.rglob("*.md") if not built & set(page.relative_to(DOCS).parts)]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """Return the script that makes pages from the source."""
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_option(generate: ModuleType) -> None:
    sections = generate.describe_commands().split("\n## corn ")[1:]
    group: Any = typer.main.get_command(app)
    assert [section.split()[0] for section in sections] == list(COMMANDS)
    for name, section in zip(COMMANDS, sections, strict=True):
        for option in group.commands[name].params:
            assert f"`{option.opts[0]}`" in section or f"`{option.name.upper()}`" in section
        assert COMMANDS[name][1] in section


def test_every_page_is_in_the_table_of_contents(generate: ModuleType) -> None:
    source = [(DOCS / "index.md").read_text(encoding="utf-8")]
    generate.adapt_links(None, "index", source)
    toctrees = re.findall(r"```\{toctree\}(.*?)```", source[0], flags=re.DOTALL)
    listed = {line for text in toctrees for line in text.splitlines()}
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in list_pages()}
    assert sorted(pages - listed - {"index"}) == []


def test_links_that_leave_the_documentation_become_pages_or_text(generate: ModuleType) -> None:
    text = (
        "[a](../CONTRIBUTING.md) [b](../examples/own_model.py) [c](theory.md#x) [d](https://x.org)"
    )
    moved = generate.move_links(text, DOCS, DOCS)
    assert moved == "[a](generated/contributing.md) b [c](theory.md#x) [d](https://x.org)"
    image = generate.move_links("![x](../docs/images/scaling.png)", DOCS.parent / "a", DOCS / "b")
    assert image == "![x](../images/scaling.png)"


def test_tutorials_run_commands_that_can_fail() -> None:
    """A command after ``!`` may fail unnoticed, while a failing ``%%bash`` cell fails the build."""
    pages = list(DOCS.rglob("*.md"))
    assert DOCS / "tutorials" / "audit.md" in pages
    for page in pages:
        assert not re.search(r"^!\w", page.read_text(encoding="utf-8"), flags=re.MULTILINE), page


def list_commands() -> list[tuple[str, list[str]]]:
    """Return the ``corn`` commands in the code of all pages, each with its page."""
    found = []
    for page in [*list_pages(), *(DOCS.parent / name for name in MORE_PAGES)]:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        blocks = re.findall(r"```.*?\n(.*?)```", text, flags=re.DOTALL)
        lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
        lines += re.findall(r"`(corn [^`\n]+)`", text)
        commands = [line for line in lines if re.match(r"corn [a-z]", line)]
        found += [(page.name, shlex.split(line, comments=True)) for line in commands]
    return found


def test_commands_on_pages_have_the_options_that_they_use() -> None:
    group: Any = typer.main.get_command(app)
    commands = list_commands()
    assert len(commands) > 100
    for page, (_, name, *arguments) in commands:
        assert name in group.commands, (page, name)
        options = {text for each in group.commands[name].params for text in each.opts}
        options |= {text for each in group.commands[name].params for text in each.secondary_opts}
        used = {text.split("=")[0] for text in arguments if re.match(r"--\w", text)}
        assert used <= options, (page, name, used - options)
