"""Time of a training step on one core, next to its unavoidable products and to a plain loop.

Run ``python benchmarks/engine_speed.py [--steps N] [--turns N]``. *Bare* computes the matrix
products and normal random numbers of a step and nothing else: no batches, no clipping, no half
step. *Loop* is one backward pass for each agent of each run.

For a user's module with every sample clipped, the engine is compared with *one by one*: samples
vectorised by ``torch.func``, but one model after the other.

A step with *exact sums*, in which all agents have one model, is compared with a step of *gossip*.

With every sample clipped, a step by Poisson sampling, whose batches are padded to the largest, is
compared with a step by batches of *fixed* size.

Shapes are those of the paper's tasks (a9a: 55 runs, 20 agents, batches of 128; MNIST: softmax
regression and the 784–32–10 network). Values are random, because the time does not depend on them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from corn.covariance import EAVESDROPPER, Horizon, design
from corn.learn import AgentData, Constant, Mechanism, Simulation, SweepSettings, Trial
from corn.learn.batches import Batch
from corn.learn.tasks import LinearClassifier, ModuleTask, ShallowNetwork, Task, small_cnn
from corn.privacy import PrivacyBudget, Sampling
from corn.threads import limit_threads
from corn.topology import Mixing, Network, load_network
from measuring import best_seconds, print_times

NUM_AGENTS, BATCH, SAMPLES_PER_AGENT = 20, 128, 1700
GRAPH = f"er:n={NUM_AGENTS},p=0.2,seed=1"
BUDGET = PrivacyBudget(10, 1e-5, num_steps=5000, clip=0.1)
STEP_SIZES = (1e-1, 5e-2, 1e-2, 5e-3, 1e-3)


@dataclass(frozen=True)
class Case:
    """A task of the paper, with as many runs as methods times step sizes."""

    name: str
    task: Task
    module: nn.Module
    num_features: int
    num_classes: int
    num_methods: int
    num_step_sizes: int

    @property
    def num_runs(self) -> int:
        """The number of models that each agent trains."""
        return self.num_methods * self.num_step_sizes


CASES = (
    Case("a9a, 55 runs", LinearClassifier(123, 2), nn.Linear(123, 2), 123, 2, 11, 5),
    Case(
        "MNIST 784-32-10, 5 runs",
        ShallowNetwork(784, 10),
        nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)),
        784,
        10,
        5,
        1,
    ),
)
# Sweeps of Figure 5: models of all runs take more memory than caches and allocators keep.
SWEEPS = (
    Case("MNIST softmax, 50 runs", LinearClassifier(784, 10), nn.Linear(784, 10), 784, 10, 10, 5),
    replace(CASES[1], name="MNIST 784-32-10, 50 runs", num_methods=10, num_step_sizes=5),
)


def make_mechanisms(count: int, network: Network) -> list[Mechanism]:
    """Make CorN for different horizons."""
    # Neither mechanism nor threat changes the time of a step. Designs against an eavesdropper are
    # the fastest to make.
    designs = [
        design(network, BUDGET, objective=Horizon(h), threat=EAVESDROPPER)
        for h in range(1, count + 1)
    ]
    return [Mechanism.private(f"h={k}", made, BUDGET) for k, made in enumerate(designs, start=1)]


def make_samples(case: Case) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = NUM_AGENTS * SAMPLES_PER_AGENT
    X = torch.rand(rows, case.num_features, generator=generator)
    return X, torch.randint(0, case.num_classes, (rows,), generator=generator)


def make_engine(
    case: Case, mixing: Mixing = "gossip", mechanisms: list[Mechanism] | None = None
) -> Callable[[], object]:
    X, y = make_samples(case)
    offsets = tuple(range(0, len(X) + 1, SAMPLES_PER_AGENT))
    network = load_network(GRAPH, mixing=mixing)
    trials = [
        Trial(mechanism, Constant(step_size))
        for mechanism in mechanisms or make_mechanisms(case.num_methods, network)
        for step_size in STEP_SIZES[: case.num_step_sizes]
    ]
    simulation = Simulation(
        case.task,
        AgentData(case.task.prepare(X), y, offsets),
        network,
        trials,
        settings=SweepSettings(BUDGET.num_steps, BATCH),
    )
    return simulation.advance


def make_bare(case: Case) -> Callable[[], object]:
    """Return a step that computes products, in the fastest known layout, and normals only."""
    runs, d = case.num_runs, case.task.num_parameters
    generator = np.random.Generator(np.random.SFC64(0))
    normals = np.empty((NUM_AGENTS, d), np.float32)
    roots = torch.rand(NUM_AGENTS * case.num_methods, NUM_AGENTS)
    W, models = torch.rand(NUM_AGENTS, NUM_AGENTS), torch.rand(NUM_AGENTS, runs * d)
    layers = _layer_sizes(case)
    inputs = [torch.rand(NUM_AGENTS, BATCH, layers[0][0])]
    inputs += [torch.rand(NUM_AGENTS * runs, BATCH, size) for size, _ in layers[1:]]
    weights = [torch.rand(NUM_AGENTS, runs * layers[0][1], layers[0][0])]
    weights += [torch.rand(NUM_AGENTS * runs, out, size) for size, out in layers[1:]]

    def multiply() -> None:
        for index, (X, theta) in enumerate(zip(inputs, weights, strict=True)):
            outputs = torch.bmm(X, theta.mT)
            torch.bmm(outputs.mT, X)
            if index:  # errors are passed back through all layers but the first
                torch.bmm(outputs, theta)
        generator.standard_normal(dtype=np.float32, out=normals)
        roots @ torch.from_numpy(normals)
        W @ models

    return multiply


def _layer_sizes(case: Case) -> list[tuple[int, int]]:
    if isinstance(case.task, LinearClassifier):
        # Two classes have one logit.
        return [(case.num_features + 1, 1 if case.num_classes == 2 else case.num_classes)]
    return [(case.num_features + 1, 32), (32, case.num_classes)]


def make_loop(case: Case) -> Callable[[], object]:
    """Return a step with one backward pass per agent and run, and clip, noise, mixing per run."""
    X, y = make_samples(case)
    model, d = case.module, sum(p.numel() for p in case.module.parameters())
    parameters = list(model.parameters())
    factor = torch.rand(NUM_AGENTS, NUM_AGENTS)
    W = torch.rand(NUM_AGENTS, NUM_AGENTS)

    def step() -> None:
        for _ in range(case.num_runs):
            gradients = torch.empty(NUM_AGENTS, d)
            for agent in range(NUM_AGENTS):
                own = slice(agent * SAMPLES_PER_AGENT, agent * SAMPLES_PER_AGENT + BATCH)
                loss = nn.functional.cross_entropy(model(X[own]), y[own])
                flat = [g.flatten() for g in torch.autograd.grad(loss, parameters)]
                gradients[agent] = torch.cat(flat)
                gradients[agent] *= min(1.0, 0.1 / float(gradients[agent].norm()))
            W @ (gradients + factor @ torch.randn(NUM_AGENTS, d))

    return step


def make_sampled(case: Case, sampling: Sampling) -> Callable[[], object]:
    """Return a step with every sample clipped, by batches of fixed size or by Poisson sampling."""
    budget = PrivacyBudget(
        10,
        1e-5,
        num_steps=BUDGET.num_steps,
        clip=1.0,
        unit="sample",
        batch_size=BATCH,
        sampling=sampling,
        samples_per_agent=None if sampling == "every-step" else SAMPLES_PER_AGENT,
    )
    # Without noise, which would take the same time for both.
    count = case.num_methods
    return make_engine(
        case,
        mechanisms=[Mechanism.non_private(*budget.queries, name=f"{k}") for k in range(count)],
    )


def compare(
    title: str,
    first: tuple[str, Callable[[], object]],
    second: tuple[str, Callable[[], object]],
    *,
    steps: tuple[int, int],
    num_turns: int,
) -> dict[str, dict[str, float]]:
    """Return the times of two programs, and how many times the first takes that of the second."""
    (name, one), (other_name, other) = first, second
    times = best_milliseconds({name: (one, steps[0]), other_name: (other, steps[1])}, num_turns)
    shown = {f"{own}, ms a step": value for own, value in times.items()}
    return {title: {**shown, f"{name} / {other_name}": times[name] / times[other_name]}}


MODULES: tuple[tuple[str, nn.Module, tuple[int, ...]], ...] = (
    ("linear 123-2", nn.Linear(123, 2), (123,)),
    (
        "network 64-16-10",
        nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)),
        (64,),
    ),
    ("cnn on 8×8", small_cnn((8, 8), 10), (1, 8, 8)),
)
MODULE_RUNS, MODULE_BATCH = 5, 32


def make_clipped(
    model: nn.Module, shape: tuple[int, ...]
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return gradients with every sample clipped: all models together, and one at a time."""
    task, loss_of = ModuleTask(model, nn.functional.cross_entropy), nn.functional.cross_entropy
    models = task.initialize(0).float().repeat(NUM_AGENTS, MODULE_RUNS, 1)
    X = torch.rand(NUM_AGENTS, MODULE_BATCH, *shape)
    y = torch.randint(0, 2, (NUM_AGENTS, MODULE_BATCH))
    batch = Batch(X, y, torch.full(y.shape, 1 / MODULE_BATCH), is_average=True)
    named = dict(model.named_parameters())
    sizes = [p.numel() for p in named.values()]

    def sample_loss(vector: Tensor, x: Tensor, target: Tensor) -> Tensor:
        pieces = zip(named.items(), torch.split(vector, sizes), strict=True)
        weights = {name: piece.view(p.shape) for (name, p), piece in pieces}
        return loss_of(functional_call(model, weights, (x[None],)), target[None])

    slopes_of = vmap(grad(sample_loss), in_dims=(None, 0, 0))

    def one_by_one() -> None:
        for agent in range(NUM_AGENTS):
            for vector in models[agent]:
                slopes = slopes_of(vector, X[agent], y[agent])
                factors = (0.1 / torch.linalg.vector_norm(slopes, dim=1)).clamp(max=1)
                (factors / MODULE_BATCH) @ slopes

    clip = torch.full((MODULE_RUNS,), 0.1)
    return lambda: task.gradient(models, batch, sample_clip=clip), one_by_one


