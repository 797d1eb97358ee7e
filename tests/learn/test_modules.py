"""Modules of the user: any layers, losses and samples, vectorised or in a loop."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from corn.errors import CornWarning, InvalidArgumentError
from corn.learn import load_parameters, train
from corn.learn.batches import Batch
from corn.learn.tasks import MeanLoss, ModuleTask
from corn.learn.tasks import module as module_task
from corn.learn.user_model import UserModel
from corn.privacy import PrivacyBudget

CELLS, VARIANTS, BATCH = 3, 2, 5
CLIP = torch.tensor([0.3, torch.inf]).double()
AGENT = PrivacyBudget(10, 1e-5, num_steps=4, clip=0.5)
SAMPLE = PrivacyBudget(
    10, 1e-5, num_steps=4, clip=0.5, unit="sample", batch_size=8, sampling="every-step"
)


class Language(nn.Module):
    """A language model with one matrix for input and output tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.output(self.norm(self.embedding(tokens))).flatten(0, 1)


def test_fingerprints_see_constants_of_any_type_and_weights_of_a_loss() -> None:
    frozen = nn.Linear(3, 3).to(torch.bfloat16).requires_grad_(requires_grad=False)
    model = nn.Sequential(frozen, nn.Linear(3, 2))
    losses = [nn.CrossEntropyLoss(weight=torch.tensor([1.0, weight])) for weight in (2.0, 2.0, 5.0)]
    first, same, other = (ModuleTask(model, loss).fingerprint() for loss in losses)
    assert first == same != other
    assert len(UserModel(model).fingerprint()) == 32


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"class": self.first(x), "size": self.second(x)}


class Rotated(nn.Module):
    """A module with a buffer that must be converted to the requested precision."""

    rotation: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("rotation", torch.eye(3).flip(0))

    def forward(self, x: Tensor) -> Any:
        return self.layer(x @ self.rotation)


