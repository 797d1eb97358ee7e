"""The batched simulation against Algorithm 1 in NumPy, agent by agent and run by run."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from corn.checks import FloatArray
from corn.covariance import Decomposition, Horizon, MechanismName, design
from corn.learn.batches import AgentData, BatchSampler, SeededChoices
from corn.learn.mechanism import Mechanism, Trial
from corn.learn.perturbation import JointNoise, simulation_nonce, symmetric_root
from corn.learn.problem import SweepSettings
from corn.learn.schedule import Constant, Cosine, InverseSqrt, Schedule
from corn.learn.simulation import Simulation
from corn.learn.sweep import run_sweep
from corn.learn.tasks import Quadratic
from corn.learn.workloads import Workload
from corn.noise import SecureSource, draw_share, simulated_keys
from corn.plan import make_plan
from corn.privacy import PrivacyBudget
from corn.topology import Gossip, load_network

from .problems import BUDGET, NETWORK, SAMPLE_BUDGET, make_mechanism, make_problem

MECHANISMS = ["corn", "decor", "ldp", "zero-sum", "central", "none", "unclipped"]
SCHEDULES: list[Schedule] = [Constant(0.05), InverseSqrt(0.1), Cosine(0.08)]
W = NETWORK.mixing_matrix
NUM_STEPS = 20


def quadratic_gradient(x: FloatArray, sample: FloatArray, _: float) -> FloatArray:
    return 2 * sample[:4].reshape(2, 2) @ (x - sample[4:])


def logistic_gradient(x: FloatArray, sample: FloatArray, label: float) -> FloatArray:
    return (1 / (1 + np.exp(-sample @ x)) - label) * sample + 0.01 * x


GRADIENTS = {"quadratic": quadratic_gradient, "logistic": logistic_gradient}


def clip(g: FloatArray, norm: float) -> FloatArray:
    return g * min(1.0, norm / max(float(np.linalg.norm(g)), 1e-300))


def reference_run(
    task: str,
    data: AgentData,
    method: Mechanism,
    schedule: Schedule,
    *,
    seed: int,
    start: FloatArray,
    per_sample: bool,
    momentum: float,
) -> FloatArray:
    """Run Algorithm 1: for each agent clip, add its share of N(0, R), round, step; then mix."""
    # All methods of a sweep share batches, also those that clip nothing.
    queries = SAMPLE_BUDGET.queries if per_sample else ()
    sampler = BatchSampler(data, queries, batch_size=8, choices=[SeededChoices(seed)])
    n, x = NETWORK.num_agents, np.tile(start, (NETWORK.num_agents, 1))
    # With the covariance I it draws the normals that all mechanisms share.
    normals = JointNoise(
        [Decomposition(np.ones(n))], seeds=[seed], num_parameters=len(start), dtype=torch.float64
    )
    R = np.zeros((n, n)) if method.noise is None else method.noise.covariance
    mixing = np.full((n, n), 1 / n) if method.is_central else W
    m = np.zeros_like(x)
    for t in range(NUM_STEPS):
        batch = sampler.draw(t)
        v = symmetric_root(R) @ normals.draw(t)[0, :, 0].numpy()
        g = np.zeros_like(x)
        for i, (samples, labels, weights) in enumerate(
            zip(*(part.double().numpy() for part in (batch.inputs, batch.targets, batch.weights)))  # noqa: B905
        ):
            slopes = [GRADIENTS[task](x[i], *pair) for pair in zip(samples, labels, strict=True)]
            if per_sample:
                g[i] = sum(w * clip(s, method.clip) for w, s in zip(weights, slopes, strict=True))
            else:
                g[i] = clip(weights @ np.array(slopes), method.clip)
        released = g + v
        if method.grid:
            released = method.grid * np.rint(released / method.grid)
        m = momentum * m + (1 - momentum) * released
        x = mixing @ (x - schedule.at(t + 1, NUM_STEPS) * m)
    return x


@pytest.mark.parametrize(("unit", "momentum"), [("agent", 0.0), ("sample", 0.0), ("agent", 0.9)])
@pytest.mark.parametrize("task_name", ["quadratic", "logistic"])
def test_the_simulation_equals_a_plain_reference(
    task_name: str, unit: str, momentum: float
) -> None:
    """Every mechanism with every schedule and two seeds, all in one sweep."""
    budget = BUDGET if unit == "agent" else SAMPLE_BUDGET
    methods = [make_mechanism(mechanism, budget) for mechanism in MECHANISMS]
    pairs = list(itertools.product(methods, SCHEDULES))
    task, data = make_problem(task_name)
    settings = SweepSettings(
        NUM_STEPS, batch_size=8, seeds=(5, 9), dtype="float64", momentum=momentum
    )
    simulation = Simulation(
        task, data, NETWORK, [Trial(*pair) for pair in pairs], settings=settings
    )
    start = task.initialize(0).numpy()
    for _ in range(NUM_STEPS):
        simulation.advance()
    for s, seed in enumerate(settings.seeds):
        for v, (method, schedule) in enumerate(pairs):
            expected = reference_run(
                task_name,
                data,
                method,
                schedule,
                seed=seed,
                start=start,
                per_sample=unit == "sample",
                momentum=momentum,
            )
            found = simulation.parameters[s, :, v].numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * abs(expected).max())


@pytest.mark.parametrize("keys", ["none", "seed"])
@pytest.mark.parametrize("unit", ["agent", "sample"])
@pytest.mark.parametrize("task_name", ["logistic", "softmax", "network"])
def test_steps_are_the_same_however_many_cells_are_computed_at_a_time(
    task_name: str, unit: str, keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = SAMPLE_BUDGET if unit == "sample" else BUDGET
    plan = Mechanism.from_plan(make_plan(NETWORK, budget))
    assert plan.grid > 0
    methods = [plan, make_mechanism("ldp", budget), make_mechanism("none", budget)]
    # One more trial of the first method, so that trials of a method are not adjacent.
    trials = [Trial(method, eta) for method in (*methods, plan) for eta in SCHEDULES]
    task, data = make_problem(task_name)
    data.inputs[3] = math.inf
    settings = SweepSettings(3, batch_size=8, seeds=(5, 9), dtype="float64", noise_keys=keys)
    found = []
    # One cell, some cells, and all cells of both seeds. Five does not divide their number.
    for num_cells in (1, 5, 100):
        size = num_cells * len(trials) * task.num_parameters
        monkeypatch.setattr("corn.learn.simulation._MODEL_VALUES_AT_ONCE", size)
        simulation = Simulation(task, data, NETWORK, trials, settings=settings)
        assert len(simulation._draw_batches()) == math.ceil(2 * NETWORK.num_agents / num_cells)
        measured = [vars(simulation.advance(observe=True)) for _ in range(3)]
        found.append((simulation.parameters, simulation.num_broken, measured))
    assert found[0][1].any()
    for other in found[:2]:
        torch.testing.assert_close(other, found[2], rtol=1e-11, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("task_name", ["quadratic", "logistic", "softmax", "network"])
def test_float32_agrees_with_float64(task_name: str) -> None:
    finals = []
    for dtype in ("float32", "float64"):
        task, data = make_problem(task_name, getattr(torch, dtype))
        settings = SweepSettings(20, batch_size=8, dtype=dtype)
        trials = [Trial(make_mechanism("none"), Constant(0.05))]
        simulation = Simulation(task, data, NETWORK, trials, settings=settings)
        for _ in range(20):
            simulation.advance()
        assert simulation.parameters.dtype == getattr(torch, dtype)
        finals.append(simulation.parameters.double())
    torch.testing.assert_close(*finals, rtol=1e-4, atol=1e-4)


def test_one_step_adds_the_noise_of_theorem_1() -> None:
    """E‖W v‖² η² = η² Tr(W R Wᵀ) per coordinate, measured over many seeds."""
    task, data = make_problem("quadratic")
    methods = [make_mechanism(name) for name in ("none", "corn", "decor", "ldp", "central")]
    trials = [Trial(method, Constant(0.3)) for method in methods]
    settings = SweepSettings(1, batch_size=1, seeds=tuple(range(3000)), dtype="float64")
    simulation = Simulation(task, data, NETWORK, trials, settings=settings)
    simulation.advance()
    quiet, *noisy = simulation.parameters.unbind(dim=2)
    for method, found in zip(methods[1:], noisy, strict=True):
        assert method.noise is not None
        # A server gives all agents the average.
        mixing = np.full_like(W, 1 / 6) if method.is_central else W
        clean = quiet.mean(dim=1, keepdim=True) if method.is_central else quiet
        measured = (found - clean).square().sum(dim=1).mean().item()
        expected = 0.3**2 * np.trace(mixing @ method.noise.covariance @ mixing.T)
        assert measured == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("gossip", [Gossip(3), Gossip(3, "chebyshev")], ids=str)
def test_every_step_and_step_of_the_cool_down_gossips(gossip: Gossip) -> None:
    task, data = make_problem("logistic")
    trials = [Trial(make_mechanism("ldp"), Constant(0.1))]
    settings = SweepSettings(1, 8, cooldown_steps=2, dtype="float64")
    network = replace(NETWORK, gossip=gossip)
    simulation = Simulation(task, data, network, trials, settings=settings)
    plain = Simulation(task, data, NETWORK, trials, settings=SweepSettings(1, 8, dtype="float64"))
    simulation.advance()
    simulation.cool_down()
    plain.advance()
    half = np.linalg.solve(W, plain.parameters[0, :, 0].numpy())
    expected = np.linalg.matrix_power(gossip.matrix(W), 3) @ half
    np.testing.assert_allclose(simulation.parameters[0, :, 0].numpy(), expected, atol=1e-9)


def test_common_random_numbers_across_mechanisms_and_sweeps() -> None:
    """A run does not depend on which other runs share its sweep."""
    task, data = make_problem("logistic")

    def run(mechanisms: list[str], seeds: tuple[int, ...]) -> torch.Tensor:
        trials = [Trial(make_mechanism(name), Constant(0.1)) for name in mechanisms]
        settings = SweepSettings(5, 8, seeds=seeds, dtype="float64")
        simulation = Simulation(task, data, NETWORK, trials, settings=settings)
        for _ in range(5):
            simulation.advance()
        return simulation.parameters

    alone = run(["ldp"], (3,))
    together = run(["corn", "ldp", "none"], (1, 3))
    torch.testing.assert_close(together[1, :, 1], alone[0, :, 0])


@pytest.mark.parametrize("mechanism", ["corn", "decor", "ldp"])
def test_keyed_noise_equals_the_shares_that_agents_draw(mechanism: str) -> None:
    """Keyed noise is each agent's own share, from its own keys, rounded with the gradient."""
    task, data = make_problem("logistic")
    methods = [make_mechanism(mechanism), make_mechanism("none")]
    trials = [Trial(method, Constant(0.1)) for method in methods]
    settings = SweepSettings(1, 8, seeds=(4,), dtype="float64", noise_keys="seed")
    simulation = Simulation(task, data, NETWORK, trials, settings=settings)
    simulation.advance()
    noisy, quiet = simulation.parameters[0].unbind(dim=1)
    shares = methods[0].noise
    assert isinstance(shares, Decomposition)
    source = SecureSource(simulated_keys(shares, seed=4))
    where: Any = {"source": source, "nonce": simulation_nonce(4), "step": 0, "stop": 5}
    v = np.stack([draw_share(shares, i, **where) for i in range(6)])
    start = task.initialize(0).numpy()
    g = -np.linalg.solve(W, quiet.numpy() - start) / 0.1
    released = methods[0].grid * np.rint((g + v) / methods[0].grid)
    np.testing.assert_allclose(noisy.numpy(), start - 0.1 * W @ released, atol=1e-9)


