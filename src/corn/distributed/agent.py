"""One agent of a plan, from its keys and data to a trained model.

An agent checks the plan, agrees with the others, connects to its neighbours, and trains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from corn.distributed.exchange import Exchange
from corn.distributed.handshake import (
    Agreement,
    Hello,
    announcing_failure,
    check_guarantee,
    naming_absent_agents,
    require_budget,
    shake_hands,
)
from corn.distributed.journal import Journal, Reports
from corn.distributed.keyring import load_credentials, make_source, open_ledger, share_group_seeds
from corn.distributed.logs import log_event
from corn.distributed.membership import Membership
from corn.distributed.messages import NewsKeys, ProtocolError, message_limit
from corn.distributed.planning import plan_together
from corn.distributed.public_state import LAST_TOTAL
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
from corn.distributed.rendezvous import Meeting, Rendezvous, join, naming_agent
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
from corn.errors import CornError, InvalidArgumentError
from corn.learn.batches import (
    AgentData,
    make_sampler,
    note_batch_size,
    note_large_delta,
    require_fitting_samples,
)
from corn.learn.metrics import Row, Samples
from corn.learn.own_loop import LoopTask
from corn.learn.perturbation import NoiseShare
from corn.learn.problem import DataSource, SweepSettings, TrainingProblem, read_samples
from corn.learn.step import AgentStepper, UpdateRule
from corn.learn.sweep import catch_interruption
from corn.learn.tasks import MeanLoss, Task
from corn.learn.training import make_task
from corn.noise import ReleaseLedger, Secret
from corn.noise.stream import STREAM_FORMAT
from corn.plan import Plan, fingerprint, load_plan, save_plan
from corn.topology import list_connections
from corn.transport import (
    Credentials,
    Link,
    LinkOpener,
    Purpose,
    open_links,
)

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
    rejoins: bool = False,
) -> AgentResult:
    """Run one agent of a plan in this process, with its own data and keys, to the end.

    Args:
        plan: the same for all agents.
        rendezvous: the other agents, as :func:`corn.distributed.join` returns them.
        model: any module without batch normalisation and dropout, or a ``Task``; all agents must
            start from the same parameters.
        loss: for a module: (outputs, targets) → mean training loss.
        dataset: this agent's own samples. Of a data loader its data set is taken; batches are drawn
            as the plan's accounting assumes, of the settings' size or else the loader's.
        validation: samples to measure on. They are taken to be this agent's own: measurements on
            them are for its owner, as on ``dataset``, and are not written to the shared folder.
        test: the same.
        out: the folder of the run, which agents may have in common. ``shared/agent-I`` in it gets
            models and ε and may be published. ``private/agent-I`` gets measurements, private notes
            and checkpoints, and only its owner can open it.
        settings: the same for all agents.
        reports: callbacks for news of the run.
        requirements: the owner's, of this plan and of all releases of this data.
        rejoins: join a run under way, which lost this agent.

    Raises:
        CornError: in one line that begins with the agent's number.
    """
    chosen = settings or RunSettings()
    # Other agents may wait at the store already: an error in the own data must reach them.
    with _announcing(rendezvous, rejoins=rejoins):
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
        rejoins=rejoins,
    )
    return run_to_end(steps, problem.task, rendezvous.agent)


@contextmanager
def _announcing(rendezvous: Rendezvous, *, rejoins: bool) -> Iterator[None]:
    """Announce a failure inside to all agents, in a line that begins with this agent's number."""
    # An agent that cannot return to a run must not stop the others at their start.
    announcing = nullcontext() if rejoins else announcing_failure(rendezvous)
    with announcing, naming_agent(rendezvous.agent):
        yield


def run_workload(config: AgentConfig, reports: Reports) -> tuple[Plan, AgentResult]:
    """Run one agent of a workload in this process: join the others, find the plan, and run it.

    Return the plan that was run, and the agent's result.
    """
    rendezvous, settings = _join_run(config, reports), config.settings
    with _announcing(rendezvous, rejoins=config.rejoins):
        if config.plan is not None:
            plan = load_plan(config.plan)
        else:
            plan, seed = make_plan_together(config, rendezvous)
            settings = replace(settings, seed=seed)
        # An agent opens its own data only.
        workload = config.workload
        problem = workload.build(rendezvous.num_agents, [rendezvous.agent]).judge(plan.budget)
    steps = run_steps(
        plan,
        problem,
        rendezvous=rendezvous,
        out=config.out,
        settings=settings,
        reports=reports,
        requirements=config.requirements,
        data=config.workload.describe(problem),
        rejoins=config.rejoins,
    )
    return plan, run_to_end(steps, problem.task, rendezvous.agent)


