"""A new plan for survivors: computed by each of them alone, and the same for all.

The noise of those who stay loses what the lost agents would have cancelled. A new design for the
surviving graph gets it back. It keeps the plan's precision cap b for each of the steps left, so
that the run spends Δ²b a step as planned: t steps before and T − t after make the budget's μ².
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import networkx as nx
import numpy as np

from corn.arrays import FloatArray
from corn.covariance import GivenObjective, Horizon, Objective, ThreatModel
from corn.errors import InfeasibleError
from corn.noise import Roster
from corn.plan import Plan, make_plan
from corn.privacy import PrivacyBudget
from corn.privacy.floats import find_promise, set_aside
from corn.threads import one_thread
from corn.topology import Network, load_network
from corn.topology.mixing import metropolis_weights

_SHRINK = 1e-9
_MAX_SHRINKS = 40


@dataclass(frozen=True)
class Loss:
    """What the departure of agents costs: noise energy Tr(A R) per agent, by the objective.

    Attributes:
        planned: with everyone, as designed.
        continued: of those who stay, with the noise they have and Metropolis weights.
    """

    planned: float
    continued: float

    def describe(self) -> str:
        """The loss of cancellation in one line."""
        return (
            f"noise energy per agent {self.continued:.4g} instead of {self.planned:.4g} "
            f"({self.continued / self.planned:.3g} ×)"
        )


def measure_loss(plan: Plan, survivors: tuple[int, ...]) -> Loss:
    """How much cancellation is lost when only ``survivors`` go on with the plan's noise.

    Both sides are by the same objective, which is another where the plan's is of all agents.
    """
    R, n = plan.decomposition.covariance, plan.num_agents
    R_left = R[np.ix_(survivors, survivors)]
    objective = _objective_for(plan.objective, len(survivors))
    A, A_left = (
        objective.matrix(plan.network.mixing_matrix),
        objective.matrix(_weights(plan, survivors)),
    )
    return Loss(float((A * R).sum()) / n, float((A_left * R_left).sum()) / len(survivors))


def replan(plan: Plan, survivors: tuple[int, ...], *, steps_left: int) -> Plan:
    """A plan for the survivors, renumbered 0 … m−1 in their order, for the steps that are left.

    Deterministic: every survivor gets the same plan, to the bit.
    """
    graph = nx.relabel_nodes(
        nx.Graph(plan.network.graph).subgraph(survivors),
        {agent: place for place, agent in enumerate(survivors)},
    )
    ordered = nx.Graph()
    ordered.add_nodes_from(range(len(survivors)))
    ordered.add_edges_from(sorted(tuple(sorted(edge)) for edge in graph.edges))
    with one_thread():
        return make_plan(
            _name_network(load_network(ordered), plan, survivors),
            budget_left(plan, steps_left),
            threat=_threat_for(plan.threat, survivors),
            objective=_objective_for(plan.objective, len(survivors)),
            mechanism=plan.mechanism,
            dtype=plan.dtype,
        )


def budget_left(plan: Plan, steps_left: int) -> PrivacyBudget:
    """The budget of the steps left: the same cap on precision, or a hair less, at each of them."""
    budget, cap = plan.budget, plan.precision_cap
    epsilon = find_promise(cap, budget, num_steps=steps_left).epsilon
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


def choose_roster(roster: Roster, survivors: tuple[int, ...]) -> Roster:
    """The survivors' public keys, in their order."""
    return Roster(tuple(roster.public_key(agent) for agent in survivors))


def _weights(plan: Plan, survivors: tuple[int, ...]) -> FloatArray:
    places = {agent: place for place, agent in enumerate(survivors)}
    graph = nx.relabel_nodes(nx.Graph(plan.network.graph).subgraph(survivors), places)
    return metropolis_weights(graph)


def _name_network(network: Network, plan: Plan, survivors: tuple[int, ...]) -> Network:
    who = ",".join(map(str, survivors))
    return replace(network, source=f"survivors {who} of {plan.network.source}")


def _threat_for(threat: ThreatModel, survivors: tuple[int, ...]) -> ThreatModel:
    """As many insiders as before, if so many can be without everyone being one."""
    seeds = threat.seeds
    if not isinstance(seeds, str):
        places = {agent: place for place, agent in enumerate(survivors)}
        left = [[places[a] for a in group if a in places] for group in seeds]
        seeds = tuple(tuple(group) for group in left if group)
    colluders = min(threat.max_colluders, len(survivors) - 1)
    return replace(threat, seeds=seeds, max_colluders=colluders)


def _objective_for(objective: Objective, num_agents: int) -> Objective:
    """The same objective, but for one given as a matrix of all agents."""
    if isinstance(objective, GivenObjective) and np.shape(objective.given)[0] != num_agents:
        return Horizon()
    return objective
