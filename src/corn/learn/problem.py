"""Training problems (a task, each agent's samples, samples to measure on), and settings of runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, Literal, TypeAlias, cast, get_args

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

from corn.checks import require, require_choice, require_count
from corn.covariance.objective import check_momentum
from corn.errors import InvalidArgumentError
from corn.learn.batches import AgentData
from corn.learn.metrics import PARTS, Samples
from corn.learn.optimizers import OptimizerFactory
from corn.learn.schema import Schema
from corn.learn.tasks import Task
from corn.learn.update import Clipping, LocalRule, MixingRule
from corn.privacy import PrivacyBudget
from corn.topology.graphs import list_by_agent

NoiseKeys: TypeAlias = Literal["none", "seed", "secret"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def require_device(device: torch.device | str) -> None:
    """Raise unless torch can compute on a device."""
    # The only reliable test, and it fails before hours of work, not in the middle.
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidArgumentError(
            f"device must be available to torch, found {str(device)!r}: try cpu"
        ) from error


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
        # The record is frozen. Plain integers, because NumPy's do not become JSON.
        seeds = tuple(require_count("seeds", seed, least=0) for seed in self.seeds)
        object.__setattr__(self, "seeds", seeds)
        require_count("num_steps", self.num_steps)
        require_count("cooldown_steps", self.cooldown_steps, least=0)
        check_momentum(self.momentum)
        if (self.optimizer is not None or self.local_rule is not None) and self.momentum:
            raise InvalidArgumentError(
                f"momentum must be 0 with an optimizer or a local rule, found {self.momentum}: "
                "they have their own"
            )
        replaced = (self.clipping, self.mixing, self.local_rule)
        for name in ("clipping", "mixing", "local_rule"):
            rule = getattr(self, name)
            kind = "a class of rules" if name == "local_rule" else "a function"
            require(rule is None or callable(rule), name, f"{kind} (corn.learn.update)", repr(rule))
        if self.noise_keys != "none" and any(rule is not None for rule in replaced):
            raise InvalidArgumentError(
                "clipping, mixing and local_rule are for simulations without keys, found "
                f"noise_keys={self.noise_keys!r}: agents run what their plan says"
            )
        if self.batch_size is not None:
            require_count("batch_size", self.batch_size, advice="None is the whole data")
        is_unique = len(set(seeds)) == len(seeds) > 0
        require(is_unique, "seeds", "one or more different numbers", seeds)
        require_choice("dtype", self.dtype, _DTYPES)
        require_choice("noise_keys", self.noise_keys, get_args(NoiseKeys))
        if self.noise_keys == "secret" and len(self.seeds) > 1:
            raise InvalidArgumentError(
                f"seeds must be one for a run with secret keys (secure=True), found "
                f"{len(self.seeds)}: every run on the same data would spend the budget once more"
            )
        require_device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch type."""
        return _DTYPES[self.dtype]


DataSource: TypeAlias = "TorchDataset[Any] | DataLoader[Any] | tuple[Any, Any]"
"""A map-style torch data set of pairs, or a loader of one; or inputs and targets as tensors, NumPy
arrays, or data frames and columns of pandas."""

_ADVICE = (
    "if a model needs no targets, give its inputs twice; if it takes several inputs, stack them in "
    "one tensor and split it in forward"
)


