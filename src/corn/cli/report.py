"""``corn report``: one page on the privacy of a model, for a data-protection officer."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corn import learn
from corn.cli.export import ModelArgument
from corn.cli.options import JsonOption
from corn.cli.output import print_json, print_note, progress
from corn.errors import FileFormatError
from corn.files import write_file
from corn.noise.ledger import ReleaseHistory, find_agents, read_history
from corn.privacy.composition import TotalLoss

if TYPE_CHECKING:
    from corn.report.privacy_page import Published

EXAMPLE = "corn report out/run --keys plan.keys --out report.html"
_USUAL_DELTA = 1e-5


def report(
    path: ModelArgument,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="Folder of your keys, whose ledgers count all releases so far. (Default: the page "
            "has no total.)"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="File to write: .html, or .pdf (extra pdf).")] = Path(
        "report.html"
    ),
    json: JsonOption = False,
) -> None:
    """Write one page on a model's privacy for a data-protection officer.

    It says what ε means, who is protected, against whom, what is assumed, what all plans so far
    cost together, what was published, and how to verify it.
    """
    # Imported here, because Matplotlib's package takes a second that other commands save.
    from corn.learn.trained import find_model
    from corn.report.privacy_page import describe_privacy, write_html, write_pdf

    if out.suffix not in (".html", ".pdf"):
        raise FileFormatError(f"{out}: the page's name must end in .html or .pdf")
    file = find_model(path)
    model = learn.load_model(file)
    delta = model.promise.delta or _USUAL_DELTA
    page = describe_privacy(
        model.promise,
        model=model.description,
        model_digest=_digest(file),
        published=_list_published(path / "shared") if path.is_dir() else (),
        totals=[] if keys is None else _add_up(keys, delta),
        keys=keys,
        id_column=(model.preprocessing or {}).get("id"),
    )
    write_file(out, write_html(page) if out.suffix == ".html" else write_pdf(page))
    if json:
        print_json({"file": out, "promise": asdict(model.promise), **asdict(page)})
    print_note(f"wrote {out}")
    if keys is not None:
        print_note("the total on the page is this site's own: decide who may read it")


def _add_up(keys: Path, delta: float) -> list[tuple[ReleaseHistory, TotalLoss]]:
    histories = [read_history([keys], agent) for agent in find_agents(keys)]
    return [(own, own.compose(delta)) for own in progress(histories, "adding up releases")]


def _list_published(folder: Path) -> list[Published]:
    """Return the files of a folder, and those of its agents together."""
    from corn.report.privacy_page import Published

    found = sorted(own for own in folder.glob("*") if own.is_file())
    listed = [Published(own.name, own.stat().st_size, _digest(own)) for own in found]
    files = sorted(own for own in folder.glob("agent-*/**/*") if own.is_file())
    if files:
        digests = "".join(_digest(own) for own in files)
        name = f"agent-*/ ({len(files)} files: models and scores)"
        size = sum(own.stat().st_size for own in files)
        listed.append(Published(name, size, hashlib.sha256(digests.encode()).hexdigest()))
    return listed


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
