"""Data of the user: pairs of inputs and targets; anything else is refused with advice."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
)

from corn.errors import InvalidArgumentError
from corn.learn.batches import AgentData
from corn.learn.problem import SweepSettings, TrainingProblem, read_samples
from corn.learn.tasks import LinearClassifier


class Items(Dataset[Any]):
    """A data set that gives the same item three times."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return self.item


class Stream(IterableDataset[Any]):
    """A data set without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(2), 1


@pytest.mark.parametrize("as_list", [False, True])
def test_pairs_of_arrays_keep_their_precision(as_list: bool) -> None:
    pair = (np.array([[1 / 3]]), np.array([2]))
    inputs, targets = read_samples(list(pair) if as_list else pair)  # type: ignore[arg-type]
    assert (inputs.dtype, inputs.item(), targets.item()) == (torch.float64, 1 / 3, 2)
    inputs[0] = 0
    assert pair[0][0] == 1 / 3  # the caller's array is left alone


def test_items_are_stacked() -> None:
    inputs, targets = read_samples(Items((torch.zeros(2), 1)))
    assert (inputs.shape, targets.tolist()) == ((3, 2), [1, 1, 1])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Items(torch.zeros(2)), "must be a pair of inputs and targets, .*found Tensor"),
        (Items(((torch.zeros(2), torch.zeros(2)), 1)), r"found tuple"),
        (
            (torch.zeros(2, 1), torch.tensor([0.0, torch.inf])),
            "targets of the data set must be finite, found inf in row 1, counted",
        ),
        ((torch.zeros(3, 1), torch.zeros(2)), "targets of the data set must be 3, one for each"),
        ((torch.zeros(0, 2), torch.zeros(0)), "at least one sample"),
        ((torch.zeros(2, 2), np.array(["ill", "well"])), "must be numbers, found <U4: number the"),
        (
            DataLoader(Items((torch.zeros(2), 1)), sampler=SubsetRandomSampler([0])),
            r"without a sampler of its own, found SubsetRandomSampler: give .*Subset",
        ),
        (Stream(), "must have a length and items by number, .* found Stream"),
    ],
)
def test_other_data_is_refused(source: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        read_samples(source)


def test_ragged_items_are_refused() -> None:
    class Ragged(Items):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(index + 1), 0

    with pytest.raises(InvalidArgumentError, match=r"one shape .*: pad them"):
        read_samples(Ragged(None))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [(torch.zeros(3, 1), torch.zeros(2)), (torch.zeros(2, 1), torch.zeros(3))],
            "targets of agent 0 must be 3, one for each sample, found 2",
        ),
        (
            [(torch.zeros(2, 1), torch.zeros(2)), (torch.zeros(2, 4), torch.zeros(2))],
            r"\(1,\) for agent 0, found \(4,\) of agent 1",
        ),
    ],
)
def test_agents_with_different_shapes_are_refused(
    parts: list[tuple[Tensor, Tensor]], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        AgentData.from_parts(parts)


def test_samples_to_measure_on_are_validation_or_test() -> None:
    pair = torch.zeros(2, 1), torch.zeros(2, dtype=torch.long)
    task, data = LinearClassifier(1, 2), AgentData.from_parts([pair])
    with pytest.raises(InvalidArgumentError, match="parts must be validation and test"):
        TrainingProblem(task, data, {"holdout": pair})
    with pytest.raises(InvalidArgumentError, match="targets of the test data must be 2"):
        TrainingProblem(task, data, {"test": (pair[0], pair[1][:1])})


def test_values_beyond_float32_are_refused() -> None:
    """They would become infinite, and every gradient with them."""
    inputs = torch.tensor([[1e39], [1.0]], dtype=torch.float64)
    data = AgentData(inputs, torch.tensor([0, 1]), (0, 2))
    problem = TrainingProblem(LinearClassifier(1, 2), data)
    assert problem.place(SweepSettings(1, dtype="float64"))
    with pytest.raises(InvalidArgumentError, match=r"must be within .*, found larger values"):
        problem.place(SweepSettings(1))
