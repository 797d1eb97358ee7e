"""Predictions for the rows of a table, encoded by a model's public preprocessing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from corn.checks import FloatArray
from corn.errors import FileFormatError
from corn.learn.file_data import read_file
from corn.learn.metrics import Quality, measure_quality
from corn.learn.schema import read_schema
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
    schema, _ = read_schema(model.preprocessing)
    if schema is None:
        raise FileFormatError(
            f"{path}: predictions need a model of tables with named columns, found "
            f"{model.description}: export it, and encode the inputs yourself"
        )
    is_whole = schema.classes == (model.classes or ())
    if not is_whole or model.input_shape != (len(schema.features),):
        raise FileFormatError("the model is damaged: its preprocessing does not fit its weights")
    if path.is_dir():
        raise FileFormatError(f"{path}: data must be a .csv, .tsv or .parquet file")
    cells = read_file(path).cells
    used = {*(column.name for column in schema.columns), schema.target}
    ignored = tuple(name for name in cells if name not in used)
    rows = schema.read(path, cells, needs_targets=False)
    values = model.predict(torch.from_numpy(schema.scale_inputs(rows)).float())
    if not schema.classes:
        values = schema.decode_targets(values.reshape(-1))
    # Outputs of a loss of the user's own are no probabilities.
    if rows.targets is None or model.output == "own":
        return Predictions(values, model.classes, ignored)
    if model.classes is None:
        error = float(np.square(values - rows.targets).mean())
        return Predictions(values, None, ignored, scores={"mean squared error": error})
    targets = rows.targets.astype(np.int64)
    quality = measure_quality(values, targets)
    picked = values[np.arange(len(values)), targets]
    loss = -float(np.log(np.maximum(picked, np.finfo(np.float64).tiny)).mean())
    return Predictions(values, model.classes, ignored, quality, {"loss": loss, **asdict(quality)})
