"""Verification of a plan from its public content, without trust in its maker."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from corn.checks import FloatArray
from corn.covariance.coalitions import check_connectivity, coalition_precisions, lists_coalitions
from corn.covariance.decomposition import hidden_precision
from corn.errors import InfeasibleError
from corn.noise.masks import bound_loss, choose_grid, count_parameters
from corn.plan.plan import Plan, allowed_groups
from corn.privacy.floats import account_floats, find_promise
from corn.privacy.rounding import round_bound_down, round_up, write_exactly
from corn.topology.graphs import label_agent

# Allowances for rounding: sums are recomputed in another order, ε from rounded numbers.
_CLAIM_TOLERANCE = 1e-6
_EPSILON_TOLERANCE = 1e-9
_MOST_BY_FLOWS = 300  # agents, of whom maximum flows take seconds
# Times the cap: beyond, no ε is computed under Poisson sampling.
_FAR = 100.0


@dataclass(frozen=True)
class AgentGuarantee:
    """The exact ε of one agent at the δ it is promised, against the worst coalition."""

    agent: int
    name: str
    epsilon: float
    precision: float
    worst_coalition: tuple[int, ...]


@dataclass(frozen=True)
class Verification:
    """The result of verifying a plan: each agent's guarantee, the noise, and all problems."""

    guarantees: tuple[AgentGuarantee, ...]
    value: float
    lower_bound: float
    central_ratio: float
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the plan keeps all its promises."""
        return not self.problems

    @property
    def gap(self) -> float:
        """The most by which the noise may exceed the optimum: value/lower_bound − 1."""
        return self.value / self.lower_bound - 1 if self.lower_bound > 0 else np.inf


def verify_plan(plan: Plan) -> Verification:
    """Recompute privacy, value and lower bound of a plan from its public content alone.

    Privacy is computed for every coalition of the threat, one by one, from the noise weights as
    they are drawn. The lower bound is proved again, over all seeds that the threat allows.

    >>> from corn import PrivacyBudget, load_network, make_plan
    >>> budget = PrivacyBudget(epsilon=5, delta=1e-5, num_steps=100, clip=0.1)
    >>> found = verify_plan(make_plan(load_network("ring:4"), budget))
    >>> found.passed, len(found.guarantees), found.problems
    (True, 4, ())
    """
    worst = np.full(plan.num_agents, -np.inf)
    coalitions: dict[int, tuple[int, ...]] = dict.fromkeys(range(plan.num_agents), ())
    listed = coalition_precisions(plan.decomposition, plan.threat.max_colluders)
    for coalition, honest, precision in listed:
        for agent, found in zip(honest, precision, strict=True):
            # Strictly, so that of equal coalitions the first in order is named.
            if found > worst[agent]:
                worst[agent] = found
                coalitions[agent] = coalition
    guarantees = _list_guarantees(plan, worst, coalitions)
    value = plan.noise_energy
    proved = plan.prove_lower_bound()
    problems = (*_privacy_problems(plan, guarantees), *_claim_problems(plan, value, proved))
    return Verification(guarantees, value, min(proved, value), plan.central_ratio, problems)


def guarantees_against(plan: Plan, coalition: Iterable[int]) -> tuple[AgentGuarantee, ...]:
    """Return the guarantee of each honest agent against one coalition, of any size."""
    members = tuple(sorted(set(coalition)))
    honest, own = hidden_precision(plan.decomposition, members)
    precision = np.zeros(plan.num_agents)
    # Insiders keep zero: they have no privacy at stake against themselves.
    precision[list(honest)] = own
    return _list_guarantees(plan, precision, dict.fromkeys(honest, members))


def _epsilons(plan: Plan, precisions: FloatArray) -> list[float]:
    """Return ε of each agent, even with less privacy than promised, for models the plan allows.

    ``precisions`` are the [R⁻¹]_ii of all agents, shape (n,), zero for insiders.
    """
    if plan.max_parameters < 1:
        return [math.inf] * plan.num_agents
    promises = plan.budget.promises if plan.budget.num_agents else [None] * plan.num_agents
    # Agents with the same promise, precision and cap have the same ε, which takes a search.
    keys = list(zip(promises, precisions.tolist(), plan.precision_caps.tolist(), strict=True))
    agents = {key: agent for agent, key in enumerate(keys)}
    found = {key: _epsilon_of(plan, agent, precisions) for key, agent in agents.items()}
    return [found[key] for key in keys]


def _epsilon_of(plan: Plan, agent: int, precisions: FloatArray) -> float:
    budget = plan.budget.of_agent(agent)
    steps = plan.budget.num_steps
    precision = float(precisions[agent])
    # Within the cap, the plan's own reserve covers floating point.
    if precision <= plan.precision_caps[agent]:
        return float(account_floats([precision], budget, num_steps=steps)[0])
    # Composition of Poisson sampling takes minutes where there is almost no noise.
    is_far = budget.query.is_subsampled and precision > _FAR * plan.precision_caps[agent]
    if is_far or math.isinf(precision):
        return math.inf
    # Above it, a larger budget is sought whose reserve covers it, and proved for the same models.
    try:
        promise = find_promise(precision, budget, num_steps=steps)
    except InfeasibleError:
        return math.inf
    # The loss of floats depends on the privacy of all agents, which may be beyond the caps too.
    caps = np.maximum(plan.precision_caps, precisions)
    loss = bound_loss(plan.decomposition, plan.grid, precision_caps=caps, budget=plan.budget)
    is_proved = count_parameters(loss, promise) >= plan.max_parameters
    return promise.promise.epsilon if is_proved else math.inf


def _list_guarantees(
    plan: Plan, precisions: FloatArray, coalitions: Mapping[int, tuple[int, ...]]
) -> tuple[AgentGuarantee, ...]:
    epsilons = _epsilons(plan, precisions)
    names = plan.network.agent_names
    return tuple(
        AgentGuarantee(agent, names[agent], epsilons[agent], float(precisions[agent]), coalition)
        for agent, coalition in coalitions.items()
    )


def _privacy_problems(plan: Plan, guarantees: tuple[AgentGuarantee, ...]) -> list[str]:
    """List the agents with less privacy than promised, by the cap and by their exact ε."""
    caps = plan.precision_caps
    promised = plan.budget.epsilons(plan.num_agents)
    names = plan.network.agent_names
    problems = [
        f"agent {label_agent(names, g.agent)} gets ε = {round_up(g.epsilon)} instead of "
        f"{write_exactly(promised[g.agent])} against {describe_coalition(g.worst_coalition, names)}"
        for g in guarantees
        # Both: an accountant without proof can have a cap that does not keep ε.
        if g.precision > caps[g.agent] or g.epsilon > promised[g.agent] * (1 + _EPSILON_TOLERANCE)
    ]
    if plan.max_parameters < 1:
        problems.append(f"its grid of {plan.grid:g} is too fine, or its ε too large, to be proved")
    largest = choose_grid(plan.decomposition, plan.precision_caps)
    if plan.grid > largest:
        problems.append(f"its grid of {plan.grid:g} is coarser than {largest:g}, and so its noise")
    noise = plan.decomposition
    colluders = plan.threat.max_colluders
    # The design bounds connectivity by eigenvalues. Where flows are fast, they prove it once more.
    is_listed = not noise.is_masked or lists_coalitions(noise, colluders)
    uses_flows = not is_listed and noise.num_agents <= _MOST_BY_FLOWS
    if uses_flows and not check_connectivity(noise, colluders):
        problems.append(f"its seeds do not stay connected without any {colluders} agents")
    return problems


def _claim_problems(plan: Plan, value: float, proved: float) -> list[str]:
    problems = []
    claimed = plan.certificate
    # A wrong claim harms accuracy, not privacy, but a forged plan must not look optimal.
    if not math.isfinite(value) or abs(value - claimed.value) > _CLAIM_TOLERANCE * value:
        problems.append(f"the noise energy is {value:.6g}, not {claimed.value:.6g}")
    if claimed.lower_bound > proved * (1 + _CLAIM_TOLERANCE):
        problems.append(
            f"a lower bound of {write_exactly(claimed.lower_bound)} is claimed, "
            f"{round_bound_down(proved)} is proved"
        )
    # Weak duality forbids this, so a violation means that value or proof was computed wrongly.
    if proved > value * (1 + _CLAIM_TOLERANCE):
        problems.append(f"the lower bound {proved:.6g} is above the value {value:.6g}")
    # The lower bound is proved for the allowed seeds. With others it would mean nothing.
    allowed = set(allowed_groups(plan.network, plan.threat, plan.mechanism))
    stray = [group for group in plan.decomposition.seed_groups if group not in allowed]
    if stray:
        problems.append(f"agents {stray[0]} share a seed, which seeds={plan.threat.seeds} excludes")
    return problems


def describe_coalition(coalition: tuple[int, ...], names: Sequence[str]) -> str:
    """Return a coalition in words, with the names of its agents."""
    if not coalition:
        return "an eavesdropper"
    who = "insider" if len(coalition) == 1 else "insiders"
    return f"{who} {', '.join(label_agent(names, agent) for agent in coalition)}"
