"""``make_private`` for all agents: the user's loop gives the models of the library's training."""

import copy
import math
import os
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
)

from corn.checks import FloatArray
from corn.errors import CornError, CornWarning, InvalidArgumentError
from corn.learn import (
    Constant,
    Mechanism,
    SweepSettings,
    TrainingProblem,
    Trial,
    run_sweep,
)
from corn.learn.batches import AgentData
from corn.learn.own_loop import (
    _COLLATE_SAMPLES,
    LoopData,
    PrivateTraining,
    make_private,
    require_different_samples,
    simulate,
)
from corn.learn.perturbation import DrawnNoise, NoiseShare
from corn.learn.tasks import ModuleTask
from corn.noise.masks import draw_offset
from corn.plan import Plan, make_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network
from tests.oracles.message_parts import MessageParts

from .loops import (
    FACTORIES,
    RATE,
    M,
    add_to_momentum,
    change_decay,
    loaders,
    make_model,
    make_parts,
    read,
    write_data,
)

N, STEPS, SEED = 4, 5, 3


def whole_plan(*, clip: float = 0.5, num_steps: int = STEPS, **options: Any) -> Plan:
    """Return a plan whose steps use all samples."""
    budget = PrivacyBudget(
        50,
        1e-5,
        num_steps=num_steps,
        clip=clip,
        unit="sample",
        batch_size=M,
        sampling="every-step",
    )
    return make_plan(load_network(f"ring:{N}", mixing="sum"), budget, **options)


def open_loop(
    plan: Plan | None = None, factory: Callable[..., Optimizer] = FACTORIES[0], **options: Any
) -> PrivateTraining:
    model = options.pop("module", None) or make_model()
    inner = options.pop("optimizer", None) or factory(model.parameters())
    source = LoopData.of_agents(loaders(), list(map(str, range(N))), seed=SEED)
    return simulate(
        plan or whole_plan(), source, module=model, optimizer=inner, **{"seed": SEED, **options}
    )


def differentiate(private: PrivateTraining, inputs: Tensor, targets: Tensor) -> None:
    losses = cross_entropy(private.module(inputs), targets, reduction="none")
    private.optimizer.mean(losses).backward()  # type: ignore[no-untyped-call]


def take_step(private: PrivateTraining, inputs: Tensor, targets: Tensor) -> None:
    private.optimizer.zero_grad()
    differentiate(private, inputs, targets)
    private.optimizer.step()


def run_loop(private: PrivateTraining, num_epochs: int = STEPS) -> Tensor:
    for _ in range(num_epochs):
        for inputs, targets in private.data_loader:
            take_step(private, inputs, targets)
    return read(private.module)


def make_poisson(**options: Any) -> PrivateTraining:
    """Make a loop private as an Opacus user would."""
    model = options.pop("module", None) or make_model()
    usual = {
        "optimizer": torch.optim.Adam(model.parameters(), lr=RATE),
        "data_loader": loaders(batch_size=4),
        "target_epsilon": 10,
        "target_delta": 1e-5,
        "epochs": 2,
        "max_grad_norm": 1.0,
        "network": f"ring:{N}",
    }
    return make_private(module=model, **{**usual, **options})


