"""Each link has one connection, to an end that accepts, or the graph is refused."""

import itertools

import pytest

from corn.errors import InfeasibleError
from corn.topology import list_connections, load_network, opens_link


@pytest.mark.parametrize("graph", ["ring:5", "star:6", "er:n=12,p=0.4,seed=1", "path:2"])
def test_where_all_accept_the_higher_number_connects_to_the_lower_one(graph: str) -> None:
    network = load_network(graph, mixing="gossip")
    opened = list_connections(network.graph, [True] * network.num_agents)
    assert all(high > low for high, low in opened)
    assert {frozenset(pair) for pair in opened} == {frozenset(e) for e in network.graph.edges}


@pytest.mark.parametrize("accepts", list(itertools.product([False, True], repeat=4)))
def test_a_graph_is_linked_exactly_if_each_link_has_an_end_that_accepts(
    accepts: tuple[bool, ...],
) -> None:
    graph = load_network("ring:4").graph
    closed = [{a, b} for a, b in graph.edges if not accepts[a] and not accepts[b]]
    if closed:
        with pytest.raises(InfeasibleError) as refusal:
            list_connections(graph, accepts)
        assert all(f"{min(link)}–{max(link)}" in str(refusal.value) for link in closed)
        return
    opened = list_connections(graph, accepts)
    assert all(accepts[accepting] for _, accepting in opened)
    # Both ends decide alone, and must come to opposite conclusions.
    assert all(opens_link(a, b, accepts) and not opens_link(b, a, accepts) for a, b in opened)
