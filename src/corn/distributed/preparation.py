"""What an agent has ready before it meets the others: its work and its credentials."""

from __future__ import annotations

import hashlib
import secrets
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, final

from torch import Tensor

from corn.distributed.checkpoint import Checkpoint, find_paid, list_steps, load_checkpoint
from corn.distributed.half_step import Batches, HalfStep, OneCell, torch_type
from corn.distributed.handshake import Hello
from corn.distributed.keyring import digest_roster, load_keys, open_ledger
from corn.distributed.recording import Measuring
from corn.distributed.settings import RunSettings
from corn.errors import CornError, FileFormatError, InvalidArgumentError
from corn.learn.batches import AgentData, BatchSampler, require_few_samples
from corn.learn.perturbation import simulation_nonce
from corn.learn.problem import TrainingProblem
from corn.learn.settings import SweepSettings
from corn.learn.tasks import HasFingerprint, Task
from corn.noise import Identity, Roster
from corn.noise.stream import STREAM_FORMAT
from corn.plan import Plan, fingerprint


class CountingLedger(Protocol):
    """The release ledger, or what stands in for it in a rehearsal."""

    @property
    def nonce(self) -> bytes:
        """What this agent brings to the run's nonce."""

    @property
    def remaining(self) -> int:
        """How many more releases are allowed."""

    reserved_before: int

    def reserve(self, step: int) -> None:
        """Allow the release of a step, once."""


@final
class NoLedger:
    """Counts a rehearsal's releases, which protect nothing, and forgets them."""

    def __init__(self, max_releases: int, nonce: bytes) -> None:
        self.remaining, self.nonce, self.reserved_before = max_releases, nonce, 0

    def reserve(self, step: int) -> None:  # noqa: ARG002
        """See ``CountingLedger``."""
        self.remaining -= 1


@dataclass(frozen=True, eq=False)
class Credentials:
    """Who the agent is, and what it may still release; no identity in a rehearsal."""

    ledger: CountingLedger
    identity: Identity | None = None
    roster: Roster | None = None


@dataclass(frozen=True, eq=False)
class Work:
    """What is trained on what: the half step, what is measured, and where to begin."""

    half_step: HalfStep
    measuring: Measuring
    start: Tensor


def open_credentials(
    plan: Plan, agent: int, settings: RunSettings, keys: Path | None, stack: ExitStack
) -> Credentials:
    """Load keys and open the ledger, which ``stack`` closes."""
    steps = plan.budget.num_steps
    if settings.rehearsal_seed is not None:
        return Credentials(NoLedger(steps, simulation_nonce(settings.rehearsal_seed)))
    if keys is None:
        raise InvalidArgumentError(f"agent {agent}: keys must be a folder with its key and roster")
    identity, roster = load_keys(keys, agent, plan.num_agents)
    return Credentials(stack.enter_context(open_ledger(keys, agent, plan)), identity, roster)


def prepare_work(
    plan: Plan, agent: int, settings: RunSettings, own: TrainingProblem, cohort: AgentData | None
) -> Work:
    """Make ready what an agent trains.

    Args:
        plan: what to run.
        agent: this one.
        settings: how.
        own: the task, this agent's data, and what to measure on.
        cohort: the data of all agents, for a rehearsal that draws a simulation's batches.
    """
    plan.check_parameters(own.task.num_parameters)
    require_few_samples(plan.budget.query, own.data.sizes)
    where = SweepSettings(settings.steps_of(plan), settings.batch_of(plan), dtype=plan.dtype)
    data, parts = own.place(where)
    start = own.task.initialize(settings.seed).to(torch_type(plan))
    batches = _make_batches(plan, settings, data)
    if cohort is not None and settings.rehearsal_seed is not None:
        everyone, _ = replace(own, data=cohort).place(where)
        batches = OneCell(_make_sampler(plan, settings, everyone, settings.rehearsal_seed), agent)
    return Work(
        HalfStep(own.task, batches, plan.budget.query),
        Measuring(own.task, parts, settings.evaluation_steps(plan), own.has_public_parts),
        start,
    )


