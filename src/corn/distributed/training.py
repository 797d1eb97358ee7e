"""Training of one agent after the agreement: restore, run the rounds, record, return the result."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from torch import Tensor

from corn.distributed.entry import AgreedRun, Entry
from corn.distributed.journal import Journal, ReleaseAccount, Reports
from corn.distributed.results import AgentResult, judge_status
from corn.distributed.rounds import TrainingRounds
from corn.distributed.settings import RunSettings
from corn.distributed.storage import (
    CheckpointFolder,
    Folders,
    forget_after,
    read_rows,
)
from corn.learn.metrics import Row
from corn.learn.sweep import catch_interruption
from corn.plan import Plan


def train_agent(run: AgreedRun, entry: Entry, reports: Reports) -> AgentResult:
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
        read_memory=lambda: run.work.half_step.memory,
        summarize_traffic=exchange.summarize,
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
        half_step=run.work.half_step,
        exchange=exchange,
        returns=entry.returns,
        membership=entry.membership,
        ledger=ledger,
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
        rounds.run(interruption)
    missing = rounds.lost.keys() | rounds.cut_links.keys()
    status = judge_status(all_steps=rounds.step == settings.steps_of(plan), lost=missing)
    journal.record_end(rounds.step, rounds.parameters, status)
    if rounds.alone_since is not None:
        journal.note(f"ended alone: took no part in any mixing after step {rounds.alone_since}")
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
        run.work.half_step.restore(run.admission.state)
        return run.admission.parameters.clone(), list(rows.values())
    if folders is not None and (removed := forget_after(folders, step)):
        journal.note(f"removed what an earlier run wrote after step {step} ({removed} files)")
    if folders is None or step == 0:
        return run.work.start.clone(), []
    checkpoint = checkpoints_of(folders, run.plan, run.agent, run.settings).load(step)
    run.work.half_step.memory = checkpoint.memory
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
