"""``corn keys``: private keys, the roster of public keys, and the ledgers kept beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from corn.cli.options import JsonOption, refuse_given
from corn.cli.output import (
    Column,
    print_error,
    print_facts,
    print_json,
    print_note,
    print_rows,
    progress,
)
from corn.errors import FileFormatError, InvalidArgumentError
from corn.files import require_private
from corn.learn.consortium import load_consortium
from corn.noise import (
    Roster,
    Site,
    generate_identity,
    load_roster,
    read_history,
    rotate_key,
    save_identity,
    save_roster,
)
from corn.noise.ledger import ReleaseHistory, find_agents
from corn.plan import load_plan
from corn.privacy.budget import describe_adversary
from corn.privacy.composition import compose_expenses
from corn.privacy.rounding import round_up, round_up_range, write_exactly
from corn.topology.graphs import look_up_agents

EXAMPLE = "corn keys make keys --agent 3"
# The options of each action; any other would be ignored, and is refused.
_OPTIONS = {
    "make": ("agent", "agents"),
    "rotate": ("agent",),
    "roster": ("out",),
    "show": (),
    "ledger": ("agent", "delta"),
}
_ALL_OPTIONS = ("agent", "agents", "out", "delta")
_NAMING = (".corn", ".toml")


def keys(
    context: typer.Context,
    action: Annotated[
        Literal["make", "rotate", "roster", "show", "ledger"],
        typer.Argument(
            help="make: an agent's private key (mode 0600, never printed) and its public key. "
            "rotate: replace an agent's key by a new one that the old one signs, in roster.json of "
            "the folder. roster: collect all public keys in one file, with the addresses of a "
            "consortium file. show: print the fingerprint of roster.json, which all sites compare. "
            "ledger: add up the releases of each agent under all plans."
        ),
    ],
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER...",
            help="Folder of keys, and perhaps a plan (.corn) or a consortium file (.toml): it has "
            "the names by which --agent calls agents, for the roster too, and addresses. ledger "
            "takes several folders: agents of the same number in them count as one, and must have "
            "the same data.",
        ),
    ],
    agent: Annotated[
        str | None,
        typer.Option(
            help="Number of the agent, or its name in the roster or the file (not for roster)."
        ),
    ] = None,
    agents: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of agents N, for keys 0 … N−1 on one machine (for make only)."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the roster (for roster only).")] = None,
    delta: Annotated[
        float, typer.Option(help="δ at which every ε is computed (for ledger only).")
    ] = 1e-5,
    json: JsonOption = False,
) -> None:
    """Make keys and the roster, replace a key, or add up ledgers; exit 1 if a ledger is lost."""
    others = [name for name in _ALL_OPTIONS if name not in _OPTIONS[action]]
    refuse_given(context, others, f"does not belong to {action}")
    files = [path for path in folders if path.suffix in _NAMING]
    rest = [path for path in folders if path not in files]
    if (len(rest) != 1 and (action != "ledger" or not rest)) or len(files) > 1:
        raise typer.BadParameter(
            f"{action} takes one folder and at most one plan or consortium file",
            param_hint="FOLDER",
        )
    folder = rest[0]
    sites = _read_sites((*files, folder / "roster.json")[0])
    names = [site.name or str(number) for number, site in enumerate(sites)]
    number = None if agent is None else _read_agent(agent, names)
    if action == "ledger":
        _add_up(rest, number, delta, names, json=json)
    elif action == "roster":
        if out is None:
            raise typer.BadParameter("give a file for the roster", param_hint="--out")
        _collect_roster(folder, out, sites if files else (), json=json)
    elif action == "show":
        found = load_roster(folder / "roster.json")
        _print_fingerprint(found, "compare it with the owners of all agents before the first run")
        if json:
            print_json({"agents": found.num_agents, "fingerprint": found.fingerprint.hex()})
    elif action == "rotate":
        # The old key signs the new one, and only its owner has it.
        if number is None:
            raise typer.BadParameter("each owner replaces its own key", param_hint="--agent")
        _rotate(folder, number, json=json)
    else:
        if (number is None) == (agents is None):
            raise typer.BadParameter("give either --agent or --agents")
        _make(folder, range(agents) if agents is not None else [number or 0], json=json)


def _read_sites(path: Path) -> tuple[Site, ...]:
    """Return the names and addresses of a consortium file, a plan or a roster, if that exists."""
    if path.suffix == ".toml":
        return tuple(
            Site(own.accepts, own.address if own.accepts else None, own.name)
            for own in load_consortium(path).sites
        )
    if path.suffix == ".corn":
        network = load_plan(path).network
        return tuple(Site(name=name if network.has_names else None) for name in network.agent_names)
    return load_roster(path).sites if path.exists() else ()


def _read_agent(text: str, names: Sequence[str]) -> int:
    """Return the number of an agent, of which nothing else may be known yet."""
    if names:
        return look_up_agents(names, [text], argument="--agent")[0]
    # Five digits, because Python refuses to read integers of thousands of them.
    if not text.isdecimal() or len(text) > 5:
        raise typer.BadParameter(
            f"must be the number of an agent, found {text!r}; for a name add the plan or the "
            "consortium file",
            param_hint="--agent",
        )
    return int(text)


def _make(keys: Path, numbers: Sequence[int], *, json: bool) -> None:
    # Private keys are in it, so others should not even see their names.
    keys.mkdir(parents=True, exist_ok=True, mode=0o700)
    # mkdir leaves the mode of a folder that exists: one that others can read is refused.
    require_private(keys)
    # All names are checked before the first key is written, so that a failure leaves no new keys.
    for number in numbers:
        if (keys / f"agent-{number}.key").exists():
            raise FileFormatError(
                f"{keys / f'agent-{number}.key'}: exists; keys are never overwritten"
            )
    public_keys = {}
    for number in numbers:
        identity = generate_identity()
        save_identity(identity, keys / f"agent-{number}.key")
        public = keys / f"agent-{number}.pub"
        # After the private key: a public key without its private one would enter a roster for
        # nothing.
        public.write_text(identity.public_key.hex() + "\n", encoding="ascii")
        public_keys[str(number)] = identity.public_key.hex()
    # One line for any number of agents.
    first, last = (keys / f"agent-{number}" for number in (numbers[0], numbers[-1]))
    if first == last:
        print_note(f"wrote {first}.key (keep it secret) and {first}.pub (share it)")
    else:
        print_note(
            f"wrote {first}.key to {last}.key (keep them secret) and {first}.pub to {last}.pub "
            "(share them)"
        )
    if json:
        print_json({"keys": str(keys), "public_keys": public_keys})


def _rotate(keys: Path, agent: int, *, json: bool) -> None:
    roster = rotate_key(keys, agent)
    print_note(
        f"replaced {keys / f'agent-{agent}.key'}; the old key is kept with the ending .old, "
        "copy roster.json to all agents"
    )
    _print_fingerprint(roster, "agents that know the old roster accept it")
    if json:
        print_json({"keys": str(keys), "fingerprint": roster.fingerprint.hex()})


def _collect_roster(keys: Path, out: Path, sites: tuple[Site, ...], *, json: bool) -> None:
    # By number: by name, agent-10 would come before agent-2, and agents would get others' keys.
    found = sorted(keys.glob("agent-*.pub"), key=lambda path: _number(path))
    # All of them, without gaps: a missing key would shift the agents after it.
    if [_number(path) for path in found] != list(range(len(found))) or not found:
        names = ", ".join(path.name for path in found) or "none"
        raise FileFormatError(
            f"{keys}: must contain public keys agent-0.pub, agent-1.pub, …, found {names}"
        )
    made = Roster(tuple(_read_public_key(path) for path in found), sites=sites)
    save_roster(made, out)
    print_note(f"wrote {out} with {len(found)} public keys")
    _print_fingerprint(made, "compare it with the owners of all agents before the first run")
    if json:
        print_json(
            {
                "roster": str(out),
                "fingerprint": made.fingerprint.hex(),
                "public_keys": [key.hex() for key in made.public_keys],
            }
        )


def _print_fingerprint(made: Roster, advice: str) -> None:
    """Print the fingerprint of a roster in groups that people can read out to each other."""
    digits = made.fingerprint.hex()
    # All 256 bits, as a shortened fingerprint could be matched by a search.
    groups = " ".join(digits[at : at + 4] for at in range(0, len(digits), 4))
    print_note(f"fingerprint {groups}: {advice}")


def _number(path: Path) -> int:
    number = path.stem.removeprefix("agent-")
    if not number.isdecimal():
        raise FileFormatError(f"{path}: a public key's file must be named agent-NUMBER.pub")
    return int(number)


def _read_public_key(path: Path) -> bytes:
    try:
        return bytes.fromhex(path.read_text(encoding="ascii").strip())
    except ValueError as error:
        raise FileFormatError(f"{path}: not a public key in hexadecimal") from error


def _add_up(
    keys: Sequence[Path], agent: int | None, delta: float, names: Sequence[str], *, json: bool
) -> None:
    """Add up the releases of each agent under all plans; exit 1 if a ledger is lost or damaged."""
    agents = sorted({number for folder in keys for number in find_agents(folder)})
    if agent is not None and agent not in agents:
        raise InvalidArgumentError(
            f"--agent must be one of {', '.join(map(str, agents))} for these keys, found {agent}"
        )
    shown = agents if agent is None else [agent]
    found = [
        _history_facts(read_history(keys, number), delta)
        for number in progress(shown, "adding up releases")
    ]
    if json:
        print_json({"delta": delta, "agents": found})
    else:
        _print_ledgers(found, write_exactly(delta), names)
    # After the tables, so that what is known is shown in full and the last lines say what is not.
    problems = [problem for own in found for problem in own["problems"]]
    for problem in problems:
        print_error(problem)
    if problems:
        raise typer.Exit(1)


def _history_facts(history: ReleaseHistory, delta: float) -> dict[str, Any]:
    plans = []
    for record in history.records:
        expense = record.expense
        budget = expense.terms.budget
        colluders = expense.terms.max_colluders
        plans.append(
            {
                "plan": record.plan,
                "ledger": record.path,
                "unit": budget.unit,
                "protects": f"{expense.query.protects} ({expense.query.recipe})",
                "max_colluders": colluders,
                "adversary": describe_adversary(colluders),
                "releases": expense.num_releases,
                "planned_steps": budget.num_steps,
                "precision": expense.precision,
                "epsilon": compose_expenses([expense], delta, unit=budget.unit).epsilon,
                "promised_epsilon": budget.epsilon,
                "promised_delta": budget.delta,
                "is_running": record.is_running,
            }
        )
    totals = {"total": history.compose(delta), "agent_total": history.compose(delta, unit="agent")}
    return {
        "agent": history.agent,
        "plans": plans,
        **{name: asdict(total) | {"statement": total.describe()} for name, total in totals.items()},
        "is_lower_bound": bool(history.problems),
        "problems": history.problems,
    }


def _print_ledgers(agents: list[dict[str, Any]], delta: str, names: Sequence[str]) -> None:
    """Print what is known of all agents, from the facts of each."""

    def name(agent: int) -> str:
        # A folder may have the ledger of an agent that its roster does not have.
        return names[agent] if agent < len(names) else str(agent)

    plans = [(own["agent"], plan) for own in agents for plan in own["plans"]]
    plan_columns: list[Column[tuple[int, dict[str, Any]]]] = [
        Column("", lambda row: name(row[0]), "agent"),
        Column("", lambda row: row[1]["plan"][:16], "plan"),
        Column("", lambda row: row[1]["unit"], "unit"),
        Column("", lambda row: row[1]["max_colluders"], "insiders"),
        Column("", lambda row: f"{row[1]['releases']} of {row[1]['planned_steps']}", "releases"),
        Column("", lambda row: row[1]["epsilon"], "ε alone", round_up),
        Column("", lambda row: row[1]["promised_epsilon"], "promised", round_up_range),
        Column("", lambda row: "running" if row[1]["is_running"] else "", "state"),
    ]
    print_rows(
        f"releases under each plan, and their ε by themselves at δ = {delta}", plan_columns, plans
    )
    meanings = {
        plan["plan"][:16]: f"{plan['protects']}, against {plan['adversary']}" for _, plan in plans
    }
    if meanings:
        print_facts("what each plan protects", meanings.items())
    # A lost ledger hides releases, so the sum of the others is no upper bound.
    columns: list[Column[dict[str, Any]]] = [
        Column("", lambda own: name(own["agent"]), "agent"),
        Column(
            "",
            lambda own: "at least " * own["is_lower_bound"] + round_up(own["total"]["epsilon"]),
            "total ε",
        ),
        Column("", lambda own: own["total"]["unit"], "unit"),
        Column("", lambda own: own["total"]["max_colluders"] or 0, "insiders"),
        Column("", lambda own: own["agent_total"]["epsilon"], "ε of whole data", round_up),
    ]
    print_rows(f"total ε of all plans at δ = {delta}", columns, agents)
    worst = max((own["total"] for own in agents), key=lambda total: total["epsilon"])
    print_note(f"the largest total is {worst['statement']}")
    if any(math.isinf(own["agent_total"]["epsilon"]) for own in agents):
        print_note(
            "a plan for samples promises nothing for an agent's whole data, so no total does"
        )
    print_note("releases of the same data under keys in other folders are not counted")
