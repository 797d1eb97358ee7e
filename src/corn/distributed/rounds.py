"""Rounds of training: one step, one mix with the neighbours, and when to stop.

An agent's step is Algorithm 1: half step with its share of the noise, then one message to and from
each neighbour per mixing round. Losses and stops travel with the headers of these messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias, final

import torch
from torch import Tensor

from corn.distributed.exchange import (
    NO_STOP,
    PREFIX_BYTES,
    SUSPENDED_SHARE,
    Dropout,
    Exchange,
    Header,
    Received,
    StopNotice,
    StopReason,
)
from corn.distributed.gossiping import LinkFlows
from corn.distributed.journal import Journal
from corn.distributed.keyring import Ledger
from corn.distributed.settings import RunSettings
from corn.distributed.survivors import (
    ActivePlan,
    LinkState,
    Membership,
    component_of,
    measure_loss,
    name_agents,
    replan,
    split_survivors,
    weigh_neighbours,
)
from corn.errors import CornError, PublicError
from corn.learn.batches import Batch, BatchSampler
from corn.learn.monitor import Interruption
from corn.learn.step import StepStatistics, compute_gradients, smooth, take_half_step
from corn.learn.tasks import Task
from corn.noise.grid import require_provable
from corn.plan import Plan, fingerprint
from corn.privacy import ClippedQuery
from corn.topology.gossip import GossipRound

ReleaseUpdate: TypeAlias = Callable[[Tensor, int], Tensor]
"""(released gradient, number of the release) → the half step, by a rule of the caller's own.

It sees nothing but releases and public models, so it is post-processing, whatever it does.
"""


class LostError(PublicError):
    """The others went on without this agent."""


@final
class CellBatches:
    """One agent's batches out of those of all agents, as a simulation draws them."""

    def __init__(self, sampler: BatchSampler, cell: int) -> None:
        self._sampler, self._own = sampler, slice(cell, cell + 1)

    def draw(self, number: int) -> Batch:
        """Return the batch of a number, from 0, in one cell."""
        batch, own = self._sampler.draw(number), self._own
        return replace(
            batch,
            inputs=batch.inputs[own],
            targets=batch.targets[own],
            weights=batch.weights[own],
        )


@final
class HalfStep:
    """An agent's part of a step before it sends: gradient, clip, share of the noise, half step.

    Attributes:
        num_broken: gradients so far that were not finite and counted as zero; for the owner alone.
        memory: the average of the agent's releases that it steps along; None without momentum.

    ``update`` replaces the step along the release, or along the average of all releases.
    """

    def __init__(
        self,
        task: Task,
        batches: CellBatches,
        query: ClippedQuery,
        *,
        momentum: float = 0.0,
        update: ReleaseUpdate | None = None,
    ) -> None:
        self._task, self._batches, self._query = task, batches, query
        self._momentum, self._update = momentum, update
        self.memory = torch.zeros(task.num_parameters) if momentum else None
        self._clip = torch.tensor([query.clip], dtype=torch.float64)
        # Whether a gradient is finite depends on data without noise, so this count is never sent.
        self.num_broken = 0

    @torch.no_grad()
    def take(
        self,
        parameters: Tensor,
        noise: Tensor,
        *,
        number: int,
        step_size: float,
        grid: float,
        observe: bool = True,
    ) -> tuple[Tensor, StepStatistics]:
        """Return X − η (clipped gradient + noise, on the grid), shape (d,), and its statistics.

        With momentum, the average of all releases so far takes the place of this one.

        ``number`` is that of the release, which decides the batch. The norm of the noise, which
        takes a while to compute, is NaN unless ``observe``.
        """
        # The same code as in a simulation, for one cell: one place to check clipping and rounding.
        found = compute_gradients(
            self._task,
            parameters.view(1, 1, -1),
            self._batches.draw(number),
            self._clip,
            clips_samples=self._query.unit == "sample",
        )
        self.num_broken += int(found.num_broken.sum())
        clipped = found.values.view(-1), found.factors.view(-1)
        if self._update is None and self.memory is None:
            half = take_half_step(parameters, *clipped, noise, grid=grid, step_size=step_size)
        else:
            # A step of size −1 from zero is the release itself.
            zero = torch.zeros_like(parameters)
            released = take_half_step(zero, *clipped, noise, grid=grid, step_size=-1.0)
            half = self._move(parameters, released, step_size, number)
        noise_norm = torch.linalg.vector_norm(noise if observe else noise[:0]).view(1, 1)
        return half, StepStatistics(found.norms, found.fraction_clipped, noise_norm)

    def _move(self, parameters: Tensor, released: Tensor, step_size: float, number: int) -> Tensor:
        """Return the half step from a release, by the caller's rule or by momentum."""
        if self._update is not None:
            return self._update(released, number)
        if self.memory is not None:
            self.memory = smooth(self.memory.to(parameters), released, self._momentum)
            released = self.memory
        eta = torch.full((1,), step_size).to(parameters)
        return torch.addcmul(parameters, released, eta, value=-1)


