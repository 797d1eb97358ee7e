"""``corn account``: from a privacy budget to the noise it needs, or from noise to its privacy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from corn.checks import FloatArray
from corn.cli.config_file import is_given
from corn.cli.options import BatchSizeOption, BudgetOptions, JsonOption, PlotOption
from corn.cli.output import (
    print_facts,
    print_json,
    print_note,
    print_table,
    print_written,
    sampling_facts,
)
from corn.covariance.threat import ThreatModel
from corn.errors import CornWarning, InvalidArgumentError
from corn.privacy import (
    ACCOUNTANTS,
    Accounting,
    AgentPromise,
    ClippedQuery,
    PrivacyBudget,
    PrivacyLoss,
    compare_samplings,
    gaussian,
    is_proved,
)
from corn.privacy import account as measure
from corn.privacy.floats import RESERVE
from corn.privacy.rounding import round_bound_down, round_up, round_up_range, write_exactly
from corn.topology.files import read_matrix

EXAMPLE = "corn account --epsilon 10 --delta 1e-5 --steps 5000 --clip 0.1"
# A covariance says nothing about seeds, so its ε holds against an eavesdropper only.
ADVERSARY = ThreatModel().describe()


def account(
    context: typer.Context,
    *,
    budget: BudgetOptions,
    batch_size: BatchSizeOption = None,
    accounting: Annotated[
        Accounting,
        typer.Option(
            help="Accountant: gdp is exact, rdp is the paper's Theorem 2, paper is its eq. (13b)."
        ),
    ] = "gdp",
    covariance: Annotated[
        Path | None,
        typer.Option(
            help="File of a noise covariance (.npy or .csv), whose ε is then computed, and its δ "
            "at --epsilon if that is given."
        ),
    ] = None,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Compute the noise that a privacy budget needs, or the privacy of given noise."""
    if covariance is None:
        _report_budget(budget.make(batch_size, accounting=accounting), plot, json=json)
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
    _report_loss(loss, delta, epsilon, accounting, covariance, plot, json=json)


def _report_budget(budget: PrivacyBudget, plot: Path | None, *, json: bool) -> None:
    if plot and not budget.is_uniform:
        raise InvalidArgumentError("--plot must be left out where agents' promises differ")
    # The paper's calibrations are defined for one promise without subsampling only.
    is_plain = budget.is_uniform and not budget.query.is_subsampled
    calibrations = _calibrations(budget) if is_plain else {}
    if plot:
        # One agent with independent noise at the cap: its curve is the promise of all.
        _draw(measure([[1 / budget.precision_cap]], budget.query, num_steps=budget.num_steps), plot)
    if json:
        print_json(
            {
                **_query_facts(budget.promises[0].query),
                "epsilon": budget.epsilon,
                "delta": budget.delta,
                "num_steps": budget.num_steps,
                "accounting": budget.accounting,
                "promise": budget.describe(),
                "mu": budget.mu if is_plain else None,
                **_noise_facts(budget),
                "calibrations": calibrations,
                "samplings": {
                    cost.sampling: cost.variance_ratio for cost in compare_samplings(budget)
                },
            }
        )
        return
    facts = [
        ("promise", budget.describe()),
        ("against", ADVERSARY),
        ("sensitivity Δ", f"{budget.sensitivity:.6g}"),
        *([("μ of the whole run", round_up(budget.mu, 8))] if is_plain else []),
    ]
    if budget.is_uniform:
        facts += [
            (
                "precision cap b",
                f"{round_bound_down(budget.precision_cap, 8)}   (largest [R⁻¹]_ii)",
            ),
            ("noise std of an LDP agent", round_up(budget.independent_noise_std)),
        ]
    reserve = f"not included; a plan sets {RESERVE:.2%} of ε and δ aside for it"
    print_facts("", [*facts, *sampling_facts(budget), ("floating point", reserve)])
    if not budget.is_uniform:
        _print_promises(budget)
    if calibrations:
        _print_calibrations(calibrations)
    print_written(plot)


