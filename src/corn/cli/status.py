"""``corn status``: the agents of a run under way, from their files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from corn.cli.options import JSON, argument
from corn.cli.output import print_facts, print_json, print_rows
from corn.errors import FileFormatError


def status(
    out: Path = argument("Folder of the run, as given to --out."), json: bool = JSON
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
    rows = [{**asdict(own), "condition": now} for own, (now, _) in states]
    if json:
        print_json({"agents": rows})
    else:
        lines = [("ε is for", first.protects), ("against", first.adversary)]
        lines += [("simulated", first.simulation)] if first.simulation else []
        print_facts(f"plan {first.plan[:16]}, {first.num_agents} agents", lines)
        for (own, _), row in zip(states, rows, strict=True):
            row["agent"] = own.name(own.agent)
            row["step"] = f"{own.step}/{own.num_steps}"
            row |= {key: list(map(own.name, row[key])) or "none" for key in ("neighbours", "lost")}
        columns = ["agent", "step", "steps_per_minute", "epsilon", "promised_epsilon", "delta"]
        columns += ["releases_left", "neighbours", "lost", "bytes_sent", "condition"]
        print_rows("agents here, whose ε is at most", rows, columns)
        newest = max((own for own, _ in states), key=lambda own: own.updated)
        others = {a: text for a, text in newest.describe_agents().items() if a not in found}
        if others:
            print_facts(
                f"agents elsewhere, as agent {newest.name(newest.agent)} knows them",
                [(newest.name(agent), text) for agent, text in others.items()],
            )
    if any(needs_action for _, (_, needs_action) in states):
        raise typer.Exit(1)
