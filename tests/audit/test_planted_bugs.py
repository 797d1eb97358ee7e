"""Faults of published code, planted into the program one by one: each audit must find its fault."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, default_collate

import corn
from corn.arrays import FloatArray
from corn.audit import DEPLOYED, AuditReport, AuditSettings, Program, View, audit_plan
from corn.audit.program import STEP_SIZE, derive_keys, draw_nonce, make_sampler
from corn.covariance import Decomposition
from corn.errors import CornError
from corn.learn.batches import Batch, BatchSampler
from corn.learn.loop_simulation import SimulatedTurns
from corn.learn.own_loop import LoaderPart, PrivateOptimizer, PrivateTraining
from corn.learn.sample_gradients import SampleGradients
from corn.learn.sampling import SeededChoices
from corn.learn.step import ClippedGradients, compute_gradients, gradient_norms
from corn.learn.user_model import UserModel
from corn.noise import Owner, draw_share
from corn.plan import Plan
from tests.audit.plans import agent_plan, sample_plan

SHARES = AuditSettings(num_trials=2000)
STEP = AuditSettings("step", num_trials=500)


def audit(
    program: Program, settings: AuditSettings = SHARES, plan: Plan | None = None
) -> AuditReport:
    # One victim through the step, where each takes a second, and all agents run the same code.
    victims = [1] if settings.through == "step" else [0, 1]
    return audit_plan(plan or agent_plan(), victims=victims, settings=settings, program=program)


@pytest.mark.parametrize("settings", [SHARES, STEP], ids=["shares", "step"])
@pytest.mark.parametrize("unit", ["agent", "poisson", "passes"])
def test_the_program_without_faults_passes(settings: AuditSettings, unit: str) -> None:
    plan = agent_plan() if unit == "agent" else sample_plan(unit)
    report = audit(DEPLOYED, settings, plan)
    assert not report.violated, (report.problems, [one.excess for one in report.findings])


def test_noise_reused_in_two_steps() -> None:
    def draw(*args: Any, step: int, **rest: Any) -> FloatArray:
        return draw_share(*args, step=step // 2, **rest)

    report = audit(replace(DEPLOYED, draw_share=draw))
    assert {one.verdict for one in report.findings} == {"violated"}
    assert "is correlated" in report.problems[0]


def test_a_resumed_run_with_the_old_nonce() -> None:
    def nonce(plan: Plan, seed: int, attempt: int) -> bytes:
        del attempt
        return draw_nonce(plan, seed, 0)

    report = audit(replace(DEPLOYED, draw_nonce=nonce))
    assert {one.verdict for one in report.findings} == {"violated"}
    assert "is correlated" in report.problems[0]


def test_a_wrong_covariance() -> None:
    def draw(decomposition: Decomposition, *args: Any, **rest: Any) -> FloatArray:
        return draw_share(decomposition, *args, **rest) * 0.9

    report = audit(replace(DEPLOYED, draw_share=draw))
    assert {one.verdict for one in report.findings} == {"violated"}
    assert "instead of" in report.problems[0]


def test_pair_noise_scaled_by_the_mixing_weight() -> None:
    plan = agent_plan()
    W = plan.network.mixing_matrix

    def draw(decomposition: Decomposition, agent: int, **rest: Any) -> FloatArray:
        factors = tuple(
            factor * W[group[0], group[1]] if len(group) == 2 else factor
            for group, factor in zip(decomposition.seed_groups, decomposition.factors, strict=True)
        )
        scaled = Decomposition(decomposition.private_variance, decomposition.seed_groups, factors)
        return draw_share(scaled, agent, **rest)

    report = audit(replace(DEPLOYED, draw_share=draw))
    assert {one.verdict for one in report.findings} == {"violated"}


def test_a_share_drawn_with_the_wrong_sign() -> None:
    """It does not cancel any more. Privacy need not suffer, but the noise is not the plan's."""

    def draw(decomposition: Decomposition, agent: int, **rest: Any) -> FloatArray:
        group, *others = decomposition.seed_groups
        first, *factors = (np.array(factor) for factor in decomposition.factors)
        if agent == group[0]:
            first[0] *= -1
        wrong = Decomposition(decomposition.private_variance, (group, *others), (first, *factors))
        return draw_share(wrong, agent, **rest)

    report = audit(replace(DEPLOYED, draw_share=draw))
    assert report.violated
    assert "covariance of agents 0 and" in report.problems[0]