@pytest.mark.parametrize("factory", FACTORIES)
def test_without_noise_it_is_plain_torch_on_the_average_gradient(
    factory: Callable[..., Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fine grid and a large clipping norm leave gradients as they are.
    monkeypatch.setattr(Plan, "check_parameters", lambda *_: None)
    monkeypatch.setattr("corn.noise.masks.list_terms", lambda *_, **__: [])
    plan = replace(whole_plan(clip=1000), grid=2.0**-40)
    found = run_loop(open_loop(plan, factory))
    model = make_model()
    optimizer = factory(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for inputs, targets in make_parts():
            (cross_entropy(model(inputs), targets) / N).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.testing.assert_close(found, read(model), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_loop_gives_the_model_of_a_sweep(factory: Callable[..., Optimizer]) -> None:
    plan = whole_plan()
    private = open_loop(plan, factory)
    found = run_loop(private)
    problem = TrainingProblem(
        ModuleTask(make_model(), cross_entropy), AgentData.from_parts(make_parts())
    )
    expected = run_sweep(
        problem,
        plan.network,
        [Trial(Mechanism.from_plan(plan), Constant(RATE))],
        settings=SweepSettings(STEPS, M, (SEED,), noise_keys="seed", optimizer=factory),
    )
    torch.testing.assert_close(found, expected.parameters[0, 0], rtol=1e-3, atol=1e-4)
    assert private.optimizer.get_epsilon() == pytest.approx(50, rel=2e-3)
    assert private.optimizer.get_epsilon(1e-3) < private.optimizer.get_epsilon(1e-6)
    assert private.optimizer.privacy.startswith("simulated: ε = 50")
    with pytest.raises(InvalidArgumentError, match="delta must be in"):
        private.optimizer.get_epsilon(0)


@pytest.mark.parametrize("accumulation", [2, 3])
def test_accumulation_changes_no_release(accumulation: int) -> None:
    private = open_loop(accumulation=accumulation)
    assert len(private.data_loader) == accumulation
    sizes = []
    for _ in range(STEPS):
        # Some libraries take all batches of a step before they use the first.
        for inputs, targets in list(private.data_loader):
            sizes.append(len(inputs))
            differentiate(private, inputs, targets)
        private.optimizer.step()
    assert sum(sizes) == STEPS * N * M
    assert len(set(sizes)) == accumulation, "losses of one must not be taken for another's"
    torch.testing.assert_close(read(private.module), run_loop(open_loop()))


def test_batches_of_a_step_must_all_be_used() -> None:
    private = open_loop(accumulation=2)
    batches = iter(private.data_loader)
    first, second = next(batches), next(batches)
    with pytest.raises(CornError, match="must follow the 2 batches of each step"):
        next(iter(private.data_loader))
    with pytest.raises(InvalidArgumentError, match="along their first dimension"):
        differentiate(private, *second)
    differentiate(private, *first)
    with pytest.raises(CornError, match="there is no gradient"):
        private.optimizer.step()
    differentiate(private, *second)
    with pytest.raises(CornError, match="one backward pass for each batch"):
        differentiate(private, *second)
    private.optimizer.step()
    differentiate(private, *next(iter(private.data_loader)))
    with pytest.raises(CornError, match="must follow 2 batches"):
        private.optimizer.step()
    with pytest.raises(InvalidArgumentError, match="accumulation must be less"):
        next(iter(open_loop(accumulation=20).data_loader))


@pytest.mark.parametrize("factory", FACTORIES)
def test_models_depend_on_the_sum_of_releases_alone(
    factory: Callable[..., Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single releases have too little noise: moving some from one to another changes no bit."""
    plan = whole_plan()
    # All runs have the same offsets, and no noise but the shift.
    monkeypatch.setattr(DrawnNoise, "_offset", property(lambda own: (bytes(32), own.step)))

    def find_model(shift: int) -> Tensor:
        def draw(_: object, agent: int, *, stop: int, **__: object) -> FloatArray:
            return np.full(stop, {0: shift, 2: -shift}.get(agent, 0) * plan.grid)

        parts = MessageParts(
            draw_share=draw, draw_offset=lambda _, step, size: draw_offset(bytes(32), step, size)
        )
        monkeypatch.setattr(DrawnNoise, "make_message", lambda *given: parts.make_message(*given))
        return run_loop(open_loop(plan, factory))

    expected = find_model(0)
    for shift in (1, 77, 12345):
        assert torch.equal(find_model(shift), expected), shift


def test_noise_is_added_and_the_gradient_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user's optimizer sees is on the grid of an average, far from the gradient."""
    plan, model = whole_plan(mechanism="ldp"), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    usual = optimizer.step

    def step() -> None:
        seen.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        usual()

    monkeypatch.setattr(optimizer, "step", step)
    private = open_loop(plan, module=model, optimizer=optimizer)
    inputs, targets = next(iter(private.data_loader))
    losses = cross_entropy(model(inputs), targets, reduction="none")
    private.optimizer.mean(losses * 1e6).backward()  # type: ignore[no-untyped-call]
    private.optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    (released,) = seen
    assert torch.equal(released * N / plan.grid, (released * N / plan.grid).round())
    limit = 0.5 + 6 * math.sqrt(len(released)) * plan.decomposition.covariance[0, 0] ** 0.5
    assert 0 < float(released.norm()) < limit


def test_the_weight_of_the_mean_changes_nothing() -> None:
    """Libraries divide it by the accumulation, or scale it."""
    models = []
    for factor in (1.0, 1e-3, -5.0):
        private = open_loop()
        inputs, targets = next(iter(private.data_loader))
        losses = cross_entropy(private.module(inputs), targets, reduction="none")
        (private.optimizer.mean(losses) * factor).backward()  # type: ignore[no-untyped-call]
        private.optimizer.step()
        models.append(read(private.module))
    assert torch.equal(models[0], models[1])
    assert torch.equal(models[0], models[2])


def test_names_of_opacus(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps and rates follow from epochs and loader; by default the noise is secret."""
    models = []
    for _ in range(2):
        data = TensorDataset(*(torch.cat(own) for own in zip(*make_parts(), strict=True)))
        private = make_poisson(data_loader=DataLoader(data, batch_size=16), device="cpu")
        loader = private.data_loader
        assert isinstance(loader, DataLoader)
        assert (loader.dataset, loader.batch_size, len(loader)) == (data, 16, 3)
        models.append(run_loop(private, 2))
        assert private.optimizer.position == 6
        assert private.optimizer.get_epsilon() == pytest.approx(10, rel=2e-3)
        assert private.optimizer.get_epsilon() <= 10
        assert private.optimizer.privacy.startswith("the models keep ε = 10")
        with pytest.warns(CornWarning, match="used up after step 6"):
            assert not list(loader)
    assert not torch.equal(*models)
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 2
    for said in ("ε = 10, δ = 1e-05", "one sample", "clipped to 1", "replace-one", "eavesdropper"):
        assert said in printed[0]


def test_adding_a_sample_moves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which agent has a sample must not depend on others, also for secret keys."""
    found = []
    monkeypatch.setattr("secrets.randbits", lambda _: 5)
    for count in (40, 41):
        data = TensorDataset(torch.randn(count, 5), torch.zeros(count, dtype=torch.long))
        private = make_poisson(data_loader=DataLoader(data, batch_size=10))
        found.append(private.data_loader._source.rows)
    moved = [set(before) ^ set(after) for before, after in zip(*found, strict=True)]
    assert sorted(map(len, moved)) == [0, 0, 0, 1]


def test_batches_are_poisson_samples_in_a_public_shape() -> None:
    private, widths, counts = make_poisson(epochs=40), set(), []
    for inputs, targets in (batch for _ in range(40) for batch in private.data_loader):
        widths.add(len(inputs))
        sums = private.optimizer._now.sums
        assert sums is not None
        counts.append(int((sums._weights > 0).sum()))
        take_step(private, inputs, targets)
    assert len(widths) == 1, "the number of samples in a batch is hidden"
    # 120 batches of 48 samples at a rate of 1/3.
    assert abs(np.mean(counts) - 16) < 5 * math.sqrt(16 / len(counts))
    assert len(set(counts)) > 5


def save(private: PrivateTraining) -> dict[str, Any]:
    return copy.deepcopy(
        {"model": private.module.state_dict(), "optimizer": private.optimizer.state_dict()}
    )


def load(private: PrivateTraining, saved: dict[str, Any]) -> None:
    private.module.load_state_dict(saved["model"])
    private.optimizer.load_state_dict(saved["optimizer"])


def test_a_run_with_a_seed_resumes_where_it_was() -> None:
    expected = run_loop(make_poisson(seed=1), 2)
    first = make_poisson(seed=1)
    for number, batch in enumerate(batch for _ in range(2) for batch in first.data_loader):
        take_step(first, *batch)
        if number == 3:
            saved = save(first)
    again = make_poisson(seed=1)
    load(again, saved)
    assert again.optimizer.position == 4
    # The pass that was under way is finished.
    assert torch.equal(run_loop(again, 1), expected)
    assert again.optimizer.get_epsilon() == first.optimizer.get_epsilon()


def test_the_ledger_decides_how_many_steps_are_left(tmp_path: Path) -> None:
    """A checkpoint of step 2 of a run that went on to step 4, as after a crash."""
    path = tmp_path / "run.ledger"
    first = make_poisson(ledger=path)
    batches = (batch for _ in range(2) for batch in first.data_loader)
    for _ in range(2):
        take_step(first, *next(batches))
    saved = save(first)
    for _ in range(2):
        take_step(first, *next(batches))
    spent = first.optimizer.get_epsilon()
    with pytest.raises(CornError, match="another run has this ledger open"):
        make_poisson(ledger=path)
    first.data_loader.close()
    again = make_poisson(ledger=path)
    assert again.optimizer.get_epsilon() == spent
    load(again, saved)
    assert torch.equal(
        read(again.module), torch.cat([v.flatten() for v in saved["model"].values()])
    )
    assert again.optimizer.state_dict()["state"].keys() == saved["optimizer"]["state"].keys()
    with pytest.warns(CornWarning, match="used up after step 4"):
        run_loop(again, 3)
    # Two steps from the checkpoint's model, of the six of the plan.
    assert again.optimizer.position == 4
    assert spent < again.optimizer.get_epsilon() == pytest.approx(10, rel=2e-3)
    again.data_loader.close()


def test_noise_is_new_after_a_checkpoint(tmp_path: Path) -> None:
    """Equal noise on other gradients would show their difference."""
    models, saved = [], None
    for _ in range(2):
        private = make_poisson(ledger=tmp_path / "run.ledger")
        saved = saved or save(private)
        load(private, saved)
        take_step(private, *next(iter(private.data_loader)))
        models.append(read(private.module))
        private.data_loader.close()
    assert not torch.equal(*models)


def test_checkpoints_that_could_spend_twice_are_refused(tmp_path: Path) -> None:
    first = make_poisson(ledger=tmp_path / "run.ledger")
    # Libraries load the state that they have just saved.
    first.optimizer.load_state_dict(first.optimizer.state_dict())
    inputs, targets = next(iter(first.data_loader))
    with pytest.raises(CornError, match="between two steps"):
        first.optimizer.load_state_dict(first.optimizer.state_dict())
    take_step(first, inputs, targets)
    saved, before = first.optimizer.state_dict(), read(first.module)
    take_step(first, *next(iter(first.data_loader)))
    # An earlier model of the same run is no secret, but its steps stay counted.
    first.optimizer.load_state_dict(saved)
    assert torch.equal(read(first.module), before)
    assert first.optimizer.position == 2
    first.data_loader.close()
    with pytest.raises(CornError, match="only that counts them"):
        make_poisson().optimizer.load_state_dict(saved)
    with pytest.raises(CornError, match="only that counts them"):
        make_poisson(ledger=tmp_path / "other.ledger").optimizer.load_state_dict(saved)
    with pytest.raises(CornError, match="found that of plan"):
        make_poisson(epochs=3, seed=1).optimizer.load_state_dict(saved)
    with pytest.raises(CornError, match="found that of plan none"):
        make_poisson(seed=1).optimizer.load_state_dict(first.optimizer._inner.state_dict())
    late = make_poisson(ledger=tmp_path / "late.ledger")
    take_step(late, *next(iter(late.data_loader)))
    with pytest.raises(CornError, match="before the first batch"):
        late.optimizer.load_state_dict(saved)
    with pytest.raises(InvalidArgumentError, match="ledger must be None with a seed"):
        make_poisson(ledger=tmp_path / "seeded.ledger", seed=1)


def test_a_loop_that_goes_on_after_a_failure_gets_the_same_error_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    private = open_loop()

    def fail(*_: object) -> None:
        raise CornError("the disk is full")

    batch = next(iter(private.data_loader))
    differentiate(private, *batch)
    private.optimizer.step()
    monkeypatch.setattr(NoiseShare, "take", fail)
    for _ in range(2):
        with pytest.raises(CornError, match="the disk is full"):
            next(iter(private.data_loader))
    with pytest.raises(CornError, match="the disk is full"):
        private.optimizer.step()


def test_only_trained_parameters_move_and_others_are_watched() -> None:
    model = make_model()
    model[0].requires_grad_(False)  # type: ignore[index]
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = model[0].weight.clone()  # type: ignore[index]
    options: dict[str, Any] = {"module": model, "optimizer": torch.optim.SGD(trained, lr=0.1)}
    run_loop(open_loop(**options))
    assert torch.equal(model[0].weight, frozen)  # type: ignore[index]
    private = open_loop(**options)
    differentiate(private, *next(iter(private.data_loader)))
    with torch.no_grad():
        model[0].weight.data.add_(1)  # type: ignore[index]
    with pytest.raises(CornError, match=r"'0\.weight' is not trained and must not change"):
        private.optimizer.step()


def test_steps_out_of_order_are_refused() -> None:
    private = open_loop()
    _, optimizer, loader = private
    with pytest.raises(CornError, match="others would get no noise"):
        optimizer.add_param_group({"params": list(make_model().parameters())})
    with pytest.raises(CornError, match="must follow a batch of the private loader"):
        optimizer.step()
    with pytest.raises(CornError, match="must follow a batch of the private loader"):
        optimizer.mean(torch.zeros(3))
    batches = iter(loader)
    batch = next(batches)
    with pytest.raises(CornError, match="there is no gradient"):
        optimizer.step()
    with pytest.raises(CornError, match="must follow the 1 batches of each step"):
        next(iter(loader))
    differentiate(private, *batch)
    optimizer.step()
    with pytest.raises(CornError, match="of the private loader, once"):
        optimizer.step()
    with pytest.raises(CornError, match="from the private loader"):
        next(iter(loader.batch_sampler))  # type: ignore[arg-type]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_unfit_objects_are_refused() -> None:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    mixing = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    empty: list[Tensor] = []
    sets = [TensorDataset(*part) for part in make_parts()]
    apart = [DataLoader(own, collate_fn=lambda items: items) for own in sets]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"module": mixing, "optimizer": torch.optim.SGD(mixing.parameters())}, "GroupNorm(1, 3)"),
        ({"optimizer": torch.optim.LBFGS(model.parameters())}, "LBFGS"),
        ({"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau}, "found ReduceLROnPlateau"),
        ({"schedule": lambda _: StepLR(sgd, 1)}, "for the given optimizer"),
        ({"optimizer": torch.optim.SGD(make_model().parameters())}, "and of no others"),
        ({"data_loader": loaders()[:2]}, "one for each agent"),
        ({"data_loader": apart}, "one collate_fn"),
        ({"data_loader": loaders()[:1] * N}, "every sample once"),
        ({"data_loader": DataLoader(Stream())}, "found Stream"),
        ({"data_loader": DataLoader(empty)}, "at least one sample"),  # type: ignore[arg-type]
        ({"data_loader": DataLoader(TensorDataset(torch.zeros(2, 5)))}, "some agent got none"),
        ({"module": make_model().requires_grad_(False)}, "no others, found 0 of 0"),
        ({"network": load_network("ring:4", mixing="gossip")}, "found 'gossip'"),
        ({"module": nn.DataParallel(model)}, "give its .module"),
    ]
    for changed, message in cases:
        with pytest.raises(InvalidArgumentError) as caught:
            make_poisson(**{"module": model, "optimizer": sgd, **changed})
        assert message in str(caught.value)


def start_with(collate_fn: Any, parts: Sequence[Any] | None = None) -> None:
    """Make a private loop with a collate function."""
    sets = parts or [TensorDataset(*part) for part in make_parts()]
    make_poisson(
        data_loader=[DataLoader(part, batch_size=4, collate_fn=collate_fn) for part in sets]
    )


def test_samples_along_another_dimension_are_refused() -> None:
    """Also where a batch has as many samples as a sample has values."""

    def transpose(items: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in items], dim=1), torch.stack([y for _, y in items])

    with pytest.raises(InvalidArgumentError, match="samples along the first dimension"):
        start_with(transpose)


def mix_up(items: Sequence[Any]) -> Any:
    inputs, targets = default_collate(list(items))
    return 0.7 * inputs + 0.3 * inputs[torch.randperm(len(inputs))], targets


def mix_up_sometimes(items: Sequence[Any]) -> Any:
    share = np.random.beta(0.2, 0.2) if random.random() < 0.5 else 1.0  # noqa: NPY002
    inputs, targets = default_collate(list(items))
    return {"mixed": [share * inputs + (1 - share) * inputs.flip(0)], "targets": targets}


def normalise(items: Sequence[Any]) -> Any:
    inputs, targets = default_collate(list(items))
    return (inputs - inputs.mean(dim=0)) / inputs.std(dim=0), targets


def mix_lists(items: Sequence[Any]) -> Any:
    return [(x + items[k - 1][0], y, "a name") for k, (x, y) in enumerate(items)]


def subtract_next(items: Sequence[Any]) -> Any:
    """Change each row by the one after it, so that the first sample changes no other row."""
    inputs, targets = default_collate(list(items))
    return inputs - torch.cat([inputs[1:], inputs[-1:]]), targets


def normalise_beside_constants(items: Sequence[Any]) -> Any:
    """Return as many parts as the batches of a check have samples, of which one mixes them."""
    inputs, targets = normalise(items)
    return inputs, *(torch.ones(len(targets)) for _ in range(_COLLATE_SAMPLES - 1))


@pytest.mark.parametrize(
    "collate_fn",
    [mix_up, mix_up_sometimes, normalise, mix_lists, subtract_next, normalise_beside_constants],
)
def test_collate_functions_that_mix_samples_are_refused(collate_fn: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="each row from its own sample"):
        start_with(collate_fn)


class Sequences(Dataset[Any]):
    """Sequences of different lengths, some values missing."""

    def __len__(self) -> int:
        return M

    def __getitem__(self, row: int) -> Tensor:
        return torch.full((2 + row % 5, 3), torch.nan if row == 3 else float(row))


def pad(side: str, items: Sequence[Tensor]) -> dict[str, Any]:
    lengths = torch.tensor([len(item) for item in items])
    padded = pad_sequence(list(items), batch_first=True, padding_side=side)
    return {"values": padded, "lengths": lengths, "longest": int(lengths.max())}


def augment(items: Sequence[Any]) -> Any:
    """Add noise to each sample by itself."""
    return [x + torch.randn(5) for x, _ in items], np.array([int(y) for _, y in items])


def test_collate_functions_that_keep_samples_apart_are_accepted() -> None:
    """Padding and noise are not taken for mixing, and the user's random numbers stay."""
    make_model()  # seeds torch, and draws what each model of ``start_with`` draws again
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    start_with(augment)
    for side in ("left", "right"):
        start_with(partial(pad, side), [Sequences() for _ in range(N)])
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])  # type: ignore[index]  # noqa: NPY002


def write_last_bit(private: PrivateTraining, _: Tensor) -> None:
    bias = private.module[2].bias.data  # type: ignore[index]
    bias[0] = torch.nextafter(bias[0], bias[1])


def write_momentum(private: PrivateTraining, inputs: Tensor) -> None:
    parameter = private.module[2].bias  # type: ignore[index]
    private.optimizer.state[parameter]["momentum_buffer"] = inputs.mean(dim=0)[:3]


def add_state(private: PrivateTraining, inputs: Tensor) -> None:
    private.optimizer.state["scale"] = inputs.mean()


def follow_loss(private: PrivateTraining, inputs: Tensor) -> None:
    plateau = ReduceLROnPlateau(private.optimizer, patience=0)
    for loss in (1.0, float(inputs.detach().norm())):
        plateau.step(loss)


def drop_parameter(private: PrivateTraining, _: Tensor) -> None:
    private.optimizer.param_groups[0]["params"].pop()


def set_gradient(private: PrivateTraining, inputs: Tensor) -> None:
    private.module[2].bias.grad = inputs.detach().mean(dim=0)[:3]  # type: ignore[index]


CHANGES: list[tuple[Callable[[PrivateTraining, Tensor], None], str]] = [
    (write_data, "parameters must not change"),
    (write_last_bit, "parameters must not change"),
    (write_momentum, "state must not change"),
    (add_to_momentum, "state must not change"),
    (add_state, "state must not change"),
    (follow_loss, r"schedule=….*public_change\(\)"),
    (change_decay, r"schedule=….*public_change\(\)"),
    (drop_parameter, r"schedule=….*public_change\(\)"),
    (set_gradient, r"must come from optimizer\.mean"),
]


def test_settings_that_a_hook_of_the_step_changes_are_refused() -> None:
    """They could follow a training loss, to which no noise was added."""
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    inner.register_step_post_hook(lambda own, *_: own.param_groups[0].update(lr=RATE / 3))
    private = open_loop(module=model, optimizer=inner)
    take_step(private, *next(iter(private.data_loader)))
    with pytest.raises(CornError, match="must not change between steps"):
        take_step(private, *next(iter(private.data_loader)))


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_changes_between_a_batch_and_its_step_are_refused(
    change: Callable[[PrivateTraining, Tensor], None], message: str
) -> None:
    private = open_loop()
    for _ in range(2):
        take_step(private, *next(iter(private.data_loader)))
    inputs, targets = next(iter(private.data_loader))
    differentiate(private, inputs, targets)
    change(private, inputs)
    with pytest.raises(CornError, match=message):
        private.optimizer.step()


def test_changes_before_the_gradient_of_samples_are_refused() -> None:
    """Gradients at parameters that follow from the batch, as in sharpness-aware minimisation."""
    private = open_loop()
    inputs, targets = next(iter(private.data_loader))
    write_data(private, inputs)
    with pytest.raises(CornError, match="parameters must not change"):
        differentiate(private, inputs, targets)


def test_changes_between_two_steps_are_refused() -> None:
    """They would be lost, or sent without noise."""
    private = open_loop()
    for _ in range(2):
        before = copy.deepcopy(private.module.state_dict())
        write_last_bit(private, torch.zeros(0))
        with pytest.raises(CornError, match="load weights before make_private"):
            next(iter(private.data_loader))
        private.module.load_state_dict(before)
        take_step(private, *next(iter(private.data_loader)))


def test_the_optimizer_forgets_moments_of_before() -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = make_parts()[0]
    cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    inner.step()
    assert not open_loop(module=model, optimizer=inner).optimizer.state


def test_changes_that_the_caller_declares_public_are_allowed() -> None:
    private = open_loop()
    _, optimizer, _ = private
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for _ in range(3):
        take_step(private, *next(iter(private.data_loader)))
        with optimizer.public_change():
            plateau.step(1.0)
    assert optimizer.param_groups[0]["lr"] < RATE
    with pytest.raises(CornError, match="found other ones"), optimizer.public_change():
        optimizer._inner.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    scheduled = open_loop(schedule=lambda own: StepLR(own, 1))
    with pytest.raises(CornError, match="use either"), scheduled.optimizer.public_change():
        pass


def test_schedules_follow_steps() -> None:
    private = open_loop(factory=FACTORIES[1], schedule=lambda own: StepLR(own, 2, gamma=0.5))
    scheduler, rates = private.optimizer.scheduler, []
    for _ in range(STEPS):
        for inputs, targets in private.data_loader:
            rates += scheduler.get_last_lr()
            take_step(private, inputs, targets)
            scheduler.step()
    assert rates == [0.05, 0.05, 0.025, 0.025, 0.0125]
    scheduler.load_state_dict(scheduler.state_dict())


LOSSES: list[tuple[Callable[[Tensor, Tensor], Any], str]] = [
    (lambda z, y: cross_entropy(z, y), r"found shape \(\): use reduction='none'"),
    (lambda z, y: cross_entropy(z, y, reduction="none")[1:], "each of the 48 samples"),
    (lambda z, _: z.square(), "found shape"),
    (lambda z, y: cross_entropy(z.detach(), y, reduction="none"), "without gradients"),
    (lambda z, y: cross_entropy(z, y).expand(len(z)), "its own sample alone"),
]


@pytest.mark.parametrize(("loss", "message"), LOSSES)
def test_losses_that_are_not_one_of_each_sample_are_refused(loss: Any, message: str) -> None:
    private = open_loop()
    inputs, targets = next(iter(private.data_loader))
    mean = private.optimizer.mean(loss(private.module(inputs), targets))
    with pytest.raises(InvalidArgumentError, match=message):
        mean.backward()  # type: ignore[no-untyped-call]


def test_gradients_of_a_whole_batch_are_refused() -> None:
    """Whatever the loss divides by: it may give a sample more weight than 1/B."""
    private = open_loop()
    inputs, targets = next(iter(private.data_loader))
    outputs = private.module(inputs)
    whole: Any = cross_entropy(outputs, targets)
    losses = cross_entropy(outputs, targets, reduction="none")
    with pytest.raises(CornError, match=r"must come from optimizer\.mean"):
        whole.backward(retain_graph=True)
    # By torch, where the pass of the mean comes first.
    with pytest.raises((CornError, RuntimeError)):
        (whole + private.optimizer.mean(losses)).backward()


def mix_up_in_loop(x: Tensor) -> Tensor:
    return 0.9 * x + 0.1 * x[[*range(1, len(x)), 0]]


def centre_in_place(x: Tensor) -> Tensor:
    return x.sub_(x.mean(dim=0))


def reverse(x: Tensor) -> Tensor:
    return x.flip(0)


@pytest.mark.parametrize("change", [mix_up_in_loop, centre_in_place, reverse])
@pytest.mark.parametrize("first", [0, 2])
def test_samples_that_the_loop_mixes_are_refused(
    change: Callable[[Tensor], Tensor], first: int
) -> None:
    """From the first batch on, or soon after they are mixed for the first time."""
    private = open_loop(whole_plan(num_steps=8))
    batches = (batch for _ in range(8) for batch in private.data_loader)

    def run() -> None:
        for number, (inputs, targets) in enumerate(batches):
            mixed = change(inputs) if number >= first else inputs
            take_step(private, mixed, targets)

    with pytest.raises(InvalidArgumentError, match="its own sample alone"):
        run()


def test_copies_would_release_with_the_same_noise() -> None:
    private = open_loop()
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(CornError, match="same noise"):
            duplicate(private.optimizer)


@pytest.mark.parametrize("begins_before", [True, False])
def test_a_fork_would_release_with_the_same_noise(
    begins_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = open_loop()
    batches = iter(private.data_loader)
    if begins_before:
        differentiate(private, *next(batches))
    # As in a child process, which has a copy of all keys.
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(CornError, match="same noise"):
        _ = private.optimizer.step() if begins_before else next(batches)


def test_a_sample_must_be_in_one_data_set_once() -> None:
    data = TensorDataset(*make_parts()[0])
    twice: list[list[Any]] = [
        [Subset(data, range(k, k + 4)) for k in (0, 4, 7)],
        [ConcatDataset([data, data])],
        [Subset(data, [0, 0, 1])],
    ]
    for datasets in twice:
        with pytest.raises(InvalidArgumentError, match="every sample once"):
            require_different_samples(datasets)
    require_different_samples([Subset(data, range(4)), Subset(Subset(data, range(4, 8)), [3, 0])])


def test_loaders_by_label_are_those_in_the_order_of_the_graph() -> None:
    names = ["Oslo", "Rome", "Kyiv"]
    graph = nx.cycle_graph(names)
    data = [TensorDataset(torch.full((9, 5), float(k)), torch.zeros(9).long()) for k in range(3)]
    parts = [DataLoader(each, batch_size=3) for each in data]
    given = dict(zip(["Kyiv", "Oslo", "1"], (parts[2], parts[0], parts[1]), strict=True))
    private = make_poisson(data_loader=given, network=graph)
    assert isinstance(private.data_loader.dataset, ConcatDataset)
    assert private.data_loader.dataset.datasets == data
    with pytest.raises(InvalidArgumentError, match="Rome"):
        make_poisson(data_loader={"Oslo": parts[0], "Kyiv": parts[2]}, network=graph)


def test_a_run_gives_its_ledger_back_after_the_last_step(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    private = make_poisson(ledger=path, epochs=1)
    run_loop(private, 1)
    again = make_poisson(ledger=path, epochs=1)
    assert private.optimizer.get_epsilon() == again.optimizer.get_epsilon() > 0
    with pytest.warns(CornWarning, match="used up"):
        assert not list(again.data_loader)


def test_a_device_that_torch_lacks_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="device must be one on which"):
        make_poisson(device="cuda:99")
