"""Predictions for the rows of a table, encoded by a model's public preprocessing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from corn.checks import FloatArray
from corn.errors import FileFormatError
from corn.learn.file_data import Schema, read_columns, read_table
from corn.learn.metrics import Quality
from corn.learn.trained import TrainedModel


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions in the order of the rows.

    Attributes:
        values: probabilities, shape (rows, classes), or numbers in the unit of the target.
        classes: the names of the classes; None for numbers.
        ignored: columns of the table that the model does not use.
        quality: scores, if the table has targets; private, as its rows are.
        scores: the same as plain data, with the loss; of numbers, the mean squared error.
    """

    values: FloatArray = field(repr=False)
    classes: tuple[str, ...] | None
    ignored: tuple[str, ...] = ()
    quality: Quality | None = None
    scores: Mapping[str, Any] = field(default_factory=dict)


def predict_table(model: TrainedModel, path: Path) -> Predictions:
    """Predict for every row of a ``.csv`` or ``.parquet`` file.

    Raises:
        FileFormatError: columns are missing or have other values than the model was trained on; the
            message lists all differences.
    """
    if model.preprocessing is None:
        raise FileFormatError(
            f"{path}: the model must have been trained on files of your own (--data), found one "
            f"without preprocessing, {model.description}: export it, and encode the inputs yourself"
        )
    schema = Schema.from_json(model.preprocessing)
    if not schema.features:
        raise FileFormatError(
            f"{path}: predictions need a model of tables with named columns, found "
            f"{model.description}: export it, and encode the inputs yourself"
        )
    if not path.name.lower().removesuffix(".gz").endswith((".csv", ".tsv", ".txt", ".parquet")):
        raise FileFormatError(f"{path}: data must be a .csv, .tsv or .parquet file")
    if not path.exists():
        raise FileFormatError(f"{path}: no such file")
    columns = read_columns(path)
    missing = [name for name in schema.file_columns if name not in columns]
    extra = tuple(name for name in columns if name not in {*schema.file_columns, schema.target})
    if missing:
        unused = f"; columns that the model does not use: {', '.join(extra)}" if extra else ""
        raise FileFormatError(
            f"{path}: must have the columns of the model, and lacks {', '.join(missing)}{unused}"
        )
    table = read_table(
        path, schema.target, schema.features, columns=schema.columns, needs_targets=False
    )
    if schema.target not in columns:
        values = _decode(schema, model.predict(schema.encode_inputs(table)))
        return Predictions(values, model.classes, extra)
    inputs, targets = schema.encode(table)
    values = _decode(schema, model.predict(inputs))
    if model.classes is None:
        error = float(np.square(values - schema.read_targets(table)).mean())
        return Predictions(values, None, extra, scores={"mean squared error": error})
    quality = model.measure(inputs, targets)
    if quality is None:
        return Predictions(values, model.classes, extra)
    picked = values[np.arange(len(values)), targets.numpy()]
    loss = -float(np.log(np.maximum(picked, np.finfo(np.float64).tiny)).mean())
    return Predictions(values, model.classes, extra, quality, {"loss": loss, **asdict(quality)})


def _decode(schema: Schema, values: FloatArray) -> FloatArray:
    """Return probabilities as they are, and numbers in the unit of the target."""
    return values if schema.classes is not None else schema.decode_targets(values.reshape(-1))