def _print_calibrations(calibrations: Mapping[Accounting, Mapping[str, object]]) -> None:
    print_table(
        "Noise of each calibration",
        ["calibration", "LDP noise std", "variance", "exact ε", "verdict"],
        [
            [
                f"{name} ({ACCOUNTANTS[name].description})",
                round_up_range(row["independent_noise_std"]),
                f"{row['variance_ratio']:.3f} ×",
                round_up_range(row["exact_epsilon"]),
                str(row["verdict"]),
            ]
            for name, row in calibrations.items()
        ],
    )


def _read_number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InvalidArgumentError(
            f"--{name} must be one number with --covariance, found {text}"
        ) from error


def _noise_facts(budget: PrivacyBudget) -> dict[str, object]:
    """Return caps and noise as single numbers, or as one for each agent if promises differ."""
    if budget.is_uniform:
        cap: object = budget.precision_cap
        return {"precision_cap": cap, "independent_noise_std": budget.independent_noise_std}
    caps = budget.precision_caps(len(budget.promises))
    return {"precision_cap": caps, "independent_noise_std": 1 / np.sqrt(caps)}


def _calibrations(budget: PrivacyBudget) -> dict[Accounting, dict[str, object]]:
    """Return for each accountant the noise that it asks for, and the exact ε of that noise."""
    promise = budget.promise
    exact_mu = gaussian.mu_from(promise.epsilon, promise.delta)
    participations = promise.query.participations(budget.num_steps)
    rows: dict[Accounting, dict[str, object]] = {}
    for name, accountant in ACCOUNTANTS.items():
        mu = accountant.mu_from(promise.epsilon, promise.delta)
        # By the exact relation, whatever the accountant: this is what its noise really gives.
        exact = gaussian.epsilon_from(mu, promise.delta)
        # Noise variance is Δ²T/μ², so the ratio of variances is that of μ² the other way round.
        ratio = exact_mu / mu
        ratio *= ratio  # not ** 2, which raises where it should be infinite
        rows[name] = {
            "mu": mu,
            "independent_noise_std": budget.sensitivity * math.sqrt(participations) / mu,
            "variance_ratio": ratio,
            "exact_epsilon": exact,
            "proved": name != "paper" or is_proved(promise.epsilon, promise.delta),
            "verdict": _verdict(name, exact, ratio, budget),
        }
    return rows


def _verdict(name: Accounting, exact: float, ratio: float, budget: PrivacyBudget) -> str:
    promise = budget.promise
    if name == "gdp":
        return "exact"
    # The paper's constant is not proved for large ε (docs/theory.md).
    if exact > promise.epsilon:
        return f"VIOLATES ε = {write_exactly(promise.epsilon)}"
    wasted = f"wastes {ratio - 1:.0%} noise variance"
    proved = name != "paper" or is_proved(promise.epsilon, promise.delta)
    return wasted if proved else f"{wasted}; not proved at this ε"


def _warn_if_understated(claimed: FloatArray, exact: FloatArray, accounting: Accounting) -> None:
    """Print a note if an accountant without a proof at this ε understates it."""
    if (claimed < exact).any():
        worst = float(exact.max())
        print_note(
            f"{ACCOUNTANTS[accounting].description} understates ε: the exact value is up to "
            f"{round_up(worst)} (--accounting gdp)"
        )


