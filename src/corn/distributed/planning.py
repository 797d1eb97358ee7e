"""Decentralised planning: agents publish their links, signed, and each solves the same design."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import networkx as nx

from corn.checks import require
from corn.covariance import DEFAULT_THREAT, Horizon, MechanismName, ThreatModel
from corn.distributed.rendezvous import Rendezvous
from corn.errors import (
    CornError,
    FileFormatError,
    InvalidArgumentError,
    PublicError,
    make_printable,
)
from corn.parsing import build, parse_json, read_json
from corn.plan import FloatType, Plan, make_plan
from corn.privacy import PrivacyBudget
from corn.threads import one_thread
from corn.topology import ONE_ROUND, Gossip, Mixing, load_network


@dataclass(frozen=True)
class PlanningRequest:
    """The public settings from which all agents start: a plan without graph and noise."""

    budget: PrivacyBudget
    objective: Horizon
    threat: ThreatModel = DEFAULT_THREAT
    mechanism: MechanismName = "corn"
    gossip: Gossip = ONE_ROUND
    mixing: Mixing = "sum"
    cooldown_steps: int | None = None
    dtype: FloatType = "float32"

    def to_text(self) -> str:
        """Return the request as JSON, for agents on other machines."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)


def read_request(path: Path) -> PlanningRequest:
    """Read a request that :meth:`PlanningRequest.to_text` wrote."""
    document = read_json(path, kind="a request for a plan")
    try:
        request: PlanningRequest = build(PlanningRequest, document, "the request")
    except CornError as error:
        why = make_printable(str(error), limit=300)  # a file may have names of any length
        raise FileFormatError(f"{path}: not a request for a plan: {why}") from error
    return request


def plan_together(
    rendezvous: Rendezvous, request: PlanningRequest, neighbours: Iterable[int]
) -> Plan:
    """Return the plan of all agents, made by each alone."""
    own = sorted(set(neighbours))
    others = set(range(rendezvous.num_agents)) - {rendezvous.agent}
    rule = f"other agents of 0 … {rendezvous.num_agents - 1}"
    require(others.issuperset(own), "neighbours", rule, ", ".join(map(str, own)))
    digest = hashlib.sha256(request.to_text().encode()).hexdigest()
    rendezvous.agree("the request for a plan", digest)
    graph = gather_graph(rendezvous, own)
    # BLAS threads change the order of sums, and the plans of all agents must agree to the last bit.
    with one_thread():
        return make_plan(
            load_network(graph, gossip=request.gossip, mixing=request.mixing),
            request.budget,
            threat=request.threat,
            objective=request.objective,
            mechanism=request.mechanism,
            cooldown_steps=request.cooldown_steps,
            dtype=request.dtype,
        )


def gather_graph(rendezvous: Rendezvous, neighbours: list[int]) -> nx.Graph:
    """Return the whole graph, from each agent's list of neighbours."""
    texts = rendezvous.exchange("links", json.dumps(neighbours).encode())
    graph = nx.empty_graph(rendezvous.num_agents)
    links = set()
    for agent, text in texts.items():
        try:
            links |= {(agent, j) for j in build(tuple[int, ...], parse_json(text), "links")}
        except InvalidArgumentError as error:
            raise PublicError(f"agent {agent} published links that cannot be read") from error
    # Both ends must list a link, as the mixing matrix must be symmetric.
    for i, j in sorted(links):
        if i == j or (j, i) not in links:
            raise PublicError(f"agents {i} and {j} do not agree on a link")
        graph.add_edge(i, j)
    return graph
