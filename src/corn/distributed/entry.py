"""Entry of an agent into a run: with all others at its start, or alone into one under way."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from corn.distributed.exchange import Exchange
from corn.distributed.handshake import (
    Agreement,
    Hello,
    naming_absent_agents,
    require_budget,
    shake_hands,
)
from corn.distributed.keyring import make_source, share_group_seeds
from corn.distributed.logs import log_event
from corn.distributed.membership import Membership
from corn.distributed.messages import NewsKeys, message_limit
from corn.distributed.recovery import ActivePlan
from corn.distributed.rejoin import (
    Admission,
    Request,
    Returns,
    Welcome,
    load_addresses,
    request_return,
    save_addresses,
)
from corn.distributed.rendezvous import Meeting, Rendezvous
from corn.distributed.requirements import ReleaseTotal, Requirements, compose_total
from corn.distributed.settings import RunSettings, require_pair_seeds
from corn.distributed.storage import Folders
from corn.distributed.summing import integer_type
from corn.errors import InvalidArgumentError
from corn.learn.perturbation import NoiseShare
from corn.learn.step import AgentStepper
from corn.noise import ReleaseLedger, Secret
from corn.plan import Plan
from corn.transport import (
    Credentials,
    Link,
    LinkOpener,
    Purpose,
    open_links,
)


@dataclass(frozen=True, eq=False)
class AgreedRun:
    """Everything that one agent's training needs, complete once all agents agreed.

    ``total`` is that of all releases of its data, ``group_seeds`` are those of groups of three and
    more, and ``admission`` is the model and the state of a sponsor, for an agent that returns.
    """

    plan: Plan
    settings: RunSettings
    agent: int
    hello: Hello
    credentials: Credentials
    ledger: ReleaseLedger
    stepper: AgentStepper
    start: Tensor
    folders: Folders | None
    requirements: Requirements
    agreement: Agreement | None = None
    total: ReleaseTotal | None = None
    group_seeds: Mapping[int, Secret] = field(default_factory=dict, repr=False)
    admission: Admission | None = None

    @property
    def agreed(self) -> Agreement:
        """The agreement, which must have been reached."""
        if self.agreement is None:
            raise InvalidArgumentError("agreement must be reached before training, found None")
        return self.agreement

    @property
    def max_message_bytes(self) -> int:
        """The most bytes of a message."""
        # Survivors of exact sums may make a plan with longer integers.
        is_sum = self.plan.network.mixing == "sum"
        size = 8 * len(self.start) if is_sum else self.start.nbytes
        num_links = self.plan.network.graph.number_of_edges()
        return message_limit(self.plan.num_agents, num_links, size)

    @property
    def first_step(self) -> int:
        """Steps done before this run."""
        return self.agreed.first_step

    @property
    def last_step(self) -> int:
        """The end of the run: T, or earlier where a ledger allows fewer steps."""
        return min(self.settings.steps_of(self.plan), self.first_step + self.agreed.max_steps)

    def activate(self, plan: Plan, members: tuple[int, ...]) -> ActivePlan:
        """Return a plan for some members with this agent's noise under it."""
        noise = NoiseShare(
            plan,
            members.index(self.agent),
            make_source(self.credentials, plan, members, self.group_seeds),
            # It has a new part from every agent: under it no noise was ever drawn before.
            nonce=self.agreed.nonce,
            num_parameters=len(self.start),
        )
        return ActivePlan(plan, members, noise)

    def check_total(self, keys: Path, num_steps: int) -> ReleaseTotal:
        """Check the owner's limit on all plans together, for a run of so many steps."""
        # With the ledger open, so that no second run can add to the total meanwhile, and before
        # anything is released.
        total = compose_total(
            self.plan,
            self.agent,
            keys=keys,
            ledger=self.ledger,
            requirements=self.requirements,
            num_steps=num_steps,
        )
        # Private: the total shows what else the data was used for.
        log_event(self.agent, "total", total.describe(), is_private=True)
        return total


@dataclass(frozen=True, eq=False)
class Entry:
    """An agent's connections when it begins to take part, and what it knows of losses."""

    exchange: Exchange
    membership: Membership
    returns: Returns

    def close(self) -> None:
        """Close all links."""
        self.exchange.close()
        self.returns.stop()


def begin_run(run: AgreedRun, rendezvous: Rendezvous) -> tuple[AgreedRun, Entry]:
    """Agree with all agents, and connect to the neighbours."""
    plan = run.plan
    # Nothing has been released yet, and nothing is until train_agent: all checks that can refuse
    # come before, so a refusal costs no budget.
    agreement = shake_hands(rendezvous, run.hello)
    require_budget(agreement)
    # The owner's limit is checked for the steps of this run only, which are known after the
    # agreement.
    left = run.settings.steps_of(plan) - agreement.first_step
    total = run.check_total(rendezvous.key_folder, min(left, agreement.max_steps))
    seeds = share_group_seeds(rendezvous, plan, run_nonce=agreement.nonce)
    run = replace(run, agreement=agreement, total=total, group_seeds=seeds)
    # A store that answered agents differently would lead them to different agreements.
    digest = hashlib.sha256(repr(agreement).encode()).hexdigest()
    senders, receivers = find_neighbours(plan, run.agent)
    with ExitStack() as stack:
        # Open before any neighbour connects.
        opener = rendezvous.make_link_opener(Purpose.LINK, max_bytes=run.max_message_bytes)
        stack.callback(opener.close)
        # Nobody waits for the link of an agent that did not agree.
        rendezvous.agree("linking", digest)
        # From here on a failure names the agents that never became ready, not a neighbour that
        # itself waited for them in vain.
        stack.enter_context(naming_absent_agents(rendezvous, "ready"))
        links = open_links(
            opener,
            senders | receivers,
            timeout=rendezvous.timeout,
            check=rendezvous.check,
        )
        exchange = make_exchange(run, links)
        stack.callback(exchange.close)
        # Before the run begins, so that each of its agents can return to it. Not earlier: service
        # managers add --rejoin where the file is, and after a failed start there is no run.
        if run.folders is not None:
            save_addresses(run.folders.private, rendezvous.meeting, rendezvous.bound)
        rendezvous.agree("ready", digest)
        stack.pop_all()  # all agents are there: links stay open
    membership = make_membership(run, rendezvous)
    return run, Entry(exchange, membership, make_returns(run, rendezvous, opener))