class Deciding(nn.Module):
    """A module that branches on the values of its data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) if x.abs().sum() > 5 else self.layer(-x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory, self.layer = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.memory(x)[0][:, -1])


def two_losses(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    data = functional.cross_entropy(outputs["class"], targets)
    return data + outputs["size"].square().mean()


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(CELLS, BATCH, *shape, generator=generator, dtype=torch.float64)


def whole(below: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(below)
    return torch.randint(0, below, (CELLS, BATCH, *shape), generator=generator)


def tokens_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets.flatten())


CASES: dict[str, tuple[nn.Module, MeanLoss, Tensor, Tensor]] = {
    "classes": (nn.Linear(3, 4), functional.cross_entropy, numbers(3), whole(4)),
    "regression": (nn.Linear(3, 1), functional.mse_loss, numbers(3), numbers(1)),
    "huber": (nn.Linear(3, 2), functional.huber_loss, numbers(3), numbers(2)),
    "inputs as targets": (
        nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 3)),
        functional.mse_loss,
        numbers(3),
        numbers(3),
    ),
    "images": (
        nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
        ),
        functional.cross_entropy,
        numbers(1, 6, 6),
        whole(3),
    ),
    "tokens, shared weights": (Language(), tokens_loss, whole(7, 5), whole(7, 5)),
    "several outputs": (TwoHeads(), two_losses, numbers(3), whole(2)),
    "buffer": (Rotated(), functional.cross_entropy, numbers(3), whole(2)),
}
SLOW_CASES: dict[str, tuple[nn.Module, MeanLoss, Tensor, Tensor]] = {
    "control flow": (Deciding(), functional.cross_entropy, numbers(3), whole(2)),
    "recurrent": (Recurrent(), functional.cross_entropy, numbers(4, 3), whole(2)),
}


def make_models(task: ModuleTask) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (CELLS, VARIANTS, task.num_parameters)
    return task.initialize(0) + 0.1 * torch.randn(*shape, generator=generator, dtype=torch.float64)


def make_batch(inputs: Tensor, targets: Tensor, *, padded: bool) -> Batch:
    weights = torch.full((CELLS, BATCH), 1 / BATCH).double()
    if padded:
        weights[1] = torch.tensor([0.5, 0.5, 0, 0, 0])
    return Batch(inputs, targets, weights, is_average=not padded)


def slope_of(loss: Tensor, model: nn.Module) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def micro_batches(
    model: nn.Module, loss: MeanLoss, theta: Tensor, batch: Batch, clip: Tensor | None
) -> Tensor:
    """Run one plain backward pass of the module itself for every sample of every model."""
    result = torch.zeros_like(theta)
    for cell, trial, row in np.ndindex(CELLS, VARIANTS, BATCH):
        own = load_parameters(model.double(), theta[cell, trial])
        sample = slice(row, row + 1)
        g = slope_of(loss(own(batch.inputs[cell, sample]), batch.targets[cell, sample]), own)
        if clip is not None:
            g = g * min(1.0, float(clip[trial] / g.norm()))
        result[cell, trial] += batch.weights[cell, row] * g
    return result


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_micro_batches(name: str, padded: bool) -> None:
    model, loss, inputs, targets = CASES[name]
    task = ModuleTask(model.double(), loss)
    theta, batch = make_models(task), make_batch(inputs, targets, padded=padded)
    for clip in (None, CLIP):
        found = task.gradient(theta, batch, sample_clip=clip).values
        torch.testing.assert_close(found, micro_batches(model, loss, theta, batch, clip))


@pytest.mark.parametrize("name", SLOW_CASES)
def test_a_module_that_cannot_be_vectorised_runs_in_a_loop_with_a_warning(name: str) -> None:
    model, loss, inputs, targets = SLOW_CASES[name]
    task = ModuleTask(model.double(), loss)
    theta, batch = make_models(task), make_batch(inputs, targets, padded=True)
    with pytest.warns(CornWarning):
        task.gradient(theta, batch)
    # The branch of a whole batch is not that of its samples.
    for clip in (None, CLIP) if name == "recurrent" else (CLIP,):
        found = task.gradient(theta, batch, sample_clip=clip).values
        torch.testing.assert_close(found, micro_batches(model, loss, theta, batch, clip))
    scores = task.evaluate(theta[0], inputs[0], targets[0])
    for vector, found in zip(theta[0], scores.loss, strict=True):
        expected = loss(load_parameters(model, vector)(inputs[0]), targets[0])
        torch.testing.assert_close(found, expected.detach())
    assert scores.accuracy is not None


@pytest.mark.parametrize("limit", [1, 100, 1000])
def test_pieces_fit_in_memory_and_do_not_change_the_result(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loss, inputs, targets = CASES["images"]
    task = ModuleTask(model.double(), loss)
    theta, batch = make_models(task), make_batch(inputs, targets, padded=True)
    clips = (None, CLIP)
    expected = [task.gradient(theta, batch, sample_clip=clip).values for clip in clips]
    monkeypatch.setattr(module_task, "_ELEMENTS_AT_ONCE", limit)
    found = [task.gradient(theta, batch, sample_clip=clip).values for clip in clips]
    torch.testing.assert_close(found, expected)
    covered = torch.zeros(CELLS, VARIANTS, BATCH)
    for piece in task._pieces(theta, batch.inputs, 10, split_rows=True):
        assert covered[piece].numel() <= max(1, limit // 10)
        covered[piece] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize("budget", [AGENT, SAMPLE])
def test_frozen_parameters_stay_and_get_no_noise(budget: PrivacyBudget) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    before = dict(model.named_parameters())
    result = train(
        "ring:4", budget, model=model, loss=functional.cross_entropy, datasets=make_datasets()
    )
    assert result.parameters.shape == (1, 4, 10)
    trained = dict(load_parameters(model, result.parameters[0, 1]).named_parameters())
    kept = [name for name in before if torch.equal(trained[name], before[name])]
    assert kept == ["0.weight", "0.bias"]
    with pytest.raises(InvalidArgumentError):
        load_parameters(model, result.parameters[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loaded_model_has_its_own_memory_and_type(dtype: torch.dtype) -> None:
    vector = torch.zeros(3, dtype=dtype)
    parameter = next(load_parameters(nn.Linear(2, 1), vector).parameters())
    with torch.no_grad():
        parameter.add_(1)
    assert parameter.dtype == torch.float32
    assert not vector.any()


def make_datasets() -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((20, 3)), rng.integers(0, 2, 20)) for _ in range(4)]


@pytest.mark.parametrize("budget", [AGENT, SAMPLE])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tokens_and_buffers_in_both_precisions(budget: PrivacyBudget, dtype: str) -> None:
    tokens = [(torch.randint(0, 7, (size, 5)),) * 2 for size in (3, 20, 9, 8)]
    for model, loss, data in (
        (Language(), tokens_loss, tokens),
        (Rotated(), functional.cross_entropy, make_datasets()),
    ):
        result = train("ring:4", budget, model=model, loss=loss, datasets=data, dtype=dtype)
        assert str(result.parameters.dtype) == f"torch.{dtype}"
        assert np.isfinite(float(result.last_rows[0]["train_loss"]))


def test_a_single_output_has_no_accuracy() -> None:
    """The argmax over a single output is always 0, so accuracy would be the share of class 0."""
    task = ModuleTask(
        nn.Linear(3, 1).double(), lambda o, y: functional.mse_loss(o.squeeze(-1), y.double())
    )
    scores = task.evaluate(task.initialize(0)[None], numbers(3)[0], whole(2)[0])
    assert scores.accuracy is None


class Centring(nn.Module):
    """A model that mixes the samples of a mini-batch, which agent-level clipping allows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x - x.mean(dim=0))


