"""One agent of a plan, from its keys and data to a trained model.

An agent checks the plan, agrees with the others, connects to its neighbours, and trains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn
from torch.utils.data import DataLoader

from corn.distributed.entry import AgreedRun, Entry, Work, begin_run, return_to_run
from corn.distributed.handshake import Hello, announcing_failure, check_plan
from corn.distributed.journal import EvaluationData, Journal, ReleaseAccount, Reports
from corn.distributed.keyring import Keyring, find_credentials, open_keyring
from corn.distributed.messages import ProtocolError
from corn.distributed.planning import find_plan
from corn.distributed.public_state import LAST_TOTAL
from corn.distributed.rejoin import load_addresses
from corn.distributed.rendezvous import Rendezvous, join, naming_agent
from corn.distributed.requirements import ReleaseTotal, Requirements, compose_total
from corn.distributed.results import AgentResult, judge_status
from corn.distributed.rounds import TrainingRounds
from corn.distributed.settings import AgentConfig, RunSettings
from corn.distributed.storage import (
    CheckpointFolder,
    Folders,
    find_checkpoints,
    forget_after,
    make_folders,
    read_rows,
)
from corn.errors import InvalidArgumentError
from corn.learn.batches import (
    AgentData,
    make_sampler,
    note_batch_size,
    note_large_delta,
    require_fitting_samples,
)
from corn.learn.metrics import Row
from corn.learn.own_loop import LoopTask
from corn.learn.problem import DataSource, SweepSettings, TrainingProblem, read_samples
from corn.learn.step import AgentStepper, UpdateRule
from corn.learn.sweep import catch_interruption
from corn.learn.tasks import MeanLoss, Task
from corn.learn.training import make_task
from corn.noise.stream import STREAM_FORMAT
from corn.plan import Plan, fingerprint
from corn.privacy import ClippedQuery

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
        loss: for a module: (outputs, targets) → mean loss.
        dataset: this agent's own samples. Of a data loader its data set is taken; batches are drawn
            as the plan's accounting assumes, of the settings' size or else the loader's.
        validation: samples to measure on. They are taken to be this agent's own: measurements on
            them are for its owner, as on ``dataset``, and are not written to the shared folder.
        test: the same.
        out: the folder of the run, which agents may have in common. ``shared/agent-I`` in it gets
            models and ε and may be published. ``private/agent-I`` gets measurements, private notes
            and checkpoints, and only its owner can open it.
        settings: of the run.
        reports: callbacks for news of the run.
        requirements: the owner's, of this plan and of all releases of this data.
        rejoins: join a run under way, which lost this agent.

    Raises:
        CornError: in one line that begins with the agent's number.
    """
    chosen = settings or RunSettings()
    # Other agents may wait at the store already: an error in the own data must reach them as a
    # refusal. But an agent that cannot return to a run must not stop the others at their start.
    announcing = nullcontext() if rejoins else announcing_failure(rendezvous)
    with announcing, naming_agent(rendezvous.agent):
        # Of a loader only the batch size is taken: accounting assumes another order of samples.
        if isinstance(dataset, DataLoader) and chosen.batch_of(plan) is None:
            chosen = replace(chosen, batch_size=dataset.batch_size)
        parts = {"validation": validation, "test": test}
        own = TrainingProblem(
            make_task(model, loss),
            AgentData.from_parts([read_samples(dataset)]),
            {name: read_samples(part) for name, part in parts.items() if part is not None},
        )
    steps = run_steps(
        plan,
        own,
        rendezvous=rendezvous,
        out=out,
        settings=chosen,
        reports=reports,
        requirements=requirements,
        rejoins=rejoins,
    )
    return run_to_end(steps, own.task, rendezvous.agent)


def run_workload(config: AgentConfig, reports: Reports) -> tuple[Plan, AgentResult]:
    """Run one agent of a workload in this process: join the others, find the plan, and run it.

    Return the plan that was run, and the agent's result.
    """
    settings = config.settings
    rendezvous = join_run(config, reports)
    # An agent that cannot return to a run must not stop the others at their start.
    announcing = nullcontext() if config.rejoins else announcing_failure(rendezvous)
    with announcing, naming_agent(rendezvous.agent):
        plan, settings = find_plan(config, rendezvous)
        # An agent opens its own data only, unless a rehearsal repeats a simulation of all agents.
        workload, num_agents = config.workload, rendezvous.num_agents
        problem = workload.build(num_agents, [rendezvous.agent]).judge(plan.budget)
        # A simulation draws one batch for all agents from one generator. An agent can repeat its
        # part of that only with the data of all.
        cohort = workload.build(num_agents).data if settings.is_rehearsal else None
    steps = run_steps(
        plan,
        problem,
        rendezvous=rendezvous,
        cohort=cohort,
        out=config.out,
        settings=settings,
        reports=reports,
        requirements=config.requirements,
        data=config.workload.describe(problem),
        rejoins=config.rejoins,
    )
    return plan, run_to_end(steps, problem.task, rendezvous.agent)