def return_to_run(run: AgreedRun, rendezvous: Rendezvous) -> tuple[AgreedRun, Entry]:
    """Return to a run under way, with the help of a neighbour."""
    plan, ledger = run.plan, run.ledger
    if plan.network.mixing == "gossip":
        raise InvalidArgumentError("--rejoin needs exact sums, found a plan with gossip")
    require_pair_seeds(plan, "--rejoin")
    # The step of the return is not known yet, so the check assumes all releases that the ledger
    # allows.
    total = run.check_total(rendezvous.key_folder, ledger.remaining)
    rendezvous.announce_address()
    addresses = rendezvous.read_addresses()
    if run.folders is not None:
        # The store wins: an agent that moved has published its new address there.
        addresses = load_addresses(run.folders.private)[1] | addresses
    senders, receivers = find_neighbours(plan, run.agent)
    admission = request_return(
        rendezvous,
        Request(run.hello, ledger.first_free_step),
        senders | receivers,
        addresses,
        start=run.start,
        max_bytes=run.max_message_bytes,
    )
    welcome, step = admission.welcome, admission.welcome.return_step
    # The nonce below is named by others, who could name that of an old run. The ledger refuses any
    # step that it has ever reserved, so no noise repeats whatever they name.
    ledger.join_run(step)
    known = addresses | welcome.known_addresses
    rendezvous.adopt(Meeting(bytes.fromhex(welcome.session), known))
    agreement = Agreement(
        nonce=bytes.fromhex(welcome.nonce),
        first_step=step,
        max_steps=min(welcome.last_step - step, ledger.remaining),
        scarce=run.agent if ledger.remaining < welcome.last_step - step else None,
    )
    run = replace(run, agreement=agreement, total=total, admission=admission)
    if run.folders is not None:
        save_addresses(run.folders.private, rendezvous.meeting, rendezvous.bound)
    membership = make_membership(run, rendezvous)
    # Without the news of the run this agent would take the graph for whole.
    membership.check(admission.header, is_first=True)
    membership.merge(admission.header.news)
    opener = rendezvous.make_link_opener(Purpose.LINK, max_bytes=run.max_message_bytes)
    links = dict(admission.links)
    for peer in links.keys() - set(membership.reach(admission.header.sender)):
        # The others are cut apart, and this agent returns to those of its sponsor alone.
        links.pop(peer).close()
    # Others count on it once it says so, which it does with its first message. That mends all own
    # links on paper, so those that are still broken are announced anew.
    membership.note_return(step)
    for peer in (senders | receivers) - links.keys():
        membership.note_cut(peer, step)
    exchange = make_exchange(run, links)
    return run, Entry(exchange, membership, make_returns(run, rendezvous, opener))


def find_neighbours(plan: Plan, agent: int) -> tuple[frozenset[int], frozenset[int]]:
    """Return the agents that send to an agent, and those to which it sends."""
    graph = plan.network.graph
    # On a one-way link an agent only sends, or only receives.
    receivers = frozenset(graph.neighbors(agent))
    senders = frozenset(graph.predecessors(agent)) if graph.is_directed() else receivers
    return senders, receivers


def make_membership(run: AgreedRun, rendezvous: Rendezvous) -> Membership:
    """Return an agent's knowledge of losses at its start: none."""
    return Membership(
        run.plan.network.graph,
        run.agent,
        keys=NewsKeys(rendezvous.credentials, rendezvous.meeting.session),
        last_step=run.last_step,
    )


def message_type(plan: Plan, model: Tensor) -> torch.dtype:
    """Return the type of the numbers in messages: that of models, or integers in exact sums."""
    return integer_type(plan.mask_bits) if plan.network.mixing == "sum" else model.dtype


def make_exchange(run: AgreedRun, links: Mapping[int, Link]) -> Exchange:
    """Return the exchange of messages over links to neighbours."""
    is_directed = run.plan.network.graph.is_directed()
    senders, receivers = find_neighbours(run.plan, run.agent)
    return Exchange(
        links,
        num_agents=run.plan.num_agents,
        dtype=message_type(run.plan, run.start),
        timeout=run.settings.timeout,
        senders=senders if is_directed else None,
        receivers=receivers if is_directed else None,
    )


def make_returns(
    run: AgreedRun,
    rendezvous: Rendezvous,
    opener: LinkOpener,
) -> Returns:
    """Return the place where agents ask this one to let them in."""
    meeting = rendezvous.meeting

    def welcome(return_step: int, present: tuple[int, ...]) -> Welcome:
        return Welcome(
            session=meeting.session.hex(),
            nonce=run.agreed.nonce.hex(),
            return_step=return_step,
            last_step=run.last_step,
            addresses={str(agent): place for agent, place in meeting.addresses.items()},
            present=present,
        )

    return Returns(
        run.hello,
        rendezvous,
        opener,
        welcome=welcome,
        last_step=run.last_step,
        timeout=run.settings.timeout,
    )
