"""Messages of exact mixing: masks cancel, single messages are uniform, sums have the right law."""

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import mpmath
import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from corn import PrivacyBudget
from corn.checks import FloatArray
from corn.covariance.decomposition import Decomposition
from corn.covariance.design import design_masks
from corn.covariance.threat import SeedGroups
from corn.errors import InvalidArgumentError
from corn.noise import Owner, Secret, SecureSource
from corn.noise.masks import (
    MaskBits,
    MaskWords,
    bound_offset_loss,
    bound_sum,
    choose_bits,
    draw_offset,
    is_possible,
    make_message,
    read_average,
)

NONCE = bytes(range(32))


def make_source(noise: Decomposition, salt: int = 0) -> SecureSource:
    owners = [Owner((agent,)) for agent in range(noise.num_agents)]
    owners += [Owner(group, number) for number, group in enumerate(noise.seed_groups)]
    return SecureSource(
        {owner: Secret(bytes([k % 256, salt]) * 16) for k, owner in enumerate(owners)}
    )


def send(
    noise: Decomposition,
    agent: int,
    gradient: FloatArray,
    *,
    grid: float = 0.0625,
    bits: MaskBits = 16,
    step: int = 0,
) -> MaskWords:
    return make_message(
        gradient,
        1.0,
        noise=noise,
        agent=agent,
        source=make_source(noise),
        nonce=NONCE,
        step=step,
        offset=(NONCE, step),
        grid=grid,
        bits=bits,
    )


def draw_all(
    noise: Decomposition, *, size: int, bits: MaskBits = 16, step: int = 0
) -> list[MaskWords]:
    """Return all agents' masks: messages without gradient, noise and offset."""
    silent = replace(noise, private_variance=np.zeros(noise.num_agents))
    offset = np.rint(draw_offset(NONCE, step, size)).astype(np.uint16)
    agents = range(noise.num_agents)
    return [send(silent, agent, np.zeros(size), bits=bits, step=step) - offset for agent in agents]


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize(
    "groups",
    [((0, 1), (1, 2), (2, 3), (0, 3)), ((0, 1, 2, 3),), ((0, 1, 2), (1, 2, 3), (0, 3))],
    ids=["pairs", "one group", "groups"],
)
def test_masks_cancel_to_the_last_bit(bits: MaskBits, groups: SeedGroups) -> None:
    noise = Decomposition(np.ones(4), groups, is_masked=True)
    drawn = draw_all(noise, size=1000, bits=bits)
    assert not sum(drawn[1:], start=drawn[0]).any()
    # No part of the agents cancels.
    assert (drawn[0] + drawn[1]).any()


def test_every_step_has_masks_of_its_own() -> None:
    noise = Decomposition(np.ones(2), ((0, 1),), is_masked=True)
    first, second = (draw_all(noise, size=1000, step=step)[0] for step in (0, 1))
    assert (first == second).mean() < 0.01


def test_messages_and_incomplete_sums_are_uniform_and_independent() -> None:
    n, size = 4, 1 << 18
    noise = design_masks(np.ones(n), tuple(combinations(range(n), 2)), 1)
    # A gradient far larger than the noise: it must not show.
    messages = [send(noise, agent, np.full(size, 40.0)) for agent in range(n)]
    for chosen in [(0,), (1,), (0, 1), (0, 2), (0, 1, 2)]:
        total = sum((messages[k] for k in chosen[1:]), start=messages[chosen[0]])
        counts = np.bincount(total >> 8, minlength=256)
        assert scipy.stats.chisquare(counts).pvalue > 1e-6
    # Pairs of single messages: independent in their high bits.
    table = np.zeros((16, 16))
    np.add.at(table, (messages[0] >> 12, messages[1] >> 12), 1)
    assert scipy.stats.chisquare(table.ravel()).pvalue > 1e-6


def test_the_average_has_the_noise_that_was_designed() -> None:
    n, q, size = 20, 1, 1 << 17
    noise = design_masks(np.ones(n), tuple(combinations(range(n), 2)), q)
    grid = 2.0 ** math.floor(math.log2(math.sqrt(noise.private_variance[0]) / 6.5))
    offset = draw_offset(NONCE, 3, size)
    rng = np.random.default_rng(0)
    gradients = 0.01 * rng.standard_normal((n, size))
    total = np.zeros(size, np.uint16)
    for agent in range(n):
        total += send(noise, agent, gradients[agent], grid=grid, step=3)
    average = read_average(total, num_agents=n, grid=grid, offset=offset)
    error = average - gradients.mean(axis=0)
    expected = (n / (n - q) + n * grid**2 / 12) / n**2
    # A sample variance of this size has a relative error of 0.4 %.
    assert error.var() == pytest.approx(expected, rel=0.02)
    assert abs(error.mean()) < 5 * math.sqrt(expected / size)
    normal = scipy.stats.kstest(error / math.sqrt(expected), "norm")
    assert normal.pvalue > 1e-6


