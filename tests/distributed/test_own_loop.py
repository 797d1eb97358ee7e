"""``make_private`` for an agent: the user's own loop in a running network."""

import copy
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as entropy_of
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from corn.covariance import ThreatModel
from corn.distributed import RunSettings, rounds
from corn.distributed.keyring import make_keys
from corn.distributed.own_loop import make_private
from corn.distributed.recovery import replan
from corn.distributed.rendezvous import Rendezvous
from corn.errors import CornError, InvalidArgumentError
from corn.learn import Constant, Mechanism, SweepSettings, TrainingProblem, Trial, run_sweep
from corn.learn.batches import AgentData
from corn.learn.optimizers import save_state
from corn.learn.own_loop import PrivateTraining
from corn.learn.tasks import ModuleTask
from corn.plan import Plan, make_plan, verify_plan
from corn.privacy import PrivacyBudget
from corn.privacy.composition import Expense, PlanTerms, compose_expenses
from corn.topology import load_network
from tests.learn.loops import (
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

from .rehearsal import rehearsing
from .threads import make_rendezvous, run_in_threads

# Loops run until there are no more batches.
pytestmark = pytest.mark.filterwarnings("ignore:the loader has no batches left")

N, STEPS, SEED = 3, 4, 3


def cross_entropy(outputs: Tensor, targets: Tensor) -> Any:
    return entropy_of(outputs, targets)


def small_plan(unit: str = "agent", num_steps: int = STEPS) -> Plan:
    sample: dict[str, Any] = {"unit": "sample", "batch_size": M, "sampling": "every-step"}
    options = sample if unit == "sample" else {}
    budget = PrivacyBudget(50, 1e-5, num_steps=num_steps, clip=0.5, **options)
    return make_plan(load_network(f"complete:{N}", mixing="gossip"), budget)


def differentiate(private: PrivateTraining, inputs: Tensor, targets: Tensor, unit: str) -> None:
    outputs = private.module(inputs)
    if unit == "sample":
        losses = entropy_of(outputs, targets, reduction="none")
        private.optimizer.mean(losses).backward()  # type: ignore[no-untyped-call]
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
        ModuleTask(make_model(), cross_entropy), AgentData.from_parts(make_parts()[:N])
    )
    settings = SweepSettings(
        STEPS, M, (SEED,), plan.cooldown_steps, plan.dtype, noise_keys="seed", momentum=0.0
    )
    trials = [Trial(Mechanism.from_plan(plan), Constant(step_size))]
    return run_sweep(problem, plan.network, trials, settings=settings).average_parameters[0]


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
        data_loader=loaders()[rendezvous.agent],
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
        found = [private.optimizer.get_epsilon()]
        for inputs, targets in private.data_loader:
            differentiate(private, inputs, targets, "sample")
            private.optimizer.step()
        private.data_loader.close()
        return found

    def finish(rendezvous: Rendezvous) -> list[float]:
        private = run_with_keys(plan, copy.deepcopy(start), rendezvous, tmp_path)
        found = [private.optimizer.get_epsilon()]
        run_loop(private, "sample")
        assert private.optimizer.privacy.startswith("the models keep ε = 50")
        return [*found, private.optimizer.get_epsilon()]

    terms = PlanTerms(plan.budget.of_agent(0), plan.threat.max_colluders)
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
        return private.optimizer.get_epsilon(), count

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


@pytest.mark.parametrize("change", [add_to_momentum, write_data, change_decay])
def test_changes_between_a_batch_and_its_step_are_refused(
    change: Callable[[PrivateTraining, Tensor], None],
) -> None:
    """Also for unit agent, whose loop computes any loss."""
    plan = small_plan(num_steps=30)
    own_models = [make_model() for _ in range(N)]

    def run(rendezvous: Rendezvous) -> str:
        model = own_models[rendezvous.agent]
        private = make_private(
            plan,
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            data_loader=loaders()[rendezvous.agent],
            rendezvous=rendezvous,
            settings=RunSettings(timeout=20),
        )
        inputs, targets = next(iter(private.data_loader))
        with pytest.raises(CornError, match=r"call loss\.backward"):
            differentiate(private, inputs, targets, "sample")
        with pytest.raises(CornError, match="there is no gradient"):
            private.optimizer.step()
        cross_entropy(model(inputs), targets).backward()
        private.optimizer.step()
        inputs, targets = next(iter(private.data_loader))
        cross_entropy(model(inputs), targets).backward()
        if rendezvous.agent == 0:
            change(private, inputs)
            with pytest.raises(CornError, match="must not change"):
                private.optimizer.step()
        private.data_loader.close()
        return "done"

    with rehearsing(SEED):
        assert run_in_threads(N, run) == ["done"] * N


