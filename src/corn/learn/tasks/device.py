"""Tasks that compute on a device such as a GPU, while data, noise and messages stay on the CPU.

A batch and the model go to the device for a gradient, and the gradient comes back. Norms of
mini-batch gradients, noise, rounding to the grid and messages are on the CPU in float64, where the
proof for floats holds. Where samples are clipped one by one, the device clips and adds them in
float64, so that it must have this type.

This code runs in tests on the CPU only: no machine of this project has a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from corn.errors import InvalidArgumentError
from corn.learn.batches import Batch
from corn.learn.tasks.protocol import ChecksTargets, Gradients, HasFingerprint, Scores, Task

_CPU = "cpu"


def place_task(task: Task, device: str) -> Task:
    """Return a task that computes on a device; the task itself for the CPU.

    Raises:
        InvalidArgumentError: torch cannot compute in float64 there.
    """
    if device == _CPU:
        return task
    try:
        # The only reliable test, and it fails before the run, not in the middle.
        (torch.ones(2, device=device, dtype=torch.float64) * 2).sum().item()
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InvalidArgumentError(
            f"device must be one on which torch computes in float64, found {device!r}: try cpu"
        ) from error
    if isinstance(task, HasFingerprint):
        return FingerprintedDeviceTask(task, device, task.fingerprint())
    return DeviceTask(task, device)


class DeviceTask:
    """A task whose gradients and scores are computed on a device; arguments are on the CPU."""

    def __init__(self, task: Task, device: str) -> None:
        self._task, self._device = task, device

    @property
    def num_parameters(self) -> int:
        """See ``Task``."""
        return self._task.num_parameters

    def prepare(self, inputs: Tensor) -> Tensor:
        """See ``Task``."""
        return self._task.prepare(inputs)

    def initialize(self, seed: int) -> Tensor:
        """See ``Task``."""
        return self._task.initialize(seed)

    def check_targets(self, targets: Tensor) -> None:
        """See ``ChecksTargets``."""
        if isinstance(self._task, ChecksTargets):
            self._task.check_targets(targets)

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        """See ``Task``."""
        # Weights move as well, in their own type: float64 where samples are clipped.
        placed = replace(
            batch,
            inputs=batch.inputs.to(self._device),
            targets=batch.targets.to(self._device),
            weights=batch.weights.to(self._device),
        )
        clip = None if sample_clip is None else sample_clip.to(self._device)
        found = self._task.gradient(parameters.to(self._device), placed, sample_clip=clip)
        return Gradients(
            found.values.to(_CPU),
            None if found.fraction_clipped is None else found.fraction_clipped.to(_CPU),
            None if found.num_broken is None else found.num_broken.to(_CPU),
        )

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """See ``Task``."""
        there = (each.to(self._device) for each in (parameters, inputs, targets))
        found = self._task.evaluate(*there)
        accuracy = None if found.accuracy is None else found.accuracy.to(_CPU)
        return Scores(found.loss.to(_CPU), accuracy)

    def describe(self) -> str:
        """See ``Task``; without the device, which agents may choose each for itself."""
        return self._task.describe()


class FingerprintedDeviceTask(DeviceTask):
    """The same for a task with a fingerprint, so that agents on CPUs and GPUs have the same."""

    def __init__(self, task: Task, device: str, fingerprint: bytes) -> None:
        super().__init__(task, device)
        self._fingerprint = fingerprint

    def fingerprint(self) -> bytes:
        """See ``HasFingerprint``."""
        return self._fingerprint