@pytest.mark.usefixtures("without_bits")
def test_clipping_after_the_noise() -> None:
    def compute(task: Any, models: Any, batch: Batch, clip: Any, **rest: Any) -> ClippedGradients:
        return compute_gradients(task, models, batch, clip * 1e9, **rest)

    def send(model: Tensor, found: ClippedGradients, noise: Tensor, *, grid: float) -> Tensor:
        total = found.values.flatten(1) * found.factors.view(-1, 1) + noise
        norm = gradient_norms(total).view(-1, 1)
        clipped = total * torch.clamp(0.1 / norm, max=1.0)
        return (model - STEP_SIZE * torch.round(clipped / grid) * grid).float()

    report = audit(replace(DEPLOYED, compute_gradients=compute, make_messages=send), STEP)
    assert {one.verdict for one in report.findings} == {"violated"}


@pytest.mark.usefixtures("without_bits")
def test_clipping_samples_for_a_promise_to_agents() -> None:
    def compute(task: Any, models: Any, batch: Batch, clip: Any, **_: Any) -> ClippedGradients:
        weights = torch.ones_like(batch.weights).double()
        summed = replace(batch, weights=weights, is_average=False)
        return compute_gradients(task, models, summed, clip, clips_samples=True)

    report = audit(replace(DEPLOYED, compute_gradients=compute), STEP)
    assert {one.verdict for one in report.findings} == {"violated"}


@pytest.mark.usefixtures("without_bits")
def test_no_clipping() -> None:
    def compute(task: Any, models: Any, batch: Batch, clip: Any, **rest: Any) -> ClippedGradients:
        return compute_gradients(task, models, batch, clip * 1e9, **rest)

    report = audit(replace(DEPLOYED, compute_gradients=compute), STEP)
    assert {one.verdict for one in report.findings} == {"violated"}


@pytest.mark.usefixtures("without_bits")
def test_division_by_the_drawn_batch_size() -> None:
    class Averaging(BatchSampler):
        def draw(self, number: int) -> Batch:
            batch = super().draw(number)
            present = (batch.weights > 0).double()
            return replace(batch, weights=present / present.sum(dim=1, keepdim=True).clamp(min=1))

    def sampler(data: Any, query: Any, choices: Sequence[Any]) -> BatchSampler:
        made = make_sampler(data, query, choices)
        made.__class__ = Averaging
        return made

    report = audit(replace(DEPLOYED, make_sampler=sampler), STEP, sample_plan())
    assert {one.verdict for one in report.findings} == {"violated"}


@pytest.mark.usefixtures("without_bits")
@pytest.mark.parametrize("is_common", [False, True])
def test_predictable_coins(is_common: bool) -> None:
    def choices(seed: int, trial: int) -> SeededChoices:
        return SeededChoices(seed if is_common else trial)

    settings = AuditSettings("step", num_trials=700, confidence=0.95)
    report = audit(replace(DEPLOYED, make_choices=choices), settings, sample_plan())
    assert "coins of Poisson sampling are predictable" in " ".join(report.problems)
    if not is_common:
        assert {one.verdict for one in report.findings} == {"violated"}


def test_a_leaked_pair_seed() -> None:
    """Agent 2 can subtract noise that the plan hides from it."""
    plan = agent_plan()
    pair = next(k for k, group in enumerate(plan.decomposition.seed_groups) if 2 not in group)
    owner = Owner(plan.decomposition.seed_groups[pair], pair)

    def keys(plan: Plan, seed: int) -> Any:
        own = derive_keys(plan, seed)
        own[2][owner] = own[owner.members[0]][owner]
        return own

    report = audit_plan(
        plan,
        victims=owner.members[:1],
        view=View((2,)),
        settings=SHARES,
        program=replace(DEPLOYED, derive_keys=keys),
    )
    assert report.violated


def round_gradient(model: Tensor, found: ClippedGradients, noise: Tensor, *, grid: float) -> Tensor:
    gradient = found.values.flatten(1) * found.factors.view(-1, 1)
    return (model - STEP_SIZE * (torch.round(gradient / grid) * grid + noise)).float()


def release_off_grid(
    model: Tensor, found: ClippedGradients, noise: Tensor, *, grid: float
) -> Tensor:
    del grid
    gradient = found.values.flatten(1) * found.factors.view(-1, 1)
    return (model - STEP_SIZE * (gradient + noise)).float()


def release_float32(
    model: Tensor, found: ClippedGradients, noise: Tensor, *, grid: float
) -> Tensor:
    """Release a plain sum in float32 with NumPy's normals, as most programs do."""
    del grid
    state = noise.numpy().ravel()[:1].view(np.uint64)
    generator = np.random.Generator(np.random.SFC64(state))
    weight = np.float32(np.sqrt(agent_plan().decomposition.private_variance[0]))
    normals = generator.standard_normal(noise.shape, dtype=np.float32) * weight
    gradient = (found.values.flatten(1) * found.factors.view(-1, 1)).float()
    return model - STEP_SIZE * (gradient + torch.from_numpy(normals))


