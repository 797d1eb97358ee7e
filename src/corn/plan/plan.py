"""The plan: graph, mixing weights, budget, threat and noise of a run; everything in it is public.

:func:`make_plan` designs the noise, splits it into streams, scales it until the independent check
of every coalition passes, and certifies its value with a lower bound that anybody can prove again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import networkx as nx
import numpy as np

from corn.checks import FloatArray, require, require_choice, require_count, require_length
from corn.covariance import (
    EAVESDROPPER,
    Corn,
    Decomposition,
    MechanismLike,
    MechanismName,
    Objective,
    ObjectiveLike,
    ThreatModel,
)
from corn.covariance import design as design_noise
from corn.covariance.coalitions import worst_precisions
from corn.covariance.design import (
    are_disjoint,
    design_masks,
    least_variance,
    needs_independent_noise,
    read_mechanism,
    read_objective,
    require_no_options,
)
from corn.covariance.dual import solve_dual
from corn.covariance.insiders import certify
from corn.covariance.objective import disagreement_ratio, energy_of_average
from corn.covariance.problem import DesignProblem, weighting_gain
from corn.covariance.threat import SeedGroups
from corn.errors import InfeasibleError
from corn.noise import choose_factors, masks
from corn.privacy import PrivacyBudget, account_precision, gaussian
from corn.privacy.accounting import group_agents
from corn.privacy.floats import FloatLoss, set_aside
from corn.privacy.rounding import round_up, write_exactly
from corn.topology import Mixing, Network, choose_cooldown, load_network
from corn.version import __version__

FloatType: TypeAlias = Literal["float32", "float64"]

_CAP_SPREAD = 0.01  # relative, of caps that searches may find
# A margin that grows fourfold from 10⁻¹⁴ is far beyond rounding long before the last attempt.
_MAX_SCALINGS = 30
_MOST_COOLDOWN_STEPS = 10**6
_SCALING_MARGIN = 1e-14


@dataclass(frozen=True)
class Certificate:
    """The claims of the plan's maker, and multipliers that prove them again, (coalitions, n).

    Without multipliers the dual proves the bound from scratch.
    """

    status: str
    solver: str
    value: float
    lower_bound: float
    multipliers: FloatArray | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that agents must agree on before they train; nothing in it is secret.

    Attributes:
        network: the links and mixing weights.
        budget: the privacy promised to every agent, or to each its own.
        threat: the adversary against whom it holds.
        objective: the quantity that the noise was designed to minimise.
        mechanism: the rule that correlates the noise.
        decomposition: the noise weights of each agent, in float64.
        certificate: the value of the noise, with a proof of its lower bound.
        grid: γ, a power of two: every release is a multiple of it.
        cooldown_steps: steps after the last that only mix. They release nothing new.
        dtype: the type of models and messages, which are computed from releases.
        corn_version: the version that made the plan.

    >>> from corn.topology import load_network
    >>> budget = PrivacyBudget(epsilon=5, delta=1e-5, num_steps=100, clip=0.1)
    >>> plan = make_plan(load_network("ring:4"), budget)
    >>> plan.num_agents, plan.threat.max_colluders, plan.mask_bits
    (4, 1, 16)
    """

    network: Network
    budget: PrivacyBudget
    threat: ThreatModel
    objective: Objective
    mechanism: MechanismName
    decomposition: Decomposition
    certificate: Certificate
    grid: float
    cooldown_steps: int = 0
    dtype: FloatType = "float32"
    corn_version: str = ""

    def __post_init__(self) -> None:
        for name, part in (("decomposition", self.decomposition), ("promises", self.budget)):
            if part.num_agents is not None:
                require_length(name, part.num_agents, self.num_agents, per="agent")
        # Survivors of a loss plan by the caps of this budget, and by the rule of this mechanism.
        require_sound(self.budget)
        is_exact = (self.network.mixing, self.mechanism) == ("sum", "corn")
        is_masked = self.decomposition.is_masked
        rule = f"{is_exact} for {self.mechanism!r} with mixing {self.network.mixing!r}"
        require(is_masked == is_exact, "is_masked", rule, is_masked)
        _require_private(self.mechanism)
        is_alone = self.mechanism != "ldp" or not self.decomposition.seed_groups
        require(is_alone, "mechanism", "without shared seeds for 'ldp'", "some")
        self.threat.check(self.num_agents)
        require_choice("dtype", self.dtype, get_args(FloatType))
        # Bounded, because agents run the cool-down of a plan that somebody else may have made.
        require_count("cooldown_steps", self.cooldown_steps, least=0, most=_MOST_COOLDOWN_STEPS)
        is_mixed = self.network.mixing == "gossip" or not self.cooldown_steps
        require(is_mixed, "cooldown_steps", "0 with exact sums", self.cooldown_steps)
        masks.check_grid(self.grid)
        if self.network.mixing == "sum":
            _ = self.mask_bits  # raises if no integers hold the sums

    @property
    def num_agents(self) -> int:
        """The number of agents n."""
        return self.network.num_agents

    @cached_property
    def precision_caps(self) -> FloatArray:
        """b: the largest [R⁻¹]_ii that keep the budget after the reserve for floats, shape (n,)."""
        ideal = set_aside(self.budget)
        caps = ideal.precision_caps(self.num_agents)
        if not any(promise.query.is_subsampled for promise in ideal.promises):
            return caps
        # Under Poisson sampling a search finds the cap, and may stop at another one on another host
        # or in another version. The bound on ε decides whether noise keeps the promise, so the cap
        # of agents with one promise is the largest precision among them where that is near the cap
        # found here and the bound confirms it.
        precisions = worst_precisions(self.decomposition, self.threat.max_colluders)
        for promise, agents in group_agents(ideal, self.num_agents).items():
            worst = float(precisions[agents].max())
            cap = caps[agents[0]]
            if promise.query.is_subsampled and abs(worst - cap) <= _CAP_SPREAD * cap:
                loss = account_precision([worst], promise.query, num_steps=ideal.num_steps)
                if loss.worst_epsilon(promise.delta) <= promise.epsilon:
                    caps[agents] = worst
        return caps

    @property
    def central_ratio(self) -> float:
        """The noise variance of the average, over a trusted server's, which is 1/(n² min b)."""
        return self.decomposition.total_variance * float(self.precision_caps.min())

    @property
    def weighted_central_ratio(self) -> float:
        """The same over a trusted server that weights agents by their promises."""
        return self.central_ratio * weighting_gain(self.precision_caps)

    @cached_property
    def disagreement_ratio(self) -> float:
        """κ of `corn.covariance.objective`: 0 for exact sums."""
        return disagreement_ratio(
            self.network,
            self.decomposition,
            precision_cap=float(self.precision_caps.min()),
            momentum=self.momentum,
            num_steps=self.budget.num_steps,
        )

    @cached_property
    def float_loss(self) -> FloatLoss:
        """The privacy loss that floating point adds to a coordinate of a step."""
        return masks.bound_loss(
            self.decomposition, self.grid, precision_caps=self.precision_caps, budget=self.budget
        )

    @property
    def momentum(self) -> float:
        """β of the steps, for which the noise was designed."""
        return self.objective.momentum

    @property
    def max_parameters(self) -> int:
        """The most parameters for which the promise is proved to hold in floating point."""
        return masks.count_parameters(self.float_loss, self.budget)

    @property
    def mask_bits(self) -> masks.MaskBits:
        """B of exact sums, which are sums of integers modulo 2^B."""
        return masks.choose_bits(self.decomposition, self.grid, self.budget)

    @property
    def largest_sum(self) -> float:
        """The largest coordinate of an exact sum of all releases, in grid units."""
        return masks.bound_sum(self.decomposition, self.grid, self.budget)

    def check_parameters(self, num_parameters: int) -> None:
        """Raise ``InfeasibleError`` if a model has more parameters than the proof covers."""
        masks.require_provable(self.float_loss, self.budget, num_parameters)

    @property
    def noise_energy(self) -> float:
        """Tr(A R): the noise that the design minimises."""
        if self.network.mixing == "sum":
            energy = energy_of_average(self.objective, self.num_agents)
            return energy / self.num_agents * self.decomposition.total_variance
        A = self.objective.matrix(self.network.step_matrix)
        return float((A * self.decomposition.covariance).sum())

    def prove_lower_bound(self) -> float:
        """Prove a lower bound on the noise energy of all splits on the allowed seeds."""
        if self.network.mixing == "sum":
            # For all seeds and all noise: see ``least_variance``.
            n, cap = self.num_agents, float(self.precision_caps.min())
            least = least_variance(n, cap, self.threat.max_colluders)
            return energy_of_average(self.objective, n) / n * least
        A = self.objective.matrix(self.network.step_matrix)
        # The caps of the plan's budget: a plan cannot claim a bound for other caps.
        problem = DesignProblem(A, self.precision_caps)
        # The proof is of the problem in which all agents have the strictest cap.
        bound = prove_lower_bound(
            problem.scaled_objective,
            self.decomposition.rescale(1 / problem.scales),
            self.threat,
            allowed_groups(self.network, self.threat, self.mechanism),
            self.certificate.multipliers,
        )
        return bound / problem.strictest_cap

    def describe(self) -> str:
        """Return the promise and the adversary in one line."""
        return f"{self.budget.describe()}, against {self.threat.describe()}"


