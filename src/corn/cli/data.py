"""``corn data``: get and list data sets."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from corn.cli.options import JsonOption
from corn.cli.output import print_json, print_note, print_table
from corn.learn.datasets import (
    DOWNLOADABLE,
    EMBEDDED,
    cache_directory,
    fetch_dataset,
    is_cached,
)

EXAMPLE = "corn data list"


def data(
    action: Annotated[
        Literal["get", "list"], typer.Argument(help="Get a data set into the cache, or list all.")
    ],
    name: Annotated[
        str | None, typer.Argument(help=f"Data set to get, {' or '.join(DOWNLOADABLE)}.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Argument(
            help="Folder with its files, or the address of a server. (Default: its usual servers.)"
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Get and list data sets, in $CORN_DATA or the user's cache."""
    if action == "list":
        _list(json)
        return
    if name is None:
        raise typer.BadParameter(f"must be one of {', '.join(DOWNLOADABLE)}", param_hint="NAME")
    where = fetch_dataset(name, source=source)
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
