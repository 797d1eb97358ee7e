"""``corn predict``: apply a trained model to a table."""

from __future__ import annotations

import csv
import io
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corn import learn
from corn.cli.export import ModelArgument
from corn.cli.learning import describe_quality
from corn.cli.options import JsonOption
from corn.cli.output import print_json, print_note
from corn.files import write_file

if TYPE_CHECKING:
    from corn.checks import FloatArray

EXAMPLE = "corn predict out/run patients.csv --out predicted.csv"


def predict(
    path: ModelArgument,
    data: Annotated[
        Path,
        typer.Argument(help="Table with the columns of the model: .csv, .tsv or .parquet."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="CSV file to write. (Default: standard output.)")
    ] = None,
    json: JsonOption = False,
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
    rows = _list_rows(found.values, model.classes)
    table = io.StringIO()
    writer = csv.DictWriter(table, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    if out is not None:
        # Predictions of private rows are as private as the rows.
        write_file(out, table.getvalue(), is_private=True)
        print_note(f"wrote {out}")
    if json:
        print_json(
            {
                "model": model.description,
                "promise": asdict(model.promise),
                "classes": model.classes,
                "ignored_columns": found.ignored,
                "rows": rows,
                "scores": found.scores,
            }
        )
    elif out is None:
        sys.stdout.write(table.getvalue())
    if found.ignored:
        print_note(f"columns that the model does not use: {', '.join(found.ignored[:20])}")
    lines = [
        (name, f"{value:.4g}") for name, value in found.scores.items() if found.quality is None
    ]
    if found.quality is not None:
        lines = [("loss", f"{found.scores['loss']:.4f}")]
        lines += [("accuracy", f"{found.quality.accuracy:.4f}")]
        lines += describe_quality(found.quality, model.classes, part="")
    if lines:
        print_note(f"private scores: {'; '.join(f'{name} {value}' for name, value in lines)}")
    print_note(f"promise of the model: {model.promise.describe()}")


def _list_rows(values: FloatArray, classes: tuple[str, ...] | None) -> list[dict[str, Any]]:
    """Return the output for each row, in the order of the table."""
    if classes is None:
        return [{"prediction": float(value)} for value in values]
    names = [f"probability of {name}" for name in classes]
    return [
        {"class": classes[row.argmax()], **dict(zip(names, row.tolist(), strict=True))}
        for row in values
    ]
