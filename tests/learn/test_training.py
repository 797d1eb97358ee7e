"""``corn.train`` with any module, loss and data; and the workloads by name."""

import dataclasses
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from corn import learn
from corn.checks import IntArray
from corn.covariance import DEFAULT_THREAT, EAVESDROPPER, Decor, Horizon, ThreatModel, design
from corn.errors import InfeasibleError, InvalidArgumentError
from corn.learn import Mechanism, Workload, load_parameters, make_mechanisms, train
from corn.learn.batches import BatchSampler
from corn.learn.tasks import LinearClassifier
from corn.plan import make_plan
from corn.privacy import PrivacyBudget, Sampling
from corn.topology import Gossip, load_network

from .problems import make_samples

BUDGET = PrivacyBudget(10, 1e-5, num_steps=20, clip=0.5)


def make_datasets(num_agents: int = 4) -> list[tuple[Tensor, Tensor]]:
    X, y = make_samples(40 * num_agents, 3, 2)
    return list(zip(torch.split(X, 40), torch.split(y, 40), strict=True))


def test_a_module_is_trained_and_returned_as_a_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    before = [p.clone() for p in model.parameters()]
    result = train(
        "complete:4",
        None,
        model=model,
        loss=functional.cross_entropy,
        datasets=make_datasets(),
        test=make_datasets()[0],
        step_size=0.5,
        num_steps=150,
    )
    assert all(map(torch.equal, before, model.parameters()))  # the caller's model is left alone
    trained = load_parameters(model, result.parameters[0, 0])
    X, y = make_datasets()[0]
    accuracy = (trained(X.float()).argmax(1) == y).float().mean().item()
    assert accuracy > 0.8
    assert float(result.last_rows[0]["test_accuracy"]) == pytest.approx(accuracy, abs=0.05)


def test_every_agent_learns_under_a_private_budget() -> None:
    network = load_network("ring:4", mixing="gossip")
    made = design(network, BUDGET, objective=Horizon(5), threat=EAVESDROPPER)
    for noise in (made, made.decomposition, "corn", "ldp", Decor()):
        result = train(
            network,
            BUDGET,
            noise,
            model=LinearClassifier(3, 2),
            datasets=make_datasets(),
            batch_size=16,
            cooldown_steps=3,
        )
        assert result.status == "complete"
        assert result.last_rows[0]["simulated_epsilon"] == pytest.approx(10)


def test_a_plan_has_network_budget_and_noise() -> None:
    """ε is counted against the insiders of the plan, not against a weaker eavesdropper."""
    network = load_network("ring:4", gossip=Gossip(2, "chebyshev"), mixing="gossip")
    plan = make_plan(network, BUDGET, cooldown_steps=1)
    options: dict[str, Any] = {"model": LinearClassifier(3, 2), "datasets": make_datasets()}
    result = train(plan, **options)
    spent = float(result.last_rows[0]["simulated_epsilon"])
    assert spent == pytest.approx(10, rel=1e-3)
    assert spent <= 10
    assert result.trials[0].mechanism.against == plan.threat.describe()
    explicit = train(plan, **options, cooldown_steps=1)
    assert torch.equal(result.parameters, explicit.parameters)
    assert not torch.equal(result.parameters, train(plan, **options, cooldown_steps=0).parameters)
    with pytest.raises(InvalidArgumentError):
        train(plan, BUDGET, **options)


def test_sample_level_budget_sets_the_batch() -> None:
    budget = PrivacyBudget(
        10, 1e-5, num_steps=5, clip=0.5, unit="sample", batch_size=8, sampling="every-step"
    )
    model = nn.Sequential(nn.Linear(3, 2))
    options: dict[str, Any] = {"model": model, "loss": functional.cross_entropy}
    result = train("ring:4", budget, datasets=make_datasets(), **options)
    assert result.last_rows[0]["unit"] == "sample"
    with pytest.raises(InvalidArgumentError, match="batch_size must be 8"):
        train("ring:4", budget, datasets=make_datasets(), batch_size=16, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": None}, "num_steps must be given if there is no budget"),
        ({"model": LinearClassifier(3, 2)}, "loss must be None for a LinearClassifier"),
        ({"datasets": make_datasets(3)}, "datasets must be 4, one for each agent, found 3"),
        (
            {"datasets": [*make_datasets(3), (np.full((2, 3), np.inf), np.zeros(2))]},
            "inputs of agent 3 must be finite, found inf in row 0, counted",
        ),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "budget": BUDGET,
        "model": nn.Linear(3, 2),
        "loss": functional.cross_entropy,
        "datasets": make_datasets(),
        **options,
    }
    with pytest.raises(InvalidArgumentError, match=message):
        train("ring:4", given.pop("budget"), **given)


def test_workloads_by_name() -> None:
    problem = Workload("digits", model="network", partition="shards:2").build(5)
    assert problem.data.num_agents == 5
    assert sum(problem.data.sizes) + sum(len(y) for _, y in problem.parts.values()) == 1797
    assert "64–32–10" in problem.task.describe()
    with pytest.raises(InvalidArgumentError, match="quadratic, a9a, mnist"):
        Workload("cifar").build(5)
    with pytest.raises(InvalidArgumentError, match="linear, network, cnn"):
        Workload("digits", model="transformer").build(5)


