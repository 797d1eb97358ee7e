"""The interface of a task, and a task on another device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor

from corn.errors import InvalidArgumentError
from corn.learn.batches import Batch


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients (cells, trials, parameters), and facts (cells, trials) on clipped samples."""

    values: Tensor
    fraction_clipped: Tensor | None = None
    num_broken: Tensor | None = None

    @classmethod
    def of_samples(cls, values: Tensor, factors: Tensor, weights: Tensor) -> Gradients:
        """Return sums of samples with factors (cells, samples, trials) and these weights."""
        present = (weights > 0).unsqueeze(-1)
        num_clipped = ((factors < 1) & present).sum(dim=1).to(factors.dtype)
        num_broken = ((factors == 0) & present).sum(dim=1)
        return cls(values, num_clipped / present.sum(dim=1).clamp(min=1), num_broken)


@dataclass(frozen=True, eq=False)
class Scores:
    """Mean loss of each model over some samples, shape (models,), and accuracy if it has one."""

    loss: Tensor
    accuracy: Tensor | None = None


class Task(Protocol):
    """A model and its loss, with parameters flattened to one vector.

    A *cell* is one agent in one seed's run, and has data; its *trials* are the models that differ
    in mechanism or step size and share that data. A task may also have ``check_targets(targets)``,
    which raises ``InvalidArgumentError``; ``fingerprint() -> bytes``, a hash of details that
    ``describe`` and the initial parameters do not show; and ``to_module(parameters)``, a plain
    module for samples before ``prepare``, in the shape ``input_shape`` if the task has one.
    """

    @property
    def num_parameters(self) -> int:
        """The length d of the parameter vector."""

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return inputs in the form that the other methods expect; called once."""

    def initialize(self, seed: int) -> Tensor:
        """Return the initial parameters of all agents, shape (d,), float64."""

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        """Return the weighted sum of the samples' gradients for each model (cells, trials, d).

        With ``sample_clip``, shape (trials,), each sample's gradient is clipped to this norm first,
        and norms, sums and the result are in its type: float64, in which the rounding of the sum is
        far below one sample's sensitivity.
        """

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """Score models, shape (models, d), each on all the samples."""

    def describe(self) -> str:
        """Return one line that describes the model."""


_CPU = "cpu"


def require_device(device: torch.device | str, dtype: torch.dtype = torch.float32) -> None:
    """Raise unless torch can compute on a device."""
    # The only reliable test, and it fails before hours of work, not in the middle.
    try:
        (torch.ones(2, device=device, dtype=dtype) * 2).sum().item()
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InvalidArgumentError(
            f"device must be one on which torch computes in {dtype}, found {str(device)!r}: try cpu"
        ) from error


def place_task(task: Task, device: str) -> Task:
    """Return a task that computes on a device; itself for the CPU."""
    if device == _CPU:
        return task
    require_device(device, torch.float64)
    return cast("Task", DeviceTask(task, device))


@final
class DeviceTask:
    """A task whose gradients and scores are computed on a device; arguments are on the CPU."""

    def __init__(self, task: Task, device: str) -> None:
        self._task = task
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        """See ``Task``."""
        # Weights move as well, in their own type: float64 where samples are clipped.
        placed = replace(batch, **_move(batch, self._device))
        clip = None if sample_clip is None else sample_clip.to(self._device)
        found = self._task.gradient(parameters.to(self._device), placed, sample_clip=clip)
        return Gradients(**_move(found, _CPU))

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """See ``Task``."""
        given = (each.to(self._device) for each in (parameters, inputs, targets))
        return Scores(**_move(self._task.evaluate(*given), _CPU))


def _move(record: object, device: str) -> dict[str, Any]:
    """Return the fields of a record, with its tensors on a device."""
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in vars(record).items()
    }
