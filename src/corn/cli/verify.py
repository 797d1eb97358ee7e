"""``corn verify``: verify a plan from its public content, without trust in its maker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corn.cli.options import JsonOption
from corn.cli.output import (
    print_error,
    print_facts,
    print_json,
    print_note,
    print_table,
    round_up,
    warn_of_insiders,
    working,
)
from corn.cli.plan import describe_grid, plan_facts
from corn.errors import InvalidArgumentError
from corn.plan import AgentGuarantee, Plan, Verification, load_plan, verify_plan
from corn.plan.verify import describe_coalition, guarantees_against

EXAMPLE = "corn verify plan.corn --agent 3"


def verify(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file.")],
    agent: Annotated[
        int | None, typer.Option(min=0, help="Number of the only agent to show.")
    ] = None,
    coalition: Annotated[
        str | None,
        typer.Option(
            help="Insiders against whom ε is computed, such as 3,7. An agent that dropped out and "
            "whose keys leaked counts as one. (Default: the worst coalition of the plan's threat.)"
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Recompute each agent's ε, the noise and its lower bound; exit 1 if a promise is broken."""
    plan = load_plan(path)
    if agent is not None and agent >= plan.num_agents:
        raise InvalidArgumentError(
            f"--agent must be in 0 … {plan.num_agents - 1} for this plan, found {agent}"
        )
    with working("checking every coalition"):
        found = verify_plan(plan)
    guarantees = found.guarantees
    if coalition is not None:
        insiders = _read_coalition(coalition)
        if agent in insiders:
            raise InvalidArgumentError(f"agent {agent} is one of the insiders {coalition}")
        guarantees = guarantees_against(plan, insiders)
        if len(insiders) > plan.threat.max_colluders:
            print_note(
                f"{len(insiders)} insiders are more than in the plan's threat, "
                f"{plan.threat.describe()}"
            )
    shown = [g for g in guarantees if agent is None or g.agent == agent]
    if json:
        print_json(_facts(plan, found, shown))
    else:
        _print(plan, found, shown)
    warn_of_insiders(plan.decomposition, plan.budget, plan.threat)
    # After the table, so that a broken plan is shown in full and the last line says why.
    for problem in found.problems:
        print_error(f"{path}: {problem}")
    if not found.passed:
        raise typer.Exit(1)


def _facts(plan: Plan, found: Verification, shown: list[AgentGuarantee]) -> dict[str, object]:
    claims = plan_facts(plan)
    del claims["status"]  # a claim of the maker that verification does not check
    promised = plan.budget.epsilons(plan.num_agents)
    deltas = plan.budget.deltas(plan.num_agents)
    return {
        **claims,
        "passed": found.passed,
        "problems": found.problems,
        "value": found.value,
        "lower_bound": found.lower_bound,
        "gap": found.gap,
        "epsilon": plan.budget.epsilon,
        "delta": plan.budget.delta,
        "unit": plan.budget.unit,
        "agents": [
            {
                "agent": g.agent,
                "epsilon": g.epsilon,
                "promised_epsilon": float(promised[g.agent]),
                "delta": float(deltas[g.agent]),
                "precision": g.precision,
                "worst_coalition": g.worst_coalition,
            }
            for g in shown
        ],
    }


def _print(plan: Plan, found: Verification, shown: list[AgentGuarantee]) -> None:
    facts = plan_facts(plan)
    print_facts(
        f"plan {str(facts['fingerprint'])[:16]}: {'verified' if found.passed else 'BROKEN'}",
        [
            ("promise", plan.budget.describe()),
            ("against", plan.threat.describe()),
            ("noise energy", f"{found.value:.6g}, {plan.objective.describe()}"),
            (
                "lower bound",
                f"{found.lower_bound:.6g} (gap {found.gap:.2g}), for the seeds allowed",
            ),
            ("releases", describe_grid(plan)),
            ("fingerprint", str(facts["fingerprint"])),
        ],
    )
    print_table(
        f"ε for {plan.budget.promises[0].query.protects}, recomputed",
        ["agent", "ε", "promised", "at δ", "[R⁻¹]_ii", "against"],
        [
            [
                str(g.agent),
                round_up(g.epsilon),
                f"{plan.budget.epsilons(plan.num_agents)[g.agent]:.12g}",
                f"{plan.budget.deltas(plan.num_agents)[g.agent]:g}",
                f"{g.precision:.6g}",
                describe_coalition(g.worst_coalition),
            ]
            for g in shown
        ],
    )


def _read_coalition(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise InvalidArgumentError(
            f"--coalition must be agents' numbers separated by commas, found {text!r}"
        )
    return sorted({int(part) for part in parts})
