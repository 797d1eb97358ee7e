"""Commands on a trained model: ``corn export``, ``corn predict`` and ``corn report``."""

from __future__ import annotations

import csv
import hashlib
import io
import json as json_module
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from corn import learn
from corn.cli.options import JSON, argument, option
from corn.cli.output import print_json, print_line, print_note, progress, write_fact
from corn.errors import FileFormatError
from corn.files import write_file
from corn.noise.ledger import ReleaseHistory, find_agents, read_history

if TYPE_CHECKING:
    from corn.report.privacy_page import Published

MODEL = argument(
    "Folder of a run of corn train, launch or agent, or a file model.pt of it.", metavar="MODEL"
)
_USUAL_DELTA = 1e-5


def export(
    path: Path = MODEL,
    to: Literal["torch", "onnx", "json"] = option(
        "Format: torch, a file for torch.load; onnx (extra onnx), with the description as "
        "metadata; json, with weights as lists.",
        default="torch",
    ),
    out: Path | None = option("File to write. (Default: exported.pt, .onnx or .json.)"),
    json: bool = JSON,
) -> None:
    """Write a trained model for torch, ONNX or any reader of JSON.

    Weights have names and shapes. Preprocessing, classes and the promise are in the file.
    """
    # Imported here: it needs torch, which takes seconds.
    from corn.learn.trained import find_model

    model = learn.load_model(path)
    file = out or Path("exported").with_suffix({"torch": ".pt"}.get(to, f".{to}"))
    if file.exists() and file.samefile(find_model(path)):
        raise FileFormatError(f"{file}: is the model to export: give another name with --out")
    name = str(file)
    if to == "torch":
        model.save(file)
        made = "YOUR_MODULE" if model.layers is None else " ".join(repr(model.to_module()).split())
        use = f"model.load_state_dict(torch.load({name!r}, weights_only=True)['state_dict'])"
        use = f"{use}  # {made}"
    elif to == "onnx":
        write_file(file, model.to_onnx())
        use = f"onnxruntime.InferenceSession({name!r}).run(None, {{'inputs': inputs}})"
    else:
        text = json_module.dumps(model.to_json(), indent=1, ensure_ascii=False) + "\n"
        write_file(file, text)
        use = f"json.load(open({name!r}))['weights']"
    if json:
        print_json({"file": file, "format": to, "use": use, **model.describe()})
    else:
        print_line(use)
    print_note(f"wrote {file}: {model.description}; {model.promise.describe()}")


def predict(
    path: Path = MODEL,
    data: Path = argument("Table with the columns of the model: .csv, .tsv or .parquet."),
    out: Path | None = option("CSV file to write. (Default: standard output.)"),
    json: bool = JSON,
) -> None:
    """Predict the class of each row of a table, and its probabilities.

    Columns are encoded by the public preprocessing in the model. If the table has the column of the
    targets, scores are computed as well. They follow from the rows without noise, so that they are
    for the owner of the rows.
    """
    # Imported here: it needs torch, which takes seconds.
    from corn.learn.trained import predict_table

    model = learn.load_model(path)
    found = predict_table(model, data)
    classes = model.classes
    columns = ["prediction"]
    rows = [[float(value)] for value in found.values] if classes is None else []
    if classes is not None:
        columns = ["class", *(f"probability of {name}" for name in classes)]
        rows = [[classes[row.argmax()], *row.tolist()] for row in found.values]
    if json:
        print_json(
            {
                "model": model.description,
                "promise": asdict(model.promise),
                "classes": classes,
                "ignored_columns": found.ignored,
                "rows": [dict(zip(columns, row, strict=True)) for row in rows],
                "scores": found.scores,
            }
        )
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in row])
    if out is not None:
        # Predictions of private rows are as private as the rows.
        write_file(out, table.getvalue(), is_private=True)
        print_note(f"wrote {out}")
    elif not json:
        sys.stdout.write(table.getvalue())
    if found.ignored:
        print_note(f"columns that the model does not use: {', '.join(found.ignored[:20])}")
    if found.scores:
        print_note(f"private scores: {write_fact('scores', found.scores)}")
    print_note(f"promise of the model: {model.promise.describe()}")


def report(
    path: Path = MODEL,
    keys: Path | None = option(
        "Folder of your keys, whose ledgers count all releases so far. (Default: the page has no "
        "total.)"
    ),
    out: Path = option("File to write: .html, or .pdf (extra pdf).", default=Path("report.html")),
    json: bool = JSON,
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
    histories = [] if keys is None else [read_history([keys], own) for own in find_agents(keys)]
    if keys is not None:
        _require_ledger_of(model.promise, histories, keys)
    page = describe_privacy(
        model.promise,
        model=model.description,
        model_digest=_digest(file),
        published=_list_published(path / "shared") if path.is_dir() else (),
        totals=[(own, own.compose(delta)) for own in progress(histories, "adding up releases")],
        keys=keys,
        id_column=(model.preprocessing or {}).get("id"),
    )
    write_file(out, write_html(page) if out.suffix == ".html" else write_pdf(page))
    if json:
        print_json({"file": out, "promise": asdict(model.promise), **asdict(page)})
    print_note(f"wrote {out}")
    if keys is not None:
        print_note("the total on the page is this site's own: decide who may read it")


def _require_ledger_of(
    promise: learn.ModelPromise, histories: Sequence[ReleaseHistory], keys: Path
) -> None:
    """Raise if no ledger counts the releases that made a model: the total would be too small."""
    if not promise.plan or promise.simulation or any(own.problems for own in histories):
        return
    if not any(record.plan == promise.plan for own in histories for record in own.records):
        raise FileFormatError(
            f"{keys}: no ledger counts the releases of plan {promise.plan[:16]}, which made this "
            "model: give the folder of keys of its run"
        )


def _list_published(folder: Path) -> list[Published]:
    """Return the files of a folder, and those of its agents together."""
    from corn.report.privacy_page import Published

    found = sorted(own for own in folder.glob("*") if own.is_file())
    listed = [Published(own.name, own.stat().st_size, _digest(own)) for own in found]
    files = sorted(own for own in folder.glob("agent-*/**/*") if own.is_file())
    if files:
        digest = hashlib.sha256("".join(map(_digest, files)).encode()).hexdigest()
        name = f"agent-*/ ({len(files)} files: models and scores)"
        listed.append(Published(name, sum(own.stat().st_size for own in files), digest))
    return listed


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
