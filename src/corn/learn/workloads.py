"""Workloads by name, of the paper and similar ones: data set, model, split and partition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, get_args

import torch
from torch import nn
from torch.nn import functional

from corn.checks import require_choice
from corn.errors import FileFormatError, InvalidArgumentError
from corn.files import load_function
from corn.learn.batches import AgentData
from corn.learn.datasets import PAPER_PARTITION, WORKLOADS, ModelName, load_dataset
from corn.learn.partition import partition_samples, split_samples
from corn.learn.problem import TrainingProblem, pick_samples
from corn.learn.tasks import (
    LinearClassifier,
    ModuleTask,
    Quadratic,
    ShallowNetwork,
    Task,
    place_task,
    small_cnn_task,
)

_HIDDEN = 32


def make_named_task(
    model: str,
    input_shape: tuple[int, ...],
    num_classes: int | None,
    *,
    is_image: bool = False,
    l2: float = 1e-4,
    of: str = "this data",
) -> Task:
    """Return a task, see ``Workload``; without ``num_classes`` targets are numbers."""
    if model.endswith(".py") or ".py:" in model:
        # Images have their channels first, as torch expects them.
        shape = (1, *input_shape) if is_image and len(input_shape) == 2 else input_shape
        return _load_task(model, shape, num_classes)
    require_choice("model", model, get_args(ModelName), advice="or FILE.py:FUNCTION")
    num_features = math.prod(input_shape)
    if model == "cnn":
        if not is_image or num_classes is None:
            raise InvalidArgumentError(f"model cnn needs images with classes, {of} has none")
        return small_cnn_task(input_shape, num_classes)
    if num_classes is None:
        is_linear = model == "linear"
        output = nn.Linear(num_features if is_linear else _HIDDEN, 1)
        hidden = [] if is_linear else [nn.Linear(num_features, _HIDDEN), nn.ReLU()]
        # Least squares is convex: zero is a start that does not depend on a seed.
        for parameter in output.parameters() if is_linear else ():
            nn.init.zeros_(parameter)
        module = nn.Sequential(nn.Flatten(), *hidden, output, nn.Flatten(0))
        # A linear model keeps its zeros; a network needs new random weights for each seed.
        return ModuleTask(module, functional.mse_loss, reset=not is_linear)
    if model == "linear":
        return LinearClassifier(num_features, num_classes, l2=l2)
    return ShallowNetwork(num_features, num_classes, num_hidden=_HIDDEN)


def _load_task(spec: str, input_shape: tuple[int, ...], num_classes: int | None) -> Task:
    """Return the task of a user's function, which returns a module, or a module and its loss."""
    make = load_function(spec)
    # Agents must start from one model, so it is drawn from a public seed.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: Any = make(input_shape, 1 if num_classes is None else num_classes)
    usual = functional.mse_loss if num_classes is None else functional.cross_entropy
    model, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, usual)
    if not isinstance(model, nn.Module) or not callable(loss):
        found = type(made).__name__
        raise FileFormatError(f"{spec}: must return a module, or it and its loss, found {found}")
    return ModuleTask(model, loss, input_shape=input_shape)


_START = "agents start at the minimiser, which depends on all their data, and no ε covers that"
_DEALT_OUT = "all rows of a public data set decide which agent has which, and no ε covers that"


class ProblemSource(Protocol):
    """Settings from which every process makes the same problem, with the data of its agents."""

    def build(self, num_agents: int, agents: Sequence[int] | None = None) -> TrainingProblem:
        """Return the problem with the data of some agents, by default of all."""


@dataclass(frozen=True)
class Workload:
    """A task by name, by default as in the paper (80/20 split, Dirichlet(10) by label).

    Attributes:
        name: ``quadratic`` or a data set.
        model: ``linear`` (logistic or softmax regression), ``network`` (32 hidden units), ``cnn``,
            or ``FILE.py:FUNCTION``; by default linear, and network for MNIST as in the paper.
        partition: ``iid``, ``dirichlet:α`` or ``shards:k``.
        seed: the seed of split and partition.
        l2: the penalty λ of linear models.
        directory: the directory of cached data sets.
        device: the device on which torch computes gradients and scores, which each process may
            choose.
    """

    name: str
    model: str | None = None
    partition: str = PAPER_PARTITION
    seed: int = 0
    l2: float = 1e-4
    directory: Path | None = None
    device: str = "cpu"

    def build(self, num_agents: int, agents: Sequence[int] | None = None) -> TrainingProblem:
        """Return the problem with the data of some agents, by default of all."""
        require_choice("task", self.name, WORKLOADS)
        if self.name == "quadratic":
            task = Quadratic(num_agents)
            # float64, because gaps are differences of losses near 1434.
            data = task.agent_data(torch.float64)
            problem = TrainingProblem(task=task, data=data, simulation=_START)
        else:
            problem = self._make_from_data(num_agents)
        problem = replace(
            problem,
            task=place_task(problem.task, self.device),
            description=f"{self.name}, {self.partition}, seed {self.seed}",
        )
        return problem if agents is None else select_agents(problem, agents)

    def _make_from_data(self, num_agents: int) -> TrainingProblem:
        dataset = load_dataset(self.name, directory=self.directory)
        # The data sets' own test parts are ignored: the paper splits all samples 80/20.
        split = split_samples(len(dataset.targets), seed=self.seed)
        labels = dataset.targets[split.train]
        assigned = partition_samples(self.partition, labels, num_agents, seed=self.seed)
        held_out = {"validation": split.validation, "test": split.test}
        samples = torch.from_numpy(dataset.inputs), torch.from_numpy(dataset.targets)
        parts = {part: pick_samples(samples, rows) for part, rows in held_out.items() if len(rows)}
        return TrainingProblem(
            task=make_named_task(
                self.model or ("network" if self.name == "mnist" else "linear"),
                dataset.image_shape or dataset.inputs.shape[1:],
                dataset.num_classes,
                is_image=dataset.image_shape is not None,
                l2=self.l2,
                of=self.name,
            ),
            data=AgentData.from_parts(
                [pick_samples(samples, split.train[rows]) for rows in assigned]
            ),
            parts=parts,
            # Every agent has the held-out samples, and no agent trains on them.
            public_parts=tuple(parts),
            simulation=_DEALT_OUT,
        )


def select_agents(problem: TrainingProblem, agents: Sequence[int]) -> TrainingProblem:
    """Return the same problem with the training data of some agents alone."""
    own = map(problem.data.of_agent, agents)
    return replace(problem, data=AgentData.from_parts([(one.inputs, one.targets) for one in own]))
