"""``corn status``: the agents of a run under way, from their files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from corn.cli.options import JSON, argument
from corn.cli.output import print_facts, print_json, print_table
from corn.errors import FileFormatError
from corn.privacy.rounding import round_up, write_exactly


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
    if json:
        print_json({"agents": [{**asdict(own), "condition": now.text} for own, now in states]})
    else:
        lines = [("ε is for", first.protects), ("against", first.adversary)]
        lines += [("simulated", first.simulation)] if first.simulation else []
        print_facts(f"plan {first.plan[:16]}, {first.num_agents} agents", lines)
        columns = ["agent", "step", "steps/min", "ε at most", "promised", "at δ", "releases left"]
        print_table(
            "agents here",
            [*columns, "neighbours", "lost", "MB sent", "state"],
            [
                [
                    own.name(own.agent),
                    f"{own.step}/{own.num_steps}",
                    f"{own.steps_per_minute:.0f}",
                    round_up(own.epsilon),
                    write_exactly(own.promised_epsilon),
                    write_exactly(own.delta),
                    str(own.releases_left),
                    ", ".join(map(own.name, own.neighbours)) or "none",
                    ", ".join(map(own.name, own.lost)) or "none",
                    f"{own.bytes_sent / 1e6:.1f}",
                    now.text,
                ]
                for own, now in states
            ],
        )
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
