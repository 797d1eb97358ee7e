"""``corn status``: the agents of a run under way, from their files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corn.cli.options import JsonOption
from corn.cli.output import Column, print_facts, print_json, print_rows, print_table
from corn.errors import FileFormatError
from corn.privacy.rounding import round_up, write_exactly

if TYPE_CHECKING:
    from corn.distributed.status import AgentState

EXAMPLE = "corn status out/run"


def status(
    out: Annotated[Path, typer.Argument(help="Folder of the run, as given to --out.")],
    json: JsonOption = False,
) -> None:
    """Show how far each agent of a run is; exit 1 if one here failed or its state is stale."""
    # Here, as torch takes seconds to import.
    from corn.distributed.status import judge_condition, read_states

    if not out.is_dir():
        raise FileFormatError(f"{out}: no such folder")
    found = read_states(out)
    if not found:
        raise FileFormatError(
            f"{out}: no agent of this user has begun to train here; the log of each agent is in "
            "private/agent-I"
        )
    states = [(state, judge_condition(state)) for state in found.values()]
    first = states[0][0]
    if json:
        print_json({"agents": [{**asdict(own), "condition": now.text} for own, now in states]})
    else:
        print_facts(
            f"plan {first.plan[:16]}, {first.num_agents} agents",
            [
                ("ε is for", first.protects),
                ("against", first.adversary),
                *([("simulated", first.simulation)] if first.simulation else []),
            ],
        )
        columns: list[Column[Any]] = [
            Column("", lambda row: row[0].name(row[0].agent), "agent"),
            Column("", lambda row: f"{row[0].step}/{row[0].num_steps}", "step"),
            Column("", lambda row: row[0].steps_per_minute, "steps/min", "{:.0f}".format),
            Column("", lambda row: row[0].epsilon, "ε at most", round_up),
            Column("", lambda row: row[0].promised_epsilon, "promised", write_exactly),
            Column("", lambda row: row[0].delta, "at δ", write_exactly),
            Column("", lambda row: row[0].releases_left, "releases left"),
            Column("", lambda row: _list(row[0], row[0].neighbours), "neighbours"),
            Column("", lambda row: _list(row[0], row[0].lost), "lost"),
            Column("", lambda row: row[0].bytes_sent / 1e6, "MB sent", "{:.1f}".format),
            Column("", lambda row: row[1].text, "state"),
        ]
        print_rows("agents here", columns, states)
        newest = max((own for own, _ in states), key=lambda own: own.updated)
        others = {a: text for a, text in newest.describe_agents().items() if a not in found}
        if others:
            print_table(
                f"agents elsewhere, as agent {newest.name(newest.agent)} knows them",
                ("agent", "state"),
                [[newest.name(agent), text] for agent, text in others.items()],
            )
    if any(now.needs_action for _, now in states):
        raise typer.Exit(1)


def _list(state: AgentState, agents: Iterable[int]) -> str:
    return ", ".join(map(state.name, agents)) or "none"
