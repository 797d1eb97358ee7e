"""``make_private`` with exact sums: one model, and one step of any optimizer on the average."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from corn.distributed.keyring import make_keys
from corn.distributed.own_loop import make_private
from corn.distributed.rendezvous import Rendezvous
from corn.distributed.settings import RunSettings
from corn.errors import CornError
from corn.learn import (
    Constant,
    Mechanism,
    SweepSettings,
    TrainingProblem,
    Trial,
    run_sweep,
)
from corn.learn.batches import AgentData
from corn.learn.own_loop import PrivateTraining, save_state
from corn.learn.perturbation import DrawnNoise
from corn.learn.tasks import ModuleTask
from corn.noise.masks import MaskWords, draw_mask, draw_offset, mask_release
from corn.plan import Plan, make_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network

from .threads import make_rendezvous, run_in_threads

N, M, STEPS, SEED, RATE = 4, 12, 5, 3, 0.05
FACTORIES: list[Callable[..., Optimizer]] = [
    partial(SGD, lr=RATE, momentum=0.9),
    partial(Adam, lr=RATE),
    partial(AdamW, lr=RATE, weight_decay=0.1),
]


def make_parts() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [
        (torch.randn(M, 5, generator=random), torch.randint(0, 3, (M,), generator=random))
        for _ in range(N)
    ]


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def read(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def sum_plan(unit: str = "agent", *, clip: float = 0.5, **options: Any) -> Plan:
    sample: dict[str, Any] = {"unit": "sample", "batch_size": M, "sampling": "every-step"}
    budget = PrivacyBudget(
        50, 1e-5, num_steps=STEPS, clip=clip, **(sample if unit == "sample" else {})
    )
    return make_plan(load_network(f"ring:{N}", mixing="sum"), budget, **options)


def open_loop(plan: Plan, factory: Callable[..., Optimizer], **options: Any) -> PrivateTraining:
    model = make_model()
    return make_private(
        plan,
        module=model,
        optimizer=factory(model.parameters()),
        data_loader=[DataLoader(TensorDataset(*p), batch_size=M) for p in make_parts()],
        **options,
    )


def take_step(private: PrivateTraining, inputs: Tensor, targets: Tensor, unit: str) -> None:
    private.optimizer.zero_grad()
    outputs = private.module(inputs)
    if unit == "sample":
        private.optimizer.backward(cross_entropy(outputs, targets, reduction="none"))
    else:
        cross_entropy(outputs, targets).backward()  # type: ignore[no-untyped-call]
    private.optimizer.step()


def run_loop(private: PrivateTraining, unit: str = "agent") -> Tensor:
    for _ in range(STEPS):
        for inputs, targets in private.data_loader:
            take_step(private, inputs, targets, unit)
    return read(private.module)


@pytest.mark.parametrize("factory", FACTORIES)
def test_without_noise_it_is_plain_torch_on_the_average_gradient(
    factory: Callable[..., Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fine grid and a large clipping norm leave gradients as they are.
    monkeypatch.setattr(Plan, "check_parameters", lambda *_: None)
    monkeypatch.setattr("corn.noise.masks.list_terms", lambda *_, **__: [])
    plan = replace(sum_plan(clip=1000), grid=2.0**-40)
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
@pytest.mark.parametrize("unit", ["agent", "sample"])
def test_a_loop_gives_the_model_of_a_sweep(unit: str, factory: Callable[..., Optimizer]) -> None:
    plan = sum_plan(unit)
    private = open_loop(plan, factory, seed=SEED)
    found = run_loop(private, unit)
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
    assert private.get_epsilon() == pytest.approx(50, rel=2e-3)
    assert private.optimizer.privacy.startswith("simulated: ε = 50")


@pytest.mark.parametrize("factory", FACTORIES)
def test_models_depend_on_the_sum_of_releases_alone(
    factory: Callable[..., Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single releases have too little noise: moving some from one to another changes no bit."""
    plan = sum_plan()
    # All runs have the same offsets, and no noise but the shift.
    monkeypatch.setattr(DrawnNoise, "_offset", property(lambda own: (bytes(32), own.step)))

    def find_model(shift: int) -> Tensor:
        def make_message(self: DrawnNoise, gradient: Tensor, factor: Tensor) -> MaskWords:
            own, size = self.share, len(gradient)
            mask = draw_mask(
                plan.decomposition,
                own.agent,
                source=own.source,
                nonce=own.nonce,
                step=self.step,
                size=size,
                bits=plan.mask_bits,
            )
            noise = {0: shift, 2: -shift}.get(own.agent, 0) * plan.grid
            noisy = gradient.double().numpy() * float(factor) + noise
            offset = draw_offset(bytes(32), self.step, size)
            return mask_release(noisy, grid=plan.grid, offset=offset, mask=mask)

        monkeypatch.setattr(DrawnNoise, "make_message", make_message)
        return run_loop(open_loop(plan, factory, secure=True))

    expected = find_model(0)
    for shift in (1, 77, 12345):
        assert torch.equal(find_model(shift), expected), shift


def test_neither_module_nor_optimizer_see_a_single_release() -> None:
    private = open_loop(sum_plan(), FACTORIES[1])
    inner = private.optimizer._inner
    steps: list[int] = []
    inner.register_step_post_hook(lambda *_: steps.append(number))
    models = [read(private.module)]
    for number, (inputs, targets) in enumerate(
        batch for _ in range(STEPS) for batch in private.data_loader
    ):
        assert torch.equal(read(private.module), models[-1]), "all agents have one model"
        take_step(private, inputs, targets, "agent")
        assert all(p.grad is None for p in private.module.parameters())
        if (number + 1) % N:
            assert torch.equal(read(private.module), models[-1])
        else:
            models.append(read(private.module))
            assert not torch.equal(models[-1], models[-2])
    assert steps == [N * (step + 1) - 1 for step in range(STEPS)]