@pytest.mark.parametrize("offset", [0.0, 0.25, 0.7182])
@pytest.mark.parametrize("shift", [0.0, 0.31])
def test_sums_on_the_grid_have_the_density_of_a_continuous_sum(offset: float, shift: float) -> None:
    # Two agents with noise of 6.5 grid units each, the first with a gradient of ``shift`` units.
    # On the grid: P[K₁ + K₂ = k] by convolution. Continuous: normal noise plus two uniforms.
    std = 6.5
    points = np.arange(-80, 81)

    def masses(gradient: float) -> np.ndarray:
        edges = points - offset - gradient
        upper, lower = (edges + 0.5) / std, (edges - 0.5) / std
        # By the smaller tail, where differences of the distribution function would cancel.
        sign = np.where(lower > 0, -1, 1)
        return abs(scipy.stats.norm.cdf(sign * upper) - scipy.stats.norm.cdf(sign * lower))

    on_grid = np.convolve(masses(shift), masses(0.0))
    for k in range(-60, 61, 7):
        w = k - 2 * offset - shift

        def density(t: float, w: float = w) -> float:
            triangle = 1 - abs(t)  # the sum of two uniforms in [−½, ½]
            return triangle * float(scipy.stats.norm.pdf(w - t, scale=std * math.sqrt(2)))

        continuous, _ = scipy.integrate.quad(density, -1, 1, points=[0], epsabs=0, epsrel=1e-13)
        assert on_grid[k + 160] == pytest.approx(continuous, rel=1e-11)


@pytest.mark.parametrize(("num_agents", "bits"), [(1, 1), (2, 3), (3, 3), (4, 6)])
def test_offsets_with_few_bits_are_as_close_to_continuous_ones_as_stated(
    num_agents: int, bits: int
) -> None:
    """The masses of cells and the densities at their centres, with far fewer bits than deployed."""
    std, spacing = 6.5 * math.sqrt(num_agents), math.gcd(num_agents, 2**bits) / 2**bits

    def integrate(x: float, times: int) -> Any:
        """Return the density of a normal and of uniforms, integrated so often, at a point."""
        total = mpmath.mpf(0)
        for k in range(num_agents + 1):
            place = x + num_agents / mpmath.mpf(2) - k
            # Uniforms are differences of integrals.
            before, now = mpmath.npdf(place, 0, std), mpmath.ncdf(place, 0, std)
            for number in range(1, num_agents + times):
                before, now = now, (place * now + std**2 * before) / number
            total += (-1) ** k * mpmath.binomial(num_agents, k) * now
        return total

    worst = mpmath.mpf(0)
    with mpmath.workdps(250):
        for x in np.linspace(-24, 24, 17) * std:
            place = round(x / spacing) * spacing
            mass = integrate(place + spacing / 2, 1) - integrate(place - spacing / 2, 1)
            worst = max(worst, abs(mpmath.log(mass / (spacing * integrate(place, 0)))))
    stated = bound_offset_loss(num_agents, bits)
    assert worst < stated
    # The spacing may be as large as n.
    assert worst > stated / 10 * (spacing * 2**bits / num_agents) ** 2


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_sums_of_releases_are_told_from_masks_that_did_not_cancel(bits: MaskBits) -> None:
    noise = design_masks(np.ones(3), ((0, 1), (1, 2), (0, 2)), 1)
    budget = PrivacyBudget(1, 1e-5, num_steps=10, clip=40.0)
    grid = {16: 2.0**-4, 32: 2.0**-8, 64: 2.0**-24}[bits]
    assert choose_bits(noise, grid, budget) == bits
    largest = bound_sum(noise, grid, budget)
    # The extreme gradients, with either sign.
    extreme = np.where(np.arange(64) % 2, 40.0, -40.0)
    messages = [send(noise, agent, extreme, grid=grid, bits=bits) for agent in range(3)]
    assert is_possible(sum(messages[1:], start=messages[0]), largest)
    assert not is_possible(messages[0] + messages[1], largest)


def test_offsets_are_public_and_differ_between_steps() -> None:
    first, again, other = (draw_offset(NONCE, step, 1000) for step in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).all()
    assert scipy.stats.kstest(first, "uniform").pvalue > 1e-6
    assert first.min() >= 0
    assert first.max() < 1


def test_bits_hold_the_largest_sum() -> None:
    budget = PrivacyBudget(1, 1e-5, num_steps=1000, clip=0.1)
    for n in (2, 20, 1000, 10**5):
        noise = Decomposition(np.full(n, 1 / (n * budget.precision_cap)))
        grid = 2.0 ** math.floor(math.log2(math.sqrt(noise.private_variance[0]) / 6.5))
        bits = choose_bits(noise, grid, budget)
        most = (n * budget.clip + 10 * math.sqrt(noise.total_variance)) / grid
        assert most < 2 ** (bits - 2)
        # The next smaller width would not do, within the margin for noise.
        assert bits == 16 or 2 * most > 2 ** (bits // 2 - 2)
    with pytest.raises(InvalidArgumentError, match="below 2⁶² grid units"):
        choose_bits(Decomposition(np.ones(2)), 1e-25, budget)
