"""Gradients of every task against automatic differentiation, one sample at a time."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from corn.errors import InvalidArgumentError
from corn.learn.batches import Batch
from corn.learn.tasks import (
    LinearClassifier,
    Quadratic,
    ShallowNetwork,
    Task,
    small_cnn,
    small_cnn_task,
)

CELLS, VARIANTS, BATCH, FEATURES, CLASSES = 3, 2, 6, 5, 3
L2 = 0.05


def linear_loss(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    logits = theta.view(-1, FEATURES + 1) @ x
    if len(logits) == 1:
        data = functional.binary_cross_entropy_with_logits(logits[0], y.double())
    else:
        data = functional.cross_entropy(logits, y)
    return data + L2 / 2 * theta.square().sum()


def network_loss(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    first, second = theta[: 4 * (FEATURES + 1)], theta[4 * (FEATURES + 1) :]
    hidden = (first.view(4, FEATURES + 1) @ x).relu()
    output = second.view(CLASSES, 5)
    return functional.cross_entropy(output[:, :-1] @ hidden + output[:, -1], y)


def quadratic_loss(theta: Tensor, sample: Tensor, _: Tensor) -> Tensor:
    offset = theta - sample[4:]
    return offset @ sample[:4].view(2, 2) @ offset


CASES: dict[str, tuple[Task, Callable[[Tensor, Tensor, Tensor], Tensor], int]] = {
    "logistic": (LinearClassifier(FEATURES, 2, l2=L2), linear_loss, 2),
    "softmax": (LinearClassifier(FEATURES, CLASSES, l2=L2), linear_loss, CLASSES),
    "network": (ShallowNetwork(FEATURES, CLASSES, num_hidden=4), network_loss, CLASSES),
    "quadratic": (Quadratic(6), quadratic_loss, 1),
}


def make_batch(name: str, *, padded: bool) -> tuple[Task, Tensor, Batch]:
    task, _, classes = CASES[name]
    generator = torch.Generator().manual_seed(1)
    shape = (CELLS, BATCH, FEATURES)
    X = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if name == "quadratic":
        symmetric = torch.tensor([3.0, 1.0, 1.0, 2.0]).double().expand(CELLS, BATCH, 4)
        X = torch.cat([symmetric, X[..., :2]], dim=-1)
    else:
        X = torch.stack([task.prepare(own) for own in X])
    y = torch.randint(0, classes, (CELLS, BATCH), generator=generator)
    weights = torch.full((CELLS, BATCH), 1 / BATCH).double()
    if padded:
        weights[0, 4:] = 0
    theta = torch.randn(
        CELLS, VARIANTS, task.num_parameters, generator=generator, dtype=torch.float64
    )
    return task, theta, Batch(X, y, weights, is_average=not padded)


def micro_batches(name: str, theta: Tensor, batch: Batch, clip: Tensor | None) -> Tensor:
    """Run one backward pass for every sample of every model."""
    loss, result = CASES[name][1], torch.zeros_like(theta)
    for cell, trial, row in np.ndindex(CELLS, VARIANTS, BATCH):
        leaf = theta[cell, trial].clone().requires_grad_(True)
        (g,) = torch.autograd.grad(
            loss(leaf, batch.inputs[cell, row], batch.targets[cell, row]), leaf
        )
        if clip is not None:
            g = g * min(1.0, float(clip[trial] / g.norm()))
        result[cell, trial] += batch.weights[cell, row] * g
    return result


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_a_micro_batch_loop(name: str, padded: bool) -> None:
    task, theta, batch = make_batch(name, padded=padded)
    expected = micro_batches(name, theta, batch, None)
    if name in ("logistic", "softmax") and padded:  # an average: the penalty counts in full
        expected += L2 * (1 - batch.weights.sum(dim=1))[:, None, None] * theta
    torch.testing.assert_close(task.gradient(theta, batch).values, expected)
    clip = torch.tensor([0.7, torch.inf]).double()
    found = task.gradient(theta, batch, sample_clip=clip)
    expected = micro_batches(name, theta, batch, clip)
    torch.testing.assert_close(found.values, expected, rtol=1e-9, atol=1e-9)
    assert found.fraction_clipped is not None
    assert found.fraction_clipped.shape == (CELLS, VARIANTS)
    assert found.fraction_clipped[:, 0].max() > 0
    assert found.fraction_clipped[:, 1].max() == 0


def test_a_sample_that_nearly_cancels_the_penalty_is_clipped() -> None:
    """A norm of a millionth of its two parts is lost in rounding."""
    residual, clip = 0.3, 1e-5
    squared = residual * math.log((1 - residual) / residual)  # so that σ(θ·x) is the residual
    theta = torch.full((FEATURES + 1,), math.sqrt((squared - residual**2) / FEATURES))
    theta[-1] = -residual
    generator = torch.Generator().manual_seed(0)
    for size in (0.0, 1e-6, 1e-5, 1e-4, 1e-3):
        x = -theta / residual + size * torch.randn(500, FEATURES + 1, generator=generator)
        x[:, -1] = 1
        batch = Batch(x.unsqueeze(1), torch.zeros(500, 1), torch.ones(500, 1), is_average=True)
        found = LinearClassifier(FEATURES, 2, l2=1.0).gradient(
            theta.expand(500, 1, -1).contiguous(), batch, sample_clip=torch.tensor([clip])
        )
        assert float(found.values.double().norm(dim=-1).max()) <= clip


@pytest.mark.parametrize("name", CASES)
def test_evaluation_is_the_mean_loss(name: str) -> None:
    task, theta, batch = make_batch(name, padded=False)
    inputs, targets = batch.inputs.flatten(0, 1), batch.targets.flatten()
    scores = task.evaluate(theta.flatten(0, 1), inputs, targets)
    loss = CASES[name][1]
    penalised = name in ("logistic", "softmax")
    for model, found in zip(theta.flatten(0, 1), scores.loss, strict=True):
        losses = [loss(model, x, y) for x, y in zip(inputs, targets, strict=True)]
        penalty = L2 / 2 * model.square().sum() if penalised else 0
        torch.testing.assert_close(found, torch.stack(losses).mean() - penalty)
    assert (scores.accuracy is None) == (name == "quadratic")


def test_accuracy_counts_right_answers() -> None:
    task = LinearClassifier(1, 2)
    inputs = task.prepare(torch.tensor([[-1.0], [2.0], [3.0], [-4.0]]))
    scores = task.evaluate(torch.tensor([[1.0, 0.0]]), inputs, torch.tensor([0, 1, 0, 0]))
    assert scores.accuracy is not None
    assert scores.accuracy.tolist() == [0.75]


def test_a_convolutional_network_trains_and_is_clipped() -> None:
    task = small_cnn_task((8, 8), 10)
    theta = task.initialize(0).float().repeat(2, 1, 1)
    X = torch.rand(2, 3, 1, 8, 8)
    batch = Batch(X, torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.full((2, 3), 1 / 3), True)
    plain = task.gradient(theta, batch).values
    clipped = task.gradient(theta, batch, sample_clip=torch.tensor([1e6])).values
    torch.testing.assert_close(plain, clipped, rtol=1e-3, atol=1e-5)
    model = small_cnn((28, 28), 10)
    assert sum(p.numel() for p in model.parameters()) == 9098


@pytest.mark.parametrize("task", [LinearClassifier(3, 2), ShallowNetwork(3, 2)])
def test_targets_other_than_classes_are_refused(task: LinearClassifier | ShallowNetwork) -> None:
    """Logistic regression on −1 and 1 would minimise a loss that has no minimum."""
    task.check_targets(torch.tensor([0, 1, 1]))
    task.check_targets(torch.tensor([0.0, 1.0]))
    for targets in ([-1, 1], [0, 2], [0.5, 1.0], [[0, 1]]):
        with pytest.raises(InvalidArgumentError, match="classes, one of 0 … 1 for each sample"):
            task.check_targets(torch.tensor(targets))
    with pytest.raises(InvalidArgumentError, match="real numbers, found torch"):
        task.prepare(torch.zeros(4, 3, dtype=torch.uint8))


def test_initial_parameters_follow_the_seed_alone() -> None:
    for task in (ShallowNetwork(4, 3), small_cnn_task((8, 8), 10)):
        before = torch.get_rng_state()
        assert torch.equal(task.initialize(3), task.initialize(3))
        assert not torch.equal(task.initialize(3), task.initialize(4))
        assert torch.equal(torch.get_rng_state(), before)


def test_the_paper_s_quadratic() -> None:
    task = Quadratic(20)
    data = task.agent_data(torch.float64)
    scores = task.evaluate(task.initialize(0)[None], data.inputs, data.targets)
    assert scores.loss.item() == pytest.approx(task.minimum)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LinearClassifier(0, 2),
        lambda: LinearClassifier(3, 2, l2=-1),
        lambda: ShallowNetwork(3, 1),
        lambda: Quadratic(5),
        lambda: small_cnn((2, 2), 10),
        lambda: LinearClassifier(3, 2).prepare(torch.zeros(4, 5)),
    ],
)
def test_bad_arguments(make: object) -> None:
    with pytest.raises(InvalidArgumentError):
        make()  # type: ignore[operator]


def test_a_sample_does_not_change_the_gradients_of_others_in_its_batch() -> None:
    """Poisson coins move samples to other places, where float32 products round differently."""
    generator = torch.Generator().manual_seed(0)
    width, count, features = 199, 128, 785
    task = LinearClassifier(features - 1, 10)
    theta = 0.3 * torch.randn(1, 1, task.num_parameters, generator=generator)
    inputs = torch.randn(width, features, generator=generator)
    targets = torch.randint(10, (width,), generator=generator)

    def release(rows: list[int]) -> Tensor:
        table = torch.tensor(rows + [0] * (width - len(rows)))
        weights = (torch.arange(width) < len(rows)).double()[None] / count
        batch = Batch(inputs[table][None], targets[table][None], weights, False, 4176)
        clip = torch.ones(1, dtype=torch.float64)
        return task.gradient(theta, batch, sample_clip=clip).values.flatten()

    others = list(range(1, count + 1))
    moved = release([0, *others]) - release([0]) - release(others)
    assert float(moved.norm()) * count < 1e-10