@final
class TrainingRounds:
    """One agent between steps.

    Args:
        plan: the plan of all agents, to begin with.
        settings: of the run.
        agent: this agent's number.
        activate: returns a plan for some members with this agent's noise under it.
        half_step: gradient, clip, noise.
        exchange: the links to neighbours.
        ledger: reserves a step before anything of it is sent.
        journal: records what happens.
        first_step: steps done before.
        last_step: where the run ends: T, or earlier where a ledger allows fewer.
        parameters: the model, shape (d,).
    """

    def __init__(
        self,
        plan: Plan,
        settings: RunSettings,
        *,
        agent: int,
        activate: Callable[[Plan, tuple[int, ...]], ActivePlan],
        half_step: HalfStep,
        exchange: Exchange,
        ledger: Ledger,
        journal: Journal,
        first_step: int,
        last_step: int,
        parameters: Tensor,
    ) -> None:
        self._plan, self._settings, self._agent = plan, settings, agent
        self._activate, self._half_step, self._exchange = activate, half_step, exchange
        self._ledger, self._journal = ledger, journal
        self._num_steps, self._last_step = settings.steps_of(plan), last_step
        self._observed_steps = settings.evaluation_steps(plan)
        # ``_plan`` stays the plan of all agents; ``_active`` is replaced after losses. Members keep
        # their first numbers in headers and links, whatever numbers a new plan gives them.
        self._active = activate(plan, tuple(range(plan.num_agents)))
        self._weights, self._schedule = self._active.weights_of(agent), _schedule_of(plan)
        self._next: tuple[int, ActivePlan] | None = None
        self._without_plan: frozenset[int] = frozenset()
        self._has_diverged = False
        self._membership = Membership(plan.num_agents)
        self._reported: frozenset[int] = frozenset()
        self.step, self.parameters = first_step, parameters
        self.seconds_waited = 0.0

    @property
    def lost(self) -> dict[int, int]:
        """The lost agents, and the step at which each loss was first noticed."""
        noticed = self._membership.noticed
        return {agent: noticed[agent] for agent in sorted(self._membership.lost)}

    @property
    def stop(self) -> StopNotice:
        """The reason for an end before the last step; ``NO_STOP`` after the last step."""
        # A notice for a later step than the last one came too late to stop anything.
        if self.step == self._num_steps:
            return NO_STOP
        if self._membership.stop.step <= self.step:
            return self._membership.stop
        return StopNotice(self.step, self._agent, StopReason.BUDGET_SPENT)

    def run(self, interruption: Interruption) -> None:
        """Run to the last step, or to a stop on which all agents agree."""
        try:
            while self.step < self._last_step:
                if interruption.requested:
                    self._announce_stop(StopReason.INTERRUPTED)
                if self._membership.stop.step <= self.step:
                    return
                self._advance()
            # Mixing needs no gradient, so a cool-down releases nothing new and spends nothing.
            for cooldown_step in range(self._plan.cooldown_steps):
                self.parameters = self._gossip(self.parameters, cooldown_step)
        finally:
            if self._half_step.num_broken > 1:
                self._journal.note_privately(
                    f"{self._half_step.num_broken} gradients in all were not finite and counted as "
                    "zero"
                )

    def _announce_stop(self, reason: StopReason) -> None:
        # News of it reach all agents within n steps, so that all stop after the same step.
        step = self.step + self._plan.num_agents
        self._membership.note_stop(StopNotice(step, self._agent, reason))

    def _advance(self) -> None:
        """Run one step: half step, then mixing rounds."""
        # A new plan must be in force before the step's noise is drawn, at all survivors alike.
        self._follow_losses()
        values, statistics = self.parameters, _no_statistics()
        # A model that is not finite stays as it is: its gradients have no meaning, and a release
        # would spend budget for nothing.
        if not self._has_diverged:
            # No noise is released twice: the step is durably reserved before anything of it is
            # sent, so a run that crashes from here on can never release it again.
            number = self._ledger.reserve(self.step)
            had_broken = self._half_step.num_broken > 0
            values, statistics = self._half_step.take(
                self.parameters,
                self._active.noise.take(self.step),
                number=number,
                step_size=self._settings.schedule.at(self.step + 1, self._num_steps),
                grid=self._active.plan.grid,
                observe=self.step + 1 in self._observed_steps,
            )
            if self._half_step.num_broken and not had_broken:
                self._journal.note_privately(
                    f"gradients were not finite at step {self.step} and counted as zero: check the "
                    "data, or try a smaller step size"
                )
        values = self._gossip(values, prepares=not self._has_diverged)
        self.parameters, self.step = values, self.step + 1
        self._check_divergence()
        self._journal.record_step(self.step, values, statistics)

    def _check_divergence(self) -> None:
        """Stop the run if the model is not finite."""
        # Models are public, so all agents may know this. Whether a gradient is finite depends on
        # data without noise, so no other agent may: it counts as zero in the half step.
        # The sum is finite in all but runs that diverge, and cheap; a large model may overflow it.
        is_finite = bool(torch.isfinite(self.parameters.sum()))
        if not (self._has_diverged or is_finite or bool(torch.isfinite(self.parameters).all())):
            self._has_diverged = True
            self._journal.note(
                f"the model is not finite at step {self.step}: try a smaller step size"
            )
            self._announce_stop(StopReason.DIVERGED)
        if self._has_diverged or self._membership.stop.reason is StopReason.DIVERGED:
            self._journal.record_divergence()

    def _gossip(self, values: Tensor, cooldown_step: int = 0, *, prepares: bool = False) -> Tensor:
        """Run the mixing rounds of one step, or of one of the steps that only mix."""
        flows, num_rounds = LinkFlows(self._schedule), len(self._schedule)
        for k in range(num_rounds):
            # Numbers go on through the cool-down, so that no two messages have the same ones.
            number = cooldown_step * num_rounds + k
            values = self._mix(flows, values, number, prepares=prepares and k == 0)
        return values

    def _mix(
        self, flows: LinkFlows, values: Tensor, mixing_round: int, *, prepares: bool
    ) -> Tensor:
        """Run one mixing round: send, draw the next noise meanwhile, receive, average."""
        own = Header(
            plan=self._active.prefix,
            next_plan=self._next_prefix,
            sender=self._agent,
            step=self.step,
            mixing_round=mixing_round,
            degree=len(self._exchange.neighbours),
            payload_bytes=values.nbytes,
            noticed=self._membership.noticed,
            stop=self._membership.stop,
        )
        self._exchange.start(own, values)
        # The next noise is drawn while messages travel. If a stop keeps it from being sent, no
        # budget is spent on it: its step is reserved later, before the noise is used.
        if prepares and self.step + 1 < self._last_step:
            self._active.noise.prepare(self.step + 1)
        began = time.perf_counter()
        found = self._exchange.finish()
        self.seconds_waited += time.perf_counter() - began
        received = {peer: one for peer, one in found.items() if isinstance(one, Received)}
        self._note_losses({p: one for p, one in found.items() if isinstance(one, Dropout)})
        self._read_headers(received)
        weights = self._weigh(own, received)
        return flows.mix(values, {peer: one.parameters for peer, one in received.items()}, weights)

    def _weigh(self, own: Header, received: Mapping[int, Received]) -> dict[int, float]:
        """Return the mixing weights of the neighbours that were received."""
        # Chebyshev rounds keep the plan's weights after a loss. With fewer links and no larger
        # weights, no eigenvalue of W decreases (its Laplacian does), so all stay where the plan's
        # polynomial does not amplify. Metropolis weights of survivors may be larger.
        if self._active.plan.network.gossip.kind == "chebyshev":
            return {peer: self._weights[peer][0] for peer in received}
        states = {peer: self._link_state(one.header) for peer, one in received.items()}
        return weigh_neighbours(self._weights, self._link_state(own), states)

    def _link_state(self, header: Header) -> LinkState:
        """Return what a header announces for weights."""
        known = {agent for agent, when in enumerate(header.noticed) if when <= header.step}
        unplanned = known & set(self._active.members)
        # One-way links keep the plan's weights: after a loss all agents stop anyway.
        is_directed = self._plan.network.graph.is_directed()
        return LinkState(header.degree, is_aware=bool(unplanned) and not is_directed)

    def _note_losses(self, dropouts: Mapping[int, Dropout]) -> None:
        # After its own pause this agent cannot tell a lost neighbour from one that has gone on
        # without it. It leaves rather than declare the others lost.
        if dropouts and self._exchange.was_suspended:
            pause = SUSPENDED_SHARE * self._settings.timeout
            raise LostError(
                f"was suspended for more than {pause:g} s, and the others went on without it at "
                f"step {self.step}"
            )
        for peer, dropout in dropouts.items():
            how = {
                Dropout.CLOSED: "closed its connection",
                Dropout.SILENT: f"sent nothing for {self._settings.timeout:g} s (time-out)",
                Dropout.STALLED: "is alive, but its step does not end",
            }[dropout]
            self._journal.note(f"agent {peer} {how} at step {self.step}")
            self._membership.note_loss(peer, self.step)

    def _read_headers(self, received: Mapping[int, Received]) -> None:
        for peer, one in received.items():
            self._membership.merge(one.header.noticed, one.header.stop)
            # Compared in the step before the switch, so that no noise of two plans is ever mixed.
            if one.header.next_plan != self._next_prefix:
                raise PublicError(
                    f"agent {peer} made another plan for the survivors at step {self.step}"
                )
        lost = self._membership.lost
        # The others mix without this agent from now on: it ends rather than train on alone.
        if self._agent in lost:
            raise LostError(f"was declared lost by the others at step {self.step}")
        for peer in lost & set(self._exchange.neighbours):
            self._exchange.drop(peer)
        if lost != self._reported:
            self._reported = lost
            self._report_losses(lost)

    def _report_losses(self, lost: frozenset[int]) -> None:
        """Stop, or note once for each loss what it means for the rest."""
        if self._settings.on_dropout == "stop":
            # From the step of the first loss, not from this one: then all agents, which hear of it
            # at different steps, stop after the same step.
            noticed = self._membership.noticed
            first = min(noticed)
            notice = StopNotice(
                first + self._plan.num_agents, noticed.index(first), StopReason.LOSS
            )
            self._membership.note_stop(notice)
            return
        graph = self._plan.network.graph
        own = component_of(graph, self._agent, lost)
        if len(split_survivors(graph, lost)) > 1:
            who = ", ".join(map(str, own))
            self._journal.note(f"the survivors are cut apart; linked to each other here: {who}")
        alone = "alone, " if len(own) == 1 else ""
        energy = measure_loss(self._plan, own).describe()
        self._journal.note(f"went on {alone}without {name_agents(lost)}: {energy}")

    @property
    def _next_prefix(self) -> bytes:
        return bytes(PREFIX_BYTES) if self._next is None else self._next[1].prefix

    def _follow_losses(self) -> None:
        """Under ``replan``: n steps after a loss all survivors switch to the same new plan."""
        if self._settings.on_dropout != "replan":
            return
        if self._next is not None and self._next[0] <= self.step:
            self._switch(self._next[1])
        noticed = self._membership.noticed
        unplanned = [noticed[a] for a in self._active.members if noticed[a] <= self.step]
        # All know of a loss two steps before the switch, plan one step before it, and compare the
        # plans' prefixes in the headers of that step.
        switch = min(unplanned, default=self.step + 1) + self._plan.num_agents
        if self._next is None and switch - 1 <= self.step and switch < self._last_step:
            self._make_next_plan(switch)

    def _make_next_plan(self, switch: int) -> None:
        # Losses noticed later are not known to all survivors yet; they lead to a plan of their own.
        lost = self._membership.lost_by(switch - self._plan.num_agents)
        members = component_of(self._plan.network.graph, self._agent, lost)
        # A single survivor has no neighbour to cancel noise with; a plan that failed fails again.
        if len(members) == 1 or lost == self._without_plan:
            return
        try:
            plan = replan(self._plan, members, steps_left=self._last_step - switch)
            # The loss by floating point is counted over the whole run, by the budget it began with.
            require_provable(plan.float_loss, self._plan.budget, len(self.parameters))
        except CornError as error:
            # The same for all survivors, whose present noise keeps the budget without a new plan.
            self._without_plan = lost
            self._journal.note(f"no new plan, the old one stays in force: {error}")
            return
        self._next = switch, self._activate(plan, members)

    def _switch(self, active: ActivePlan) -> None:
        self._active, self._next = active, None
        self._weights = active.weights_of(self._agent)
        self._schedule = _schedule_of(active.plan)
        value = active.plan.certificate.value / active.plan.num_agents
        is_other = type(active.plan.objective) is not type(self._plan.objective)
        self._journal.note(
            f"new plan {fingerprint(active.plan).hex()[:16]} for {len(active.members)} agents from "
            f"step {self.step} on: noise energy per agent {value:.4g}"
            + (" by another objective, as the one given is of all agents" if is_other else "")
        )


def _schedule_of(plan: Plan) -> tuple[GossipRound, ...]:
    return plan.network.schedule


def _no_statistics() -> StepStatistics:
    nan = torch.full((1, 1), torch.nan)
    return StepStatistics(nan, nan, nan)
