"""News of losses and returns reaches all survivors, who then act alike."""

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.distributed.membership import Membership, find_breaks
from corn.distributed.messages import Header, Kind, News, NewsKeys, ProtocolError, Saying, Subject

from .threads import make_credentials, make_membership


def spread(graph: nx.Graph, members: list[Membership], rounds: int) -> None:
    for _ in range(rounds):
        sent = [own.news for own in members]
        for agent, own in enumerate(members):
            for peer in graph[agent]:
                own.merge(sent[peer])


def cut(first: int, second: int, step: int, author: int | None = None) -> News:
    who = first if author is None else author
    return {Subject(Kind.CUT, first, second, who): Saying(step)}


@pytest.mark.parametrize("graph", [nx.path_graph(6), nx.cycle_graph(7), nx.star_graph(5)])
def test_all_survivors_agree_on_losses_after_n_minus_2_rounds(graph: nx.Graph) -> None:
    n = len(graph)
    members = [make_membership(graph, agent) for agent in range(n)]
    lost = n - 1
    first, *others = sorted(graph[lost])
    members[first].note(Kind.CUT, 10, lost)
    for peer in others:
        members[peer].note(Kind.CUT, 11, lost)  # it had got one more message
    links = nx.Graph(graph)
    links.remove_edges_from([(lost, peer) for peer in graph[lost]])
    spread(links, members, n - 2)
    survivors = nx.node_connected_component(links, first)
    assert all(members[agent].news == members[first].news for agent in survivors)
    assert members[first].lost == {lost: 10}


def test_a_cut_link_is_told_from_a_lost_agent() -> None:
    """On a ring of 4, agent 1 has lost one link: agent 0 still reaches it over 3 and 2."""
    own = make_membership(nx.cycle_graph(4), 0)
    own.note(Kind.CUT, 5, 1)
    assert own.cuts == {(0, 1): 5}
    assert (own.lost, own.cut_links) == ({}, {1: 5})
    own.merge(cut(1, 2, 6))
    assert (own.lost, own.cut_links) == ({1: 5}, {})


def test_agents_behind_a_lost_one_are_not_known_to_be_lost() -> None:
    own = make_membership(nx.path_graph(4), 0)
    own.note(Kind.CUT, 3, 1)
    assert own.lost == {1: 3}


def test_an_agent_that_leaves_is_lost_to_those_that_stay() -> None:
    members = [make_membership(nx.cycle_graph(4), agent) for agent in range(4)]
    for agent in (1, 2):
        members[agent].note(Kind.LEAVE, 7)
    spread(nx.cycle_graph(4), members, 2)
    for agent in (0, 3):
        assert members[agent].lost == {1: 7, 2: 7}
        assert members[agent].present == (0, 3)
    for agent in (1, 2):
        assert members[agent].lost == {}


def test_an_agent_that_returns_can_be_lost_again() -> None:
    own, back = make_membership(nx.cycle_graph(4), 0), make_membership(nx.cycle_graph(4), 1)
    own.merge({**cut(0, 1, 5), **cut(1, 2, 6, 2)})
    assert own.lost == {1: 5}
    back.note(Kind.RETURN, 20)
    own.merge(back.news)
    assert (own.lost, own.cuts) == ({}, {})
    own.merge({**cut(0, 1, 20), **cut(1, 2, 31)})
    assert own.lost == {1: 20}


EDGES = st.sampled_from([(0, 1), (1, 2), (2, 3), (0, 3)])
STEPS = st.integers(0, 12)
CUTS = EDGES.flatmap(lambda edge: st.sampled_from(edge).map(lambda a: Subject(Kind.CUT, *edge, a)))
OWN = st.tuples(
    st.sampled_from([Kind.LEAVE, Kind.CALL, Kind.RETURN, Kind.BEGUN]), st.integers(0, 3)
)
NEWS = st.dictionaries(
    CUTS | OWN.map(lambda one: Subject(one[0], one[1], one[1], one[1])), STEPS.map(Saying)
)


