"""``corn verify``: verify a plan from its public content, without trust in its maker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from corn.cli.options import JSON, argument, option
from corn.cli.output import (
    print_error,
    print_json,
    print_note,
    print_result,
    print_rows,
    warn_of_insiders,
    working,
)
from corn.cli.plan import describe_plan
from corn.errors import InvalidArgumentError, list_some
from corn.noise import Roster, load_roster
from corn.plan import AgentGuarantee, Plan, Verification, fingerprint, load_plan, verify_plan
from corn.plan.verify import describe_coalition, guarantees_against
from corn.topology import list_connections
from corn.topology.graphs import label_agent, look_up_agents

_MOST_ROWS = 40
"""With more agents, those with the same promise share a row."""


def verify(
    path: Path = argument("Plan file.", metavar="PLAN"),
    agent: str | None = option("Name or number of the only agent to show."),
    coalition: str | None = option(
        "Insiders against whom ε is computed, such as 3,7. (Default: the worst within the threat.)"
    ),
    connections: Path | None = option(
        "Instead of checking the plan, print who must reach whom, and where, by this roster.",
        metavar="ROSTER",
    ),
    json: bool = JSON,
) -> None:
    """Recompute each agent's ε, the noise and its lower bound; exit 1 if a promise is broken."""
    plan = load_plan(path)
    number = None if agent is None else plan.network.find_agent(agent, argument="--agent")
    if connections is not None:
        _show_connections(plan, load_roster(connections), number, as_json=json)
        return
    with working("checking every coalition"):
        # Also with --coalition: the exit code judges the plan, not one coalition.
        found = verify_plan(plan)
    guarantees = found.guarantees
    if coalition is not None:
        # Of any size: it may be larger than the plan's threat, as after a leak of keys.
        names = plan.network.agent_names
        insiders = look_up_agents(names, coalition, argument="--coalition")
        if number in insiders:
            raise InvalidArgumentError(f"agent {agent} is one of the insiders {coalition}")
        guarantees = guarantees_against(plan, insiders)
    shown = [g for g in guarantees if number in (None, g.agent)]
    _print(plan, found, shown, as_json=json)
    if coalition is not None and len(insiders) > plan.threat.max_colluders:
        print_note(f"the plan promises nothing against {len(insiders)} insiders")
    warn_of_insiders([(plan.mechanism, plan.decomposition, plan.threat)])
    # After the table, so that a broken plan is shown in full and the last line says why.
    for problem in found.problems:
        print_error(f"{path}: {problem}")
    if not found.passed:
        raise typer.Exit(1)


def _print(plan: Plan, found: Verification, shown: list[AgentGuarantee], *, as_json: bool) -> None:
    epsilons, deltas = plan.budget.epsilons(plan.num_agents), plan.budget.deltas(plan.num_agents)
    names = plan.network.agent_names
    facts = describe_plan(plan, found.value, found.lower_bound) | {
        "passed": found.passed,
        "problems": found.problems,
        "gap": found.gap,
        "epsilon": plan.budget.epsilon,
        "delta": plan.budget.delta,
        "unit": plan.budget.unit,
        "agents": [
            {
                "agent": g.agent,
                "name": names[g.agent],
                "epsilon": g.epsilon,
                "promised_epsilon": float(epsilons[g.agent]),
                "delta": float(deltas[g.agent]),
                "precision": g.precision,
                "worst_coalition": g.worst_coalition,
            }
            for g in shown
        ],
    }
    title = f"plan {fingerprint(plan).hex()[:16]}: {'verified' if found.passed else 'BROKEN'}"
    print_result(title, facts, as_json=as_json)
    if as_json:
        return
    groups: dict[object, list[dict[str, Any]]] = {}
    for own in facts["agents"]:
        is_alone = len(shown) <= _MOST_ROWS
        key = own["agent"] if is_alone else plan.budget.of_agent(own["agent"])
        groups.setdefault(key, []).append(own)
    rows = []
    for group in groups.values():
        worst = max(group, key=lambda own: float(own["epsilon"]))
        agents = list_some(label_agent(names, own["agent"]) for own in group)
        coalition = describe_coalition(worst["worst_coalition"], names)
        rows.append({**worst, "agent": agents, "against": coalition})
    columns = ("agent", "epsilon", "promised_epsilon", "delta", "precision", "against")
    print_rows(f"ε for {plan.budget.queries[0].protects}, recomputed", rows, columns)


def _show_connections(plan: Plan, roster: Roster, agent: int | None, *, as_json: bool) -> None:
    """Print who must reach whom, for all agents or for one."""
    if roster.num_agents != plan.num_agents:
        raise InvalidArgumentError(
            f"the roster must have the plan's {plan.num_agents} agents, found {roster.num_agents}"
        )
    names = plan.network.agent_names
    roster.require_names(names)
    host = roster.store_host
    links = list_connections(plan.network.graph, roster.accepts)
    store = [(other, host) for other in range(plan.num_agents) if other != host]
    rows: list[dict[str, Any]] = [
        {"agent": a, "reaches": b, "address": roster.sites[b].address, "for": purpose}
        for purpose, pairs in (("link", links), ("store", store))
        for a, b in pairs
        if agent in (None, a, b)
    ]
    if as_json:
        print_json({"store_host": host, "connections": rows})
        return
    shown = [row | {name: names[row[name]] for name in ("agent", "reaches")} for row in rows]
    print_rows("connections that firewalls must allow", shown, list(rows[0]) if rows else [])
    print_note(
        f"agent {label_agent(names, host)} opens the store (--store): the first agent that accepts "
        "connections"
    )