def _join_run(config: AgentConfig, reports: Reports) -> Rendezvous:
    """Join the other agents of a run, or of one under way."""
    with naming_agent(config.agent):
        credentials = load_credentials(config.keys, config.agent, config.num_agents)
    earlier = None
    if config.rejoins:
        # Others keep the address of before, at which they were told to find this agent.
        earlier, _ = load_addresses(Folders.of_run(config.out).of_agent(config.agent).private)
    return join(
        credentials,
        timeout=config.settings.timeout,
        store=config.store,
        keys=config.keys,
        listen=config.listen or earlier,
        advertise=config.advertise,
        opens_store=config.opens_store,
        needs_store=not config.rejoins,
        interruption=reports.interruption,
    )


def make_plan_together(config: AgentConfig, rendezvous: Rendezvous) -> tuple[Plan, int]:
    """Make the plan together with all agents and share it; return a public seed, too."""
    request = config.request
    if request is None:
        raise CornError("neither a plan nor a request for one was given")
    # Before the others learn of this agent's links, and before any file of the run is written.
    if config.requirements is not None:
        config.requirements.check(request, rendezvous.agent)
    folders = make_folders(config.out, rendezvous.agent)
    plan, seed = plan_together(rendezvous, request, config.neighbours)
    if not any(list_checkpoints(folders.private)):  # the plan of an earlier run stays with that run
        save_plan(plan, folders.shared / "plan.corn")
    return plan, seed


def run_to_end(
    steps: Generator[AgentStepper, None, AgentResult], task: Task, agent: int
) -> AgentResult:
    """Compute the gradient of every step; return the agent's result."""
    with closing(steps):
        while True:
            try:
                stepper = next(steps)
            except StopIteration as end:
                result: AgentResult = end.value
                return result
            with naming_agent(agent):
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
    rejoins: bool = False,
    update: UpdateRule | None = None,
) -> Generator[AgentStepper, None, AgentResult]:
    """Run one agent of a plan on a problem with its own data, and return its result.

    Each step yields the stepper once the step has begun: the caller has it compute the gradient.
    ``data`` describes how the data was partitioned, on which all must agree. ``update`` turns a
    release into the half step, in place of step sizes and momentum. The other arguments are those
    of :func:`run_agent`.
    """
    agent = rendezvous.agent
    reports = reports or Reports()
    required = requirements or Requirements()
    # However the run ends, links are closed, so that neighbours notice, and the ledger is unlocked.
    with ExitStack() as stack:
        stack.callback(rendezvous.close)
        with _announcing(rendezvous, rejoins=rejoins):
            # Check. The agent verifies the plan itself before it publishes or writes anything.
            if rendezvous.num_agents != plan.num_agents:
                raise InvalidArgumentError(
                    f"the plan is for {plan.num_agents} agents, found {rendezvous.num_agents} in "
                    "this run"
                )
            settings.check_plan(plan)
            accepts = rendezvous.credentials.roster.accepts
            list_connections(plan.network.graph, accepts)  # refuses links that cannot be opened
            planned = check_guarantee(plan, agent).precision
            required.check(plan, agent)
            folders = None if out is None else make_folders(out, agent)
            precision = settings.precision_of(plan, agent, planned)
            # Opening the ledger begins a run: it locks the file, so that no second process releases
            # under the same count until the end, and writes a nonce that was never used before.
            ledger = stack.enter_context(
                open_ledger(rendezvous.key_folder, agent, plan, precision=precision)
            )
            if reports.on_ledger is not None:
                reports.on_ledger(ledger)
            # What the ledger had counted, before a pass is chosen, which may skip some. A
            # checkpoint that counts more belongs to another ledger, or to this one before it was
            # restored.
            num_releases = plan.budget.num_steps - ledger.remaining
            stepper, parts, notes = prepare_work(
                plan, agent, settings, problem, ledger, update=update
            )
            # All agents start from the same model: its seed is public, and they compare a hash.
            start = problem.task.initialize(settings.seed).to(getattr(torch, plan.dtype))
            steps: set[int] = set()
            if folders is not None:
                steps = CheckpointFolder(folders.private, plan, agent).find(
                    num_parameters=len(start),
                    num_releases=num_releases,
                    resume=settings.resume,
                    rejoins=rejoins,
                )
            # Agree. From here on all agents have the same plan, model, settings and nonce.
            hello = Hello(
                plan=fingerprint(plan).hex(),
                terms={
                    # Before the model, whose shape follows from the columns.
                    **{f"column {name!r}": "yes" for name in problem.columns},
                    "the data": data,
                    **describe_model(problem.task, start),
                    "the roster of public keys": rendezvous.credentials.roster.fingerprint.hex(),
                    "agents that accept connections": ", ".join(
                        str(number) for number, does in enumerate(accepts) if does
                    ),
                    **settings.describe(plan),
                    "streams": STREAM_FORMAT,
                },
                nonce=ledger.nonce.hex(),  # public: noise follows from it only with the keys
                remaining=ledger.remaining,
                checkpoints=tuple(sorted(steps | {0})),  # the initial model needs no file
                reserved=ledger.reserved_before,
            )
            run = AgreedRun(
                plan=plan,
                settings=settings,
                agent=agent,
                hello=hello,
                credentials=rendezvous.credentials,
                ledger=ledger,
                stepper=stepper,
                start=start,
                folders=folders,
                requirements=required,
            )
            run, entry = (return_to_run if rejoins else begin_run)(run, rendezvous)
            stack.callback(entry.close)
        with naming_agent(agent):
            return (
                yield from train_agent(
                    run, entry, reports, problem, parts=parts, private_notes=notes
                )
            )


