"""Every generator gives the graph it names, connected, with agents 0 … n−1."""

import networkx as nx
import pytest

from corn.errors import CornWarning, InfeasibleError, InvalidArgumentError
from corn.topology import GENERATORS, GraphSpec, check_graph, is_connected

EXAMPLES = [
    "er:n=20,p=0.3,seed=1",
    "ring:7",
    "path:6",
    "path:1",
    "star:9",
    "complete:5",
    "complete:1",
    "grid:4x5",
    "torus:3x4",
    "hypercube:16",
    "exponential:11",
    "regular:n=10,degree=3,seed=2",
    "small-world:n=15,degree=4,p=0.3,seed=3",
    "geometric:n=15,radius=0.5,seed=1",
    "barbell:clique=4,bridge=2",
    "karate",
    "directed-ring:6",
    "directed-exponential:9",
]


def test_examples_cover_every_generator() -> None:
    assert {text.partition(":")[0] for text in EXAMPLES} == set(GENERATORS)


@pytest.mark.parametrize("text", EXAMPLES)
def test_generated_graphs_are_usable_and_repeatable(text: str) -> None:
    graph = GraphSpec.parse(text).build()
    again = GraphSpec.parse(text).build()
    assert sorted(graph.nodes) == list(range(len(graph)))
    assert nx.utils.graphs_equal(nx.Graph(graph.edges), nx.Graph(again.edges))
    assert is_connected(check_graph(graph))


@pytest.mark.parametrize(
    ("text", "num_agents", "num_links"),
    [
        ("ring:7", 7, 7),
        ("star:9", 9, 8),
        ("complete:5", 5, 10),
        ("grid:4x5", 20, 31),
        ("torus:3x4", 12, 24),
        ("hypercube:16", 16, 32),
        ("exponential:8", 8, 20),
        ("barbell:clique=4,bridge=2", 10, 15),
        ("karate", 34, 78),
        ("directed-ring:2", 2, 2),
        ("directed-exponential:9", 9, 36),
    ],
)
def test_sizes_of_known_graphs(text: str, num_agents: int, num_links: int) -> None:
    graph = GraphSpec.parse(text).build()
    assert (graph.number_of_nodes(), graph.number_of_edges()) == (num_agents, num_links)


def test_hypercube_is_networkx_hypercube() -> None:
    assert nx.is_isomorphic(GraphSpec.parse("hypercube:8").build(), nx.hypercube_graph(3))


def test_first_connected_draw_is_networkx_own_for_the_seed() -> None:
    ours = GraphSpec.parse("er:n=20,p=0.5,seed=4").build()
    assert set(ours.edges) == set(nx.gnp_random_graph(20, 0.5, seed=4).edges)


def test_sparse_erdos_renyi_warns_and_still_connects() -> None:
    with pytest.warns(CornWarning, match=r"below ln\(n\)/n = 0.15"):
        graph = GraphSpec.parse("er:n=20,p=0.12,seed=0").build()
    assert nx.is_connected(graph)


def test_hopeless_erdos_renyi_gives_up_with_advice() -> None:
    with (
        pytest.warns(CornWarning),
        pytest.raises(InfeasibleError, match=r"disconnected in 1000 draws: raise p above"),
    ):
        GraphSpec.parse("er:n=30,p=0.001").build()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ring:2", "n must be at least 3, found 2"),
        ("complete:0", "n must be at least 1"),
        ("torus:2x5", "rows must be at least 3"),
        ("hypercube:12", "power of two"),
        ("er:n=5,p=1.5", r"p must be in \[0, 1\], found 1.5"),
        ("er:n=5,p=nan", r"p must be in \[0, 1\], found nan"),
        ("regular:n=5,degree=3", "even"),
        ("regular:n=4,degree=4", "degree must be in"),
        ("small-world:n=3,degree=4,p=0.1", "n must be at least 5"),
        ("geometric:n=5,radius=0", "radius must be positive"),
        ("barbell:1", "clique must be at least 2"),
    ],
)
def test_impossible_sizes_are_named(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        GraphSpec.parse(text).build()
