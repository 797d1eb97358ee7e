"""The table for a firewall has every link once, and only links."""

import pytest

from corn.topology import load_network
from corn.transport.links import list_connections


@pytest.mark.parametrize("graph", ["ring:5", "star:6", "er:n=12,p=0.4,seed=1", "path:2"])
def test_the_higher_number_connects_to_the_lower_one(graph: str) -> None:
    network = load_network(graph, mixing="gossip")
    table = list_connections(network)
    opened = {(own.agent, peer) for own in table for peer in own.opens}
    accepted = {(peer, own.agent) for own in table for peer in own.accepts}
    assert opened == accepted
    assert all(high > low for high, low in opened)
    assert {frozenset(pair) for pair in opened} == {frozenset(e) for e in network.graph.edges}
