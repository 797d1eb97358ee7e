"""Rounds of training: one step, one mix with the neighbours, and when to stop.

An agent's step is Algorithm 1: half step with its share of the noise, then one message to and from
each neighbour per mixing round. Losses and stops travel with the headers of these messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import final

import networkx as nx
import torch
from torch import Tensor

from corn.distributed.exchange import MAX_LAG, SUSPENDED_SHARE, Exchange, Outcome, Received
from corn.distributed.gossiping import LinkFlows
from corn.distributed.half_step import HalfStep
from corn.distributed.journal import Journal
from corn.distributed.keyring import Ledger
from corn.distributed.membership import Membership, component_of, find_cuts, make_edge
from corn.distributed.messages import NO_STOP, PREFIX_BYTES, Header, StopNotice, StopReason
from corn.distributed.returns import Returns
from corn.distributed.settings import RunSettings, advise_return
from corn.distributed.survivors import (
    ActivePlan,
    LinkState,
    measure_loss,
    name_agents,
    replan,
    weigh_neighbours,
)
from corn.errors import CornError, PublicError
from corn.learn.monitor import Interruption
from corn.learn.step import StepStatistics
from corn.noise.grid import require_provable
from corn.plan import Plan, fingerprint
from corn.topology.gossip import GossipRound
from corn.transport import Dropout, LinkError

# Neighbours are at most one step apart, so they notice a loss within two steps.
_SETTLING = 2


class LostError(PublicError):
    """The others went on without this agent."""


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
        returns: the agents that come back.
        membership: what is known of losses at the start.
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
        returns: Returns,
        membership: Membership,
        ledger: Ledger,
        journal: Journal,
        first_step: int,
        last_step: int,
        parameters: Tensor,
    ) -> None:
        self._plan, self._settings, self._agent = plan, settings, agent
        self._activate, self._half_step, self._exchange = activate, half_step, exchange
        self._ledger, self._journal = ledger, journal
        self._returns, self._membership = returns, membership
        self._num_steps, self._last_step = settings.steps_of(plan), last_step
        self._observed_steps = settings.evaluation_steps(plan)
        # ``_plan`` stays the plan of all agents; ``_active`` is replaced after losses. Members keep
        # their first numbers in headers and links, whatever numbers a new plan gives them.
        self._active = activate(plan, tuple(range(plan.num_agents)))
        # By prefix: a late message is mixed by the plan of its round, which may be an earlier one.
        self._plans = {self._active.prefix: (self._active, self._active.weights_of(agent))}
        self._schedule = _schedule_of(plan)
        self._next: tuple[int, ActivePlan] | None = None
        self._without_plan: frozenset[object] = frozenset()
        self._has_diverged = False
        self._reported: frozenset[int] = frozenset()
        self._own_cuts: dict[int, int] = {}
        # A message of a late neighbour, and the news in it, may be so many rounds old.
        lag = 0 if settings.deadline is None else MAX_LAG
        self._spread = spread_of(plan.num_agents, lag)
        # The neighbours of an agent that is lost notice it within so many steps of each other.
        self._settling = _SETTLING + lag
        self.step, self.parameters = first_step, parameters
        self.seconds_waited = 0.0

    @property
    def lost(self) -> dict[int, int]:
        """The lost agents, and the step at which each loss was first noticed."""
        return self._membership.lost_by(self.step)

    @property
    def cut_links(self) -> dict[int, int]:
        """Neighbours that still take part though the link to them broke, and since when."""
        cuts, lost = self._membership.cuts_by(self.step), self.lost
        own = {peer: cuts.get(make_edge(self._agent, peer)) for peer in self._plan_neighbours}
        return {peer: when for peer, when in own.items() if when is not None and peer not in lost}

    @property
    def alone_since(self) -> int | None:
        """The step at which the last neighbour was lost; None while there is one."""
        cuts = self._membership.cuts_by(self.step)
        own = [cuts.get(make_edge(self._agent, peer)) for peer in self._plan_neighbours]
        found = [when for when in own if when is not None]
        return max(found) if found and len(found) == len(own) else None

    @property
    def _plan_neighbours(self) -> tuple[int, ...]:
        return tuple(sorted(nx.Graph(self._plan.network.graph).neighbors(self._agent)))

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
            # Nobody may come back in a cool-down, which has no steps to release.
            self._returns.close()
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
        # News of it reach all agents by then, so that all stop after the same step.
        step = self.step + self._spread
        self._membership.note_stop(StopNotice(step, self._agent, reason))

    def _advance(self) -> None:
        """Run one step: half step, then mixing rounds."""
        # A new plan must be in force before the step's noise is drawn, at all survivors alike.
        if self._readmit():
            self._switch(self._plan_of_return(self.step))
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
            news=self._membership.news,
        )
        self._exchange.start(own, values)
        # The next noise is drawn while messages travel. If a stop keeps it from being sent, no
        # budget is spent on it: its step is reserved later, before the noise is used.
        if prepares and self.step + 1 < self._last_step:
            self._active.noise.prepare(self.step + 1)
        began = time.perf_counter()
        # The last messages are waited for, so that none is left behind at the end. All agents know
        # of a stop before its step.
        is_last = self.step + 1 >= min(self._last_step, self._membership.stop.step)
        outcome = self._exchange.finish(None if is_last else self._settings.deadline)
        self.seconds_waited += time.perf_counter() - began
        self._note_losses(outcome.dropouts)
        self._read_news(outcome)
        weights = self._weigh(own, outcome.received)
        received = {peer: one.parameters for peer, one in outcome.received.items()}
        mixed = flows.mix(values, received, weights)
        return self._mix_late(mixed, outcome)

    def _mix_late(self, values: Tensor, outcome: Outcome) -> Tensor:
        """Add what late messages would have changed in the rounds that they belong to."""
        # w_ij (x_j − x_i) of that round. The neighbour has added the same with the other sign when
        # it received the own message, so the average of all models stays.
        for peer, messages in outcome.late.items():
            for own, theirs in messages:
                (weight,) = self._weigh(own.header, {peer: theirs}).values()
                change = theirs.parameters - own.parameters
                values = torch.add(values, change, alpha=weight)
        return values

    def _weigh(self, own: Header, received: Mapping[int, Received]) -> dict[int, float]:
        """Return the mixing weights of the neighbours that were received."""
        # Chebyshev rounds keep the plan's weights after a loss. With fewer links and no larger
        # weights, no eigenvalue of W decreases (its Laplacian does), so all stay where the plan's
        # polynomial does not amplify. Metropolis weights of survivors may be larger.
        active, weights = self._plans[own.plan]
        if active.plan.network.gossip.kind == "chebyshev":
            return {peer: weights[peer][0] for peer in received}
        states = {peer: self._link_state(one.header, active) for peer, one in received.items()}
        return weigh_neighbours(weights, self._link_state(own, active), states)

    def _link_state(self, header: Header, active: ActivePlan) -> LinkState:
        """Return what a header announces for weights."""
        unplanned = find_cuts(header.news, header.step).keys() & active.edges
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
                Dropout.TAMPERED: "is no longer linked, as somebody tampered with the connection",
            }[dropout]
            self._journal.note(f"agent {peer} {how} at step {self.step}")
            self._membership.note_cut(peer, self.step)
            self._own_cuts[peer] = self.step
            if self._settings.on_dropout == "stop":
                notice = StopNotice(self.step + self._spread, peer, StopReason.LOSS)
                self._membership.note_stop(notice)

    def _read_news(self, outcome: Outcome) -> None:
        for header in outcome.headers:
            self._membership.merge(header.news)
        # News that old have reached all agents, so nobody brings back what is forgotten here.
        self._membership.forget_before(self.step - self._spread)
        cuts = self._membership.cuts_by(self.step)
        for peer in self._exchange.neighbours:
            # The other end has noticed a break, and will send no more.
            if make_edge(self._agent, peer) in cuts:
                self._own_cuts[peer] = self.step
                self._exchange.drop(peer)
        if self._settings.on_dropout != "stop":
            self._report_cut_links()
            self._report_losses(frozenset(self._membership.lost_by(self.step)))

    def _report_cut_links(self) -> None:
        """Note once for each own link that broke whether its other end still takes part."""
        for peer, when in list(self._own_cuts.items()):
            # By then all neighbours of a lost agent have noticed, and this agent has heard of it.
            if self.step < when + self._spread + self._settling:
                continue
            del self._own_cuts[peer]
            if peer not in self._membership.lost_by(self.step):
                self._journal.note(
                    f"agent {peer} is alive, as others reach it: only its link to agent "
                    f"{self._agent} was cut at step {when}"
                )

    def _report_losses(self, lost: frozenset[int]) -> None:
        """Note once for each loss what it means for the rest."""
        is_new, self._reported = bool(lost - self._reported), lost
        if not is_new:
            return
        graph = nx.Graph(self._plan.network.graph)
        cuts = self._membership.cuts_by(self.step)
        own = component_of(graph, self._agent, cuts)
        if set(graph) - set(own) - lost:
            who = ", ".join(map(str, own))
            self._journal.note(f"the survivors are cut apart; linked to each other here: {who}")
        alone = "alone, " if len(own) == 1 else ""
        energy = measure_loss(self._plan, own, cuts).describe()
        self._journal.note(f"went on {alone}without {name_agents(lost)}: {energy}")
        if self.alone_since is not None:
            self._journal.note(
                f"has no neighbour left since step {self.alone_since}, and trains on its own data "
                f"alone; if others still run, {advise_return(self._plan)}"
            )

    def _readmit(self) -> bool:
        """Answer agents that ask to return, and link those whose step has come; return if any."""
        # With the settling, no neighbour notes the old loss at or after the step of the return,
        # where find_cuts would count it as a new one.
        self._returns.serve(self.step, self._membership, self._spread + self._settling)
        returning = {a for a, when in self._membership.news.returns if when == self.step}
        for agent in sorted(returning - {self._agent}):
            self._journal.note(f"agent {agent} takes part again from step {self.step} on")
        expected = (returning & set(self._plan_neighbours)) | self._returns.to_dial
        for agent in sorted(expected):
            try:
                self._exchange.add(agent, self._returns.connect(agent))
            except LinkError as error:
                self._journal.note(f"{error} at step {self.step}")
                self._membership.note_cut(agent, self.step)
                self._own_cuts[agent] = self.step
        # The new agent begins with the model that its sponsor has at this step.
        self._returns.hand_over(self.step, self._header_of_return(), self.parameters)
        return bool(returning)

    def _header_of_return(self) -> Header:
        return Header(
            # Zeros, as the model is not a message of a round, and no check compares it with one.
            plan=bytes(PREFIX_BYTES),
            next_plan=bytes(PREFIX_BYTES),
            sender=self._agent,
            step=self.step,
            mixing_round=0,
            degree=len(self._exchange.neighbours),
            payload_bytes=self.parameters.nbytes,
            news=self._membership.news,
        )

    def _plan_of_return(self, step: int) -> ActivePlan:
        """Return the plan from the step of a return on, the same at all agents.

        The plan of all stays valid whoever is missing. Under ``replan`` one for those who are there
        cancels more.
        """
        everyone = self._activate(self._plan, tuple(range(self._plan.num_agents)))
        # Losses that were noticed later are not known to all.
        cuts = self._membership.cuts_by(step, noticed=step - self._spread)
        members = component_of(self._plan.network.graph, self._agent, cuts)
        if self._settings.on_dropout != "replan" or not cuts or len(members) == 1:
            return everyone
        try:
            plan = replan(self._plan, members, steps_left=self._last_step - step, cuts=cuts)
            require_provable(plan.float_loss, self._plan.budget, len(self.parameters))
        except CornError:
            return everyone
        return self._activate(plan, members)

    @property
    def _next_prefix(self) -> bytes:
        return bytes(PREFIX_BYTES) if self._next is None else self._next[1].prefix

    def _follow_losses(self) -> None:
        """Under ``replan``: some steps after a loss all survivors switch to the same new plan."""
        if self._settings.on_dropout != "replan":
            return
        if self._next is not None and self._next[0] <= self.step:
            self._switch(self._next[1])
        cuts = self._membership.cuts_by(self.step)
        unplanned = [when for edge, when in cuts.items() if edge in self._active.edges]
        # All know of a loss two steps before the switch, plan one step before it, and compare the
        # plans' prefixes in the headers of that step.
        first = min(unplanned, default=self.step + 1)
        # The first loss that the plan lacks sets the date, so that later ones cannot postpone it.
        switch = first + self._settling + self._spread
        # At least one step must be left to run under the new plan.
        if self._next is None and switch - 1 <= self.step and switch < self._last_step:
            self._make_next_plan(max(switch, self.step + 1))

    def _make_next_plan(self, switch: int) -> None:
        # Losses noticed later are not known to all survivors yet; they lead to a plan of their own.
        cuts = self._membership.cuts_by(switch - 1, noticed=switch - self._spread)
        members = component_of(self._plan.network.graph, self._agent, cuts)
        # A single survivor has no neighbour to cancel noise with; a plan that failed fails again.
        if len(members) == 1 or frozenset(cuts) == self._without_plan:
            return
        # A return at the same step has a plan of its own.
        if any(when == switch for _, when in self._membership.news.returns):
            return
        try:
            plan = replan(self._plan, members, steps_left=self._last_step - switch, cuts=cuts)
            # The loss by floating point is counted over the whole run, by the budget it began with.
            require_provable(plan.float_loss, self._plan.budget, len(self.parameters))
        except CornError as error:
            # The same for all survivors, whose present noise keeps the budget without a new plan.
            self._without_plan = frozenset(cuts)
            self._journal.note(f"no new plan, the old one stays in force: {error}")
            return
        self._next = switch, self._activate(plan, members)

    def _switch(self, active: ActivePlan) -> None:
        is_same = active.prefix == self._active.prefix
        self._active, self._next = active, None
        # Earlier plans stay in the table: late messages of their rounds may still arrive.
        self._plans[active.prefix] = active, active.weights_of(self._agent)
        self._schedule = _schedule_of(active.plan)
        if is_same:
            return
        value = active.plan.certificate.value / active.plan.num_agents
        is_other = type(active.plan.objective) is not type(self._plan.objective)
        self._journal.note(
            f"new plan {fingerprint(active.plan).hex()[:16]} for {len(active.members)} agents from "
            f"step {self.step} on: noise energy per agent {value:.4g}"
            + (" by another objective, as the one given is of all agents" if is_other else "")
        )


def spread_of(num_agents: int, lag: int) -> int:
    """Return the steps after which news have reached all agents, along a chain of all of them."""
    return num_agents * (1 + lag)


def _schedule_of(plan: Plan) -> tuple[GossipRound, ...]:
    return plan.network.schedule


def _no_statistics() -> StepStatistics:
    nan = torch.full((1, 1), torch.nan)
    return StepStatistics(nan, nan, nan)
