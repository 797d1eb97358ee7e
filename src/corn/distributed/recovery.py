"""Recovery from a lost agent: weights and plans of survivors, sums that are void, and notes.

Under gossip, survivors keep mixing with the weights of the links that are left, and switch to a new
plan, if they can make one, at a step that all of them know by then (:class:`PlanInForce`).

Under exact sums, they agree first on what is lost, done and void (:class:`Recovery`). A sum that
lacks a release is masked, so the step at which an agent is lost is *void*: nobody
applies it. But the sum may have been complete, and have reached some agents only. So survivors
flood all links with what they know, in rounds, until all know the same: the links that broke and
the highest step that anybody began. An agent with the sum of a step gives it to neighbours that
lack it. In the end a step is applied by all survivors or by none.

No agent is more than one step ahead of another: a step's sum needs the releases of all.

Each attempt has a number. An agent that loses another neighbour on the way begins the next attempt,
and whoever hears of a higher number follows. So does an agent that hears of a broken link or of a
higher step so late that others may not hear of it any more: honest news is never that late, but a
neighbour may withhold its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import networkx as nx
import numpy as np
import torch
from torch import Tensor

from corn.checks import FloatArray
from corn.covariance import ThreatModel
from corn.distributed.exchange import Exchange, Received
from corn.distributed.membership import Membership, NewsDelays, component_of, make_edge, name_agents
from corn.distributed.messages import (
    PREFIX_BYTES,
    Edge,
    Header,
    ProtocolError,
    StopNotice,
    StopReason,
)
from corn.distributed.settings import RunSettings, advise_return
from corn.errors import CornError, InfeasibleError
from corn.learn.perturbation import NoiseShare
from corn.noise.grid import require_provable
from corn.plan import Plan, fingerprint, make_plan
from corn.privacy import PrivacyBudget
from corn.privacy.floats import find_promise, set_aside
from corn.threads import one_thread
from corn.topology import Network, load_network
from corn.topology.gossip import GossipRound, apply_rounds
from corn.topology.graphs import Graph
from corn.transport import Dropout, LinkError

# Of ε, doubled with each attempt: the first ones cost nothing, and a few are enough for rounding.
_SHRINK = 1e-9
_MAX_SHRINKS = 29  # the last one halves ε


@dataclass(frozen=True)
class LinkState:
    """The announcement of one end of a link, in its header.

    Attributes:
        degree: its number of neighbours.
        is_aware: whether it knows of a loss that the plan in force does not account for.
    """

    degree: int
    is_aware: bool


def weigh_neighbours(
    planned: Mapping[int, tuple[float, float]], own: LinkState, others: Mapping[int, LinkState]
) -> dict[int, float]:
    """Return the mixing weight of each neighbour; one minus their sum is the agent's own.

    Both ends of a link see both headers of a step, so a weight computed from those two alone is the
    same at both ends: the weights stay symmetric, and models keep their average.

    Args:
        planned: (w_ij, w_ji) of every neighbour j, by the plan.
        own: this agent's announcement.
        others: each neighbour's announcement.

    >>> calm, aware = LinkState(2, is_aware=False), LinkState(1, is_aware=True)
    >>> weigh_neighbours({1: (0.4, 0.4), 2: (0.4, 0.4)}, calm, {1: calm, 2: aware})
    {1: 0.4, 2: 0.3333333333333333}
    """
    return {j: _weigh(*planned[j], own, other) for j, other in others.items()}


def _weigh(planned: float, mirrored: float, own: LinkState, other: LinkState) -> float:
    # Neither end knows of a loss: the plan's weights. Both do: Metropolis weights of the surviving
    # graph, for which the two degrees are enough.
    if not own.is_aware and not other.is_aware:
        return planned
    metropolis = 1 / (1 + max(own.degree, other.degree))
    if own.is_aware and other.is_aware:
        return metropolis
    # The least of both rules: with any larger weight an agent's own could become negative.
    return min(planned, mirrored, metropolis)


@final
@dataclass(frozen=True, eq=False)
class ActivePlan:
    """A plan in force: of the whole network at first, of survivors after a new plan.

    Attributes:
        plan: its agents are numbered 0 … m−1.
        members: the number that each of them had at the start of the run.
        noise: this agent's share.
    """

    plan: Plan
    members: tuple[int, ...]
    noise: NoiseShare

    @cached_property
    def prefix(self) -> bytes:
        """The first bytes of the plan's fingerprint, for headers."""
        return fingerprint(self.plan)[:PREFIX_BYTES]

    @cached_property
    def edges(self) -> frozenset[Edge]:
        """The links of the plan, by the numbers at the start of the run."""
        members = self.members
        return frozenset(
            make_edge(members[i], members[j]) for i, j in nx.Graph(self.plan.network.graph).edges
        )

    def weights_of(self, agent: int) -> dict[int, tuple[float, float]]:
        """Return (w_ij, w_ji) for every other member j, by the numbers at the start of the run."""
        W, own = self.plan.network.mixing_matrix, self.members.index(agent)
        return {
            member: (float(W[own, place]), float(W[place, own]))
            for place, member in enumerate(self.members)
            if member != agent
        }