def _report_loss(
    loss: PrivacyLoss,
    delta: float,
    epsilon: float | None,
    accounting: Accounting,
    source: Path,
    plot: Path | None,
    *,
    json: bool,
) -> None:
    # The paper's accountants know no subsampling.
    names: list[Accounting] = ["gdp"] if loss.query.is_subsampled else list(ACCOUNTANTS)
    with warnings.catch_warnings():
        # All accountants are computed. The note below is about the chosen one only.
        warnings.simplefilter("ignore", CornWarning)
        epsilons = {name: loss.epsilon(delta, accounting=name) for name in names}
        deltas = {} if epsilon is None else {n: loss.delta(epsilon, accounting=n) for n in names}
    _warn_if_understated(epsilons[accounting], epsilons["gdp"], accounting)
    if plot:
        _draw(loss, plot)
    if json:
        print_json(
            {
                **_query_facts(loss.query),
                "covariance": source,
                "num_steps": loss.num_steps[0],
                "accounting": accounting,
                "delta": delta,
                "epsilon_per_agent": epsilons[accounting],
                "worst_agent": loss.worst_agent,
                "worst_epsilon": float(epsilons[accounting].max()),
                "worst_epsilon_by": {name: float(e.max()) for name, e in epsilons.items()},
                "at_epsilon": epsilon,
                "delta_per_agent": deltas.get(accounting),
                "precision_diagonal": loss.precision[0],
            }
        )
        return
    print_facts(
        "",
        [
            ("noise", f"{source}, {loss.precision.shape[1]} agents, {loss.num_steps[0]} steps"),
            ("protects", f"{loss.query.protects} ({loss.query.recipe})"),
            ("against", ADVERSARY),
            *(
                (f"ε at δ = {write_exactly(delta)}, {name}", _worst(values, loss.worst_agent))
                for name, values in epsilons.items()
            ),
        ],
    )
    columns = ["agent", "[R⁻¹]_ii", f"ε at δ = {write_exactly(delta)}"]
    extra = [] if epsilon is None else [f"δ at ε = {write_exactly(epsilon)}"]
    print_table(
        f"Each agent, by {ACCOUNTANTS[accounting].description}",
        columns + extra,
        [
            [str(i), round_up(loss.precision[0, i]), round_up(epsilons[accounting][i])]
            + ([round_up(deltas[accounting][i], 4)] if extra else [])
            for i in range(loss.precision.shape[1])
        ],
    )
    print_written(plot)


def _worst(epsilons: FloatArray, agent: int) -> str:
    worst = float(epsilons.max())
    if math.isinf(worst):
        return f"∞ (agent {agent}): no guarantee, because some sum of messages has no noise"
    return f"{round_up(worst)} (worst: agent {agent})"


def _query_facts(query: ClippedQuery) -> dict[str, object]:
    return {
        "unit": query.unit,
        "protects": query.protects,
        "clipping": query.recipe,
        "adversary": ADVERSARY,
        "adjacency": query.adjacency,
        "clip": query.clip,
        "batch_size": query.batch_size,
        "sampling": query.sampling,
        "sampling_rate": query.sampling_rate,
        "steps_per_pass": query.steps_per_pass,
        "sensitivity": query.sensitivity,
    }


def _draw(loss: PrivacyLoss, path: Path) -> None:
    from corn.report import plot_privacy, save_figure

    save_figure(plot_privacy(loss), path)


def _print_promises(budget: PrivacyBudget) -> None:
    """Print one row for each distinct promise, with the agents that have it."""
    caps = budget.precision_caps(len(budget.promises))
    agents: dict[tuple[AgentPromise, float], list[int]] = {}
    for agent, key in enumerate(zip(budget.promises, caps.tolist(), strict=True)):
        agents.setdefault(key, []).append(agent)
    print_table(
        "Each promise",
        ["agents", "ε", "δ", "sampling", "precision cap b", "LDP noise std"],
        [
            [
                _name_agents(own),
                write_exactly(promise.epsilon),
                write_exactly(promise.delta),
                _describe_sampling(promise.query),
                round_bound_down(cap),
                round_up(1 / math.sqrt(cap)),
            ]
            for (promise, cap), own in agents.items()
        ],
    )


def _name_agents(agents: Sequence[int]) -> str:
    """Return numbers of agents, with runs of three and more as ranges.

    >>> _name_agents([0, 1, 2, 3, 7, 9, 10])
    '0–3, 7, 9, 10'
    """
    parts: list[list[int]] = []
    for agent in agents:
        if parts and agent == parts[-1][-1] + 1:
            parts[-1].append(agent)
        else:
            parts.append([agent])
    names = [f"{p[0]}–{p[-1]}" if len(p) > 2 else ", ".join(map(str, p)) for p in parts]
    return ", ".join(names)


def _describe_sampling(query: ClippedQuery) -> str:
    if query.sampling == "poisson":
        return f"poisson, rate {query.sampling_rate:.4g}"
    if query.sampling == "passes":
        return f"passes of {query.steps_per_pass} steps"
    return "every-step"