def test_held_out_samples_belong_to_no_agent() -> None:
    """Scores on these samples are public, so no agent may train on them."""
    problem = Workload("breast-cancer").build(5)
    assert problem.public_parts == ("validation", "test")
    held = {tuple(row) for row in problem.data.inputs.tolist()}
    public = [tuple(row) for X, _ in problem.parts.values() for row in X.tolist()]
    assert set(problem.parts) == {"validation", "test"}
    assert not held.intersection(public)
    assert len(held) + len(public) == 569


def test_public_names_are_loaded_when_used() -> None:
    assert learn.Mechanism is Mechanism
    assert {"Mechanism", "train", "run_sweep"} <= set(dir(learn))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        learn.nothing  # noqa: B018


def test_a_run_that_broke_down_is_an_error() -> None:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(20, 3, generator=generator), torch.arange(20) % 2) for _ in range(4)]
    budget = PrivacyBudget(10, 1e-5, num_steps=5, clip=0.5)
    loaders = [DataLoader(TensorDataset(*own)) for own in data]
    given: dict[str, Any] = {"model": nn.Linear(3, 2), "loss": nn.functional.cross_entropy}
    with pytest.raises(InfeasibleError):
        train("ring:4", budget, datasets=data, step_size=1e30, **given)
    assert train("ring:4", budget, datasets=loaders, **given).status == "complete"


def train_small(**options: Any) -> learn.Result:
    return train(
        "ring:4", BUDGET, model=LinearClassifier(3, 2), datasets=make_datasets(), **options
    )


def test_a_simulation_states_that_it_protects_nobody() -> None:
    """The noise follows from the seed: an attacker repeats the run with every possible label."""
    result, again = train_small(), train_small()
    assert torch.equal(result.parameters, again.parameters)
    assert result.is_simulated
    assert "protect nobody" in result.privacy
    assert np.isnan(float(result.last_rows[0]["epsilon"]))
    assert result.last_rows[0]["simulated_epsilon"] == pytest.approx(10)


def test_secret_keys_give_a_promise_that_holds() -> None:
    result, again = train_small(secure=True), train_small(secure=True)
    # Another run has other noise in all coordinates: nobody can repeat the first.
    assert not torch.isclose(result.parameters, again.parameters, rtol=1e-4).all()
    assert not result.is_simulated
    assert "for one agent's whole data set" in result.privacy
    assert "against an eavesdropper" in result.privacy
    assert float(result.last_rows[0]["epsilon"]) == pytest.approx(10, rel=1e-5)
    assert float(result.last_rows[0]["epsilon"]) <= 10
    assert np.isnan(float(result.last_rows[0]["simulated_epsilon"]))


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(("num_agents", "threat"), [(4, DEFAULT_THREAT), (1, EAVESDROPPER)])
def test_noise_is_designed_against_one_insider_if_there_is_one(
    num_agents: int, threat: ThreatModel, secure: bool
) -> None:
    result = train(
        f"complete:{num_agents}",
        BUDGET,
        model=LinearClassifier(3, 2),
        datasets=make_datasets(num_agents),
        secure=secure,
    )
    assert result.trials[0].mechanism.threat == threat.resolve(nx.complete_graph(num_agents), "sum")


def test_given_noise_must_hold_against_the_threat() -> None:
    outside = design(load_network("ring:4", mixing="gossip"), BUDGET, threat=EAVESDROPPER)
    given: dict[str, Any] = {"model": LinearClassifier(3, 2), "datasets": make_datasets()}
    with pytest.raises(InvalidArgumentError):
        train("ring:4", BUDGET, outside, threat=DEFAULT_THREAT, **given)
    with pytest.raises(InvalidArgumentError):
        train("ring:4", threat=DEFAULT_THREAT, **given)


def test_a_plan_is_run_with_secret_keys() -> None:
    plan = make_plan(load_network("ring:4", mixing="gossip"), BUDGET)
    result = train(plan, model=LinearClassifier(3, 2), datasets=make_datasets(), secure=True)
    assert 9.9 < float(result.last_rows[0]["epsilon"]) <= 10
    assert result.last_rows[0]["central_ratio"] == pytest.approx(plan.central_ratio)


def test_each_agent_spends_its_own_promise() -> None:
    budget = dataclasses.replace(BUDGET, epsilon=(1.0, 10.0, 10.0, 10.0))
    plan = make_plan(load_network("ring:4", mixing="gossip"), budget)
    result = train(plan, model=LinearClassifier(3, 2), datasets=make_datasets(), secure=True)
    row = result.last_rows[0]
    assert 0.99 < float(row["epsilon_least"]) <= 1 < float(row["epsilon"]) <= 10


def test_a_secure_run_is_one_run_without_a_trace() -> None:
    with pytest.raises(InvalidArgumentError, match="seeds must be one for a run with secret keys"):
        train_small(secure=True, seeds=(0, 1))
    with pytest.raises(InvalidArgumentError, match="on_step must be None"):
        train_small(secure=True, on_step=print)
    with pytest.raises(InvalidArgumentError):
        train(
            "ring:4",
            model=LinearClassifier(3, 2),
            datasets=make_datasets(),
            secure=True,
            num_steps=3,
        )


