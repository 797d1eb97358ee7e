"""One step up to the message: a release depends on the data as little as accounting assumes."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from corn.errors import InvalidArgumentError
from corn.learn.batches import Batch
from corn.learn.step import (
    clip_factors,
    compute_gradients,
    gradient_norms,
    release,
    take_half_step,
)
from corn.learn.tasks import LinearClassifier, ModuleTask, Quadratic, ShallowNetwork, Task
from corn.learn.tasks.module import differentiate, map_in_a_loop
from corn.learn.tasks.protocol import Gradients

CLIP = torch.tensor([0.1], dtype=torch.float64)
TASKS: dict[str, Any] = {
    "linear": lambda: LinearClassifier(4, 2, l2=0.01),
    "network": lambda: ShallowNetwork(4, 3, num_hidden=5),
    "module": lambda: ModuleTask(nn.Linear(4, 3), nn.functional.cross_entropy),
    "quadratic": lambda: Quadratic(4),
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
def test_one_sample_changes_the_sum_by_at_most_its_sensitivity(name: str, size: int) -> None:
    """In float32 the rounding of the sum alone can exceed the sensitivity."""
    task = TASKS[name]()
    batch = make_batch(task, size)
    inputs = batch.inputs.clone()
    inputs[0, size // 2] *= -1
    replaced = Batch(inputs, batch.targets, batch.weights, is_average=True)
    moved = np.linalg.norm(sum_samples(task, batch) - sum_samples(task, replaced))
    assert 0 < moved <= 2 * 0.1 / size


def test_float32_sums_exceed_the_sensitivity() -> None:
    """Removing one sample changes the rounding of the sum of all others: hence float64."""
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
        task._map, task._grad, task._num_kept = map_in_a_loop, differentiate, 1
    broken = batch.inputs.clone()
    broken[0, 3] = value
    weights = batch.weights.clone()
    weights[0, 3] = 0
    models = 0.3 * torch.ones(1, 1, task.num_parameters)
    found = compute_gradients(
        task, models, Batch(broken, batch.targets, batch.weights, True), CLIP, clips_samples=True
    )
    # Without that sample. The factors of the others would depend on their number a little.
    expected = sum_samples(task, Batch(batch.inputs, batch.targets, weights, False))
    np.testing.assert_allclose(found.values.flatten().numpy(), expected, rtol=1e-6, atol=1e-12)
    assert found.num_broken.item() == 1


@pytest.mark.parametrize("size", [1000, 100_000])
def test_clipping_does_not_depend_on_the_number_of_samples(size: int) -> None:
    """Under Poisson sampling the clipping of one sample must not depend on the number of others."""
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
def test_a_gradient_whose_squares_underflow_is_clipped(l2: float) -> None:
    task, clip = LinearClassifier(2, 2, l2=l2), torch.tensor([1e-9], dtype=torch.float64)
    inputs = torch.tensor([[[1e154, 0.0, 1.0]]], dtype=torch.float64)
    models = torch.tensor([[[0.0, 0.0, -373.0]]], dtype=torch.float64)
    batch = Batch(inputs, torch.zeros(1, 1).double(), torch.ones(1, 1).double(), True)
    found = compute_gradients(task, models, batch, clip, clips_samples=True)
    assert float(found.values.norm()) <= 1e-9


def test_a_sample_budget_needs_a_task_that_clips_samples() -> None:
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


def test_clipped_samples_must_be_summed_in_the_type_of_the_clip() -> None:
    class Narrow:
        def gradient(self, *_: object, **__: object) -> Gradients:
            values, ones = torch.ones(1, 1, 3), torch.ones(1, 1)
            return Gradients(values, fraction_clipped=ones, num_broken=ones)

    task: Any = Narrow()
    batch: Any = None
    with pytest.raises(InvalidArgumentError, match="sums of clipped samples must be in"):
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
def test_half_steps_release_the_bits_of_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(100_000, generator=generator, dtype=torch.float64)
    gradient = 0.1 * torch.randn(100_000, generator=generator)
    model, factor = torch.zeros(100_000, dtype=dtype), torch.tensor([0.3], dtype=torch.float64)
    own = gradient.to(dtype, copy=True)  # its memory is used again
    step = take_half_step(model, own, factor, noise, grid=2.0**-6, step_size=-1.0)
    grid = torch.tensor([2.0**-6], dtype=torch.float64)
    expected = release(gradient.to(dtype), factor, noise, grid)
    assert torch.equal(step.double(), expected)


@given(norms=st.lists(st.floats(0, 1e6), min_size=1, max_size=20), clip=st.floats(1e-3, 1e3))
def test_clipped_norms_never_exceed_the_clip(norms: list[float], clip: float) -> None:
    for dtype in (torch.float32, torch.float64):
        given_norms = torch.tensor(norms, dtype=dtype)
        factors = clip_factors(given_norms, clip)
        assert (factors <= 1).all()
        shortened = factors < 1
        assert ((given_norms * factors)[shortened].double() <= clip).all()
        assert (given_norms[~shortened].double() <= clip).all()


@pytest.mark.parametrize("size", [3, 4096, 7850, 25_450, 1_000_000])
def test_long_gradients_are_clipped_to_the_clip_in_single_precision(size: int) -> None:
    """A plain sum of a million equal squares, the worst case, is too small by 7e-4."""
    generator = torch.Generator().manual_seed(0)
    for gradient in (torch.full((1, size), 0.3), torch.randn(1, size, generator=generator)):
        norms = gradient_norms(gradient)
        clipped = gradient * clip_factors(norms, 0.1).unsqueeze(-1)
        assert torch.linalg.vector_norm(clipped.double()) <= 0.1
        assert torch.linalg.vector_norm(clipped.double()) >= 0.1 * (1 - 1e-5)


@pytest.mark.parametrize("size", [1, 63, 64, 4097, 9999, 1_000_000])
def test_norms_in_double_precision_are_those_of_exact_sums(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(2, size, generator=generator) * torch.tensor([[1e-30], [1e30]])
    exact = [math.sqrt(math.fsum(float(x) ** 2 for x in row.tolist())) for row in gradients]
    found = gradient_norms(gradients, torch.float64)
    assert found.tolist() == pytest.approx(exact, rel=1e-13)
    gradients[0, -1] = torch.nan
    assert torch.isfinite(gradient_norms(gradients, torch.float64)).tolist() == [False, True]


def test_an_infinite_clip_clips_nothing() -> None:
    norms = torch.tensor([0.0, 1.0, 1e30])
    assert clip_factors(norms, torch.tensor(torch.inf)).tolist() == [1, 1, 1]
