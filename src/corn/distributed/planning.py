"""Planning without a planner: agents that know only their neighbours make one plan together.

They flood what they know over their links until everyone knows the graph, draw public randomness by
commit and reveal, and each solves the same design by itself. The handshake then compares the plans'
fingerprints. n − 1 rounds are enough for any news to reach everyone in a connected network.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import networkx as nx
import numpy as np
import torch
from numpy.typing import NDArray

from corn.covariance import DEFAULT_THREAT, Horizon, MechanismName, ThreatModel
from corn.distributed.links import Link, LinkError, open_links
from corn.distributed.meeting import Meeting
from corn.errors import (
    CornError,
    FileFormatError,
    InvalidArgumentError,
    PublicError,
    make_printable,
)
from corn.parsing import build, quote, read_json
from corn.plan import FloatType, Plan, make_plan
from corn.privacy import PrivacyBudget
from corn.threads import one_thread
from corn.topology import WEIGHTS, load_network

_DIGEST_BYTES, _MAX_REASON = 32, 300
Table = NDArray[np.uint8]


class CheatingError(PublicError):
    """What an agent revealed is not what it had committed itself to."""


@dataclass(frozen=True)
class PlanningRequest:
    """The public settings that all agents start from: everything of a plan but graph and noise."""

    budget: PrivacyBudget
    objective: Horizon
    threat: ThreatModel = DEFAULT_THREAT
    mechanism: MechanismName = "corn"
    weights: str | None = None
    dtype: FloatType = "float32"

    def __post_init__(self) -> None:
        if self.weights is not None and self.weights not in WEIGHTS:
            raise InvalidArgumentError(
                f"weights must be one of {', '.join(WEIGHTS)}, found {quote(self.weights)}"
            )

    def to_text(self) -> str:
        """As JSON, for agents on other machines."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)


def read_request(path: Path) -> PlanningRequest:
    """Read what :meth:`PlanningRequest.to_text` wrote."""
    document = read_json(path, kind="a request for a plan")
    try:
        request: PlanningRequest = build(PlanningRequest, document, "the request")
    except CornError as error:
        why = make_printable(str(error), limit=_MAX_REASON)
        raise FileFormatError(f"{path}: not a request for a plan: {why}") from error
    return request


def plan_together(
    meeting: Meeting, request: PlanningRequest, neighbours: Iterable[int]
) -> tuple[Plan, int]:
    """The plan of all agents, made by each alone, and a public seed that nobody could choose."""
    meeting.say("planning", b"")
    meeting.hear_all("planning")  # opening links hears no signal, so all must be there
    flood = Flood(meeting, sorted(neighbours))
    try:
        graph = discover_graph(flood, request)
        seed = draw_together(flood, secrets.token_bytes(_DIGEST_BYTES))
    finally:
        flood.close()
    with one_thread():
        plan = make_plan(
            load_network(graph, weights=request.weights),
            request.budget,
            threat=request.threat,
            objective=request.objective,
            mechanism=request.mechanism,
            dtype=request.dtype,
        )
    return plan, seed


@final
class Flood:
    """Spreads one row of bytes per agent over links, to everyone who can be reached."""

    def __init__(self, meeting: Meeting, neighbours: list[int]) -> None:
        self.agent, self.num_agents = meeting.agent, meeting.num_agents
        self.neighbours, self._timeout = neighbours, meeting.timeout
        self._links: dict[str, dict[int, Link]] = {}
        self._open: Callable[[str, int], dict[int, Link]] = lambda topic, size: open_links(
            meeting.store,
            meeting.agent,
            neighbours,
            message_bytes=size,
            timeout=meeting.timeout,
            address=meeting.address,
            topic=topic,
        )

    def spread(self, topic: str, row: bytes) -> Table:
        """Everyone's rows, shape (n, bytes); zeros for those who cannot be reached.

        A row is what its owner says; the first version that arrives is kept.
        """
        table = np.zeros((self.num_agents, 1 + len(row)), np.uint8)
        table[self.agent] = np.frombuffer(b"\1" + row, np.uint8)
        links = self._links[topic] = self._open(topic, table.size)
        for _ in range(max(self.num_agents - 1, 1)):
            for theirs in self._trade(links, table):
                new = (table[:, 0] == 0) & (theirs[:, 0] == 1)
                table[new] = theirs[new]
        return table

    def close(self) -> None:
        """Close the links that were opened for this."""
        for links in self._links.values():
            for link in links.values():
                link.close()

    def _trade(self, links: Mapping[int, Link], table: Table) -> list[Table]:
        message = torch.from_numpy(table.reshape(-1).copy())
        try:
            for link in links.values():
                link.post_receive()
                link.send(message)
            for link in links.values():
                link.wait_received(self._timeout)
            for link in links.values():
                link.wait_sent(self._timeout)
        except LinkError as error:
            raise PublicError(f"agent {self.agent}: {error} while planning") from error
        return [link.buffer[: table.size].numpy().reshape(table.shape) for link in links.values()]


def discover_graph(flood: Flood, request: PlanningRequest) -> nx.Graph:
    """The whole graph, from what each agent says of its neighbours and of the settings."""
    n = flood.num_agents
    own = np.zeros(n, np.uint8)
    own[flood.neighbours] = 1
    settings = hashlib.sha256(request.to_text().encode()).digest()
    table = flood.spread("edges", own.tobytes() + settings)
    silent = np.flatnonzero(table[:, 0] == 0)
    if len(silent):
        names = ", ".join(map(str, silent))
        raise PublicError(f"agent {flood.agent}: the links do not reach agents {names}")
    for agent in range(n):
        if table[agent, 1 + n :].tobytes() != settings:
            raise PublicError(f"agent {flood.agent}: agent {agent} wants to plan something else")
    claims = table[:, 1 : 1 + n]
    for i, j in np.argwhere(claims != claims.T):
        raise PublicError(f"agent {flood.agent}: agents {i} and {j} do not agree on a link")
    graph = nx.empty_graph(n)
    graph.add_edges_from((int(i), int(j)) for i, j in np.argwhere(np.triu(claims, 1)))
    return graph


def draw_together(flood: Flood, secret: bytes) -> int:
    """A seed that depends on what everybody chose before anyone knew the others' choice.

    Assumes agents that follow the protocol: one that sees all reveals first may stop the run and
    so have it drawn again, and rows of others pass through its hands.
    """
    commitments = flood.spread("commitments", commit(flood.agent, secret))
    reveals = flood.spread("reveals", secret)
    for agent in range(flood.num_agents):
        check_reveal(agent, commitments[agent, 1:].tobytes(), reveals[agent, 1:].tobytes())
    digest = hashlib.sha256(b"corn joint seed" + reveals[:, 1:].tobytes()).digest()
    return int.from_bytes(digest[:4], "big")


def commit(agent: int, secret: bytes) -> bytes:
    """What binds an agent to its choice without showing it."""
    return hashlib.sha256(b"corn commitment %d " % agent + secret).digest()


def check_reveal(agent: int, commitment: bytes, secret: bytes) -> None:
    """Refuse a choice that was changed after others had shown theirs."""
    if commit(agent, secret) != commitment:
        raise CheatingError(f"agent {agent} revealed something else than it had committed to")