@dataclass(frozen=True)
class EnergyLoss:
    """The cost of losses: noise energy Tr(A R) per agent, by the objective.

    Attributes:
        planned: with all agents, as designed.
        continued: of the survivors, with the noise they have and their new weights.
    """

    planned: float
    continued: float

    def describe(self) -> str:
        """Return the loss of cancellation in one line."""
        return (
            f"noise energy per agent {self.continued:.4g} instead of {self.planned:.4g} "
            f"({self.continued / self.planned:.3g} ×)"
        )


def measure_loss(plan: Plan, survivors: tuple[int, ...], cuts: Collection[Edge] = ()) -> EnergyLoss:
    """Return how much cancellation is lost when only ``survivors`` use the plan's noise.

    ``cuts`` are broken links, those between survivors included.
    """
    # The survivors draw the same noise as before, so their covariance is the block R_SS. No
    # agent's privacy is weaker for it, as (R_SS)⁻¹ ⪯ (R⁻¹)_SS; only cancellation is lost.
    R, n = plan.decomposition.covariance, plan.num_agents
    R_left = R[np.ix_(survivors, survivors)]
    objective = plan.objective
    A = objective.matrix(plan.network.step_matrix)
    A_left = objective.matrix(_step_left(plan, survivors, cuts))
    return EnergyLoss(
        planned=float((A * R).sum()) / n, continued=float((A_left * R_left).sum()) / len(survivors)
    )


def replan(
    plan: Plan, survivors: tuple[int, ...], *, steps_left: int, cuts: Collection[Edge] = ()
) -> Plan:
    """Return a plan for the survivors, renumbered 0 … m−1 in their order, for the steps left.

    The noise of the survivors lacks what the lost agents would have cancelled. A design for the
    surviving graph restores cancellation. It keeps the plan's precision caps for each of the steps
    left, so the run spends Δ²b_i per step as planned: t steps before and T − t after make agent
    i's μ². Deterministic: every survivor computes the same plan, to the bit.
    """
    with one_thread():  # BLAS threads would change the order of sums, and so the last bits
        return make_plan(
            _network_of(plan, survivors, cuts),
            budget_left(plan, survivors, steps_left),
            threat=_threat_for(plan, survivors),
            objective=plan.objective,
            mechanism=plan.mechanism,
            cooldown_steps=plan.cooldown_steps,
            dtype=plan.dtype,
        )


def budget_left(plan: Plan, survivors: tuple[int, ...], steps_left: int) -> PrivacyBudget:
    """Return the survivors' budget of the steps left: the same caps per step, or slightly less."""
    if plan.budget.num_agents is None:
        return _promise_left(plan.budget, float(plan.precision_caps[0]), steps_left)
    # Each distinct promise is sought once: under Poisson sampling that takes seconds.
    found: dict[tuple[PrivacyBudget, float], PrivacyBudget] = {}
    own = [(plan.budget.of_agent(agent), float(plan.precision_caps[agent])) for agent in survivors]
    for budget, cap in own:
        if (budget, cap) not in found:
            found[budget, cap] = _promise_left(budget, cap, steps_left)
    left = [found[key] for key in own]
    return replace(
        left[0],
        epsilon=tuple(promise.promise.epsilon for promise in left),
        delta=tuple(promise.promise.delta for promise in left),
        sampling_rate=_join([promise.sampling_rate for promise in left]),
        samples_per_agent=_join([promise.samples_per_agent for promise in left]),
    )


def _promise_left(budget: PrivacyBudget, cap: float, steps_left: int) -> PrivacyBudget:
    """Return the budget of agents with one promise for the steps left under their cap."""
    # The precision cap per step is what composes: Δ²b per step, whatever plan a step is under.
    epsilon = find_promise(cap, budget, num_steps=steps_left).promise.epsilon
    # The cap of a budget comes from a search in floats, and may exceed the plan's by rounding. Then
    # the steps left would spend more than was planned for them: ε is reduced until they do not.
    for attempt in range(_MAX_SHRINKS):
        left = replace(
            budget,
            epsilon=epsilon * (1 - _SHRINK * 2**attempt),
            num_steps=steps_left,
            accounting="gdp",
        )
        if set_aside(left).precision_cap <= cap:
            return left
    raise InfeasibleError(f"no budget for {steps_left} steps keeps the precision cap {cap:.6g}")


