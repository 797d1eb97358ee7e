"""Check a plan from scratch: any agent can, without trusting whoever made it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from corn.arrays import FloatArray
from corn.covariance import expose
from corn.covariance.assembly import Assembly
from corn.covariance.certificate import certify
from corn.covariance.coalitions import list_coalitions
from corn.covariance.dual import solve_dual
from corn.plan.record import Plan, coalition_precisions
from corn.privacy import account_precision

_VALUE_TOLERANCE = 1e-6
_BOUND_ITERATIONS = 100


@dataclass(frozen=True)
class AgentGuarantee:
    """What one agent is promised: its exact ε at the plan's δ against the worst coalition."""

    agent: int
    epsilon: float
    precision: float
    worst_coalition: tuple[int, ...]


@dataclass(frozen=True)
class Verification:
    """The outcome of checking a plan: each agent's guarantee, the noise, and what is wrong."""

    guarantees: tuple[AgentGuarantee, ...]
    value: float
    lower_bound: float
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the plan keeps all it promises."""
        return not self.problems

    @property
    def gap(self) -> float:
        """How far the noise may be from the best for these seeds, value/lower_bound − 1."""
        return self.value / self.lower_bound - 1 if self.lower_bound > 0 else np.inf


def verify_plan(plan: Plan) -> Verification:
    """Recompute privacy, value and lower bound of a plan from its public content alone.

    Privacy is counted for every coalition of the threat, one by one, from the noise weights as they
    are drawn. The lower bound is proved again: from the certificate's multipliers, of which any are
    valid, and from the dual against an eavesdropper, whichever is higher.
    """
    guarantees = _guarantees(plan)
    A = plan.objective.matrix(plan.network.mixing_matrix)
    value = float((A * plan.decomposition.covariance).sum())
    problems = [*_privacy_problems(plan, guarantees), *_claim_problems(plan, value)]
    bound = min(_lower_bound(plan, A), value)
    return Verification(guarantees, value, bound, tuple(problems))


def guarantees_against(plan: Plan, coalition: Iterable[int]) -> tuple[AgentGuarantee, ...]:
    """What each honest agent keeps against one coalition, of any size."""
    query, steps = plan.budget.query, plan.budget.num_steps
    exposure = expose(plan.decomposition, coalition, query, num_steps=steps)
    epsilons = exposure.epsilon(plan.budget.delta)
    return tuple(
        AgentGuarantee(agent, epsilons[agent], float(precision), exposure.coalition)
        for agent, precision in zip(exposure.honest, exposure.loss.precision[0], strict=True)
    )


def _guarantees(plan: Plan) -> tuple[AgentGuarantee, ...]:
    worst = np.full(plan.num_agents, -np.inf)
    by: list[tuple[int, ...]] = [()] * plan.num_agents
    for coalition, honest, precision in coalition_precisions(
        plan.decomposition, plan.threat.max_colluders
    ):
        for agent, value in zip(honest, precision, strict=True):
            if value > worst[agent]:
                worst[agent], by[agent] = value, coalition
    loss = account_precision(worst, plan.budget.query, num_steps=plan.budget.num_steps)
    epsilons = loss.epsilon(plan.budget.delta)
    return tuple(
        AgentGuarantee(agent, float(epsilons[agent]), float(worst[agent]), by[agent])
        for agent in range(plan.num_agents)
    )


def _privacy_problems(plan: Plan, guarantees: tuple[AgentGuarantee, ...]) -> list[str]:
    cap = plan.budget.precision_cap
    return [
        f"agent {g.agent} gets ε = {g.epsilon:.6g} instead of {plan.budget.epsilon:g} against "
        f"{describe_coalition(g.worst_coalition)}"
        for g in guarantees
        if g.precision > cap
    ]


def _claim_problems(plan: Plan, value: float) -> list[str]:
    problems = []
    if abs(value - plan.certificate.value) > _VALUE_TOLERANCE * value:
        problems.append(f"the noise energy is {value:.6g}, not {plan.certificate.value:.6g}")
    allowed = set(plan.threat.seed_groups(plan.network.graph))
    if plan.mechanism == "decor":
        allowed |= {tuple(sorted(edge)) for edge in plan.network.graph.edges}
    stray = [group for group in plan.decomposition.seed_groups if group not in allowed]
    if stray:
        problems.append(f"agents {stray[0]} share a seed that seeds={plan.threat.seeds} rules out")
    return problems


def _lower_bound(plan: Plan, A: FloatArray) -> float:
    """The highest of the bounds that hold for these seeds and coalitions."""
    cap, n = plan.budget.precision_cap, plan.num_agents
    groups, colluders = plan.decomposition.seed_groups, plan.threat.max_colluders
    bounds = [_eavesdropper_bound(A)]
    grouped = [agent for group in groups for agent in group]
    if colluders == 0 and plan.mechanism == "corn" and len(grouped) == len(set(grouped)):
        # Disjoint groups make the problem separate; whoever is in none draws alone.
        blocks = sum(_eavesdropper_bound(A[np.ix_(group, group)]) for group in groups)
        bounds.append(blocks + float(np.delete(np.diag(A), grouped).sum()))
    if not _hides_anything(plan):
        # Every coalition knows every seed: independent noise is the best there is.
        bounds.append(float(np.trace(A)))
    multipliers = plan.certificate.multipliers
    coalitions = list_coalitions(groups, num_agents=n, max_colluders=colluders)
    if multipliers is not None and groups and multipliers.shape == coalitions.protected.shape:
        # Only non-negative multipliers of those at stake prove anything.
        proof = np.where(coalitions.protected, np.maximum(multipliers, 0), 0)
        common = plan.threat.private_noise == "common"
        assembly = Assembly(groups, coalitions, n)
        bounds.append(certify(A, assembly, plan.decomposition, proof, common=common))
    return max(bounds) / cap


def _hides_anything(plan: Plan) -> bool:
    """Whether some seed that the threat allows stays unknown to some coalition."""
    groups = plan.threat.seed_groups(plan.network.graph)
    colluders = plan.threat.max_colluders
    coalitions = list_coalitions(groups, num_agents=plan.num_agents, max_colluders=colluders)
    return bool(coalitions.unknown.any())


def _eavesdropper_bound(A: FloatArray) -> float:
    return solve_dual(A, tolerance=1e-6, max_iterations=_BOUND_ITERATIONS).lower_bound


def describe_coalition(coalition: tuple[int, ...]) -> str:
    """A coalition in words."""
    if not coalition:
        return "an eavesdropper"
    who = "insider" if len(coalition) == 1 else "insiders"
    return f"{who} {', '.join(map(str, coalition))}"