def best_milliseconds(
    programs: dict[str, tuple[Callable[[], object], int]], num_turns: int
) -> dict[str, float]:
    """Return the least time per step of each program, in turns of some steps each."""

    def repeat(step: Callable[[], object], num_steps: int) -> Callable[[], object]:
        return lambda: [step() for _ in range(num_steps)]

    turns = {name: repeat(step, count) for name, (step, count) in programs.items()}
    best = best_seconds(turns, num_turns, time.perf_counter)
    return {name: 1000 * best[name] / count for name, (_, count) in programs.items()}


def measure(case: Case, num_steps: int, num_turns: int) -> dict[str, float]:
    # Large sweeps get fewer steps, so that no case takes much longer than the others.
    values = case.num_runs * case.task.num_parameters
    num_steps = max(1, num_steps // max(1, values // 200_000))
    times = best_milliseconds(
        {
            "engine": (make_engine(case), num_steps),
            "bare": (make_bare(case), num_steps),
            "loop": (make_loop(case), 1),
        },
        num_turns,
    )
    return {
        **{f"{name}, ms a step": value for name, value in times.items()},
        "engine / bare": times["engine"] / times["bare"],
        "loop / engine": times["loop"] / times["engine"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="steps of the engine per turn")
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    limit_threads()
    results = {w.name: measure(w, arguments.steps, arguments.turns) for w in (*CASES, *SWEEPS)}
    for name, model, shape in MODULES:
        together, one_by_one = make_clipped(model, shape)
        results |= compare(
            f"{name}, every sample clipped, {MODULE_RUNS} runs",
            ("one by one", one_by_one),
            ("engine", together),
            steps=(1, 10),
            num_turns=arguments.turns,
        )
    for case in CASES:
        results |= compare(
            f"{case.name}, every sample clipped",
            ("Poisson", make_sampled(case, "poisson")),
            ("fixed", make_sampled(case, "every-step")),
            steps=(max(1, arguments.steps // 10),) * 2,
            num_turns=arguments.turns,
        )
    for case in SWEEPS:
        results |= compare(
            f"{case.name}, exact sums",
            ("gossip", make_engine(case)),
            ("exact sums", make_engine(case, "sum")),
            steps=(max(1, arguments.steps // 20),) * 2,
            num_turns=arguments.turns,
        )
    for title, row in results.items():
        print_times(title, row)


if __name__ == "__main__":
    main()