def make_plan(
    network: Network | str | Path | nx.Graph,
    budget: PrivacyBudget,
    *,
    threat: ThreatModel | None = None,
    objective: ObjectiveLike | None = None,
    mechanism: MechanismLike = "corn",
    cooldown_steps: int | None = None,
    dtype: FloatType = "float32",
) -> Plan:
    """Design the noise of a run and return the plan that its agents agree on.

    ``network`` is a network, a spec or file, or a graph, as for `corn.design`.
    The default threat is one curious insider, with seeds of pairs; for DECOR, zero-sum noise and a
    covariance of one's own it is an eavesdropper, as they hold against no insider. ``objective`` is
    as for `corn.design`, and the default cool-down one mixing time. A part of ε and δ is
    set aside for floating point (``corn.privacy.floats``), and noise weights are scaled up until
    the check of every coalition passes, so the promise holds for the bits that are released.

    >>> from corn.topology import load_network
    >>> budget = PrivacyBudget(epsilon=5, delta=1e-5, num_steps=100, clip=0.1)
    >>> plan = make_plan(load_network("ring:4"), budget, threat=ThreatModel(0))
    >>> plan.mechanism, plan.threat.describe()
    ('corn', 'an eavesdropper who sees every message but knows no seed')
    """
    mechanism = read_mechanism(mechanism)
    name = mechanism.name
    _require_private(name)
    require_sound(budget)
    if not isinstance(network, Network):
        network = load_network(network)
    if threat is None:
        threat = mechanism.default_threat if network.num_agents > 1 else EAVESDROPPER
    if cooldown_steps is None:
        cooldown_steps = choose_cooldown(network, budget.num_steps)
    target = read_objective(objective, network, budget.num_steps)
    caps = set_aside(budget).precision_caps(network.num_agents)
    if network.mixing == "sum" and isinstance(mechanism, Corn):
        require_no_options(mechanism)
        threat = _resolve_seeds(threat, network, "sum")
        # In closed form, and without matrices of n × n numbers.
        groups = threat.seed_groups(network.graph, "sum")
        shares = design_masks(caps, groups, threat.max_colluders)
        certificate = Certificate("optimal", "formula", 0.0, 0.0)
    else:
        threat = _resolve_seeds(threat, network, "gossip")
        result = design_noise(network, caps, mechanism=mechanism, objective=target, threat=threat)
        # Factors first: they change what is drawn, and the caps must hold for exactly that.
        shares = meet_caps(choose_factors(result.decomposition), caps, threat.max_colluders)
        certificate = Certificate(result.status, result.solver, 0.0, 0.0, result.multipliers)
        threat = result.threat
    plan = Plan(
        network=network,
        budget=budget,
        threat=threat,
        objective=target,
        mechanism=name,
        decomposition=shares,
        certificate=certificate,
        grid=masks.choose_grid(shares, caps),
        cooldown_steps=cooldown_steps,
        dtype=dtype,
        corn_version=__version__,
    )
    # A plan for which not even one parameter is proved would be refused by every agent.
    plan.check_parameters(1)
    # The bound that this plan proves, and not that of the solver, whose noise was then scaled.
    value = plan.noise_energy
    claim = replace(certificate, value=value, lower_bound=min(plan.prove_lower_bound(), value))
    return replace(plan, certificate=claim)


