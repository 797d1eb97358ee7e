"""Gradients of single samples from one backward pass, against one backward pass per sample."""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from corn.errors import CornError, CornWarning, InvalidArgumentError
from corn.learn.batches import Batch
from corn.learn.own_loop import ClippedSums
from corn.learn.user_model import SampleGradients, UserModel


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
    """One layer that runs twice, and whose weights are in the outputs too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        twice = self.layer(torch.tanh(self.layer(x)))
        return twice + self.layer.weight.square().sum()  # type: ignore[no-any-return]


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


def take(
    gradients: SampleGradients,
    model: nn.Module,
    inputs: Tensor,
    loss: Callable[[Tensor], Tensor] = squares,
) -> Tensor:
    """Return the gradient of each sample in one pass of a loop."""
    shown = gradients.begin(inputs, len(inputs))
    return gradients.take(loss(model(shown)))


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_gives_the_gradient_of_each_sample(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, inputs = make(), torch.randn(shape)
    expected = one_by_one(model, inputs)
    gradients = SampleGradients(model)
    # Without batching rules.
    is_slow = name == "recurrent"
    with pytest.warns(CornWarning, match="one sample at a time") if is_slow else nullcontext():
        take(gradients, model, inputs)
    for _ in range(2):
        found = take(gradients, model, inputs)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Positions(nn.Module):
    """Embeddings of tokens and of positions, which all samples share, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(7, 4, padding_idx=0), nn.Embedding(6, 4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        return self.encoder(embedded, src_key_padding_mask=x == 0).mean(dim=1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_trained", [True, False])
def test_embeddings_and_positions(is_trained: bool) -> None:
    torch.manual_seed(0)
    model = Positions().train(is_trained)
    tokens = torch.randint(1, 7, (5, 6))
    tokens[2:, 4:] = 0
    expected, gradients = one_by_one(model, tokens), SampleGradients(model)
    torch.testing.assert_close(take(gradients, model, tokens), expected, rtol=1e-4, atol=1e-6)


def test_evaluation_copies_and_pickles_are_as_usual() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    gradients = SampleGradients(model)
    gradients.begin(torch.randn(4, 3), 4)
    with torch.no_grad():
        assert model(torch.randn(7, 3)).shape == (7, 2)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.randn(7, 3)).sum().backward()
        assert twin.weight.grad is not None
    assert model.weight.grad is None


def test_dropout_draws_for_each_sample() -> None:
    """Where dropout lets nothing through, there must be no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5))
    gradients, inputs = SampleGradients(model), torch.randn(4, 3)
    outputs = model(gradients.begin(inputs, 4))
    slopes = gradients.take(outputs.sum(dim=1))[:, -50:]
    assert torch.equal(slopes == 0, outputs == 0)
    assert not torch.equal(outputs[0] == 0, outputs[1] == 0)


def test_parameters_used_outside_of_the_module_are_refused() -> None:
    model = nn.Linear(3, 2)
    gradients = SampleGradients(model)
    with pytest.raises(InvalidArgumentError, match="gradient of 'weight' from outside"):
        take(gradients, model, torch.randn(4, 3), lambda z: squares(z) + model.weight.sum())


@pytest.mark.parametrize("shape", [(6, 4, 3), (5, 3)])
def test_samples_along_another_dimension_are_refused(shape: tuple[int, ...]) -> None:
    model = nn.Linear(3, 2)
    gradients = SampleGradients(model)
    gradients.begin(torch.randn(4, 3), 4)
    with pytest.raises(InvalidArgumentError, match="4 samples of the batch along their first"):
        model(torch.randn(shape))


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
        return scores - 0.5 * scores.mean(dim=0)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("model", "shape"), [(TimeFirst(), (5, 5, 4)), (Centred(), (5, 4))])
def test_modules_cannot_mix_samples(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Each sample runs alone: a change of one changes no bit of others."""
    gradients, inputs = SampleGradients(model), torch.randn(shape)
    changed = inputs.clone()
    changed[0] = 100.0
    rows = [take(gradients, model, each) for each in (inputs, changed)]
    assert not torch.equal(rows[0][0], rows[1][0])
    assert torch.equal(rows[0][1:], rows[1][1:])


def test_inputs_changed_in_place_are_refused() -> None:
    model = nn.Linear(3, 3)
    gradients, inputs = SampleGradients(model), torch.randn(4, 3)
    for _ in range(2):
        gradients.begin(inputs, 4)
        gradients.take(squares(model(inputs)))
    gradients.begin(inputs, 4)
    outputs = model(inputs)
    inputs.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients.take(squares(outputs))


def test_gradients_of_single_layers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    gradients = SampleGradients(model)
    first = model[0](gradients.begin(torch.randn(5, 4), 5))
    with pytest.raises(InvalidArgumentError, match=r"outputs of model\(inputs\)"):
        gradients.take(squares(model[2](first)))


def test_other_backward_passes_are_refused() -> None:
    model = nn.Linear(4, 3)
    gradients = SampleGradients(model)
    outputs = model(gradients.begin(torch.randn(5, 4), 5))
    with pytest.raises(CornError, match=r"must come from optimizer\.mean"):
        outputs.mean().backward()


def scale_by_batch(_: nn.Module, given: Any, *outputs: Tensor) -> Any:
    found = outputs[0] if outputs else given[0]
    return found / found.detach().abs().max()


@pytest.mark.parametrize(
    "kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"]
)
def test_hooks_that_see_the_whole_batch_are_refused(kind: str) -> None:
    model = nn.Linear(4, 3)
    gradients = SampleGradients(model)
    handle = getattr(model, f"register_{kind}")(scale_by_batch)
    with pytest.raises(InvalidArgumentError, match="hook its layers"):
        take(gradients, model, torch.randn(5, 4))
    handle.remove()
    with (
        nn.modules.module.register_module_forward_hook(lambda *_: None),
        pytest.raises(InvalidArgumentError, match="hook its layers"),
    ):
        take(gradients, model, torch.randn(5, 4))


