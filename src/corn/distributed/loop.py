"""An agent's run: steps of Algorithm 1 with its neighbours, and what it does when some are lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from corn.distributed.epoch import PREFIX_BYTES, Epoch
from corn.distributed.exchange import SUSPICIOUS_SHARE, Dropout, Exchange, Received
from corn.distributed.half_step import HalfStep
from corn.distributed.header import Header
from corn.distributed.membership import (
    Membership,
    StopNotice,
    component_of,
    name_agents,
    split_survivors,
)
from corn.distributed.replanning import measure_loss, replan
from corn.distributed.settings import RunSettings
from corn.distributed.weights import Standing, weigh_neighbours
from corn.errors import CornError, PublicError
from corn.learn.monitor import Interruption
from corn.learn.step import StepStatistics
from corn.noise.grid import require_provable
from corn.plan import Plan, fingerprint

LEDGER_SPENT = "the release ledgers allow no more steps"


class LostError(PublicError):
    """The others went on without this agent."""


class Ledger(Protocol):
    """What a run asks of the release ledger."""

    def reserve(self, step: int) -> None:
        """Allow the release of a step, once."""


class Watcher(Protocol):
    """Who is told what happens: writes checkpoints and measurements, shows progress."""

    def see_step(self, step: int, parameters: Tensor, statistics: StepStatistics) -> None:
        """``step`` steps are done."""

    def see_divergence(self) -> None:
        """A model is not finite somewhere: models from here on are of no use."""

    def note(self, text: str) -> None:
        """Something a person must know, and anyone may."""

    def note_privately(self, text: str) -> None:
        """Something that depends on the agent's data, for its owner alone."""


@dataclass(frozen=True, eq=False)
class Conditions:
    """What does not change during a run.

    Attributes:
        agent: this one.
        settings: how to run.
        num_agents: n.
        last_step: where the run ends: T, or earlier where a ledger allows fewer.
        rounds: mixing rounds a step, and at the end.
        observed_steps: numbers of steps after which the watcher measures.
        make_epoch: a plan for some members → what this agent draws under it.
    """

    agent: int
    settings: RunSettings
    num_agents: int
    num_steps: int
    last_step: int
    rounds: tuple[int, int]
    observed_steps: frozenset[int]
    make_epoch: Callable[[Plan, tuple[int, ...]], Epoch]


