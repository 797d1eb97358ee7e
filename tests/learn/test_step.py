"""One step up to the message: what is released moves no further than accounting assumes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from corn.errors import InvalidArgumentError
from corn.learn.batches import Batch
from corn.learn.step import compute_gradients, release, take_half_step
from corn.learn.tasks import LinearClassifier, ModuleTask, Quadratic, ShallowNetwork, Task
from corn.learn.tasks.differentiation import Looped
from corn.learn.tasks.protocol import Gradients

CLIP = torch.tensor([0.1], dtype=torch.float64)
TASKS: dict[str, Any] = {
    "linear": lambda: LinearClassifier(4, 2, l2=0.01),
    "network": lambda: ShallowNetwork(4, 3, num_hidden=5),
    "module": lambda: ModuleTask(nn.Linear(4, 3), nn.functional.cross_entropy),
    "quadratic": lambda: Quadratic.from_paper(4),
}


def make_batch(task: Task, size: int, *, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    width = 6 if isinstance(task, Quadratic) else 4
    inputs = task.prepare(3 * torch.randn(size, width, generator=generator)).unsqueeze(0)
    targets = torch.randint(2, (1, size), generator=generator)
    if isinstance(task, LinearClassifier):
        targets = targets.float()
    weights = torch.full((1, size), 1 / size, dtype=torch.float64)
    return Batch(inputs, targets, weights, is_average=True, most_samples=size)


def sum_samples(task: Task, batch: Batch, clip: Tensor = CLIP) -> Any:
    models = 0.3 * torch.ones(1, 1, task.num_parameters)
    found = compute_gradients(task, models, batch, clip, clips_samples=True)
    return (found.values * found.factors.unsqueeze(-1)).double().flatten().numpy()


@pytest.mark.parametrize("size", [100, 20_000])
@pytest.mark.parametrize("name", [*TASKS])
def test_a_sample_moves_the_sum_by_no_more_than_its_part(name: str, size: int) -> None:
    """In float32 the rounding of the sum alone can be more."""
    task = TASKS[name]()
    batch = make_batch(task, size)
    inputs = batch.inputs.clone()
    inputs[0, size // 2] *= -1
    replaced = Batch(inputs, batch.targets, batch.weights, is_average=True)
    moved = np.linalg.norm(sum_samples(task, batch) - sum_samples(task, replaced))
    assert 0 < moved <= 2 * 0.1 / size


def test_float32_sums_would_move_further() -> None:
    """Why sums are made in float64: a sample that is removed takes the others' rounding along."""
    task, size = TASKS["linear"](), 65_536
    batch = make_batch(task, size)
    # Gradients that point the same way, so that their sum is large.
    batch = Batch(batch.inputs.abs(), torch.zeros_like(batch.targets), batch.weights, True)
    weights = batch.weights.clone()
    weights[0, 0] = 0
    without = Batch(batch.inputs, batch.targets, weights, is_average=False)
    moved = {
        clip.dtype: np.linalg.norm(
            sum_samples(task, batch, clip) - sum_samples(task, without, clip)
        )
        for clip in (CLIP, CLIP.float())
    }
    assert moved[torch.float64] <= 0.1 / size
    assert moved[torch.float32] > 1.0002 * 0.1 / size


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["linear", "network", "module", "quadratic", "looped"])
def test_samples_that_are_not_finite_count_as_zero(name: str, value: float) -> None:
    task: Any = TASKS[name if name != "looped" else "module"]()
    batch = make_batch(task, 10)
    if name == "looped":
        task._runner = Looped(task._module)
    broken = batch.inputs.clone()
    broken[0, 3] = value
    weights = batch.weights.clone()
    weights[0, 3] = 0
    models = 0.3 * torch.ones(1, 1, task.num_parameters)
    found = compute_gradients(
        task, models, Batch(broken, batch.targets, batch.weights, True), CLIP, clips_samples=True
    )
    # Without that sample; what is clipped the others depends on their number a little.
    expected = sum_samples(task, Batch(batch.inputs, batch.targets, weights, False))
    np.testing.assert_allclose(found.values.flatten().numpy(), expected, rtol=1e-6, atol=1e-12)
    assert found.num_broken.item() == 1


