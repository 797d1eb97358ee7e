"""A message depends on data only through the rounded sum of clipped gradient and noise."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from corn.distributed.recovery import ActivePlan
from corn.distributed.rounds import TrainingRounds
from corn.distributed.settings import RunSettings
from corn.learn.schedule import Constant
from corn.learn.sweep import Interruption
from tests.oracles.deployed_release import take_half_step

from .harness import small_plan
from .threads import make_membership

D, CLIP, STEP_SIZE = 2000, 0.1, 1e-4


GRID = 2.0**-7


def send(
    gradient: torch.Tensor, noise: torch.Tensor, model: torch.Tensor, *, grid: float = GRID
) -> torch.Tensor:
    return take_half_step(gradient, noise, model, clip=CLIP, grid=grid, step_size=STEP_SIZE)[0]


def test_gradient_and_noise_are_summed_and_rounded_before_the_model_is_added() -> None:
    """The step is far below the last place of the model's numbers."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(D, generator=generator, dtype=torch.float64)
    model = torch.full((D,), 1.5)
    # Just above half a last place: rounded by itself each coordinate would move by a whole one.
    gradient = torch.full((D,), 0.505 * float(np.spacing(np.float32(1.5))) / STEP_SIZE)
    assert gradient.norm() < CLIP
    released = GRID * np.rint((gradient.double().numpy() + noise.numpy()) / GRID)
    expected = torch.sub(model, torch.from_numpy(released).float(), alpha=STEP_SIZE)
    assert torch.equal(send(gradient, noise, model), expected)


def test_a_message_shows_multiples_of_the_grid_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(200_000, generator=generator, dtype=torch.float64)
    gradient = torch.randn(200_000, generator=generator)
    message = send(gradient, noise, torch.zeros(200_000, dtype=torch.float64))
    multiples = message.numpy() / -STEP_SIZE / GRID
    np.testing.assert_allclose(multiples, np.rint(multiples), rtol=1e-12)


def test_gradients_are_clipped_to_at_most_the_norm() -> None:
    gradient = torch.linspace(-3, 5, D)
    silence = torch.zeros(D, dtype=torch.float64)
    found = -send(gradient, silence, silence, grid=2.0**-50) / STEP_SIZE
    torch.testing.assert_close(
        found, gradient.double() * CLIP / gradient.norm(), rtol=1e-6, atol=1e-9
    )
    assert CLIP * (1 - 1e-9) < float(found.norm()) <= CLIP


def test_a_step_with_momentum_has_the_precision_of_the_model() -> None:
    """0.1 in float32 differs from 0.1 in float64 by 1.5e-8."""
    gradient, model = torch.full((4,), 0.01), torch.zeros(4, dtype=torch.float64)
    options: Any = {"clip": CLIP, "grid": GRID, "momentum": 0.5, "num_parameters": 4}
    sent, _ = take_half_step(gradient, torch.ones_like(model), model, step_size=0.1, **options)
    expected = -0.1 * 0.5 * GRID * torch.round((model + 1.01) / GRID)
    torch.testing.assert_close(sent, expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_is_sent_as_zero(value: float) -> None:
    """An error would reveal information about the data."""
    noise = torch.randn(D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    model, broken = torch.zeros(D), torch.ones(D)
    broken[7] = value
    sent, stepper = take_half_step(broken, noise, model, clip=CLIP, grid=GRID, step_size=STEP_SIZE)
    assert torch.equal(sent, send(torch.zeros(D), noise, model))
    assert stepper.num_broken == 1


class Silence:
    """Stands for everything that only records, or never happens here."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


def test_a_cool_down_gives_news_at_every_step() -> None:
    """A long one would otherwise look like a stall to ``/healthz`` and ``corn status``."""
    news: list[bool] = []
    plan = small_plan("ring:4", 60)
    run = SimpleNamespace(
        agent=0,
        plan=plan,
        settings=RunSettings(Constant(0.1)),
        activate=lambda plan, members: ActivePlan(plan, members, Silence()),  # type: ignore[arg-type]
        stepper=SimpleNamespace(num_broken=0),
        exchange=SimpleNamespace(
            neighbours=(),
            membership=make_membership(plan.network.graph, 0),
            start=lambda *_: None,
            finish=lambda _: {},
        ),
        returns=Silence(),
        first_step=0,
        last_step=0,
        admission=None,
    )
    journal = SimpleNamespace(report_if_due=lambda: news.append(True), note=lambda _: None)
    rounds = TrainingRounds(run, journal, torch.zeros(3))  # type: ignore[arg-type]
    assert list(rounds.run(Interruption())) == []
    assert len(news) == plan.cooldown_steps > 0
