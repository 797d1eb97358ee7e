"""``corn account``: from a privacy budget to the noise it needs, or from noise to its privacy."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from corn.checks import FloatArray
from corn.cli.options import BatchSizeOption, BudgetOptions, JsonOption, is_given
from corn.cli.output import (
    Column,
    Fact,
    collect_rows,
    print_result,
    print_rows,
    print_table,
    sampling_facts,
)
from corn.covariance.threat import ThreatModel
from corn.errors import CornWarning, InvalidArgumentError, list_some
from corn.privacy import (
    ACCOUNTANTS,
    Accounting,
    AgentPromise,
    ClippedQuery,
    PrivacyBudget,
    PrivacyLoss,
    gaussian,
    is_proved,
)
from corn.privacy import account as measure
from corn.privacy.floats import RESERVE
from corn.privacy.rounding import round_bound_down, round_up, write_exactly
from corn.topology.files import read_matrix

EXAMPLE = "corn account --epsilon 10 --delta 1e-5 --steps 5000 --clip 0.1"
# A covariance says nothing about seeds, so its ε holds against an eavesdropper only.
ADVERSARY = ThreatModel().describe()


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
    if covariance is None:
        _report_budget(budget.make(batch_size), as_json=json)
        return
    # One number each: a covariance has no promise per agent.
    delta = _read_number("delta", budget.delta)
    epsilon = _read_number("epsilon", budget.epsilon) if is_given(context, "epsilon") else None
    given = budget.make(batch_size)
    if not given.is_uniform:
        raise InvalidArgumentError(
            f"--samples-per-agent must be one number with --covariance, found "
            f"{budget.samples_per_agent}"
        )
    R = read_matrix(covariance, name="a covariance")
    loss = measure(R, given.query, num_steps=budget.steps)
    _report_loss(loss, delta, epsilon, covariance, as_json=json)


def _report_budget(budget: PrivacyBudget, *, as_json: bool) -> None:
    # The paper's calibrations are defined for one promise without subsampling only.
    is_plain = budget.is_uniform and not budget.query.is_subsampled
    rows = list(ACCOUNTANTS) if is_plain else []
    columns = _list_calibrations(budget)
    calibrations = dict(zip(rows, collect_rows(columns, rows), strict=True))
    caps = budget.precision_caps(len(budget.promises))
    shown = caps[0] if budget.is_uniform else caps
    print_result(
        "",
        [
            Fact("promise", budget.describe(), "promise"),
            *_query_facts(budget.promises[0].query),
            Fact("epsilon", budget.epsilon),
            Fact("delta", budget.delta),
            Fact("num_steps", budget.num_steps),
            Fact("mu", budget.mu, "μ of the whole run", round_up(budget.mu, 8))
            if is_plain
            else Fact("mu", None),
            Fact(
                "precision_cap",
                shown,
                # Where promises differ, a table below has the numbers of each.
                "precision cap b" if budget.is_uniform else "",
                f"{round_bound_down(caps[0], 8)}   (largest [R⁻¹]_ii)",
            ),
            Fact(
                "independent_noise_std",
                1 / np.sqrt(shown),
                "noise std of an LDP agent" if budget.is_uniform else "",
                round_up(1 / math.sqrt(caps[0])),
            ),
            *sampling_facts(budget),
            Fact("calibrations", calibrations),
            Fact(
                "",
                None,
                "floating point",
                f"not included; a plan sets {RESERVE:.2%} of ε and δ aside for it",
            ),
        ],
        as_json=as_json,
    )
    if as_json:
        return
    if not budget.is_uniform:
        _print_promises(budget, caps)
    if rows:
        print_rows("Noise of each calibration", columns, rows)


def _list_calibrations(budget: PrivacyBudget) -> list[Column[Accounting]]:
    """Return what is computed for each accountant: its noise, and the exact ε of that noise."""
    epsilon, delta, query = budget.promises[0]
    participations = query.participations(budget.num_steps)

    def mu(name: Accounting) -> float:
        return ACCOUNTANTS[name].mu_from(epsilon, delta)

    def noise_std(name: Accounting) -> float:
        return budget.sensitivity * math.sqrt(participations) / mu(name)

    def ratio(name: Accounting) -> float:
        # Noise variance is Δ²T/μ², so the ratio of variances is that of μ² the other way round.
        quotient = gaussian.mu_from(epsilon, delta) / mu(name)
        return quotient * quotient  # not ** 2, which raises where it should be infinite

    def exact(name: Accounting) -> float:
        # By the exact relation, whatever the accountant: this is what its noise really gives.
        return gaussian.epsilon_from(mu(name), delta)

    def verdict(name: Accounting) -> str:
        if name == "gdp":
            return "exact"
        # The paper's constant is not proved for large ε (docs/theory.md).
        if exact(name) > epsilon:
            return f"VIOLATES ε = {write_exactly(epsilon)}"
        wasted = f"wastes {ratio(name) - 1:.0%} noise variance"
        return wasted if is_proof(name) else f"{wasted}; not proved at this ε"

    def is_proof(name: Accounting) -> bool:
        return name != "paper" or is_proved(epsilon, delta)

    return [
        Column("mu", mu),
        Column("", str, "calibration", lambda name: f"{name} ({ACCOUNTANTS[name].description})"),
        Column(
            "independent_noise_std", noise_std, "LDP noise std", lambda n: round_up(noise_std(n))
        ),
        Column("variance_ratio", ratio, "variance", lambda name: f"{ratio(name):.3f} ×"),
        Column("exact_epsilon", exact, "exact ε", lambda name: round_up(exact(name))),
        Column("proved", is_proof),
        Column("verdict", verdict, "verdict"),
    ]


def _read_number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InvalidArgumentError(
            f"--{name} must be one number with --covariance, found {text}"
        ) from error


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
    print_result(
        "",
        [
            Fact(
                "covariance",
                source,
                "noise",
                f"{source}, {len(loss.precision)} agents, {loss.num_steps} steps",
            ),
            Fact("", None, "protects", f"{loss.query.protects} ({loss.query.recipe})"),
            *_query_facts(loss.query),
            Fact("num_steps", loss.num_steps),
            Fact("delta", delta),
            *(
                Fact("", None, f"ε at δ = {write_exactly(delta)}, {name}", _describe(value, loss))
                for name, value in worst.items()
            ),
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
    if not as_json:
        _print_agents(loss, epsilons, delta, deltas, epsilon)


def _print_agents(
    loss: PrivacyLoss,
    epsilons: FloatArray,
    delta: float,
    deltas: FloatArray | None,
    epsilon: float | None,
) -> None:
    extra = [] if epsilon is None else [f"δ at ε = {write_exactly(epsilon)}"]
    print_table(
        "Each agent, by exact Gaussian DP",
        ["agent", "[R⁻¹]_ii", f"ε at δ = {write_exactly(delta)}", *extra],
        [
            [str(i), round_up(precision), round_up(epsilons[i])]
            + ([] if deltas is None else [round_up(deltas[i], 4)])
            for i, precision in enumerate(loss.precision)
        ],
    )


def _describe(worst: float, loss: PrivacyLoss) -> str:
    agent = loss.worst_agent
    if math.isinf(worst):
        return f"∞ (agent {agent}): no guarantee, because some sum of messages has no noise"
    return f"{round_up(worst)} (worst: agent {agent})"


def _query_facts(query: ClippedQuery) -> list[Fact]:
    return [
        Fact("unit", query.unit),
        Fact("protects", query.protects),
        Fact("clipping", query.recipe),
        Fact("adversary", ADVERSARY, "against"),
        Fact("adjacency", query.adjacency),
        Fact("clip", query.clip),
        Fact("batch_size", query.batch_size),
        Fact("sampling", query.sampling),
        Fact("sampling_rate", query.sampling_rate),
        Fact("steps_per_pass", query.steps_per_pass),
        Fact("sensitivity", query.sensitivity, "sensitivity Δ", f"{query.sensitivity:.6g}"),
    ]


def _print_promises(budget: PrivacyBudget, caps: FloatArray) -> None:
    """Print one row for each distinct promise, with the agents that have it."""
    agents: dict[tuple[AgentPromise, float], list[int]] = {}
    for agent, key in enumerate(zip(budget.promises, caps.tolist(), strict=True)):
        agents.setdefault(key, []).append(agent)
    print_table(
        "Each promise",
        ["agents", "ε", "δ", "sampling", "precision cap b", "LDP noise std"],
        [
            [
                list_some(own),
                write_exactly(promise.epsilon),
                write_exactly(promise.delta),
                _describe_sampling(promise.query),
                round_bound_down(cap),
                round_up(1 / math.sqrt(cap)),
            ]
            for (promise, cap), own in agents.items()
        ],
    )


def _describe_sampling(query: ClippedQuery) -> str:
    if query.sampling == "poisson":
        return f"poisson, rate {query.sampling_rate:.4g}"
    if query.sampling == "passes":
        return f"passes of {query.steps_per_pass} steps"
    return "every-step"
