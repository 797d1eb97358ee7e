"""``corn verify``: verify a plan from its public content, without trust in its maker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from corn.cli.options import JsonOption
from corn.cli.output import (
    Column,
    Fact,
    is_open_to_insiders,
    list_agents,
    print_error,
    print_json,
    print_note,
    print_result,
    print_rows,
    warn_of_insiders,
    working,
)
from corn.cli.plan import plan_facts
from corn.errors import InvalidArgumentError
from corn.noise import Roster, load_roster
from corn.plan import AgentGuarantee, Plan, Verification, fingerprint, load_plan, verify_plan
from corn.plan.verify import describe_coalition, guarantees_against
from corn.privacy.rounding import round_up, round_up_range, write_exactly
from corn.topology import list_connections
from corn.topology.graphs import label_agent, look_up_agents

EXAMPLE = "corn verify plan.corn --agent 3"
_MOST_ROWS = 40
"""With more agents, those with the same promise share a row."""


def verify(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file.")],
    agent: Annotated[
        str | None, typer.Option(help="Name or number of the only agent to show.")
    ] = None,
    coalition: Annotated[
        str | None,
        typer.Option(
            help="Insiders against whom ε is computed, such as 3,7 or Lake,Hill. An agent that "
            "dropped out and whose keys leaked counts as one. (Default: the worst coalition of the "
            "plan's threat.)"
        ),
    ] = None,
    connections: Annotated[
        Path | None,
        typer.Option(
            metavar="ROSTER",
            help="Instead of checking the plan, print who must reach whom, and where, by this "
            "roster.",
        ),
    ] = None,
    json: JsonOption = False,
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
        if len(insiders) > plan.threat.max_colluders:
            print_note(
                f"{len(insiders)} insiders are more than in the plan's threat, "
                f"{plan.threat.describe()}"
            )
    shown = [g for g in guarantees if number in (None, g.agent)]
    _print(plan, found, shown, as_json=json)
    if is_open_to_insiders(plan.decomposition, plan.threat):
        warn_of_insiders([plan.mechanism])
    # After the table, so that a broken plan is shown in full and the last line says why.
    for problem in found.problems:
        print_error(f"{path}: {problem}")
    if not found.passed:
        raise typer.Exit(1)


def _print(plan: Plan, found: Verification, shown: list[AgentGuarantee], *, as_json: bool) -> None:
    epsilons, deltas = plan.budget.epsilons(plan.num_agents), plan.budget.deltas(plan.num_agents)
    names = plan.network.agent_names
    remark = f"gap {found.gap:.2g}"
    print_result(
        f"plan {fingerprint(plan).hex()[:16]}: {'verified' if found.passed else 'BROKEN'}",
        [
            *plan_facts(plan, found.value, found.lower_bound, remark),
            Fact("passed", found.passed),
            Fact("problems", found.problems),
            Fact("gap", found.gap),
            Fact("epsilon", plan.budget.epsilon),
            Fact("delta", plan.budget.delta),
            Fact("unit", plan.budget.unit),
            Fact(
                "agents",
                [
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
            ),
        ],
        as_json=as_json,
    )
    if not as_json:
        _print_guarantees(plan, shown)


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
    columns: list[Column[dict[str, Any]]] = [
        Column("", lambda row: names[row["agent"]], "agent"),
        Column("", lambda row: names[row["reaches"]], "must reach"),
        Column("", lambda row: row["address"] or "?", "at"),
        Column("", lambda row: row["for"], "for"),
    ]
    print_rows("connections that firewalls must allow", columns, rows)
    print_note(
        f"agent {label_agent(names, host)} opens the store (--store): the first agent that accepts "
        "connections"
    )
    if any(row["address"] is None for row in rows):
        print_note("? is an address that the roster does not have: give it there, or to --listen")


def _print_guarantees(plan: Plan, shown: list[AgentGuarantee]) -> None:
    """Print each agent's ε, or on a large network those of all agents with one promise together."""
    epsilons, deltas = plan.budget.epsilons(plan.num_agents), plan.budget.deltas(plan.num_agents)
    names = plan.network.agent_names
    rows: dict[object, list[AgentGuarantee]] = {}
    for g in shown:
        is_alone = len(shown) <= _MOST_ROWS
        rows.setdefault(g.agent if is_alone else plan.budget.of_agent(g.agent), []).append(g)

    def name(own: list[AgentGuarantee]) -> str:
        return list_agents([label_agent(names, g.agent) for g in own]).removeprefix("agent ")

    def worst(own: list[AgentGuarantee]) -> AgentGuarantee:
        return max(own, key=lambda g: g.epsilon)

    columns: list[Column[list[AgentGuarantee]]] = [
        Column("", name, "agent"),
        Column("", lambda own: worst(own).epsilon, "largest ε", round_up),
        Column("", lambda own: epsilons[own[0].agent], "promised", write_exactly),
        Column("", lambda own: deltas[own[0].agent], "at δ", write_exactly),
        Column("", lambda own: [g.precision for g in own], "[R⁻¹]_ii", round_up_range),
        Column("", lambda own: describe_coalition(worst(own).worst_coalition, names), "against"),
    ]
    print_rows(f"ε for {plan.budget.queries[0].protects}, recomputed", columns, list(rows.values()))
    if len(rows) < len(shown):
        print_note("--agent NAME shows one agent, and --json all")
