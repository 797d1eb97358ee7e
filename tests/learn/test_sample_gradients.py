"""Gradients of single samples from one backward pass, against one backward pass per sample."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from corn.errors import InvalidArgumentError
from corn.learn.batches import Batch
from corn.learn.user_model import SampleGradients, UserModel, find_owners


class Adapter(nn.Module):
    """A frozen linear layer with a trained correction of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 4))
        self.up = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0].mean(dim=1)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][:, -1]  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))  # type: ignore[no-any-return]


VECTORS, SEQUENCES, IMAGES = (5, 4), (5, 6, 4), (5, 4, 7, 6)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), VECTORS),
    "without bias": (lambda: nn.Linear(4, 3, bias=False), VECTORS),
    "of sequences": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Flatten()), SEQUENCES),
    "in place": (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True)), VECTORS),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), IMAGES),
    "groups": (lambda: nn.Conv2d(4, 6, (2, 3), dilation=2, groups=2), IMAGES),
    "same padding": (lambda: nn.Conv2d(4, 3, 3, padding="same"), IMAGES),
    "convolution in 1d": (lambda: nn.Conv1d(6, 2, 3), SEQUENCES),
    "group norm": (lambda: nn.GroupNorm(2, 4), IMAGES),
    "layer norm": (lambda: nn.LayerNorm(4), SEQUENCES),
    "layer norm of vectors": (lambda: nn.LayerNorm(4), VECTORS),
    "adapter": (Adapter, VECTORS),
    "attention": (Attention, SEQUENCES),
    "recurrent": (Recurrent, SEQUENCES),
    "tied": (Tied, VECTORS),
}


def squares(outputs: Tensor) -> Tensor:
    """Return one loss for each sample."""
    return outputs.square().flatten(1).mean(dim=1)