@pytest.mark.parametrize("size", [1000, 100_000])
def test_another_number_of_samples_leaves_the_parts_of_the_others(size: int) -> None:
    """As under Poisson sampling: what clips a sample must not depend on how many there are."""
    task = TASKS["linear"]()
    inputs = task.prepare(torch.ones(size + 1, 4)).unsqueeze(0)
    inputs[0, -1] *= -1  # opposite to the rest
    found = []
    for count in (size, size + 1):
        weights = torch.full((1, count), 1 / size, dtype=torch.float64)
        targets = torch.zeros(1, count)
        batch = Batch(inputs[:, :count], targets, weights, True, most_samples=20 * size)
        found.append(sum_samples(task, batch))
    assert np.linalg.norm(found[1] - found[0]) <= 0.1 / size


@pytest.mark.parametrize("l2", [0.0, 1e-4])
def test_squares_that_underflow_do_not_hide_a_long_gradient(l2: float) -> None:
    task, clip = LinearClassifier(2, 2, l2=l2), torch.tensor([1e-9], dtype=torch.float64)
    inputs = torch.tensor([[[1e154, 0.0, 1.0]]], dtype=torch.float64)
    models = torch.tensor([[[0.0, 0.0, -373.0]]], dtype=torch.float64)
    batch = Batch(inputs, torch.zeros(1, 1).double(), torch.ones(1, 1).double(), True)
    found = compute_gradients(task, models, batch, clip, clips_samples=True)
    assert float(found.values.norm()) <= 1e-9


def test_a_task_that_clips_no_samples_is_refused_for_a_budget_of_samples() -> None:
    class Ignorant:
        def gradient(
            self, parameters: Tensor, _: Batch, *, sample_clip: object = None
        ) -> Gradients:
            assert sample_clip is not None
            return Gradients(torch.ones_like(parameters))

    task: Any = Ignorant()
    batch: Any = None
    with pytest.raises(InvalidArgumentError, match="ignores sample_clip"):
        compute_gradients(task, torch.zeros(1, 1, 3), batch, CLIP, clips_samples=True)


@pytest.mark.parametrize("length", [5, 4096, 4097, 300_000])
def test_a_clipped_gradient_is_never_longer_than_the_clip(length: int) -> None:
    class Given:
        def gradient(self, *_: object, **__: object) -> Any:
            return Gradients(values.view(1, 1, -1))

    for seed in range(5):
        values = torch.randn(length, generator=torch.Generator().manual_seed(seed))
        values[0] = 1e-20
        task: Any = Given()
        nothing: Any = None
        found = compute_gradients(task, nothing, nothing, CLIP, clips_samples=False)
        exact = found.values.double().flatten().numpy() * found.factors.item()
        norm = float(np.sqrt(np.sum(exact.astype(np.longdouble) ** 2)))
        assert 0.1 * (1 - 1e-9) < norm <= 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_and_plain_half_steps_release_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(100_000, generator=generator, dtype=torch.float64)
    gradient = 0.1 * torch.randn(100_000, generator=generator)
    model, factor = torch.zeros(100_000, dtype=dtype), torch.tensor([0.3], dtype=torch.float64)
    steps = []
    for is_compiled in (True, False):
        if not is_compiled:
            monkeypatch.setattr("corn.learn.step.find_compiled", lambda: None)
        own = gradient.to(dtype, copy=True)  # its memory is used again
        steps.append(take_half_step(model, own, factor, noise, grid=2.0**-6, step_size=-1.0))
    assert torch.equal(*steps)
    grid = torch.tensor([2.0**-6], dtype=torch.float64)
    expected = release(gradient.to(dtype), factor, noise, grid)
    assert torch.equal(steps[0].double(), expected)
