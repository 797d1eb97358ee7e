"""News of losses and returns reach all survivors, who then act alike."""

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.distributed.membership import Membership, component_of, find_cuts, make_edge
from corn.distributed.messages import News, StopNotice, StopReason


def spread(graph: nx.Graph, members: list[Membership], rounds: int) -> None:
    for _ in range(rounds):
        sent = [own.news for own in members]
        for agent, own in enumerate(members):
            for peer in graph[agent]:
                own.merge(sent[peer])


@pytest.mark.parametrize("graph", [nx.path_graph(6), nx.cycle_graph(7), nx.star_graph(5)])
def test_all_survivors_agree_on_losses_after_n_minus_2_steps(graph: nx.Graph) -> None:
    n = len(graph)
    members = [Membership(graph, agent) for agent in range(n)]
    lost = n - 1
    first, *others = sorted(graph[lost])
    members[first].note_cut(lost, 10)
    for peer in others:
        members[peer].note_cut(lost, 11)  # it had got one more message
    links = nx.Graph(graph)
    links.remove_edges_from([(lost, peer) for peer in graph[lost]])
    spread(links, members, n - 2)
    survivors = nx.node_connected_component(links, first)
    assert len({members[agent].news for agent in survivors}) == 1
    assert members[first].lost_by(12) == {lost: 10}


def test_the_earliest_of_several_stops_counts_for_all() -> None:
    graph = nx.path_graph(5)
    members = [Membership(graph, agent) for agent in range(5)]
    members[0].note_stop(StopNotice(30, 0, StopReason.INTERRUPTED))
    members[4].note_stop(StopNotice(25, 4, StopReason.DIVERGED))
    spread(graph, members, 4)
    assert {own.stop for own in members} == {StopNotice(25, 4, StopReason.DIVERGED, 4)}


def test_a_cut_link_is_told_from_a_lost_agent() -> None:
    """On a ring of 4, agent 1 has lost one link: agent 0 still reaches it over 3 and 2."""
    own = Membership(nx.cycle_graph(4), 0)
    own.note_cut(1, 5)
    assert own.cuts_by(5) == {(0, 1): 5}
    assert own.lost_by(5) == {}
    own.merge(News(cuts=frozenset({((1, 2), 6)})))
    assert own.lost_by(5) == {}
    assert own.lost_by(6) == {1: 5}


def test_agents_behind_a_lost_one_are_not_known_to_be_lost() -> None:
    own = Membership(nx.path_graph(4), 0)
    own.note_cut(1, 3)
    assert own.lost_by(3) == {1: 3}


def test_an_agent_that_returns_can_be_lost_again() -> None:
    own = Membership(nx.cycle_graph(4), 0)
    own.merge(News(cuts=frozenset({((0, 1), 5), ((1, 2), 6)})))
    own.note_return(1, 20)
    assert own.lost_by(19) == {1: 5}
    assert own.lost_by(20) == {}
    own.merge(News(cuts=frozenset({((0, 1), 20), ((1, 2), 31)})))
    assert own.cuts_by(25) == {(0, 1): 20}
    assert own.lost_by(31) == {1: 20}


def test_replaced_news_are_forgotten_and_change_nothing() -> None:
    own = Membership(nx.cycle_graph(4), 0)
    own.merge(News(cuts=frozenset({((0, 1), 5), ((1, 2), 6), ((2, 3), 8)})))
    own.note_return(1, 20)
    own.note_return(1, 40)
    before = [own.cuts_by(step) for step in range(40, 60)]
    own.forget_before(39)
    assert (1, 20) in own.news.returns
    assert ((0, 1), 5) not in own.news.cuts
    own.forget_before(40)
    assert own.news == News(frozenset({((2, 3), 8)}), frozenset({(1, 40)}))
    assert [own.cuts_by(step) for step in range(40, 60)] == before


EDGES = st.sampled_from([(0, 1), (1, 2), (2, 3), (0, 3)])
STEPS = st.integers(0, 12)
NEWS = st.builds(
    News,
    st.frozensets(st.tuples(EDGES, STEPS), max_size=5),
    st.frozensets(st.tuples(st.integers(0, 3), STEPS), max_size=3),
    st.builds(StopNotice, STEPS),
)


@given(st.lists(NEWS, max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_news_does_not_matter(news: list[News], random: object) -> None:
    first, second = (Membership(nx.cycle_graph(4), 0) for _ in range(2))
    for one in news:
        first.merge(one)
    shuffled = [*news, *news]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for one in shuffled:
        second.merge(one)
    assert first.news == second.news


@given(NEWS, STEPS)
def test_a_link_is_broken_if_it_broke_after_both_ends_came_back(news: News, step: int) -> None:
    """A second statement of the same rule, event by event."""
    expected = {}
    for edge in [(0, 1), (1, 2), (2, 3), (0, 3)]:
        events = [(when, 1) for found, when in news.cuts if found == edge]
        events += [(when, 0) for agent, when in news.returns if agent in edge]
        broken_since = None
        # At the same step a return comes before a break, which is that of the new link.
        for when, is_cut in sorted(events):
            if when > step:
                break
            if not is_cut:
                broken_since = None
            elif broken_since is None:
                broken_since = when
        if broken_since is not None:
            expected[edge] = broken_since
    assert find_cuts(news, step) == expected


def test_components_of_a_network_without_broken_links() -> None:
    assert component_of(nx.path_graph(5), 4, [(2, 3)]) == (3, 4)
    assert component_of(nx.cycle_graph(5), 0, [(1, 2)]) == (0, 1, 2, 3, 4)
    assert make_edge(3, 1) == make_edge(1, 3) == (1, 3)
