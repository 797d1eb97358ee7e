"""One agent: it checks the plan, agrees with the others, connects to its neighbours, and trains."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from corn.distributed.exchange import Exchange
from corn.distributed.journal import Journal, Reports
from corn.distributed.keyring import load_credentials, make_source, open_ledger, share_group_seeds
from corn.distributed.logs import log_event
from corn.distributed.membership import Membership
from corn.distributed.messages import Kind, NewsKeys, ProtocolError, message_limit
from corn.distributed.planning import PlanningRequest, plan_together
from corn.distributed.recovery import ActivePlan
from corn.distributed.rejoin import (
    Admission,
    Returns,
    load_addresses,
    request_return,
    save_addresses,
)
from corn.distributed.rendezvous import (
    Agreement,
    Hello,
    Meeting,
    Rendezvous,
    announcing_failure,
    check_guarantee,
    join,
    naming_agent,
    shake_hands,
)
from corn.distributed.requirements import ReleaseTotal, Requirements, compose_total
from corn.distributed.results import AgentResult, judge_status
from corn.distributed.rounds import TrainingRounds
from corn.distributed.settings import AgentConfig, RunSettings, require_pair_seeds
from corn.distributed.storage import (
    CheckpointFolder,
    Folders,
    forget_after,
    list_checkpoints,
    make_folders,
    read_rows,
)
from corn.distributed.summing import integer_type
from corn.errors import InvalidArgumentError
from corn.learn.batches import (
    AgentData,
    BatchSampler,
    note_batch_size,
    note_large_delta,
    require_fitting_samples,
)
from corn.learn.metrics import Row, Samples
from corn.learn.own_loop import PrivateOptimizer
from corn.learn.perturbation import NoiseShare
from corn.learn.problem import DataSource, SweepSettings, TrainingProblem, read_samples
from corn.learn.step import AgentStepper
from corn.learn.sweep import catch_interruption
from corn.learn.tasks import MeanLoss, Task
from corn.learn.tasks.module import make_task
from corn.learn.user_model import UserModel
from corn.noise import ReleaseLedger, Secret
from corn.noise.stream import STREAM_FORMAT
from corn.plan import Plan, fingerprint, load_plan, save_plan
from corn.topology import list_connections
from corn.transport import Link, LinkOpener, open_links

_SECONDS_TO_SEND = 1.0


def run_agent(
    plan: Plan,
    *,
    rendezvous: Rendezvous,
    model: nn.Module | Task,
    loss: MeanLoss | None = None,
    dataset: DataSource,
    validation: DataSource | None = None,
    test: DataSource | None = None,
    out: Path | None = None,
    settings: RunSettings | None = None,
    reports: Reports | None = None,
    requirements: Requirements | None = None,
) -> AgentResult:
    """Run one agent of a plan in this process, with its own data and keys, to the end.

    Args:
        plan: the plan, the same for all agents.
        rendezvous: the other agents, as :func:`corn.distributed.join` returns them.
        model: any module without batch normalisation and dropout, or a ``Task``; all agents must
            start from the same parameters.
        loss: a function (outputs, targets) → mean training loss, for a module.
        dataset: this agent's own samples. Of a data loader its data set is taken; batches are drawn
            as the plan's accounting assumes, of the settings' size or else the loader's.
        validation: samples to measure on. They are taken to be this agent's own: measurements on
            them are for its owner.
        test: the same.
        out: the folder of the run, which agents may have in common. ``shared/agent-I`` in it gets
            models and ε and may be published, and ``private/agent-I`` the rest.
        settings: the settings of the run, the same for all agents.
        reports: callbacks for news of the run.
        requirements: the owner's requirements of this plan and of all releases of this data.

    Raises:
        CornError: in one line that begins with the agent's number.
    """
    chosen = settings or RunSettings()
    # Other agents may wait at the store already: an error in the own data must reach them.
    with announcing_failure(rendezvous):
        # Of a loader only the batch size is taken: accounting assumes another order of samples.
        if isinstance(dataset, DataLoader) and chosen.batch_of(plan) is None:
            chosen = replace(chosen, batch_size=dataset.batch_size)
        parts = {"validation": validation, "test": test}
        problem = TrainingProblem(
            make_task(model, loss),
            AgentData.from_parts([read_samples(dataset)]),
            {name: read_samples(part) for name, part in parts.items() if part is not None},
        )
    steps = run_steps(
        plan,
        problem,
        rendezvous=rendezvous,
        out=out,
        settings=chosen,
        reports=reports,
        requirements=requirements,
    )
    return run_to_end(steps, problem.task, rendezvous)


def run_workload(config: AgentConfig, reports: Reports) -> tuple[Plan, AgentResult]:
    """Run one agent of a workload in this process; return the plan that was run, and its result."""
    agent = config.agent
    with naming_agent(agent, config.names):
        credentials = load_credentials(config.keys, agent, config.num_agents)
    # The owners compare it: a replaced roster lets somebody else take part.
    log_event(agent, "roster", f"roster {credentials.roster.fingerprint.hex()}")
    earlier = None
    if config.rejoins:
        # Others keep the address of before, at which they were told to find this agent.
        earlier, _ = load_addresses(Folders.of_run(config.out).of_agent(agent).private)
    rendezvous = join(
        credentials,
        timeout=config.settings.timeout,
        wait=config.wait,
        store=config.store,
        keys=config.keys,
        listen=config.listen or earlier,
        advertise=config.advertise,
        opens_store=config.opens_store,
        rejoins=config.rejoins,
        interruption=reports.interruption,
    )
    with announcing_failure(rendezvous):
        source = config.source
        if isinstance(source, Path):
            plan = load_plan(source)
        else:
            plan = make_plan_together(config, rendezvous, source)
        # An agent opens its own data only.
        problem = config.workload.build(config.num_agents, [agent]).judge(plan.budget)
    steps = run_steps(
        plan,
        problem,
        rendezvous=rendezvous,
        out=config.out,
        settings=config.settings,
        reports=reports,
        requirements=config.requirements,
        data=problem.description,
    )
    return plan, run_to_end(steps, problem.task, rendezvous)


def make_plan_together(
    config: AgentConfig, rendezvous: Rendezvous, request: PlanningRequest
) -> Plan:
    """Make the plan together with all agents, and write it to the shared folder."""
    # Before the others learn of this agent's links, and before any file of the run is written.
    if config.requirements is not None:
        config.requirements.check(request, rendezvous.agent)
    folders = make_folders(config.out, rendezvous.agent)
    plan = plan_together(rendezvous, request, config.neighbours)
    if not any(list_checkpoints(folders.private)):  # the plan of an earlier run stays with that run
        save_plan(plan, folders.shared / "plan.corn")
    return plan


def run_to_end(
    steps: Generator[AgentStepper, None, AgentResult], task: Task, rendezvous: Rendezvous
) -> AgentResult:
    """Compute the gradient of every step; return the agent's result."""
    with closing(steps):
        while True:
            try:
                stepper = next(steps)
            except StopIteration as end:
                result: AgentResult = end.value
                return result
            with naming_agent(rendezvous.agent, rendezvous.credentials.roster.names):
                stepper.differentiate(task)


