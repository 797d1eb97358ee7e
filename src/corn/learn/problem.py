"""Training problems (a task, each agent's samples, samples to measure on), and settings of runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, Literal, TypeAlias, get_args

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

from corn.checks import IntArray, require, require_choice, require_count, require_length
from corn.covariance.objective import check_momentum
from corn.errors import InvalidArgumentError
from corn.learn.batches import AgentData
from corn.learn.metrics import PARTS, Samples
from corn.learn.optimizers import OptimizerFactory
from corn.learn.schema import Schema
from corn.learn.tasks import Task
from corn.learn.tasks.protocol import require_device
from corn.learn.update import Clipping, LocalRule, MixingRule
from corn.privacy import PrivacyBudget
from corn.topology.graphs import list_by_agent

NoiseKeys: TypeAlias = Literal["none", "seed", "secret"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class SweepSettings:
    """Settings that all runs of a sweep share.

    Attributes:
        num_steps: T.
        batch_size: samples per mini-batch; None for each agent's whole data.
        seeds: seeds of batches, noise and initial models; every trial is run once per seed.
        cooldown_steps: steps after the last that only mix, without new gradients or privacy cost.
        dtype: ``float32`` or ``float64``.
        device: the torch device to compute on.
        noise_keys: the source of noise. ``none``: fast streams of the seed, which all mechanisms
            share. ``seed``: keys derived from the seed, with which agents draw the same bits.
            ``secret``: new keys, which are discarded after the run. Only ``secret`` protects
            anyone.
        momentum: β in [0, 1): agents step along m ← β m + (1 − β) · release, which post-processes
            releases.
        optimizer: makes the optimizer of torch that steps along the averaged release, with the step
            size as its learning rate; only for exact sums, and with ``momentum`` 0. None is a plain
            step, or one with ``momentum``.
        clipping: a rule for each gradient before it is clipped to C (`corn.learn.update`).
        mixing: a rule that mixes models in the place of the network's weights, for gossip.
        local_rule: a class whose objects take steps along releases, in the place of DSGD, with
            ``momentum`` 0.
    """

    num_steps: int
    batch_size: int | None = 128
    seeds: tuple[int, ...] = (0,)
    cooldown_steps: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    noise_keys: NoiseKeys = "none"
    momentum: float = 0.0
    optimizer: OptimizerFactory | None = None
    clipping: Clipping | None = None
    mixing: MixingRule | None = None
    local_rule: Callable[[], LocalRule] | None = None

    def __post_init__(self) -> None:
        seeds = tuple(require_count("seeds", seed, least=0) for seed in self.seeds)
        object.__setattr__(self, "seeds", seeds)
        require(len(set(seeds)) == len(seeds) > 0, "seeds", "one or more different numbers", seeds)
        require_count("num_steps", self.num_steps)
        require_count("cooldown_steps", self.cooldown_steps, least=0)
        if self.batch_size is not None:
            require_count("batch_size", self.batch_size, advice="None is the whole data")
        require_choice("dtype", self.dtype, _DTYPES)
        require_choice("noise_keys", self.noise_keys, get_args(NoiseKeys))
        require_device(self.device)
        check_momentum(self.momentum)
        for name in ("clipping", "mixing", "local_rule"):
            rule = getattr(self, name)
            is_usable = rule is None or callable(rule)
            require(is_usable, name, "a function, or a class of local rules", repr(rule))
            is_simulated = rule is None or self.noise_keys == "none"
            require(is_simulated, name, "for simulations without keys", repr(self.noise_keys))
        is_free = (self.optimizer, self.local_rule) == (None, None) or not self.momentum
        rule = "0 with an optimizer or a local rule, which have their own"
        require(is_free, "momentum", rule, self.momentum)
        is_one = self.noise_keys != "secret" or len(seeds) == 1
        # Every run on the same data would spend the budget once more.
        require(is_one, "seeds", "one for a run with secret keys (secure=True)", len(seeds))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch type."""
        return _DTYPES[self.dtype]


DataSource: TypeAlias = "TorchDataset[Any] | DataLoader[Any] | tuple[Any, Any]"
"""A map-style torch data set of pairs, or a loader of one; or inputs and targets as tensors, NumPy
arrays, or data frames and columns of pandas."""


