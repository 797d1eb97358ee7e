"""An agent's keys for a run: its own files, and the seeds that larger groups share.

``DIR/agent-3.key`` and ``DIR/roster.json`` are made by ``corn keygen`` and ``corn roster``. The
release ledger lies beside the key, not beside results: whoever starts the same plan again with the
same key must find what was released before, and keys and nonces are not handed out with results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from corn.covariance import Decomposition
from corn.distributed.meeting import Meeting
from corn.errors import CornError, FileFormatError
from corn.noise import (
    Delivery,
    Identity,
    Owner,
    ReleaseLedger,
    Roster,
    Secret,
    SecureSource,
    agent_keys,
    check_identity,
    generate_identity,
    load_identity,
    load_roster,
    open_seed,
    owners,
    save_identity,
    save_roster,
    seal_seed,
    simulated_keys,
)
from corn.plan import Plan, fingerprint


def load_keys(folder: Path, agent: int, num_agents: int) -> tuple[Identity, Roster]:
    """An agent's identity and everybody's public keys, checked against each other."""
    try:
        identity = load_identity(folder / f"agent-{agent}.key")
        roster = load_roster(folder / "roster.json")
        if roster.num_agents != num_agents:
            raise FileFormatError(
                f"{folder / 'roster.json'}: of {roster.num_agents} agents, the plan has "
                f"{num_agents}"
            )
        check_identity(identity, agent, roster=roster)
    except CornError as error:
        raise FileFormatError(f"agent {agent}: {error}") from error
    return identity, roster


def choose_folder(plan: Path | None) -> Path:
    """Where keys are unless a folder is named: beside the plan, whatever folder results go to.

    >>> str(choose_folder(Path("plans/ring.corn"))), str(choose_folder(None))
    ('plans/ring.keys', 'corn.keys')
    """
    return Path("corn.keys") if plan is None else plan.with_suffix(".keys")


def make_keys(folder: Path, num_agents: int, *, is_one_machine: bool = True) -> bool:
    """Make the keys of all agents for a run on one machine, unless there are some; say if made."""
    roster = folder / "roster.json"
    if roster.exists():
        return False
    if not is_one_machine or any(folder.glob("agent-*.key")):
        raise FileFormatError(
            f"{roster}: is missing: make it once from everybody's agent-I.pub with corn roster, "
            "and copy it to every host"
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    identities = [generate_identity() for _ in range(num_agents)]
    for agent, identity in enumerate(identities):
        save_identity(identity, folder / f"agent-{agent}.key")
    save_roster(Roster(tuple(own.public_key for own in identities)), roster)
    return True


def open_ledger(folder: Path, agent: int, plan: Plan) -> ReleaseLedger:
    """The ledger of this agent under this plan."""
    plan_fingerprint = fingerprint(plan)
    try:
        return ReleaseLedger.open(
            folder / f"agent-{agent}-{plan_fingerprint.hex()[:16]}.ledger",
            plan_fingerprint=plan_fingerprint,
            agent=agent,
            max_releases=plan.budget.num_steps,
        )
    except CornError as error:
        raise FileFormatError(f"agent {agent}: {error}") from error


def digest_roster(roster: Roster) -> str:
    """A few characters by which agents see that they hold the same roster."""
    return hashlib.sha256(b"".join(roster.public_keys)).hexdigest()[:16]


def make_source(
    plan: Plan,
    agent: int,
    identity: Identity,
    roster: Roster,
    *,
    group_seeds: Mapping[int, Secret],
) -> SecureSource:
    """The noise source that holds this agent's keys, and no other's."""
    keys = agent_keys(
        identity,
        agent,
        seed_groups=plan.decomposition.seed_groups,
        roster=roster,
        plan_fingerprint=fingerprint(plan),
        group_seeds=group_seeds,
    )
    return SecureSource(keys)


def make_rehearsal_source(decomposition: Decomposition, agent: int, *, seed: int) -> SecureSource:
    """What a simulation with this seed holds for the agent: public, for comparison only."""
    everyone = simulated_keys(decomposition, seed=seed)
    return SecureSource({owner: everyone[owner] for owner in owners(decomposition, [agent])})


def share_group_seeds(
    meeting: Meeting, plan: Plan, identity: Identity, roster: Roster, *, run_nonce: bytes
) -> dict[int, Secret]:
    """Seeds of the groups of three and more that this agent is in: dealt out sealed, new each run.

    The lowest member of a group makes its seed.
    """
    seeds: dict[int, Secret] = {}
    larger = [
        Owner(group, number)
        for number, group in enumerate(plan.decomposition.seed_groups)
        if len(group) > 2 and meeting.agent in group
    ]
    made = [group for group in larger if group.members[0] == meeting.agent]
    for group in made:
        seed = Secret.random()
        seeds[_number(group)] = seed
        for receiver in group.members[1:]:
            delivery = Delivery(fingerprint(plan), run_nonce, group, receiver)
            package = seal_seed(seed, delivery, identity=identity, roster=roster)
            meeting.give(_topic(group, run_nonce), receiver, package)
    for group in larger:
        if group not in made:
            delivery = Delivery(fingerprint(plan), run_nonce, group, meeting.agent)
            package = meeting.take(_topic(group, run_nonce), delivery.sender)
            seeds[_number(group)] = open_seed(package, delivery, identity=identity, roster=roster)
    return seeds


def _number(group: Owner) -> int:
    return -1 if group.group is None else group.group


def _topic(group: Owner, run_nonce: bytes) -> str:
    return f"seed/{run_nonce.hex()[:16]}/{group.group}"
