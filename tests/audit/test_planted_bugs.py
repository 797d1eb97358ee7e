"""Faults of published code, planted into the program one by one: each audit must find its fault."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, default_collate

import corn
from corn.audit import AuditReport, View, audit_plan
from corn.audit.checks import check_sampler
from corn.audit.run import derive_keys, draw_nonce, make_choices, predicts_coins, query_of
from corn.checks import FloatArray, IntArray
from corn.covariance import Decomposition
from corn.distributed import RunSettings
from corn.distributed.agent import prepare_work
from corn.errors import CornError
from corn.learn import TrainingProblem, train
from corn.learn.batches import AgentData, Batch, BatchSampler, Choices, SeededChoices
from corn.learn.own_loop import LoopData, PrivateOptimizer, PrivateTraining, simulate
from corn.learn.step import ClippedGradients, compute_gradients, gradient_norms
from corn.learn.tasks import LinearClassifier
from corn.learn.user_model import SampleGradients, UserModel
from corn.noise import Owner, draw_share
from corn.noise.choices import SecretChoices
from corn.plan import Plan
from corn.topology import Mixing
from tests.audit.plans import agent_plan, sample_plan

SHARES: dict[str, Any] = {"num_trials": 2000}
STEP: dict[str, Any] = {"through": "step", "num_trials": 500}


# Where audits find the functions that a test replaces.
NOISE = "corn.learn.perturbation.draw_share"
HALF_STEP = "corn.learn.step.take_half_step"
COINS = "corn.audit.run.make_choices"
GRADIENTS = "corn.audit.run.compute_gradients"


def audit(settings: dict[str, Any] = SHARES, plan: Plan | None = None) -> AuditReport:
    # One victim through the step, where each takes a second, and all agents run the same code.
    victims = [1] if settings is not SHARES else [0, 1]
    return audit_plan(plan or agent_plan(), victims=victims, **settings)


@pytest.mark.parametrize("settings", [SHARES, STEP], ids=["shares", "step"])
@pytest.mark.parametrize("unit", ["agent", "poisson", "passes"])
def test_the_program_without_faults_passes(settings: dict[str, Any], unit: str) -> None:
    report = audit(settings, agent_plan() if unit == "agent" else sample_plan(unit))
    assert not report.violated, (report.problems, [one.excess for one in report.findings])


def test_noise_reused_in_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(*args: Any, step: int, **rest: Any) -> FloatArray:
        return draw_share(*args, step=step // 2, **rest)

    monkeypatch.setattr(NOISE, draw)
    report = audit()
    assert {one.verdict for one in report.findings} == {"violated"}
    assert "in release 0 and agent" in report.problems[0]
    assert "in release 1 is" in report.problems[0]


@pytest.mark.parametrize("mixing", ["gossip", "sum"])
def test_a_resumed_run_with_the_old_nonce(mixing: Mixing, monkeypatch: pytest.MonkeyPatch) -> None:
    def nonce(plan: Plan, seed: int, attempt: int) -> bytes:
        del attempt
        return draw_nonce(plan, seed, 0)

    monkeypatch.setattr("corn.audit.run.draw_nonce", nonce)
    report = audit(plan=agent_plan(mixing=mixing))
    assert {one.verdict for one in report.findings} == {"violated"}
    problems = " ".join(report.problems)
    assert re.search("in release 1 and agent . in release 2 is", problems)
    # Masks that are used twice cancel in the difference of two messages.
    assert ("is not uniform" in problems) == (mixing == "sum")


def test_a_wrong_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(*args: Any, **rest: Any) -> FloatArray:
        drawn = draw_share(*args, **rest)
        drawn *= 0.8  # in the memory that the step takes it from
        return drawn

    monkeypatch.setattr(NOISE, draw)
    report = audit()
    assert {one.verdict for one in report.findings} == {"violated"}
    assert "instead of" in report.problems[0]


def test_pair_noise_scaled_by_the_mixing_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    W = agent_plan().network.mixing_matrix

    def draw(decomposition: Decomposition, agent: int, **rest: Any) -> FloatArray:
        factors = tuple(
            factor * W[group[0], group[1]] if len(group) == 2 else factor
            for group, factor in zip(decomposition.seed_groups, decomposition.factors, strict=True)
        )
        scaled = Decomposition(decomposition.private_variance, decomposition.seed_groups, factors)
        return draw_share(scaled, agent, **rest)

    monkeypatch.setattr(NOISE, draw)
    assert {one.verdict for one in audit().findings} == {"violated"}


def test_a_share_drawn_with_the_wrong_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not cancel any more. Privacy need not suffer, but the noise is not the plan's."""

    def draw(decomposition: Decomposition, agent: int, **rest: Any) -> FloatArray:
        group, *others = decomposition.seed_groups
        first, *factors = (np.array(factor) for factor in decomposition.factors)
        if agent == group[0]:
            first[0] *= -1
        wrong = Decomposition(decomposition.private_variance, (group, *others), (first, *factors))
        return draw_share(wrong, agent, **rest)

    monkeypatch.setattr(NOISE, draw)
    report = audit()
    assert report.violated
    assert "covariance of agent 0 in release" in report.problems[0]