def run_steps(
    plan: Plan,
    problem: TrainingProblem,
    *,
    rendezvous: Rendezvous,
    out: Path | None = None,
    settings: RunSettings,
    reports: Reports | None = None,
    requirements: Requirements | None = None,
    data: str = "",
    update: PrivateOptimizer | None = None,
) -> Generator[AgentStepper, None, AgentResult]:
    """Run one agent as :func:`run_agent` does; each step yields the stepper once it has begun.

    The caller then has it compute the gradient. All agents agree on ``data``, a description.
    ``update`` takes the place of step sizes and momentum.
    """
    agent = rendezvous.agent
    reports = reports or Reports()
    required = requirements or Requirements()
    # However the run ends, links are closed, so that neighbours notice, and the ledger is unlocked.
    with ExitStack() as stack:
        stack.callback(rendezvous.close)
        with announcing_failure(rendezvous):
            # Check. The agent verifies the plan itself before it publishes or writes anything.
            if rendezvous.num_agents != plan.num_agents:
                found = f"found {rendezvous.num_agents} in this run"
                raise InvalidArgumentError(f"the plan is for {plan.num_agents} agents, {found}")
            roster = rendezvous.credentials.roster
            roster.require_names(plan.network.agent_names)
            # Refuses links that cannot be opened.
            list_connections(plan.network.graph, roster.accepts)
            planned = check_guarantee(plan, agent).precision
            required.check(plan, agent)
            folders = None if out is None else make_folders(out, agent)
            # Opening the ledger begins a run: it locks the file, so that no second process releases
            # under the same count until the end, and writes a nonce that was never used before.
            precision = settings.precision_of(plan, agent, planned)
            ledger = open_ledger(rendezvous.key_folder, agent, plan, precision=precision)
            stack.enter_context(ledger)
            if reports.on_ledger is not None:
                reports.on_ledger(ledger)
            # What the ledger had counted, before a pass is chosen, which may skip some.
            num_releases = plan.budget.num_steps - ledger.remaining
            stepper, parts, notes = prepare_work(
                plan, agent, settings, problem, ledger, update=update
            )
            # All agents start from the same model: its seed is public, and they compare a hash.
            start = problem.task.initialize(settings.seed).to(getattr(torch, plan.dtype))
            checkpoints = {0}  # the initial model needs no file
            if folders is not None:
                checkpoints |= CheckpointFolder(folders.private, plan, agent).find(
                    num_parameters=len(start),
                    num_releases=num_releases,
                    resume=settings.resume,
                    rejoins=rendezvous.rejoins,
                )
            model = f"{problem.task.describe()}; {problem.task.num_parameters} parameters"
            if hasattr(problem.task, "fingerprint"):  # of layers, loss and frozen parameters
                model += f" ({problem.task.fingerprint().hex()[:16]})"
            accepting = [str(number) for number, does in enumerate(roster.accepts) if does]
            # Agree. From here on all agents have the same plan, model, settings and nonce.
            hello = Hello(
                plan=fingerprint(plan).hex(),
                terms={
                    "the data": data,  # before the model, whose shape follows from its columns
                    "the model": model,
                    "the initial parameters": hashlib.sha256(start.numpy().data).hexdigest()[:16],
                    "the roster of public keys": roster.fingerprint.hex(),
                    "agents that accept connections": ", ".join(accepting),
                    **settings.describe(plan),
                    "streams": STREAM_FORMAT,
                },
                nonce=ledger.nonce.hex(),  # public: noise follows from it only with the keys
                remaining=ledger.remaining,
                checkpoints=tuple(sorted(checkpoints)),
                first_free_step=ledger.first_free_step if rendezvous.rejoins else 0,
            )
            run = AgentRun(
                plan, settings, rendezvous, hello, ledger, stepper, start, folders, required
            )
            stack.enter_context(run.opened)
            if rendezvous.rejoins:
                run.return_to_others()
            else:
                run.begin()
        with naming_agent(agent, rendezvous.credentials.roster.names):
            return (yield from run.train(problem, parts, notes, reports))