def test_what_runs_around_the_whole_batch_is_refused() -> None:
    class Called(nn.Linear):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x - x.detach().mean(dim=0))  # type: ignore[no-any-return]

    with pytest.raises(InvalidArgumentError, match="without a __call__"):
        SampleGradients(Called(4, 3))
    model = nn.Linear(4, 3)
    gradients = SampleGradients(model)

    def run_once(_: nn.Module, given: tuple[Tensor]) -> Tensor:
        handle.remove()
        return given[0] - given[0].detach().mean(dim=0)

    handle = model.register_forward_pre_hook(run_once)
    with pytest.raises(InvalidArgumentError, match="hook its layers"):
        gradients.begin(torch.randn(5, 4), 5)


def test_hooks_of_layers_see_one_sample() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(4, 3)), torch.randn(5, 4)
    shapes = []
    model[0].register_forward_hook(lambda *own: shapes.append(own[2].shape))
    take(SampleGradients(model), model, inputs)
    assert set(shapes) == {(1, 3)}


class Shared(nn.Module):
    """A scale that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.layer(x / scale)  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", [(), (1, 4)])
def test_statistics_of_the_batch_are_refused_as_shared_arguments(shape: tuple[int, ...]) -> None:
    model = Shared()
    gradients = SampleGradients(model)
    shown = gradients.begin(torch.randn(5, 4), 5)
    squares(model(shown, torch.ones(shape))).sum()
    with pytest.raises(InvalidArgumentError, match="must not depend on the batch"):
        model(shown, shown.std() if not shape else shown.std(dim=0, keepdim=True))


class Running(nn.Module):
    """A mean of earlier samples: in a buffer that is replaced, or in an attribute."""

    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        if is_buffer:
            self.register_buffer("average", torch.zeros(4))
        else:
            self.average = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(dim=0)
        return self.layer(x - self.average)  # type: ignore[no-any-return]


class Stateful(nn.Module):
    """A recurrent layer that goes on with the hidden state of the sample before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 3, batch_first=True)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        outputs, hidden = self.layer(x.unsqueeze(1), self.hidden)
        self.hidden = hidden.detach()
        return outputs[:, -1]  # type: ignore[no-any-return]