def _join(values: list[Any]) -> Any:
    """Return one value for all agents, which a budget states as one, or one for each."""
    return values[0] if len(set(values)) == 1 else tuple(values)


def _step_left(plan: Plan, survivors: tuple[int, ...], cuts: Collection[Edge]) -> FloatArray:
    """Return the matrix of a step of survivors that keep the plan's noise."""
    if plan.network.gossip.kind == "plain":
        return _network_of(plan, survivors, cuts).step_matrix
    # Chebyshev rounds keep the plan's weights and schedule; agents keep the weights of lost ones.
    W = np.array(plan.network.mixing_matrix)
    for i, j in cuts:
        W[i, j] = W[j, i] = 0.0
    W = W[np.ix_(survivors, survivors)]
    np.fill_diagonal(W, 0.0)
    schedule = plan.network.gossip.schedule(plan.network.mixing_matrix)
    return apply_rounds(schedule, W + np.diag(1 - W.sum(axis=1)))


def _network_of(plan: Plan, survivors: tuple[int, ...], cuts: Collection[Edge]) -> Network:
    """Return the survivors' network, with Metropolis weights and as many rounds as before."""
    # Metropolis weights of a connected graph are symmetric and mix: Chebyshev rounds need that.
    before = plan.network
    network = load_network(
        _subgraph(plan, survivors, cuts), gossip=before.gossip, mixing=before.mixing
    )
    who = ",".join(map(str, survivors))
    return replace(network, source=f"survivors {who} of {plan.network.source}")


def _subgraph(plan: Plan, survivors: tuple[int, ...], cuts: Collection[Edge]) -> Graph:
    """Return the survivors' graph with nodes and edges in a fixed order, as plans depend on it."""
    places = {agent: place for place, agent in enumerate(survivors)}
    left = nx.Graph(plan.network.graph)
    left.remove_edges_from(cuts)
    # networkx keeps the order of insertion, which may differ with the history of a graph. It is
    # sorted below, as fingerprints must agree.
    graph = nx.relabel_nodes(left.subgraph(survivors), places)
    ordered = nx.Graph()
    ordered.add_nodes_from(range(len(survivors)))
    ordered.add_edges_from(sorted(tuple(sorted(edge)) for edge in graph.edges))
    return ordered


