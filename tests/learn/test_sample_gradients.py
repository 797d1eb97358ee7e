"""Gradients of single samples from one backward pass, against one backward pass per sample."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from corn.errors import InvalidArgumentError
from corn.learn.sample_gradients import SampleGradients, find_owners


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
        model(inputs).square().mean().backward()
        found = hooks.take(len(inputs))
        hooks.check(found)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    hooks.remove()
    model(inputs).sum().backward()
    assert not hooks.take(len(inputs)).any()


def test_embeddings() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 3, padding_idx=0), nn.Flatten())
    tokens = torch.randint(0, 7, (5, 4))
    expected, hooks = one_by_one(model, tokens), SampleGradients(model)
    model(tokens).square().mean().backward()
    torch.testing.assert_close(hooks.take(5), expected, rtol=1e-4, atol=1e-6)


def test_evaluation_leaves_no_trace() -> None:
    model = nn.Linear(3, 2)
    hooks = SampleGradients(model)
    with torch.no_grad():
        model(torch.randn(4, 3))
    assert not hooks.take(4).any()


def test_parameters_used_outside_of_their_layer_are_noticed() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.layer.weight.square().sum()  # type: ignore[no-any-return]

    model = Penalised()
    hooks = SampleGradients(model)
    model(torch.randn(4, 3)).mean().backward()
    with pytest.raises(InvalidArgumentError, match="'layer' do not add up"):
        hooks.check(hooks.take(4))


def test_samples_along_another_dimension_are_refused() -> None:
    model = nn.Linear(3, 2)
    hooks = SampleGradients(model)
    model(torch.randn(6, 4, 3)).mean().backward()
    with pytest.raises(InvalidArgumentError, match="must take the 4 samples"):
        hooks.take(4)


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
    checked.sum().backward()
    hooks.take(5)


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
