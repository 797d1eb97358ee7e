"""``make_private``: the user's own loop gives the models of the library's own training."""

import copy
import math
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as entropy_of
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import corn
from corn.covariance import ThreatModel
from corn.distributed import RunSettings, rounds
from corn.distributed.keyring import find_terms, make_keys
from corn.distributed.own_loop import make_private
from corn.distributed.recovery import replan
from corn.distributed.rendezvous import Rendezvous
from corn.errors import CornError, InvalidArgumentError
from corn.learn import Constant, Mechanism, SweepSettings, TrainingProblem, Trial, run_sweep
from corn.learn.batches import AgentData
from corn.learn.own_loop import PrivateTraining
from corn.learn.perturbation import NoiseShare
from corn.learn.tasks import ModuleTask
from corn.plan import Plan, make_plan, verify_plan
from corn.privacy import PrivacyBudget
from corn.privacy.composition import Expense, compose_expenses
from corn.topology import load_network

from .rehearsal import rehearsing
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
    return make_plan(load_network(f"complete:{N}", mixing="gossip"), budget)


def loaders() -> list[DataLoader[Any]]:
    return [DataLoader(TensorDataset(*part), batch_size=M) for part in make_parts()]


def differentiate(private: PrivateTraining, inputs: Tensor, targets: Tensor, unit: str) -> None:
    outputs = private.module(inputs)
    if unit == "sample":
        private.optimizer.backward(entropy_of(outputs, targets, reduction="none"))
    else:
        cross_entropy(outputs, targets).backward()


def run_loop(private: PrivateTraining, unit: str = "agent") -> int:
    _, optimizer, loader = private
    count = 0
    while True:
        before = count
        for inputs, targets in loader:
            optimizer.zero_grad()
            differentiate(private, inputs, targets, unit)
            optimizer.step()
            count += 1
        if count == before:
            return count


