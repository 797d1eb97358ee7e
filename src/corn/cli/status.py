"""``corn status``: the agents of a run under way, from their files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corn.cli.options import JsonOption
from corn.cli.output import print_facts, print_json, print_note, print_table
from corn.errors import FileFormatError
from corn.privacy.rounding import round_up, write_exactly

if TYPE_CHECKING:  # torch takes seconds to import
    from corn.distributed.state import AgentState, Condition

EXAMPLE = "corn status out/run"
_COLUMNS = (
    "agent",
    "step",
    "steps/min",
    "ε at most",
    "promised",
    "at δ",
    "releases left",
    "neighbours",
    "lost",
    "MB sent",
    "state",
)


def status(
    out: Annotated[Path, typer.Argument(help="Folder of the run, as given to --out.")],
    json: JsonOption = False,
) -> None:
    """Show how far each agent of a run is; exit 1 if one failed or its state is stale."""
    from corn.distributed.state import has_ended, judge_condition, read_states

    if not out.is_dir():
        raise FileFormatError(f"{out}: no such folder")
    found = read_states(out)
    if not found:
        raise FileFormatError(
            f"{out}: no agent of this user has begun to train here; the log of each agent is in "
            "private/agent-I"
        )
    conditions = {
        agent: judge_condition(state, is_gone=has_ended(folder))
        for agent, (state, folder) in found.items()
    }
    states = [state for state, _ in found.values()]
    if json:
        print_json(
            {
                "agents": [
                    {**asdict(state), "condition": conditions[state.agent].text} for state in states
                ]
            }
        )
    else:
        _print(states, conditions)
    # Agents on other hosts, or agents that have not begun.
    missing = sorted(set(range(max(state.num_agents for state in states))) - found.keys())
    if missing and not json:
        print_note(f"no state here of agents {', '.join(map(str, missing))}")
    if any(condition.needs_action for condition in conditions.values()):
        raise typer.Exit(1)


def _print(states: list[AgentState], conditions: dict[int, Condition]) -> None:
    first = states[0]
    print_facts(
        f"plan {first.plan[:16]}, {first.num_agents} agents",
        [
            ("ε is for", first.protects),
            ("against", first.adversary),
            *([("simulated", first.simulation)] if first.simulation else []),
        ],
    )
    print_table(
        "agents here",
        _COLUMNS,
        [
            [
                str(state.agent),
                f"{state.step}/{state.num_steps}",
                f"{state.steps_per_minute:.0f}",
                "rehearsal" if state.epsilon is None else round_up(state.epsilon),
                write_exactly(state.promised_epsilon),
                write_exactly(state.delta),
                str(state.releases_left),
                ", ".join(map(str, state.neighbours)) or "none",
                ", ".join(state.lost) or "none",
                f"{state.bytes_sent / 1e6:.1f}",
                conditions[state.agent].text,
            ]
            for state in states
        ],
    )
