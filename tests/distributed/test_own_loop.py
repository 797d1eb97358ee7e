"""``make_private``: the user's own loop gives the models of the library's own training."""

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as entropy_of
from torch.utils.data import DataLoader, Dataset, TensorDataset

import corn
from corn.distributed import RunSettings
from corn.distributed.own_loop import AgentTurns, make_private
from corn.distributed.startup.keyring import make_keys
from corn.distributed.startup.rendezvous import Rendezvous
from corn.errors import CornError, InvalidArgumentError
from corn.learn import Constant, Method, SweepSettings, TrainingProblem, Trial, run_sweep
from corn.learn.batches import AgentData
from corn.learn.own_loop import PrivateTraining
from corn.learn.tasks import ModuleTask
from corn.learn.user_model import UserModel
from corn.plan import Plan, make_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network

from .threads import run_in_threads

N, M, STEPS, SEED = 3, 12, 4, 3


def cross_entropy(outputs: Tensor, targets: Tensor) -> Any:
    return entropy_of(outputs, targets)


def make_parts() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [
        (torch.randn(M, 5, generator=random), torch.randint(0, 3, (M,), generator=random))
        for _ in range(N)
    ]


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def small_plan(unit: str = "agent", num_steps: int = STEPS) -> Plan:
    sample: dict[str, Any] = {"unit": "sample", "batch_size": M, "sampling": "every-step"}
    options = sample if unit == "sample" else {}
    budget = PrivacyBudget(50, 1e-5, num_steps=num_steps, clip=0.5, **options)
    return make_plan(load_network(f"complete:{N}"), budget)


def loaders() -> list[DataLoader[Any]]:
    return [DataLoader(TensorDataset(*part), batch_size=M) for part in make_parts()]


def run_loop(private: PrivateTraining) -> int:
    model, optimizer, loader = private
    count = 0
    while True:
        before = count
        for inputs, targets in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            count += 1
        if count == before:
            return count


def read(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def rehearse(plan: Plan, model: nn.Module, rendezvous: Rendezvous) -> PrivateTraining:
    """Make one agent of a running network, with the noise of a simulation."""
    return make_private(
        plan,
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loaders()[rendezvous.agent],
        rendezvous=rendezvous,
        settings=RunSettings(rehearsal_seed=SEED, timeout=20),
    )


def simulate_by_sweep(plan: Plan, step_size: float) -> Tensor:
    """Return the average model of the library's own simulation with the same noise."""
    problem = TrainingProblem(
        ModuleTask(make_model(), cross_entropy), AgentData.from_parts(make_parts())
    )
    settings = SweepSettings(
        STEPS, M, (SEED,), plan.cooldown_steps, plan.dtype, noise_keys="seed", momentum=0.0
    )
    trials = [Trial(Method.from_plan(plan), Constant(step_size))]
    return run_sweep(problem, plan.network, trials, settings=settings).average_parameters[0]


@pytest.mark.parametrize("unit", ["agent", "sample"])
def test_a_loop_over_all_agents_gives_the_models_of_a_simulation(unit: str) -> None:
    plan, model = small_plan(unit), make_model()
    private = make_private(
        plan,
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loaders(),
        seed=SEED,
    )
    assert run_loop(private) == N * STEPS
    expected = simulate_by_sweep(plan, 0.1)
    torch.testing.assert_close(read(model), expected, rtol=1e-4, atol=1e-5)
    assert private.get_epsilon() == pytest.approx(50, rel=2e-3)
    assert private.get_epsilon(1e-3) < private.get_epsilon(1e-6)
    with pytest.raises(InvalidArgumentError, match="delta must be in"):
        private.get_epsilon(0)
    assert private.optimizer.privacy.startswith("simulated")


@pytest.mark.parametrize("unit", ["agent", "sample"])
def test_loops_of_a_running_network_give_the_models_of_a_simulation(unit: str) -> None:
    plan = small_plan(unit)
    # Made here: threads share torch's generator.
    own_models = [make_model() for _ in range(N)]

    def run(rendezvous: Rendezvous) -> Tensor:
        model = own_models[rendezvous.agent]
        private = rehearse(plan, model, rendezvous)
        assert run_loop(private) == STEPS
        return read(model)

    found = run_in_threads(N, run)
    models = [own for own in found if isinstance(own, Tensor)]
    assert len(models) == N, found
    expected = simulate_by_sweep(plan, 0.1)
    torch.testing.assert_close(torch.stack(models).mean(dim=0), expected, rtol=1e-4, atol=1e-5)


def test_an_agent_counts_its_releases_in_its_ledger(tmp_path: Path) -> None:
    plan = small_plan("sample")
    make_keys(tmp_path, N)
    start = make_model()

    def run(rendezvous: Rendezvous) -> float:
        model, rendezvous.keys = copy.deepcopy(start), tmp_path
        private = make_private(
            plan,
            module=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
            data_loader=loaders()[rendezvous.agent],
            rendezvous=rendezvous,
            settings=RunSettings(timeout=20),
        )
        assert private.get_epsilon() == 0
        run_loop(private)
        assert private.optimizer.privacy.startswith("the models keep ε = 50")
        return private.get_epsilon()

    assert run_in_threads(N, run) == [pytest.approx(50, rel=2e-3)] * N
    again = run_in_threads(N, run)
    assert all("budget is spent" in str(own) for own in again), again


def test_an_agent_can_leave_before_the_last_step() -> None:
    plan = small_plan(num_steps=30)
    own_models = [make_model() for _ in range(N)]

    def run(rendezvous: Rendezvous) -> int:
        model = own_models[rendezvous.agent]
        private = rehearse(plan, model, rendezvous)
        if rendezvous.agent:
            return run_loop(private)
        for inputs, targets in private.data_loader:
            cross_entropy(model(inputs), targets).backward()
            private.optimizer.step()
        private.data_loader.close()
        return 1

    assert run_in_threads(N, run) == [1, 30, 30]


def test_a_loop_that_goes_on_after_a_failure_does_not_wait_for_ever() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(rendezvous: Rendezvous) -> int:
        turns = AgentTurns(
            small_plan(),
            UserModel(model, clips_samples=False),
            optimizer,
            loaders()[0],
            rendezvous,
            RunSettings(rehearsal_seed=SEED),
        )
        with pytest.raises(InvalidArgumentError, match="the plan is for 3 agents"):
            turns.start(out=None, lifetime=None)
        with pytest.raises(InvalidArgumentError, match="the plan is for 3 agents"):
            turns.begin()
        return 1

    assert run_in_threads(1, run) == [1]


class Records(Dataset[Any]):
    """Samples as dictionaries with text for targets."""

    def __init__(self, part: tuple[Tensor, Tensor]) -> None:
        self._inputs, self._targets = part

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"values": self._inputs[row].tolist(), "label": "abc"[int(self._targets[row])]}


