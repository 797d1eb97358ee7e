"""``corn data``: download, import and list data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from corn.cli.options import JsonOption
from corn.cli.output import print_json, print_note, print_table
from corn.learn.datasets import (
    DOWNLOADABLE,
    EMBEDDED,
    cache_directory,
    fetch_dataset,
    import_dataset,
    is_cached,
)

EXAMPLE = "corn data list"


def data(
    action: Annotated[
        Literal["get", "import", "list"],
        typer.Argument(help="Download a data set, import its files from a directory, or list all."),
    ],
    name: Annotated[
        str | None,
        typer.Argument(help=f"Data set, {' or '.join(DOWNLOADABLE)} (for get and import)."),
    ] = None,
    path: Annotated[
        Path | None, typer.Argument(help="Directory with the files (for import).")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Download, import and list data sets, in $CORN_DATA or the user's cache."""
    if action == "list":
        _list(json)
        return
    if name is None:
        raise typer.BadParameter(f"must be one of {', '.join(DOWNLOADABLE)}", param_hint="NAME")
    if action == "get":
        where = fetch_dataset(name)
    elif path is None:
        raise typer.BadParameter("must be the directory with the files", param_hint="PATH")
    else:
        # These files must have the same checksums as a download.
        where = import_dataset(name, path)
    if json:
        print_json({"name": name, "directory": where})
    else:
        print_note(f"{name} is in {where}; its checksums are correct")


def _list(json: bool) -> None:
    known: list[dict[str, object]] = [
        {
            "name": name,
            "present": is_cached(dataset),
            "description": dataset.description,
        }
        for name, dataset in DOWNLOADABLE.items()
    ]
    known += [
        {"name": name, "present": True, "description": description}
        for name, description in EMBEDDED.items()
    ]
    if json:
        print_json({"directory": cache_directory(), "datasets": known})
        return
    rows = [
        [
            str(entry["name"]),
            "yes" if entry["present"] else f"no: corn data get {entry['name']}",
            str(entry["description"]),
        ]
        for entry in known
    ]
    print_table(f"Data sets in {cache_directory()}", ["name", "present", "content"], rows)
