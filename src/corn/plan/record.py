"""A plan couples graph, weights, budget, threat and noise; everything in it is public."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, TypeAlias, get_args

import numpy as np

from corn.arrays import FloatArray
from corn.covariance import Decomposition, Design, Horizon, Mechanism, Objective, ThreatModel
from corn.covariance import design as design_noise
from corn.errors import InfeasibleError, InvalidArgumentError
from corn.noise import choose_factors, round_factors
from corn.privacy import PrivacyBudget, precision_diagonal
from corn.topology import Network
from corn.version import __version__

NoiseType: TypeAlias = Literal["float32", "float64"]

SAFE_THREAT = ThreatModel(1, "pairs")
"""What a plan assumes unless told otherwise: one curious insider, and a seed for every pair."""

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
    target = objective or Horizon(max(1.0, budget.num_steps / 5))
    result = design_noise(
        network.mixing_matrix,
        budget.precision_cap,
        mechanism=mechanism,
        objective=target,
        threat=threat,
        tolerance=tolerance,
        drop_share=drop_share,
    )
    shares = _round_to_cap(
        choose_factors(result.decomposition), budget.precision_cap, threat.max_colluders, noise_type
    )
    A = target.matrix(network.mixing_matrix)
    return Plan(
        network=network,
        budget=budget,
        threat=threat,
        objective=target,
        mechanism=mechanism,
        decomposition=shares,
        certificate=_certificate(result, float((A * shares.covariance).sum())),
        noise_type=noise_type,
        corn_version=__version__,
    )


def coalition_precisions(
    decomposition: Decomposition, max_colluders: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], FloatArray]]:
    """Each coalition of this size, the honest agents, and their [(R^(I))⁻¹]_ii.

    One coalition after the other, from the split itself: slower than the solvers, and independent
    of them.
    """
    everyone = range(decomposition.num_agents)
    for coalition in combinations(everyone, max_colluders):
        honest = tuple(agent for agent in everyone if agent not in coalition)
        hidden = decomposition.hidden_from(coalition)[np.ix_(honest, honest)]
        yield coalition, honest, precision_diagonal(hidden)


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


def _certificate(result: Design, value: float) -> Certificate:
    return Certificate(
        status=result.status,
        solver=result.solver,
        value=value,
        lower_bound=min(result.lower_bound, value),
        multipliers=result.multipliers,
    )