def test_without_noise_and_clipping_dsgd_reaches_the_centralised_optimum() -> None:
    """A complete graph mixes to the average at once, so DSGD is gradient descent on the average."""
    task = Quadratic(6)
    task.start = np.zeros(2)
    trials = [Trial(Mechanism.non_private(), Constant(0.02))]
    settings = SweepSettings(800, None, dtype="float64")
    network = load_network("complete:6", mixing="gossip")
    simulation = Simulation(
        task, task.agent_data(torch.float64), network, trials, settings=settings
    )
    for _ in range(800):
        simulation.advance()
    expected = np.tile(task.minimizer, (6, 1))
    np.testing.assert_allclose(simulation.parameters[0, :, 0].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("mechanism", ["ldp", "decor", "corn"])
def test_the_quadratic_gap_follows_from_the_noise(mechanism: MechanismName) -> None:
    """From the minimiser, E[gap] = Tr(Ā)/n · Σ_t η_t² Tr(Wᵏ R Wᵏᵀ), k = T − t + 1, for small steps.

    The gap of one run varies more than its mean, hence the many seeds.
    """
    n, num_steps, num_seeds = 6, 40, 600
    network = load_network("er:n=6,p=0.5,seed=1", mixing="gossip")
    W = network.mixing_matrix
    budget = PrivacyBudget(10, 1e-5, num_steps, 0.1)
    noise = design(W, budget.precision_cap, mechanism=mechanism, objective=Horizon(10))
    schedule = InverseSqrt(1e-3)
    problem = Workload("quadratic").build(n)
    result = run_sweep(
        problem,
        network,
        [Trial(Mechanism.private(mechanism, noise, budget), schedule)],
        settings=SweepSettings(num_steps, None, tuple(range(num_seeds)), dtype="float64"),
        evaluate_at=[num_steps],
        show_progress=False,
    )
    assert isinstance(problem.task, Quadratic)
    gaps = np.array([float(row["train_loss"]) for row in result.last_rows]) - problem.task.minimum
    energy = 0.0
    for step in range(1, num_steps + 1):
        power = np.linalg.matrix_power(W, num_steps - step + 1)
        energy += schedule.at(step, num_steps) ** 2 * np.trace(power @ noise.covariance @ power.T)
    expected = problem.task.matrices.mean(axis=0).trace() / n * energy
    assert abs(gaps.mean() - expected) < 4 * gaps.std() / math.sqrt(num_seeds)