@dataclass(frozen=True, eq=False)
class TrainingProblem:
    """A task and the data it is trained and measured on.

    ``data`` has the training samples of all agents, not yet prepared, and ``parts`` more samples to
    measure on, by ``validation`` and ``test``: those in ``public_parts`` are known to all agents,
    and measurements on others are private. ``private_notes`` are for the owners of the data alone.
    ``description`` is the public choice, columns, classes, bounds and split of the data, which
    agents compare. ``simulation`` says in a clause why the ε of a run on this data is no promise:
    the samples of one agent must not depend on those of others. ``is_dealt_out``: whether the rows
    of one common file were divided between agents.
    """

    task: Task
    data: AgentData
    parts: Mapping[str, Samples] = field(default_factory=dict)
    public_parts: tuple[str, ...] = ()
    private_notes: tuple[str, ...] = ()
    schema: Schema | None = None
    description: str = ""
    simulation: str = ""
    is_dealt_out: bool = False

    def judge(self, budget: PrivacyBudget) -> TrainingProblem:
        """Return the problem with the reason why a run under a budget is a simulation, if it is."""
        if self.simulation or not self.is_dealt_out or len(set(budget.promises)) == 1:
            return self
        # One promise and one rate cover that: releases together move by at most 2C/B.
        reason = (
            "one file is divided between agents with different promises or rates, and a changed "
            "row may move from one to another"
        )
        return replace(self, simulation=reason)

    def __post_init__(self) -> None:
        known = set(self.parts) <= set(PARTS[1:])
        require(known, "parts", "validation and test", ", ".join(self.parts))
        for name, (inputs, targets) in self.parts.items():
            require_length(f"targets of the {name} data", len(targets), len(inputs), per="sample")

    def digest(self) -> bytes:
        """Return a digest of the training samples in their order: private, as samples are."""
        state = hashlib.blake2b(digest_size=32)
        for values in (self.data.inputs, self.data.targets):
            # Types and shapes first: the same bytes may be other samples.
            state.update(f"{values.dtype} {tuple(values.shape)}\n".encode())
            flat = values.detach().cpu().contiguous().reshape(-1)
            state.update(flat.view(torch.uint8).numpy().data)
        return state.digest()

    def place(
        self, settings: SweepSettings, *, max_train_samples: int | None = None
    ) -> tuple[AgentData, dict[str, Samples]]:
        """Return training data and samples to measure on, in the settings' type and device."""
        placed = {}
        given = {"train": (self.data.inputs, self.data.targets), **self.parts}
        for name, (inputs, targets) in given.items():
            getattr(self.task, "check_targets", lambda _: None)(targets)
            prepared = self.task.prepare(_cast(inputs, settings)).contiguous()
            placed[name] = prepared, _cast(targets, settings)
        inputs, targets = placed["train"]
        if max_train_samples is not None:
            require_count("max_train_samples", max_train_samples, advice="None takes all")
            # Rounded up; equal distances take from all agents, whose samples are in order.
            stride = -(-len(inputs) // max_train_samples)
            placed["train"] = inputs[::stride], targets[::stride]
        return AgentData(inputs, targets, self.data.offsets), placed


def pick_samples(samples: Samples, rows: IntArray) -> Samples:
    """Return some samples by their rows."""
    index = torch.from_numpy(rows)
    return samples[0][index], samples[1][index]


def _cast(values: Tensor, settings: SweepSettings) -> Tensor:
    # Whole numbers, such as classes or tokens, stay whole.
    if not values.is_floating_point():
        return values.to(device=settings.device)
    narrow = values.to(settings.torch_dtype)
    fits = not bool((narrow.isinf() & values.isfinite()).any())
    require(fits, "inputs and targets", f"within the range of {narrow.dtype}", "larger values")
    return narrow.to(device=settings.device)


def make_problem(
    task: Task,
    datasets: Sequence[DataSource] | Mapping[Any, DataSource],
    agents: int | Sequence[str],
    *,
    validation: DataSource | None = None,
    test: DataSource | None = None,
) -> TrainingProblem:
    """Return the problem of a task on one data set for each agent, in order or by its label."""
    names = [str(agent) for agent in (range(agents) if isinstance(agents, int) else agents)]
    listed = list_by_agent(names, datasets, argument="datasets")
    own = [read_samples(each, of=f"agent {names[agent]}") for agent, each in enumerate(listed)]
    parts = {
        part: read_samples(each, of=f"the {part} data")
        for part, each in {"validation": validation, "test": test}.items()
        if each is not None
    }
    return TrainingProblem(task, AgentData.from_parts(own), parts)


def read_samples(source: DataSource, *, of: str = "the data set") -> Samples:
    """Return inputs and targets of a data source as tensors; ``of`` is its owner, for errors."""
    if isinstance(source, tuple | list):
        inputs, targets = (_as_tensor(part) for part in _require_pair(source, of))
    else:
        inputs, targets = _read_items(take_dataset(source), of)
    for name, values in (("inputs", inputs), ("targets", targets)):
        has_some = values.dim() > 0 and len(values) > 0
        require(has_some, f"{name} of {of}", "at least one sample", f"shape {tuple(values.shape)}")
        broken = torch.nonzero(~torch.isfinite(values)).tolist()
        if broken:
            value, row = values[tuple(broken[0])].item(), f"{broken[0][0]}, counted from 0"
            raise InvalidArgumentError(f"{name} of {of} must be finite, found {value} in row {row}")
    require_length(f"targets of {of}", len(targets), len(inputs), per="sample")
    return inputs, targets


def take_dataset(source: Any) -> Any:
    """Return a data set, or that of a loader, from all of which CorN can draw by number."""
    is_loader = isinstance(source, DataLoader)
    dataset = source.dataset if is_loader else source
    is_stream = isinstance(dataset, IterableDataset)
    if is_stream or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InvalidArgumentError(
            "a data set must have a length and items by number, as batches are drawn from it at "
            f"random, found {type(dataset).__name__}: read a stream into tensors first"
        )
    # A loader's own choice of samples would be ignored: batches are drawn as accounting assumes.
    for sampler in (source.sampler, source.batch_sampler) if is_loader else ():
        is_usual = type(sampler) in (SequentialSampler, RandomSampler, BatchSampler, NoneType)
        advice = "give torch.utils.data.Subset(dataset, indices) instead"
        found = type(sampler).__name__
        require(is_usual, "a data loader", "without a sampler of its own", found, advice=advice)
    return dataset


def _read_items(source: Any, of: str) -> Samples:
    # By index: a data set need not define ``__iter__``, and some never raise ``IndexError``.
    items = [_require_pair(source[index], of) for index in range(len(source))]
    require(len(items) > 0, f"inputs of {of}", "at least one sample", "none")
    inputs, targets = (
        [_as_tensor(value) for value in column] for column in zip(*items, strict=True)
    )
    shapes = {(x.shape, y.shape) for x, y in zip(inputs, targets, strict=True)}
    rule = "of one shape for all samples"
    require(len(shapes) == 1, f"inputs and targets of {of}", rule, "several", advice="pad them")
    return torch.stack(inputs), torch.stack(targets)


def _require_pair(item: Any, of: str) -> tuple[Any, Any]:
    # A tensor with two entries could be unpacked too, but is not a pair of inputs and targets.
    if not isinstance(item, tuple | list) or len(item) != 2:
        found = f"{len(item)} parts" if isinstance(item, tuple | list) else type(item).__name__
        rule = "a pair of inputs and targets, or items that are such pairs"
        raise InvalidArgumentError(f"data of {of} must be {rule}, found {found}")
    return item[0], item[1]


def _as_tensor(values: Any) -> Tensor:
    # Data frames and columns of pandas, and arrays of other libraries, are arrays to NumPy.
    if not isinstance(values, Tensor | np.ndarray) and hasattr(values, "to_numpy"):
        values = values.to_numpy()
    # Several inputs would be taken for one, of as many samples.
    is_one = not isinstance(values, tuple | dict)
    require(is_one, "inputs and targets", "one tensor or array each", type(values).__name__)
    # An array is copied: it may be read-only, and a caller's array must never be modified.
    try:
        return torch.as_tensor(np.array(values) if isinstance(values, np.ndarray) else values)
    except (TypeError, ValueError, RuntimeError) as error:
        found = getattr(values, "dtype", type(values).__name__)
        raise InvalidArgumentError(
            f"inputs and targets must be numbers, found {found}: number the classes from 0"
        ) from error