@given(st.lists(NEWS, max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_news_does_not_matter(news: list[News], random: object) -> None:
    first, second = (make_membership(nx.cycle_graph(4), 0) for _ in range(2))
    for one in news:
        first.merge(one)
    shuffled = [*news, *news]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for one in shuffled:
        second.merge(one)
    assert first.news == second.news


@given(NEWS)
def test_a_link_is_broken_if_it_broke_after_both_ends_came_back(news: News) -> None:
    """A second statement of the same rule, event by event."""
    expected = set()
    for subject, said in news.items():
        if subject.kind not in (Kind.CUT, Kind.LEAVE):
            continue
        ends = (subject.first, subject.second)
        events = [(said.step, 1)]
        events += [(own.step, 0) for s, own in news.items() if s[0] == Kind.RETURN and s[1] in ends]
        # At the same step a return comes before a break, which is that of the new link.
        if max(events)[1]:
            expected.add(subject)
    assert find_breaks(news) == expected


def test_agents_reach_each_other_over_links_and_agents_that_are_left() -> None:
    own = make_membership(nx.path_graph(5), 0)
    assert own.reach(4) == (0, 1, 2, 3, 4)
    own.merge({**cut(2, 3, 1), Subject(Kind.LEAVE, 1, 1, 1): Saying(1)})
    assert [own.reach(agent) for agent in range(5)] == [(0,), (0, 1, 2), (2,), (3, 4), (3, 4)]


def signed(agent: int, kind: Kind, step: int, peer: int | None = None) -> News:
    """Return news that an agent of a ring of four signed."""
    first, second = sorted((agent, agent if peer is None else peer))
    subject = Subject(kind, first, second, agent)
    return {subject: Saying(step, NewsKeys(make_credentials(agent, 4), b"run").sign(subject, step))}


def check(news: News, *known: News, step: int = 10) -> None:
    """Check news that agent 2 sends to agent 0 at a step."""
    own = make_membership(nx.cycle_graph(4), 0, last_step=50)
    for one in known:
        own.merge(one)
    own.check(Header(bytes(8), 2, step, 0, 0, news))


def test_agents_believe_what_is_signed_by_those_that_it_is_about() -> None:
    cuts = {**signed(0, Kind.CUT, 5, 1), **signed(2, Kind.CUT, 5, 1)}
    call = signed(1, Kind.CALL, 12)
    check({**cuts, **call})
    check({**cuts, **call, **signed(1, Kind.RETURN, 12)}, cuts, call, step=12)


@pytest.mark.parametrize(
    ("news", "reason"),
    [
        ({Subject(Kind.CUT, 1, 2, 1): Saying(5)}, "did not sign"),
        ({Subject(Kind.LEAVE, 1, 1, 1): Saying(5)}, "did not sign"),
        (signed(2, Kind.CUT, 5, 0), "false news"),
        (signed(1, Kind.CUT, 11, 2), "false news"),
        (signed(1, Kind.LEAVE, 11), "false news"),
        (signed(1, Kind.CALL, 51), "false news"),
        # An agent that was never lost, or that nobody waits for, would mend its links on paper.
        ({**signed(1, Kind.CALL, 9), **signed(1, Kind.RETURN, 9)}, "false news"),
        (signed(1, Kind.RETURN, 9), "false news"),
        (signed(1, Kind.WAIT, 5, 2), "false news"),
    ],
)
def test_false_news_is_refused(news: News, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        check(news)


def test_a_call_is_no_return() -> None:
    """Whoever has an agent's call could otherwise declare it back."""
    cuts = {**signed(0, Kind.CUT, 5, 1), **signed(2, Kind.CUT, 5, 1)}
    call = signed(1, Kind.CALL, 9)
    ((_, said),) = call.items()
    with pytest.raises(ProtocolError, match="did not sign"):
        check({**cuts, **call, Subject(Kind.RETURN, 1, 1, 1): said}, cuts)


def wait(agent: int, peer: int, number: int) -> News:
    return signed(agent, Kind.WAIT, number, peer)


def test_agents_wait_longer_the_farther_they_are_from_one_that_sends_heartbeats_alone() -> None:
    """On a ring, 1 and 3 wait for message 7 of agent 2, and 0 for message 8 of both."""
    members = [make_membership(nx.cycle_graph(4), agent) for agent in range(4)]
    said = {**members[1].say_waits(2, 7), **members[3].say_waits(2, 7)}
    # It names an agent for which nobody waits, or repeats a wait that is over.
    for lie in ({}, wait(2, 3, 6), {**wait(2, 3, 6), **wait(3, 0, 5), **wait(0, 1, 4)}):
        for own in members:
            own.merge_waits({**said, **lie})
        for agent in (1, 3):
            near, far = members[agent].count_waits(2, 7), members[0].count_waits(agent, 8)
            assert near <= 1
            assert near < far <= 2


def test_chains_of_waits_may_have_thousands_of_agents() -> None:
    own = Membership(nx.path_graph(3000), 2999, NewsKeys(make_credentials(0, 1), bytes(32)))
    # Agent a waits for the message of a − 1 before its own; they are not signed, as is checked.
    own._waits = {Subject(Kind.WAIT, a - 1, a, a): Saying(100 + a) for a in range(1, 2999)}
    assert own.count_waits(2998, 100 + 2999) == 2998


@pytest.mark.parametrize(
    "false",
    [
        {Subject(Kind.WAIT, 1, 2, 1): Saying(5)},
        wait(2, 0, 5),
        signed(2, Kind.CUT, 5, 1),
    ],
    ids=["not signed", "no link", "no wait"],
)
def test_false_waits_are_refused(false: News) -> None:
    own = make_membership(nx.cycle_graph(4), 0)
    own.merge_waits(wait(1, 2, 5))
    with pytest.raises(ProtocolError):
        own.merge_waits(false)
    assert own.count_waits(1, 6) == 1
