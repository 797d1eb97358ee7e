"""The budget record: units, caps, round trips, words and every refusal."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corn.errors import CornError, CornWarning, InvalidArgumentError
from corn.privacy import (
    Accounting,
    ClippedQuery,
    PrivacyBudget,
    Sampling,
    Unit,
    account_precision,
    gaussian,
)

BASE: dict[str, Any] = {"epsilon": 10, "delta": 1e-5, "num_steps": 5000, "clip": 0.1}
SAMPLE: dict[str, Any] = {**BASE, "unit": "sample", "batch_size": 64}
EVERY_STEP: dict[str, Any] = {**SAMPLE, "sampling": "every-step"}


@st.composite
def budgets(draw: st.DrawFn, accounting: Accounting = "gdp") -> PrivacyBudget:
    epsilon = 10 ** draw(st.floats(-2, 2))
    delta = 10 ** draw(st.floats(-12, -1))
    if accounting == "paper":  # within its limit, where it does not warn
        epsilon = min(epsilon, -2.3 * math.log(delta))
    unit: Unit = draw(st.sampled_from(["agent", "sample"]))
    sampling: Sampling = draw(st.sampled_from(["passes", "every-step"]))
    in_passes = unit == "sample" and sampling == "passes"
    return PrivacyBudget(
        epsilon=epsilon,
        delta=delta,
        num_steps=draw(st.integers(1, 10**6)),
        clip=10 ** draw(st.floats(-4, 4)),
        unit=unit,
        accounting=accounting,
        adjacency=draw(st.sampled_from(["replace", "add-remove"])),
        batch_size=draw(st.integers(1, 1000)) if unit == "sample" else None,
        sampling=sampling if unit == "sample" else None,
        samples_per_agent=draw(st.integers(1, 10**5)) if in_passes else None,
    )


@pytest.mark.parametrize("accounting", ["gdp", "rdp", "paper"])
@given(data=st.data())
@settings(max_examples=200)
def test_budget_to_cap_to_epsilon_is_close_and_never_above(
    accounting: Accounting, data: st.DataObject
) -> None:
    budget = data.draw(budgets(accounting))
    loss = account_precision([budget.precision_cap], budget.query, num_steps=budget.num_steps)
    epsilon, delta, _ = budget.promise
    spent = loss.worst_epsilon(delta, accounting=accounting)
    assert epsilon * (1 - 1e-8) <= spent <= epsilon
    # The other accountants promise at most what the exact one finds.
    assert loss.worst_epsilon(delta) <= epsilon


@given(budget=budgets(), factor=st.floats(1.01, 3), more=st.integers(2, 5))
def test_cap_rises_with_epsilon_and_delta_and_falls_with_steps_and_clip(
    budget: PrivacyBudget, factor: float, more: int
) -> None:
    cap = budget.precision_cap
    looser = [
        dataclasses.replace(budget, epsilon=budget.promise.epsilon * factor),
        dataclasses.replace(budget, delta=budget.promise.delta * factor),
    ]
    tighter = [
        dataclasses.replace(budget, num_steps=budget.num_steps * more),
        dataclasses.replace(budget, clip=budget.clip * factor),
    ]
    assert all(other.precision_cap > cap for other in looser)
    assert tighter[1].precision_cap < cap
    # More steps within the same pass cost nothing.
    more_passes = budget.query.participations(
        more * budget.num_steps
    ) > budget.query.participations(budget.num_steps)
    assert (tighter[0].precision_cap < cap) == more_passes


@pytest.mark.parametrize(
    ("accounting", "cap"),
    [
        ("gdp", 2.00044562**2 / (0.2**2 * 5000)),
        (
            "rdp",
            (math.sqrt(math.log(1e5) + 10) - math.sqrt(math.log(1e5))) ** 2 / (2 * 5000 * 0.01),
        ),
        ("paper", 10**2 / (16 * 0.01 * 5000 * math.log(1e5))),
    ],
)
def test_caps_match_reference_values(accounting: Accounting, cap: float) -> None:
    assert PrivacyBudget(**BASE, accounting=accounting).precision_cap == pytest.approx(
        cap, rel=1e-8
    )


@pytest.mark.parametrize(
    ("unit", "adjacency", "batch_size", "sensitivity"),
    [
        ("agent", "replace", None, 0.2),
        ("agent", "add-remove", None, 0.1),
        ("sample", "replace", 50, 0.004),
        ("sample", "add-remove", 50, 0.002),
    ],
)
def test_sensitivity_of_every_unit(
    unit: Any, adjacency: Any, batch_size: int | None, sensitivity: float
) -> None:
    budget = PrivacyBudget(
        **BASE, unit=unit, adjacency=adjacency, batch_size=batch_size, sampling="every-step"
    )
    assert budget.query.sensitivity == pytest.approx(sensitivity, rel=1e-15)
    expected = (budget.mu / sensitivity) ** 2 / 5000
    assert budget.precision_cap == pytest.approx(expected, rel=1e-14)
    assert budget.independent_noise_std == pytest.approx(expected**-0.5, rel=1e-14)


def test_sampling_at_rate_one_is_no_sampling() -> None:
    everyone = PrivacyBudget(**SAMPLE, sampling_rate=1.0)
    assert everyone.mu == gaussian.mu_from(10, 1e-5)
    assert everyone.precision_cap == PrivacyBudget(**EVERY_STEP).precision_cap


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (
            BASE,
            "ε = 10, δ = 1e-05 over 5000 steps for one agent's whole data set (its mini-batch "
            "gradient is clipped once to 0.1; replace-one adjacency; exact Gaussian DP)",
        ),
        (
            {**BASE, "num_steps": 1, "adjacency": "add-remove", "accounting": "rdp"},
            "ε = 10, δ = 1e-05 over 1 step for one agent's whole data set (its mini-batch "
            "gradient is clipped once to 0.1; zero-out adjacency; Rényi DP, Theorem 2)",
        ),
        (
            {**EVERY_STEP, "accounting": "paper"},
            "ε = 10, δ = 1e-05 over 5000 steps for one sample of one agent (each sample's gradient "
            "is clipped to 0.1 and averaged over batches of 64, of which each may have the sample; "
            "replace-one adjacency; the paper's eq. (13b))",
        ),
        (
            {**SAMPLE, "sampling": "passes", "samples_per_agent": 640},
            "ε = 10, δ = 1e-05 over 5000 steps for one sample of one agent (each sample's gradient "
            "is clipped to 0.1 and averaged over batches of 64, each once in a pass of 10 batches "
            "in a new secret order; replace-one adjacency; exact Gaussian DP of at most 500 steps "
            "with a sample)",
        ),
        (
            {**SAMPLE, "epsilon": (10, 3), "samples_per_agent": (6400, 640)},
            "ε = 3 to 10, δ = 1e-05, each agent with its own, over 5000 steps for one sample of "
            "one agent (each sample's gradient is clipped to 0.1, taken with probability 0.01 to "
            "0.1 (Poisson sampling), and the sum divided by 64; replace-one adjacency; privacy "
            "loss distributions)",
        ),
        (
            {**SAMPLE, "sampling_rate": 0.01, "adjacency": "add-remove"},
            "ε = 10, δ = 1e-05 over 5000 steps for one sample of one agent (each sample's gradient "
            "is clipped to 0.1, taken with probability 0.01 (Poisson sampling), and the sum "
            "divided by 64; add-or-remove-one adjacency; privacy loss distributions)",
        ),
    ],
)
def test_describe_names_unit_clipping_adjacency_and_accounting(
    budget: dict[str, Any], words: str
) -> None:
    assert PrivacyBudget(**budget).describe() == words


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0}, r"epsilon must be positive, at most 1e\+09, found 0"),
        ({"epsilon": math.nan}, r"epsilon must be positive, at most 1e\+09, found nan"),
        ({"delta": 0.0}, r"delta must be in \(0, 1\), found 0.0: try 1e-5"),
        ({"delta": 1.0}, r"delta must be in \(0, 1\), found 1.0"),
        ({"num_steps": 0}, "num_steps must be an integer of at least 1, found 0"),
        ({"clip": 0.0}, r"clip must be in \[1e-15, 1e\+15\], found 0.0: try 0.1"),
        ({"clip": math.nan}, r"clip must be in \[1e-15, 1e\+15\], found nan"),
        ({"unit": "user"}, "unit must be one of agent, sample, found 'user'"),
        ({"adjacency": "swap"}, "adjacency must be one of replace, add-remove, found 'swap'"),
        ({"accounting": "zcdp"}, "accounting must be one of gdp, rdp, paper, found 'zcdp'"),
        ({"batch_size": 64}, "batch_size must be None for unit='agent' .* found 64: .*'sample'"),
        ({"sampling_rate": 0.1}, "sampling_rate must be None for unit='agent' .* found 0.1"),
        ({**EVERY_STEP, "batch_size": None}, "batch_size must be given for .* found None"),
        ({**EVERY_STEP, "batch_size": 10**15}, "batch_size must be at most 1,000,000,000,000"),
        ({**EVERY_STEP, "batch_size": 0}, "batch_size must be an integer of at least 1, found 0"),
        (
            {**EVERY_STEP, "batch_size": 0, "sampling": "passes", "samples_per_agent": 100},
            "batch_size must be an integer of at least 1, found 0",
        ),
        ({"epsilon": {"Oslo": 1.0}}, "epsilon must be a number or a tuple"),
        ({**EVERY_STEP, "sampling_rate": 0.1}, "sampling_rate must be None for .* found 0.1"),
        ({**SAMPLE, "sampling": "once"}, "sampling must be one of poisson, passes, every-step"),
        ({**SAMPLE, "sampling": "passes"}, "'passes' needs samples_per_agent, .* found neither"),
        ({**SAMPLE}, "found neither; 'poisson' .* 'passes' .* 'every-step'"),
        ({**SAMPLE, "sampling_rate": 0.1, "samples_per_agent": 5}, "found sampling_rate and"),
        ({**SAMPLE, "samples_per_agent": 0}, "samples_per_agent must be an integer of at least 1"),
        ({"samples_per_agent": 5}, "samples_per_agent must be None for unit='agent', found 5"),
        ({"sampling": "poisson"}, "sampling must be 'every-step' for unit='agent'"),
        ({"epsilon": ()}, "epsilon must be a number or one for each agent"),
        ({"epsilon": (1, 0)}, "epsilon must be positive"),
        ({"epsilon": (1, 2), "delta": (1e-5,) * 3}, "delta must be 2, one for each agent, found 3"),
        ({**SAMPLE, "sampling_rate": 0.0}, r"sampling_rate must be in \(0, 1\], found 0.0"),
        ({**SAMPLE, "sampling_rate": math.nan}, r"sampling_rate must be in \(0, 1\], found nan"),
        (
            {**SAMPLE, "sampling_rate": 0.1, "accounting": "rdp"},
            "accounting must be 'gdp' under Poisson sampling, found 'rdp'",
        ),
        (
            {**SAMPLE, "sampling_rate": 0.1, "delta": 1e-13},
            r"delta must be in \[5e-11, .*found 1e-13",
        ),
        (
            {**SAMPLE, "sampling_rate": 1e-6, "num_steps": 5},
            r"delta must be in \[1e-12, 5e-06\) .* releases need no noise",
        ),
    ],
)
def test_errors_name_the_argument_and_the_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        PrivacyBudget(**{**BASE, **change})


def test_a_subsampled_budget_has_no_mu() -> None:
    budget = PrivacyBudget(**SAMPLE, sampling_rate=0.1)
    with pytest.raises(CornError, match="mu is not defined"):
        _ = budget.mu


def test_eq_13b_warns_at_the_line_that_makes_the_budget() -> None:
    with pytest.warns(CornWarning, match=r"exact epsilon of its noise is 41\.77, above") as caught:
        PrivacyBudget(**{**BASE, "epsilon": 40}, accounting="paper")
    assert caught[0].filename == __file__


def test_budgets_are_immutable_and_comparable() -> None:
    budget = PrivacyBudget(**BASE)
    assert budget.precision_cap > 0  # what is computed once is no part of the value
    assert budget == PrivacyBudget(**BASE)
    assert hash(budget) == hash(PrivacyBudget(**BASE))
    assert pickle.loads(pickle.dumps(budget)) == budget
    assert budget.query == ClippedQuery(0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        budget.epsilon = 3  # type: ignore[misc]


def test_private_sizes_make_no_public_rate() -> None:
    """Without one sample the budget, which everybody sees, would be another one."""
    terms: dict[str, Any] = {"epsilon": 1, "delta": 1e-5, "num_steps": 50, "clip": 1}
    terms |= {"batch_size": 10, "adjacency": "add-remove"}
    with pytest.raises(InvalidArgumentError):
        PrivacyBudget.for_sizes([100, 200], **terms)
    # In zero-out neighbours of passes all samples stay.
    assert PrivacyBudget.for_sizes([100, 200], **terms, sampling="passes").num_agents == 2