@dataclass(frozen=True, eq=False)
class TrainingProblem:
    """A task and the data it is trained and measured on.

    Attributes:
        task: model and loss.
        data: the training samples of every agent, not yet prepared for the task.
        parts: more samples to measure on, by ``validation`` and ``test``.
        notes: facts that a reader of results must know.
        public_parts: the names in ``parts`` that are public: known to all agents, and no agent's
            own. Measurements on private samples are private.
        private_notes: facts about the data of single agents, for their owners alone.
        schema: the public schema of files; None for data of other sources.
        description: the public choice, columns, classes, bounds and split of the data, which
            agents compare.
        simulation: why a run on this data is a simulation, whose ε is no promise, in a clause;
            empty if it is none. The samples of one agent must not depend on those of others.
        is_dealt_out: whether the rows of one common file were divided between agents.
    """

    task: Task
    data: AgentData
    parts: Mapping[str, Samples] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    public_parts: tuple[str, ...] = ()
    private_notes: tuple[str, ...] = ()
    schema: Schema | None = None
    description: str = ""
    simulation: str = ""
    is_dealt_out: bool = False

    def judge(self, budget: PrivacyBudget) -> TrainingProblem:
        """Return the problem with the reason why a run under a budget is a simulation, if it is.

        A row of one common file that changes may leave one agent and join another. Agents with one
        promise and one rate cover that: their releases together move by at most 2C/B.
        """
        if self.simulation or not self.is_dealt_out or len(set(budget.promises)) == 1:
            return self
        reason = (
            "one file is divided between agents with different promises or rates, and a changed "
            "row may move from one to another"
        )
        return replace(self, simulation=reason)

    def __post_init__(self) -> None:
        # ``train`` is no part of its own: it is made from ``data``.
        unknown = set(self.parts) - set(PARTS[1:])
        if unknown:
            raise InvalidArgumentError(f"parts must be validation and test, found {unknown}")
        for name, (inputs, targets) in self.parts.items():
            _require_targets(inputs, targets, of=f"the {name} data")

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
        """Return training data and samples to measure on, in the settings' type and device.

        ``train`` among the latter is the data of all agents, or ``max_train_samples`` evenly spaced
        samples of it.
        """
        inputs, targets = self._place_samples((self.data.inputs, self.data.targets), settings)
        data = AgentData(inputs, targets, self.data.offsets)
        stride = 1
        if max_train_samples is not None:
            require_count("max_train_samples", max_train_samples, advice="None takes all")
            # Rounded up, so that there are at most as many. Samples are in the order of agents, so
            # that equal distances take from all of them.
            stride = -(-len(inputs) // max_train_samples)
        parts = {"train": (inputs[::stride], targets[::stride])}
        return data, parts | {
            name: self._place_samples(part, settings) for name, part in self.parts.items()
        }

    def _place_samples(self, samples: Samples, settings: SweepSettings) -> Samples:
        inputs, targets = samples
        getattr(self.task, "check_targets", lambda _: None)(targets)
        return self.task.prepare(_cast(inputs, settings)).contiguous(), _cast(targets, settings)


def _cast(values: Tensor, settings: SweepSettings) -> Tensor:
    # Whole numbers, such as classes or tokens, stay whole.
    if not values.is_floating_point():
        return values.to(device=settings.device)
    narrow = values.to(settings.torch_dtype)
    if narrow.dtype != values.dtype and bool((narrow.isinf() & values.isfinite()).any()):
        raise InvalidArgumentError(
            f"inputs and targets must fit into {settings.dtype}, found values beyond "
            f"±{torch.finfo(narrow.dtype).max:.2g}: scale them, or choose float64"
        )
    return narrow.to(device=settings.device)


def make_problem(
    task: Task,
    datasets: Sequence[DataSource] | Mapping[Any, DataSource],
    agents: int | Sequence[str],
    *,
    validation: DataSource | None = None,
    test: DataSource | None = None,
) -> TrainingProblem:
    """Return the problem of a task on one data set for each agent, in order or by its label.

    ``agents`` are their number or their labels.
    """
    names = [str(agent) for agent in (range(agents) if isinstance(agents, int) else agents)]
    listed = list_by_agent(names, datasets, argument="datasets")
    own = [read_samples(each, of=f"agent {names[agent]}") for agent, each in enumerate(listed)]
    given = {"validation": validation, "test": test}
    parts = {
        part: read_samples(each, of=f"the {part} data")
        for part, each in given.items()
        if each is not None
    }
    return TrainingProblem(task, AgentData.from_parts(own), parts)


def read_samples(source: DataSource, *, of: str = "the data set") -> Samples:
    """Return inputs and targets of a data source as two tensors of finite numbers.

    ``of`` is the owner of the data for error messages, such as "agent 3" or "the test data".
    """
    if isinstance(source, DataLoader):
        require_plain_loader(source)
        # The data set alone counts: batches must be drawn as the accounting assumes.
        return read_samples(source.dataset, of=of)
    if isinstance(source, tuple | list):
        pair = cast("Any", source)
        _require_pair(pair, f"the data of {of}" if of.startswith("agent") else of)
        inputs, targets = _as_tensor(pair[0]), _as_tensor(pair[1])
    else:
        inputs, targets = _read_items(source, of)
    for name, values in (("inputs", inputs), ("targets", targets)):
        if values.dim() < 1 or not len(values):
            raise InvalidArgumentError(
                f"{name} of {of} must have at least one sample, found shape {tuple(values.shape)}"
            )
        _require_finite(name, values, of)
    _require_targets(inputs, targets, of=of)
    return inputs, targets


def _require_finite(name: str, values: Tensor, of: str) -> None:
    is_broken = ~torch.isfinite(values)
    if bool(is_broken.any()):
        row, *entry = torch.nonzero(is_broken)[0].tolist()
        column = f", column {entry[0]}" if len(entry) == 1 else f", entry {entry}" if entry else ""
        raise InvalidArgumentError(
            f"{name} of {of} must be finite, found {values[(row, *entry)].item()} in row {row}"
            f"{column}, counted from 0: remove or replace such samples"
        )


def _require_targets(inputs: Tensor, targets: Tensor, *, of: str) -> None:
    if len(inputs) != len(targets):
        raise InvalidArgumentError(
            f"targets of {of} must be {len(inputs)}, one for each sample, found {len(targets)}"
        )


def _read_items(source: TorchDataset[Any], of: str) -> Samples:
    is_stream = isinstance(source, IterableDataset)
    if is_stream or not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise InvalidArgumentError(
            "a data set must have a length and items by number, as batches are drawn from it at "
            f"random, found {type(source).__name__}: read a stream into a list of pairs first"
        )
    # By index: a data set need not define ``__iter__``, and some never raise ``IndexError``.
    items = [source[index] for index in range(len(cast("Any", source)))]
    for item in items:
        _require_pair(item, "each item of a data set")
    if not items:
        raise InvalidArgumentError(f"inputs of {of} must have at least one sample, found none")
    inputs, targets = zip(*items, strict=True)
    return _stack("inputs", inputs), _stack("targets", targets)


def require_plain_loader(loader: DataLoader[Any]) -> None:
    """Raise for a loader whose own choice of samples would be ignored."""
    # CorN draws mini-batches itself, from all samples. A sampler of the loader's own would be
    # ignored, and with it the user's choice of samples.
    usual = (SequentialSampler, RandomSampler, BatchSampler, NoneType)
    if isinstance(loader.dataset, IterableDataset):
        return  # refused by _read_items, with the name of its class
    for sampler in (loader.sampler, loader.batch_sampler):
        if type(sampler) not in usual:
            raise InvalidArgumentError(
                f"a data loader must have no sampler of its own, found {type(sampler).__name__}: "
                "give torch.utils.data.Subset(dataset, indices) instead"
            )


def _require_pair(item: Any, what: str) -> None:
    # A tensor with two entries could be unpacked too, but is not a pair of inputs and targets.
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
    # Data frames and columns of pandas, and arrays of other libraries, are arrays to NumPy.
    if not isinstance(values, Tensor | np.ndarray) and hasattr(values, "to_numpy"):
        values = values.to_numpy()
    # An array is copied: it may be read-only, and a caller's array must never be modified.
    try:
        return torch.as_tensor(np.array(values) if isinstance(values, np.ndarray) else values)
    except (TypeError, ValueError, RuntimeError) as error:
        found = getattr(values, "dtype", type(values).__name__)
        raise InvalidArgumentError(
            f"inputs and targets must be numbers, found {found}: number the classes from 0"
        ) from error
