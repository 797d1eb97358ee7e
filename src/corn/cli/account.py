"""``corn account``: from a privacy budget to the noise it needs, or from noise to its privacy."""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from corn.cli.options import BATCH_SIZE, JSON, BudgetOptions, is_given, option
from corn.cli.output import print_result, print_rows
from corn.covariance import EAVESDROPPER
from corn.errors import CornWarning, InvalidArgumentError
from corn.privacy import ACCOUNTANTS, Accounting, ClippedQuery, PrivacyBudget, gaussian, is_proved
from corn.privacy import account as measure
from corn.privacy.floats import RESERVE
from corn.privacy.rounding import write_exactly
from corn.topology.files import read_matrix


def account(
    context: typer.Context,
    *,
    budget: BudgetOptions,
    batch_size: int | None = BATCH_SIZE,
    covariance: Path | None = option(
        "File of a noise covariance (.npy or .csv), whose ε is then computed, and its δ at "
        "--epsilon if that is given."
    ),
    json: bool = JSON,
) -> None:
    """Compute the noise that a privacy budget needs, or the privacy of given noise."""
    given = budget.make(batch_size)
    if covariance is None:
        _report_budget(given, as_json=json)
    elif given.num_agents is not None:
        raise InvalidArgumentError("a budget must be the same for all agents with --covariance")
    else:
        _report_loss(given, covariance, with_delta=is_given(context, "epsilon"), as_json=json)


def _report_budget(budget: PrivacyBudget, *, as_json: bool) -> None:
    # The paper's calibrations are defined for one promise without subsampling only.
    is_plain = budget.is_uniform and not budget.query.is_subsampled
    rows = [_calibrate(budget, name) for name in ACCOUNTANTS] if is_plain else []
    caps = budget.precision_caps(len(budget.promises))
    facts = {
        "promise": budget.describe(),
        **_describe_query(budget.queries[0]),
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "num_steps": budget.num_steps,
        "mu": budget.mu if is_plain else None,
        # Of [R⁻¹]_ii; several values are those of the agents.
        "precision_cap": caps[0] if budget.is_uniform else caps,
        "independent_noise_std": caps[0] ** -0.5 if budget.is_uniform else caps**-0.5,
        "floating_point": f"not included; a plan sets {RESERVE:.2%} of ε and δ aside for it",
    }
    if as_json:
        facts["calibrations"] = {row["calibration"]: row for row in rows}
    print_result("", facts, as_json=as_json)
    if not budget.is_uniform and not as_json:
        each = [
            {
                "agent": agent,
                "epsilon": promise.epsilon,
                "delta": promise.delta,
                "precision_cap": cap,
                "independent_noise_std": cap**-0.5,
            }
            for agent, (promise, cap) in enumerate(zip(budget.promises, caps, strict=True))
        ]
        print_rows("promise of each agent", each, list(each[0]))
    if rows and not as_json:
        columns = ("calibration", "independent_noise_std", "variance_ratio", "exact_epsilon")
        print_rows("Noise of each calibration", rows, (*columns, "verdict"))


def _calibrate(budget: PrivacyBudget, name: Accounting) -> dict[str, Any]:
    """Return the noise of an accountant, and the ε that it really gives."""
    epsilon, delta, query = budget.promise
    mu = ACCOUNTANTS[name].mu_from(epsilon, delta)
    std = query.sensitivity * math.sqrt(query.participations(budget.num_steps)) / mu
    # Noise variance is Δ²T/μ², so the ratio of variances is that of μ² the other way round.
    quotient = gaussian.mu_from(epsilon, delta) / mu
    ratio = quotient * quotient  # not ** 2, which raises where it should be infinite
    # By the exact relation, whatever the accountant.
    exact = gaussian.epsilon_from(mu, delta)
    # The paper's constant is not proved for large ε (docs/theory.md).
    is_proof = name != "paper" or is_proved(epsilon, delta)
    verdict = f"wastes {ratio - 1:.0%} noise variance{'' if is_proof else '; not proved at this ε'}"
    if exact > epsilon:
        verdict = f"VIOLATES ε = {write_exactly(epsilon)}"
    return {
        "calibration": name,
        "mu": mu,
        "independent_noise_std": std,
        "variance_ratio": ratio,
        "exact_epsilon": exact,
        "verdict": "exact" if name == "gdp" else verdict,
    }


def _report_loss(budget: PrivacyBudget, path: Path, *, with_delta: bool, as_json: bool) -> None:
    """Print the privacy of a file's covariance, and its δ at the budget's ε ``with_delta``."""
    epsilon, delta, query = budget.promise
    loss = measure(read_matrix(path, name="a covariance"), query, num_steps=budget.num_steps)
    # The paper's accountants know no subsampling.
    names: list[Accounting] = ["gdp"] if query.is_subsampled else list(ACCOUNTANTS)
    with warnings.catch_warnings():
        # Where an accountant is not proved shows beside the exact values.
        warnings.simplefilter("ignore", CornWarning)
        worst = {name: loss.worst_epsilon(delta, accounting=name) for name in names}
    facts = {
        "covariance": str(path),
        "num_agents": len(loss.precision),
        **_describe_query(query),
        "num_steps": loss.num_steps,
        "delta": delta,
        "worst_agent": loss.worst_agent,
        "worst_epsilon": worst["gdp"],
        "worst_epsilon_by": worst,
        "epsilon_per_agent": loss.epsilon(delta),
        "at_epsilon": epsilon if with_delta else None,
        "delta_per_agent": loss.delta(epsilon) if with_delta else None,
        "precision_diagonal": loss.precision,
    }
    if math.isinf(worst["gdp"]):
        facts["guarantee"] = "none, because some sum of messages has no noise"
    print_result("", facts, as_json=as_json)
    if not as_json:
        pairs = enumerate(zip(loss.epsilon(delta), loss.precision, strict=True))
        each = [{"agent": a, "epsilon": own, "precision": cap} for a, (own, cap) in pairs]
        print_rows(f"ε of each agent at δ = {delta:g}", each, ("agent", "epsilon", "precision"))


def _describe_query(query: ClippedQuery) -> dict[str, Any]:
    return {
        # A covariance says nothing about seeds, so its ε holds against an eavesdropper only.
        "adversary": EAVESDROPPER.describe(),
        "sensitivity": query.sensitivity,
        "protects": query.protects,
        "clipping": query.recipe,
        **asdict(query),
    }
