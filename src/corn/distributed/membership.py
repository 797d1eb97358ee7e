"""What an agent knows of losses and of a stop: noted here, spread by the headers of its messages.

Every header carries all its sender knows, so news from a step t has reached every agent that is
still linked to the sender by step t + n − 1: a chain of survivors is at most that long. From step
t + n on, all of them act on the same knowledge, with no one to coordinate them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import networkx as nx

from corn.topology.graphs import Graph

NEVER = 2**32 - 1
"""The step at which nothing was noticed, and after which nothing stops."""

StopReason: TypeAlias = Literal["none", "interrupted", "loss", "diverged"]
STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)


@dataclass(frozen=True, order=True)
class StopNotice:
    """Everyone stops once ``step`` steps are done, because of ``agent``; the least one counts."""

    step: int = NEVER
    agent: int = 0
    reason: StopReason = "none"


NO_STOP = StopNotice()


class Membership:
    """One agent's knowledge: which agents were lost, when that was first noticed, and a stop."""

    def __init__(self, num_agents: int) -> None:
        self._noticed = [NEVER] * num_agents
        self.stop = NO_STOP

    @property
    def noticed(self) -> tuple[int, ...]:
        """For each agent the step at which its loss was first noticed, or ``NEVER``."""
        return tuple(self._noticed)

    @property
    def lost(self) -> frozenset[int]:
        """Every agent known to be lost."""
        return self.lost_by(NEVER - 1)

    def lost_by(self, step: int) -> frozenset[int]:
        """The agents whose loss was noticed at ``step`` or before."""
        return frozenset(agent for agent, when in enumerate(self._noticed) if when <= step)

    def note_loss(self, agent: int, step: int) -> None:
        """A link to ``agent`` broke at ``step``."""
        self._noticed[agent] = min(self._noticed[agent], step)

    def note_stop(self, notice: StopNotice) -> None:
        """Somebody wants all to stop; of several the earliest counts."""
        self.stop = min(self.stop, notice)

    def hear(self, noticed: Sequence[int], stop: StopNotice) -> None:
        """Add what a neighbour knows."""
        self._noticed = list(map(min, self._noticed, noticed))
        self.note_stop(stop)


def component_of(graph: Graph, agent: int, lost: Iterable[int]) -> tuple[int, ...]:
    """The survivors that ``agent`` can still reach, itself included, in increasing order.

    >>> component_of(nx.path_graph(5), 0, [2])
    (0, 1)
    """
    survivors = nx.Graph(graph)
    survivors.remove_nodes_from(lost)
    return tuple(sorted(nx.node_connected_component(survivors, agent)))


def split_survivors(graph: Graph, lost: Iterable[int]) -> list[tuple[int, ...]]:
    """The parts into which losses cut a network, the largest first.

    >>> split_survivors(nx.path_graph(5), [1])
    [(2, 3, 4), (0,)]
    """
    survivors = nx.Graph(graph)
    survivors.remove_nodes_from(lost)
    parts = [tuple(sorted(part)) for part in nx.connected_components(survivors)]
    return sorted(parts, key=lambda part: (-len(part), part))


def name_agents(agents: Iterable[int]) -> str:
    """Agents in words.

    >>> name_agents([7]), name_agents([3, 1])
    ('agent 7', 'agents 1, 3')
    """
    who = sorted(agents)
    return ("agent " if len(who) == 1 else "agents ") + ", ".join(map(str, who))
