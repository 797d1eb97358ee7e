"""Replaceable parts of an update: right by an oracle, and unable to break the accounting."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import corn
from corn.covariance import EAVESDROPPER, Horizon, design
from corn.covariance.coalitions import worst_precisions
from corn.errors import InvalidArgumentError
from corn.learn import (
    Clipping,
    Constant,
    Mechanism,
    Row,
    Simulation,
    SweepSettings,
    Trial,
    run_sweep,
)
from corn.learn.batches import Batch
from corn.learn.metrics import TRACED
from corn.learn.problem import make_problem
from corn.learn.step import compute_gradients
from corn.learn.tasks import LinearClassifier, ModuleTask, ShallowNetwork, Task
from corn.learn.update import clip_by_rule
from corn.privacy import Expense, PlanTerms, PrivacyBudget, compose_expenses
from corn.topology import load_network
from examples.update_rules import (
    GradientTracking,
    LocalSteps,
    clip_layers,
    follow_graphs,
    normalise,
    pair_at_random,
)

N, D, CLASSES = 4, 5, 3
RING = load_network(f"ring:{N}", mixing="gossip")
BUDGET = PrivacyBudget(5, 1e-5, num_steps=12, clip=0.3)
C = torch.tensor([0.3, 0.05])


def make_module() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, CLASSES))


def make_tasks() -> list[Task]:
    module = ModuleTask(make_module(), nn.functional.cross_entropy)
    return [LinearClassifier(D, CLASSES), ShallowNetwork(D, CLASSES, num_hidden=4), module]


def make_batch(task: Task, *, change: bool = False) -> tuple[Tensor, Batch]:
    """Models of 3 agents in 2 trials, and batches of 6 samples, of which the last is padding."""
    generator = torch.Generator().manual_seed(3)
    X = task.prepare(torch.randn(18, D, generator=generator)).view(3, 6, -1)
    y = torch.randint(0, CLASSES, (3, 6), generator=generator)
    if change:
        X, y = X.clone(), y.clone()
        X[1, 2] = 50.0
        y[1, 2] = (y[1, 2] + 1) % CLASSES
    weights = torch.full((3, 6), 1 / 6, dtype=torch.float64)
    weights[:, -1] = 0
    models = torch.randn(3, 2, task.num_parameters, generator=generator)
    return models, Batch(X, y, weights, is_average=False, most_samples=6)


def enlarge(gradient: Tensor, clip: Tensor) -> Tensor:
    """A rule that breaks every promise by itself."""
    return 1e6 * gradient.sin() + clip * gradient.numel()


@pytest.mark.parametrize("task", make_tasks(), ids=lambda task: type(task).__name__)
@pytest.mark.parametrize("clips_samples", [False, True])
def test_a_rule_that_changes_nothing_leaves_norm_clipping(task: Task, clips_samples: bool) -> None:
    models, batch = make_batch(task)
    clip = C.double() if clips_samples else C
    usual = compute_gradients(task, models, batch, clip, clips_samples=clips_samples)
    ruled = clip_by_rule(task, models, batch, clip, lambda g, _: g, clips_samples=clips_samples)
    for expected, found in zip(vars(usual).values(), vars(ruled).values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rule", [enlarge, normalise, clip_layers(make_module())])
def test_no_rule_moves_a_release_by_more_than_the_accounting_assumes(rule: Clipping) -> None:
    task = make_tasks()[2]
    (models, batch), (_, changed) = make_batch(task), make_batch(task, change=True)
    for clips_samples, most in ((False, 2 * C), (True, 2 * C / 6)):
        clip = C.double()
        one, other = (
            clip_by_rule(task, models, each, clip, rule, clips_samples=clips_samples)
            for each in (batch, changed)
        )
        first, second = (own.values * own.factors.unsqueeze(-1) for own in (one, other))
        distance = torch.linalg.vector_norm(first - second, dim=-1)
        assert (distance[1] <= most).all(), "the agent whose sample changed"
        assert distance[1].min() > 0
        assert (distance[[0, 2]] == 0).all(), "a rule sees one agent alone"
        if not clips_samples:
            assert (torch.linalg.vector_norm(first, dim=-1) <= C).all()


def test_layers_and_normalised_gradients_by_an_oracle() -> None:
    model = make_module()
    sizes = [parameter.numel() for parameter in model.parameters()]
    gradient = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0))
    gradient[: sizes[0]] *= 1e-4
    found = clip_layers(model)(gradient, torch.tensor(0.5))
    for part, own in zip(torch.split(gradient, sizes), torch.split(found, sizes), strict=True):
        most = 0.5 / math.sqrt(len(sizes))
        expected = part * min(1.0, most / float(part.norm()))
        torch.testing.assert_close(own, expected)
    assert float(normalise(gradient, torch.tensor(0.5)).norm()) == pytest.approx(0.5)
    assert not normalise(torch.zeros(3), torch.tensor(0.5)).any()


def simulate(num_steps: int = 12, mechanism: Mechanism | None = None, **settings: Any) -> Tensor:
    task = LinearClassifier(D, CLASSES)
    rng = np.random.default_rng(0)
    data = [(rng.standard_normal((9, D)) + k, rng.integers(0, CLASSES, 9)) for k in range(N)]
    problem = make_problem(task, data, N)
    network = settings.pop("network", RING)
    made = mechanism or Mechanism.non_private(*BUDGET.queries)
    chosen = SweepSettings(num_steps, None, dtype="float64", **settings)
    trials = [Trial(made, Constant(0.2))]
    return run_sweep(problem, network, trials, settings=chosen, evaluate_at=[]).parameters


def test_one_graph_in_turn_is_the_network_itself() -> None:
    assert torch.equal(simulate(), simulate(mixing=follow_graphs((1, RING))))
    line = load_network(f"path:{N}", mixing="gossip")
    assert not torch.equal(simulate(), simulate(mixing=follow_graphs((2, RING), (1, line))))


@pytest.mark.parametrize("graph", ["ring:7", "er:n=9,p=0.5,seed=2", "star:5"])
def test_random_pairs_are_linked_and_average_their_models(graph: str) -> None:
    network = load_network(graph, mixing="gossip")
    rule, n = pair_at_random(network, seed=4), network.num_agents
    seen = set()
    for step in range(30):
        W = rule(torch.eye(n, dtype=torch.float64).unsqueeze(0), step)[0].numpy()
        assert np.array_equal(W, W.T)
        assert np.array_equal(W @ np.ones(n), np.ones(n))
        assert np.array_equal(W @ W, W), "each agent has one partner at most"
        pairs = {(i, j) for i, j in zip(*np.nonzero(np.triu(W, 1)), strict=True)}
        assert all(network.graph.has_edge(i, j) for i, j in pairs)
        assert nx.is_maximal_matching(network.graph, pairs)
        again = rule(torch.eye(n, dtype=torch.float64).unsqueeze(0), step)[0].numpy()
        assert np.array_equal(W, again)
        seen.add(W.tobytes())
    assert len(seen) > 1


def test_gradient_tracking_removes_what_unlike_agents_cost() -> None:
    """Quadratics with different minima: DSGD stops away from the common minimum."""
    targets = torch.tensor([[-3.0], [0.0], [1.0], [6.0]], dtype=torch.float64)
    W = torch.from_numpy(np.array(RING.step_matrix))
    scales = torch.tensor([[0.2], [1.0], [2.0], [0.5]], dtype=torch.float64)
    best = float((scales * targets).sum() / scales.sum())

    def run(step: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        x = torch.zeros(1, N, 1, 1, dtype=torch.float64)
        for _ in range(2000):
            x = step(x, scales[None, :, :, None] * (x - targets[None, :, :, None]))
        return x.flatten()

    def mix(values: Tensor) -> Tensor:
        return torch.einsum("ij,sjtd->sitd", W, values)

    rule, eta = GradientTracking(), torch.tensor(0.05, dtype=torch.float64)
    tracked = run(lambda x, g: rule.take_step(x, g, eta, mix))
    plain = run(lambda x, g: mix(x - eta * g))
    torch.testing.assert_close(tracked, torch.full((N,), best, dtype=torch.float64))
    assert (plain - best).abs().max() > 0.01


def test_rules_of_steps_take_the_place_of_dsgd() -> None:
    class Dsgd:
        def take_step(
            self, models: Tensor, released: Tensor, step_size: Tensor, mix: Callable[..., Tensor]
        ) -> Tensor:
            return mix(models - step_size * released)

    torch.testing.assert_close(simulate(local_rule=Dsgd), simulate())
    mechanism = Mechanism.private("corn", design(RING, BUDGET, threat=EAVESDROPPER), BUDGET)
    with_noise: dict[str, Any] = {"mechanism": mechanism, "seeds": (1,)}
    torch.testing.assert_close(simulate(**with_noise, local_rule=Dsgd), simulate(**with_noise))
    found = simulate(**with_noise, local_rule=GradientTracking)
    assert torch.isfinite(found).all()
    assert not torch.allclose(found, simulate(**with_noise))


def test_local_steps_are_one_gradient() -> None:
    task = LinearClassifier(D, CLASSES)
    models, batch = make_batch(task)
    expected = models
    for _ in range(3):
        expected = expected - 0.1 * task.gradient(expected, batch).values
    found = LocalSteps(task, 3, 0.1).gradient(models, batch).values
    torch.testing.assert_close(found, (models - expected) / 0.3, rtol=1e-4, atol=1e-6)
    once = LocalSteps(task, 1, 0.1)
    torch.testing.assert_close(
        once.gradient(models, batch).values,
        task.gradient(models, batch).values,
        rtol=1e-4,
        atol=1e-6,
    )
    assert once.num_parameters == task.num_parameters


def test_local_steps_refuse_single_samples() -> None:
    budget = PrivacyBudget(
        5, 1e-5, num_steps=2, clip=1, unit="sample", batch_size=4, samples_per_agent=9
    )
    data = [(torch.randn(9, D), torch.zeros(9, dtype=torch.long)) for _ in range(N)]
    with pytest.raises(ValueError, match="local steps need a budget with unit 'agent'"):
        corn.train(
            RING,
            budget,
            "ldp",
            model=LocalSteps(LinearClassifier(D, CLASSES), 2, 0.1),
            datasets=data,
        )


def make_phases(*steps: int, budget: PrivacyBudget = BUDGET) -> Mechanism:
    networks = (RING, load_network(f"complete:{N}", mixing="gossip"))
    made = [design(own, budget, objective=Horizon(5), threat=EAVESDROPPER) for own in networks]
    return Mechanism.in_phases("phases", list(zip(steps, made, strict=True)), budget)


def test_noise_of_phases_follows_the_step() -> None:
    mechanism = make_phases(5, 7)
    first, second = mechanism.noise_at(4), mechanism.noise_at(5)
    assert first is mechanism.noise
    assert second is mechanism.later_noise[0][1]
    problem = make_problem(
        LinearClassifier(D, CLASSES), [(torch.zeros(2, D), torch.zeros(2, dtype=torch.long))] * N, N
    )
    settings = SweepSettings(12, None, seeds=tuple(range(40)), dtype="float64")
    data, _ = problem.place(settings)
    task = problem.task
    simulation = Simulation(task, data, RING, [Trial(mechanism, Constant(0.1))], settings=settings)
    for step in range(12):
        simulation.advance()
        noise = simulation._noise
        assert noise is not None
        # (seeds, agents, 1, d): every coordinate of every seed is a draw.
        draws = noise[:, :, 0].transpose(0, 1).reshape(N, -1).numpy()
        expected = mechanism.noise_at(step)
        assert expected is not None
        scale = float(np.abs(expected.covariance).max())
        assert np.abs(np.cov(draws) - expected.covariance).max() < 0.25 * scale


def test_the_ratio_of_phases_is_that_of_all_steps() -> None:
    mechanism = make_phases(5, 7)
    noises = [mechanism.noise_at(step) for step in range(BUDGET.num_steps)]
    mean = np.mean([noise.covariance.sum() for noise in noises if noise is not None])
    assert mechanism.central_ratio == pytest.approx(mean * BUDGET.precision_caps(N).min())
    first = replace(mechanism, later_noise=()).central_ratio
    assert mechanism.central_ratio != pytest.approx(first, rel=0.01)


def test_phases_keep_the_promise_of_the_whole_run() -> None:
    mechanism = make_phases(5, 7)
    spent = mechanism.epsilon_spent(12)
    assert spent is not None
    assert spent.max() == pytest.approx(5, rel=1e-6)
    terms = PlanTerms(BUDGET, 0)
    parts = [
        Expense(terms, float(worst_precisions(noise, 0).max()), count)
        for noise, count in zip((mechanism.noise_at(0), mechanism.noise_at(5)), (5, 7), strict=True)
        if noise is not None
    ]
    # The composition also counts floating point.
    assert compose_expenses(parts, 1e-5).epsilon == pytest.approx(5, rel=0.01)
    weak = replace(BUDGET, epsilon=20.0)
    noises = [design(RING, own, threat=EAVESDROPPER) for own in (BUDGET, weak)]
    with pytest.raises(InvalidArgumentError, match="does not keep its budget"):
        Mechanism.in_phases("weak", [(5, noises[0]), (7, noises[1])], BUDGET)
    for phases in ([], [(5, noises[0]), (6, noises[0])], [(0, noises[0]), (12, noises[0])]):
        with pytest.raises(InvalidArgumentError, match="phase"):
            Mechanism.in_phases("short", phases, BUDGET)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixing": pair_at_random(RING), "network": load_network(f"ring:{N}")}, "exact sums"),
        ({"mixing": lambda models, _: models[:, :1]}, r"keeps the shape \(seeds"),
        ({"clipping": lambda g, _: g[:2]}, "keeps the shape of a gradient"),
        ({"local_rule": GradientTracking, "momentum": 0.5}, "momentum must be 0"),
        ({"clipping": normalise, "noise_keys": "seed"}, "simulations without keys"),
    ],
)
def test_what_cannot_be_accounted_for_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        simulate(**change)


def test_a_trace_has_every_step_of_every_run() -> None:
    rows: list[Row] = []
    rng = np.random.default_rng(0)
    found = corn.compare(
        RING,
        BUDGET,
        model=LinearClassifier(D, CLASSES),
        datasets=[(rng.standard_normal((9, D)), rng.integers(0, CLASSES, 9)) for _ in range(N)],
        mechanisms=["ldp", "none"],
        step_sizes=[0.1, 0.2],
        seeds=(0, 1),
        on_step=rows.extend,
    )
    assert len(rows) == 12 * 2 * 2 * 2
    assert all(tuple(row) == TRACED for row in rows)
    runs = {(row["mechanism"], row["step_size"], row["seed"]) for row in rows}
    assert len(runs) == 8
    last = {(r["mechanism"], r["step_size"], r["seed"]): r for r in rows if r["step"] == 12}
    for row in found.result.last_rows:
        traced = last[row["mechanism"], row["step_size"], row["seed"]]
        assert traced["noise_norm"] == row["noise_norm"]
        assert traced["gradient_norm"] == row["gradient_norm"]
        is_noisy = row["mechanism"] == "ldp"
        assert (float(traced["average_noise_norm"]) > 0) == is_noisy
        assert float(traced["average_noise_norm"]) <= float(traced["noise_norm"])
        assert math.isnan(float(traced["disagreement_ratio"])) != is_noisy


def remember() -> Clipping:
    """Return a rule that adds the gradient before to each gradient."""
    seen: list[Tensor] = []

    def clip(gradient: Tensor, largest: Tensor) -> Tensor:
        seen.append(torch.zeros(len(gradient)) + len(seen))
        return gradient + largest * seen[-1]

    return clip


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("clipping", "normalise"),
        ("clipping", remember()),
        ("mixing", "gossip"),
        ("local_rule", GradientTracking()),
    ],
)
def test_replacements_of_a_wrong_kind_or_size_are_named(name: str, rule: object) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        simulate(2, Mechanism.non_private(*BUDGET.queries), **{name: rule})


@pytest.mark.parametrize(
    "change", [{"mixing": pair_at_random(RING)}, {"local_rule": GradientTracking}]
)
def test_replaced_mixing_has_no_kappa_of_a_design(change: dict[str, Any]) -> None:
    data = [(torch.randn(6, D), torch.arange(6) % CLASSES)] * N
    trace: list[Row] = []
    found = corn.compare(
        RING,
        BUDGET,
        model=nn.Linear(D, CLASSES),
        loss=nn.functional.cross_entropy,
        datasets=data,
        mechanisms=["corn"],
        step_sizes=[0.1],
        on_step=trace.extend,
        **change,
    )
    assert found.summary["corn"]["disagreement_ratio"] is None
    assert all(math.isnan(float(row["disagreement_ratio"])) for row in trace)