def digest_data(plan: Plan, agent: int, problem: TrainingProblem) -> bytes | None:
    """Return a digest of the agent's samples if it decides which pass they belong to, else None."""
    # A loop's samples are in the user's data set, which may draw its items at random: each run of a
    # loop begins a new pass.
    is_known = not isinstance(problem.task, LoopTask)
    is_in_passes = plan.budget.of_agent(agent).query.sampling == "passes"
    return problem.digest() if is_known and is_in_passes else None


def prepare_work(
    plan: Plan,
    agent: int,
    settings: RunSettings,
    problem: TrainingProblem,
    ledger: ReleaseLedger,
    *,
    update: UpdateRule | None = None,
) -> tuple[AgentStepper, Mapping[str, Samples], tuple[str, ...]]:
    """Return an agent's stepper, the samples to measure on, and notes for its owner."""
    # The plan's proof for floats holds up to a number of parameters and of samples.
    plan.check_parameters(problem.task.num_parameters)
    query, size = plan.budget.of_agent(agent).query, settings.batch_of(plan)
    (num_samples,) = problem.data.sizes
    require_fitting_samples(plan.budget.of_agent(agent), [num_samples], first=agent)
    data, parts = problem.place(SweepSettings(settings.steps_of(plan), size, dtype=plan.dtype))
    choices = ledger.make_choices(digest_data(plan, agent, problem))
    stepper = AgentStepper(
        query,
        ledger.reserve,
        make_sampler(data, (query,), batch_size=size, choices=[choices]),
        num_parameters=problem.task.num_parameters,
        # A caller's own rule takes the place of momentum: both would smooth twice.
        momentum=plan.momentum if update is None else 0.0,
        update=update,
    )
    notes = note_batch_size(query, num_samples), note_large_delta(plan.budget, agent, num_samples)
    return stepper, parts, (*problem.private_notes, *filter(None, notes))


def describe_model(task: Task, start: Tensor) -> dict[str, str]:
    """Return the terms of the model that all agents must have in common; nothing secret."""
    model = f"{task.describe()}; {task.num_parameters} parameters"
    if hasattr(task, "fingerprint"):  # of layers, loss and frozen parameters
        model += f" ({task.fingerprint().hex()[:16]})"
    digest = hashlib.sha256(start.numpy().tobytes()).hexdigest()[:16]
    return {"the model": model, "the initial parameters": digest}