def collate(items: Sequence[dict[str, Any]]) -> tuple[Tensor, list[str]]:
    return torch.tensor([item["values"] for item in items]), [item["label"] for item in items]


def test_collate_functions_schedulers_adam_and_secret_noise() -> None:
    parts = make_parts()
    budget = PrivacyBudget(
        10, 1e-5, num_steps=6, clip=1.0, unit="sample", batch_size=4, samples_per_agent=M
    )
    model = make_model()
    model, optimizer, loader = make_private(
        f"complete:{N}",
        budget,
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        data_loader=[DataLoader(Records(p), batch_size=2, collate_fn=collate) for p in parts],
        secure=True,
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    widths = set()
    for _ in range(3):
        for inputs, labels in loader:
            widths.add(len(labels))
            targets = torch.tensor(["abc".index(label) for label in labels])
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        schedule.step()
    assert len(loader) == N * 3
    assert len(widths) == 1, "the number of samples in a batch is hidden"
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 8)
    assert optimizer.get_epsilon(1e-5) == pytest.approx(10, rel=2e-3)
    assert optimizer.privacy.startswith("the models keep ε = 10")
    assert torch.isfinite(read(model)).all()


def test_one_loader_is_not_dealt_out_in_earnest() -> None:
    """A sample more would move all others, which no ε covers."""
    model, data = make_model(), TensorDataset(*make_parts()[0])
    with pytest.raises(InvalidArgumentError, match="data_loader must be a list of one for each"):
        make_private(
            f"complete:{N}",
            PrivacyBudget(10, 1e-5, num_steps=2, clip=1.0),
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=2),
            secure=True,
        )


def test_one_loader_is_dealt_out_and_runs_with_one_seed_agree() -> None:
    inputs, targets = (torch.cat(part) for part in zip(*make_parts(), strict=True))
    models = []
    for _ in range(2):
        model = make_model()
        private = make_private(
            small_plan(),
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=4),
        )
        assert len(private.data_loader) == N * 3
        run_loop(private)
        models.append(read(model))
    assert torch.equal(*models)


