"""Rounds of training: one step, one mix with the neighbours or one sum of all, and when to stop.

An agent's step is Algorithm 1: half step with its share of the noise, then one message to and from
each neighbour per mixing round. With exact sums it is a release, the sum of all releases, and the
same step at all agents. Losses and stops travel with the headers of these messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from corn.distributed.exchange import SUSPENDED_SHARE, Exchange, Outcome, Received
from corn.distributed.journal import Journal
from corn.distributed.membership import Membership, NewsDelays, find_cuts, name_agents
from corn.distributed.messages import (
    DIGEST_BYTES,
    NO_STOP,
    PREFIX_BYTES,
    Edge,
    Header,
    StopNotice,
    StopReason,
    is_sane,
)
from corn.distributed.public_state import LAST_TOTAL
from corn.distributed.recovery import (
    ActivePlan,
    LinkState,
    LossNotes,
    PlanInForce,
    Recovered,
    Recovery,
    weigh_neighbours,
)
from corn.distributed.rejoin import Admission, Returns
from corn.distributed.settings import RunSettings
from corn.distributed.summing import TreeSum, as_integers, digest_model, integer_type
from corn.errors import CornError, PublicError
from corn.learn.step import AgentStepper, StepStatistics, no_statistics
from corn.learn.sweep import Interruption
from corn.noise.masks import MaskWords
from corn.plan import Plan
from corn.topology.gossip import GossipRound
from corn.transport import Dropout, LinkError


@final
class LinkFlows:
    """The rounds of one step at one agent: y ← y + Σ_j f_ij, summed over its neighbours.

    f_ij ← momentum · f_ij + gain · w_ij (y_j − y_i) is what arrived over a link, and its sum over
    links is the change of y, which Chebyshev rounds repeat in part. Both ends of a link have the
    same weight, so f_ij = −f_ji and the sum of all models stays. If a neighbour is lost in the
    middle of a step, its flow is forgotten and the flows between survivors still cancel: their
    average stays from then on, whoever knows of the loss. With the y before as the memory, the
    exchange with the lost agent would be repeated.

    Args:
        schedule: the rounds.
    """

    def __init__(self, schedule: Sequence[GossipRound]) -> None:
        self._schedule = tuple(schedule)
        self._is_plain = all(each == (0, 1) for each in schedule)
        self._num_done = 0
        self._flows: dict[int, Tensor] = {}

    @torch.no_grad()
    def mix(
        self, values: Tensor, received: Mapping[int, Tensor], weights: Mapping[int, float]
    ) -> Tensor:
        """Return the model after the next round, from the neighbours that were received."""
        momentum, gain = self._schedule[self._num_done]
        self._num_done += 1
        if self._is_plain:
            # Weights may have changed with a loss, so the own weight is what others leave of one.
            mixed = values * (1 - sum(weights.values()))
            for peer, weight in weights.items():
                mixed.add_(received[peer], alpha=weight)
            return mixed
        flows = {}
        for peer, weight in weights.items():
            # A subtraction first: its rounding is the same, with the other sign, at the other end.
            flow = (received[peer] - values).mul_(gain * weight)
            if peer in self._flows:
                flow.add_(self._flows[peer], alpha=momentum)
            flows[peer] = flow
        # A neighbour without a weight in this round is forgotten here, with the flow that it had.
        self._flows = flows
        mixed = values.clone()
        for flow in flows.values():
            mixed.add_(flow)
        return mixed


# Void steps without a loss: one may be an accident, and each costs budget.
_MAX_VOID = 3


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
        stepper: makes the releases, and the steps along them.
        exchange: the links to neighbours.
        returns: the agents that come back.
        membership: what is known of losses at the start.
        journal: records what happens.
        first_step: steps done before.
        last_step: where the run ends: T, or earlier where a ledger allows fewer.
        parameters: the model, shape (d,).
        admission: by which this agent returns to a run under way.
    """

    def __init__(
        self,
        plan: Plan,
        settings: RunSettings,
        *,
        agent: int,
        activate: Callable[[Plan, tuple[int, ...]], ActivePlan],
        stepper: AgentStepper,
        exchange: Exchange,
        returns: Returns,
        membership: Membership,
        journal: Journal,
        first_step: int,
        last_step: int,
        parameters: Tensor,
        admission: Admission | None = None,
    ) -> None:
        self._plan, self._settings, self._agent = plan, settings, agent
        self._policy = settings.policy_for(plan)
        self._stepper, self._exchange = stepper, exchange
        self._journal = journal
        self._returns, self._membership = returns, membership
        self._num_steps, self._last_step = settings.steps_of(plan), last_step
        self._observed_steps = settings.evaluation_steps(plan)
        self._has_diverged = False
        self._sum: TreeSum | None = None
        self._delays = NewsDelays.of_gossip(plan.num_agents)
        if plan.network.mixing == "sum":
            self._sum = TreeSum(exchange, plan.network.tree, agent, membership)
            # News reaches the root on the way up, and all others on the way down.
            self._delays = NewsDelays(spread=1, settling=0)
        exchange.check_news = membership.check
        self._recovery = Recovery(
            exchange,
            membership,
            num_agents=plan.num_agents,
            num_links=plan.network.graph.number_of_edges(),
            note_dropout=self._note_dropout,
        )
        # Whether all survivors of a loss have agreed on the end of the run.
        self._is_settled = False
        self._last_total: Tensor | None = None
        self._is_returning = False
        if admission is not None and self._sum is not None:
            # With exact sums it has all that its sponsor has, and goes on as the others do.
            self._is_returning = True
            self._recovery.attempt = admission.header.attempt
            self._last_total = admission.state.get(LAST_TOTAL)
            if self._last_total is not None:
                exchange.dtype = self._last_total.dtype
        self._caller: int | None = None
        self._num_void, self._void_since_loss = 0, 0
        self._recovered_cuts: frozenset[Edge] = frozenset()
        self._plans = PlanInForce(
            plan,
            settings,
            agent=agent,
            activate=activate,
            membership=membership,
            delays=self._delays,
            last_step=last_step,
            num_parameters=len(parameters),
            note=journal.note,
        )
        self._losses = LossNotes(
            plan, agent, membership=membership, delays=self._delays, note=journal.note
        )
        self.step, self.parameters = first_step, parameters
        self.seconds_waited = 0.0

    @property
    def lost(self) -> dict[int, int]:
        """The lost agents, and the step at which each loss was first noticed."""
        return self._membership.lost_by(self.step)

    @property
    def cut_links(self) -> dict[int, int]:
        """Neighbours that still take part though the link to them broke, and since when."""
        cuts, lost = self._membership.own_cuts(self.step), self.lost
        return {peer: when for peer, when in cuts.items() if peer not in lost}

    @property
    def alone_since(self) -> int | None:
        """The step at which the last neighbour was lost; None while there is one."""
        return self._membership.alone_since(self.step)

    @property
    def stop(self) -> StopNotice:
        """The reason for an end before the last step; ``NO_STOP`` after the last step."""
        # The last models are compared after the last step.
        if self._membership.stop.reason is StopReason.MODELS_DIFFER:
            return self._membership.stop
        # A notice for a later step than the last one came too late to stop anything.
        if self.step == self._num_steps:
            return NO_STOP
        if self._membership.stop.step <= self.step:
            return self._membership.stop
        return StopNotice(self.step, self._agent, StopReason.BUDGET_SPENT)

    def run(self, interruption: Interruption) -> Iterator[AgentStepper]:
        """Run to the last step, or to a stop on which all agents agree.

        Each step yields the stepper once it has begun: the caller has it compute the gradient.
        """
        try:
            while self.step < self._last_step and not self._is_settled:
                if interruption.requested:
                    self._announce_stop(StopReason.INTERRUPTED)
                if self._membership.stop.step <= self.step:
                    break
                yield from self._advance()
            if self._sum is not None:
                self._close_sum(self._sum)
            if self.step < self._last_step:
                return
            # Nobody may come back in a cool-down, which has no steps to release.
            self._returns.close()
            # Mixing needs no gradient, so a cool-down releases nothing new and spends nothing.
            for cooldown_step in range(self._plan.cooldown_steps):
                self.parameters = self._gossip(self.parameters, cooldown_step)
                self._journal.record_mixing(self.step)
        finally:
            if self._stepper.num_broken > 1:
                self._journal.note_privately(
                    f"{self._stepper.num_broken} gradients in all were not finite and counted as "
                    "zero"
                )
            if self._num_void > 1:
                self._journal.note(f"the sums of {self._num_void} steps in all were void")

    def _close_sum(self, tree: TreeSum) -> None:
        """Wait until all agents have the last sum, and compare models once more."""
        # Without this, an agent that has it could leave before others get it from nobody else.
        if not self._is_settled:
            _, found = self._add_up(tree, torch.empty(0, dtype=self._exchange.dtype))
            if found is not None:
                self._is_settled = True
                self._skip_to(found.highest)
            if self._membership.stop.reason is StopReason.MODELS_DIFFER:
                self._journal.stop_saving()

    def _announce_stop(self, reason: StopReason) -> None:
        # News of it reaches all agents by then, so that all stop after the same step.
        step = self.step + self._delays.spread
        self._membership.note_stop(StopNotice(step, self._agent, reason))

    def _advance(self) -> Iterator[AgentStepper]:
        """Run one step."""
        if self._sum is None:
            parameters, statistics = yield from self._gossip_once()
            self._finish_step(parameters, statistics)
        else:
            yield from self._sum_once(self._sum)

    def _finish_step(self, parameters: Tensor, statistics: StepStatistics) -> None:
        self.parameters, self.step = parameters, self.step + 1
        self._check_divergence()
        self._journal.record_step(self.step, parameters, statistics)

    def _begin(self) -> Iterator[AgentStepper]:
        """Begin a release, and wait for its gradient."""
        had_broken = self._stepper.num_broken > 0
        self._stepper.begin(self.step, self._plans.active.noise, self.parameters)
        yield self._stepper
        if self._stepper.num_broken and not had_broken:
            self._journal.note_privately(
                f"gradients were not finite at step {self.step} and counted as zero: check the "
                "data, or try a smaller step size"
            )

    def _sum_once(self, tree: TreeSum) -> Iterator[AgentStepper]:
        """Release, sum up, and take the same step as all agents; after a loss, recover."""
        if self._readmit_to_sum():
            return
        yield from self._begin()
        words = self._stepper.release_masked(observe=self.step + 1 in self._observed_steps)
        total, found = self._add_up(tree, as_integers(words))
        # For agents that may lack it.
        self._last_total = total
        if total is not None:
            moved = self._move(total.numpy().view(words.dtype))
            self._finish_step(moved, self._stepper.statistics)
        if found is not None:
            self._go_on(found)

    def _readmit_to_sum(self) -> bool:
        """Let agents in that were called for this step, by a recovery; return if there were any.

        All agents know of a call, and wait here. One that comes has all that its sponsor has, so it
        takes part in the recovery like any other, and in the plan that follows.
        """
        called = self._membership.called_at(self.step) - {self._agent}
        if not called and not self._is_returning:
            # News of a call reaches all agents in this step. The next one gives the agent time to
            # connect.
            self._returns.serve(self.step, self._membership, self._delays.spread)
            return False
        if not self._is_returning:
            self._link_returning(called & set(self._membership.planned_neighbours))
        self._is_returning = False
        state = dict(self._stepper.save())
        if self._last_total is not None:
            state[LAST_TOTAL] = self._last_total
        self._returns.hand_over(self.step, self._header_of_return(), self.parameters, state)
        self._go_on(self._recover(has_released=False))
        return True

    def _recover(self, *, has_released: bool, payload_bytes: int = 0) -> Recovered:
        """Return what all survivors know once they have agreed."""
        return self._recovery.run(
            self.step,
            self._last_total,
            lambda: self._make_header(0, 0),
            has_released=has_released,
            payload_bytes=payload_bytes,
        )

    def _move(self, total: MaskWords) -> Tensor:
        """Return the model after the step along the average of all releases."""
        moved = self._stepper.finish(total, step_size=self._step_size)
        if moved is None:
            self._num_void += 1
            self._count_void(self.step)
            if self._num_void == 1:
                self._journal.note(
                    f"the sum of step {self.step} is void, as masks did not cancel: no agent "
                    "applied it, and it counts as released; some agent's keys or messages are wrong"
                )
            return self.parameters
        return moved

    def _add_up(self, tree: TreeSum, own: Tensor) -> tuple[Tensor | None, Recovered | None]:
        """Return the sum of all agents' integers; after a loss, what survivors agreed on.

        After a loss the sum is there if any survivor has it.
        """
        model, began = digest_model(self.parameters), time.perf_counter()

        def make_header(message: int) -> Header:
            return self._make_header(message, own.nbytes, model)

        def prepare() -> None:
            began = time.perf_counter()
            self._prepare_next()
            self.seconds_waited -= time.perf_counter() - began

        outcome = tree.add_up(own, make_header, prepare)
        total, found = outcome.total, None
        if total is None:
            # Whoever is at the next step already may wait for an agent there that was called. This
            # agent does not take part in its return.
            self._returns.reject(self._membership.called_at(self.step + 1))
            for peer, error in outcome.dropouts.items():
                self._note_dropout(peer, error)
            if outcome.other is not None:
                self._journal.note(
                    f"agent {outcome.other} had another model than agent {self._agent} at step "
                    f"{self.step}"
                )
                notice = StopNotice(self.step, outcome.other, StopReason.MODELS_DIFFER)
                self._membership.note_stop(notice)
            found = self._recover(has_released=len(own) > 0, payload_bytes=own.nbytes)
            total = found.total
            self._caller = outcome.caller
        self.seconds_waited += time.perf_counter() - began
        return total, found

    def _count_void(self, step: int) -> None:
        """Stop after several void steps without a loss: all agents count alike."""
        self._void_since_loss += 1
        if self._void_since_loss != _MAX_VOID:
            return
        heard = "" if self._caller is None else f"; agent {self._caller} called for the last one"
        self._journal.note(
            f"stopped at step {step}, as the sums of {_MAX_VOID} steps were void without a loss: "
            f"one of {name_agents(self._plans.active.members)} sends wrong messages{heard}"
        )
        self._membership.note_stop(StopNotice(step, self._agent, StopReason.VOID_SUMS))

    def _go_on(self, found: Recovered) -> None:
        """Continue after a recovery, with the same knowledge as all other survivors."""
        highest = found.highest
        cuts = frozenset(self._membership.cuts_by(highest))
        if cuts != self._recovered_cuts:
            self._void_since_loss = 0
        elif found.has_released and self._membership.stop.reason is StopReason.NONE:
            self._count_void(highest)
        self._recovered_cuts = cuts
        if self._membership.stop.reason is StopReason.MODELS_DIFFER:
            self._journal.stop_saving()
        if self._membership.stop.step <= highest or highest == self._last_step:
            # All that could be applied is. A run that resumes begins with the step that is void.
            self._is_settled = True
            self._skip_to(highest)
            return
        # A step that some have released is void, and its noise must not be used again.
        self._skip_to(highest + found.has_released)
        # Whoever was called has come by now, or must ask again. All know the same here.
        self._membership.forget_calls(self.step)
        self._membership.forget_before(self.step)
        self._returns.cancel(self.step)
        if self.step == self._last_step:
            self._is_settled = True
            return
        before = self._plans.active.members
        try:
            self._plans.replace_now(self.step)
        except CornError as error:
            self._journal.note(f"stopped, as there is no plan for those that are left: {error}")
            lost = min(self.lost, default=self._agent)
            self._membership.note_stop(StopNotice(self.step, lost, StopReason.LOSS))
            self._is_settled = True
            return
        plan, members = self._plans.active.plan, self._plans.active.members
        if came := set(members) - set(before):
            self._journal.note(f"{name_agents(came)} took part again from step {self.step} on")
        self._exchange.dtype = integer_type(plan.mask_bits)
        self._sum = TreeSum(
            self._exchange, plan.network.tree.rename(members), self._agent, self._membership
        )

    def _skip_to(self, step: int) -> None:
        """Leave steps out whose sums are void."""
        if step == self.step:
            return
        void = ", ".join(map(str, range(self.step, step)))
        lost = self._membership.lost_by(step)
        who = f" without {name_agents(lost)}" if lost else ", as a link broke"
        self._journal.note(
            f"the sum of step {void} is void{who}: no agent applied it, and it counts as released "
            f"({step - self.step} of {self._num_steps} steps)"
        )
        self.step, self._last_total = step, None
        self._journal.record_step(step, self.parameters, no_statistics())

    def _note_dropout(self, peer: int, error: LinkError) -> None:
        self._require_awake({peer: error})
        self._note_loss(peer, error)
        self._membership.note_cut(peer, self.step)
        if self._policy == "stop":
            self._membership.note_stop(StopNotice(self.step, peer, StopReason.LOSS))

    @property
    def _step_size(self) -> float:
        return self._settings.schedule.at(self.step + 1, self._num_steps)

    def _prepare_next(self) -> None:
        # The next noise is drawn while messages travel. If a stop keeps it from being sent, no
        # budget is spent on it: its step is reserved later, before the noise is used.
        if self.step + 1 < self._last_step:
            self._plans.active.noise.prepare(self.step + 1)

    def _make_header(
        self, mixing_round: int, payload_bytes: int, model: bytes = bytes(DIGEST_BYTES)
    ) -> Header:
        return Header(
            plan=self._plans.active.prefix,
            next_plan=self._plans.next_prefix,
            sender=self._agent,
            step=self.step,
            mixing_round=mixing_round,
            degree=len(self._exchange.neighbours),
            payload_bytes=payload_bytes,
            news=self._membership.news,
            model=model,
        )

    def _gossip_once(self) -> Generator[AgentStepper, None, tuple[Tensor, StepStatistics]]:
        """Take the half step, then mix in rounds."""
        # A new plan must be in force before the step's noise is drawn, at all survivors alike.
        if self._readmit():
            self._plans.follow_return(self.step)
        self._plans.follow_losses(self.step)
        values, statistics = self.parameters, no_statistics()
        # A model that is not finite stays as it is: its gradients have no meaning, and a release
        # would spend budget for nothing.
        if not self._has_diverged:
            yield from self._begin()
            observe = self.step + 1 in self._observed_steps
            values = self._stepper.release_half_step(step_size=self._step_size, observe=observe)
            statistics = self._stepper.statistics
            # Neighbours would refuse it. The model before it stays.
            if not is_sane(values):
                self._note_divergence()
                values = self.parameters
        return self._gossip(values, prepares=not self._has_diverged), statistics

    def _check_divergence(self) -> None:
        """Stop the run if the model is not finite, or absurdly large."""
        # Models are public, so all agents may know this. Whether a gradient is finite depends on
        # data without noise, so no other agent may: it counts as zero in the half step.
        if not self._has_diverged and not is_sane(self.parameters):
            self._note_divergence()
        if self._has_diverged or self._membership.stop.reason is StopReason.DIVERGED:
            self._journal.stop_saving()

    def _note_divergence(self) -> None:
        self._has_diverged = True
        self._journal.note(
            f"the model is not finite, or absurdly large, at step {self.step}: try a smaller step "
            "size"
        )
        if self._sum is None:
            self._announce_stop(StopReason.DIVERGED)
        else:
            # All agents have this model, and stop at this step.
            self._membership.note_stop(StopNotice(self.step, self._agent, StopReason.DIVERGED))

    def _gossip(self, values: Tensor, cooldown_step: int = 0, *, prepares: bool = False) -> Tensor:
        """Run the mixing rounds of one step, or of one of the steps that only mix."""
        schedule = self._plans.schedule
        flows, num_rounds = LinkFlows(schedule), len(schedule)
        for k in range(num_rounds):
            # Numbers go on through the cool-down, so that no two messages have the same ones.
            number = cooldown_step * num_rounds + k
            values = self._mix(flows, values, number, prepares=prepares and k == 0)
        return values

    def _mix(
        self, flows: LinkFlows, values: Tensor, mixing_round: int, *, prepares: bool
    ) -> Tensor:
        """Run one mixing round: send, draw the next noise meanwhile, receive, average."""
        own = self._make_header(mixing_round, values.nbytes)
        self._exchange.start(own, values)
        if prepares:
            self._prepare_next()
        began = time.perf_counter()
        outcome = self._exchange.finish()
        self.seconds_waited += time.perf_counter() - began
        self._note_losses(outcome.dropouts)
        self._read_news(outcome)
        weights = self._weigh(own, outcome.received)
        received = {peer: one.parameters for peer, one in outcome.received.items()}
        return flows.mix(values, received, weights)

    def _weigh(self, own: Header, received: Mapping[int, Received]) -> dict[int, float]:
        """Return the mixing weights of the neighbours that were received."""
        # Chebyshev rounds keep the plan's weights after a loss. With fewer links and no larger
        # weights, no eigenvalue of W decreases (its Laplacian does), so all stay where the plan's
        # polynomial does not amplify. Metropolis weights of survivors may be larger.
        active, weights = self._plans.active, self._plans.weights
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

    def _require_awake(self, dropouts: Mapping[int, LinkError]) -> None:
        # After its own pause this agent cannot tell a lost neighbour from one that has gone on
        # without it. It leaves rather than declare the others lost.
        if dropouts and self._exchange.was_suspended:
            pause = SUSPENDED_SHARE * self._settings.timeout
            raise LostError(
                f"was suspended for more than {pause:g} s, and the others went on without it at "
                f"step {self.step}"
            )

    def _note_losses(self, dropouts: Mapping[int, LinkError]) -> None:
        self._require_awake(dropouts)
        for peer, error in dropouts.items():
            self._note_loss(peer, error)
            self._note_cut(peer)
            if self._policy == "stop":
                notice = StopNotice(self.step + self._delays.spread, peer, StopReason.LOSS)
                self._membership.note_stop(notice)

    def _note_loss(self, peer: int, error: LinkError) -> None:
        self._losses.note_dropout(peer, error, self.step, timeout=self._settings.timeout)
        if error.dropout is Dropout.MISBEHAVED:
            self._returns.ban(peer)

    def _note_cut(self, peer: int) -> None:
        self._membership.note_cut(peer, self.step)
        self._losses.watch_cut(peer, self.step)

    def _read_news(self, outcome: Outcome) -> None:
        for message in outcome.received.values():
            self._membership.merge(message.header.news)
        # News that old has reached all agents, so nobody brings back what is forgotten here.
        self._membership.forget_before(self.step - self._delays.spread)
        cuts = self._membership.own_cuts(self.step)
        for peer in self._exchange.neighbours:
            # The other end has noticed a break, and will send no more.
            if peer in cuts:
                self._losses.watch_cut(peer, self.step)
                self._exchange.drop(peer)
        if self._policy != "stop":
            self._losses.report(self.step)

    def _readmit(self) -> bool:
        """Answer agents that ask to return, and link those whose step has come; return if any."""
        # With the settling, no neighbour notes the old loss at or after the step of the return,
        # where find_cuts would count it as a new one.
        delay = self._delays.spread + self._delays.settling
        self._returns.serve(self.step, self._membership, delay)
        returning = {a for a, when in self._membership.news.returns if when == self.step}
        for agent in sorted(returning - {self._agent}):
            self._journal.note(f"agent {agent} takes part again from step {self.step} on")
        self._link_returning(
            (returning & set(self._membership.planned_neighbours)) | self._returns.to_dial
        )
        # The new agent begins with the model that its sponsor has at this step.
        self._returns.hand_over(self.step, self._header_of_return(), self.parameters)
        return bool(returning)

    def _link_returning(self, agents: Iterable[int]) -> None:
        """Link agents whose step has come."""
        for agent in sorted(agents):
            try:
                self._exchange.add(agent, self._returns.connect(agent))
            except LinkError as error:
                self._journal.note(f"{error} at step {self.step}")
                self._note_cut(agent)

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
            attempt=self._recovery.attempt,
        )