def train_agent(
    run: AgreedRun,
    entry: Entry,
    reports: Reports,
    problem: TrainingProblem,
    *,
    parts: Mapping[str, Samples],
    private_notes: Iterable[str],
) -> Generator[AgentStepper, None, AgentResult]:
    """Run all steps that are left, and record them."""
    plan, settings, ledger = run.plan, run.settings, run.ledger
    exchange = entry.exchange
    if reports.on_message is not None:
        exchange.on_send = partial(reports.on_message, run.agreed.nonce)
    journal = Journal(
        plan,
        settings,
        agent=run.agent,
        problem=problem,
        parts=parts,
        ledger=ledger,
        folders=run.folders,
        read_memory=lambda: run.stepper.memory,
        count_bytes=exchange.count_bytes,
        on_state=reports.on_state,
    )
    # After the agreement: the step from which all continue is not known before, and later files are
    # removed.
    parameters, earlier = _restore(run, journal)
    _note_ledger(run, journal)
    for text in private_notes:
        journal.note_privately(text)
    rounds = TrainingRounds(
        plan,
        settings,
        agent=run.agent,
        activate=run.activate,
        stepper=run.stepper,
        exchange=exchange,
        returns=entry.returns,
        membership=entry.membership,
        journal=journal,
        first_step=run.first_step,
        last_step=run.last_step,
        parameters=parameters,
        admission=run.admission,
    )
    journal.observe(rounds)
    # A checkpoint of the start lets agents that crash early resume from a step they have in common.
    journal.record_start(run.first_step, parameters, earlier)
    # A caller that gave an interruption catches signals itself, and would miss those caught here.
    given = reports.interruption
    with catch_interruption() if given is None else nullcontext(given) as interruption:
        yield from rounds.run(interruption)
    missing = rounds.lost.keys() | rounds.cut_links.keys()
    status = judge_status(all_steps=rounds.step == settings.steps_of(plan), lost=missing)
    journal.record_end(rounds.step, rounds.parameters, status)
    # Links count a message once it has left, and the last ones may still be on their way.
    exchange.finish_sending(_SECONDS_TO_SEND)
    return AgentResult(
        agent=run.agent,
        status=status,
        first_step=run.first_step,
        num_steps=rounds.step,
        stop=rounds.stop,
        lost=rounds.lost,
        cut_links=rounds.cut_links,
        notes=tuple(journal.notes),
        traffic=exchange.traffic,
        parameters=rounds.parameters,
        rows=tuple(journal.rows),
        measured=journal.measured,
        private_notes=tuple(journal.private_notes),
        seconds_waited=rounds.seconds_waited,
        total=run.total,
        simulation=problem.simulation,
    )


def _restore(run: AgreedRun, journal: Journal) -> tuple[Tensor, list[Row]]:
    """Return the model to start from and the measurements before it; remove later files."""
    step, folders = run.first_step, run.folders
    if run.admission is not None:
        # An agent that returns begins with its sponsor's model, and keeps its own measurements.
        journal.note(f"took part again from step {step} on, with the model of a neighbour")
        rows = {} if folders is None else read_rows(folders.private / "metrics.csv")
        state = {name: own for name, own in run.admission.state.items() if name != LAST_TOTAL}
        try:
            run.stepper.restore(state)
        except InvalidArgumentError as error:
            raise ProtocolError(f"a neighbour sent a state that does not fit: {error}") from error
        return run.admission.parameters.clone(), list(rows.values())
    if folders is not None and (removed := forget_after(folders, step)):
        journal.note(f"removed what an earlier run wrote after step {step} ({removed} files)")
    if folders is None or step == 0:
        return run.start.clone(), []
    checkpoint = CheckpointFolder(folders.private, run.plan, run.agent).load(step)
    run.stepper.memory = checkpoint.memory
    return checkpoint.parameters, list(read_rows(folders.private / "metrics.csv").values())


def _note_ledger(run: AgreedRun, journal: Journal) -> None:
    """Note how a ledger shortens the run."""
    total, agreement = run.settings.steps_of(run.plan), run.agreed
    if run.last_step < total:
        # An agent that returns learns when the run ends, but not for whose sake.
        why = (
            "as the others had agreed before this agent returned"
            if agreement.scarce is None
            else f"agent {agreement.scarce}'s ledger allows {agreement.max_steps} more releases"
        )
        journal.note(f"the run ends at step {run.last_step} of {total}: {why}")
    if agreement.reserved and run.agent == agreement.scarce:
        journal.note(
            f"a run that crashed had reserved {agreement.reserved} releases, which count as spent"
        )
    if skipped := run.ledger.num_skipped:
        # Privately, as it tells that the data changed.
        journal.note_privately(
            f"{skipped} releases of a pass that an earlier run began count as spent: this run's "
            "data may be other data, so it begins a new pass"
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