@pytest.mark.parametrize("send", [round_gradient, release_off_grid, release_float32])
def test_releases_off_the_grid(send: Any) -> None:
    """Noise that is added after rounding, or to a gradient that is not rounded at all."""
    report = audit(replace(DEPLOYED, make_messages=send), STEP)
    found = " ".join(report.problems)
    assert "not multiples of the grid" in found
    # Noise in float64 is finer than a float32 message. A weight times float32 leaves out values.
    assert ("low-order bits reveal gradients" in found) == (send is release_float32)


# Faults of a user's own loop. Each is refused by one check. Without that check, one sample moves
# what the agent sends by more than the accounting assumes, though noise and batch are the same.

Fault: TypeAlias = Callable[[PrivateTraining, Tensor, Tensor], None]


def take_step(private: PrivateTraining, inputs: Tensor, targets: Tensor) -> None:
    private.optimizer.backward(cross_entropy(private.module(inputs), targets, reduction="none"))
    private.optimizer.step()


def weigh_classes_in_a_mean(private: PrivateTraining, inputs: Tensor, targets: Tensor) -> None:
    weight = torch.tensor([0.01, 1.0, 100.0])
    mean = cross_entropy(private.module(inputs), targets, weight=weight)
    private.optimizer.backward(mean.expand(len(inputs)))
    private.optimizer.step()


@torch.no_grad()
def initialise_by_data(private: PrivateTraining, inputs: Tensor, _: Tensor) -> None:
    private.module.bias.copy_(inputs.mean(dim=0))  # type: ignore[operator]


def write_parameters(private: PrivateTraining, inputs: Tensor, targets: Tensor) -> None:
    private.optimizer.backward(cross_entropy(private.module(inputs), targets, reduction="none"))
    initialise_by_data(private, inputs, targets)
    private.optimizer.step()


def write_momentum(private: PrivateTraining, inputs: Tensor, targets: Tensor) -> None:
    buffer = inputs.detach().mean(dim=0)
    private.optimizer.state[private.module.bias]["momentum_buffer"] = buffer
    take_step(private, inputs, targets)


def set_rate_by_data(private: PrivateTraining, inputs: Tensor, targets: Tensor) -> None:
    private.optimizer.param_groups[0]["lr"] = float(inputs.detach().abs().max())
    take_step(private, inputs, targets)


def normalise_batch(items: Sequence[Any]) -> Any:
    inputs, targets = default_collate(list(items))
    return (inputs - inputs.mean(dim=0)) / inputs.std(dim=0), targets


def send_step(
    private_step: Fault, sample: Tensor, label: int, collate: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, corn.Plan]:
    """Return what agent 0 sends in the first step if it has this sample among eight."""
    plan, sent = sample_plan("every-step", "replace", num_steps=4), []
    usual = SimulatedTurns.end

    def record(self: SimulatedTurns, parameters: Tensor) -> Tensor | None:
        sent.append(parameters.clone())
        return usual(self, parameters)

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, 3, generator=generator) / 10
    inputs[0] = sample
    data = TensorDataset(inputs, torch.tensor([label, 1, 1, 1, 1, 1, 1, 1]))
    model = nn.Linear(3, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedTurns, "end", record)
        private = corn.make_private(
            plan,
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
            data_loader=[DataLoader(data, batch_size=8, collate_fn=collate)] * 4,
        )
        private_step(private, *next(iter(private.data_loader)))
    return sent[0], plan


def measure_excess(fault: Fault, collate: Any, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return by how much one sample moves what is sent, relative to the accounted sensitivity."""
    pairs = [(torch.full((3,), 30.0), 2), (torch.full((3,), -0.1), 0)]
    (before, plan), (after, _) = (send_step(fault, *pair, collate, monkeypatch) for pair in pairs)
    # lr · 2C/B, and half a step of the grid in each value of both.
    most: float = 0.5 * (2 / 8 + plan.grid * len(before) ** 0.5)
    return float((before - after).norm()) / most


LOOP_FAULTS: list[tuple[Fault, Any, type, str]] = [
    (weigh_classes_in_a_mean, None, SampleGradients, "_require_own_losses"),
    (write_parameters, None, UserModel, "require_unchanged"),
    (write_momentum, None, PrivateOptimizer, "_require_same_state"),
    (set_rate_by_data, None, PrivateOptimizer, "_require_same_groups"),
    (take_step, normalise_batch, LoaderPart, "_check_independence"),
]


@pytest.mark.parametrize(("fault", "collate", "owner", "check"), LOOP_FAULTS)
def test_faults_of_the_users_own_loop(
    fault: Fault, collate: Any, owner: type, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CornError):
        measure_excess(fault, collate, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(owner, check, lambda *_: None)
        assert measure_excess(fault, collate, monkeypatch) > 1


def test_a_loop_without_faults_keeps_the_sensitivity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.3 < measure_excess(take_step, None, monkeypatch) <= 1
