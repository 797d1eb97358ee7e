"""Simulations with exact sums: one model for all agents, and a trusted server's noise."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import corn
from corn import PrivacyBudget, load_network
from corn.covariance import Decomposition
from corn.errors import CornError
from corn.learn.metrics import Result
from corn.learn.perturbation import JointNoise, NoiseShare
from corn.learn.step import AgentStepper, average_integers, release_integers
from corn.learn.tasks import Gradients
from corn.noise import SecureSource, draw_share, simulated_keys
from corn.noise.masks import (
    WORDS,
    MaskBits,
    draw_offset,
    make_message,
    read_average,
    read_total,
)
from corn.plan import make_plan
from corn.topology import Mixing
from tests.oracles.message_parts import draw_mask, mask_release

BUDGET = PrivacyBudget(5, 1e-5, num_steps=6, clip=0.1)


def make_data(num_agents: int = 5) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((20, 3)).astype(np.float32), rng.integers(0, 2, 20))
        for _ in range(num_agents)
    ]


def train(mixing: Mixing, budget: PrivacyBudget | None = None, *, secure: bool = False) -> Result:
    torch.manual_seed(0)
    return corn.train(
        load_network("ring:5", mixing=mixing),
        budget,
        model=nn.Linear(3, 2),
        loss=nn.functional.cross_entropy,
        datasets=make_data(),
        step_size=0.5,
        num_steps=6,
        momentum=0.0,
        secure=secure,
    )


def test_all_agents_hold_one_model() -> None:
    result = train("sum", BUDGET)
    assert result.parameters.shape == (1, 5, 8)
    assert (result.parameters == result.parameters[:, :1]).all()


def test_without_noise_it_is_gradient_descent_on_the_average() -> None:
    found = train("sum").parameters[0, 0].double()
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    inputs, targets = (np.concatenate(part) for part in zip(*make_data(), strict=True))
    for _ in range(6):
        loss = nn.functional.cross_entropy(
            model(torch.from_numpy(inputs)), torch.from_numpy(targets)
        )
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, slope in zip(model.parameters(), slopes, strict=True):
                parameter.sub_(slope, alpha=0.5)
    expected = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
    # Agents have equally many samples, so the average of their gradients is that of all samples.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_noise_of_averages_has_its_standard_deviation_and_common_normals() -> None:
    noises = [Decomposition(np.array([std**2])) for std in (1.0, 3.0)]
    noise = JointNoise(
        noises, seeds=(0, 1), num_parameters=20_000, dtype=torch.float64, is_average=True
    )
    drawn = noise.draw(0)
    assert drawn.shape == (2, 1, 2, 20_000)
    assert float(drawn[0, 0, 0].std()) == pytest.approx(1, rel=0.03)
    torch.testing.assert_close(3 * drawn[:, :, 0], drawn[:, :, 1])
    assert not torch.equal(drawn, noise.draw(1))


@pytest.mark.parametrize("real", [np.float32, np.float64])
@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("size", [1, 1024, 5000, 150_000])
@pytest.mark.parametrize("is_masked", [True, False], ids=["masks", "Gaussian pairs"])
def test_messages_in_parts_have_the_bits_of_their_single_parts(
    real: type[np.floating[Any]], bits: MaskBits, size: int, *, is_masked: bool
) -> None:
    rng, n = np.random.default_rng(1), 4
    groups = ((0, 1), (1, 2), (2, 3), (0, 3), (0, 1, 2))
    factors = () if is_masked else tuple(rng.standard_normal((len(own), 2)) for own in groups)
    noise = Decomposition(np.full(n, 90.0), groups, factors, is_masked=is_masked)
    source, nonce, factor, grid = SecureSource(simulated_keys(noise, seed=0)), bytes(32), 0.37, 0.5
    at: dict[str, Any] = {"source": source, "nonce": nonce, "step": 3}
    offset = draw_offset(nonce, 3, size) if is_masked else np.zeros(size)
    total = np.zeros(size, WORDS[bits])
    for agent in range(n):
        gradient = rng.standard_normal(size).astype(real)
        place: dict[str, Any] = {"offset": (nonce, 3), "grid": grid, "bits": bits}
        found = make_message(gradient, factor, noise=noise, agent=agent, **at, **place)
        noisy = gradient.astype(np.float64) * factor
        noisy += draw_share(noise, agent, **at, stop=size)
        mask = np.zeros(size, WORDS[bits])
        if is_masked:
            mask = draw_mask(noise, agent, **at, size=size, bits=bits)
        expected = mask_release(noisy, grid=grid, offset=offset, mask=mask)
        np.testing.assert_array_equal(found, expected)
        total += found
    given: dict[str, Any] = {"num_agents": n, "grid": grid}
    origin = (nonce, 3) if is_masked else None
    average = read_total(total, offset=origin, dtype=real, **given)
    assert average.dtype == real
    np.testing.assert_array_equal(average, read_average(total, offset=offset, **given).astype(real))


@pytest.mark.parametrize("mixing", ["sum", "gossip"])
def test_a_second_gradient_of_a_step_is_not_released(mixing: Mixing) -> None:
    plan = make_plan(load_network("ring:4", mixing=mixing), BUDGET)
    source = SecureSource(simulated_keys(plan.decomposition, seed=0))
    share = NoiseShare(plan, 0, source, nonce=bytes(32), num_parameters=3)
    stepper = AgentStepper(BUDGET.query, lambda step: step)

    def release(value: float) -> None:
        stepper.clip(Gradients(torch.full((1, 1, 3), value)))
        if mixing == "sum":
            stepper.release_masked()
        else:
            stepper.release_half_step(step_size=0.1)

    for step in range(2):
        stepper.begin(step, share, torch.zeros(3))
        release(0.1)
        with pytest.raises(CornError, match="once"):
            release(0.2)


def test_averages_have_the_bits_of_masked_messages() -> None:
    """Masks that add up to zero leave the sum of agents' messages, which a simulation forms."""
    rng, n, d, grid = np.random.default_rng(0), 7, 200, 2.0**-5
    gradients, noise = rng.standard_normal((2, n, d))
    masks = rng.integers(0, 2**16, (n, d)).astype(np.uint16)
    masks[-1] = -masks[:-1].sum(axis=0, dtype=np.uint16)
    offset = draw_offset(bytes(32), 0, d)
    total = np.zeros(d, np.uint16)
    for g, v, mask in zip(gradients, noise, masks, strict=True):
        total += mask_release(g + v, grid=grid, offset=offset, mask=mask)
    grids, o = torch.tensor([grid]).double(), torch.from_numpy(offset)
    one = torch.ones(1, dtype=torch.float64)
    integers = release_integers(torch.from_numpy(gradients), one, torch.from_numpy(noise), grids, o)
    found = average_integers(integers.sum(dim=0), n, grids, o).numpy()
    expected = read_average(total, num_agents=n, grid=grid, offset=offset)
    np.testing.assert_array_equal(found, expected)
