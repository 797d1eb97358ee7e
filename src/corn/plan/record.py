"""A plan couples graph, weights, budget, threat and noise; everything in it is public."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal, TypeAlias, get_args

import numpy as np

from corn.arrays import FloatArray
from corn.covariance import Decomposition, Horizon, Mechanism, Objective, ThreatModel
from corn.covariance import design as design_noise
from corn.covariance.exposure import hidden_precision
from corn.errors import InfeasibleError, InvalidArgumentError
from corn.noise import choose_factors, round_factors
from corn.plan.bound import allowed_groups, prove_lower_bound
from corn.privacy import PrivacyBudget, gaussian
from corn.topology import Network
from corn.version import __version__

NoiseType: TypeAlias = Literal["float32", "float64"]

SAFE_THREAT = ThreatModel(1, "pairs")
"""What a plan assumes unless told otherwise: one curious insider, and a seed for every pair."""

_MAX_COALITIONS = 200_000
_MAX_ROUNDINGS = 30
_ROUNDING_MARGIN = 1e-7


@dataclass(frozen=True)
class Certificate:
    """What whoever made the plan found, and what lets others prove the lower bound again.

    ``multipliers`` has shape (coalitions, n); None where the dual proves the bound from scratch.
    """

    status: str
    solver: str
    value: float
    lower_bound: float
    multipliers: FloatArray | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything agents must agree on before they train; nothing in it is secret.

    Attributes:
        network: the links and mixing weights.
        budget: the privacy promised to every agent.
        threat: who it holds against.
        objective: what the noise was designed to minimise.
        mechanism: how the noise is correlated.
        decomposition: who draws what; its weights are numbers of ``noise_type``.
        certificate: how good the noise is, with a proof.
        noise_type: the type in which noise is drawn: streams of other types are other streams.
        corn_version: the version that made the plan.
    """

    network: Network
    budget: PrivacyBudget
    threat: ThreatModel
    objective: Objective
    mechanism: Mechanism
    decomposition: Decomposition
    certificate: Certificate
    noise_type: NoiseType = "float32"
    corn_version: str = ""

    def __post_init__(self) -> None:
        if self.decomposition.num_agents != self.network.num_agents:
            raise InvalidArgumentError(
                f"the noise is for {self.decomposition.num_agents} agents, but the network has "
                f"{self.network.num_agents}"
            )
        if self.mechanism in ("central", "none"):
            raise InvalidArgumentError(
                f"mechanism {self.mechanism!r} is a reference without privacy against an "
                "eavesdropper; a plan to run needs corn, decor, zero-sum or ldp"
            )
        if self.mechanism == "ldp" and self.decomposition.seed_groups:
            raise InvalidArgumentError("mechanism 'ldp' draws alone, but agents share a seed")
        self.threat.seed_groups(self.network.graph)  # says so where too many may collude
        if self.noise_type not in get_args(NoiseType):
            raise InvalidArgumentError(
                f"noise_type must be 'float32' or 'float64', found {self.noise_type!r}"
            )
        rounded = round_factors(self.decomposition, self.noise_type)
        if not np.array_equal(rounded.covariance, self.decomposition.covariance):
            raise InvalidArgumentError(
                f"the plan's noise weights must be {self.noise_type} numbers: round them first"
            )

    @property
    def num_agents(self) -> int:
        """The number of agents n."""
        return self.network.num_agents

    def prove_lower_bound(self) -> float:
        """A noise energy that no split on the seeds allowed goes below, proved from scratch."""
        bound = prove_lower_bound(
            self.objective.matrix(self.network.mixing_matrix),
            self.decomposition,
            self.threat,
            allowed_groups(self.network.graph, self.threat, self.mechanism),
            self.certificate.multipliers,
        )
        return bound / self.budget.precision_cap

    def describe(self) -> str:
        """The promise and the adversary, in one line."""
        return f"{self.budget.describe()}, against {self.threat.describe()}"