def test_a_model_that_mixes_samples_gets_one_agent_s_samples_without_padding() -> None:
    """Otherwise one agent's data would change another agent's gradient, which ε does not cover."""
    model = Centring().double()
    task, inputs, targets = ModuleTask(model, functional.cross_entropy), numbers(3), whole(2)
    theta, batch = make_models(task), make_batch(inputs, targets, padded=True)
    found = task.gradient(theta, batch).values[1, 0]
    own = load_parameters(model, theta[1, 0])
    expected = slope_of(functional.cross_entropy(own(inputs[1, :2]), targets[1, :2]), own)
    torch.testing.assert_close(found, expected)


class Counting(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.layer(x - self.mean)


class SetOnce(nn.Linear):
    """A layer that scales all samples by a number of the first one that it meets."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.scale: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = float(x.detach().mean())
        return super().forward(x * self.scale)


class RunningLoss:
    """A loss relative to a running mean, which earlier samples have set."""

    def __init__(self) -> None:
        self.mean = 1.0

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        loss = functional.cross_entropy(outputs, targets)
        self.mean = 0.99 * self.mean + 0.01 * float(loss.detach())
        return loss / self.mean


FROZEN = nn.Linear(3, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (Counting(), functional.cross_entropy, r"without changes of its buffers.*'mean'"),
        (
            nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)),
            functional.cross_entropy,
            "must not draw random numbers",
        ),
        (nn.LazyLinear(2), functional.cross_entropy, "found .weight. without a shape"),
        (nn.Linear(4, 2), functional.cross_entropy, r"found inputs float32 of shape \(3,\)"),
        (nn.Linear(3, 1), functional.cross_entropy, "must accept the samples"),
        (FROZEN, functional.cross_entropy, "parameters that are not frozen"),
        (
            nn.BatchNorm1d(3),
            functional.cross_entropy,
            "batch normalisation, which mixes samples, found it in 'model'",
        ),
        (nn.Linear(3, 2), nn.CrossEntropyLoss(reduction="none"), r"one number.*found shape \(2,\)"),
        (nn.Linear(3, 2), nn.CrossEntropyLoss(reduction="sum"), "found the sum"),
        (nn.Linear(3, 2), RunningLoss(), "must not keep state between calls"),
        (SetOnce(), functional.cross_entropy, "must not keep state between calls"),
    ],
)
@pytest.mark.parametrize("budget", [AGENT, SAMPLE])
def test_unsuitable_modules_and_losses_are_refused(
    model: nn.Module, loss: MeanLoss, message: str, budget: PrivacyBudget
) -> None:
    before = torch.get_rng_state()
    with pytest.raises(InvalidArgumentError, match=message):
        train("ring:4", budget, model=model, loss=loss, datasets=make_datasets())
    assert torch.equal(torch.get_rng_state(), before)


def compare_in_batch(outputs: Any, targets: Tensor) -> Tensor:
    """Return a loss by which the samples of a batch repel each other."""
    repelled: Tensor = (outputs @ outputs.T).mean()
    return functional.cross_entropy(outputs, targets) + repelled


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([0.01, 1.0, 100.0])),
        nn.CrossEntropyLoss(ignore_index=0),
        compare_in_batch,
    ],
)
def test_clipped_samples_are_alone_in_the_loss(loss: MeanLoss) -> None:
    """Whatever a mean loss divides by, replacing a sample moves the sum by 2C/B at most."""
    task, vector = ModuleTask(nn.Linear(3, 3), loss), torch.zeros(1, 1, 12)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, BATCH, 3, generator=generator) / 10
    weights = torch.full((1, BATCH), 1 / BATCH, dtype=torch.float64)
    found = []
    for label in range(3):
        X, y = inputs.clone(), torch.tensor([[label, 1, 1, 1, 1]])
        X[0, 0] = 100 * torch.randn(3, generator=generator)
        batch = Batch(X, y, weights, is_average=True, most_samples=BATCH)
        clip = torch.ones(1, dtype=torch.float64)
        found.append(task.gradient(vector, batch, sample_clip=clip).values.view(-1))
    moves = torch.pdist(torch.stack(found))
    assert 0 < float(moves.max()) <= 2 / BATCH
