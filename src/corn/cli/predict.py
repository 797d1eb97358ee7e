"""``corn predict``: apply a trained model to a table."""

from __future__ import annotations

import csv
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from corn import learn
from corn.cli.export import ModelArgument
from corn.cli.learning import describe_quality
from corn.cli.options import JsonOption
from corn.cli.output import print_json, print_note
from corn.files import writing_whole

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
    columns, rows = _list_rows(found.values, model.classes)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Predictions of private rows are as private as the rows.
        with (
            writing_whole(out, is_private=True) as partial,
            partial.open("w", newline="", encoding="utf-8") as stream,
        ):
            _write(stream, columns, rows)
        print_note(f"wrote {out}")
    if json:
        print_json(
            {
                "model": model.description,
                "promise": asdict(model.promise),
                "classes": model.classes,
                "ignored_columns": found.ignored,
                "rows": [dict(zip(columns, row, strict=True)) for row in rows],
                "scores": found.scores,
            }
        )
    elif out is None:
        _write(sys.stdout, columns, rows)
    if found.ignored:
        print_note(f"columns that the model does not use: {', '.join(found.ignored[:20])}")
    if found.quality is not None:
        lines = [("accuracy", f"{found.quality.accuracy:.4f}")]
        lines += describe_quality(found.quality, model.classes, part="")
        print_note(f"private scores: loss {found.scores['loss']:.4f}; {_join(lines)}")
    elif found.scores:
        lines = [(name, f"{value:.4g}") for name, value in found.scores.items()]
        print_note(f"private scores: {_join(lines)}")
    print_note(f"promise of the model: {model.promise.describe()}")


def _join(lines: list[tuple[str, str]]) -> str:
    return "; ".join(f"{name} {value}" for name, value in lines)


def _list_rows(
    values: FloatArray, classes: tuple[str, ...] | None
) -> tuple[list[str], list[list[Any]]]:
    """Return the columns of the output and its rows, in the order of the table."""
    if classes is None:
        return ["prediction"], [[float(value)] for value in values]
    columns = ["class", *(f"probability of {name}" for name in classes)]
    chosen = values.argmax(axis=1)
    return columns, [[classes[k], *map(float, row)] for k, row in zip(chosen, values, strict=True)]


def _write(stream: TextIO, columns: list[str], rows: list[list[Any]]) -> None:
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in row])