def make_plan(
    network: Network,
    budget: PrivacyBudget,
    *,
    threat: ThreatModel = SAFE_THREAT,
    objective: Objective | None = None,
    mechanism: Mechanism = "corn",
    noise_type: NoiseType = "float32",
    tolerance: float | None = None,
    drop_share: float = 0.0,
) -> Plan:
    """Design the noise for a run that is meant to happen, and write down all that is public.

    Safe by default: one curious insider and pair seeds. The objective defaults to a horizon of a
    fifth of the run. Noise weights are rounded to the type they are drawn in and then scaled up
    until every coalition meets the cap again, so the promise holds for the bits that are drawn.
    """
    if mechanism in ("central", "none"):
        raise InvalidArgumentError(
            f"mechanism {mechanism!r} is a reference without privacy against an eavesdropper; a "
            "plan to run needs corn, decor, zero-sum or ldp"
        )
    _require_sound(budget)
    threat = _resolve_communities(threat, network)
    target = objective or Horizon(max(1.0, budget.num_steps / 5))
    result = design_noise(
        network.mixing_matrix,
        budget.precision_cap,
        mechanism=mechanism,
        objective=target,
        threat=threat,
        tolerance=tolerance,
        drop_share=drop_share,
        graph=network.graph,
    )
    shares = _round_to_cap(
        choose_factors(result.decomposition), budget.precision_cap, threat.max_colluders, noise_type
    )
    A = target.matrix(network.mixing_matrix)
    value = float((A * shares.covariance).sum())
    plan = Plan(
        network=network,
        budget=budget,
        threat=threat,
        objective=target,
        mechanism=mechanism,
        decomposition=shares,
        certificate=Certificate(result.status, result.solver, value, 0.0, result.multipliers),
        noise_type=noise_type,
        corn_version=__version__,
    )
    # What is claimed is what this very plan proves, not what the solver found on the way.
    proved = min(plan.prove_lower_bound(), value)
    return replace(plan, certificate=replace(plan.certificate, lower_bound=proved))


def coalition_precisions(
    decomposition: Decomposition, max_colluders: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], FloatArray]]:
    """Each coalition of this size, the honest agents, and their [(R^(I))⁻¹]_ii.

    One coalition after the other, from the split itself: slower than the solvers, and independent
    of them.
    """
    everyone = range(decomposition.num_agents)
    count = math.comb(len(everyone), max_colluders)
    if count > _MAX_COALITIONS:
        raise InvalidArgumentError(
            f"{count:,} coalitions of {max_colluders} among {len(everyone)} agents are too many to "
            f"check one by one (at most {_MAX_COALITIONS:,}): reduce max_colluders"
        )
    for coalition in combinations(everyone, max_colluders):
        yield coalition, *hidden_precision(decomposition, coalition)


def _round_to_cap(
    decomposition: Decomposition, precision_cap: float, max_colluders: int, noise_type: NoiseType
) -> Decomposition:
    shares = round_factors(decomposition, noise_type)
    for attempt in range(_MAX_ROUNDINGS):
        worst = max(
            float(precision.max())
            for _, _, precision in coalition_precisions(shares, max_colluders)
        )
        if worst <= precision_cap:
            return shares
        scale = worst / precision_cap * (1 + _ROUNDING_MARGIN * 2**attempt)
        decomposition = Decomposition(
            scale * decomposition.private_variance,
            decomposition.seed_groups,
            tuple(np.sqrt(scale) * factor for factor in decomposition.factors),
        )
        shares = round_factors(decomposition, noise_type)
    raise InfeasibleError(
        f"the noise loses its privacy when its weights are rounded to {noise_type}: use float64, "
        "or limit the noise of single agents"
    )


def _require_sound(budget: PrivacyBudget) -> None:
    """Refuse a budget whose accounting lets through more than it promises."""
    if budget.query.is_subsampled:
        return
    exact = gaussian.epsilon_from(budget.mu, budget.delta)
    if exact > budget.epsilon * (1 + 1e-9):
        raise InfeasibleError(
            f"accounting {budget.accounting!r} would give an exact ε of {exact:.6g} instead of "
            f"{budget.epsilon:g}: use 'gdp'"
        )


def _resolve_communities(threat: ThreatModel, network: Network) -> ThreatModel:
    """Write communities down as groups: another version of the search might find others."""
    if isinstance(threat.seeds, str) and threat.seeds.startswith("communities"):
        return replace(threat, seeds=threat.seed_groups(network.graph))
    return threat
