"""Generators return the graph that they name; specs accept several spellings and reject others."""

import networkx as nx
import pytest

from corn.errors import CornWarning, InfeasibleError, InvalidArgumentError
from corn.topology import GraphSpec, check_graph
from corn.topology.graphs import GENERATORS

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
]


def test_examples_cover_every_generator() -> None:
    assert {text.partition(":")[0] for text in EXAMPLES} == set(GENERATORS)


@pytest.mark.parametrize("text", EXAMPLES)
def test_generated_graphs_are_usable_and_repeatable(text: str) -> None:
    graph = GraphSpec.parse(text).build()
    again = GraphSpec.parse(text).build()
    assert sorted(graph.nodes) == list(range(len(graph)))
    assert nx.utils.graphs_equal(nx.Graph(graph.edges), nx.Graph(again.edges))
    assert nx.is_connected(check_graph(graph))


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
    ],
)
def test_sizes_of_known_graphs(text: str, num_agents: int, num_links: int) -> None:
    graph = GraphSpec.parse(text).build()
    assert (graph.number_of_nodes(), graph.number_of_edges()) == (num_agents, num_links)


def test_first_draw_equals_that_of_networkx_for_the_seed() -> None:
    ours = GraphSpec.parse("er:n=20,p=0.5,seed=4").build()
    assert set(ours.edges) == set(nx.gnp_random_graph(20, 0.5, seed=4).edges)


def test_sparse_erdos_renyi_warns_and_still_connects() -> None:
    with pytest.warns(CornWarning, match=r"below ln\(n\)/n = 0.15"):
        graph = GraphSpec.parse("er:n=20,p=0.12,seed=0").build()
    assert nx.is_connected(graph)


def test_erdos_renyi_that_is_never_connected_fails_with_advice() -> None:
    with (
        pytest.warns(CornWarning),
        pytest.raises(InfeasibleError, match=r"disconnected in 1000 draws: raise p above"),
    ):
        GraphSpec.parse("er:n=30,p=0.001").build()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ring:2", "n must be an integer of at least 3, found 2"),
        ("complete:0", "n must be an integer of at least 1"),
        ("torus:2x5", "rows must be an integer of at least 3"),
        ("hypercube:12", "power of two"),
        ("er:n=5,p=1.5", r"p must be in \[0, 1\], found 1.5"),
        ("er:n=5,p=nan", r"p must be in \[0, 1\], found nan"),
        ("regular:n=5,degree=3", "even"),
        ("regular:n=4,degree=4", "degree must be in"),
    ],
)
def test_errors_name_the_bad_parameter(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        GraphSpec.parse(text).build()


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("er:n=20,p=0.2,seed=1", "er:n=20,p=0.2,seed=1"),
        ("er:20,0.2", "er:n=20,p=0.2,seed=0"),
        ("er:p=0.2,n=20", "er:n=20,p=0.2,seed=0"),
        (" ring:20 ", "ring:n=20"),
        ("grid:4x5", "grid:rows=4,columns=5"),
        ("grid:columns=5,rows=4", "grid:rows=4,columns=5"),
        ("regular:10,3", "regular:n=10,degree=3,seed=0"),
    ],
)
def test_specs_have_one_canonical_form(text: str, canonical: str) -> None:
    spec = GraphSpec.parse(text)
    assert str(spec) == canonical
    assert GraphSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown graph ''"),
        ("rign:20", "unknown graph 'rign:20': accepted are er, ring"),
        ("er", "n, p missing; accepted is er:n=…,p=…,seed=0"),
        ("er:n=20", "p missing"),
        ("er:n=20,q=1", "cannot place 'q=1'; accepted is er:n=…,p=…,seed=0"),
        ("er:n=20,n=30,p=1", "cannot place 'n=30'"),
        ("ring:20,30", "cannot place '30'"),
        ("ring:many", "n must be a whole number, found 'many'"),
        ("ring:20.5", "n must be a whole number, found '20.5'"),
        ("ring:" + "9" * 400, "n must have at most 20 digits; accepted is ring:n=…"),
        ("er:n=20,p=often", "p must be a number, found 'often'"),
        ("karate", "unknown graph 'karate'"),
    ],
)
def test_errors_for_bad_specs_list_accepted_values(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        GraphSpec.parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ring:99999999", "at most 200,000 agents and .* found 99,999,999 agents"),
        ("torus:10000x10000", "at most 200,000 agents and .* found 100,000,000 agents"),
        ("er:n=20000,p=0.5", "10,000,000 links, found 20,000 agents and about 1e\\+08 links"),
        ("complete:10000", "10,000,000 links, found 10,000 agents"),
        ("ring:" + "9" * 20, "at most 200,000 agents"),
    ],
)
def test_graphs_that_are_too_large_are_refused_before_they_are_built(
    text: str, reason: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        GraphSpec.parse(text).build()