def meet_caps(
    decomposition: Decomposition, precision_caps: FloatArray, max_colluders: int
) -> Decomposition:
    """Scale noise up until the check of every coalition, which rounds up, accepts it."""
    shares = decomposition
    for attempt in range(_MAX_SCALINGS):
        precisions = worst_precisions(shares, max_colluders)
        if (precisions <= precision_caps).all():
            return shares
        # The margin grows, because scaling rounds too and could miss a cap again and again.
        worst = float((precisions / precision_caps).max())
        scale = worst * (1 + _SCALING_MARGIN * 4**attempt)
        shares = replace(
            shares,
            private_variance=scale * shares.private_variance,
            factors=tuple(np.sqrt(scale) * factor for factor in shares.factors),
        )
    raise InfeasibleError(
        "the noise is too close to singular for its privacy to be checked in floating point: limit "
        "the noise of single agents"
    )


def require_mixing(noise: Decomposition, network: Network) -> None:
    """Raise if noise has masks, which hide single releases, and the network reveals those."""
    is_hidden = network.mixing == "sum" or not noise.is_masked
    require(is_hidden, "mixing", "'sum' for noise with masks", network.mixing)


def require_sound(budget: PrivacyBudget) -> None:
    """Raise if the exact ε of a budget's noise exceeds a promised one, as eq. (13b) allows."""
    accountant = gaussian.find_accountant(budget.accounting)
    for epsilon, delta, _ in dict.fromkeys(budget.promises):
        exact = gaussian.epsilon_from(accountant.mu_from(epsilon, delta), delta)
        # The tolerance is for the rounding of an exact accountant, which comes back to ε itself.
        if exact > epsilon * (1 + 1e-9):
            raise InfeasibleError(
                f"accounting {budget.accounting!r} would give an exact ε of {round_up(exact)} "
                f"instead of {write_exactly(epsilon)}: use 'gdp'"
            )


