"""The plan in force at each step: that of all agents, or one for survivors after a loss.

All survivors switch at the same step to the same plan, without a coordinator: each computes the
plan from what all of them know by then, and the headers of the step before let them compare it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from corn.distributed.membership import Membership, NewsDelays, component_of
from corn.distributed.messages import PREFIX_BYTES, Edge, StopNotice, StopReason
from corn.distributed.settings import RunSettings
from corn.distributed.survivors import ActivePlan, replan
from corn.errors import CornError, InfeasibleError
from corn.noise.grid import require_provable
from corn.plan import Plan, fingerprint
from corn.topology.gossip import GossipRound


@final
class PlanInForce:
    """The plan by which an agent draws noise and mixes, and the next one after a loss.

    Args:
        plan: the plan of all agents, to begin with.
        settings: of the run.
        agent: this agent's number.
        activate: returns a plan for some members with this agent's noise under it.
        membership: this agent's knowledge of losses and returns.
        delays: of the news of them.
        last_step: where the run ends.
        num_parameters: of the model.
        note: writes a line to the journal.

    Attributes:
        active: the plan in force.
        weights: (w_ij, w_ji) of every other member j, by this plan.
    """

    def __init__(
        self,
        plan: Plan,
        settings: RunSettings,
        *,
        agent: int,
        activate: Callable[[Plan, tuple[int, ...]], ActivePlan],
        membership: Membership,
        delays: NewsDelays,
        last_step: int,
        num_parameters: int,
        note: Callable[[str], None],
    ) -> None:
        self._plan, self._agent = plan, agent
        self._replans = settings.policy_for(plan) == "replan"
        self._activate, self._membership, self._delays = activate, membership, delays
        self._last_step, self._num_parameters, self._note = last_step, num_parameters, note
        # ``_plan`` stays the plan of all agents; ``active`` is replaced after losses. Members keep
        # their first numbers in headers and links, whatever numbers a new plan gives them.
        self.active = self._activate_for_all()
        self.weights = self.active.weights_of(agent)
        self._next: tuple[int, ActivePlan] | None = None

    @property
    def schedule(self) -> tuple[GossipRound, ...]:
        """The mixing rounds of a step."""
        return self.active.plan.network.schedule

    @property
    def next_prefix(self) -> bytes:
        """The prefix of the next plan, for headers; zeros if there is none."""
        return bytes(PREFIX_BYTES) if self._next is None else self._next[1].prefix

    def follow_losses(self, step: int) -> None:
        """Under ``replan``: some steps after a loss all survivors switch to the same new plan."""
        if not self._replans:
            return
        if self._next is not None and self._next[0] <= step:
            self.switch(self._next[1], step)
        cuts = self._membership.cuts_by(step)
        unplanned = [when for edge, when in cuts.items() if edge in self.active.edges]
        # All know of a loss two steps before the switch, plan one step before it, and compare the
        # plans' prefixes in the headers of that step.
        first = min(unplanned, default=step + 1)
        # The first loss that the plan lacks sets the date, so that later ones cannot postpone it.
        switch = first + self._delays.settling + self._delays.spread
        # At least one step must be left to run under the new plan.
        if self._next is None and switch - 1 <= step and switch < self._last_step:
            self._make_next_plan(max(switch, step + 1))

    def follow_return(self, step: int) -> None:
        """Switch to the plan from the step of a return on, the same at all agents.

        The plan of all stays valid whoever is missing. Under ``replan`` one for those who are there
        cancels more.
        """
        self.switch(self._choose_for_return(step), step)

    def replace_now(self, step: int) -> None:
        """Put a plan for all that are linked in force from a step on, by what all of them know.

        Raises:
            CornError: there is none; the same at all of them.
        """
        cuts = self._membership.cuts_by(step)
        members = self._reach(cuts)
        self.switch(self._activate(self._replan(members, cuts, step), members), step)

    def switch(self, active: ActivePlan, step: int) -> None:
        """Put a plan in force from a step on."""
        is_same = active.prefix == self.active.prefix
        self.active, self._next = active, None
        self.weights = active.weights_of(self._agent)
        if is_same:
            return
        cost = (
            f"noise energy per agent {active.plan.certificate.value / active.plan.num_agents:.4g}"
        )
        if active.plan.network.mixing == "sum":
            n, q = active.plan.num_agents, active.plan.threat.max_colluders
            cost = (
                f"noise variance of the average {active.plan.central_ratio:.4g} × a trusted "
                f"server's, by n/(n − q) with n = {n} and q = {q}"
            )
        is_other = type(active.plan.objective) is not type(self._plan.objective)
        self._note(
            f"new plan {fingerprint(active.plan).hex()[:16]} for {len(active.members)} agents from "
            f"step {step} on: {cost}"
            + (" by another objective, as the one given is of all agents" if is_other else "")
        )

    def _activate_for_all(self) -> ActivePlan:
        return self._activate(self._plan, tuple(range(self._plan.num_agents)))

    def _reach(self, cuts: dict[Edge, int]) -> tuple[int, ...]:
        return component_of(self._plan.network.graph, self._agent, cuts)

    def _choose_for_return(self, step: int) -> ActivePlan:
        # Losses that were noticed later are not known to all.
        cuts = self._membership.cuts_by(step, noticed=step - self._delays.spread)
        members = self._reach(cuts)
        if not self._replans or not cuts or len(members) == 1:
            return self._activate_for_all()
        try:
            plan = self._replan(members, cuts, step)
        except CornError:
            return self._activate_for_all()
        return self._activate(plan, members)

    def _make_next_plan(self, switch: int) -> None:
        # Losses noticed later are not known to all survivors yet; they lead to a plan of their own.
        cuts = self._membership.cuts_by(switch - 1, noticed=switch - self._delays.spread)
        members = self._reach(cuts)
        # A return at the same step has a plan of its own.
        if any(when == switch for _, when in self._membership.news.returns):
            return
        try:
            if len(members) == 1:
                raise InfeasibleError("no neighbour is left to cancel noise with")
            plan = self._replan(members, cuts, switch)
        except CornError as error:
            # The same for all survivors. Their present noise keeps the budget, but would not cancel
            # any more.
            self._note(f"stopped, as there is no plan for those that are left: {error}")
            lost = min(self._membership.lost_by(switch), default=self._agent)
            self._membership.note_stop(StopNotice(switch, lost, StopReason.LOSS))
            return
        self._next = switch, self._activate(plan, members)

    def _replan(self, members: tuple[int, ...], cuts: dict[Edge, int], step: int) -> Plan:
        plan = replan(self._plan, members, steps_left=self._last_step - step, cuts=cuts)
        # The loss by floating point is counted over the whole run, by the budget it began with.
        require_provable(plan.float_loss, self._plan.budget, self._num_parameters)
        return plan
