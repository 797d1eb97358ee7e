"""A task on a device gets everything there and returns everything to the CPU."""

import pytest
import torch
from torch import Tensor

from corn.errors import InvalidArgumentError
from corn.learn.batches import Batch
from corn.learn.tasks import (
    Gradients,
    LinearClassifier,
    Scores,
    place_task,
    small_cnn_task,
)
from corn.learn.tasks.protocol import DeviceTask
from corn.learn.workloads import Workload


class Elsewhere:
    """A task that takes only tensors of the meta device, which every build of torch has."""

    num_parameters = 3

    def prepare(self, inputs: Tensor) -> Tensor:
        return inputs

    def initialize(self, seed: int) -> Tensor:
        return torch.full((3,), float(seed))

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        assert sample_clip is not None
        for each in (parameters, batch.inputs, batch.targets, batch.weights, sample_clip):
            assert each.device.type == "meta"
        return Gradients(torch.ones(1, 1, 3), torch.zeros(1, 1), torch.zeros(1, 1))

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        assert {each.device.type for each in (parameters, inputs, targets)} == {"meta"}
        return Scores(torch.ones(1), torch.ones(1))

    def describe(self) -> str:
        return "elsewhere"


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 8, 4, generator=generator)
    targets = torch.arange(8).view(1, 8) % 2
    return Batch(inputs, targets, torch.full((1, 8), 1 / 8), is_average=True, most_samples=8)


def test_everything_is_computed_on_the_device() -> None:
    task = DeviceTask(Elsewhere(), "meta")
    clip = torch.ones(1, dtype=torch.float64)
    found = task.gradient(torch.zeros(1, 1, 3), make_batch(), sample_clip=clip)
    assert found.values.device.type == "cpu"
    scores = task.evaluate(torch.zeros(1, 3), torch.zeros(8, 4), torch.zeros(8))
    assert scores.loss.device.type == "cpu"
    assert (task.num_parameters, task.describe()) == (3, "elsewhere")
    assert torch.equal(task.initialize(2), torch.full((3,), 2.0))


def test_agents_on_different_devices_compare_the_same_text() -> None:
    """Otherwise an agent with a GPU would be refused by the others."""
    module = small_cnn_task((8, 8), 10)
    placed = DeviceTask(module, "cpu")
    assert (placed.fingerprint(), placed.describe()) == (module.fingerprint(), module.describe())
    assert not hasattr(DeviceTask(LinearClassifier(4, 2), "cpu"), "fingerprint")
    assert "cpu" not in Workload("breast-cancer").build(2).description


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("device", ["cuda:0", "meta", "nonsense"])
def test_a_device_that_cannot_compute_is_refused(device: str) -> None:
    with pytest.raises(InvalidArgumentError):
        place_task(LinearClassifier(4, 2), device)
    task = LinearClassifier(4, 2)
    assert place_task(task, "cpu") is task
