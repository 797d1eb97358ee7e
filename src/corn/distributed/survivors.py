"""Survivors of losses: mixing weights among them, what a loss costs, and a new plan for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import networkx as nx
import numpy as np

from corn.arrays import FloatArray
from corn.covariance import GivenObjective, Horizon, Objective, ThreatModel
from corn.distributed.keyring import NoiseShare
from corn.distributed.membership import make_edge
from corn.distributed.messages import PREFIX_BYTES, Edge
from corn.errors import InfeasibleError
from corn.plan import Plan, fingerprint, make_plan
from corn.privacy import PrivacyBudget
from corn.privacy.floats import find_promise, set_aside
from corn.threads import one_thread
from corn.topology import Network, load_network
from corn.topology.gossip import apply_rounds
from corn.topology.graphs import Graph

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

    Both sides are by the same objective, which is another where the plan's is of all agents.
    """
    # The survivors draw the same noise as before, so their covariance is the block R_SS. No
    # agent's privacy is weaker for it, as (R_SS)⁻¹ ⪯ (R⁻¹)_SS; only cancellation is lost.
    R, n = plan.decomposition.covariance, plan.num_agents
    R_left = R[np.ix_(survivors, survivors)]
    objective = _objective_for(plan.objective, len(survivors))
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
            objective=_objective_for(plan.objective, len(survivors)),
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


def _objective_for(objective: Objective, num_agents: int) -> Objective:
    """Return the same objective, unless it is a matrix of all agents."""
    if isinstance(objective, GivenObjective) and np.shape(objective.given)[0] != num_agents:
        return Horizon()
    return objective