def join_run(config: AgentConfig, reports: Reports) -> Rendezvous:
    """Join the other agents of a run, or of one under way."""
    settings = config.settings
    with naming_agent(config.agent):
        credentials = find_credentials(settings, config.keys, config.agent, config.num_agents)
    earlier = None
    if config.rejoins:
        # Others keep the address of before, at which they were told to find this agent.
        folders = Folders.of_run(config.out, is_rehearsal=settings.is_rehearsal)
        earlier, _ = load_addresses(folders.of_agent(config.agent).private)
    return join(
        credentials,
        timeout=settings.timeout,
        store=config.store,
        keys=config.keys,
        listen=config.listen or earlier,
        advertise=config.advertise,
        opens_store=config.opens_store,
        needs_store=not config.rejoins,
        interruption=reports.interruption,
    )


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
    cohort: AgentData | None = None,
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
    ``cohort`` has the data of all agents, for a rehearsal. ``data`` describes how the data was
    partitioned, on which all must agree. With ``rejoins`` the agent joins a run under way.
    ``update`` turns a release into the half step, in place of step sizes and momentum. The other
    arguments are those of :func:`run_agent`.
    """
    agent, reports, keys = rendezvous.agent, reports or Reports(), rendezvous.keys
    required = requirements or Requirements()
    # However the run ends, links are closed, so that neighbours notice, and the ledger is unlocked.
    with ExitStack() as stack:
        stack.callback(rendezvous.close)
        # An agent that cannot return to a run must not stop the others at their start.
        announcing = nullcontext() if rejoins else announcing_failure(rendezvous)
        with announcing, naming_agent(agent):
            # Check. The agent verifies the plan itself before it publishes or writes anything.
            guarantee = check_plan(plan, settings, rendezvous)
            required.check(plan, agent, is_rehearsal=settings.is_rehearsal)
            folders = None
            if out is not None:
                folders = make_folders(out, agent, is_rehearsal=settings.is_rehearsal)
            keyring = open_keyring(
                plan,
                rendezvous.credentials,
                settings,
                keys,
                stack,
                precision=guarantee.precision,
            )
            # The ledger is locked from here to the end of the run, so the count cannot change
            # behind the checks below.
            num_releases = plan.budget.num_steps - keyring.ledger.remaining
            if reports.on_ledger is not None:
                reports.on_ledger(keyring.ledger)
            work = prepare_work(
                plan, agent, settings, problem, keyring, cohort=cohort, update=update
            )
            steps: set[int] = set()
            if folders is not None:
                steps = find_checkpoints(
                    checkpoints_of(folders, plan, agent, settings),
                    settings,
                    num_parameters=len(work.start),
                    # What the ledger had counted. A checkpoint that counts more belongs to another
                    # ledger, or to this one before it was restored.
                    num_releases=num_releases,
                    rejoins=rejoins,
                )
            # Agree. From here on all agents have the same plan, model, settings and nonce.
            roster = rendezvous.credentials.roster.fingerprint.hex()
            hello = make_hello(
                plan,
                settings,
                work,
                keyring,
                steps,
                data,
                roster=roster,
                columns=problem.columns,
            )
            run = AgreedRun(plan, settings, agent, hello, keyring, work, folders)

            def check_total(num_steps: int) -> ReleaseTotal | None:
                return _check_total(run, keys, required, reports, num_steps)

            if rejoins:
                run, entry = return_to_run(run, rendezvous, check_total)
            else:
                run, entry = begin_run(run, rendezvous, check_total)
            stack.callback(entry.close)
        with naming_agent(agent):
            return (yield from train_agent(run, entry, reports))


def _check_total(
    run: AgreedRun, keys: Path | None, required: Requirements, reports: Reports, num_steps: int
) -> ReleaseTotal | None:
    """Check the owner's limit on all plans together."""
    # With the ledger open, so that no second run can add to the total meanwhile, and before
    # anything is released.
    if keys is None or run.settings.is_rehearsal:
        return None
    total = compose_total(
        run.plan,
        run.agent,
        keys=keys,
        ledger=run.keyring.ledger,
        requirements=required,
        num_steps=num_steps,
    )
    if reports.on_total:
        reports.on_total(total)
    return total


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
    keyring: Keyring,
    *,
    cohort: AgentData | None = None,
    update: UpdateRule | None = None,
) -> Work:
    """Prepare an agent's data and initial model.

    ``cohort`` has the data of all agents, for a rehearsal that draws a simulation's batches.
    ``update`` is that of :func:`run_steps`.
    """
    # The plan's proof for floats holds up to a number of parameters and of samples.
    plan.check_parameters(problem.task.num_parameters)
    (num_samples,) = problem.data.sizes
    require_fitting_samples(plan.budget.of_agent(agent), [num_samples], first=agent)
    sweep = SweepSettings(settings.steps_of(plan), settings.batch_of(plan), dtype=plan.dtype)
    data, parts = problem.place(sweep)
    query, size = plan.budget.of_agent(agent).query, settings.batch_of(plan)
    choices = keyring.make_choices(digest_data(plan, agent, problem))
    queries: tuple[ClippedQuery, ...] = (query,)
    cell = 0
    if cohort is not None:
        # A rehearsal's batches are those of all agents, as a simulation draws them.
        data, _ = replace(problem, data=cohort).place(sweep)
        queries = plan.budget.queries
        cell = agent
    sampler = make_sampler(
        data, queries, batch_size=size, choices=[choices], is_public=settings.is_rehearsal
    )
    found = note_batch_size(query, num_samples), note_large_delta(plan.budget, agent, num_samples)
    notes = problem.private_notes + tuple(note for note in found if note is not None)
    # All agents start from the same model: its seed is public, and the handshake compares a hash.
    return Work(
        stepper=AgentStepper(
            query,
            keyring.ledger.reserve,
            sampler,
            cell=cell,
            num_parameters=problem.task.num_parameters,
            # A caller's own rule takes the place of momentum: both would smooth twice.
            momentum=plan.momentum if update is None else 0.0,
            update=update,
        ),
        data=EvaluationData(
            problem.task,
            parts,
            problem.public_parts,
            notes,
            problem.simulation,
        ),
        start=problem.task.initialize(settings.seed).to(sweep.torch_dtype),
    )


