"""News of a loss or a stop reach every survivor within n steps, with no one to coordinate."""

import networkx as nx
import pytest

from corn.distributed.membership import (
    NEVER,
    Membership,
    StopNotice,
    component_of,
    split_survivors,
)


def spread(graph: nx.Graph, members: list[Membership], rounds: int) -> None:
    for _ in range(rounds):
        sent = [(own.noticed, own.stop) for own in members]
        for agent, own in enumerate(members):
            for peer in graph[agent]:
                own.hear(*sent[peer])


@pytest.mark.parametrize("graph", [nx.path_graph(6), nx.cycle_graph(7), nx.star_graph(5)])
def test_all_survivors_agree_on_losses_after_n_minus_2_steps(graph: nx.Graph) -> None:
    n = len(graph)
    members = [Membership(n) for _ in range(n)]
    lost = n - 1
    survivors = graph.subgraph(set(graph) - {lost})
    first, *others = sorted(graph[lost])
    members[first].note_loss(lost, 10)
    for peer in others:
        members[peer].note_loss(lost, 11)  # it had got one more message
    links = nx.Graph(survivors)
    links.add_node(lost)
    spread(links, members, n - 2)
    known = {members[agent].noticed for agent in component_of(graph, first, [lost])}
    assert len(known) == 1
    assert known.pop()[lost] == 10


def test_of_several_stops_the_earliest_counts_everywhere() -> None:
    graph = nx.path_graph(5)
    members = [Membership(5) for _ in range(5)]
    members[0].note_stop(StopNotice(30, 0, "interrupted"))
    members[4].note_stop(StopNotice(25, 4, "diverged"))
    spread(graph, members, 4)
    assert {own.stop for own in members} == {StopNotice(25, 4, "diverged")}


def test_losses_count_from_the_step_they_were_noticed() -> None:
    own = Membership(4)
    own.note_loss(2, 7)
    own.note_loss(2, 9)
    own.note_loss(3, 12)
    assert own.noticed == (NEVER, NEVER, 7, 12)
    assert own.lost_by(11) == {2}
    assert own.lost == {2, 3}


def test_parts_of_a_cut_network() -> None:
    assert component_of(nx.path_graph(5), 4, [2]) == (3, 4)
    assert split_survivors(nx.path_graph(5), [2]) == [(0, 1), (3, 4)]
    assert split_survivors(nx.cycle_graph(5), [2]) == [(0, 1, 3, 4)]
