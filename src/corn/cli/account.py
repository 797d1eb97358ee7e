"""``corn account``: from a privacy budget to the noise it needs, or from noise to its privacy."""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from corn.cli.options import BatchSizeOption, BudgetOptions, JsonOption, is_given
from corn.cli.output import Column, Fact, print_result, print_rows
from corn.covariance import EAVESDROPPER
from corn.errors import CornWarning, InvalidArgumentError, list_some
from corn.privacy import (
    ACCOUNTANTS,
    Accounting,
    ClippedQuery,
    PrivacyBudget,
    PrivacyLoss,
    gaussian,
    is_proved,
)
from corn.privacy import account as measure
from corn.privacy.accounting import group_agents
from corn.privacy.floats import RESERVE
from corn.privacy.rounding import round_bound_down, round_up, write_exactly
from corn.topology.files import read_matrix

EXAMPLE = "corn account --epsilon 10 --delta 1e-5 --steps 5000 --clip 0.1"


def account(
    context: typer.Context,
    *,
    budget: BudgetOptions,
    batch_size: BatchSizeOption = None,
    covariance: Annotated[
        Path | None,
        typer.Option(
            help="File of a noise covariance (.npy or .csv), whose ε is then computed, and its δ "
            "at --epsilon if that is given."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compute the noise that a privacy budget needs, or the privacy of given noise."""
    given = budget.make(batch_size)
    if covariance is None:
        _report_budget(given, as_json=json)
        return
    if given.num_agents is not None:
        raise InvalidArgumentError("a budget must be the same for all agents with --covariance")
    epsilon, delta, query = given.promise
    R = read_matrix(covariance, name="a covariance")
    loss = measure(R, query, num_steps=given.num_steps)
    at_epsilon = epsilon if is_given(context, "epsilon") else None
    _report_loss(loss, delta, at_epsilon, covariance, as_json=json)


def _report_budget(budget: PrivacyBudget, *, as_json: bool) -> None:
    # The paper's calibrations are defined for one promise without subsampling only.
    is_plain = budget.is_uniform and not budget.query.is_subsampled
    rows = [_calibrate(budget, name) for name in ACCOUNTANTS] if is_plain else []
    caps = budget.precision_caps(len(budget.promises))
    cap = float(caps[0])
    std = 1 / math.sqrt(cap)
    # Where promises differ, a table below has the numbers of each.
    labels = ("precision cap b", "noise std of an LDP agent") if budget.is_uniform else ("", "")
    most = f"{round_bound_down(cap, 8)}   (largest [R⁻¹]_ii)"
    kept = f"not included; a plan sets {RESERVE:.2%} of ε and δ aside for it"
    mu = budget.mu if is_plain else None
    shown = round_up(mu or 0.0, 8)
    print_result(
        "",
        [
            Fact("promise", budget.describe(), "promise"),
            *_query_facts(budget.queries[0]),
            Fact("epsilon", budget.epsilon),
            Fact("delta", budget.delta),
            Fact("num_steps", budget.num_steps),
            Fact("mu", mu, "μ of the whole run" if is_plain else "", shown),
            Fact("precision_cap", cap if budget.is_uniform else caps, labels[0], most),
            Fact(
                "independent_noise_std",
                std if budget.is_uniform else 1 / np.sqrt(caps),
                labels[1],
                round_up(std),
            ),
            Fact("calibrations", {row["calibration"]: row for row in rows}),
            Fact("", None, "floating point", kept),
        ],
        as_json=as_json,
    )
    if as_json:
        return
    if not budget.is_uniform:
        _print_promises(budget)
    if rows:
        print_rows("Noise of each calibration", _CALIBRATIONS, rows)


def _calibrate(budget: PrivacyBudget, name: Accounting) -> dict[str, Any]:
    """Return the noise of an accountant, and the ε that it really gives."""
    epsilon, delta, query = budget.promise
    mu = ACCOUNTANTS[name].mu_from(epsilon, delta)
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
    std = query.sensitivity * math.sqrt(query.participations(budget.num_steps)) / mu
    return {
        "calibration": name,
        "mu": mu,
        "independent_noise_std": std,
        "variance_ratio": ratio,
        "exact_epsilon": exact,
        "verdict": "exact" if name == "gdp" else verdict,
    }


_CALIBRATIONS: list[Column[dict[str, Any]]] = [
    Column(
        "",
        lambda row: row["calibration"],
        "calibration",
        lambda name: f"{name} ({ACCOUNTANTS[name].description})",
    ),
    Column("", lambda row: row["independent_noise_std"], "LDP noise std", round_up),
    Column("", lambda row: row["variance_ratio"], "variance", "{:.3f} ×".format),
    Column("", lambda row: row["exact_epsilon"], "exact ε", round_up),
    Column("", lambda row: row["verdict"], "verdict"),
]


def _print_promises(budget: PrivacyBudget) -> None:
    """Print one row for each distinct promise, with the agents that have it."""
    groups = group_agents(budget, len(budget.promises))
    caps = budget.precision_caps(len(budget.promises))
    print_rows(
        "Each promise",
        [
            Column("", lambda row: list_some(row[1]), "agents"),
            Column("", lambda row: row[0].epsilon, "ε", write_exactly),
            Column("", lambda row: row[0].delta, "δ", write_exactly),
            Column("", lambda row: caps[row[1][0]], "precision cap b", round_bound_down),
            Column("", lambda row: 1 / math.sqrt(caps[row[1][0]]), "LDP noise std", round_up),
        ],
        groups.items(),
    )


def _report_loss(
    loss: PrivacyLoss, delta: float, epsilon: float | None, source: Path, *, as_json: bool
) -> None:
    # The paper's accountants know no subsampling.
    names: list[Accounting] = ["gdp"] if loss.query.is_subsampled else list(ACCOUNTANTS)
    with warnings.catch_warnings():
        # Where an accountant is not proved shows beside the exact values.
        warnings.simplefilter("ignore", CornWarning)
        worst = {name: loss.worst_epsilon(delta, accounting=name) for name in names}
    epsilons = loss.epsilon(delta)
    deltas = None if epsilon is None else loss.delta(epsilon)
    at = f"ε at δ = {write_exactly(delta)}"
    noise = f"{source}, {len(loss.precision)} agents, {loss.num_steps} steps"
    print_result(
        "",
        [
            Fact("covariance", source, "noise", noise),
            Fact("", None, "protects", f"{loss.query.protects} ({loss.query.recipe})"),
            *_query_facts(loss.query),
            Fact("num_steps", loss.num_steps),
            Fact("delta", delta),
            *(Fact("", None, f"{at}, {name}", _describe(e, loss)) for name, e in worst.items()),
            Fact("worst_agent", loss.worst_agent),
            Fact("worst_epsilon", worst["gdp"]),
            Fact("worst_epsilon_by", worst),
            Fact("epsilon_per_agent", epsilons),
            Fact("at_epsilon", epsilon),
            Fact("delta_per_agent", deltas),
            Fact("precision_diagonal", loss.precision),
        ],
        as_json=as_json,
    )
    if as_json:
        return
    columns: list[Column[int]] = [
        Column("", lambda agent: agent, "agent"),
        Column("", lambda agent: loss.precision[agent], "[R⁻¹]_ii", round_up),
        Column("", lambda agent: epsilons[agent], at, round_up),
    ]
    if epsilon is not None and deltas is not None:
        title = f"δ at ε = {write_exactly(epsilon)}"
        columns.append(Column("", lambda agent: deltas[agent], title, round_up))
    print_rows("Each agent, by exact accounting", columns, range(len(loss.precision)))


def _describe(worst: float, loss: PrivacyLoss) -> str:
    agent = loss.worst_agent
    if math.isinf(worst):
        return f"∞ (agent {agent}): no guarantee, because some sum of messages has no noise"
    return f"{round_up(worst)} (worst: agent {agent})"


def _query_facts(query: ClippedQuery) -> list[Fact]:
    return [
        # A covariance says nothing about seeds, so its ε holds against an eavesdropper only.
        Fact("adversary", EAVESDROPPER.describe(), "against"),
        Fact("sensitivity", query.sensitivity, "sensitivity Δ", f"{query.sensitivity:.6g}"),
        Fact("protects", query.protects),
        Fact("clipping", query.recipe),
        *(Fact(name, value) for name, value in asdict(query).items()),
    ]