class Auxiliary(nn.Module):
    """A recurrent model of tokens that leaves a statistic of the last sample, for the loop."""

    def __init__(self, kind: Callable[[Any], Any] = float) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(50, 4)
        self.layer = Stateful()
        self.statistics: dict[str, Any] = {"bounds": np.array([0.0, 50.0])}

    def forward(self, tokens: Tensor) -> Tensor:
        self.layer.hidden = None
        outputs = self.layer(self.table(tokens))
        self.layer.hidden = None
        self.statistics["norm"] = [self.kind(outputs.detach().norm())]
        return outputs  # type: ignore[no-any-return]


class SetOnce(nn.Module):
    """A layer that scales all samples by a number of the first one that it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.mean().item()
        return self.layer(x * self.scale)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:(Stateful|Auxiliary|SetOnce) runs one sample")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Running(is_buffer=True),
        lambda: Running(is_buffer=False),
        Stateful,
        Auxiliary,
        lambda: Auxiliary(lambda norm: norm.numpy()),
        lambda: Auxiliary(np.float32),
        lambda: Auxiliary(str),
        SetOnce,
    ],
)
def test_modules_that_remember_samples_are_refused(make: Callable[[], nn.Module]) -> None:
    model = make()
    inputs = torch.arange(5) if isinstance(model, Auxiliary) else torch.randn(5, 4)
    with pytest.raises(InvalidArgumentError, match="keep nothing between calls"):
        take(SampleGradients(model), model, inputs)


@pytest.mark.filterwarnings("ignore:Auxiliary runs one sample")
def test_attributes_that_stay_are_no_memory() -> None:
    model = Auxiliary(lambda _: "seen")
    model.statistics["norm"] = ["seen"]
    take(SampleGradients(model), model, torch.arange(5))


@pytest.mark.filterwarnings("ignore:Measured runs one sample")
def test_numbers_of_a_single_sample_are_no_outputs() -> None:
    class Measured(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), float(x.detach().norm())

    model = Measured(4, 3)
    outputs, number = model(SampleGradients(model).begin(torch.randn(5, 4), 5))
    assert outputs.shape == (5, 3)
    assert number is None


def test_buffers_that_are_replaced_are_noticed() -> None:
    model = UserModel(Running(is_buffer=True))
    model.require_frozen()
    model.module(torch.randn(5, 4))
    with pytest.raises(CornError, match="'average' is not trained"):
        model.require_frozen()


def test_hooks_that_scale_by_the_gradients_of_all_samples_are_refused() -> None:
    model = nn.Linear(4, 3)

    def normalised(outputs: Tensor) -> Tensor:
        outputs.register_hook(lambda slope: slope / slope.norm())  # type: ignore[no-untyped-call]
        return squares(outputs)

    with pytest.raises(InvalidArgumentError, match="its own sample alone"):
        take(SampleGradients(model), model, torch.randn(5, 4), normalised)


def test_outputs_changed_in_place_are_checked() -> None:
    model, inputs = nn.Linear(4, 3), torch.randn(5, 4)
    gradients = SampleGradients(model)
    doubled = take(gradients, model, inputs, lambda z: z.mul_(2).sum(dim=1))
    torch.testing.assert_close(doubled, 2 * take(gradients, model, inputs, lambda z: z.sum(dim=1)))
    with pytest.raises(InvalidArgumentError, match="its own sample alone"):
        take(gradients, model, inputs, lambda z: squares(z.sub_(z.mean(dim=0))))


def test_losses_of_an_earlier_batch_are_refused() -> None:
    model, inputs = nn.Linear(4, 3), torch.randn(5, 4)
    gradients = SampleGradients(model)
    shown = gradients.begin(inputs, 5)
    late = squares(model(shown))
    gradients.take(squares(model(shown)))
    model(gradients.begin(inputs, 5))
    with pytest.raises(InvalidArgumentError, match=r"outputs of model\(inputs\)"):
        gradients.take(late)


def test_a_module_that_runs_twice_adds_up() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 4), torch.randn(5, 4)
    expected = one_by_one(nn.Sequential(model, nn.Tanh(), model), inputs)
    gradients = SampleGradients(model)
    shown = gradients.begin(inputs, 5)
    rows = gradients.take(squares(model(torch.tanh(model(shown)))))
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6)


COUNT, CLASSES, CLIP = 6, 3, 0.5
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
WEIGHT = torch.tensor([0.1, 1.0, 10.0])


def contrast(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return a loss by which samples of one class attract each other."""
    scores = outputs @ outputs.T
    return functional.cross_entropy(scores, (labels[:, None] == labels).float(), reduction="none")


