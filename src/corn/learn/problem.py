"""What is learnt from what: a task, every agent's samples, and samples to measure on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from corn.errors import InvalidArgumentError
from corn.learn.batches import AgentData
from corn.learn.metrics import PARTS, Samples
from corn.learn.settings import SweepSettings
from corn.learn.tasks import Task
from corn.learn.tasks.protocol import ChecksTargets


@dataclass(frozen=True, eq=False)
class TrainingProblem:
    """What is learnt from what.

    Attributes:
        task: model and loss.
        data: the training samples of every agent, as they come; they are prepared for the task.
        parts: more samples to measure on, by ``validation`` and ``test``.
        notes: what a reader of results must know.
        has_public_parts: whether those samples are public: known to all agents, and no agent's own.
            What is measured on private ones is private.
    """

    task: Task
    data: AgentData
    parts: Mapping[str, Samples] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    has_public_parts: bool = False

    def __post_init__(self) -> None:
        unknown = set(self.parts) - set(PARTS[1:])
        if unknown:
            raise InvalidArgumentError(f"parts must be validation and test, found {unknown}")

    def place(
        self, settings: SweepSettings, *, max_train_samples: int | None = None
    ) -> tuple[AgentData, dict[str, Samples]]:
        """Training data and samples to measure on, prepared, of the settings' type and device.

        ``train`` among the latter is the data of all agents, or so many evenly spaced samples.
        """
        inputs, targets = self._place_samples((self.data.inputs, self.data.targets), settings)
        data = AgentData(inputs, targets, self.data.offsets)
        stride = 1
        if max_train_samples is not None:
            if max_train_samples < 1:
                raise InvalidArgumentError(
                    f"max_train_samples must be at least 1 or None, found {max_train_samples}"
                )
            stride = -(-len(inputs) // max_train_samples)
        parts = {"train": (inputs[::stride], targets[::stride])}
        return data, parts | {
            name: self._place_samples(part, settings) for name, part in self.parts.items()
        }

    def _place_samples(self, samples: Samples, settings: SweepSettings) -> Samples:
        inputs, targets = samples
        if isinstance(self.task, ChecksTargets):
            self.task.check_targets(targets)
        return self.task.prepare(_cast(inputs, settings)).contiguous(), _cast(targets, settings)


def _cast(values: Tensor, settings: SweepSettings) -> Tensor:
    # Whole numbers, such as classes or tokens, stay whole.
    dtype = settings.torch_dtype if values.is_floating_point() else values.dtype
    return values.to(device=settings.device, dtype=dtype)
