"""``corn data``: get and list data sets."""

from __future__ import annotations

from typing import Literal

from corn.cli.options import JSON, argument
from corn.cli.output import print_json, print_note, print_table
from corn.learn.datasets import DOWNLOADABLE, EMBEDDED, cache_directory, fetch_dataset, is_cached


def data(
    action: Literal["get", "list"] = argument("Get a data set into the cache, or list all."),
    name: str | None = argument(f"Data set to get, {' or '.join(DOWNLOADABLE)}.", default=None),
    source: str | None = argument(
        "Folder with its files. (Default: they are downloaded.)", default=None
    ),
    json: bool = JSON,
) -> None:
    """Get and list data sets, in $CORN_DATA or the user's cache."""
    if action == "get":
        # Without a name the error lists all.
        where = fetch_dataset(name or "", source=source)
        if json:
            print_json({"name": name, "directory": where})
        print_note(f"{name} is in {where}; its checksums are correct")
        return
    known = {name: is_cached(own) for name, own in DOWNLOADABLE.items()}
    known |= dict.fromkeys(EMBEDDED, True)
    if json:
        listed = [{"name": name, "present": is_present} for name, is_present in known.items()]
        print_json({"directory": cache_directory(), "datasets": listed})
    else:
        rows = [[n, "yes" if own else f"no: corn data get {n}"] for n, own in known.items()]
        print_table(f"Data sets in {cache_directory()}", ["name", "present"], rows)
