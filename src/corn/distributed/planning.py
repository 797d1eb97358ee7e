"""Decentralised planning: agents that know only their neighbours make one plan together.

They flood their links over their links until all know the graph, draw public randomness by commit
and reveal, and each solves the same design by itself. The handshake then compares the plans'
fingerprints. In a connected network n − 1 rounds bring every message to every agent.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from corn.checks import require
from corn.covariance import DEFAULT_THREAT, Horizon, MechanismName, ThreatModel
from corn.distributed.rendezvous import Rendezvous
from corn.distributed.settings import AgentConfig, RunSettings
from corn.distributed.storage import find_paid, make_folders
from corn.errors import (
    CornError,
    FileFormatError,
    InvalidArgumentError,
    PublicError,
    make_printable,
)
from corn.parsing import build, quote, read_json
from corn.plan import FloatType, Plan, load_plan, make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.threads import one_thread
from corn.topology import ONE_ROUND, WEIGHTS, Gossip, Mixing, load_network
from corn.transport import LinkError, Purpose, open_links

_DIGEST_BYTES, _MAX_REASON = 32, 300
_SECONDS_TO_PART = 2.0
Table = NDArray[np.uint8]


class CheatingError(PublicError):
    """A revealed value that is not the one to which its agent had committed itself."""


@dataclass(frozen=True)
class PlanningRequest:
    """The public settings from which all agents start: a plan without graph and noise."""

    budget: PrivacyBudget
    objective: Horizon
    threat: ThreatModel = DEFAULT_THREAT
    mechanism: MechanismName = "corn"
    weights: str | None = None
    gossip: Gossip = ONE_ROUND
    mixing: Mixing = "sum"
    cooldown_steps: int | None = None
    dtype: FloatType = "float32"

    def __post_init__(self) -> None:
        if self.weights is not None and self.weights not in WEIGHTS:
            raise InvalidArgumentError(
                f"weights must be one of {', '.join(WEIGHTS)}, found {quote(self.weights)}"
            )

    def to_text(self) -> str:
        """Return the request as JSON, for agents on other machines."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)


def read_request(path: Path) -> PlanningRequest:
    """Read a request that :meth:`PlanningRequest.to_text` wrote."""
    document = read_json(path, kind="a request for a plan")
    try:
        request: PlanningRequest = build(PlanningRequest, document, "the request")
    except CornError as error:
        why = make_printable(str(error), limit=_MAX_REASON)
        raise FileFormatError(f"{path}: not a request for a plan: {why}") from error
    return request


def find_plan(config: AgentConfig, rendezvous: Rendezvous) -> tuple[Plan, RunSettings]:
    """Return the plan of a file, or the one that agents make together, which is then shared."""
    settings = config.settings
    if config.plan is not None:
        return load_plan(config.plan), settings
    request = config.request
    if request is None:
        raise CornError("neither a plan nor a request for one was given")
    if isinstance(request, Path):
        request = read_request(request)
    # Before the others learn of this agent's links, and before any file of the run is written.
    if config.requirements is not None:
        config.requirements.check(request, rendezvous.agent, is_rehearsal=settings.is_rehearsal)
    folders = make_folders(config.out, rendezvous.agent, is_rehearsal=settings.is_rehearsal)
    plan, seed = plan_together(rendezvous, request, config.neighbours)
    if not any(find_paid(folders.private)):  # the plan of an earlier run stays with that run
        save_plan(plan, folders.shared / "plan.corn")
    return plan, settings.with_seed(seed)


def plan_together(
    rendezvous: Rendezvous, request: PlanningRequest, neighbours: Iterable[int]
) -> tuple[Plan, int]:
    """Return the plan of all agents, made by each alone, and a public seed that none chose."""
    others = sorted(set(neighbours))
    # Before other agents are waited for: a link to oneself, or to nobody, would never open.
    unknown = [j for j in others if j == rendezvous.agent or not 0 <= j < rendezvous.num_agents]
    require(
        not unknown,
        "neighbours",
        f"other agents of 0 … {rendezvous.num_agents - 1}",
        ", ".join(map(str, unknown)),
    )
    # Links have a time-out, so agents begin to open them together.
    rendezvous.barrier("planning")
    flood = Flood(rendezvous, others)
    try:
        graph = discover_graph(flood, request)
        seed = draw_together(flood, secrets.token_bytes(_DIGEST_BYTES))
    finally:
        flood.close()
    # BLAS threads change the order of sums, and the plans of all agents must agree to the last bit.
    with one_thread():
        plan = make_plan(
            load_network(
                graph, weights=request.weights, gossip=request.gossip, mixing=request.mixing
            ),
            request.budget,
            threat=request.threat,
            objective=request.objective,
            mechanism=request.mechanism,
            cooldown_steps=request.cooldown_steps,
            dtype=request.dtype,
        )
    return plan, seed