def one_by_one(model: nn.Module, inputs: Tensor) -> Tensor:
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for k in range(len(inputs)):
        loss = model(inputs[k : k + 1]).square().mean()
        slopes = torch.autograd.grad(loss, trained)
        rows.append(torch.cat([slope.flatten() for slope in slopes]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_gives_the_gradient_of_each_sample(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, inputs = make(), torch.randn(shape)
    expected = one_by_one(model, inputs)
    hooks = SampleGradients(model)
    for _ in range(2):
        model.zero_grad()
        found = hooks.take(squares(model(inputs)))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_embeddings() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 3, padding_idx=0), nn.Flatten())
    tokens = torch.randint(0, 7, (5, 4))
    expected, hooks = one_by_one(model, tokens), SampleGradients(model)
    torch.testing.assert_close(hooks.take(squares(model(tokens))), expected, rtol=1e-4, atol=1e-6)


def test_evaluation_leaves_no_trace() -> None:
    model = nn.Linear(3, 2)
    hooks = SampleGradients(model)
    with torch.no_grad():
        model(torch.randn(4, 3))
    assert hooks.is_empty


def test_parameters_used_outside_of_their_layer_are_noticed() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.layer.weight.square().sum()  # type: ignore[no-any-return]

    model = Penalised()
    hooks = SampleGradients(model)
    losses = squares(model(torch.randn(4, 3)))
    with pytest.raises(InvalidArgumentError, match="'layer' do not add up"):
        hooks.take(losses)


def test_samples_along_another_dimension_are_refused() -> None:
    model = nn.Linear(3, 2)
    hooks = SampleGradients(model)
    losses = model(torch.randn(6, 4, 3)).mean(dim=(0, 2))
    with pytest.raises(InvalidArgumentError, match="must take the 4 samples"):
        hooks.take(losses)


class TimeFirst(nn.Module):
    """Layers that take (time, batch, features), between inputs and outputs that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1).mean(dim=1)  # type: ignore[no-any-return]


class Centred(nn.Module):
    """Outputs that are compared with the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.layer(x)
        return scores - scores.mean(dim=0)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "shape"), [(TimeFirst(), (5, 5, 4)), (Centred(), (5, 4)), (Centred(), (2, 4))]
)
def test_modules_that_mix_samples_are_refused(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Also where there are as many times as samples, so that no length shows it."""
    SampleGradients(model)
    with pytest.raises(InvalidArgumentError, match="must belong to one sample"):
        model(torch.randn(shape))


def test_the_check_of_independence_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(20, 2))
    hooks, tokens = SampleGradients(model), torch.randint(9, (5, 5))
    torch.manual_seed(1)
    checked = model(tokens)
    torch.manual_seed(1)
    assert torch.equal(model(tokens), checked)
    assert hooks.take(squares(checked)).any()


def test_inputs_changed_in_place_are_refused() -> None:
    model = nn.Linear(3, 3)
    SampleGradients(model)
    inputs = torch.randn(4, 3)
    outputs = model(inputs)
    inputs.mul_(2)
    with pytest.raises(InvalidArgumentError, match="changed in place"):
        outputs.mean().backward()


def test_a_module_with_parameters_of_its_own_is_differentiated_as_a_whole() -> None:
    attention = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    assert set(find_owners(attention)) == {"self_attn", "linear1", "linear2", "norm1", "norm2"}
    assert set(find_owners(Adapter())) == {""}


def test_gradients_of_single_layers_are_refused() -> None:
    """The check that samples stay apart runs before the whole module."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    hooks, first = SampleGradients(model), model[0](torch.randn(5, 4))
    with pytest.raises(InvalidArgumentError, match=r"call model\(inputs\)"):
        hooks.take(squares(model[2](first - first.mean(dim=0))))


COUNT, CLASSES, CLIP = 6, 3, 0.5
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
WEIGHT = torch.tensor([0.1, 1.0, 10.0])


def contrast(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return a loss by which samples of one class attract each other."""
    scores = outputs @ outputs.T
    return functional.cross_entropy(scores, (labels[:, None] == labels).float(), reduction="none")


# Losses that have one number for each sample, but not of each sample alone.
MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mean": lambda z, y: functional.cross_entropy(z, y).expand(len(z)),
    "weighted mean": lambda z, y: functional.cross_entropy(z, y, weight=WEIGHT).expand(len(z)),
    "sum": lambda z, y: functional.cross_entropy(z, y, reduction="sum").expand(len(z)),
    "ignored": lambda z, y: functional.cross_entropy(z, y, ignore_index=0).repeat(len(z)),
    "contrast": contrast,
    "centred": lambda z, y: functional.cross_entropy(z - z.mean(dim=0), y, reduction="none"),
    "in another order": lambda z, y: functional.cross_entropy(z, y, reduction="none").flip(0),
    "last two": lambda z, _: z.square().sum(1) + torch.eye(len(z))[-1] * z[-2].sum(),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("count", [2, COUNT])
def test_losses_that_depend_on_other_samples_are_refused(name: str, count: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    hooks = SampleGradients(model)
    losses = MIXED[name](model(torch.randn(count, 4)), LABELS.flip(0)[:count])
    assert losses.shape == (count,)
    with pytest.raises(InvalidArgumentError, match="its own sample alone"):
        hooks.take(losses)


def test_a_term_that_is_added_later_is_checked() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, CLASSES)
    hooks, inputs = SampleGradients(model), torch.randn(COUNT, 4)
    for _ in range(2):
        hooks.take(functional.cross_entropy(model(inputs), LABELS, reduction="none"))
        model.zero_grad()
    outputs = model(inputs)
    losses = functional.cross_entropy(outputs, LABELS, reduction="none")
    with pytest.raises(InvalidArgumentError, match="its own sample alone"):
        hooks.take(losses + contrast(outputs, LABELS))


def test_losses_with_hidden_state_of_the_module_are_refused() -> None:
    """A term that does not pass through the module's outputs, such as the balance of experts."""

    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.balance = nn.Linear(4, 3), torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            scores = self.layer(x)
            self.balance = scores.softmax(dim=1).mean(dim=0).square().sum()
            return scores  # type: ignore[no-any-return]

    model = Balanced()
    hooks = SampleGradients(model)
    losses = squares(model(torch.randn(4, 4))) + model.balance
    with pytest.raises(InvalidArgumentError, match="its own sample alone"):
        hooks.take(losses)


def test_a_broken_sample_is_not_taken_for_a_mixed_loss() -> None:
    """An error because of one sample would tell others about it."""
    model = nn.Linear(3, 2)
    hooks, inputs = SampleGradients(model), torch.randn(4, 3)
    inputs[1] = torch.inf
    rows = hooks.take(squares(model(inputs)))
    assert not torch.isfinite(rows[1]).all()
    assert torch.isfinite(rows[[0, 2, 3]]).all()


PER_SAMPLE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "plain": lambda z, y: functional.cross_entropy(z, y, reduction="none"),
    "weighted": lambda z, y: functional.cross_entropy(z, y, weight=WEIGHT, reduction="none"),
    "ignored": lambda z, y: functional.cross_entropy(z, y, ignore_index=0, reduction="none"),
    "large": lambda z, y: 1e6 * functional.cross_entropy(z, y, reduction="none"),
}


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_replacing_one_sample_moves_the_sum_by_the_accounted_sensitivity(name: str) -> None:
    """Measured through the path of the own loop, before noise: at most 2C/B, for any sample."""
    torch.manual_seed(0)
    model = UserModel(
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)), clips_samples=True
    )
    model.write(model.read())
    inputs, numbers = torch.randn(COUNT, 4), torch.arange(COUNT)[None]
    weights = torch.full((1, COUNT), 1 / COUNT, dtype=torch.float64)
    batch = Batch(numbers, numbers, weights, is_average=True, most_samples=COUNT)

    def release(first: Tensor, label: int) -> Tensor:
        x, y = inputs.clone(), LABELS.clone()
        x[0], y[0] = first, label
        model.backward(PER_SAMPLE[name](model.module(x), y), num_samples=COUNT)
        found = model.gradient(
            model.read(), batch, sample_clip=torch.tensor([CLIP]).double()
        ).values.view(-1)
        model.forget_gradient()
        return found

    found = [
        release(scale * torch.randn(4), label)
        for scale in (1e-3, 1.0, 1e3)
        for label in range(CLASSES)
    ]
    moves = torch.pdist(torch.stack(found))
    assert float(moves.max()) <= 2 * CLIP / COUNT
    if name == "large":
        # Every sample is clipped, so that opposite ones use most of the sensitivity.
        assert float(moves.max()) > CLIP / COUNT


def test_hooks_of_an_earlier_loop_do_not_disturb() -> None:
    """A notebook that runs a cell again makes a module private twice."""
    model = nn.Linear(4, 2)
    earlier, hooks = SampleGradients(model), SampleGradients(model)
    inputs = torch.randn(COUNT, 4)
    for _ in range(2):
        rows = hooks.take(model(inputs).square().sum(dim=1))
    assert not earlier.is_empty
    expected = 2 * model(inputs).unsqueeze(2) * inputs.unsqueeze(1)
    torch.testing.assert_close(rows[:, :8], expected.flatten(1).detach())
