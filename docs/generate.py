"""Pages made from the source: the commands, the explorer, and files outside of ``docs``."""

import inspect
import os
import re
from pathlib import Path
from typing import Any

import typer

from corn.cli import COMMANDS, app
from corn.report.explorer import write_page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
GENERATED = DOCS / "generated"
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
# Files outside of ``docs`` that are pages of the site.
_PAGES = {
    ROOT / "README.md": DOCS / "index.md",
    ROOT / "CONTRIBUTING.md": GENERATED / "contributing.md",
    ROOT / "CHANGELOG.md": GENERATED / "changes.md",
    ROOT / "benchmarks" / "README.md": GENERATED / "benchmarks.md",
}


def generate_pages() -> None:
    """Write the reference of commands, the explorer, and the pages from outside of ``docs``."""
    GENERATED.mkdir(exist_ok=True)
    _write(GENERATED / "commands.md", describe_commands())
    _write(DOCS / "_static" / "explorer.html", write_page())
    for source, page in _PAGES.items():
        if page.parent == GENERATED:
            text = source.read_text(encoding="utf-8")
            _write(page, move_links(text, source.parent, GENERATED))


def _write(path: Path, text: str) -> None:
    # An unchanged page is not built again.
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def describe_commands() -> str:
    """Return the reference of all commands, with every option."""
    parts = [
        "# Command reference\n",
        "Every command has `--help`, and `--json` for programs. Exit codes: 0 done; 1 an expected "
        "failure, in one line; 2 an invalid command line; 130 ended by Ctrl-C or SIGTERM.\n",
    ]
    group: Any = typer.main.get_command(app)
    for name, (function, example) in COMMANDS.items():
        parts += [
            f"## corn {name}\n",
            inspect.getdoc(function) or "",
            f"\n```sh\n{example}\n```\n",
            _list_options(group.commands[name].params),
        ]
    return "\n".join(parts) + "\n"


def _list_options(parameters: list[Any]) -> str:
    """Return one table for each panel of options."""
    panels: dict[str, list[str]] = {}
    for option in parameters:
        if getattr(option, "hidden", False):
            continue
        panel = getattr(option, "rich_help_panel", None) or "Options"
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        if option.param_type_name == "argument":
            names = f"`{option.name.upper()}`"
        panels.setdefault(panel, []).append(f"| {names} | {_describe(option)} |")
    return "\n".join(
        f"| {panel} | |\n|---|---|\n" + "\n".join(rows) + "\n" for panel, rows in panels.items()
    )


def _describe(option: Any) -> str:
    """Return the help of an option with its default, as a cell of a table."""
    text = " ".join((getattr(option, "help", None) or "").split()).replace("|", "\\|")
    default = option.default
    if option.required:
        return f"{text} Required."
    if default in (None, False, (), "") or "(Default" in text:
        return text
    return f"{text} (Default: `{default}`.)"


def move_links(text: str, old: Path, new: Path) -> str:
    """Return a page that moves from one folder to another, with links to pages of the site.

    A link to any other file outside of ``docs`` becomes its text.
    """

    def replace(found: re.Match[str]) -> str:
        label, target, anchor = found[1], found[2], found[3] or ""
        if "://" in target:
            return found[0]
        path = (old / target).resolve()
        path = _PAGES.get(path, path)
        if not path.is_relative_to(DOCS) or path.is_dir():
            return label
        return f"[{label}]({os.path.relpath(path, new)}{anchor})"

    return _LINK.sub(replace, text)


def adapt_links(_: object, name: str, source: list[str]) -> None:
    """Adapt the links of a page of ``docs`` while Sphinx reads it."""
    folder = (DOCS / name).parent
    if name == "index":
        source[0] = _expand_patterns(source[0])
    # A command writes these tables, which have no title of their own.
    if name.endswith("claims"):
        source[0] = f"# Verdicts on statements: {folder.name}\n\n{source[0]}"
    if folder != GENERATED:
        source[0] = move_links(source[0], folder, folder)


def _expand_patterns(text: str) -> str:
    """Replace patterns in the table of contents by the pages that it does not name otherwise.

    Sphinx has patterns of its own, and warns of those that match nothing (yet).
    """
    lines, named = [], set(text.splitlines())
    for line in text.splitlines():
        if not re.fullmatch(r"[\w/*-]*\*[\w/*-]*", line):
            lines.append(line)
            continue
        pages = [page.relative_to(DOCS).with_suffix("") for page in sorted(DOCS.glob(f"{line}.md"))]
        found = [page.as_posix() for page in pages if page.as_posix() not in named]
        lines += found
        named |= set(found)
    return "\n".join(lines) + "\n"
