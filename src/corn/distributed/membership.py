"""Membership: which links are broken, which agents are lost or came back, and a stop.

Every message carries all that its sender knows, and each agent keeps the union of what it hears. So
news from a step t has reached every agent that is still linked to the sender by step t + n − 1: a
chain of survivors is at most that long. From step t + n on, all of them act on the same knowledge,
without a coordinator.

Agents note broken links, not lost agents. An agent that crashed has lost all its links. One whose
cable was cut is still reached by others, and goes on over the links that it has left.

News is signed by the agent that it speaks of. One of its two ends must have signed that a link
broke, an agent itself that it returns, and whoever announces a stop signs it with its own name. So
an agent that breaks the protocol can cut its own links, and no others. News is bounded too: an
agent keeps a few breaks of each link and a few returns of each agent, whatever it hears.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import networkx as nx

from corn.distributed.messages import (
    MAX_ENTRIES,
    NEVER,
    Edge,
    Header,
    News,
    NewsKeys,
    Proof,
    ProtocolError,
    Statement,
    StopNotice,
    StopReason,
    state_cut,
    state_model,
    state_return,
    state_stop,
)
from corn.topology.graphs import Graph

_Key = TypeVar("_Key", bound=Hashable)
# Neighbours are at most one step apart, so they notice a loss within two steps.
_SETTLING = 2


@dataclass(frozen=True)
class NewsDelays:
    """Steps that news of a loss takes to spread.

    Attributes:
        spread: after which news has reached all agents, along a chain of all of them.
        settling: within which the neighbours of a lost agent notice the loss.
    """

    spread: int
    settling: int

    @classmethod
    def of_gossip(cls, num_agents: int) -> NewsDelays:
        """Return the delays where news travels one link per step."""
        return cls(num_agents, _SETTLING)


def name_agents(agents: Iterable[int]) -> str:
    """Return agents in words.

    >>> name_agents([7]), name_agents([3, 1])
    ('agent 7', 'agents 1, 3')
    """
    who = sorted(agents)
    return ("agent " if len(who) == 1 else "agents ") + ", ".join(map(str, who))


def make_edge(first: int, second: int) -> Edge:
    """Return the link between two agents, by which all name it."""
    return (first, second) if first < second else (second, first)


def find_cuts(news: News, step: int) -> dict[Edge, int]:
    """Return the links that are broken at a step, and since when.

    A break counts from the step at which it was first noticed, until one of its agents returns.

    >>> news = News(cuts=frozenset({((0, 1), 5), ((0, 1), 6)}), returns=frozenset({(1, 20)}))
    >>> find_cuts(news, 4), find_cuts(news, 19), find_cuts(news, 20)
    ({}, {(0, 1): 5}, {})
    """
    returned: dict[int, int] = {}
    for agent, when in news.returns:
        if when <= step:
            returned[agent] = max(when, returned.get(agent, 0))
    cuts: dict[Edge, int] = {}
    for edge, when in news.cuts:
        # Both ends of a link notice its break, perhaps at different steps: the first one counts.
        if max(returned.get(end, 0) for end in edge) <= when <= step:
            cuts[edge] = min(when, cuts.get(edge, NEVER))
    return cuts


def _keep_few(entries: frozenset[tuple[_Key, int]]) -> frozenset[tuple[_Key, int]]:
    """Return the first and the last few steps of each link or agent: the others change nothing.

    The first break of a link counts, and the last return of an agent.
    """
    # The usual case, in every message.
    if len(entries) <= MAX_ENTRIES:
        return entries
    by_key: dict[_Key, list[int]] = {}
    for key, when in sorted(entries, key=lambda entry: entry[1]):
        by_key.setdefault(key, []).append(when)
    half = MAX_ENTRIES // 2
    kept: set[tuple[_Key, int]] = set()
    for key, steps in by_key.items():
        kept.update((key, when) for when in (*steps[:half], *steps[-half:]))
    return frozenset(kept)


class Membership:
    """One agent's knowledge of losses, returns and a stop.

    Args:
        graph: of the plan.
        agent: whose knowledge it is.
        keys: to sign own news and to check that of others; None in tests of one agent.
        stops_on_loss: whether the loss of an agent stops all.
        last_step: of the run, after which nobody returns.
    """

    def __init__(
        self,
        graph: Graph,
        agent: int,
        *,
        keys: NewsKeys | None = None,
        stops_on_loss: bool = False,
        last_step: int = NEVER,
    ) -> None:
        # Undirected: a broken connection ends both directions of a link.
        self._graph, self._agent = nx.Graph(graph), agent
        self._keys, self._stops_on_loss, self._last_step = keys, stops_on_loss, last_step
        self.news = News()

    @property
    def planned_neighbours(self) -> tuple[int, ...]:
        """The neighbours of this agent by the plan."""
        return tuple(sorted(self._graph.neighbors(self._agent)))

    @property
    def stop(self) -> StopNotice:
        """The earliest stop."""
        return self.news.stop

    def note_cut(self, peer: int, step: int) -> None:
        """Note that the own link to an agent broke at a step."""
        edge = make_edge(self._agent, peer)
        self.merge(News(frozenset({(edge, step)}), proofs=self._sign(state_cut(edge, step))))

    def note_return(self, agent: int, step: int, proof: Proof | None = None) -> None:
        """Note that an agent takes part again from a step on, which it signed."""
        statement = state_return(agent, step)
        proofs = self._sign(statement) if proof is None else {statement: proof}
        self.merge(News(returns=frozenset({(agent, step)}), proofs=proofs))

    def note_call(self, agent: int, step: int, proof: Proof | None = None) -> None:
        """Note that all wait for an agent before a step at which it returns, which it signed."""
        proofs = {} if proof is None else {state_return(agent, step): proof}
        self.merge(News(calls=frozenset({(agent, step)}), proofs=proofs))

    def called_at(self, step: int) -> frozenset[int]:
        """Return the agents for which all wait before a step."""
        return frozenset(agent for agent, when in self.news.calls if when == step)

    def forget_calls(self, step: int) -> None:
        """Remove the calls up to a step: those agents came, or must ask again."""
        left = frozenset(one for one in self.news.calls if one[1] > step)
        self._keep(replace(self.news, calls=left))

    def note_stop(self, notice: StopNotice) -> None:
        """Note a stop in this agent's name; of several the earliest counts."""
        notice = replace(notice, by=self._agent)
        self.merge(News(stop=notice, proofs=self._sign(state_stop(notice))))

    def merge(self, news: News) -> None:
        """Add another agent's knowledge, which was checked."""
        # Unions, the least and the greatest few, and a minimum: the result is the same in whatever
        # order news arrives.
        cuts = _keep_few(self.news.cuts | news.cuts)
        returns = _keep_few(self.news.returns | news.returns)
        calls = _keep_few(self.news.calls | news.calls)
        stop = min(self.news.stop, news.stop)
        self._keep(News(cuts, returns, stop, calls, {**news.proofs, **self.news.proofs}))

    def check(self, header: Header) -> None:
        """Raise ``ProtocolError`` unless the news in a header is that of honest agents.

        Whoever passes on news that another agent did not sign breaks the protocol itself.
        """
        news, who = header.news, f"agent {header.sender}"
        coming = news.returns, news.calls
        if _keep_few(news.cuts) != news.cuts or any(_keep_few(one) != one for one in coming):
            raise ProtocolError(f"{who} sent more news of one link or agent than there can be")
        for edge, when in news.cuts - self.news.cuts:
            is_end = news.find_proof(state_cut(edge, when)).author in edge
            # A break is noticed in a step that its sender has begun.
            if not self._graph.has_edge(*edge) or not is_end or when > header.step:
                raise ProtocolError(f"{who} sent false news of the link {edge[0]}–{edge[1]}")
            self._verify(state_cut(edge, when), header)
        for agent, when in (news.returns | news.calls) - self.news.returns - self.news.calls:
            if when > self._last_step:
                raise ProtocolError(f"{who} announced a return after the end of the run")
            self._verify(state_return(agent, when), header)
        if news.stop.reason is not StopReason.NONE and news.stop != self.news.stop:
            if not self._may_stop(news.stop, header.step):
                raise ProtocolError(f"{who} announced a stop that agent {news.stop.by} may not")
            self._verify(state_stop(news.stop), header)

    def _may_stop(self, notice: StopNotice, step: int) -> bool:
        """Return whether an agent may announce a stop in its own name."""
        # As far ahead as news takes to reach all agents: later ones would only fill headers.
        if notice.step > step + len(self._graph):
            return False
        if notice.reason is StopReason.LOSS and not self._stops_on_loss:
            return False
        if notice.reason in (StopReason.LOSS, StopReason.MODELS_DIFFER):
            return bool(self._graph.has_edge(notice.by, notice.agent))
        return notice.by == notice.agent

    def confirms_return(self, agent: int, step: int, proof: Proof) -> bool:
        """Return whether an agent signed that it returns at a step."""
        return self._keys is None or self._keys.verify(state_return(agent, step), proof)

    def sign_model(self, header: Header) -> Header:
        """Return a header with this agent's signature of the digest of its model."""
        if self._keys is None:
            return header
        signature = self._keys.sign(state_model(header.step, header.model)).signature
        return replace(header, signature=signature)

    def check_model(self, header: Header, root: int) -> None:
        """Raise ``ProtocolError`` unless the root signed the digest of a model in a header.

        The digest must be that of this agent's model, so all agents agree with the root.
        """
        statement = state_model(header.step, header.model)
        proof = Proof(root, header.signature)
        if self._keys is not None and not self._keys.verify(statement, proof):
            raise ProtocolError(
                f"agent {header.sender} passed on a digest of the model that agent {root}, the "
                "root, did not sign"
            )

    def _verify(self, statement: Statement, header: Header) -> None:
        proof = header.news.find_proof(statement)
        if self._keys is not None and not self._keys.verify(statement, proof):
            raise ProtocolError(
                f"agent {header.sender} sent news ({statement[0]}) that agent {proof.author} did "
                "not sign"
            )

    def _sign(self, statement: Statement) -> dict[Statement, Proof]:
        return {} if self._keys is None else {statement: self._keys.sign(statement)}

    def _keep(self, news: News) -> None:
        """Keep news, with the proofs that belong to it."""
        if news == self.news:
            return
        stated = [
            *(state_cut(*cut) for cut in news.cuts),
            *(state_return(*one) for one in news.returns | news.calls),
            state_stop(news.stop),
        ]
        proofs = {one: news.proofs[one] for one in stated if one in news.proofs}
        self.news = replace(news, proofs=proofs)

    def forget_before(self, step: int) -> None:
        """Remove news that others have replaced by a step at which all agents know of it."""
        # They would be sent with every message to the end of the run.
        latest: dict[int, int] = {}
        for agent, when in self.news.returns:
            if when <= step:
                latest[agent] = max(when, latest.get(agent, 0))
        kept_cuts = {
            (edge, when)
            for edge, when in self.news.cuts
            # The same rule as in find_cuts, so that forgetting never changes what is broken.
            if when >= max(latest.get(end, 0) for end in edge)
        }
        kept_returns = {
            (agent, when) for agent, when in self.news.returns if when >= latest.get(agent, 0)
        }
        self._keep(replace(self.news, cuts=frozenset(kept_cuts), returns=frozenset(kept_returns)))

    def cuts_by(self, step: int, *, noticed: int | None = None) -> dict[Edge, int]:
        """Return the links that are broken at a step, and were noticed by ``noticed``."""
        cuts = find_cuts(self.news, step)
        # A plan for survivors may only use what all agents know, not what this one heard last.
        limit = step if noticed is None else noticed
        return {edge: when for edge, when in cuts.items() if when <= limit}

    def own_cuts(self, step: int) -> dict[int, int]:
        """Return the neighbours whose link to this agent is broken at a step, and since when."""
        cuts = self.cuts_by(step)
        own = {peer: make_edge(self._agent, peer) for peer in self.planned_neighbours}
        return {peer: cuts[edge] for peer, edge in own.items() if edge in cuts}

    def alone_since(self, step: int) -> int | None:
        """Return the step at which the last neighbour was lost; None while there is one."""
        cuts = self.own_cuts(step)
        return max(cuts.values()) if cuts and len(cuts) == len(self.planned_neighbours) else None

    def present_at(self, step: int) -> tuple[int, ...]:
        """Return the agents that this one reaches at a step, itself included."""
        return component_of(self._graph, self._agent, self.cuts_by(step))

    def reached_without(self, step: int, sponsor: int) -> frozenset[int]:
        """Return the agents that another reaches at a step without the help of this one."""
        # The own return mends the own links on paper.
        own = {make_edge(self._agent, peer) for peer in self.planned_neighbours}
        return frozenset(component_of(self._graph, sponsor, own | self.cuts_by(step).keys()))

    def returned_neighbours(self, step: int, sponsor: int) -> dict[int, int]:
        """Return the neighbours that are back by a step at which this agent itself returns.

        Each comes with the step of its last return. One that was lost again is left out.
        """
        latest: dict[int, int] = {}
        for agent, when in self.news.returns:
            if when <= step:
                latest[agent] = max(when, latest.get(agent, 0))
        neighbours = set(self.planned_neighbours) & self.reached_without(step, sponsor)
        return {agent: latest[agent] for agent in sorted(neighbours & latest.keys())}

    def is_awaited(self, agent: int | None, step: int) -> bool:
        """Return whether an agent, or any, is to return at this step or a later one."""
        announced = self.news.returns if agent is not None else self.news.calls
        return any(agent in (None, who) and when >= step for who, when in announced)

    def lost_by(self, step: int) -> dict[int, int]:
        """Return the agents that no agent reaches any more, each with the step of its first loss.

        These are neighbours of the agents that are still linked to this one. Whether agents behind
        them are lost too cannot be known here.
        """
        cuts, lost = self.cuts_by(step), dict[int, int]()
        # Asked in every mixing round, and a graph of a thousand agents takes milliseconds to copy.
        if not cuts:
            return lost
        own = set(self.present_at(step))
        for edge, when in cuts.items():
            for inside, outside in (edge, edge[::-1]):
                if inside in own and outside not in own:
                    lost[outside] = min(when, lost.get(outside, NEVER))
        return dict(sorted(lost.items()))


def component_of(graph: Graph, agent: int, cuts: Iterable[Edge]) -> tuple[int, ...]:
    """Return the agents that ``agent`` can still reach, itself included, in increasing order.

    >>> component_of(nx.path_graph(5), 0, [(1, 2)])
    (0, 1)
    """
    left = nx.Graph(graph)
    left.remove_edges_from(cuts)
    return tuple(sorted(nx.node_connected_component(left, agent)))
