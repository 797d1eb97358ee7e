"""Keys of an agent for a run: their files, the release ledger, seeds of groups.

The ledger lies beside the key, not beside results: a second run of the same plan with the same key
must find what was released before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from corn.distributed.rendezvous import Rendezvous
from corn.errors import FileFormatError, InvalidArgumentError
from corn.files import require_private
from corn.noise import (
    Owner,
    ReleaseLedger,
    Roster,
    Secret,
    SecureSource,
    SeedDelivery,
    Site,
    agent_keys,
    generate_identity,
    list_used_plans,
    load_identity,
    load_roster,
    pin_roster,
    record_use,
    save_identity,
    save_roster,
)
from corn.noise.ledger import explain_missing, ledger_path
from corn.noise.stream import decode_fields, encode_fields
from corn.plan import Plan, fingerprint
from corn.privacy.composition import PlanTerms
from corn.topology.graphs import look_up_agents
from corn.transport import Credentials


def require_private_keys(folder: Path, agent: int) -> None:
    """Raise unless only the owner can use the folder of keys, and the agent's key and ledgers."""
    require_private(folder)
    for path in (folder / f"agent-{agent}.key", *folder.glob(f"agent-{agent}-*.ledger")):
        require_private(path)


def make_source(
    credentials: Credentials,
    plan: Plan,
    members: tuple[int, ...],
    group_seeds: Mapping[int, Secret] | None = None,
) -> SecureSource:
    """Return an agent's noise source under a plan for ``members``, by numbers of the roster."""
    # Keys depend on the plan's fingerprint: under a new plan for survivors all streams are new,
    # though the nonce of the run stays.
    keys = agent_keys(
        credentials.identity,
        members.index(credentials.agent),
        seed_groups=plan.decomposition.seed_groups,
        roster=Roster(tuple(credentials.roster.public_key(member) for member in members)),
        plan_fingerprint=fingerprint(plan),
        group_seeds=group_seeds or {},
    )
    return SecureSource(keys)


def load_credentials(
    folder: Path | str, agent: int | str, num_agents: int, *, pins: bool = True
) -> Credentials:
    """Return an agent's identity and all public keys, checked against each other.

    The roster must be the one that the key was used with before, or follow from it, unless ``pins``
    is False.
    """
    folder = Path(folder)
    if isinstance(agent, str):
        names = load_roster(folder / "roster.json").names
        (agent,) = look_up_agents(names, [agent], argument="agent")
    if not 0 <= agent < num_agents:
        raise InvalidArgumentError(f"agent must be from 0 to {num_agents - 1}, found {agent}")
    key = folder / f"agent-{agent}.key"
    # Modes first: a key that others could read must not be used, even if it is valid.
    require_private_keys(folder, agent)
    identity = load_identity(key)
    roster = load_roster(folder / "roster.json")
    if roster.num_agents != num_agents:
        why = f"{folder / 'roster.json'}: of {roster.num_agents} agents, the plan has {num_agents}"
        raise FileFormatError(why)
    # With another agent's key the pair keys would not match, and noise would not cancel.
    credentials = Credentials(agent, identity, roster)
    # After the check of the key, so that a wrong roster is never remembered as the right one.
    if pins:
        pin_roster(roster, key)
    return credentials


def open_ledger(
    folder: Path, agent: int, plan: Plan, *, precision: float, continues: bool = False
) -> ReleaseLedger:
    """Open the ledger of an agent under a plan, and record in the agent's key that it exists."""
    key = folder / f"agent-{agent}.key"
    plan_fingerprint = fingerprint(plan)
    path = ledger_path(folder, agent, plan_fingerprint.hex())
    # A new ledger in its place would count from zero, and the plan could be released again.
    if not path.exists() and plan_fingerprint.hex() in list_used_plans(key):
        raise FileFormatError(explain_missing(path))
    ledger = ReleaseLedger.open(
        path,
        plan_fingerprint=plan_fingerprint,
        agent=agent,
        terms=PlanTerms(plan.budget.of_agent(agent), plan.threat.max_colluders),
        precision=precision,
        continues=continues,
    )
    try:
        # After the ledger is there, or a crash would look like a lost one; before any release.
        record_use(key, plan_fingerprint)
    except BaseException:
        ledger.close()
        raise
    return ledger


def make_keys(folder: Path, num_agents: int, names: Sequence[str] = ()) -> bool:
    """Make the keys of all agents for a run on one machine, if there are none; return if made."""
    roster = folder / "roster.json"
    # Existing keys are never replaced: others may hold the roster that belongs to them.
    if roster.exists():
        return False
    if any(folder.glob("agent-*.key")):
        why = f"{roster}: is missing: make it from all files agent-I.pub with corn keys roster"
        raise FileFormatError(why)
    # Closed from the start: a chmod afterwards would leave a moment in which keys can be read.
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    identities = [generate_identity() for _ in range(num_agents)]
    for agent, identity in enumerate(identities):
        save_identity(identity, folder / f"agent-{agent}.key")
    # Last, as its presence means that all keys are there, even after a crash.
    sites = tuple(Site(name=name) for name in names)
    save_roster(Roster(tuple(own.public_key for own in identities), sites=sites), roster)
    return True


def share_group_seeds(rendezvous: Rendezvous, plan: Plan, *, run_nonce: bytes) -> dict[int, Secret]:
    """Return the seeds of the groups of three and more that this agent is in, new in each run.

    The lowest member of a group makes its seed and seals it to each other member.
    """
    agent = rendezvous.agent
    groups = {
        number: Owner(group, number)
        for number, group in enumerate(plan.decomposition.seed_groups)
        if len(group) > 2
    }
    if not groups:
        return {}
    own = rendezvous.credentials
    delivery = SeedDelivery(own.identity, agent, own.roster, fingerprint(plan), run_nonce)
    seeds = {n: Secret.random() for n, group in groups.items() if group.members[0] == agent}
    packages = [
        delivery.seal(seed, groups[number], receiver)
        for number, seed in seeds.items()
        for receiver in groups[number].members[1:]
    ]
    found = rendezvous.exchange("seeds", encode_fields(*packages))
    arrived = {sender: iter(decode_fields(message) or []) for sender, message in found.items()}
    # In the order in which they were packed: by the numbers of groups, and then of members.
    for number, group in groups.items():
        for receiver in group.members[1:]:
            package = next(arrived[group.members[0]], b"")
            if receiver == agent:
                seeds[number] = delivery.open(package, group)
    return seeds