def make_hello(
    plan: Plan,
    settings: RunSettings,
    task: Task,
    start: Tensor,
    credentials: Credentials,
    checkpoints: set[int],
    data: str = "",
) -> Hello:
    """What the agent says at the handshake, ``data`` on how that was dealt out; nothing secret."""
    return Hello(
        fingerprint(plan).hex(),
        describe_model(task),
        hashlib.sha256(start.numpy().tobytes()).hexdigest()[:16],
        "none" if credentials.roster is None else digest_roster(credentials.roster),
        settings.describe(plan) | {"how data is dealt out": data, "streams": STREAM_FORMAT},
        credentials.ledger.nonce.hex(),
        credentials.ledger.remaining,
        tuple(sorted(checkpoints | {0})),
        credentials.ledger.reserved_before,
    )


def find_checkpoints(
    plan: Plan,
    agent: int,
    settings: RunSettings,
    folder: Path | None,
    *,
    num_parameters: int,
    num_releases: int,
) -> set[int]:
    """The steps this agent can go on from; a damaged checkpoint is refused, not passed over.

    So is one made after more releases than the ledger has counted: with it ε would be too small.
    Without ``resume`` a run begins anew, but not over one in earnest that came further.
    """
    if folder is None:
        return set()
    if not settings.resume:
        paid = find_paid(folder)
        if any(paid):
            raise CornError(
                f"agent {agent}: {folder}: has a run that came to step {max(paid)}: go on with "
                "--resume, or give another folder with --out"
            )
        return set()
    steps = list_steps(folder)
    for step in steps:
        found, name = read_checkpoint(plan, agent, settings, folder, step), f"checkpoint-{step}"
        if len(found.parameters) != num_parameters:
            raise FileFormatError(
                f"agent {agent}: {folder}/{name}.corn: has {len(found.parameters)} parameters, the "
                f"model {num_parameters}"
            )
        if found.num_releases > num_releases and not settings.is_rehearsal:
            raise FileFormatError(
                f"agent {agent}: {folder}/{name}.corn: was made after {found.num_releases} "
                f"releases, but the ledger beside the key counts {num_releases}: it is not that of "
                "the run to go on with; give the folder of its keys, with --keys"
            )
    return steps


def read_checkpoint(
    plan: Plan, agent: int, settings: RunSettings, folder: Path, step: int
) -> Checkpoint:
    """This agent's model after a step of this plan, in a run of the same kind."""
    return load_checkpoint(
        folder,
        plan_fingerprint=fingerprint(plan),
        agent=agent,
        step=step,
        dtype=torch_type(plan),
        is_rehearsal=settings.is_rehearsal,
    )


def describe_model(task: Task) -> str:
    """What all agents must have alike: the task's line, and a hash of layers, loss and constants.

    Frozen parameters are constants.
    """
    text = f"{task.describe()}; {task.num_parameters} parameters"
    return f"{text} ({task.fingerprint().hex()[:16]})" if isinstance(task, HasFingerprint) else text


def _make_batches(plan: Plan, settings: RunSettings, data: AgentData) -> Batches:
    # Nobody else needs to know which samples are in a batch, and amplification by sampling counts
    # on nobody knowing: the order is the agent's own secret, and new in every run.
    seed = settings.rehearsal_seed
    return OneCell(
        _make_sampler(plan, settings, data, secrets.randbits(63) if seed is None else seed), 0
    )


def _make_sampler(plan: Plan, settings: RunSettings, data: AgentData, seed: int) -> BatchSampler:
    query = plan.budget.query
    return BatchSampler(
        data,
        batch_size=settings.batch_of(plan),
        seeds=(seed,),
        sampling_rate=query.sampling_rate,
        divide_by_batch_size=query.unit == "sample",
    )