def digest_data(plan: Plan, agent: int, problem: TrainingProblem) -> bytes | None:
    """Return a digest of the agent's samples if it decides which pass they belong to, else None."""
    # The data set of a user's loop may draw its items at random: each run begins a new pass.
    is_in_passes = plan.budget.of_agent(agent).query.sampling == "passes"
    return problem.digest() if is_in_passes and not isinstance(problem.task, UserModel) else None


def prepare_work(
    plan: Plan,
    agent: int,
    settings: RunSettings,
    problem: TrainingProblem,
    ledger: ReleaseLedger,
    *,
    update: PrivateOptimizer | None = None,
) -> tuple[AgentStepper, Mapping[str, Samples], tuple[str, ...]]:
    """Return an agent's stepper, the samples to measure on, and notes for its owner."""
    # The plan's proof for floats holds up to a number of parameters and of samples.
    plan.check_parameters(problem.task.num_parameters)
    query = plan.budget.of_agent(agent).query
    size = settings.batch_of(plan)
    (num_samples,) = problem.data.sizes
    require_fitting_samples(plan.budget.of_agent(agent), [num_samples], first=agent)
    data, parts = problem.place(SweepSettings(settings.steps_of(plan), size, dtype=plan.dtype))
    choices = ledger.make_choices(digest_data(plan, agent, problem))
    stepper = AgentStepper(
        query,
        ledger.reserve,
        BatchSampler.of_agent(query, data, [choices], batch_size=size),
        num_parameters=problem.task.num_parameters,
        # A caller's own rule takes the place of momentum: both would smooth twice.
        momentum=plan.momentum if update is None else 0.0,
        update=update,
    )
    notes = note_batch_size(query, num_samples), note_large_delta(plan.budget, agent, num_samples)
    return stepper, parts, (*problem.private_notes, *filter(None, notes))


