"""Optimizers on the averaged release: those of a trusted server, in sweeps with exact sums."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, RMSprop

import corn
from corn import PrivacyBudget, load_network, make_plan
from corn.covariance import Horizon
from corn.errors import InvalidArgumentError
from corn.learn import Constant, Cosine, Mechanism, SweepSettings, Trial, run_sweep
from corn.learn.metrics import Result
from corn.learn.optimizers import OptimizerFactory, read_learning_rate
from corn.learn.perturbation import KeyedNoise
from corn.learn.problem import make_problem
from corn.learn.schedule import Schedule
from corn.learn.tasks import ModuleTask
from corn.topology import Network

N, STEPS = 5, 6
BUDGET = PrivacyBudget(5, 1e-5, num_steps=STEPS, clip=0.1)
SUM = load_network(f"ring:{N}", mixing="sum")
LOSS = nn.functional.cross_entropy


def make_data() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((20, 3)).astype(np.float32), rng.integers(0, 2, 20)) for _ in range(N)
    ]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def train(network: Network = SUM, budget: PrivacyBudget | None = None, **options: Any) -> Result:
    return corn.train(
        network,
        budget,
        model=make_model(),
        loss=LOSS,
        datasets=make_data(),
        **{"num_steps": STEPS, **options},
    )


def train_centrally(factory: OptimizerFactory, step_sizes: Sequence[float] = ()) -> Tensor:
    """Return the model of plain PyTorch on the data of all agents."""
    model = make_model()
    optimizer = factory(list(model.parameters()))
    inputs, targets = (torch.from_numpy(np.concatenate(p)) for p in zip(*make_data(), strict=True))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = step_sizes[step] if step_sizes else group["lr"]
        optimizer.zero_grad()
        # Agents have equally many samples, so the average of their losses is that of all samples.
        LOSS(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


FACTORIES: list[OptimizerFactory] = [
    lambda own: Adam(own, lr=0.05),
    partial(AdamW, lr=0.05, weight_decay=0.1),
    partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    partial(RMSprop, lr=0.01),
]


@pytest.mark.parametrize("factory", FACTORIES)
def test_without_noise_it_is_plain_torch_on_the_average(factory: OptimizerFactory) -> None:
    found = train(optimizer=factory).parameters[0, 0]
    # Not the tolerance of float32 alone: Adam divides by gradients, which may be near zero.
    torch.testing.assert_close(found, train_centrally(factory), rtol=1e-3, atol=1e-5)


def test_step_sizes_and_schedules_are_the_learning_rate() -> None:
    schedule = Cosine(0.2)
    rates = [schedule.at(step, STEPS) for step in range(1, STEPS + 1)]
    found = train(optimizer=Adam, step_size=Cosine(0.2)).parameters[0, 0]
    torch.testing.assert_close(found, train_centrally(Adam, rates), rtol=1e-3, atol=1e-5)
    default = train(optimizer=partial(Adam, lr=0.2))
    assert default.last_rows[0]["step_size"] == "0.2"
    assert torch.equal(default.parameters, train(optimizer=Adam, step_size=0.2).parameters)


def test_it_replaces_the_momentum_of_a_plan() -> None:
    objective = Horizon(40, momentum=0.9)
    plan = make_plan(SUM, PrivacyBudget(5, 1e-5, num_steps=200, clip=0.1), objective=objective)
    result = corn.train(
        plan, model=make_model(), loss=LOSS, datasets=make_data(), optimizer=Adam, num_steps=2
    )
    assert torch.isfinite(result.parameters).all()
    with pytest.raises(InvalidArgumentError, match="momentum must be 0 with an optimizer"):
        train(optimizer=Adam, momentum=0.9)


@pytest.mark.parametrize("budget", [None, BUDGET])
def test_gossip_is_refused_with_the_reason(budget: PrivacyBudget | None) -> None:
    with pytest.raises(InvalidArgumentError, match=r"exact sums.*mixing='sum'"):
        train(load_network(f"ring:{N}", mixing="gossip"), budget, optimizer=Adam)


WRONG: list[tuple[Callable[..., Any], str]] = [
    (torch.optim.LBFGS, "found LBFGS"),
    (lambda _: Adam([nn.Parameter(torch.zeros(2))]), "with other parameters"),
    (lambda own: Adam([*own, nn.Parameter(torch.zeros(2))]), "with other parameters"),
]


@pytest.mark.parametrize(("factory", "message"), WRONG)
def test_what_is_no_optimizer_of_the_model_is_refused(factory: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        train(optimizer=factory)


def run(factory: OptimizerFactory | None, schedules: Sequence[Schedule], **options: Any) -> Result:
    task = ModuleTask(make_model(), LOSS)
    designed = corn.design(SUM, BUDGET)
    methods = (
        Mechanism.private("corn", designed, BUDGET),
        Mechanism.central(BUDGET, N),
    )
    trials = [Trial(method, own) for method in methods for own in schedules]
    settings = SweepSettings(STEPS, 8, (0, 1), optimizer=factory, **options.pop("settings", {}))
    return run_sweep(make_problem(task, make_data(), N), SUM, trials, settings=settings, **options)


def test_runs_of_a_sweep_do_not_share_state() -> None:
    """Each run has the model that it has alone, whatever runs beside it."""
    together = run(Adam, [Constant(0.1), Constant(1e30), Constant(0.01)])
    alone = run(Adam, [Constant(0.01)])
    # Seeds first, then the trials of a method: the third of three, and the only one.
    for place, expected in zip((2, 5, 8, 11), alone.parameters, strict=True):
        torch.testing.assert_close(together.parameters[place], expected, rtol=1e-5, atol=1e-7)


def test_a_stopped_run_stays_stopped_beside_others() -> None:
    result = run(Adam, [Constant(0.1), Constant(1e30)], evaluate_at=[0, 2, STEPS])
    assert {seed for _, _, seed in result.stopped} == {0, 1}
    assert torch.isfinite(result.parameters[::2]).all()
    assert result.parameters[1::2].isnan().all()


def test_the_learning_rate_of_an_optimizer_is_the_first_guess() -> None:
    assert read_learning_rate(partial(Adam, lr=0.5)) == 0.5


@pytest.mark.parametrize("factory", [None, partial(Adam, lr=0.01)])
@pytest.mark.parametrize("secure", [False, True])
def test_models_depend_on_the_sum_of_releases_alone(
    factory: OptimizerFactory | None, secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single releases have too little noise, so not even a last bit may depend on them."""
    plan = make_plan(SUM, BUDGET)
    task, draw = ModuleTask(make_model(), LOSS), KeyedNoise.draw
    drawn: list[Tensor] = []

    def find_model(shift: float) -> Tensor:
        count = 0

        def shifted(noise: KeyedNoise, step: int) -> Tensor:
            nonlocal count
            if count == len(drawn):
                drawn.append(draw(noise, step))
            own = drawn[count].clone()
            count += 1
            # Whole units of the grid, from one agent to another: the sum stays.
            own[:, 0] += shift * plan.grid
            own[:, 3] -= shift * plan.grid
            return own

        monkeypatch.setattr(KeyedNoise, "draw", shifted)
        offset = torch.linspace(0, 0.9, task.num_parameters, dtype=torch.float64)
        monkeypatch.setattr(KeyedNoise, "draw_offset", lambda *_: offset.view(1, 1, -1))
        result = run_sweep(
            make_problem(task, make_data(), N),
            SUM,
            [Trial(Mechanism.from_plan(plan), Constant(0.1))],
            settings=SweepSettings(
                STEPS, None, noise_keys="secret" if secure else "seed", optimizer=factory
            ),
        )
        return result.parameters[0, 0]

    expected = find_model(0)
    for shift in (1, 77, 12345):
        assert torch.equal(find_model(shift), expected), shift


def test_masks_are_refused_where_models_would_show_single_releases() -> None:
    noise = corn.design(SUM, BUDGET)
    gossip = corn.load_network(f"ring:{N}", mixing="gossip")
    with pytest.raises(InvalidArgumentError, match="mixing must be 'sum' for noise with masks"):
        corn.train(gossip, BUDGET, noise, model=make_model(), loss=LOSS, datasets=make_data())