def test_schedules_advance_once_per_step() -> None:
    private = open_loop(sum_plan(), FACTORIES[1], schedule=lambda own: StepLR(own, 2, gamma=0.5))
    rates = []
    for _ in range(STEPS):
        for inputs, targets in private.data_loader:
            rates.append(private.optimizer.param_groups[0]["lr"])
            take_step(private, inputs, targets, "agent")
    assert rates == [rate for rate in (0.05, 0.05, 0.025, 0.025, 0.0125) for _ in range(N)]


def add_to_moments(private: PrivateTraining, inputs: Tensor) -> None:
    for own in private.optimizer.state.values():
        own["exp_avg"].add_(inputs.mean())


def write_data(private: PrivateTraining, inputs: Tensor) -> None:
    with torch.no_grad():
        next(private.module.parameters()).add_(inputs.mean())


def change_rate(private: PrivateTraining, inputs: Tensor) -> None:
    private.optimizer.param_groups[0]["lr"] = float(inputs.norm())


@pytest.mark.parametrize("change", [add_to_moments, write_data, change_rate])
@pytest.mark.parametrize("agent", range(N))
def test_changes_are_refused_at_every_agent_of_a_step(
    change: Callable[[PrivateTraining, Tensor], None], agent: int
) -> None:
    private = open_loop(sum_plan(), FACTORIES[1])
    batches = (batch for _ in range(STEPS) for batch in private.data_loader)
    for _ in range(N + agent):
        inputs, targets = next(batches)
        take_step(private, inputs, targets, "agent")
    inputs, targets = next(batches)
    cross_entropy(private.module(inputs), targets).backward()  # type: ignore[no-untyped-call]
    change(private, inputs)
    with pytest.raises(CornError, match="must not change between"):
        private.optimizer.step()


def test_secret_noise_of_samples_by_poisson_sampling() -> None:
    budget = PrivacyBudget(
        10, 1e-5, num_steps=STEPS, clip=1.0, unit="sample", batch_size=4, samples_per_agent=M
    )
    plan = make_plan(load_network(f"ring:{N}", mixing="sum"), budget)
    models = []
    for _ in range(2):
        private = open_loop(plan, FACTORIES[1], secure=True)
        models.append(run_loop(private, "sample"))
        assert private.get_epsilon() == pytest.approx(10, rel=2e-3)
        assert private.get_epsilon() <= 10
        assert private.optimizer.privacy.startswith("the models keep ε = 10")
    assert not torch.equal(*models)


@pytest.mark.slow
@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("schedule", [None, lambda own: StepLR(own, 5, gamma=0.8)])
def test_an_agent_returns_with_the_state_of_a_neighbours_optimizer(
    factory: Callable[..., Optimizer], schedule: Any, tmp_path: Path
) -> None:
    """All agents end with the same bits, moments and counts of steps included."""
    num_steps, leaving = 40, 2
    budget = PrivacyBudget(50, 1e-5, num_steps=num_steps, clip=0.5)
    plan = make_plan(load_network(f"ring:{N}", mixing="sum"), budget)
    make_keys(tmp_path / "keys", N)
    has_returned = threading.Event()
    # Modules draw their first parameters from torch's global generator.
    models = [make_model() for _ in range(2 * N)]

    def take_part(rendezvous: Rendezvous, model: nn.Module, *, rejoins: bool) -> PrivateTraining:
        rendezvous.keys = tmp_path / "keys"
        return make_private(
            plan,
            module=model,
            optimizer=factory(model.parameters()),
            data_loader=DataLoader(TensorDataset(*make_parts()[rendezvous.agent]), batch_size=M),
            rendezvous=rendezvous,
            settings=RunSettings(timeout=20, evaluate_at=(0,)),
            schedule=schedule,
            rejoins=rejoins,
        )

    def run(private: PrivateTraining, most: int = num_steps) -> int:
        count = 0
        while count < most:
            before = count
            for inputs, targets in private.data_loader:
                time.sleep(0 if has_returned.is_set() else 0.02)
                take_step(private, inputs, targets, "agent")
                count += 1
            if count == before:
                break
        return count

    def run_one(rendezvous: Rendezvous) -> tuple[int, dict[str, Tensor], Tensor]:
        agent = rendezvous.agent
        private = take_part(rendezvous, models[agent], rejoins=False)
        if agent == leaving:
            run(private, most=5)
            private.data_loader.close()
            again = make_rendezvous(agent, N, rendezvous.store)
            private = take_part(again, models[N + agent], rejoins=True)
            has_returned.set()
        count = run(private)
        return count, save_state(private.optimizer._inner), read(private.module)

    results: list[Any] = run_in_threads(N, run_one)
    counts, states, trained = zip(*results, strict=True)
    # One step is void, as the agent left in it.
    assert {counts[agent] for agent in range(N) if agent != leaving} == {num_steps}
    assert 0 < counts[leaving] < num_steps - 5
    for state, model in zip(states, trained, strict=True):
        assert torch.equal(model, trained[0])
        assert state.keys() == states[0].keys() != set()
        assert all(torch.equal(state[name], states[0][name]) for name in state)


def test_noise_without_masks_is_summed_too() -> None:
    private = open_loop(sum_plan(mechanism="ldp"), FACTORIES[1], secure=True)
    assert torch.isfinite(run_loop(private)).all()