@dataclass(eq=False)
class AgentRun:
    """One agent's run of a plan. Nothing is released before ``train``: refusals cost no budget."""

    plan: Plan
    settings: RunSettings
    rendezvous: Rendezvous
    hello: Hello
    ledger: ReleaseLedger
    stepper: AgentStepper
    start: Tensor
    folders: Folders | None
    requirements: Requirements
    agreement: Agreement = field(init=False)
    exchange: Exchange = field(init=False)
    returns: Returns = field(init=False)
    total: ReleaseTotal = field(init=False)
    group_seeds: Mapping[int, Secret] = field(default_factory=dict, repr=False, init=False)
    admission: Admission | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.agent = self.rendezvous.agent
        self.opened = ExitStack()
        graph = self.plan.network.graph
        self.neighbours = frozenset(graph.neighbors(self.agent))
        # Survivors of exact sums may make a plan with longer integers.
        is_sum = self.plan.network.mixing == "sum"
        size = 8 * len(self.start) if is_sum else self.start.nbytes
        self.max_bytes = message_limit(self.plan.num_agents, graph.number_of_edges(), size)

    @property
    def first_step(self) -> int:
        """Steps done before this run."""
        return self.agreement.first_step

    @property
    def last_step(self) -> int:
        """The end of the run: T, or earlier where a ledger allows fewer steps."""
        return min(self.settings.steps_of(self.plan), self.first_step + self.agreement.max_steps)

    def begin(self) -> None:
        """Agree with all agents, and connect to the neighbours."""
        rendezvous = self.rendezvous
        self.agreement = agreement = shake_hands(rendezvous, self.hello)
        # The steps of this run are known now, for which the owner's limit is checked.
        self._check_total(self.last_step - self.first_step)
        self.group_seeds = share_group_seeds(rendezvous, self.plan, run_nonce=agreement.nonce)
        # A store that answered agents differently would lead them to different agreements.
        digest = hashlib.sha256(repr(agreement).encode()).hexdigest()
        # The place where neighbours connect is open before any of them does.
        opener = rendezvous.make_opener(rendezvous.meeting, max_bytes=self.max_bytes)
        self.opened.callback(opener.close)
        # Nobody waits for the link of an agent that did not agree.
        rendezvous.agree("linking", digest)
        links = open_links(
            opener, self.neighbours, timeout=rendezvous.timeout, check=rendezvous.check
        )
        self._exchange_over(links, self._make_membership(), opener)
        # Before the run begins, so that each of its agents can return to it. Not earlier: service
        # managers add --rejoin where the file is, and after a failed start there is no run.
        if self.folders is not None:
            save_addresses(self.folders.private, rendezvous.meeting, rendezvous.bound)
        rendezvous.agree("ready", digest)

    def return_to_others(self) -> None:
        """Return to a run under way, with the help of a neighbour."""
        rendezvous, ledger = self.rendezvous, self.ledger
        if self.plan.network.mixing == "gossip":
            raise InvalidArgumentError("--rejoin needs exact sums, found a plan with gossip")
        require_pair_seeds(self.plan, "--rejoin")
        # The step of the return is not known yet: for all releases that the ledger allows.
        self._check_total(ledger.remaining)
        if self.folders is None:
            raise InvalidArgumentError("rejoins needs out, which has the addresses of the others")
        _, addresses = load_addresses(self.folders.private)
        self.admission = admission = request_return(self, addresses)
        self.opened.callback(admission.opener.close)
        welcome = admission.welcome
        step = welcome.return_step
        # The nonce below is named by others, who could name that of an old run. The ledger refuses
        # any step that it has ever reserved, so no noise repeats whatever they name.
        ledger.join_run(step)
        rendezvous.adopt(Meeting(bytes.fromhex(welcome.session), addresses))
        self.agreement = Agreement(
            nonce=bytes.fromhex(welcome.nonce),
            first_step=step,
            max_steps=min(welcome.last_step - step, ledger.remaining),
        )
        save_addresses(self.folders.private, rendezvous.meeting, rendezvous.bound)
        membership = self._make_membership()
        # Without the news of the run this agent would take the graph for whole.
        membership.check(admission.header, is_first=True)
        membership.merge(admission.header.news)
        links = dict(admission.links)
        for peer in links.keys() - set(membership.reach(admission.header.sender)):
            # The others are cut apart, and this agent returns to those of its sponsor alone.
            links.pop(peer).close()
        # Others count on it once it says so, which it does with its first message. That mends all
        # own links on paper, so those that are still broken are announced anew.
        membership.note(Kind.RETURN, step)
        for peer in self.neighbours - links.keys():
            membership.note(Kind.CUT, step, peer)
        self._exchange_over(links, membership, admission.opener)

    def _check_total(self, num_steps: int) -> None:
        """Check the owner's limit on all plans together, for a run of so many steps."""
        # With the ledger open, so that no second run can add to the total meanwhile.
        self.total = compose_total(
            self.plan,
            self.agent,
            keys=self.rendezvous.key_folder,
            ledger=self.ledger,
            requirements=self.requirements,
            num_steps=num_steps,
        )
        # Private: the total shows what else the data was used for.
        log_event(self.agent, "total", self.total.describe(), is_private=True)

    def _make_membership(self) -> Membership:
        keys = NewsKeys(self.rendezvous.credentials, self.rendezvous.meeting.session)
        return Membership(self.plan.network.graph, self.agent, keys, last_step=self.last_step)

    def _exchange_over(
        self, links: Mapping[int, Link], membership: Membership, opener: LinkOpener
    ) -> None:
        """Exchange messages over links from now on, and listen to agents that return."""
        is_sum = self.plan.network.mixing == "sum"
        dtype = integer_type(self.plan.mask_bits) if is_sum else self.start.dtype
        self.exchange = Exchange(links, membership, dtype=dtype, timeout=self.settings.timeout)
        self.returns = Returns(self, opener)
        self.opened.callback(self.returns.close)
        self.opened.callback(self.exchange.close)

    def activate(self, plan: Plan, members: tuple[int, ...]) -> ActivePlan:
        """Return a plan for some members with this agent's noise under it."""
        noise = NoiseShare(
            plan,
            members.index(self.agent),
            # Seeds of groups belong to the groups of the first plan, by their numbers.
            make_source(
                self.rendezvous.credentials,
                plan,
                members,
                self.group_seeds if plan is self.plan else None,
            ),
            # It has a new part from every agent: under it no noise was ever drawn before.
            nonce=self.agreement.nonce,
            num_parameters=len(self.start),
        )
        return ActivePlan(plan, members, noise)

    def train(
        self,
        problem: TrainingProblem,
        parts: Mapping[str, Samples],
        private_notes: Iterable[str],
        reports: Reports,
    ) -> Generator[AgentStepper, None, AgentResult]:
        """Run all steps that are left, and record them."""
        exchange = self.exchange
        if reports.on_message is not None:
            exchange.on_send = partial(reports.on_message, self.agreement.nonce)
        journal = Journal(self, problem, parts, reports.on_state)
        # After the agreement on the step from which all continue, as later files are removed.
        parameters, earlier = self._restore(journal)
        self._note_ledger(journal)
        for text in private_notes:
            journal.note_privately(text)
        rounds = TrainingRounds(self, journal, parameters)
        # A checkpoint of the start lets agents that crash early resume from a common step.
        journal.record_start(self.first_step, parameters, earlier)
        # A caller that gave an interruption catches signals itself.
        given = reports.interruption
        with catch_interruption() if given is None else nullcontext(given) as interruption:
            yield from rounds.run(interruption)
        lost, cut_links = exchange.membership.lost, exchange.membership.cut_links
        all_steps = rounds.step == self.settings.steps_of(self.plan)
        status = judge_status(all_steps=all_steps, lost={*lost, *cut_links})
        journal.record_end(rounds.step, rounds.parameters, status)
        # Links count a message once it has left, and the last ones may still be on their way.
        exchange.finish_sending(_SECONDS_TO_SEND)
        return AgentResult(
            agent=self.agent,
            status=status,
            first_step=self.first_step,
            num_steps=rounds.step,
            stop=rounds.stop,
            lost=lost,
            cut_links=cut_links,
            notes=tuple(journal.notes),
            traffic=exchange.traffic,
            parameters=rounds.parameters,
            rows=tuple(journal.rows),
            measured=journal.measured,
            private_notes=tuple(journal.private_notes),
            total=self.total,
            simulation=problem.simulation,
        )

    def _restore(self, journal: Journal) -> tuple[Tensor, list[Row]]:
        """Return the model to start from and the measurements before it; remove later files."""
        step, folders = self.first_step, self.folders
        if self.admission is not None:
            # An agent that returns begins with its sponsor's model, and keeps its own measurements.
            journal.note(f"took part again from step {step} on, with the model of a neighbour")
            rows = {} if folders is None else read_rows(folders.private / "metrics.csv")
            try:
                self.stepper.restore(self.admission.state)
            except InvalidArgumentError as error:
                why = f"a neighbour sent a state that does not fit: {error}"
                raise ProtocolError(why) from error
            return self.admission.parameters.clone(), list(rows.values())
        if folders is not None and forget_after(folders, step):
            journal.note(f"removed what an earlier run wrote after step {step}")
        if folders is None or step == 0:
            return self.start.clone(), []
        parameters, _, state = CheckpointFolder(folders.private, self.plan, self.agent).load(step)
        self.stepper.restore(state)
        return parameters, list(read_rows(folders.private / "metrics.csv").values())

    def _note_ledger(self, journal: Journal) -> None:
        """Note how a ledger shortens the run."""
        total = self.settings.steps_of(self.plan)
        if self.last_step < total:
            journal.note(
                f"the run ends at step {self.last_step} of {total}: some agent's ledger allows "
                f"{self.agreement.max_steps} more releases"
            )
        if skipped := self.ledger.num_skipped:
            # Privately, as it tells that the data changed.
            journal.note_privately(
                f"{skipped} releases of a pass that an earlier run began count as spent: this "
                "run's data may be other data, so it begins a new pass"
            )
