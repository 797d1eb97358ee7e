"""Passes over the data: participations, phases, and the exact composition of small cases."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from corn.errors import InvalidArgumentError
from corn.privacy import ClippedQuery, PrivacyBudget, Sampling, account, account_precision, gaussian


def passes(steps_per_pass: int, batch_size: int = 1) -> ClippedQuery:
    kind: dict[str, Any] = {"unit": "sample", "sampling": "passes"}
    return ClippedQuery(1.0, batch_size=batch_size, steps_per_pass=steps_per_pass, **kind)


@given(length=st.integers(1, 30), steps=st.integers(1, 200))
def test_participations_are_the_passes_begun(length: int, steps: int) -> None:
    assert passes(length).participations(steps) == len({step // length for step in range(steps)})


@given(length=st.integers(1, 9), steps=st.integers(1, 60), cut=st.integers(1, 59))
def test_mu_counts_the_passes_begun(length: int, steps: int, cut: int) -> None:
    whole = account_precision([0.7], passes(length), num_steps=steps + cut)
    begun = len({step // length for step in range(steps + cut)})
    assert whole.mu[0] == pytest.approx(2 * math.sqrt(0.7 * begun), rel=1e-12)
    # A run that stops early has spent no more.
    assert account_precision([0.7], passes(length), num_steps=steps).mu[0] <= whole.mu[0]


def exact_delta(
    epsilon: float, *, num_samples: int, num_steps: int, std: float, reveals_order: bool
) -> float:
    """Return the largest δ(ε) of a sample that moves its step by ±1, one sample per step.

    All orders of all passes are listed. With the order revealed, the outputs of one order are
    Gaussians at distance 2√(participations); hidden, they are mixtures, integrated on a grid.
    """
    orders = list(itertools.permutations(range(num_samples)))
    num_passes = -(-num_steps // num_samples)
    shifts = []
    for chosen in itertools.product(orders, repeat=num_passes):
        line = [sample for order in chosen for sample in order][:num_steps]
        shifts.append([1.0 if sample == 0 else 0.0 for sample in line])
    if reveals_order:
        distances = [2 * math.sqrt(sum(shift)) / std for shift in shifts]
        return float(np.mean([gaussian.delta_from(mu, epsilon) for mu in distances]))
    axis = np.linspace(-6 * std - 1, 6 * std + 1, 101)
    grid = np.meshgrid(*[axis] * num_steps, indexing="ij")

    def density(sign: float) -> Any:
        parts = [
            math.prod(norm.pdf(x, sign * move, std) for x, move in zip(grid, shift, strict=True))
            for shift in shifts
        ]
        return np.mean(np.stack(parts), axis=0)

    cell = (axis[1] - axis[0]) ** num_steps
    gain = density(1.0) - math.exp(epsilon) * density(-1.0)
    return float(np.maximum(gain, 0).sum() * cell)


@pytest.mark.parametrize(("num_samples", "num_steps"), [(1, 2), (2, 2), (2, 4), (3, 3)])
@pytest.mark.parametrize("epsilon", [0.3, 1.5])
def test_whole_passes_are_the_exact_composition_given_the_order(
    num_samples: int, num_steps: int, epsilon: float
) -> None:
    """In whole passes every order uses the sample once per pass, so the count is attained."""
    std = 1.7
    loss = account([[std**2]], passes(num_samples), num_steps=num_steps)
    exact = exact_delta(
        epsilon, num_samples=num_samples, num_steps=num_steps, std=std, reveals_order=True
    )
    assert loss.delta(epsilon).max() == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(("num_samples", "num_steps"), [(2, 1), (2, 2), (2, 3), (3, 2)])
def test_passes_bound_what_an_observer_without_the_order_learns(
    num_samples: int, num_steps: int
) -> None:
    std, epsilon = 1.7, 0.3
    size: dict[str, Any] = {"num_samples": num_samples, "num_steps": num_steps, "std": std}
    hidden = exact_delta(epsilon, **size, reveals_order=False)
    revealed = exact_delta(epsilon, **size, reveals_order=True)
    counted = account([[std**2]], passes(num_samples), num_steps=num_steps).delta(epsilon).max()
    assert hidden * (1 - 1e-3) <= revealed <= counted * (1 + 1e-12)
    # Counting a pass less would promise too much for whole passes.
    if num_steps == num_samples:
        fewer = account([[std**2]], passes(num_steps + 1), num_steps=num_steps)
        assert fewer.delta(epsilon).max() == pytest.approx(revealed, rel=1e-12)


def budget(sampling: Sampling, **change: Any) -> PrivacyBudget:
    values: dict[str, Any] = {"batch_size": 128, "samples_per_agent": 2800, **change}
    return PrivacyBudget(1, 1e-5, 1000, 1, unit="sample", sampling=sampling, **values)


def test_every_step_needs_461_times_the_noise_variance_of_poisson_sampling() -> None:
    rate = 128 / 2800
    zero_out = [budget(kind, adjacency="add-remove") for kind in ("poisson", "every-step")]
    assert zero_out[0].query.sampling_rate == rate
    ratio = zero_out[0].precision_cap / zero_out[1].precision_cap
    assert ratio == pytest.approx(461, abs=1)
    # If samples are replaced, one step's loss is nearly that of a shift of p times the size, so the
    # ratio is nearly 1/p².
    sampled, worst = (budget(kind) for kind in ("poisson", "every-step"))
    assert sampled.precision_cap / worst.precision_cap == pytest.approx(rate**-2, rel=1e-3)


def test_caps_of_fixed_batches_have_a_closed_form() -> None:
    mu, sensitivity = gaussian.mu_from(1, 1e-5), 2 / 128
    worst = mu**2 / sensitivity**2 / 1000
    assert budget("every-step").precision_cap == pytest.approx(worst, rel=1e-14)
    # ⌊2800/128⌋ = 21 batches per pass, ⌈1000/21⌉ = 48 passes begun.
    in_passes = budget("passes")
    assert in_passes.query.steps_per_pass == 21
    assert in_passes.precision_cap == pytest.approx(worst * 1000 / 48, rel=1e-14)
    sizes = (2800, 300, 100)
    caps = budget("passes", samples_per_agent=sizes).precision_caps(3)
    np.testing.assert_allclose(caps, worst * 1000 / np.array([48, 500, 1000]), rtol=1e-14)


@pytest.mark.parametrize("sampling", ["poisson", "passes"])
@given(size=st.integers(1, 300), samples=st.integers(1, 10**5))
def test_an_agent_with_the_planned_samples_has_enough(
    sampling: Sampling, size: int, samples: int
) -> None:
    query = budget(sampling, batch_size=size, samples_per_agent=samples).query
    least = budget(sampling, batch_size=size, samples_per_agent=query.least_samples).query
    assert query.least_samples <= samples
    assert (least.sampling_rate or 0) <= (query.sampling_rate or 0)
    assert (least.steps_per_pass or 0) >= (query.steps_per_pass or 0)
    if query.least_samples > 1:
        # With one sample less than the least, its sampling would not be what was counted.
        fewer = budget(sampling, batch_size=size, samples_per_agent=query.least_samples - 1).query
        assert (fewer.sampling_rate or 0) > (query.sampling_rate or 0) or (
            fewer.steps_per_pass or 0
        ) < (query.steps_per_pass or 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": "passes"}, "steps_per_pass must be given for .*'passes', found None"),
        ({}, "sampling_rate must be given for .*'poisson', found None"),
        ({"sampling": "every-step", "steps_per_pass": 3}, "steps_per_pass must be None"),
        ({"sampling": "passes", "steps_per_pass": 0}, "steps_per_pass must be an integer"),
        ({"sampling_rate": 0.1, "steps_per_pass": 3}, "steps_per_pass must be None"),
        ({"unit": "agent", "batch_size": None, "steps_per_pass": 3}, "steps_per_pass must be None"),
    ],
)
def test_queries_refuse_numbers_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"unit": "sample", "batch_size": 8, **change}
    with pytest.raises(InvalidArgumentError, match=message):
        ClippedQuery(1.0, **values)
