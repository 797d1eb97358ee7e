"""Mixing rounds, agent by agent, are the polynomial of a step."""

import networkx as nx
import pytest
import torch

from corn.distributed.rounds import mix_models
from corn.topology import Gossip, load_network


@pytest.mark.parametrize(
    "gossip", [Gossip(3), Gossip(2, "chebyshev"), Gossip(4, "chebyshev")], ids=str
)
def test_the_rounds_of_all_agents_are_the_matrix_of_a_step(gossip: Gossip) -> None:
    graph = nx.path_graph(8)
    W = load_network(graph).mixing_matrix
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(8, 5, dtype=torch.float64, generator=generator)
    models = before = list(start)
    for gossip_round in gossip.schedule(W):
        mixed = [
            mix_models(
                models[i],
                {j: models[j] for j in graph[i]},
                {j: float(W[i, j]) for j in range(8) if j != i},
                before[i],
                gossip_round,
            )
            for i in range(8)
        ]
        models, before = mixed, models
    torch.testing.assert_close(torch.stack(models), torch.tensor(gossip.matrix(W)) @ start)
