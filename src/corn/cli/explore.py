"""``corn explore``: write one page that shows what noise costs, and open it."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from corn.cli.options import JsonOption
from corn.cli.output import print_json, print_note
from corn.errors import FileFormatError
from corn.files import write_file
from corn.topology import load_network

EXAMPLE = "corn explore --graph ring:12 --out explorer.html --no-open"


def explore(
    graph: Annotated[
        str | None,
        typer.Option(
            help="Graph to show first: a spec or a file, of 3 to 1000 agents. Others can be chosen "
            "on the page."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="File for the page.")] = Path("corn-explorer.html"),
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Whether to open the page in a browser.")
    ] = True,
    json: JsonOption = False,
) -> None:
    """Write an interactive page: choose agents, insiders and ε, and see what noise costs.

    The page is one file. It needs no server and no network, and it sends nothing anywhere.
    """
    # Imported here, because Matplotlib's package takes a second that other commands save.
    from corn.report.explorer import write_page

    if out.suffix not in (".html", ".htm"):
        raise FileFormatError(f"{out}: the page's name must end in .html")
    write_file(out, write_page(None if graph is None else load_network(graph, mixing="sum")))
    # Without a display, Python would start a browser in this very terminal.
    has_display = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    can_open = open_page and (sys.platform != "linux" or has_display)
    opened = can_open and webbrowser.open(out.resolve().as_uri())
    if json:
        print_json({"page": out, "graph": graph, "opened": opened})
    print_note(f"wrote {out}{'' if opened else '; open it in a browser'}")