def test_noise_is_added_and_the_gradient_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user's optimizer sees is a multiple of the grid, far from the gradient."""
    plan, model = small_plan("sample"), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    usual = optimizer.step

    def step() -> None:
        seen.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        usual()

    monkeypatch.setattr(optimizer, "step", step)
    private = make_private(plan, module=model, optimizer=optimizer, data_loader=loaders())
    inputs, targets = next(iter(private.data_loader))
    (cross_entropy(model(inputs), targets) * 1e6).backward()
    private.optimizer.step()
    (released,) = seen
    assert torch.equal(released / plan.grid, (released / plan.grid).round())
    limit = 0.5 + 6 * math.sqrt(len(released)) * plan.decomposition.covariance[0, 0] ** 0.5
    assert 0 < float(released.norm()) < limit


def test_only_trained_parameters_move_and_others_are_watched() -> None:
    model = make_model()
    model[0].requires_grad_(False)  # type: ignore[index]
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = model[0].weight.clone()  # type: ignore[index]
    private = make_private(
        small_plan("sample"),
        module=model,
        optimizer=torch.optim.SGD(trained, lr=0.1),
        data_loader=loaders(),
    )
    run_loop(private)
    assert torch.equal(model[0].weight, frozen)  # type: ignore[index]
    private = make_private(
        small_plan("sample"),
        module=model,
        optimizer=torch.optim.SGD(trained, lr=0.1),
        data_loader=loaders(),
    )
    inputs, targets = next(iter(private.data_loader))
    cross_entropy(model(inputs), targets).backward()
    with torch.no_grad():
        model[0].weight.data.add_(1)  # type: ignore[index]
    with pytest.raises(CornError, match=r"'0\.weight' is not trained and must not change"):
        private.optimizer.step()


def test_steps_out_of_order_are_refused() -> None:
    model = make_model()
    options: dict[str, Any] = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": loaders(),
    }
    _, optimizer, loader = make_private(small_plan(), **options)
    with pytest.raises(CornError, match="others would get no noise"):
        optimizer.add_param_group({"params": list(make_model().parameters())})
    with pytest.raises(CornError, match="every agent begins with an empty one"):
        optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(CornError, match="must follow a batch of the private loader"):
        optimizer.step()
    batches = iter(loader)
    inputs, targets = next(batches)
    with pytest.raises(CornError, match=r"call loss\.backward\(\) before"):
        optimizer.step()
    with pytest.raises(CornError, match="must follow every batch of the loader"):
        next(batches)
    cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    with pytest.raises(CornError, match="once: every step is a release"):
        optimizer.step()


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_unfit_objects_are_refused() -> None:
    plan, model = small_plan(), make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    usual: dict[str, Any] = {"module": model, "optimizer": sgd, "data_loader": loaders()}
    mixing = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"module": mixing, "optimizer": torch.optim.SGD(mixing.parameters())}, "GroupNorm(1, 3)"),
        ({"optimizer": torch.optim.LBFGS(model.parameters())}, "LBFGS"),
        ({"optimizer": torch.optim.SGD(make_model().parameters())}, "all of them and no others"),
        ({"data_loader": loaders()[:2]}, "one for each agent"),
        ({"data_loader": DataLoader(Stream())}, "found a stream"),
        ({"out": Path("out")}, "belong to an agent of a network"),
        ({"module": make_model().requires_grad_(False)}, "not frozen"),
    ]
    for changed, message in cases:
        with pytest.raises(InvalidArgumentError) as caught:
            make_private(plan, **{**usual, **changed})
        assert message in str(caught.value)
    with pytest.raises(InvalidArgumentError, match="budget must be given"):
        make_private("ring:3", **usual)


def test_samples_along_another_dimension_are_refused() -> None:
    """Also where a batch has as many samples as a sample has values."""
    budget = PrivacyBudget(
        10, 1e-5, num_steps=6, clip=1.0, unit="sample", batch_size=4, samples_per_agent=M
    )

    def transpose(items: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in items], dim=1), torch.stack([y for _, y in items])

    parts = [TensorDataset(*part) for part in make_parts()]
    model = make_model()
    with pytest.raises(InvalidArgumentError, match="samples along the first dimension"):
        make_private(
            f"complete:{N}",
            budget,
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=[DataLoader(part, batch_size=2, collate_fn=transpose) for part in parts],
        )


def test_make_private_is_public() -> None:
    assert corn.make_private is make_private
