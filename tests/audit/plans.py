"""Small plans for audits, each made once."""

from functools import cache
from typing import Any

from corn.covariance import MechanismName, SeedGroups, ThreatModel
from corn.plan import Plan, make_plan
from corn.privacy import PrivacyBudget
from corn.topology import Mixing, load_network


@cache
def agent_plan(
    colluders: int = 1,
    seeds: str | SeedGroups = "auto",
    mechanism: MechanismName = "corn",
    graph: str = "ring:5",
    num_steps: int = 40,
    mixing: Mixing = "gossip",
) -> Plan:
    """Return a plan for the unit of agents."""
    budget = PrivacyBudget(8, 1e-5, num_steps=num_steps, clip=0.1)
    threat = ThreatModel(colluders, seeds)
    network = load_network(graph, mixing=mixing)
    return make_plan(network, budget, threat=threat, mechanism=mechanism)


@cache
def sample_plan(
    sampling: str = "poisson",
    adjacency: str = "add-remove",
    *,
    epsilon: float = 4.0,
    num_steps: int = 24,
    samples: int = 32,
    batch_size: int = 8,
    mixing: Mixing = "gossip",
) -> Plan:
    """Return a plan for the unit of samples."""
    given: dict[str, Any] = {"samples_per_agent": samples} if sampling != "every-step" else {}
    budget = PrivacyBudget(
        epsilon,
        1e-5,
        num_steps=num_steps,
        clip=1.0,
        unit="sample",
        adjacency=adjacency,  # type: ignore[arg-type]
        batch_size=batch_size,
        sampling=sampling,  # type: ignore[arg-type]
        **given,
    )
    return make_plan(load_network("ring:4", mixing=mixing), budget)
