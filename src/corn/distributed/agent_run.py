"""One agent's run once all agreed: opens its links, trains, and writes down what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from corn.distributed.checkpoint import forget_after
from corn.distributed.epoch import Epoch
from corn.distributed.exchange import LinkExchange, Traffic
from corn.distributed.folders import Folders
from corn.distributed.half_step import NoiseShare, torch_type
from corn.distributed.handshake import Agreement
from corn.distributed.header import SEAL_BYTES, header_bytes
from corn.distributed.keyring import make_rehearsal_source, make_source
from corn.distributed.links import choose_backend, open_links
from corn.distributed.loop import AgentLoop, Conditions
from corn.distributed.meeting import Meeting
from corn.distributed.preparation import Credentials, Work, read_checkpoint
from corn.distributed.recording import Account, Progress, Recorder
from corn.distributed.replanning import choose_roster
from corn.distributed.settings import RunSettings
from corn.distributed.status import RunStatus, judge_status
from corn.distributed.tables import read_rows
from corn.learn.metrics import Row
from corn.learn.monitor import Interruption, catch_interruption
from corn.noise import Secret
from corn.plan import Plan, fingerprint


@dataclass(frozen=True, eq=False)
class AgentResult:
    """What one agent reached.

    Attributes:
        agent: whose.
        parameters: its model, shape (d,).
        rows: its own measurements, in the columns of a simulation.
        first_step: where the run went on from.
        num_steps: how many steps are done.
        status: ``complete``; ``partial`` where all steps were done, but agents were lost on the
            way; ``interrupted`` where fewer than all steps were done.
        stop: why, in a few words.
        lost: who was lost on the way, and the step at which that was first noticed.
        notes: what happened.
        traffic: what went over each link.
        seconds_waited: for neighbours.
        private_notes: what happened that depends on the agent's data; like ``rows``, for its owner.
    """

    agent: int
    parameters: Tensor = field(repr=False)
    rows: tuple[Row, ...] = field(repr=False)
    first_step: int
    num_steps: int
    status: RunStatus
    stop: str = ""
    lost: Mapping[int, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    traffic: dict[int, Traffic] = field(default_factory=dict, repr=False)
    seconds_waited: float = field(default=0.0, repr=False)
    private_notes: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Reports:
    """Where news of a run go while it lasts, and how it is asked to stop.

    Private notes depend on the agent's data, and so does a part of its progress.
    """

    on_progress: Callable[[Progress], None] | None = None
    on_note: Callable[[str], None] | None = None
    interruption: Interruption | None = None
    on_private_note: Callable[[str], None] | None = None


@final
@dataclass(frozen=True, eq=False)
class AgentRun:
    """Everything that a run is made of, once all agents agreed."""

    plan: Plan
    settings: RunSettings
    meeting: Meeting
    credentials: Credentials
    account: Account
    work: Work
    agreement: Agreement
    group_seeds: Mapping[int, Secret]
    folders: Folders | None
    reports: Reports

    def connect(self) -> LinkExchange:
        """Open the links to neighbours, and to no one else."""
        graph, agent = self.plan.network.graph, self.meeting.agent
        dtype, n = torch_type(self.plan), self.plan.num_agents
        senders, receivers = frozenset(graph.neighbors(agent)), frozenset(graph.neighbors(agent))
        if graph.is_directed():
            senders = frozenset(graph.predecessors(agent))
        links = open_links(
            self.meeting.store,
            agent,
            senders | receivers,
            message_bytes=header_bytes(n) + self.work.start.nbytes + SEAL_BYTES,
            timeout=self.settings.timeout,
            address=self.meeting.address,
            backend=choose_backend(self.work.start.device.type),
        )
        return LinkExchange(
            links,
            agent=agent,
            num_agents=n,
            num_parameters=len(self.work.start),
            dtype=dtype,
            timeout=self.settings.timeout,
            senders=senders,
            receivers=receivers,
        )

    def train(self, exchange: LinkExchange) -> AgentResult:
        """Run all steps that are left and write down what came of it."""
        first, total = self.agreement.first_step, self.settings.steps_of(self.plan)
        last = min(total, first + self.agreement.max_steps)
        recorder = self._make_recorder(exchange)
        loop = AgentLoop(
            self._conditions(total, last),
            self.plan,
            half_step=self.work.half_step,
            exchange=exchange,
            ledger=self.credentials.ledger,
            watcher=recorder,
            first_step=first,
            parameters=self._first_model(recorder),
        )
        if last < total:
            recorder.note(
                f"the run ends at step {last} of {total}: agent {self.agreement.scarce}'s ledger "
                f"allows {self.agreement.max_steps} more releases"
            )
        if self.agreement.reserved and self.meeting.agent == self.agreement.scarce:
            recorder.note(
                f"a run that crashed had reserved {self.agreement.reserved} releases, which count "
                "as spent"
            )
        recorder.see_start(first, loop.parameters, self._earlier_rows())
        with self._catch_interruption() as interruption:
            complete = loop.run(interruption)
        recorder.see_end(loop.step, loop.parameters)
        return AgentResult(
            self.meeting.agent,
            loop.parameters,
            tuple(recorder.rows),
            first,
            loop.step,
            judge_status(all_steps=complete, lost=loop.lost),
            "" if complete else loop.describe_stop(),
            loop.lost,
            tuple(recorder.notes),
            exchange.traffic,
            loop.seconds_waited,
            tuple(recorder.private_notes),
        )

    def _catch_interruption(self) -> AbstractContextManager[Interruption]:
        """Who gave an interruption catches signals itself, and would hear none caught here."""
        given = self.reports.interruption
        return catch_interruption() if given is None else nullcontext(given)

    def _conditions(self, total: int, last: int) -> Conditions:
        return Conditions(
            self.meeting.agent,
            self.settings,
            self.plan.num_agents,
            total,
            last,
            self.settings.rounds_of(self.plan),
            self.work.measuring.steps,
            self._make_epoch,
        )

    def _make_epoch(self, plan: Plan, members: tuple[int, ...]) -> Epoch:
        """What this agent draws under a plan, as the member that it is there."""
        own, who, rehearsal = members.index(self.meeting.agent), self.credentials, self.settings
        if who.identity is None or who.roster is None:
            source = make_rehearsal_source(
                plan.decomposition, own, seed=rehearsal.rehearsal_seed or 0
            )
        else:
            roster = choose_roster(who.roster, members)
            source = make_source(plan, own, who.identity, roster, group_seeds=self.group_seeds)
        nonce = self.agreement.nonce if who.identity is not None else who.ledger.nonce
        return Epoch(
            plan,
            members,
            NoiseShare(plan, own, source, nonce=nonce, num_parameters=len(self.work.start)),
        )

    def _first_model(self, recorder: Recorder) -> Tensor:
        step = self.agreement.first_step
        if self.folders is not None and (removed := forget_after(self.folders, step)):
            recorder.note(f"removed what an earlier run wrote after step {step} ({removed} files)")
        if step == 0 or self.folders is None:
            return self.work.start.clone()
        agent, settings = self.meeting.agent, self.settings
        return read_checkpoint(self.plan, agent, settings, self.folders.private, step).parameters

    def _earlier_rows(self) -> list[Row]:
        """What a run measured before this one goes on from it."""
        if self.folders is None or self.agreement.first_step == 0:
            return []
        return list(read_rows(self.folders.private / "metrics.csv").values())

    def _make_recorder(self, exchange: LinkExchange) -> Recorder:
        ledger, allowed = self.credentials.ledger, self.plan.budget.num_steps
        seed = self.settings.rehearsal_seed
        return Recorder(
            self.meeting.agent,
            self.plan.mechanism,
            self.settings.schedule,
            self.account,
            self.work.measuring,
            seed=self.settings.seed if seed is None else seed,
            folders=self.folders,
            checkpoint_every=self.settings.checkpoint_every,
            plan_fingerprint=fingerprint(self.plan),
            count_releases=lambda: allowed - ledger.remaining,
            describe_traffic=exchange.summarize,
            on_progress=self.reports.on_progress,
            on_note=self.reports.on_note,
            on_private_note=self.reports.on_private_note,
            is_rehearsal=self.settings.is_rehearsal,
            # That a model diverged takes up to n steps to get around: a checkpoint from before it
            # must last.
            num_kept=3 + math.ceil(self.plan.num_agents / self.settings.checkpoint_every),
        )
