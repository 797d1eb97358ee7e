"""``corn keys``: private keys, the roster of public keys, and the ledgers kept beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import typer

from corn.cli.options import JSON, argument, option, refuse_given
from corn.cli.output import print_error, print_facts, print_json, print_note, print_rows, progress
from corn.errors import FileFormatError, InvalidArgumentError, list_some
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
from corn.privacy.rounding import round_up, write_exactly
from corn.topology.graphs import look_up_agents

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
    action: Literal["make", "rotate", "roster", "show", "ledger"] = argument(
        "make: a private and a public key. rotate: replace a key by a new one that the old one "
        "signs, in roster.json. roster: collect all public keys in one file. show: print the "
        "fingerprint of roster.json, which all sites compare. ledger: add up all releases."
    ),
    folders: list[Path] = argument(
        "Folder of keys, and perhaps a plan (.corn) or a consortium file (.toml), which has names "
        "and addresses. ledger takes several folders for the same data.",
        metavar="FOLDER...",
    ),
    agent: str | None = option(
        "Number of the agent, or its name in the roster or the file (not for roster)."
    ),
    agents: int | None = option(
        "Number of agents N, for keys 0 … N−1 on one machine (for make only).", min=1
    ),
    out: Path | None = option("File for the roster (for roster only)."),
    delta: float = option("δ at which every ε is computed (for ledger only).", default=1e-5),
    json: bool = JSON,
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
    facts: dict[str, Any] = {"keys": str(folder)}
    if action == "ledger":
        _add_up(rest, number, delta, names, json=json)
        return
    if action == "make":
        if (number is None) == (agents is None):
            raise typer.BadParameter("give either --agent or --agents")
        facts["public_keys"] = _make(folder, range(agents) if agents else [number or 0])
    else:
        if action == "rotate":
            # The old key signs the new one, and only its owner has it.
            if number is None:
                raise typer.BadParameter("each owner replaces its own key", param_hint="--agent")
            made = rotate_key(folder, number)
            print_note(
                f"replaced {folder / f'agent-{number}.key'}; the old key is kept with the ending "
                ".old, copy roster.json to all agents"
            )
        elif action == "roster":
            if out is None:
                raise typer.BadParameter("give a file for the roster", param_hint="--out")
            made = Roster(_read_public_keys(folder), sites=sites if files else ())
            save_roster(made, out)
            facts["roster"] = str(out)
            print_note(f"wrote {out} with {made.num_agents} public keys")
        else:
            made = load_roster(folder / "roster.json")
        digits = made.fingerprint.hex()
        # All 256 bits, as a shortened fingerprint could be matched by a search, in groups that
        # people can read out to each other.
        groups = " ".join(digits[at : at + 4] for at in range(0, len(digits), 4))
        print_note(f"fingerprint {groups}: compare it with the owners of all agents")
        facts |= {
            "agents": made.num_agents,
            "fingerprint": digits,
            "public_keys": [key.hex() for key in made.public_keys],
        }
    if json:
        print_json(facts)


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


def _make(keys: Path, numbers: Sequence[int]) -> dict[str, str]:
    """Write new keys, and return the public ones by number."""
    # Private keys are in it, so others should not even see their names.
    keys.mkdir(parents=True, exist_ok=True, mode=0o700)
    # mkdir leaves the mode of a folder that exists: one that others can read is refused.
    require_private(keys)
    # All names are checked before the first key is written, so that a failure leaves no new keys.
    for number in numbers:
        if (file := keys / f"agent-{number}.key").exists():
            raise FileFormatError(f"{file}: exists; keys are never overwritten")
    public_keys = {}
    for number in numbers:
        identity = generate_identity()
        save_identity(identity, keys / f"agent-{number}.key")
        public_keys[str(number)] = identity.public_key.hex()
        # After the private key: a public key without its private one would enter a roster for
        # nothing.
        public = keys / f"agent-{number}.pub"
        public.write_text(identity.public_key.hex() + "\n", encoding="ascii")
    written = f"agent-{list_some(numbers)}"
    print_note(f"wrote {keys / written}: keep .key secret, and share .pub")
    return public_keys


def _read_public_keys(keys: Path) -> tuple[bytes, ...]:
    """Return the public keys of a folder by number."""
    count = len(list(keys.glob("agent-*.pub")))
    # All of them, without gaps: a missing key would shift the agents after it.
    files = [keys / f"agent-{number}.pub" for number in range(count)]
    missing = [path.name for path in files or [keys / "agent-0.pub"] if not path.exists()]
    if missing:
        raise FileFormatError(
            f"{keys}: must contain public keys agent-0.pub, agent-1.pub, …; {missing[0]} is missing"
        )
    found = []
    for path in files:
        try:
            found.append(bytes.fromhex(path.read_text(encoding="ascii").strip()))
        except ValueError as error:
            raise FileFormatError(f"{path}: not a public key in hexadecimal") from error
    return tuple(found)


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
        expense, terms = record.expense, record.expense.terms
        plans.append(
            {
                "plan": record.plan,
                "ledger": record.path,
                "unit": terms.budget.unit,
                "protects": f"{expense.query.protects} ({expense.query.recipe})",
                "max_colluders": terms.max_colluders,
                "adversary": describe_adversary(terms.max_colluders),
                "releases": expense.num_releases,
                "planned_steps": terms.budget.num_steps,
                "precision": expense.precision,
                "epsilon": compose_expenses([expense], delta, unit=terms.budget.unit).epsilon,
                "promised_epsilon": terms.budget.epsilon,
                "promised_delta": terms.budget.delta,
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
    plans, totals = [], []
    for own in agents:
        # A folder may have the ledger of an agent that its roster does not have.
        agent = names[own["agent"]] if own["agent"] < len(names) else str(own["agent"])
        for plan in own["plans"]:
            state = "running" if plan["is_running"] else ""
            releases = f"{plan['releases']} of {plan['planned_steps']}"
            changed = {"plan": plan["plan"][:16], "releases": releases, "state": state}
            plans.append({**plan, "agent": agent, **changed})
        # A lost ledger hides releases, so the sum of the others is no upper bound.
        about = "at least " * own["is_lower_bound"]
        whole = about + round_up(own["agent_total"]["epsilon"])
        total = {"epsilon": about + round_up(own["total"]["epsilon"])}
        totals.append({"agent": agent, **own["total"], **total, "epsilon_of_whole_data": whole})
    columns = ["agent", "plan", "unit", "max_colluders", "releases", "epsilon"]
    columns += ["promised_epsilon", "promised_delta", "state"]
    title = f"releases under each plan, and their ε by themselves at δ = {delta}"
    print_rows(title, plans, columns)
    meanings = {plan["plan"]: f"{plan['protects']}, against {plan['adversary']}" for plan in plans}
    print_facts("what each plan protects", meanings.items())
    columns = ["agent", "epsilon", "unit", "max_colluders", "epsilon_of_whole_data"]
    print_rows(f"total ε of all plans at δ = {delta}", totals, columns)
    worst = max((own["total"] for own in agents), key=lambda total: total["epsilon"])
    if not any(own["is_lower_bound"] for own in agents):
        print_note(f"the largest total is {worst['statement']}")
    if any(math.isinf(own["agent_total"]["epsilon"]) for own in agents):
        print_note(
            "a plan for samples promises nothing for an agent's whole data, so no total does"
        )
    print_note("releases of the same data under keys in other folders are not counted")
