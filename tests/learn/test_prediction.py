"""Predictions by a public schema: categories, dates, missing values, with and without targets."""

from pathlib import Path

import numpy as np
import pytest
import torch

from corn.errors import FileFormatError
from corn.learn import FileWorkload, ModelPromise, TrainedModel, load_model
from corn.learn.schema import Column, Schema
from corn.learn.trained import predict_table

COLUMNS = (
    Column("age", bounds=(0, 100), missing=50),
    Column("ward", "category", categories=("a", "b")),
    Column("admitted", "date", bounds=("2020-01-01", "2020-01-11")),
)
PROMISE = ModelPromise(
    None, None, None, "", "nobody", "", None, "nobody", num_steps=1, num_agents=1, mechanism="none"
)


@pytest.fixture
def model(tmp_path: Path) -> TrainedModel:
    """A saved model with known weights of age, ward a, ward b, admission, and a bias."""
    path = tmp_path / "train.csv"
    path.write_text(
        "person,age,ward,admitted,ill\n"
        + "".join(f"{k},{k},a,2020-01-0{k % 9 + 1},{k % 2}\n" for k in range(30))
    )
    schema = Schema("ill", COLUMNS, ("0", "1"), id="person")
    problem = FileWorkload(path, schema=schema, sites=("only",)).build(1)
    weights = torch.tensor([2.0, 1.0, -1.0, 0.5, 0.25])
    made = TrainedModel.from_problem(problem, weights, PROMISE)
    assert made is not None
    made.save(tmp_path / "model.pt")
    return load_model(tmp_path / "model.pt")


def test_new_rows_are_encoded_as_those_of_training(model: TrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "new.csv"
    # Columns in another order, one more, a missing age, an unknown ward, a value out of bounds.
    path.write_text(
        "ward,admitted,age,note\na,2020-01-11,100,x\nb,2020-01-06,?,y\nc,2020-01-01,500,z\n"
    )
    found = predict_table(model, path)
    logits = np.array([2 + 1 + 0.5, -1, 2 - 0.5]) + 0.25
    np.testing.assert_allclose(found.values[:, 1], 1 / (1 + np.exp(-logits)), atol=1e-6)
    assert found.ignored == ("note",)
    assert found.quality is None
    assert model.preprocessing is not None
    assert model.preprocessing["id"] == "person"


def test_targets_give_scores(model: TrainedModel, tmp_path: Path) -> None:
    found = predict_table(model, tmp_path / "train.csv")
    assert found.quality is not None
    assert found.quality.num_samples == 30
    assert found.ignored == ("person",)
    picked = found.values[np.arange(30), np.arange(30) % 2]
    assert found.scores["loss"] == pytest.approx(-np.log(picked).mean())


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("Age,ward\n1,a\n", ("age", "admitted", "Age")),
        ("age,ward,admitted\nold,a,soon\n", ("age", "admitted")),
    ],
)
def test_all_differences_are_named(
    model: TrainedModel, tmp_path: Path, content: str, named: tuple[str, ...]
) -> None:
    path = tmp_path / "new.csv"
    path.write_text(content)
    with pytest.raises(FileFormatError) as caught:
        predict_table(model, path)
    assert [name for name in named if name not in str(caught.value)] == []
