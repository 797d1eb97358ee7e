"""``corn explore``: write one page that shows what noise costs, and open it."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

from corn.cli.options import JSON, option
from corn.cli.output import print_json, print_note
from corn.errors import FileFormatError
from corn.files import write_file
from corn.topology import load_network


def explore(
    graph: str | None = option(
        "Graph to show first: a spec or a file, of 3 to 1000 agents. Others can be chosen on the "
        "page."
    ),
    out: Path = option("File for the page.", default=Path("corn-explorer.html")),
    open_page: bool = option(
        "Whether to open the page in a browser.", default=True, flag="--open/--no-open"
    ),
    json: bool = JSON,
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
