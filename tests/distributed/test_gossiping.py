"""Mixing rounds link by link: equal to the polynomial, and right when an agent drops out."""

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from corn.distributed.recovery import LinkState, weigh_neighbours
from corn.distributed.rounds import LinkFlows
from corn.topology import Gossip, mixing_matrix
from corn.topology.gossip import GossipRound
from corn.topology.graphs import Graph

SPEEDS = [Gossip(3), Gossip(2, "chebyshev"), Gossip(4, "chebyshev")]


class Agents:
    """All agents of a graph in one process, of which some may stop between rounds."""

    def __init__(self, graph: Graph, gossip: Gossip, models: Tensor) -> None:
        self.graph, self.lost = graph, frozenset[int]()
        self.W, self.is_chebyshev = mixing_matrix(graph), gossip.kind == "chebyshev"
        self.models = dict(enumerate(models))
        self.flows = {i: LinkFlows(gossip.schedule(self.W)) for i in graph}

    def run_round(self) -> None:
        alive = [i for i in self.graph if i not in self.lost]
        around = {i: [j for j in self.graph[i] if j not in self.lost] for i in alive}
        mixed = {}
        for i in alive:
            weights = self.weigh(i, around)
            assert sum(weights.values()) <= 1 + 1e-12
            received = {j: self.models[j] for j in around[i]}
            mixed[i] = self.flows[i].mix(self.models[i], received, weights)
        self.models = mixed

    def weigh(self, i: int, around: dict[int, list[int]]) -> dict[int, float]:
        """Return the weights as ``TrainingRounds`` does."""
        planned = {j: (float(self.W[i, j]), float(self.W[j, i])) for j in around[i]}
        if self.is_chebyshev:
            return {j: weight for j, (weight, _) in planned.items()}
        # The neighbours of a lost agent know of it; news have not reached the others yet.
        degrees = {j: len(around[j]) for j in around}
        states = {j: LinkState(degrees[j], degrees[j] < self.graph.degree[j]) for j in around}
        return weigh_neighbours(planned, states[i], {j: states[j] for j in around[i]})

    def average(self, agents: list[int]) -> Tensor:
        return torch.stack([self.models[i] for i in agents]).mean(dim=0)


def draw_models(num_agents: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_agents, 5, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("gossip", SPEEDS, ids=str)
def test_the_rounds_of_all_agents_are_the_matrix_of_a_step(gossip: Gossip) -> None:
    models = draw_models(8)
    agents = Agents(nx.path_graph(8), gossip, models)
    for _ in range(gossip.rounds):
        agents.run_round()
    expected = torch.tensor(gossip.matrix(agents.W)) @ models
    torch.testing.assert_close(torch.stack(list(agents.models.values())), expected)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(4, 9),
    st.integers(0, 100),
    st.sampled_from(SPEEDS),
    st.integers(1, 3),
    st.integers(0, 8),
)
def test_a_loss_between_rounds_does_not_shift_the_survivors_average(
    n: int, seed: int, gossip: Gossip, when: int, who: int
) -> None:
    graph = nx.connected_watts_strogatz_graph(n, 2 + 2 * (n > 6), 0.3, seed=seed)
    agents = Agents(graph, gossip, draw_models(n, seed))
    # The lost agent differs much from the others, so that repeating its part would show.
    agents.models[who % n] = agents.models[who % n] + 100
    survivors = [i for i in graph if i != who % n]
    for k in range(gossip.rounds):
        if k == min(when, gossip.rounds - 1):
            agents.lost = frozenset({who % n})
            before = agents.average(survivors)
        agents.run_round()
    # Whatever the lost agent had sent before stays; nothing is added after it is gone.
    torch.testing.assert_close(agents.average(survivors), before, atol=1e-10, rtol=0)


def test_memory_of_the_model_before_would_shift_the_average() -> None:
    """The plain recurrence repeats what a lost agent sent, which the test above would notice."""
    graph, gossip = nx.cycle_graph(5), Gossip(2, "chebyshev")
    agents = Agents(graph, gossip, draw_models(5))
    agents.models[0] = agents.models[0] + 100
    first = dict(agents.models)
    agents.run_round()
    agents.lost = frozenset({0})
    before = agents.average([1, 2, 3, 4])
    momentum, gain = gossip.schedule(agents.W)[1]
    changes = [agents.models[i] - first[i] for i in (1, 2, 3, 4)]
    agents.flows = {i: LinkFlows([GossipRound(0.0, gain)]) for i in graph}
    agents.run_round()
    shift = momentum * torch.stack(changes).mean(dim=0)
    assert agents.average([1, 2, 3, 4]) == pytest.approx(before)
    assert shift.abs().min() > 0.1


def test_opposite_ends_of_a_link_cancel_to_the_bit() -> None:
    """In float32 too, or averages would drift over thousands of steps."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 1000, generator=generator)
    schedule = [GossipRound(0.0, 1.1), GossipRound(0.3, 1.4)]
    ends = [LinkFlows(schedule), LinkFlows(schedule)]
    for _ in range(2):
        moved = ends[0].mix(x, {1: y}, {1: 1 / 3}), ends[1].mix(y, {0: x}, {0: 1 / 3})
        assert torch.equal(ends[0]._flows[1], -ends[1]._flows[0])
        x, y = moved