def _threat_for(plan: Plan, survivors: tuple[int, ...]) -> ThreatModel:
    """Return the threat with as many insiders as before, but fewer than there are survivors."""
    threat = plan.threat
    # Groups that were listed by their members keep those that survive.
    seeds = threat.seeds
    if plan.decomposition.is_masked:
        # Masks must join all survivors. Seeds of pairs do, and follow from the keys at once.
        seeds = "auto"
    if not isinstance(seeds, str):
        places = {agent: place for place, agent in enumerate(survivors)}
        left = [[places[a] for a in group if a in places] for group in seeds]
        seeds = tuple(tuple(group) for group in left if group)
    # At least one agent must be left to protect, or the threat model has no meaning.
    colluders = min(threat.max_colluders, len(survivors) - 1)
    return replace(threat, seeds=seeds, max_colluders=colluders)


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
        self._note(
            f"new plan {fingerprint(active.plan).hex()[:16]} for {len(active.members)} agents from "
            f"step {step} on: {cost}"
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


@final
class LossNotes:
    """Notes of an agent on losses.

    Args:
        plan: the plan of all agents.
        agent: this agent's number.
        membership: this agent's knowledge of losses.
        delays: of the news of them.
        note: writes a line to the journal.
    """

    def __init__(
        self,
        plan: Plan,
        agent: int,
        *,
        membership: Membership,
        delays: NewsDelays,
        note: Callable[[str], None],
    ) -> None:
        self._plan, self._agent = plan, agent
        self._membership, self._delays, self._note = membership, delays, note
        self._open_cuts: dict[int, int] = {}
        self._reported: frozenset[int] = frozenset()

    def note_dropout(self, peer: int, error: LinkError, step: int, *, timeout: float) -> None:
        """Note how a neighbour was lost."""
        how = {
            Dropout.CLOSED: "closed its connection",
            Dropout.SILENT: f"sent nothing for {timeout:g} s (time-out)",
            Dropout.STALLED: "is alive, but its step does not end",
            Dropout.TAMPERED: "is no longer linked, as somebody tampered with the connection",
            Dropout.MISBEHAVED: f"is no longer linked, as it broke the protocol ({error})",
        }[error.dropout]
        self._note(f"agent {peer} {how} at step {step}")

    def watch_cut(self, peer: int, step: int) -> None:
        """Remember a break of an own link, until it is known whether its other end is lost."""
        self._open_cuts[peer] = step

    def report(self, step: int) -> None:
        """Note what is known by a step of broken links and lost agents."""
        self._report_cut_links(step)
        self._report_losses(step)

    def _report_cut_links(self, step: int) -> None:
        """Note once for each own link that broke whether its other end still takes part."""
        for peer, when in list(self._open_cuts.items()):
            # By then all neighbours of a lost agent have noticed, and this agent has heard of it.
            if step < when + self._delays.spread + self._delays.settling:
                continue
            del self._open_cuts[peer]
            if peer not in self._membership.lost_by(step):
                self._note(
                    f"agent {peer} is alive, as others reach it: only its link to agent "
                    f"{self._agent} was cut at step {when}"
                )

    def _report_losses(self, step: int) -> None:
        """Note once for each loss what it means for the rest."""
        lost = frozenset(self._membership.lost_by(step))
        is_new, self._reported = bool(lost - self._reported), lost
        if not is_new:
            return
        graph = nx.Graph(self._plan.network.graph)
        cuts = self._membership.cuts_by(step)
        own = component_of(graph, self._agent, cuts)
        if set(graph) - set(own) - lost:
            who = ", ".join(map(str, own))
            self._note(f"the survivors are cut apart; linked to each other here: {who}")
        alone = "alone, " if len(own) == 1 else ""
        energy = measure_loss(self._plan, own, cuts).describe()
        self._note(f"went on {alone}without {name_agents(lost)}: {energy}")
        since = self._membership.alone_since(step)
        if since is not None:
            self._note(
                f"has no neighbour left since step {since}, and trains on its own data alone; if "
                f"others still run, {advise_return(self._plan)}"
            )


@dataclass(frozen=True)
class Recovered:
    """The common knowledge of all survivors.

    Attributes:
        highest: the highest step that any of them was in, or about to begin.
        has_released: whether any of them had released it.
        total: the sum of this agent's step, which others had; None if it is void, or not needed.
    """

    highest: int
    has_released: bool
    total: Tensor | None = None


class _Restart(Exception):  # noqa: N818 - a signal, not an error
    """Another attempt has begun."""

    def __init__(self, attempt: int, caller: int) -> None:
        self.attempt, self.caller = attempt, caller
        super().__init__()


@final
class Recovery:
    """One agent's part in all recoveries of a run.

    Args:
        exchange: the links to neighbours.
        membership: this agent's knowledge, to which it adds all that it hears.
        num_agents: n, at the start of the run.
        num_links: of the plan.
        note_dropout: called for each neighbour that is lost, before others hear of it.
    """

    def __init__(
        self,
        exchange: Exchange,
        membership: Membership,
        *,
        num_agents: int,
        num_links: int,
        note_dropout: Callable[[int, LinkError], None],
    ) -> None:
        self._exchange, self._membership = exchange, membership
        self._num_agents = num_agents
        # Each end of each link may begin an attempt when it breaks; and each highest step may.
        self._max_restarts = 2 * num_links + 2
        self._note_dropout = note_dropout
        # A chain of all agents, one round before, in which losses may be noticed, and one to tell
        # neighbours the own step.
        self._num_rounds = num_agents + 2
        self.attempt = 0

    def run(
        self,
        step: int,
        before: Tensor | None,
        make_header: Callable[[], Header],
        *,
        has_released: bool,
        payload_bytes: int,
    ) -> Recovered:
        """Return what all survivors know in the end.

        Args:
            step: that this agent is in, or about to begin.
            before: the sum of the step before it; None if that was void, or there was none.
            has_released: whether this agent has released the step.
            make_header: returns a header with all news so far.
            payload_bytes: the size of the sum of this step.

        Raises:
            ProtocolError: attempts never end, as a neighbour begins new ones without a loss.
        """
        self.attempt += 1
        own: list[Tensor] = []
        for _ in range(self._max_restarts):
            try:
                # With the sum of its step, it is where those are that had it before.
                place = (step + 1, False) if own else (step, has_released)
                before = own[0] if own else before
                found = self._flood(place, before, own, make_header, payload_bytes)
                return Recovered(*found, own[0] if own else None)
            except _Restart as restart:
                self.attempt, caller = restart.attempt, restart.caller
        raise ProtocolError(
            f"agent {caller} was the last to call for another recovery of step {step}, after "
            f"{self._max_restarts} of them"
        )

    def _flood(
        self,
        place: tuple[int, bool],
        before: Tensor | None,
        own: list[Tensor],
        make_header: Callable[[], Header],
        payload_bytes: int,
    ) -> tuple[int, bool]:
        """Return the highest step of any survivor, and whether one released it.

        Keep the sum of the own step.
        """
        step, highest = place[0], place
        held = step - 1, before
        steps: dict[int, int] = {}
        for number in range(self._num_rounds):
            header = replace(
                make_header(),
                step=highest[0],
                has_released=highest[1],
                mixing_round=number,
                attempt=self.attempt,
            )
            lacking = [peer for peer, theirs in steps.items() if theirs == held[0]]
            self._send(header, held[1], lacking)
            if held[1] is not None:
                # Once is enough.
                steps = {peer: theirs for peer, theirs in steps.items() if peer not in lacking}
            for peer, found in self._receive_all(number, step, payload_bytes).items():
                known = self._membership.cuts_by(highest[0]).keys(), highest
                if number == 0:
                    steps[peer] = found.header.step
                highest = max(highest, (found.header.step, found.header.has_released))
                self._membership.merge(found.header.news)
                if found.header.payload_bytes and not own:
                    own.append(found.parameters.clone())
                    held = step, own[0]
                # What an honest agent knew in the second round has reached all by round n − 1.
                is_late = number >= self._num_agents
                if is_late and known != (self._membership.cuts_by(highest[0]).keys(), highest):
                    raise _Restart(self.attempt + 1, peer)
        return highest

    def _send(self, header: Header, total: Tensor | None, lacking: list[int]) -> None:
        neighbours = self._exchange.neighbours
        empty = torch.empty(0)
        given = [peer for peer in lacking if peer in neighbours] if total is not None else []
        others = [peer for peer in neighbours if peer not in given]
        self._exchange.send(others, replace(header, payload_bytes=0), empty)
        if total is not None:
            self._exchange.send(given, replace(header, payload_bytes=total.nbytes), total)

    def _receive_all(self, number: int, step: int, payload_bytes: int) -> dict[int, Received]:
        """Return the message of this round of each neighbour that is left."""

        def check(header: Header) -> None:
            self._check(header, number, step, payload_bytes)

        received, began = {}, time.monotonic()
        for peer in self._exchange.neighbours:
            try:
                received[peer] = self._receive(peer, check, began)
            except LinkError as error:
                self._exchange.drop(peer)
                self._note_dropout(peer, error)
                # News of the first round still reaches all in time; later news needs all rounds.
                if number > 0:
                    raise _Restart(self.attempt + 1, peer) from error
        return received

    def _receive(self, peer: int, check: Callable[[Header], None], began: float) -> Received:
        # One limit for all that is skipped: a neighbour could send old messages for ever.
        deadline = began + self._exchange.patience
        while True:
            found = self._exchange.receive(
                peer, check, in_pieces=True, since=began, deadline=deadline
            )
            if found.header.attempt > self.attempt:
                self._membership.merge(found.header.news)
                self._exchange.put_back(peer, found)
                raise _Restart(found.header.attempt, peer)
            # Others were under way: of a sum, or of an attempt that was given up.
            if found.header.attempt == self.attempt:
                return found

    def _check(self, header: Header, number: int, step: int, payload_bytes: int) -> None:
        """Raise ``ProtocolError`` unless a message belongs to this recovery or to one before."""
        who = f"agent {header.sender}"
        # A neighbour sends a message in every attempt, so none can skip one.
        if header.attempt > self.attempt + 1:
            raise ProtocolError(f"{who} called for recovery {header.attempt} of {self.attempt}")
        if header.attempt != self.attempt:
            return
        if header.mixing_round != number:
            raise ProtocolError(
                f"{who} is in round {header.mixing_round} of a recovery, not in round {number}"
            )
        # Neighbours are at most one step apart, and tell their own step first. Later they tell the
        # highest that they heard of.
        if not step - 1 <= header.step <= step + (1 if number == 0 else 2):
            raise ProtocolError(f"{who} is at step {header.step}, and this agent at step {step}")
        if header.payload_bytes not in (0, payload_bytes):
            raise ProtocolError(
                f"{who} passed on a sum of {header.payload_bytes} bytes, not {payload_bytes}"
            )