def test_gradients_that_are_not_finite_are_counted_and_reported() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        # 0, with a slope that is not a number.
        nothing: Tensor = torch.linalg.vector_norm(outputs - outputs.detach()).sqrt()
        return functional.cross_entropy(outputs, targets) + nothing

    result = train("ring:4", BUDGET, model=nn.Linear(3, 2), loss=loss, datasets=make_datasets())
    assert result.status == "complete"
    assert "80 gradients were not finite and counted as zero" in result.private_notes[0]
    assert result.notes == ()


def test_a_release_does_not_stop_because_of_the_training_loss() -> None:
    """Stopping a release because of a loss would reveal that loss without noise."""
    datasets = make_datasets()
    datasets[0][0][0, 0] = 1e30
    result = train("ring:4", BUDGET, model=LinearClassifier(3, 2), datasets=datasets, secure=True)
    assert result.status == "complete"
    assert torch.isfinite(result.parameters).all()


@pytest.mark.parametrize("name", ["central", "ldp"])
def test_secret_keys_need_a_promise_that_holds_in_floating_point(name: str) -> None:
    network = load_network("ring:4", mixing="gossip")
    method = make_mechanisms([name], network, BUDGET, objective=Horizon(5))[0]
    problem = learn.TrainingProblem(
        LinearClassifier(3, 2), learn.AgentData.from_parts(make_datasets())
    )
    with pytest.raises(InvalidArgumentError, match="one that counts floating point"):
        learn.run_sweep(
            problem,
            network,
            [learn.Trial(method, learn.Constant(0.1))],
            settings=learn.SweepSettings(20, noise_keys="secret"),
        )


def test_more_samples_than_the_rounding_bound_covers_are_refused() -> None:
    budget = PrivacyBudget(
        1, 1e-5, num_steps=3, clip=1, unit="sample", batch_size=1, sampling_rate=0.5
    )
    with pytest.raises(InvalidArgumentError, match="samples must be at most 32"):
        train("ring:4", budget, model=LinearClassifier(3, 2), datasets=make_datasets(), secure=True)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["poisson", "passes"])
def test_batches_are_new_in_every_release_and_repeat_in_simulations(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents have 40, 40, 20 and 10 samples, each its own rate or passes. Others train as well."""
    seen: list[list[list[int]]] = []
    choose = BatchSampler.choose_rows

    def record(sampler: BatchSampler, number: int) -> list[IntArray]:
        rows = choose(sampler, number)
        seen[-1].append([own.tolist() for own in rows])
        return rows

    monkeypatch.setattr(BatchSampler, "choose_rows", record)
    sizes = (40, 40, 20, 10)
    datasets = [(x[:k], y[:k]) for (x, y), k in zip(make_datasets(), sizes, strict=True)]
    budget = PrivacyBudget(
        epsilon=5,
        delta=1e-5,
        num_steps=6,
        clip=1,
        unit="sample",
        batch_size=5,
        sampling=sampling,
        samples_per_agent=sizes,
    )
    plan, results = make_plan(load_network("ring:4", mixing="gossip"), budget, mechanism="ldp"), []
    for secure in (True, True, False, False):
        seen.append([])
        results.append(train(plan, model=LinearClassifier(3, 2), datasets=datasets, secure=secure))
    # A release has one sampler for each agent, a simulation one for all.
    assert [len(own) for own in seen] == [24, 24, 6, 6]
    assert seen[0] != seen[1]
    assert seen[2] == seen[3]
    assert 0 < float(results[0].last_rows[0]["epsilon"]) <= 5
    # Agents with fewer samples than the plan counts on have smaller batches.
    train(plan, model=LinearClassifier(3, 2), datasets=datasets[::-1])


def test_one_agents_number_of_samples_changes_no_bit_of_the_others_gradients() -> None:
    plan = make_plan(load_network("ring:4", mixing="gossip"), BUDGET)
    trials = [learn.Trial(Mechanism.from_plan(plan), learn.Constant(0.1))]
    settings = learn.SweepSettings(1, None, noise_keys="secret", dtype="float32")
    found: list[torch.Tensor] = []
    for num_samples in (39, 40):
        parts = [(x.float(), y.float()) for x, y in make_datasets()]
        parts[0] = (parts[0][0][:num_samples], parts[0][1][:num_samples])
        task = LinearClassifier(3, 2)
        data = learn.AgentData.from_parts([(task.prepare(x), y) for x, y in parts])
        simulation = learn.Simulation(task, data, plan.network, trials, settings=settings)
        simulation.parameters.fill_(0.1)
        # Noise is new for each simulation, and would hide the gradients.
        simulation._source = None
        simulation.on_release = lambda _, released: found.append(released[0].clone())
        simulation.advance()
    assert torch.equal(found[0][1:], found[1][1:])
    assert not torch.equal(found[0][0], found[1][0])
