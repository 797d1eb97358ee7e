"""One agent of a plan, from its keys and data to a trained model.

An agent checks the plan, agrees with the others, connects to its neighbours, and trains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from corn.distributed.entry import AgreedRun, Entry, begin_run, return_to_run
from corn.distributed.handshake import Hello, announcing_failure, check_guarantee
from corn.distributed.journal import Journal, Reports
from corn.distributed.keyring import load_credentials, open_ledger
from corn.distributed.messages import ProtocolError
from corn.distributed.planning import plan_together
from corn.distributed.public_state import LAST_TOTAL
from corn.distributed.rejoin import load_addresses
from corn.distributed.rendezvous import Rendezvous, join, naming_agent
from corn.distributed.requirements import Requirements
from corn.distributed.results import AgentResult, judge_status
from corn.distributed.rounds import TrainingRounds
from corn.distributed.settings import AgentConfig, RunSettings
from corn.distributed.storage import (
    CheckpointFolder,
    Folders,
    forget_after,
    list_checkpoints,
    make_folders,
    read_rows,
)
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
from corn.learn.problem import DataSource, SweepSettings, TrainingProblem, read_samples
from corn.learn.step import AgentStepper, UpdateRule
from corn.learn.sweep import catch_interruption
from corn.learn.tasks import MeanLoss, Task
from corn.learn.training import make_task
from corn.noise import ReleaseLedger
from corn.noise.stream import STREAM_FORMAT
from corn.plan import Plan, fingerprint, load_plan, save_plan

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
            # Before a pass is chosen, which may skip some: what the ledger had counted. A
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
