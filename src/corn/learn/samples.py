"""Read a user's data: a torch data set of pairs, or inputs and targets as tensors or arrays."""

from __future__ import annotations

from types import NoneType
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data import Dataset as TorchDataset

from corn.errors import InvalidArgumentError
from corn.learn.metrics import Samples

DataSource: TypeAlias = "TorchDataset[Any] | DataLoader[Any] | tuple[Any, Any]"
"""A map-style torch data set of pairs, or a loader of one; or inputs and targets as tensors or
arrays."""

_ADVICE = (
    "where a model needs no targets, give its inputs twice; where it takes several inputs, stack "
    "them in one tensor and take it apart in forward"
)


def read_samples(source: DataSource) -> Samples:
    """Inputs and targets of a data source as two tensors, whole and finite."""
    if isinstance(source, DataLoader):
        _require_whole(source)
        return read_samples(source.dataset)
    if isinstance(source, tuple | list):
        pair = cast("Any", source)
        _require_pair(pair, "a data set")
        samples = _as_tensor(pair[0]), _as_tensor(pair[1])
    else:
        samples = _read_items(source)
    for name, values in zip(("inputs", "targets"), samples, strict=True):
        if values.dim() < 1 or not len(values):
            raise InvalidArgumentError(
                f"every data set needs at least one sample, found an empty one ({name} of shape "
                f"{tuple(values.shape)})"
            )
        if not bool(torch.isfinite(values).all()):
            raise InvalidArgumentError(f"{name} must be finite, found NaN or infinity in them")
    return samples


def _read_items(source: TorchDataset[Any]) -> Samples:
    is_stream = isinstance(source, IterableDataset)
    if is_stream or not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise InvalidArgumentError(
            "a data set must have a length and items by number, as batches are drawn from it at "
            f"random, found {type(source).__name__}: read a stream into a list of pairs first"
        )
    items = [source[index] for index in range(len(cast("Any", source)))]
    for item in items:
        _require_pair(item, "each item of a data set")
    if not items:
        raise InvalidArgumentError("every data set needs at least one sample, found an empty one")
    inputs, targets = zip(*items, strict=True)
    return _stack("inputs", inputs), _stack("targets", targets)


def _require_whole(loader: DataLoader[Any]) -> None:
    """Batches are drawn here, from all samples: a loader that takes some of them means others."""
    usual = (SequentialSampler, RandomSampler, BatchSampler, NoneType)
    if isinstance(loader.dataset, IterableDataset):
        return  # refused by its own name
    for sampler in (loader.sampler, loader.batch_sampler):
        if type(sampler) not in usual:
            raise InvalidArgumentError(
                f"a data loader must have no sampler of its own, found {type(sampler).__name__}: "
                "give torch.utils.data.Subset(dataset, indices) instead"
            )


def _require_pair(item: Any, what: str) -> None:
    # A tensor with two entries can be unpacked too, into what nobody meant.
    if not isinstance(item, tuple | list) or len(item) != 2:
        found = f"{len(item)} parts" if isinstance(item, tuple | list) else type(item).__name__
        raise InvalidArgumentError(
            f"{what} must be a pair of inputs and targets, found {found}: {_ADVICE}"
        )


def _stack(name: str, values: tuple[Any, ...]) -> Tensor:
    tensors = [_as_tensor(value) for value in values]
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise InvalidArgumentError(
            f"{name} of all samples must have one shape, found {sorted(shapes)[:3]}: pad them"
        )
    return torch.stack(tensors)


def _as_tensor(values: Any) -> Tensor:
    if isinstance(values, tuple | dict):
        raise InvalidArgumentError(
            f"inputs and targets must be tensors or arrays, found a {type(values).__name__}: "
            f"{_ADVICE}"
        )
    # A copy where the array is the caller's: it may be read-only, and is never to be modified.
    try:
        return torch.as_tensor(np.array(values) if isinstance(values, np.ndarray) else values)
    except (TypeError, ValueError, RuntimeError) as error:
        found = getattr(values, "dtype", type(values).__name__)
        raise InvalidArgumentError(
            f"inputs and targets must be numbers, found {found}: number the classes from 0"
        ) from error