def clip_nothing(task: Any, models: Any, batch: Batch, clip: Any, **rest: Any) -> ClippedGradients:
    return compute_gradients(task, models, batch, clip * 1e9, **rest)


def clip_samples(task: Any, models: Any, batch: Batch, clip: Any, **_: Any) -> ClippedGradients:
    """Clip the samples of an agent, whose whole data was promised to be protected."""
    weights = torch.ones_like(batch.weights).double()
    summed = replace(batch, weights=weights, is_average=False)
    return compute_gradients(task, models, summed, clip, clips_samples=True)


def clip_noisy_sums(
    model: Tensor, gradient: Tensor, factor: Tensor, noise: Tensor, **at: float
) -> Tensor:
    total = (gradient * factor + noise).view(-1, 3)  # three coordinates of each trial
    clipped = (total * torch.clamp(0.1 / gradient_norms(total), max=1.0)[:, None]).flatten()
    return (model - at["step_size"] * torch.round(clipped / at["grid"]) * at["grid"]).float()


@pytest.mark.parametrize(
    "faults",
    [
        {GRADIENTS: clip_nothing, HALF_STEP: clip_noisy_sums},
        {GRADIENTS: clip_nothing},
        {GRADIENTS: clip_samples},
    ],
    ids=["after the noise", "nothing", "samples"],
)
def test_wrong_clipping(faults: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for where, fault in faults.items():
        monkeypatch.setattr(where, fault)
    assert {one.verdict for one in audit(STEP).findings} == {"violated"}


def plant_sampler(monkeypatch: pytest.MonkeyPatch, sampler: type[BatchSampler]) -> None:
    for module in ("checks", "run"):
        monkeypatch.setattr(f"corn.audit.{module}.BatchSampler", sampler)


def test_division_by_the_drawn_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    class Averaging(BatchSampler):
        def draw(self, number: int) -> Batch:
            batch = super().draw(number)
            present = (batch.weights > 0).double()
            return replace(batch, weights=present / present.sum(dim=1, keepdim=True).clamp(min=1))

    plant_sampler(monkeypatch, Averaging)
    report = audit(STEP, sample_plan())
    assert {one.verdict for one in report.findings} == {"violated"}
    assert "a sample has weight 1, where 1/8 was counted" in report.problems


class CompactSampler(BatchSampler):
    """Batches as wide as the samples in them, as a simulation draws them."""

    @classmethod
    def of_agent(cls, *args: Any, **rest: Any) -> BatchSampler:
        made = super().of_agent(*args, **rest)
        made._width = 0
        return made


class WidthOfData(BatchSampler):
    @classmethod
    def of_agent(cls, query: Any, data: AgentData, *args: Any, **rest: Any) -> BatchSampler:
        made = super().of_agent(query, data, *args, **rest)
        made._width = data.sizes[0]
        return made


class SamplesFirst(BatchSampler):
    def _place(self, cell: int, number: int, count: int, width: int) -> slice:  # noqa: ARG002
        return slice(count)


class RateOfData(BatchSampler):
    @classmethod
    def of_agent(cls, query: Any, data: AgentData, *args: Any, **rest: Any) -> BatchSampler:
        rate = min(1.0, 1.3 * query.batch_size / data.sizes[0])
        return super().of_agent(replace(query, sampling_rate=rate), data, *args, **rest)


class PassOfData(BatchSampler):
    def _count_steps(self, query: Any, size: int) -> int:  # noqa: ARG002
        return max(1, size // self._batch_size)


class LongPassOfData(BatchSampler):
    def _count_steps(self, query: Any, size: int) -> int:
        return max(super()._count_steps(query, size), size // self._batch_size)


class OrderForgotten(BatchSampler):
    """A new order in every step, of which the batch of the step is taken."""

    def _read_slots(self, run: int, agent: int, number: int) -> IntArray:
        self._passes.clear()
        order = self._choices[run].draw_order(agent, 1000 + number, size=self._sizes[agent])
        own = np.full(self._batch_size, -1)
        own[: len(order)] = order[: self._batch_size]
        return own


class FaultyCoins:
    """Coins that steps or samples share."""

    def __init__(self, inner: Choices, *, coins_per: int = 1, one_coin: bool = False) -> None:
        self._inner, self._per, self._one = inner, coins_per, one_coin

    def draw_coins(self, number: int, sizes: Sequence[int]) -> FloatArray:
        coins = self._inner.draw_coins(number // self._per, sizes)
        return np.full_like(coins, coins[0]) if self._one else coins

    def draw_order(self, agent: int, number: int, *, size: int) -> IntArray:
        return self._inner.draw_order(agent, number, size=size)

    def draw_positions(self, agent: int, number: int, *, size: int) -> IntArray:
        return self._inner.draw_positions(agent, number, size=size)


def check(sampling: str) -> str:
    return " ".join(check_sampler(query_of(sample_plan(sampling), 0), seed=0, alpha=1e-3))


@pytest.mark.parametrize(
    ("sampling", "sampler", "problem"),
    [
        ("poisson", CompactSampler, "the shape of a batch depends on the data"),
        ("passes", CompactSampler, "the shape of a batch depends on the data"),
        ("every-step", CompactSampler, "the shape of a batch depends on the data"),
        ("poisson", WidthOfData, "the shape of a batch depends on the data"),
        ("poisson", SamplesFirst, "not at random positions"),
        ("poisson", RateOfData, "another probability than the plan's"),
        ("passes", PassOfData, "a sample is in 4 batches of one pass of 4"),
        ("passes", LongPassOfData, "a sample is in 2 batches of one pass of 4"),
        ("every-step", LongPassOfData, "the orders of two passes are not independent"),
        ("passes", OrderForgotten, "batches of one pass of 4"),
    ],
)
def test_samplers_that_do_not_follow_the_plan_alone(
    sampling: str, sampler: type[BatchSampler], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(sampling) == ""
    plant_sampler(monkeypatch, sampler)
    assert problem in check(sampling)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"coins_per": 2}, "the coins of steps 1 and 0 are not independent"),
        ({"one_coin": True}, "two samples share a coin"),
        ({}, ""),
    ],
)
def test_coins_that_are_used_twice(
    fault: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choices(seed: int, trial: int) -> FaultyCoins:
        return FaultyCoins(make_choices(seed, trial), **fault)

    monkeypatch.setattr("corn.audit.checks.make_choices", choices)
    found = check("poisson")
    assert problem in found if problem else found == ""
    monkeypatch.setattr("corn.audit.checks.make_choices", lambda seed, _: make_choices(seed, 0))
    assert "two runs use the same coins" in check("poisson")


def test_the_audit_reports_faults_of_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_sampler(monkeypatch, CompactSampler)
    report = audit(STEP, sample_plan())
    assert report.violated
    assert "the shape of a batch depends on the data" in " ".join(report.problems)


def test_the_audited_sampler_is_the_one_that_agents_and_releases_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Audits, agents, secure training and secure loops all take it from one constructor."""
    made: list[Any] = []
    usual = BatchSampler.of_agent

    def spy(*args: Any, **rest: Any) -> BatchSampler:
        made.append(args[0])
        return usual(*args, **rest)

    monkeypatch.setattr(BatchSampler, "of_agent", spy)
    plan = sample_plan()
    check("poisson")
    assert made
    made.clear()
    inputs = torch.randn(128, 3, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    task, queries = LinearClassifier(3, 2), [plan.budget.query]
    own = TrainingProblem(task, AgentData(inputs[:32], data.tensors[1][:32], (0, 32)))
    ledger: Any = SimpleNamespace(make_choices=lambda _: make_choices(0, 0), reserve=lambda k: k)
    prepare_work(plan, 0, RunSettings(), own, ledger)
    assert made == queries
    parts = torch.utils.data.random_split(data, [32] * 4)
    train(plan, model=task, datasets=parts, secure=True)
    assert made == queries * 5
    module = torch.nn.Linear(3, 2)
    loader = [DataLoader(part, batch_size=8) for part in parts]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    summed = sample_plan(mixing="sum")
    for seed in (0, None):
        source = LoopData.of_agents(loader, list("0123"), seed=seed)
        simulate(summed, source, module=module, optimizer=optimizer, seed=seed)
    assert made == queries * 13


def draw_public_coins(_: SecretChoices, number: int, sizes: Sequence[int]) -> FloatArray:
    return SeededChoices(0).draw_coins(number, sizes)


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        ("corn.noise.choices.SecretChoices.draw_coins", draw_public_coins),
        (COINS, lambda _, trial: SeededChoices(trial)),
        (COINS, lambda seed, _: SeededChoices(seed)),
    ],
    ids=["constant", "trial", "seed"],
)
def test_coins_that_do_not_follow_from_a_secret(
    where: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not predicts_coins(5)
    monkeypatch.setattr(where, fault)
    assert predicts_coins(5)


@pytest.mark.slow
def test_who_predicts_coins_measures_more_than_was_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The noise is left, without amplification by sampling."""
    plan = sample_plan(adjacency="replace", epsilon=2.0, samples=128)
    settings = {"through": "step", "num_trials": 1000, "num_releases": 24}
    monkeypatch.setattr(COINS, lambda _, trial: SeededChoices(trial))
    report = audit(settings, plan)
    assert any("coins of Poisson sampling are predictable" in one for one in report.problems)
    (found,) = report.findings
    assert found.verdict == "violated"
    assert found.certified_epsilon > found.promise.epsilon


def test_a_leaked_pair_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent 2 can subtract noise that the plan hides from it."""
    plan = agent_plan()
    pair = next(k for k, group in enumerate(plan.decomposition.seed_groups) if 2 not in group)
    owner = Owner(plan.decomposition.seed_groups[pair], pair)

    def keys(plan: Plan, seed: int) -> Any:
        own = derive_keys(plan, seed)
        own[2][owner] = own[owner.members[0]][owner]
        return own

    monkeypatch.setattr("corn.audit.run.derive_keys", keys)
    report = audit_plan(plan, victims=owner.members[:1], view=View((2,)), **SHARES)
    assert report.violated


def round_gradient(
    model: Tensor, gradient: Tensor, factor: Tensor, noise: Tensor, *, grid: float, step_size: float
) -> Tensor:
    rounded = torch.round(gradient * factor / grid) * grid
    return (model - step_size * (rounded + noise)).float()


def release_off_grid(
    model: Tensor, gradient: Tensor, factor: Tensor, noise: Tensor, *, step_size: float, **_: Any
) -> Tensor:
    return (model - step_size * (gradient * factor + noise)).float()


def release_float32(
    model: Tensor, gradient: Tensor, factor: Tensor, noise: Tensor, *, step_size: float, **_: Any
) -> Tensor:
    """Release a plain sum in float32 with NumPy's normals, as most programs do."""
    state = noise.numpy().ravel()[:1].view(np.uint64)
    generator = np.random.Generator(np.random.SFC64(state))
    weight = np.float32(np.sqrt(agent_plan().decomposition.private_variance[0]))
    normals = generator.standard_normal(noise.shape, dtype=np.float32) * weight
    clipped = (gradient * factor).float()
    return model - step_size * (clipped + torch.from_numpy(normals))


@pytest.mark.parametrize("send", [round_gradient, release_off_grid, release_float32])
def test_releases_off_the_grid(send: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that is added after rounding, or to a gradient that is not rounded at all."""
    monkeypatch.setattr(HALF_STEP, send)
    assert any("are not those of its gradient, noise" in one for one in audit(STEP).problems)


# Faults of a user's own loop. Each is refused by one check. Without that check, one sample moves
# what the agent sends by more than the accounting assumes, though noise and batch are the same.

Fault: TypeAlias = Callable[[PrivateTraining, Tensor, Tensor], None]


def take_step(private: PrivateTraining, inputs: Tensor, targets: Tensor) -> None:
    losses = cross_entropy(private.module(inputs), targets, reduction="none")
    private.optimizer.mean(losses).backward()  # type: ignore[no-untyped-call]
    private.optimizer.step()


def weigh_classes_in_a_mean(private: PrivateTraining, inputs: Tensor, targets: Tensor) -> None:
    weight = torch.tensor([0.01, 1.0, 100.0])
    mean = cross_entropy(private.module(inputs), targets, weight=weight)
    private.optimizer.mean(mean.expand(len(inputs))).backward()  # type: ignore[no-untyped-call]
    private.optimizer.step()


@torch.no_grad()
def initialise_by_data(private: PrivateTraining, inputs: Tensor, _: Tensor) -> None:
    private.module.bias.copy_(inputs.mean(dim=0))  # type: ignore[operator]


def write_parameters(private: PrivateTraining, inputs: Tensor, targets: Tensor) -> None:
    losses = cross_entropy(private.module(inputs), targets, reduction="none")
    private.optimizer.mean(losses).backward()  # type: ignore[no-untyped-call]
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
    """Return the model after the first step if each agent has this sample among eight."""
    plan, sent = sample_plan("every-step", "replace", num_steps=4, mixing="sum"), []
    usual = PrivateOptimizer.take_step

    def record(self: PrivateOptimizer, released: Tensor) -> Tensor:
        sent.append(usual(self, released))
        return sent[-1]

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, 3, generator=generator) / 10
    inputs[0] = sample
    data = TensorDataset(inputs, torch.tensor([label, 1, 1, 1, 1, 1, 1, 1]))
    model = nn.Linear(3, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    with monkeypatch.context() as patch:
        patch.setattr(PrivateOptimizer, "take_step", record)
        # All agents have the sample, so that their average moves as one agent's gradient.
        loader = [
            DataLoader(TensorDataset(*data.tensors), batch_size=8, collate_fn=collate)
            for _ in range(4)
        ]
        private = simulate(
            plan,
            LoopData.of_agents(loader, list("0123"), seed=0),
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
            seed=0,
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
    (write_momentum, None, PrivateOptimizer, "_require_same_rule"),
    (set_rate_by_data, None, PrivateOptimizer, "_require_same_rule"),
    (take_step, normalise_batch, LoopData, "check"),
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
