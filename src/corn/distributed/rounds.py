"""Rounds of training: one step after another, one mix with the neighbours or one sum of all.

After a loss all survivors recover, and go on or stop.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from corn.distributed.exchange import StepStopped
from corn.distributed.journal import Journal
from corn.distributed.membership import name_agents
from corn.distributed.messages import DIGEST_BYTES, Header, Kind, is_sane
from corn.distributed.recovery import ActivePlan, Recovery, replan
from corn.distributed.results import NO_STOP, StopNotice, StopReason
from corn.distributed.summing import TreeSum, as_integers, digest_model, integer_type
from corn.errors import CornError, InfeasibleError
from corn.learn.step import AgentStepper, StepStatistics, no_statistics
from corn.learn.sweep import Interruption
from corn.noise.masks import require_provable
from corn.plan import fingerprint
from corn.topology.mixing import GossipRound
from corn.transport import Dropout, LinkError

if TYPE_CHECKING:
    from corn.distributed.agent import AgentRun

# Void steps without a loss: one may be an accident, and each costs budget.
_MAX_VOID = 3
# A person who stops several agents reaches all of them in this time, and they leave together.
_SECONDS_TO_GATHER = 1.0
_SECONDS_TO_SEND = 1.0


@final
class TrainingRounds:
    """All steps of one agent: ``step`` are done, and have led to the model ``parameters``, (d,)."""

    def __init__(self, run: AgentRun, journal: Journal, parameters: Tensor) -> None:
        plan, exchange, admission = run.plan, run.exchange, run.admission
        self._run = run
        self._plan = plan
        self._stepper = run.stepper
        self._exchange = exchange
        self._membership = exchange.membership
        self._journal = journal
        self._num_steps = run.settings.steps_of(plan)
        self._observed_steps = run.settings.evaluation_steps(plan)
        self._recovery = Recovery(exchange, self._note_dropout)
        exchange.check_call = self._recovery.check_call
        # Members keep their first numbers in headers and links, whatever a new plan calls them.
        self._active = run.activate(plan, tuple(range(plan.num_agents)))
        self._follow(self._active)
        self._interruption = Interruption()
        self._asked_at: float | None = None
        self._stop = NO_STOP
        # Whether all survivors have agreed on the end of the run.
        self._is_settled = False
        self._void_since_loss = 0
        self._noted_leavers: frozenset[int] = frozenset()
        # The sum of the step before, which other agents may lack.
        self._last_total: Tensor | None = None
        self._is_returning = admission is not None
        if admission is not None:
            # It has all that its sponsor has, and goes on as the others do.
            self._recovery.attempt = admission.header.attempt
            self._last_total = admission.last_total
            if self._last_total is not None:
                exchange.dtype = self._last_total.dtype
        self.step = run.first_step
        self.parameters = parameters

    @property
    def stop(self) -> StopNotice:
        """The reason for an end before the last step; ``NO_STOP`` after the last step."""
        if self.step == self._num_steps:
            return NO_STOP
        spent = StopNotice(self.step, self._run.agent, StopReason.BUDGET_SPENT)
        return spent if self._stop is NO_STOP else self._stop

    def run(self, interruption: Interruption) -> Iterator[AgentStepper]:
        """Run to the last step, or a stop on which all agree; yield as :func:`run_steps` does."""
        self._interruption = interruption
        while self.step < self._run.last_step and self._stop is NO_STOP and not self._is_settled:
            if self._is_asked_to_leave():
                self._leave(StopReason.INTERRUPTED)
            elif self._tree is None:
                yield from self._take_gossip_step()
            else:
                yield from self._take_sum_step(self._tree)
        if self._tree is not None and not self._is_settled:
            self._close_sum(self._tree)
        if self.step == self._run.last_step and not self._is_settled:
            self._cool_down()

    def _begin(self) -> Iterator[AgentStepper]:
        """Begin a release, and wait for its gradient."""
        had_broken = self._stepper.num_broken > 0
        self._stepper.begin(self.step, self._active.noise, self.parameters)
        yield self._stepper
        if self._stepper.num_broken and not had_broken:
            self._journal.note_privately(
                f"gradients were not finite at step {self.step} and counted as zero: check the "
                "data, or try a smaller step size"
            )

    def _take_gossip_step(self) -> Iterator[AgentStepper]:
        """Take the half step, and mix it with the neighbours in rounds."""
        yield from self._begin()
        half = self._stepper.release_half_step(
            step_size=self._step_size, observe=self.step + 1 in self._observed_steps
        )
        if not is_sane(half):
            # Neighbours would refuse it. The model before it stays.
            self._note_divergence()
            self._leave(StopReason.DIVERGED, has_released=True)
            return
        mixed = self._mix(half)
        if mixed is not None:
            self._finish_step(mixed, self._stepper.statistics)

    def _mix(self, values: Tensor, *, cooldown_step: int | None = None) -> Tensor | None:
        """Run the mixing rounds of one step, or of one of the steps that only mix.

        Return None if an agent was lost: the survivors have recovered, and the step is left out.
        """
        schedule = self._active.plan.network.schedule
        before = values
        for k, gossip_round in enumerate(schedule):
            # Numbers go on through the cool-down, so that no two messages have the same ones.
            number = (cooldown_step or 0) * len(schedule) + k
            self._exchange.start(self._make_header(number, values.nbytes), values)
            # Drawn while messages travel. Its step is reserved later.
            if k == 0 and cooldown_step is None and self.step + 1 < self._run.last_step:
                self._active.noise.prepare(self.step + 1)
            try:
                received = self._exchange.finish(self.step * len(schedule) + number)
            except StepStopped as stopped:
                self._recover(stopped.dropouts, has_released=cooldown_step is None)
                return None
            mixed = mix_models(values, received, self._weights, before, gossip_round)
            values, before = mixed, values
        return values

    def _cool_down(self) -> None:
        """Mix without gradients, which spends nothing."""
        # Nobody may come back now, as there are no steps to release.
        self._run.returns.close()
        for cooldown_step in range(self._plan.cooldown_steps):
            mixed = self._mix(self.parameters, cooldown_step=cooldown_step)
            if mixed is None:
                return
            self.parameters = mixed
            self._journal.report_if_due()

    def _take_sum_step(self, tree: TreeSum) -> Iterator[AgentStepper]:
        """Release, sum up, and take the same step as all agents."""
        if self._take_agents_back():
            return
        yield from self._begin()
        words = self._stepper.release_masked(observe=self.step + 1 in self._observed_steps)
        total, next_step = self._add_up(tree, as_integers(words))
        # For agents that may lack it.
        self._last_total = total
        if total is not None:
            sums = total.numpy().view(words.dtype)
            moved = self._stepper.finish(sums, step_size=self._step_size)
            if moved is None:
                self._count_void()
            self._finish_step(self.parameters if moved is None else moved, self._stepper.statistics)
        if next_step is not None:
            self._go_on(next_step)

    def _add_up(self, tree: TreeSum, own: Tensor) -> tuple[Tensor | None, int | None]:
        """Return the sum of all agents' integers; after a lost agent also the step to go on with.

        The sum is there then if any survivor has it.
        """
        model = digest_model(self.parameters)
        try:
            tree.add_up(own, lambda message: self._make_header(message, own.nbytes, model))
        except StepStopped as stopped:
            # Whoever is at the next step already may wait for an agent there that was called. This
            # agent does not take part in its return.
            self._run.returns.reject(self._called_at(self.step + 1))
            next_step, total = self._agree(
                stopped.dropouts, has_released=len(own) > 0, payload_bytes=own.nbytes
            )
            return total, next_step
        return own, None

    def _count_void(self) -> None:
        """Stop after several void steps without a loss: all agents count alike."""
        self._void_since_loss += 1
        if self._void_since_loss == 1:
            self._journal.note(
                f"the sum of step {self.step} is void, as masks did not cancel: no agent applied "
                "it, and it counts as released; some agent's keys or messages are wrong"
            )
        if self._void_since_loss == _MAX_VOID:
            self._journal.note(
                f"stopped at step {self.step}, as the sums of {_MAX_VOID} steps were void without "
                f"a loss: one of {name_agents(self._active.members)} sends wrong messages"
            )
            self._stop = StopNotice(self.step, self._run.agent, StopReason.VOID_SUMS)

    def _close_sum(self, tree: TreeSum) -> None:
        """Wait until all agents have the last sum, and compare models once more."""
        # Without this, an agent that has it could leave before others get it from nobody else.
        _, next_step = self._add_up(tree, torch.empty(0, dtype=self._exchange.dtype))
        if next_step is not None:
            self._skip_to(next_step)
            self._is_settled = True

    def _take_agents_back(self) -> bool:
        """Let agents in that were called for this step, by a recovery; return if there were any.

        All agents know of a call, and wait here. One that comes has all that its sponsor has.
        """
        called = self._called_at(self.step)
        if not called and not self._is_returning:
            self._run.returns.serve(self.step, self._membership)
            return False
        if not self._is_returning:
            for agent in sorted(called & set(self._membership.planned_neighbours)):
                try:
                    self._exchange.add(agent, self._run.returns.connect(agent))
                except LinkError as error:
                    self._journal.note(f"{error} at step {self.step}")
                    self._membership.note(Kind.CUT, self.step, agent)
        self._is_returning = False
        header = replace(
            self._make_header(0, self.parameters.nbytes), attempt=self._recovery.attempt
        )
        self._run.returns.hand_over(
            self.step, header, self.parameters, self._stepper.save(), self._last_total
        )
        self._recover({}, has_released=False)
        return True

    def _called_at(self, step: int) -> frozenset[int]:
        calls = self._membership.calls
        return frozenset(agent for agent, when in calls.items() if when == step)

    def _is_asked_to_leave(self) -> bool:
        now = time.monotonic()
        if self._interruption.requested and self._asked_at is None:
            self._asked_at = now
        return self._asked_at is not None and now >= self._asked_at + _SECONDS_TO_GATHER

    def _leave(self, reason: StopReason, *, has_released: bool = False) -> None:
        """Take no more part; the others go on without this agent, unless all leave."""
        self._stop = StopNotice(self.step, self._run.agent, reason)
        self._recover({}, has_released=has_released)

    def _recover(self, dropouts: Mapping[int, LinkError], *, has_released: bool) -> None:
        """Agree with all survivors, and go on after the steps that anybody has begun."""
        next_step, _ = self._agree(dropouts, has_released=has_released)
        self._go_on(next_step)

    def _agree(
        self, dropouts: Mapping[int, LinkError], *, has_released: bool, payload_bytes: int = 0
    ) -> tuple[int, Tensor | None]:
        """Agree with all survivors; see :meth:`Recovery.run`."""
        for peer, error in dropouts.items():
            self._note_dropout(peer, error)
        if self._interruption.requested and self._stop is NO_STOP:
            self._stop = StopNotice(self.step, self._run.agent, StopReason.INTERRUPTED)
        if self._stop is not NO_STOP:
            self._membership.note(Kind.LEAVE, self.step)
        return self._recovery.run(
            self.step,
            lambda: self._make_header(0, 0),
            has_released=has_released,
            before=self._last_total,
            payload_bytes=payload_bytes,
        )

    def _go_on(self, next_step: int) -> None:
        """Go on after a recovery, or stop, with the same knowledge as all other survivors."""
        own = self._membership
        before = self._active.members
        self._skip_to(next_step)
        for agent in own.leavers.keys() - self._noted_leavers:
            self._journal.note(f"agent {agent} left the run at step {own.leavers[agent]}")
        self._noted_leavers = frozenset(own.leavers)
        if self._stop is not NO_STOP:
            self._stop = replace(self._stop, step=self.step)
            self._is_settled = True
            return
        # The other end may have given up a link that works here, or leave after the recovery.
        linked = set(own.present) - own.cut_links.keys()
        if unlinked := set(self._exchange.neighbours) - linked:
            self._exchange.finish_sending(_SECONDS_TO_SEND)
            for peer in unlinked:
                self._exchange.drop(peer)
        # Whoever was called has come by now, or must ask again.
        self._run.returns.cancel(self.step)
        if self.step == self._run.last_step:
            self._is_settled = True
            return
        try:
            if own.breaks and self._run.settings.policy_for(self._plan) == "stop":
                raise InfeasibleError("lost agents stop this run")
            if len(own.present) == 1:
                raise InfeasibleError("no neighbour is left")
            plan = replan(
                self._plan, own.present, steps_left=self._run.last_step - self.step, cuts=own.cuts
            )
            # The privacy loss by floating point is counted over the whole run, by its first budget.
            require_provable(plan.float_loss, self._plan.budget, len(self.parameters))
        except CornError as error:
            # The same for all survivors: their noise would not cancel any more.
            self._journal.note(f"stopped at step {self.step}: {error}")
            lost = min(own.lost, default=min(own.cuts, default=(self._run.agent, 0))[0])
            self._stop = StopNotice(self.step, lost, StopReason.LOSS)
            self._is_settled = True
            return
        self._void_since_loss = 0
        self._follow(self._run.activate(plan, own.present))
        if came := set(own.present) - set(before):
            self._journal.note(f"{name_agents(came)} took part again from step {self.step} on")
        self._journal.note(
            f"new plan {fingerprint(plan).hex()[:16]} for {plan.num_agents} agents from step "
            f"{self.step} on: noise in the average {plan.central_ratio:.4g} × a trusted server's"
        )

    def _follow(self, active: ActivePlan) -> None:
        """Put a plan in force."""
        self._active = active
        network = active.plan.network
        self._tree: TreeSum | None = None
        if network.mixing == "gossip":
            self._weights = active.weights_of(self._run.agent)
        else:
            self._exchange.dtype = integer_type(active.plan.mask_bits)
            self._tree = TreeSum(self._exchange, network.tree.rename(active.members))

    def _skip_to(self, step: int) -> None:
        """Leave steps out that cannot be completed."""
        if step == self.step:
            return
        skipped = ", ".join(map(str, range(self.step, step)))
        lost = self._membership.lost
        who = f" without {name_agents(lost)}" if lost else ", as a link broke or agents left"
        self._journal.note(
            f"the sum of step {skipped} is void{who}: it counts as released, and nobody applied it"
            if self._tree is not None
            else f"step {skipped} was left out{who}: what was begun counts as released, and its "
            "noise does not cancel where some agents completed it"
        )
        self.step = step
        self._last_total = None
        self._journal.record_step(step, self.parameters, no_statistics())

    def _note_dropout(self, peer: int, error: LinkError) -> None:
        how = error.dropout.format(seconds=self._run.settings.timeout, error=error)
        self._journal.note(f"agent {peer} {how} at step {self.step}")
        if error.dropout is Dropout.MISBEHAVED:
            self._run.returns.ban(peer)
        self._membership.note(Kind.CUT, self.step, peer)

    def _finish_step(self, parameters: Tensor, statistics: StepStatistics) -> None:
        self.parameters = parameters
        self.step += 1
        # Models are public, so all agents may know this. Whether a gradient is finite depends on
        # data without noise, so no other agent may: it counts as zero in the half step.
        if not is_sane(parameters):
            self._note_divergence()
            if self._tree is None:
                self._leave(StopReason.DIVERGED)
                return
            # All agents have this model, and stop at this step.
            self._stop = StopNotice(self.step, self._run.agent, StopReason.DIVERGED)
        self._journal.record_step(self.step, parameters, statistics)

    def _note_divergence(self) -> None:
        self._journal.stop_saving()
        self._journal.note(
            f"the model is not finite, or absurdly large, at step {self.step}: try a smaller step "
            "size"
        )

    @property
    def _step_size(self) -> float:
        return self._run.settings.schedule.at(self.step + 1, self._num_steps)

    def _make_header(
        self, mixing_round: int, payload_bytes: int, model: bytes = bytes(DIGEST_BYTES)
    ) -> Header:
        return Header(
            plan=self._active.prefix,
            sender=self._run.agent,
            step=self.step,
            mixing_round=mixing_round,
            payload_bytes=payload_bytes,
            news=self._membership.news,
            model=model,
        )


@torch.no_grad()
def mix_models(
    values: Tensor,
    received: Mapping[int, Tensor],
    weights: Mapping[int, float],
    before: Tensor,
    gossip_round: GossipRound,
) -> Tensor:
    """Return an agent's model after a round: y + momentum (y − y_before) + gain Σ_j w_ij (y_j − y).

    ``before`` is the model before the last round, or ``values`` in the first.
    """
    momentum, gain = gossip_round
    mixed = values * (1 - gain * sum(weights[peer] for peer in received))
    for peer, model in received.items():
        mixed.add_(model, alpha=gain * weights[peer])
    if momentum:
        mixed.add_(values - before, alpha=momentum)
    return mixed