@final
class Flood:
    """Flooding of one row of bytes per agent over links, to every agent that can be reached."""

    def __init__(self, rendezvous: Rendezvous, neighbours: list[int]) -> None:
        self.agent, self.num_agents = rendezvous.agent, rendezvous.num_agents
        self.neighbours, self._timeout = neighbours, rendezvous.timeout
        # The longest row has a mark, a byte for each agent, and a digest.
        most = self.num_agents * (1 + self.num_agents + _DIGEST_BYTES)
        self._opener = rendezvous.make_link_opener(Purpose.PLANNING, max_bytes=most)
        self._links = open_links(
            self._opener, neighbours, timeout=rendezvous.timeout, check=rendezvous.check
        )

    def spread(self, row: bytes) -> Table:
        """Return all rows, shape (n, bytes); zeros for agents that cannot be reached.

        Each agent writes its own row. Of several versions the first that arrives is kept.
        """
        # The first byte of a row marks it as known, because zeros may be valid content.
        table = np.zeros((self.num_agents, 1 + len(row)), np.uint8)
        table[self.agent] = np.frombuffer(b"\1" + row, np.uint8)
        # The longest path of n agents has n − 1 links. All agents run the same number of rounds.
        for _ in range(max(self.num_agents - 1, 1)):
            for theirs in self._trade(table):
                new = (table[:, 0] == 0) & (theirs[:, 0] == 1)
                table[new] = theirs[new]
        return table

    def close(self) -> None:
        """Close the links that were opened for this."""
        for link in self._links.values():
            link.part()
        for link in self._links.values():
            link.close(_SECONDS_TO_PART)
        self._opener.close()

    def _trade(self, table: Table) -> list[Table]:
        message = table.tobytes()
        try:
            for link in self._links.values():
                link.send(message)
            # All send before any receives, and links send in threads of their own: no order of
            # agents can block.
            found = [link.receive(self._timeout) for link in self._links.values()]
        except LinkError as error:
            raise PublicError(f"{error} while planning") from error
        if any(len(theirs) != table.size for theirs in found):
            raise PublicError("a neighbour sent a table of another size while planning")
        return [np.frombuffer(theirs, np.uint8).reshape(table.shape) for theirs in found]


def discover_graph(flood: Flood, request: PlanningRequest) -> nx.Graph:
    """Return the whole graph, from each agent's list of neighbours; compare settings too."""
    n = flood.num_agents
    own = np.zeros(n, np.uint8)
    own[flood.neighbours] = 1
    # The hash of the request travels with the links: agents of different requests must not plan.
    settings = hashlib.sha256(request.to_text().encode()).digest()
    table = flood.spread(own.tobytes() + settings)
    silent = np.flatnonzero(table[:, 0] == 0)
    if len(silent):
        names = ", ".join(map(str, silent))
        raise PublicError(f"the links do not reach agents {names}")
    for agent in range(n):
        if table[agent, 1 + n :].tobytes() != settings:
            raise PublicError(f"agent {agent} has another request for a plan")
    # Both ends must list a link, as the mixing matrix must be symmetric.
    claims = table[:, 1 : 1 + n]
    for i, j in np.argwhere(claims != claims.T):
        raise PublicError(f"agents {i} and {j} do not agree on a link")
    graph = nx.empty_graph(n)
    graph.add_edges_from((int(i), int(j)) for i, j in np.argwhere(np.triu(claims, 1)))
    return graph


def draw_together(flood: Flood, secret: bytes) -> int:
    """Return a seed from secrets that all agents chose before any saw those of others.

    Assumes agents that follow the protocol: one that reveals last may stop the run and so have the
    seed drawn again, and it forwards the rows of others.
    """
    # Each agent is bound by its commitment before it reads a reveal, so none can steer the sum.
    commitments = flood.spread(commit(flood.agent, secret))
    reveals = flood.spread(secret)
    for agent in range(flood.num_agents):
        check_reveal(agent, commitments[agent, 1:].tobytes(), reveals[agent, 1:].tobytes())
    digest = hashlib.sha256(b"corn joint seed" + reveals[:, 1:].tobytes()).digest()
    return int.from_bytes(digest[:4], "big")


def commit(agent: int, secret: bytes) -> bytes:
    """Return a commitment to a secret, which binds the agent without showing the secret."""
    return hashlib.sha256(b"corn commitment %d " % agent + secret).digest()


def check_reveal(agent: int, commitment: bytes, secret: bytes) -> None:
    """Raise ``CheatingError`` unless a revealed secret is the one committed to."""
    if commit(agent, secret) != commitment:
        raise CheatingError(f"agent {agent} revealed another secret than it had committed to")
