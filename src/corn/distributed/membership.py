"""Membership: which links are broken, and which agents are lost, left or came back.

Every message carries all that its sender knows, and each agent keeps the union of what it hears.
News is signed by the agent that says it, about its own links or itself, for a step that has begun:
an agent that breaks the protocol can cut its own links, and no others. Of each agent and link the
last step counts, so news is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import final

import networkx as nx

from corn.distributed.messages import Header, Kind, News, NewsKeys, ProtocolError, Saying, Subject
from corn.topology.graphs import Graph

Edge = tuple[int, int]
"""Two neighbours, the lower number first."""


def name_agents(agents: Iterable[int]) -> str:
    """Return agents in words."""
    who = sorted(agents)
    return ("agent " if len(who) == 1 else "agents ") + ", ".join(map(str, who))


@final
class Membership:
    """One agent's knowledge of losses and returns; after ``last_step`` nobody returns."""

    def __init__(
        self, graph: Graph, agent: int, keys: NewsKeys, *, last_step: int = 1 << 32
    ) -> None:
        self._graph = graph
        self.agent = agent
        self.num_agents = len(graph)
        self.num_links = graph.number_of_edges()
        self.planned_neighbours = tuple(sorted(graph.neighbors(agent)))
        self._keys = keys
        self._last_step = last_step
        self.news: News = {}
        self._waits: News = {}

    def note(self, kind: Kind, step: int, peer: int | None = None) -> None:
        """Say something of a step in this agent's name: about its link to a peer, or itself."""
        self.merge(self._sign(kind, step, peer))

    def _sign(self, kind: Kind, step: int, peer: int | None) -> News:
        first, second = sorted((self.agent, self.agent if peer is None else peer))
        subject = Subject(kind, first, second, self.agent)
        return {subject: Saying(step, self._keys.sign(subject, step))}

    def forget_before(self, step: int) -> None:
        """Remove what a recovery has settled that ends at a step: steps begun, and calls for it."""
        # Whoever was called has come by now, or must ask again.
        self.news = {
            subject: said
            for subject, said in self.news.items()
            if subject.kind is not Kind.BEGUN
            and not (subject.kind is Kind.CALL and said.step <= step)
        }

    def note_call(self, agent: int, step: int, signature: bytes) -> bool:
        """Note that all wait for an agent before a step, if the agent signed it; return whether."""
        subject = Subject(Kind.CALL, agent, agent, agent)
        said = Saying(step, signature)
        if not self._keys.verify(subject, said):
            return False
        self.merge({subject: said})
        return True

    def say_waits(self, peer: int, number: int) -> News:
        """Return the waits that are known, and that for a neighbour's message of a number."""
        return {**self._waits, **self._sign(Kind.WAIT, number, peer)}

    def merge_waits(self, waits: News) -> None:
        """Add waits of which a neighbour tells, if their authors signed them."""
        new = {s: said for s, said in waits.items() if self._waits.get(s) != said}
        for subject, said in new.items():
            is_link = self._graph.has_edge(subject.first, subject.second)
            is_signed = self._keys.verify(subject, said)
            if subject.kind is not Kind.WAIT or not is_link or not is_signed:
                raise ProtocolError(f"sent a false wait of agent {subject.author}")
        self._waits = _join(self._waits, new)

    def count_waits(self, peer: int, number: int) -> int:
        """Return how many agents wait for each other in a chain behind a neighbour.

        This agent waits for its message of a number; so it waits for the one before of somebody
        else.
        """
        last: dict[int, tuple[int, set[int]]] = {}
        for subject, said in self._waits.items():
            if said.step > last.get(subject.author, (-1,))[0]:
                last[subject.author] = said.step, set()
            if said.step == last[subject.author][0]:
                last[subject.author][1].update({subject.first, subject.second} - {subject.author})

        # In the order of their messages, not by recursion: a chain may have thousands of agents.
        lengths: dict[int, int] = {}
        for agent in sorted(last, key=lambda author: last[author][0]):
            step, awaited = last[agent]
            behind = awaited - {self.agent}
            rest = (lengths[each] for each in behind if last.get(each, (-2,))[0] == step - 1)
            lengths[agent] = 1 + max(rest, default=0) if behind else 0
        return lengths[peer] if last.get(peer, (-2,))[0] == number - 1 else 0

    def merge(self, news: News) -> None:
        """Add another agent's knowledge, which was checked."""
        # A maximum for each subject: the result is the same in whatever order news arrives.
        self.news = _join(self.news, news)

    def learns_from(self, news: News) -> bool:
        """Return whether another agent's knowledge has a lost link or agent that is new here."""
        return not find_breaks(_join(self.news, news)) <= find_breaks(self.news)

    def check(self, header: Header, *, is_first: bool = False) -> None:
        """Raise ``ProtocolError`` unless the news in a header is that of honest agents.

        ``is_first``: it is the first message to an agent that returns, which knows of nothing.
        """
        who = f"agent {header.sender}"
        for subject, said in header.news.items():
            if subject in self.news and said.step <= self.news[subject].step:
                continue
            if not self._may_say(subject, said.step, header, is_first=is_first):
                kind = subject.kind.name.lower()
                raise ProtocolError(f"{who} sent false news ({kind}) of agent {subject.author}")
            if not self._keys.verify(subject, said):
                raise ProtocolError(f"{who} sent news that agent {subject.author} did not sign")

    def _may_say(self, subject: Subject, step: int, header: Header, *, is_first: bool) -> bool:
        if subject.kind is Kind.WAIT:
            return False
        if subject.kind is Kind.CALL:
            return subject.first == subject.second and step <= self._last_step
        # All else happened in a step that some agent has begun.
        if step > max(header.step, count_begun(header.news)):
            return False
        if subject.kind is Kind.CUT:
            return bool(self._graph.has_edge(subject.first, subject.second))
        if subject.first != subject.second:
            return False
        if subject.kind is not Kind.RETURN or is_first:
            return True
        # Nobody returns who was not lost or called: broken links would count as whole.
        call = header.news.get(subject._replace(kind=Kind.CALL))
        return call is not None and call.step == step and subject.author not in self.present

    def sign_model(self, header: Header) -> Header:
        """Return a header with this agent's signature of the digest of its model."""
        return replace(header, signature=self._keys.sign_model(header.step, header.model))

    def check_model(self, header: Header, root: int) -> None:
        """Raise ``ProtocolError`` unless the root signed the digest of a model in a header."""
        if not self._keys.verify_model(root, header.signature, header.step, header.model):
            raise ProtocolError(
                f"agent {header.sender} passed on a digest of the model that agent {root}, the "
                "root, did not sign"
            )

    @property
    def breaks(self) -> frozenset[Subject]:
        """All news of links that are broken, and of agents that left, by who says it."""
        return find_breaks(self.news)

    @property
    def cuts(self) -> dict[Edge, int]:
        """The links that are broken, each with the step at which this was first noticed."""
        cuts: dict[Edge, int] = {}
        for subject in self.breaks:
            if subject.kind is Kind.CUT:
                edge = (subject.first, subject.second)
                when = self.news[subject].step
                cuts[edge] = min(when, cuts.get(edge, when))
        return cuts

    @property
    def leavers(self) -> dict[int, int]:
        """The agents that left, each with the step from which they take no part."""
        return {s.author: self.news[s].step for s in self.breaks if s.kind is Kind.LEAVE}

    @property
    def present(self) -> tuple[int, ...]:
        """The agents that this one still reaches."""
        return self.reach(self.agent)

    def reach(self, agent: int) -> tuple[int, ...]:
        """Return the agents that another still reaches, itself included, in increasing order."""
        left = nx.Graph(self._graph)
        left.remove_edges_from(self.cuts)
        left.remove_nodes_from(self.leavers.keys() - {agent})
        return tuple(sorted(nx.node_connected_component(left, agent)))

    @property
    def lost(self) -> dict[int, int]:
        """Neighbours of agents still linked to this one that none of them reaches, and since when.

        Agents that leave together do not lose each other.
        """
        # Asked in every step, and a graph of a thousand agents takes milliseconds to copy.
        if not self.breaks:
            return {}
        lost = dict(self.leavers)
        if self.agent in lost:
            # Those that left before this agent did.
            lost = {agent: step for agent, step in lost.items() if step < lost[self.agent]}
        inside = {*self.present, *self.leavers}
        for edge, when in self.cuts.items():
            for here, there in (edge, edge[::-1]):
                if here in inside and there not in inside:
                    lost[there] = min(when, lost.get(there, when))
        return dict(sorted(lost.items()))

    @property
    def cut_links(self) -> dict[int, int]:
        """Neighbours that still take part though the link to them broke, and since when."""
        present = set(self.present) if self.breaks else set()
        own = {peer: tuple(sorted((self.agent, peer))) for peer in self.planned_neighbours}
        cuts = self.cuts
        return {peer: cuts[edge] for peer, edge in own.items() if edge in cuts and peer in present}

    @property
    def calls(self) -> dict[int, int]:
        """The lost agents that ask to come back, each with the step before which all wait."""
        calls = {s.author: said.step for s, said in self.news.items() if s.kind is Kind.CALL}
        present = set(self.present) if calls else set()
        return {agent: step for agent, step in calls.items() if agent not in present}


def _join(first: News, second: News) -> News:
    newer = {
        subject: said
        for subject, said in second.items()
        if subject not in first or said.step > first[subject].step
    }
    return {**first, **newer} if newer else first


def find_breaks(news: News) -> frozenset[Subject]:
    """Return the links that are broken and the agents that left, unless these returned later.

    >>> cut, back = Subject(Kind.CUT, 0, 1, 0), Subject(Kind.RETURN, 1, 1, 1)
    >>> find_breaks({cut: Saying(5), back: Saying(20)}), len(find_breaks({cut: Saying(20)}))
    (frozenset(), 1)
    """
    returned = {s.author: said.step for s, said in news.items() if s.kind is Kind.RETURN}
    return frozenset(
        subject
        for subject, said in news.items()
        if subject.kind in (Kind.CUT, Kind.LEAVE)
        and said.step >= max(returned.get(subject.first, 0), returned.get(subject.second, 0))
    )


def count_begun(news: News, *, without: int | None = None) -> int:
    """Return the most steps that any agent, or any but one, says it has begun."""
    begun = (
        said.step
        for subject, said in news.items()
        if subject.kind is Kind.BEGUN and subject.author != without
    )
    return max(begun, default=0)