def read(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def rehearse(
    plan: Plan, model: nn.Module, rendezvous: Rendezvous, timeout: float = 20
) -> PrivateTraining:
    """Make one agent of a running network, with the noise of a simulation."""
    return make_private(
        plan,
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loaders()[rendezvous.agent],
        rendezvous=rendezvous,
        settings=RunSettings(timeout=timeout),
    )


def simulate_by_sweep(plan: Plan, step_size: float) -> Tensor:
    """Return the average model of the library's own simulation with the same noise."""
    problem = TrainingProblem(
        ModuleTask(make_model(), cross_entropy), AgentData.from_parts(make_parts())
    )
    settings = SweepSettings(
        STEPS, M, (SEED,), plan.cooldown_steps, plan.dtype, noise_keys="seed", momentum=0.0
    )
    trials = [Trial(Mechanism.from_plan(plan), Constant(step_size))]
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
    assert run_loop(private, unit) == N * STEPS
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
        assert run_loop(private, unit) == STEPS
        return read(model)

    with rehearsing(SEED):
        found = run_in_threads(N, run)
    models = [own for own in found if isinstance(own, Tensor)]
    assert len(models) == N, found
    expected = simulate_by_sweep(plan, 0.1)
    torch.testing.assert_close(torch.stack(models).mean(dim=0), expected, rtol=1e-4, atol=1e-5)


def run_with_keys(
    plan: Plan, model: nn.Module, rendezvous: Rendezvous, keys: Path, **settings: Any
) -> PrivateTraining:
    """Make one agent of a running network, with secret noise and a ledger."""
    rendezvous.keys = keys
    return make_private(
        plan,
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data_loader=loaders()[rendezvous.agent % N],
        rendezvous=rendezvous,
        settings=RunSettings(timeout=20, **settings),
    )


def test_an_agent_counts_its_releases_in_its_ledger(tmp_path: Path) -> None:
    plan = small_plan("sample")
    make_keys(tmp_path, N)
    start = make_model()
    (guarantee, *_) = verify_plan(plan).guarantees

    def run(rendezvous: Rendezvous) -> list[float]:
        private = run_with_keys(plan, copy.deepcopy(start), rendezvous, tmp_path)
        # The step under way counts.
        found = [private.get_epsilon()]
        for inputs, targets in private.data_loader:
            differentiate(private, inputs, targets, "sample")
            private.optimizer.step()
        private.data_loader.close()
        return found

    def finish(rendezvous: Rendezvous) -> list[float]:
        private = run_with_keys(plan, copy.deepcopy(start), rendezvous, tmp_path)
        found = [private.get_epsilon()]
        run_loop(private, "sample")
        assert private.optimizer.privacy.startswith("the models keep ε = 50")
        return [*found, private.get_epsilon()]

    terms = find_terms(plan, 0)
    # Two steps were begun by the first run, and one by the second before its first batch.
    after = [
        compose_expenses([Expense(terms, guarantee.precision, count)], 1e-5).epsilon
        for count in (1, 3, STEPS)
    ]
    for own in run_in_threads(N, run):
        assert own == pytest.approx(after[:1])
    for own in run_in_threads(N, finish):
        assert own == pytest.approx(after[1:])
    assert after[-1] == pytest.approx(50, rel=2e-3)
    again = run_in_threads(N, run)
    assert all("budget is spent" in str(own) for own in again), again


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return ε of a Gaussian mechanism by its formula (Balle and Wang 2018)."""

    def excess(epsilon: float) -> float:
        above = norm.cdf(mu / 2 - epsilon / mu)
        return float(above - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)) - delta

    return float(brentq(excess, 0, 100))


def test_epsilon_after_a_new_plan_for_survivors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new noise may be less than the first plan's, and counts from the step of the switch."""
    budget = PrivacyBudget(10, 1e-5, num_steps=30, clip=0.1)
    plan = make_plan(
        load_network("path:4", mixing="gossip"), budget, mechanism="decor", threat=ThreatModel()
    )
    make_keys(tmp_path, 4)
    own_models = [make_model() for _ in range(4)]
    made: dict[tuple[int, ...], tuple[int, Plan]] = {}

    def record(*args: Any, **options: Any) -> Plan:
        again = replan(*args, **options)
        made[args[1]] = options["steps_left"], again
        return again

    monkeypatch.setattr(rounds, "replan", record)

    def run(rendezvous: Rendezvous) -> tuple[float, int]:
        count, model = 0, own_models[rendezvous.agent]
        private = run_with_keys(plan, model, rendezvous, tmp_path, on_dropout="replan")
        if rendezvous.agent == 0:
            for inputs, targets in private.data_loader:
                differentiate(private, inputs, targets, "agent")
                private.optimizer.step()
            private.data_loader.close()
        else:
            count = run_loop(private)
        return private.get_epsilon(), count

    found = run_in_threads(4, run)
    (survivors, (steps_left, again)), *others = made.items()
    assert (survivors, others) == ((1, 2, 3), [])
    is_higher = []
    for place, agent in enumerate(survivors):
        # Against an eavesdropper: [R⁻¹]_ii of the covariance of all, for each step.
        first = np.linalg.inv(plan.decomposition.covariance)[agent, agent]
        then = np.linalg.inv(again.decomposition.covariance)[place, place]
        own = found[agent]
        assert isinstance(own, tuple), own
        epsilon, count = own
        # Those that were behind leave steps out, as far apart as agents of a path may be.
        assert 28 <= count <= 30
        by_first, spent = (
            gaussian_epsilon(2 * 0.1 * math.sqrt(total), 1e-5)
            for total in (count * first, (count - steps_left) * first + steps_left * then)
        )
        assert spent <= epsilon <= 10 * (1 + 1e-6)
        is_higher.append(spent > 1.03 * by_first)
    assert any(is_higher), "the noise of the first plan would have given a wrong ε"


def test_a_loop_that_computes_for_longer_than_the_time_out_is_not_lost() -> None:
    """Links send heartbeats by themselves, while the loop has the agent's thread."""
    plan = small_plan()
    own_models = [make_model() for _ in range(N)]

    def run(rendezvous: Rendezvous) -> int:
        model = own_models[rendezvous.agent]
        private = rehearse(plan, model, rendezvous, timeout=1.5)
        inputs, targets = next(iter(private.data_loader))
        cross_entropy(model(inputs), targets).backward()
        time.sleep(3.0 if rendezvous.agent == 1 else 0.0)
        private.optimizer.step()
        return run_loop(private)

    with rehearsing(SEED):
        assert run_in_threads(N, run) == [STEPS - 1] * N


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

    with rehearsing(SEED):
        first, *others = run_in_threads(N, run)
    assert first == 1
    # Agents that were behind leave a step out.
    assert all(isinstance(own, int) and 29 <= own <= 30 for own in others), others


def test_a_loop_that_goes_on_after_a_failure_gets_the_same_error_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model()
    private = make_private(
        small_plan(),
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loaders(),
    )

    def fail(*_: object) -> None:
        raise CornError("the disk is full")

    monkeypatch.setattr(NoiseShare, "take", fail)
    with pytest.raises(CornError, match="the disk is full"):
        run_loop(private)
    with pytest.raises(CornError, match="the disk is full"):
        private.optimizer.step()
    with pytest.raises(CornError, match="the disk is full"):
        next(iter(private.data_loader))


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


def test_collate_functions_schedules_and_secret_noise() -> None:
    parts = make_parts()
    budget = PrivacyBudget(
        10, 1e-5, num_steps=6, clip=1.0, unit="sample", batch_size=4, samples_per_agent=M
    )
    model = make_model()
    rates = []
    model, optimizer, loader = make_private(
        f"complete:{N}",
        budget,
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
        data_loader=[DataLoader(Records(p), batch_size=2, collate_fn=collate) for p in parts],
        schedule=lambda own: torch.optim.lr_scheduler.StepLR(own, step_size=3, gamma=0.5),
        secure=True,
    )
    widths = set()
    for _ in range(3):
        for inputs, labels in loader:
            widths.add(len(labels))
            rates.append(optimizer.param_groups[0]["lr"])
            targets = torch.tensor(["abc".index(label) for label in labels])
            optimizer.backward(entropy_of(model(inputs), targets, reduction="none"))
            optimizer.step()
    assert len(loader) == N * 3
    assert len(widths) == 1, "the number of samples in a batch is hidden"
    # Once with each step of the network, not with each agent.
    assert rates == [0.05] * 3 * N + [0.025] * 3 * N
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
    private.optimizer.backward(entropy_of(model(inputs), targets, reduction="none") * 1e6)
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
    run_loop(private, "sample")
    assert torch.equal(model[0].weight, frozen)  # type: ignore[index]
    private = make_private(
        small_plan("sample"),
        module=model,
        optimizer=torch.optim.SGD(trained, lr=0.1),
        data_loader=loaders(),
    )
    inputs, targets = next(iter(private.data_loader))
    differentiate(private, inputs, targets, "sample")
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
        ({"optimizer": torch.optim.Adam(model.parameters())}, "mechanism ldp"),
        ({"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau}, "which follows a loss"),
        ({"schedule": lambda _: StepLR(sgd, 1)}, "for the optimizer that it is given"),
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


def sample_budget() -> PrivacyBudget:
    return PrivacyBudget(
        10, 1e-5, num_steps=6, clip=1.0, unit="sample", batch_size=4, samples_per_agent=M
    )


def start_with(collate_fn: Any, parts: Sequence[Any] | None = None) -> None:
    """Make a private loop with a collate function."""
    sets = parts or [TensorDataset(*part) for part in make_parts()]
    model = make_model()
    make_private(
        f"complete:{N}",
        sample_budget(),
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=[DataLoader(part, batch_size=2, collate_fn=collate_fn) for part in sets],
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


@pytest.mark.parametrize("collate_fn", [mix_up, mix_up_sometimes, normalise, mix_lists])
def test_collate_functions_that_mix_samples_are_refused(collate_fn: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="from its own sample alone"):
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
        start_with(partial(pad, side), [Sequences()] * N)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])  # type: ignore[index]  # noqa: NPY002


# What a loop may do between a batch and its step that no noise would cover.
Change: TypeAlias = Callable[[PrivateTraining, Tensor, torch.optim.SGD], None]


@torch.no_grad()
def write_data(private: PrivateTraining, inputs: Tensor, _: torch.optim.SGD) -> None:
    private.module[2].bias.copy_(inputs.mean(dim=0)[:3])  # type: ignore[index]


def write_last_bit(private: PrivateTraining, _: Tensor, __: torch.optim.SGD) -> None:
    bias = private.module[2].bias.data  # type: ignore[index]
    bias[0] = torch.nextafter(bias[0], bias[1])


def write_momentum(private: PrivateTraining, inputs: Tensor, inner: torch.optim.SGD) -> None:
    parameter = private.module[2].bias  # type: ignore[index]
    inner.state[parameter]["momentum_buffer"] = inputs.mean(dim=0)[:3]


def add_to_momentum(private: PrivateTraining, inputs: Tensor, _: torch.optim.SGD) -> None:
    for own in private.optimizer.state.values():
        own["momentum_buffer"].add_(inputs.mean())


def replace_state(private: PrivateTraining, _: Tensor, inner: torch.optim.SGD) -> None:
    inner.state = copy.copy(private.optimizer.state)


def follow_loss(private: PrivateTraining, inputs: Tensor, _: torch.optim.SGD) -> None:
    plateau = ReduceLROnPlateau(private.optimizer, patience=0)
    for loss in (1.0, float(inputs.norm())):
        plateau.step(loss)


def change_decay(_: PrivateTraining, inputs: Tensor, inner: torch.optim.SGD) -> None:
    inner.param_groups[0]["weight_decay"] = float(inputs.mean())


def drop_parameter(_: PrivateTraining, inputs: Tensor, inner: torch.optim.SGD) -> None:
    if math.isfinite(float(inputs.mean())):
        inner.param_groups[0]["params"].pop()


CHANGES: list[tuple[Change, str]] = [
    (write_data, "parameters must not change"),
    (write_last_bit, "parameters must not change"),
    (write_momentum, "state must not change"),
    (add_to_momentum, "state must not change"),
    (replace_state, "state must not change"),
    (follow_loss, r"schedule=….*public_change\(\)"),
    (change_decay, r"schedule=….*public_change\(\)"),
    (drop_parameter, r"schedule=….*public_change\(\)"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
@pytest.mark.parametrize("unit", ["agent", "sample"])
def test_changes_between_a_batch_and_its_step_are_refused(
    change: Change, message: str, unit: str
) -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    private = make_private(small_plan(unit), module=model, optimizer=inner, data_loader=loaders())
    batches = (batch for _ in range(STEPS) for batch in private.data_loader)
    for _ in range(N + 1):
        inputs, targets = next(batches)
        differentiate(private, inputs, targets, unit)
        private.optimizer.step()
    inputs, targets = next(batches)
    differentiate(private, inputs, targets, unit)
    change(private, inputs, inner)
    with pytest.raises(CornError, match=message):
        private.optimizer.step()


@pytest.mark.parametrize("unit", ["agent", "sample"])
def test_a_loader_without_samples_is_refused(unit: str) -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    empty: list[Tensor] = []
    given = [*loaders()[1:], DataLoader(empty)]  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="data_loader must have at least one sample"):
        make_private(small_plan(unit), module=model, optimizer=inner, data_loader=given)


def test_changes_before_the_gradient_of_samples_are_refused() -> None:
    """Gradients at parameters that follow from the batch, as in sharpness-aware minimisation."""
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(
        small_plan("sample"), module=model, optimizer=inner, data_loader=loaders()
    )
    inputs, targets = next(iter(private.data_loader))
    write_data(private, inputs, inner)
    with pytest.raises(CornError, match="parameters must not change"):
        differentiate(private, inputs, targets, "sample")


def test_changes_that_the_caller_declares_public_are_allowed() -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    _, optimizer, loader = private = make_private(
        small_plan(), module=model, optimizer=inner, data_loader=loaders()
    )
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for inputs, targets in loader:
        differentiate(private, inputs, targets, "agent")
        optimizer.step()
        with optimizer.public_change():
            plateau.step(1.0)
    assert optimizer.param_groups[0]["lr"] < 0.1
    with pytest.raises(CornError, match="found other ones"), optimizer.public_change():
        inner.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    scheduled = make_private(
        small_plan(),
        module=(model := make_model()),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loaders(),
        schedule=lambda own: StepLR(own, 1),
    )
    with pytest.raises(CornError, match="use either"), scheduled.optimizer.public_change():
        pass


def test_agents_must_have_the_same_schedule() -> None:
    plan = small_plan()
    own_models = [make_model() for _ in range(N)]

    def run(rendezvous: Rendezvous) -> int:
        model, agent = own_models[rendezvous.agent], rendezvous.agent
        private = make_private(
            plan,
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loaders()[agent],
            rendezvous=rendezvous,
            settings=RunSettings(timeout=20),
            schedule=lambda own: StepLR(own, 1, gamma=0.5 if agent else 0.4),
        )
        return run_loop(private)

    found = run_in_threads(N, run)
    assert all(isinstance(own, CornError) for own in found), found


LOSSES: list[tuple[Callable[[Tensor, Tensor], Any], str]] = [
    (lambda z, y: entropy_of(z, y), r"found shape \(\): use reduction='none'"),
    (lambda z, y: entropy_of(z, y, reduction="sum"), r"found shape \(\): use reduction='none'"),
    (lambda z, y: entropy_of(z, y, reduction="none")[1:], "each of the 12 samples"),
    (lambda z, _: z.square(), "mean over each sample's own positions"),
    (lambda z, y: entropy_of(z.detach(), y, reduction="none"), "without gradients"),
    (lambda z, y: entropy_of(z, y).expand(len(z)), "its own sample alone"),
]


@pytest.mark.parametrize(("loss", "message"), LOSSES)
def test_losses_that_are_not_one_of_each_sample_are_refused(loss: Any, message: str) -> None:
    model = make_model()
    _, optimizer, loader = make_private(
        small_plan("sample"),
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loaders(),
    )
    inputs, targets = next(iter(loader))
    with pytest.raises(InvalidArgumentError, match=message):
        optimizer.backward(loss(model(inputs), targets))


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
    model = make_model()
    private = make_private(
        small_plan("sample", num_steps=8),
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loaders(),
    )
    batches = (batch for _ in range(3) for batch in private.data_loader)

    def run() -> None:
        for number, (inputs, targets) in enumerate(batches):
            mixed = change(inputs) if number >= first else inputs
            differentiate(private, mixed, targets, "sample")
            private.optimizer.step()

    with pytest.raises(InvalidArgumentError, match="its own sample alone"):
        run()


@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum"}, {"weight": torch.ones(3)}, {"ignore_index": 0}]
)
def test_gradients_of_a_whole_batch_are_refused_for_samples(options: dict[str, Any]) -> None:
    """Whatever the loss divides by: it may give a sample more weight than 1/B."""
    model = make_model()
    _, optimizer, loader = make_private(
        small_plan("sample"),
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loaders(),
    )
    with pytest.raises(CornError, match="must follow a batch"):
        optimizer.backward(torch.zeros(M))
    inputs, targets = next(iter(loader))
    with pytest.raises(CornError, match=r"call optimizer\.backward\(losses\) before"):
        optimizer.step()
    whole: Any = entropy_of(model(inputs), targets, **options)
    whole.backward()
    with pytest.raises(CornError, match=r"must come from optimizer\.backward"):
        optimizer.step()
    losses = entropy_of(model(inputs), targets, reduction="none")
    with pytest.raises(CornError, match=r"must come from optimizer\.backward"):
        optimizer.backward(losses)
    # A mean of the batch next to the losses of samples.
    optimizer.zero_grad()
    optimizer.backward(losses)
    whole = entropy_of(model(inputs), targets, **options)
    whole.backward()
    with pytest.raises(CornError, match=r"must come from optimizer\.backward"):
        optimizer.step()
    optimizer.zero_grad()
    losses = entropy_of(model(inputs), targets, reduction="none")
    optimizer.backward(losses)
    with pytest.raises(CornError, match="found a second call"):
        optimizer.backward(losses)
    optimizer.step()


def test_losses_of_samples_are_refused_for_agents() -> None:
    model = make_model()
    private = make_private(
        small_plan(),
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loaders(),
    )
    inputs, targets = next(iter(private.data_loader))
    with pytest.raises(CornError, match=r"call loss\.backward\(\)"):
        differentiate(private, inputs, targets, "sample")


def test_adam_steps_along_independent_noise() -> None:
    plan = make_plan(
        load_network(f"complete:{N}", mixing="gossip"), small_plan().budget, mechanism="ldp"
    )
    model = make_model()
    private = make_private(
        plan,
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        data_loader=loaders(),
    )
    assert run_loop(private) == N * STEPS


def test_make_private_is_public() -> None:
    assert corn.make_private is make_private
