"""The front door for one agent: from a plan, keys, a model and own data to a trained model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from corn.distributed.agent_run import AgentResult, AgentRun, Reports
from corn.distributed.folders import make_folders
from corn.distributed.handshake import (
    Agreement,
    check_guarantee,
    confirm,
    naming_the_silent,
    refusing_aloud,
    shake_hands,
)
from corn.distributed.keyring import share_group_seeds
from corn.distributed.meeting import Meeting
from corn.distributed.preparation import (
    Credentials,
    find_checkpoints,
    make_hello,
    open_credentials,
    prepare_work,
)
from corn.distributed.recording import Account
from corn.distributed.settings import RunSettings
from corn.errors import CornError, InvalidArgumentError
from corn.learn.batches import AgentData
from corn.learn.problem import DataSource, TrainingProblem, read_samples
from corn.learn.tasks import MeanLoss, Task
from corn.learn.training import make_task
from corn.noise import BudgetSpentError, Secret
from corn.plan import AgentGuarantee, Plan


def run_agent(
    plan: Plan,
    *,
    meeting: Meeting,
    model: nn.Module | Task,
    loss: MeanLoss | None = None,
    dataset: DataSource,
    validation: DataSource | None = None,
    test: DataSource | None = None,
    keys: Path | None = None,
    out: Path | None = None,
    settings: RunSettings | None = None,
    reports: Reports | None = None,
) -> AgentResult:
    """Run one agent of a plan in this process, with its own data and keys, to the end.

    Args:
        plan: the same for all agents.
        meeting: where agents meet: :func:`corn.distributed.join` makes it from torchrun's
            environment.
        model: any module without batch normalisation and dropout, or a ``Task``; all agents must
            start from the same parameters.
        loss: for a module: (outputs, targets) → mean loss.
        dataset: this agent's own samples. Of a data loader its data set is taken; batches are drawn
            as the plan's accounting assumes, of the settings' size or else the loader's.
        validation: samples to measure on. They are taken to be this agent's own: what is measured
            on them is for its owner, as on ``dataset``, and is not written to the shared folder.
        test: the same.
        keys: the folder with ``agent-I.key``, ``roster.json`` and the ledger.
        out: the folder of the run, which agents may have in common: ``shared/agent-I`` in it gets
            models and ε and may be handed out; ``private/agent-I`` gets measurements, private notes
            and checkpoints, and only its owner can open it.
        settings: how to run.
        reports: who is told.

    Raises:
        CornError: in one line that begins with the agent's name.
    """
    chosen = settings or RunSettings()
    with preparing(meeting):
        task = make_task(model, loss)
        if isinstance(dataset, DataLoader):
            chosen = _take_batch_size(chosen, plan, dataset)
        parts = {"validation": validation, "test": test}
        own = TrainingProblem(
            task,
            AgentData.from_parts([read_samples(dataset)]),
            {name: read_samples(part) for name, part in parts.items() if part is not None},
        )
    return run_problem(
        plan,
        own,
        meeting=meeting,
        keys=keys,
        out=out,
        settings=chosen,
        reports=reports,
    )


def run_problem(
    plan: Plan,
    own: TrainingProblem,
    *,
    meeting: Meeting,
    cohort: AgentData | None = None,
    keys: Path | None = None,
    out: Path | None = None,
    settings: RunSettings,
    reports: Reports | None = None,
    data: str = "",
) -> AgentResult:
    """Like :func:`run_agent`, for a task.

    ``cohort`` has everyone's data, for a rehearsal; ``data`` says how it was dealt out, in which
    all must agree.
    """
    agent, reports = meeting.agent, reports or Reports()
    with ExitStack() as stack:
        with refusing_aloud(meeting), _naming(agent):
            guarantee = _check(plan, settings, meeting)
            folders = None
            if out is not None:
                folders = make_folders(out, agent, is_rehearsal=settings.is_rehearsal)
            credentials = open_credentials(plan, agent, settings, keys, stack)
            work = prepare_work(plan, agent, settings, own, cohort)
            steps = find_checkpoints(
                plan,
                agent,
                settings,
                None if folders is None else folders.private,
                num_parameters=own.task.num_parameters,
                num_releases=plan.budget.num_steps - credentials.ledger.remaining,
            )
            hello = make_hello(plan, settings, own.task, work.start, credentials, steps, data)
            agreement = shake_hands(meeting, hello)
            _require_budget(agreement)
            run = AgentRun(
                plan,
                settings,
                meeting,
                credentials,
                _make_account(plan, guarantee, settings, credentials),
                work,
                agreement,
                _share_seeds(meeting, plan, credentials, agreement),
                folders,
                reports,
            )
            # Opening a link hears no signal, so it waits until both ends are there.
            confirm(meeting, agreement, "linking")
            with naming_the_silent(meeting, "ready"):
                exchange = run.connect()
                stack.callback(exchange.close)
            confirm(meeting, agreement, "ready")
        with _naming(agent):
            return run.train(exchange)


def _check(plan: Plan, settings: RunSettings, meeting: Meeting) -> AgentGuarantee:
    if meeting.num_agents != plan.num_agents:
        raise InvalidArgumentError(
            f"the plan is for {plan.num_agents} agents, found {meeting.num_agents} ranks"
        )
    settings.check_plan(plan)
    return check_guarantee(plan, meeting.agent)


def _make_account(
    plan: Plan, guarantee: AgentGuarantee, settings: RunSettings, credentials: Credentials
) -> Account:
    account = Account(plan.budget, guarantee.precision)
    if settings.is_rehearsal:
        return account.unprotected()
    # New plans for survivors give an agent other noise, of which only the cap is the same. Runs
    # before this one may have made some too.
    is_first_run = credentials.ledger.remaining == plan.budget.num_steps
    is_exact = is_first_run and settings.on_dropout != "replan"
    return account if is_exact else account.capped()


def _require_budget(agreement: Agreement) -> None:
    if agreement.max_steps == 0:
        crashed = f", {agreement.reserved} of it reserved by a run that crashed"
        raise BudgetSpentError(
            f"agent {agreement.scarce}'s ledger allows no more releases under this plan: its "
            f"budget is spent{crashed if agreement.reserved else ''}"
        )


def _share_seeds(
    meeting: Meeting, plan: Plan, who: Credentials, agreement: Agreement
) -> dict[int, Secret]:
    if who.identity is None or who.roster is None:
        return {}
    return share_group_seeds(meeting, plan, who.identity, who.roster, run_nonce=agreement.nonce)


@contextmanager
def preparing(meeting: Meeting) -> Iterator[None]:
    """Whatever fails before the handshake says whose it is, and the others hear of it."""
    with refusing_aloud(meeting), _naming(meeting.agent):
        yield


@contextmanager
def _naming(agent: int) -> Iterator[None]:
    """Let every failure say whose it is."""
    name = f"agent {agent}: "
    try:
        yield
    except CornError as error:
        if not str(error).startswith(name):
            error.args = (name + str(error),)
        raise
    except OSError as error:
        what = f"{error.filename or 'file'}: {error.strerror or error}"
        raise CornError(name + what) from error


def _take_batch_size(settings: RunSettings, plan: Plan, loader: DataLoader[Any]) -> RunSettings:
    """The loader's batch size, where neither the settings nor the budget name one."""
    if settings.batch_of(plan) is None:
        return replace(settings, batch_size=loader.batch_size)
    return settings