def test_unfit_objects_are_refused() -> None:
    model, several = make_model(), loaders()
    usual: dict[str, Any] = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": several[0],
        "rendezvous": None,
    }
    cases: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": torch.optim.Adam(model.parameters())}, "mechanism ldp"),
        ({"data_loader": several}, "that of this agent alone"),
    ]
    for changed, message in cases:
        with pytest.raises(InvalidArgumentError, match=message):
            make_private(small_plan(), **{**usual, **changed})


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


AGENTS = 4


@pytest.mark.slow
@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("schedule", [None, lambda own: StepLR(own, 5, gamma=0.8)])
def test_an_agent_returns_with_the_state_of_a_neighbours_optimizer(
    factory: Callable[..., Optimizer], schedule: Any, tmp_path: Path
) -> None:
    """All agents end with the same bits, moments and counts of steps included."""
    num_steps, leaving = 40, 2
    budget = PrivacyBudget(50, 1e-5, num_steps=num_steps, clip=0.5)
    plan = make_plan(load_network(f"ring:{AGENTS}", mixing="sum"), budget)
    make_keys(tmp_path / "keys", AGENTS)
    has_returned = threading.Event()
    # Modules draw their first parameters from torch's global generator.
    models = [make_model() for _ in range(2 * AGENTS)]

    def take_part(rendezvous: Rendezvous, model: nn.Module, *, rejoins: bool) -> PrivateTraining:
        rendezvous.keys = tmp_path / "keys"
        rendezvous.rejoins = rejoins
        return make_private(
            plan,
            module=model,
            optimizer=factory(model.parameters()),
            data_loader=loaders()[rendezvous.agent],
            rendezvous=rendezvous,
            out=tmp_path / "out",
            settings=RunSettings(timeout=20, evaluate_at=(0,)),
            schedule=schedule,
        )

    def run(private: PrivateTraining, most: int = num_steps) -> int:
        count = 0
        while count < most:
            before = count
            for inputs, targets in private.data_loader:
                time.sleep(0 if has_returned.is_set() else 0.02)
                cross_entropy(private.module(inputs), targets).backward()
                private.optimizer.step()
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
            again = make_rendezvous(agent, AGENTS, rendezvous.store)
            private = take_part(again, models[AGENTS + agent], rejoins=True)
            has_returned.set()
        count = run(private)
        return count, save_state(private.optimizer._inner), read(private.module)

    results: list[Any] = run_in_threads(AGENTS, run_one)
    counts, states, trained = zip(*results, strict=True)
    # One step is void, as the agent left in it.
    assert {counts[agent] for agent in range(AGENTS) if agent != leaving} == {num_steps}
    assert 0 < counts[leaving] < num_steps - 5
    for state, model in zip(states, trained, strict=True):
        assert torch.equal(model, trained[0])
        assert state.keys() == states[0].keys() != set()
        assert all(torch.equal(state[name], states[0][name]) for name in state)


def test_agents_resume_with_the_state_of_their_optimizers(tmp_path: Path) -> None:
    """They go on from the newest common checkpoint; the steps after it are spent."""
    num_steps = 8
    budget = PrivacyBudget(50, 1e-5, num_steps=num_steps, clip=0.5)
    plan = make_plan(load_network(f"ring:{N}", mixing="sum"), budget)
    make_keys(tmp_path / "keys", N)
    models = [make_model() for _ in range(2 * N)]

    def open_loop(rendezvous: Rendezvous, model: nn.Module, *, resume: bool) -> PrivateTraining:
        rendezvous.keys = tmp_path / "keys"
        return make_private(
            plan,
            module=model,
            optimizer=Adam(model.parameters(), lr=RATE),
            data_loader=loaders()[rendezvous.agent],
            rendezvous=rendezvous,
            out=tmp_path,
            settings=RunSettings(timeout=20, checkpoint_every=2, on_dropout="stop", resume=resume),
        )

    def begin(rendezvous: Rendezvous) -> int:
        private = open_loop(rendezvous, models[rendezvous.agent], resume=False)
        for _ in range(5):
            inputs, targets = next(iter(private.data_loader))
            cross_entropy(private.module(inputs), targets).backward()
            try:
                private.optimizer.step()
            except CornError:  # another agent has left already
                break
        private.data_loader.close()
        return private.optimizer._steps.list_expenses()[0].num_releases

    def go_on(rendezvous: Rendezvous) -> tuple[int, list[int], int, Tensor]:
        private = open_loop(rendezvous, models[N + rendezvous.agent], resume=True)
        first = private.optimizer.position
        counts = [int(own["step"]) for own in private.optimizer.state.values()]
        return first, counts, run_loop(private), read(private.module)

    spent: list[Any] = run_in_threads(N, begin)
    results: list[Any] = run_in_threads(N, go_on)
    firsts, counts, lengths, trained = zip(*results, strict=True)
    assert set(firsts) == {4}
    assert all(own == [4] * 4 for own in counts)
    assert set(lengths) == {num_steps - max(spent)}
    assert all(torch.equal(own, trained[0]) for own in trained)
