"""``corn status``: the agents of a run under way, from their files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from corn.cli.options import JsonOption
from corn.cli.output import print_facts, print_json, print_note, print_table
from corn.errors import FileFormatError

EXAMPLE = "corn status out/run"


def status(
    out: Annotated[Path, typer.Argument(help="Folder of the run, as given to --out.")],
    json: JsonOption = False,
) -> None:
    """Show how far each agent of a run is; exit 1 if one failed or its state is stale."""
    # Here, as torch takes seconds to import.
    from corn.distributed.state import COLUMNS, has_ended, judge_condition, list_cells, read_states

    if not out.is_dir():
        raise FileFormatError(f"{out}: no such folder")
    found = read_states(out)
    if not found:
        raise FileFormatError(
            f"{out}: no agent of this user has begun to train here; the log of each agent is in "
            "private/agent-I"
        )
    states = [
        (state, judge_condition(state, is_gone=has_ended(folder)))
        for state, folder in found.values()
    ]
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
        rows = [[*list_cells(own), now.text] for own, now in states]
        print_table("agents here", [*COLUMNS, "state"], rows)
    # Agents on other hosts, or agents that have not begun.
    missing = sorted(set(range(first.num_agents)) - found.keys())
    if missing and not json:
        print_note(f"no state here of agents {', '.join(map(str, missing))}")
    if any(now.needs_action for _, now in states):
        raise typer.Exit(1)
