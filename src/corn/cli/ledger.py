"""``corn ledger``: add up everything that was released of each agent's data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from corn.cli.options import JsonOption
from corn.cli.output import print_error, print_facts, print_json, print_note, print_table, progress
from corn.covariance import ThreatModel
from corn.errors import InvalidArgumentError
from corn.noise import HistoryLoss, compose_history, read_history
from corn.noise.ledger import LedgerRecord, describe_total, find_agents
from corn.privacy.composition import Expense, TotalLoss
from corn.privacy.rounding import round_up, write_exactly

EXAMPLE = "corn ledger plan.keys"


def ledger(
    keys: Annotated[
        list[Path],
        typer.Argument(
            metavar="KEYS...",
            help="Folders of keys and ledgers. Agents of the same number in several folders count "
            "as one: they must have the same data.",
        ),
    ],
    agent: Annotated[
        int | None, typer.Option(min=0, help="Number of the only agent to show.")
    ] = None,
    delta: Annotated[float, typer.Option(help="δ at which every ε is computed.")] = 1e-5,
    json: JsonOption = False,
) -> None:
    """Add up the releases of each agent under all plans; exit 1 if a ledger is lost or damaged."""
    agents = sorted({number for folder in keys for number in find_agents(folder)})
    if agent is not None and agent not in agents:
        raise InvalidArgumentError(
            f"--agent must be one of {', '.join(map(str, agents))} for these keys, found {agent}"
        )
    shown = agents if agent is None else [agent]
    losses = [
        compose_history(read_history(keys, number), delta)
        for number in progress(shown, "adding up releases")
    ]
    if json:
        print_json({"delta": delta, "agents": [_facts(loss) for loss in losses]})
    else:
        _print(losses, delta)
    # After the tables, so that what is known is shown in full and the last lines say what is not.
    problems = [problem for loss in losses for problem in loss.history.problems]
    for problem in problems:
        print_error(problem)
    if problems:
        raise typer.Exit(1)


def _facts(loss: HistoryLoss) -> dict[str, object]:
    return {
        "agent": loss.history.agent,
        "plans": [
            _plan_facts(record, alone)
            for record, alone in zip(loss.history.records, loss.alone, strict=True)
        ],
        "total": _total_facts(loss.total),
        "agent_total": _total_facts(loss.agent_total),
        "is_lower_bound": loss.is_lower_bound,
        "problems": loss.history.problems,
    }


def _plan_facts(record: LedgerRecord, alone: TotalLoss) -> dict[str, object]:
    expense = record.content.expense
    budget = expense.terms.budget
    return {
        "plan": record.content.plan,
        "ledger": record.path,
        "unit": budget.unit,
        "protects": _describe_query(expense),
        "max_colluders": expense.terms.max_colluders,
        "adversary": _describe_adversary(expense.terms.max_colluders),
        "releases": expense.num_releases,
        "planned_steps": budget.num_steps,
        "precision": expense.precision,
        "epsilon": alone.epsilon,
        "promised_epsilon": budget.epsilon,
        "promised_delta": budget.delta,
        "is_running": record.is_running,
        "is_count_known": record.content.is_known,
    }


def _total_facts(total: TotalLoss) -> dict[str, object]:
    return {
        "epsilon": total.epsilon,
        "delta": total.delta,
        "unit": total.unit,
        "adjacency": total.adjacency,
        "relation": total.relation,
        "max_colluders": total.max_colluders,
        "statement": describe_total(total),
    }


def _print(losses: list[HistoryLoss], delta: float) -> None:
    plans = [
        (loss.history.agent, record, alone)
        for loss in losses
        for record, alone in zip(loss.history.records, loss.alone, strict=True)
    ]
    print_table(
        f"releases under each plan, and their ε by themselves at δ = {write_exactly(delta)}",
        ["agent", "plan", "unit", "insiders", "releases", "ε alone", "promised", ""],
        [
            [
                str(agent),
                record.content.plan[:16],
                alone.unit,
                str(record.content.expense.terms.max_colluders),
                _describe_count(record.content.expense),
                round_up(alone.epsilon),
                round_up(record.content.expense.terms.budget.promise.epsilon),
                _describe_state(record),
            ]
            for agent, record, alone in plans
        ],
    )
    meanings = {
        record.content.plan[:16]: f"{_describe_query(record.content.expense)}, against "
        f"{_describe_adversary(record.content.expense.terms.max_colluders)}"
        for _, record, _ in plans
    }
    if meanings:
        print_facts("what each plan protects", meanings.items())
    # A total for whole data sets says it already.
    is_same = all(loss.total.unit == "agent" for loss in losses)
    whole = "" if is_same else "ε of the agent's whole data"
    print_table(
        f"total ε of all plans at δ = {write_exactly(delta)}",
        ["agent", "total ε", "unit", "insiders", whole],
        [
            [
                str(loss.history.agent),
                # A lost ledger hides releases, so the sum of the others is no upper bound.
                ("at least " if loss.is_lower_bound else "") + round_up(loss.total.epsilon),
                loss.total.unit,
                "" if loss.total.max_colluders is None else str(loss.total.max_colluders),
                _describe_agent_total(loss) if whole else "",
            ]
            for loss in losses
        ],
    )
    worst = max((loss.total for loss in losses), key=lambda total: total.epsilon)
    print_note(f"the largest total is {describe_total(worst)}")
    if any(math.isinf(loss.agent_total.epsilon) for loss in losses):
        print_note(
            "a plan for samples promises nothing for an agent's whole data, so no total does"
        )
    print_note("releases of the same data under keys in other folders are not counted")


def _describe_agent_total(loss: HistoryLoss) -> str:
    return "none" if math.isinf(loss.agent_total.epsilon) else round_up(loss.agent_total.epsilon)


def _describe_count(expense: Expense) -> str:
    return f"{expense.num_releases} of {expense.terms.budget.num_steps}"


def _describe_query(expense: Expense) -> str:
    return f"{expense.query.protects} ({expense.query.recipe})"


def _describe_adversary(max_colluders: int) -> str:
    return ThreatModel(max_colluders).describe()


def _describe_state(record: LedgerRecord) -> str:
    if not record.content.is_known:
        return "damaged, counted in full"
    return "running" if record.is_running else ""