def allowed_groups(network: Network, threat: ThreatModel, mechanism: MechanismName) -> SeedGroups:
    """Return the seed groups that a mechanism may use under a threat; DECOR uses the links."""
    if mechanism == "decor":
        return tuple(sorted({tuple(sorted(edge)) for edge in network.graph.edges}))
    is_masked = network.mixing == "sum" and mechanism == "corn"
    return threat.seed_groups(network.graph, "sum" if is_masked else "gossip")


def prove_lower_bound(
    A: FloatArray,
    decomposition: Decomposition,
    threat: ThreatModel,
    seed_groups: SeedGroups,
    multipliers: FloatArray | None,
) -> float:
    """Return the highest lower bound on Tr(A R), for b = 1, that can be proved.

    Against an eavesdropper it follows from the dual, block by block if groups are disjoint; against
    insiders from the multipliers: any of the right number prove a bound, also an untrusted plan's.
    """
    n = len(A)
    # A coalition observes at least as much as an eavesdropper, so this bound always holds.
    bounds = [_prove_eavesdropper_bound(A)]
    members = [agent for group in seed_groups for agent in group]
    if threat.max_colluders == 0 and are_disjoint(seed_groups):
        # With disjoint groups the problem separates; an agent in no group draws alone.
        blocks = sum(_prove_eavesdropper_bound(A[np.ix_(group, group)]) for group in seed_groups)
        bounds.append(blocks + float(np.delete(np.diag(A), members).sum()))
    if needs_independent_noise(seed_groups, n, threat.max_colluders):
        bounds.append(float(np.trace(A)))
        return max(bounds)
    q = threat.max_colluders
    if multipliers is not None and multipliers.shape == (math.comb(n, q), n):
        bounds.append(certify(A, seed_groups, decomposition, multipliers, max_colluders=q))
    return max(bounds)


def _resolve_seeds(threat: ThreatModel, network: Network, mixing: Mixing) -> ThreatModel:
    """Replace seeds that are chosen by the groups found: another version might find others."""
    threat = threat.resolve(network.graph, mixing)
    # Partners follow from SHA-256 alone, and a plan of exact sums lists the groups that it uses.
    chosen = ("sparse", *(() if mixing == "sum" else ("partners",)))
    if isinstance(threat.seeds, str) and threat.seeds.startswith(chosen):
        return replace(threat, seeds=threat.seed_groups(network.graph))
    return threat


def _require_private(mechanism: MechanismName) -> None:
    is_private = mechanism not in ("central", "none", "unclipped")
    require(is_private, "mechanism", "private, and no reference, in a plan", repr(mechanism))


def _prove_eavesdropper_bound(A: FloatArray) -> float:
    if not np.trace(A) > 0:
        return 0.0
    return solve_dual(A).lower_bound