# Losses that have one number for each sample, but not of each sample alone.
MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "weighted mean": lambda z, y: functional.cross_entropy(z, y, weight=WEIGHT).expand(len(z)),
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
    gradients = SampleGradients(model)
    losses = MIXED[name](
        model(gradients.begin(torch.randn(count, 4), count)), LABELS.flip(0)[:count]
    )
    assert losses.shape == (count,)
    with pytest.raises(InvalidArgumentError, match="its own sample alone"):
        gradients.take(losses)


def test_a_term_that_is_added_later_is_checked() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, CLASSES)
    gradients, inputs = SampleGradients(model), torch.randn(COUNT, 4)

    def entropy(outputs: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, LABELS, reduction="none")

    for _ in range(2):
        take(gradients, model, inputs, entropy)
    with pytest.raises(InvalidArgumentError, match="its own sample alone"):
        take(gradients, model, inputs, lambda z: entropy(z) + contrast(z, LABELS))


def test_a_broken_sample_is_not_taken_for_a_mixed_loss() -> None:
    """An error because of one sample would tell others about it."""
    model = nn.Linear(3, 2)
    gradients, inputs = SampleGradients(model), torch.randn(4, 3)
    inputs[1] = torch.inf
    rows = take(gradients, model, inputs)
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
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    gradients, num_parameters = SampleGradients(model), sum(p.numel() for p in model.parameters())
    inputs, numbers = torch.randn(COUNT, 4), torch.arange(COUNT)[None]
    weights = torch.full((1, COUNT), 1 / COUNT, dtype=torch.float64)
    batch = Batch(numbers, numbers, weights, is_average=True, most_samples=COUNT)

    def release(first: Tensor, label: int) -> Tensor:
        x, y = inputs.clone(), LABELS.clone()
        x[0], y[0] = first, label
        sums = ClippedSums([batch], clip=CLIP, num_parameters=num_parameters, num_pieces=1)
        sums.show()
        sums.add(gradients.take(PER_SAMPLE[name](model(gradients.begin(x, COUNT)), y)))
        return sums.of_agent(0).values.view(-1)

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


def test_a_module_may_be_made_private_twice() -> None:
    """A notebook that runs a cell again does so."""
    model, inputs = nn.Linear(4, 2), torch.randn(COUNT, 4)
    SampleGradients(model).begin(inputs, COUNT)
    rows = take(SampleGradients(model), model, inputs, lambda z: z.square().sum(dim=1))
    with torch.no_grad():
        expected = 2 * model(inputs).unsqueeze(2) * inputs.unsqueeze(1)
    torch.testing.assert_close(rows[:, :8], expected.flatten(1))