@final
class AgentLoop:
    """One agent between steps.

    Args:
        conditions: see there.
        plan: the plan to begin with.
        half_step: gradient, clip, noise.
        exchange: the links to neighbours.
        ledger: asked before anything of a step is sent.
        watcher: told what happens.
        first_step: how many steps were done before.
        parameters: the model, shape (d,).
    """

    def __init__(
        self,
        conditions: Conditions,
        plan: Plan,
        *,
        half_step: HalfStep,
        exchange: Exchange,
        ledger: Ledger,
        watcher: Watcher,
        first_step: int,
        parameters: Tensor,
    ) -> None:
        self._at, self._half_step, self._exchange = conditions, half_step, exchange
        self._ledger, self._watcher = ledger, watcher
        self._everyone = plan
        self._epoch = conditions.make_epoch(plan, tuple(range(plan.num_agents)))
        self._weights = self._epoch.weights_of(conditions.agent)
        self._proposal: tuple[int, Epoch] | None = None
        self._without_plan: frozenset[int] = frozenset()
        self._has_diverged = False
        self._members = Membership(conditions.num_agents)
        self._reported: frozenset[int] = frozenset()
        self.step, self.parameters = first_step, parameters
        self.seconds_waited = 0.0

    @property
    def lost(self) -> dict[int, int]:
        """Who was lost, and the step at which that was first noticed."""
        return {agent: self._members.noticed[agent] for agent in sorted(self._members.lost)}

    def describe_stop(self) -> str:
        """Why the run ended before its last step, in a few words."""
        who = f"agent {self._members.stop.agent}"
        return {
            "none": LEDGER_SPENT,
            "interrupted": "interrupted",
            "loss": f"{who} was lost",
            "diverged": f"{who}'s model is not finite: try a smaller step size",
        }[self._members.stop.reason]

    def run(self, interruption: Interruption) -> bool:
        """Run to the end; whether all steps were done, rather than a part of them."""
        try:
            return self._run(interruption)
        finally:
            if self._half_step.num_broken > 1:
                self._watcher.note_privately(
                    f"{self._half_step.num_broken} gradients in all were not finite and counted as "
                    "zero"
                )

    def _run(self, interruption: Interruption) -> bool:
        at = self._at
        while self.step < at.last_step:
            if interruption.requested:
                self._members.note_stop(StopNotice(self._horizon(), at.agent, "interrupted"))
            if self._members.stop.step <= self.step:
                return False
            self._advance()
        for mixing_round in range(at.rounds[1]):
            self.parameters = self._mix(self.parameters, mixing_round)
        return self.step == at.num_steps

    def _horizon(self) -> int:
        """The first step by which everybody knows what is said now."""
        return self.step + self._at.num_agents

    def _advance(self) -> None:
        self._follow_losses()
        values, statistics = self._learn()
        for mixing_round in range(self._at.rounds[0]):
            prepares = mixing_round == 0 and not self._has_diverged
            values = self._mix(values, mixing_round, prepares=prepares)
        self.parameters, self.step = values, self.step + 1
        self._check_divergence()
        if self._members.stop.reason == "diverged":
            self._watcher.see_divergence()
        self._watcher.see_step(self.step, values, statistics)

    def _learn(self) -> tuple[Tensor, StepStatistics]:
        """The half step of this step, reserved first; a model that diverged stays as it is."""
        at, step = self._at, self.step
        if self._has_diverged:
            return self.parameters.clone(), _nothing()
        self._ledger.reserve(step)
        had_broken = self._half_step.num_broken > 0
        taken = self._half_step.take(
            self.parameters,
            self._epoch.noise.take(step),
            step=step,
            step_size=at.settings.schedule.at(step + 1, at.num_steps),
            grid=self._epoch.plan.grid,
            observe=step + 1 in at.observed_steps,
        )
        if self._half_step.num_broken and not had_broken:
            self._watcher.note_privately(
                f"gradients were not finite at step {step} and counted as zero: check the data, or "
                "try a smaller step size"
            )
        return taken

    def _check_divergence(self) -> None:
        """Stop the run if the model is not finite.

        Everyone may know that of a model, which is public. That a gradient is not finite nobody may
        know: the step counts it as zero.
        """
        # The sum is finite in all but runs that diverge, and cheap; a large model may overflow it.
        is_finite = bool(torch.isfinite(self.parameters.sum()))
        if self._has_diverged or is_finite or bool(torch.isfinite(self.parameters).all()):
            return
        self._has_diverged = True
        self._watcher.note(f"the model is not finite at step {self.step}: try a smaller step size")
        self._members.note_stop(StopNotice(self._horizon(), self._at.agent, "diverged"))

    @torch.no_grad()
    def _mix(self, values: Tensor, mixing_round: int, *, prepares: bool = False) -> Tensor:
        """One round: send, draw the next noise while messages travel, receive, average."""
        own = self._header(mixing_round, values)
        self._exchange.start(own, values)
        if prepares and self.step + 1 < self._at.last_step:
            self._epoch.noise.prepare(self.step + 1)
        began = time.perf_counter()
        found = self._exchange.finish()
        self.seconds_waited += time.perf_counter() - began
        received = {peer: one for peer, one in found.items() if isinstance(one, Received)}
        self._hear({p: one for p, one in found.items() if isinstance(one, Dropout)}, received)
        standings = {peer: self._standing(one.header) for peer, one in received.items()}
        weights = weigh_neighbours(self._weights, self._standing(own), standings)
        mixed = values * (1 - sum(weights.values()))
        for peer, weight in weights.items():
            mixed.add_(received[peer].parameters, alpha=weight)
        return mixed

    def _header(self, mixing_round: int, values: Tensor) -> Header:
        coming = bytes(PREFIX_BYTES) if self._proposal is None else self._proposal[1].prefix
        return Header(
            self._epoch.prefix,
            coming,
            self._at.agent,
            self.step,
            mixing_round,
            len(self._exchange.neighbours),
            values.nbytes,
            self._members.noticed,
            self._members.stop,
        )

    def _standing(self, header: Header) -> Standing:
        """What a header tells for weights; one-way links keep the plan's, as all will stop."""
        known = {agent for agent, when in enumerate(header.noticed) if when <= header.step}
        beyond = known & set(self._epoch.members)
        is_directed = self._everyone.network.graph.is_directed()
        return Standing(header.degree, bool(beyond) and not is_directed)

    def _hear(self, dropouts: Mapping[int, Dropout], received: Mapping[int, Received]) -> None:
        if dropouts and self._exchange.was_suspended:
            pause = SUSPICIOUS_SHARE * self._at.settings.timeout
            raise LostError(
                f"stood still for more than {pause:g} s, and the others went on without it at "
                f"step {self.step}"
            )
        for peer, dropout in dropouts.items():
            self._watcher.note(f"{dropout.reason} at step {self.step}")
            self._members.note_loss(peer, self.step)
        for peer, one in received.items():
            self._members.hear(one.header.noticed, one.header.stop)
            self._compare_proposals(peer, one.header)
        if self._at.agent in self._members.lost:
            raise LostError(f"was given up by the others at step {self.step}")
        for peer in self._members.lost & set(self._exchange.neighbours):
            self._exchange.drop(peer)
        self._report_losses()

    def _report_losses(self) -> None:
        """Say once for each loss what it means for the rest."""
        lost, at = self._members.lost, self._at
        if lost == self._reported:
            return
        self._reported = lost
        if at.settings.on_dropout == "stop":
            first = min(self._members.noticed)
            lost_first = self._members.noticed.index(first)
            self._members.note_stop(StopNotice(first + at.num_agents, lost_first, "loss"))
            return
        graph, plan = self._everyone.network.graph, self._everyone
        own = component_of(graph, at.agent, lost)
        if len(split_survivors(graph, lost)) > 1:
            who = ", ".join(map(str, own))
            self._watcher.note(f"the survivors are cut apart; linked to each other here: {who}")
        alone = "alone, " if len(own) == 1 else ""
        self._watcher.note(
            f"went on {alone}without {name_agents(lost)}: {measure_loss(plan, own).describe()}"
        )

    def _follow_losses(self) -> None:
        """Under ``replan``: n steps after a loss all survivors switch to the same new plan."""
        at, noticed = self._at, self._members.noticed
        if at.settings.on_dropout != "replan":
            return
        if self._proposal is not None and self._proposal[0] <= self.step:
            self._switch(self._proposal[1])
        uncovered = [noticed[agent] for agent in self._epoch.members if noticed[agent] <= self.step]
        # Everyone knows of it two steps before, plans it one step before, and compares.
        switch = min(uncovered, default=self.step + 1) + at.num_agents
        if self._proposal is None and switch - 1 <= self.step and switch < at.last_step:
            self._propose(switch)

    def _propose(self, switch: int) -> None:
        lost = self._members.lost_by(switch - self._at.num_agents)
        members = component_of(self._everyone.network.graph, self._at.agent, lost)
        if len(members) == 1 or lost == self._without_plan:
            return
        try:
            plan = replan(self._everyone, members, steps_left=self._at.last_step - switch)
            # What floating point takes is counted over the whole run, by the budget it began with.
            require_provable(plan.float_loss, self._everyone.budget, len(self.parameters))
        except CornError as error:
            # The same for all survivors; the noise they have keeps the budget without a new plan.
            self._without_plan = lost
            self._watcher.note(f"no new plan, the old one goes on: {error}")
            return
        self._proposal = switch, self._at.make_epoch(plan, members)

    def _compare_proposals(self, peer: int, header: Header) -> None:
        own = bytes(PREFIX_BYTES) if self._proposal is None else self._proposal[1].prefix
        if header.next_plan != own:
            raise PublicError(
                f"agent {peer} made another plan for the survivors at step {self.step}"
            )

    def _switch(self, epoch: Epoch) -> None:
        self._epoch, self._proposal = epoch, None
        self._weights = epoch.weights_of(self._at.agent)
        value = epoch.plan.certificate.value / epoch.plan.num_agents
        is_other = type(epoch.plan.objective) is not type(self._everyone.objective)
        self._watcher.note(
            f"new plan {fingerprint(epoch.plan).hex()[:16]} for {len(epoch.members)} agents from "
            f"step {self.step} on: noise energy per agent {value:.4g}"
            + (" by another objective, as the one given is of all agents" if is_other else "")
        )


def _nothing() -> StepStatistics:
    nan = torch.full((1, 1), torch.nan)
    return StepStatistics(nan, nan, nan)
