"""One agent of a plan, from its keys and data to a trained model.

An agent checks the plan, agrees with the others, connects to its neighbours, and trains.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

from torch import nn
from torch.utils.data import DataLoader

from corn.distributed.dropout.rejoin import load_addresses
from corn.distributed.records.journal import EvaluationData, Reports
from corn.distributed.records.results import AgentResult
from corn.distributed.records.storage import Folders, find_checkpoints, make_folders
from corn.distributed.settings import AgentConfig, RunSettings
from corn.distributed.startup.entry import AgreedRun, Work, begin_run, return_to_run
from corn.distributed.startup.handshake import Hello, announcing_failure, check_plan
from corn.distributed.startup.joining import join
from corn.distributed.startup.keyring import Keyring, find_credentials, open_keyring
from corn.distributed.startup.planning import find_plan
from corn.distributed.startup.rendezvous import Rendezvous
from corn.distributed.startup.requirements import ReleaseTotal, Requirements, compose_total
from corn.distributed.startup.start_errors import naming_agent
from corn.distributed.steps.half_step import CellBatches, HalfStep, UpdateRule
from corn.distributed.steps.training import checkpoints_of, train_agent
from corn.learn.batches import (
    AgentData,
    BatchSampler,
    Choices,
    note_batch_size,
    note_large_delta,
    require_fitting_samples,
)
from corn.learn.own_loop import LoopTask
from corn.learn.problem import DataSource, TrainingProblem, read_samples
from corn.learn.settings import SweepSettings
from corn.learn.tasks import HasFingerprint, MeanLoss, Task
from corn.learn.training import make_task
from corn.noise.stream import STREAM_FORMAT
from corn.plan import Plan, fingerprint


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
        rendezvous: :func:`corn.distributed.join` makes it from torchrun's environment and the
            agent's folder of keys, in which the ledger is kept too.
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
    return run_problem(
        plan,
        own,
        rendezvous=rendezvous,
        out=out,
        settings=chosen,
        reports=reports,
        requirements=requirements,
        rejoins=rejoins,
    )


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
    result = run_problem(
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
    return plan, result


def join_run(config: AgentConfig, reports: Reports) -> Rendezvous:
    """Join the other agents of a run, or of one under way."""
    settings, credentials, earlier = config.settings, None, None
    if config.agent is not None and config.num_agents is not None:
        with naming_agent(config.agent):
            # Under torchrun the number is not known yet, and join loads the key.
            credentials = find_credentials(settings, config.keys, config.agent, config.num_agents)
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


def run_problem(
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
) -> AgentResult:
    """Run one agent of a plan on a problem with its own data.

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
            choices = keyring.make_choices(digest_data(plan, agent, problem))
            work = prepare_work(
                plan, agent, settings, problem, choices, cohort=cohort, update=update
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
            return train_agent(run, entry, reports)


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
    choices: Choices,
    *,
    cohort: AgentData | None = None,
    update: UpdateRule | None = None,
) -> Work:
    """Prepare an agent's data and initial model.

    ``choices`` are the agent's own. ``cohort`` has the data of all agents, for a rehearsal that
    draws a simulation's batches. ``update`` is that of :func:`run_problem`.
    """
    # The plan's proof for floats holds up to a number of parameters and of samples.
    plan.check_parameters(problem.task.num_parameters)
    (num_samples,) = problem.data.sizes
    require_fitting_samples(plan.budget.of_agent(agent), [num_samples], first=agent)
    sweep = SweepSettings(settings.steps_of(plan), settings.batch_of(plan), dtype=plan.dtype)
    data, parts = problem.place(sweep)
    query, size = plan.budget.of_agent(agent).query, settings.batch_of(plan)
    cell = 0
    if not settings.is_rehearsal:
        sampler = BatchSampler.of_agent(query, data, [choices], batch_size=size)
    elif cohort is None:
        sampler = BatchSampler(data, (query,), batch_size=size, choices=[choices])
    else:
        # A rehearsal's batches are those of all agents, as a simulation draws them.
        data, _ = replace(problem, data=cohort).place(sweep)
        cell = agent
        sampler = BatchSampler(data, plan.budget.queries, batch_size=size, choices=[choices])
    found = note_batch_size(query, num_samples), note_large_delta(plan.budget, agent, num_samples)
    notes = problem.private_notes + tuple(note for note in found if note is not None)
    # All agents start from the same model: its seed is public, and the handshake compares a hash.
    return Work(
        half_step=HalfStep(
            problem.task,
            CellBatches(sampler, cell),
            query,
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
    if isinstance(task, HasFingerprint):  # of layers, loss and frozen parameters
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