def make_hello(
    plan: Plan,
    settings: RunSettings,
    work: Work,
    keyring: Keyring,
    steps: set[int],
    data: str,
    *,
    roster: str,
    columns: tuple[str, ...] = (),
) -> Hello:
    """Return the terms that the agent publishes at the handshake; nothing secret."""
    task = work.data.task
    model = f"{task.describe()}; {task.num_parameters} parameters"
    if hasattr(task, "fingerprint"):  # of layers, loss and frozen parameters
        model += f" ({task.fingerprint().hex()[:16]})"
    return Hello(
        plan=fingerprint(plan).hex(),
        model=model,
        start=hashlib.sha256(work.start.numpy().tobytes()).hexdigest()[:16],
        roster=roster,
        settings=settings.describe(plan) | {"partition of data": data, "streams": STREAM_FORMAT},
        nonce=keyring.ledger.nonce.hex(),  # public: noise follows from it only with the keys
        remaining=keyring.ledger.remaining,
        checkpoints=tuple(sorted(steps | {0})),  # the initial model needs no file
        reserved=keyring.ledger.reserved_before,
        columns=columns,
    )


def train_agent(
    run: AgreedRun, entry: Entry, reports: Reports
) -> Generator[AgentStepper, None, AgentResult]:
    """Run all steps that are left, and record them."""
    plan, settings, ledger = run.plan, run.settings, run.keyring.ledger
    exchange = entry.exchange
    if reports.on_message is not None:
        exchange.on_send = partial(reports.on_message, run.agreed.nonce)
    journal = Journal(
        plan,
        settings,
        agent=run.agent,
        data=run.work.data,
        account=ReleaseAccount(plan.budget.of_agent(run.agent), ledger.precision),
        folders=run.folders,
        count_releases=lambda: plan.budget.num_steps - ledger.remaining,
        read_memory=lambda: run.work.stepper.memory,
        count_bytes=exchange.count_bytes,
        reports=reports,
    )
    # After the agreement: the step from which all continue is not known before, and later files are
    # removed.
    parameters, earlier = _restore(run, journal)
    _note_ledger(run, journal)
    for text in run.work.data.private_notes:
        journal.note_privately(text)
    rounds = TrainingRounds(
        plan,
        settings,
        agent=run.agent,
        activate=run.activate,
        stepper=run.work.stepper,
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
        simulation=run.work.data.simulation,
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
            run.work.stepper.restore(state)
        except InvalidArgumentError as error:
            raise ProtocolError(f"a neighbour sent a state that does not fit: {error}") from error
        return run.admission.parameters.clone(), list(rows.values())
    if folders is not None and (removed := forget_after(folders, step)):
        journal.note(f"removed what an earlier run wrote after step {step} ({removed} files)")
    if folders is None or step == 0:
        return run.work.start.clone(), []
    checkpoint = checkpoints_of(folders, run.plan, run.agent, run.settings).load(step)
    run.work.stepper.memory = checkpoint.memory
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
    if skipped := run.keyring.ledger.num_skipped:
        # Privately, as it tells that the data changed.
        journal.note_privately(
            f"{skipped} releases of a pass that an earlier run began count as spent: this run's "
            "data may be other data, so it begins a new pass"
        )


def checkpoints_of(
    folders: Folders, plan: Plan, agent: int, settings: RunSettings
) -> CheckpointFolder:
    """Return the folder of an agent's checkpoints under a plan."""
    return CheckpointFolder(folders.private, plan, agent, is_rehearsal=settings.is_rehearsal)
