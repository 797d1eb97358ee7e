"""Networks from files: each format, and each kind of defect."""

from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from corn.errors import CornError, FileFormatError, InvalidArgumentError
from corn.topology import Network, check_graph, load_network, name_of
from corn.topology.files import read_matrix
from corn.topology.graphs import look_up_agents

PETERSEN = nx.petersen_graph()


def write(path: Path, content: str) -> str:
    path.write_text(content, encoding="utf-8")
    return str(path)


def links(network: Network) -> set[frozenset[int]]:
    return {frozenset(edge) for edge in network.graph.edges}


def test_every_format_gives_the_same_network(tmp_path: Path) -> None:
    nx.write_edgelist(PETERSEN, tmp_path / "g.edges", data=False)
    adjacency = nx.to_numpy_array(PETERSEN, weight=None)
    np.savetxt(tmp_path / "g.csv", adjacency, delimiter=",", fmt="%d")
    np.save(tmp_path / "g.npy", adjacency)
    expected = load_network(PETERSEN)
    np.save(tmp_path / "W.npy", expected.mixing_matrix)
    np.savetxt(tmp_path / "W.csv", expected.mixing_matrix, delimiter=",")
    for file in sorted(tmp_path.iterdir()):
        network = load_network(str(file))
        assert links(network) == links(expected), file
        np.testing.assert_allclose(network.mixing_matrix, expected.mixing_matrix, atol=1e-12)
        assert network.weights == ("given" if file.stem == "W" else "metropolis")


def test_named_agents_are_numbered_in_order(tmp_path: Path) -> None:
    network = load_network(write(tmp_path / "h.txt", "oslo bergen\nbergen, turku  # by ferry\n"))
    assert [name_of(network.graph, i) for i in range(3)] == ["oslo", "bergen", "turku"]


@pytest.mark.parametrize("text", ["a%20b 1\n1 2\n2 a%20b\n", "\ufeff0 1\n1 2\n2 0\n"])
def test_edge_lists_of_other_programs_are_read(tmp_path: Path, text: str) -> None:
    """Names without blanks, and a byte-order mark."""
    assert load_network(write(tmp_path / "g.edges", text)).graph.number_of_edges() == 3
    assert load_network(tmp_path / "g.edges").num_agents == 3


def test_matrices_must_be_real_and_not_empty(tmp_path: Path) -> None:
    np.save(tmp_path / "complex.npy", 1j * np.eye(3))
    with pytest.raises(FileFormatError, match="not a matrix of numbers: Cannot cast"):
        load_network(tmp_path / "complex.npy")
    with pytest.raises(FileFormatError):
        load_network(write(tmp_path / "empty.csv", "\n"))
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(FileFormatError):
        load_network(tmp_path / "folder.csv")


def test_edge_weights_of_a_graph_are_not_used() -> None:
    heavy = nx.cycle_graph(5)
    heavy.edges[0, 1]["weight"] = 5.0
    expected = load_network("ring:5").mixing_matrix
    np.testing.assert_array_equal(load_network(heavy).mixing_matrix, expected)


@pytest.mark.parametrize("name", ["c.csv", "c.npy", "R.txt"])
def test_matrices_are_square_and_not_in_edge_lists(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    np.save(path, np.ones((2, 3))) if name == "c.npy" else path.write_text("1,1,1\n1,1,1\n")
    with pytest.raises(FileFormatError):
        read_matrix(path, name="a covariance")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("g.edges", "0 1\n1 1\n", "without self-loops, found one at 1"),
        ("g.edges", "0 1\n1 3\n", "agents must be numbered 0 … 2, found no 2"),
        ("g.edges", "1 2\n2 3\n", "found no 0"),
        ("g.edges", "0 1\n2 3\n", "must be connected, found a part cut off from the rest: 0, 1"),
        ("g.edges", "0 1 2.5\n", "line 1: an edge is two labels, found '0 1 2.5'"),
        ("g.edges", "0 1\n2\n", "line 2: an edge is two labels"),
        ("g.edges", "# nothing\n", "of at least one agent"),
        ("g.csv", "0,1\n1,a\n", "not a matrix of numbers"),
        ("g.csv", "0,1\n1,0\n0,1\n", "must be square and not empty, found shape (3, 2)"),
        ("g.csv", "0,1,0\n1,0,0\n0,0,0\n", "cut off from the rest: 2"),
        ("g.csv", "0.5,0.5\n0.5,nan\n", "must be finite, found nan at (1, 1)"),
        ("g.csv", "1.5,-0.5\n-0.5,1.5\n", "mixing weights must be at least 0, found w[0,1] = -0.5"),
        ("g.csv", "0.5,0.5\n0.6,0.4\n", "mixing_matrix must be symmetric"),
        ("g.csv", "0,1,0\n0,0,1\n1,0,0\n", "mixing_matrix must be symmetric"),
        ("g.csv", "1,0\n0,1\n", "cut off from the rest: 0"),
        ("g.csv", "1,1\n1,1\n", "doubly stochastic"),
        ("g.npy", "not numpy", "not a matrix of numbers"),
        ("g.xml", "", "unknown kind of graph file"),
    ],
)
def test_bad_files_get_one_clear_line(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    with pytest.raises(CornError) as caught:
        load_network(write(tmp_path / name, content))
    assert message in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError):
        load_network(str(tmp_path / "none.edges"))
    (tmp_path / "b.edges").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError):
        load_network(tmp_path / "b.edges")


def test_npy_with_objects_is_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "evil.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(FileFormatError):
        load_network(tmp_path / "evil.npy")


def test_network_is_checked_and_cannot_be_changed() -> None:
    network = load_network("ring:4")
    with pytest.raises(ValueError, match="read-only"):
        network.mixing_matrix[0, 0] = 1
    with pytest.raises(nx.NetworkXError):
        network.graph.add_edge(0, 2)
    with pytest.raises(InvalidArgumentError):
        Network(nx.path_graph(3), np.full((3, 3), 1 / 3))
    with pytest.raises(InvalidArgumentError):
        Network(nx.path_graph(4), np.full((3, 3), 1 / 3))


def test_numbers_of_numpy_are_numbers_of_agents() -> None:
    graph = nx.Graph()
    graph.add_edges_from(np.array([[2, 0], [0, 1]]))
    assert sorted(map(sorted, check_graph(graph).edges)) == [[0, 1], [0, 2]]


def test_labels_are_kept_as_names() -> None:
    graph = check_graph(nx.path_graph(["oslo", 1, (2, 3), "Zu\u0308rich", "<b>&</b>", "🏥 x"]))
    names = [name_of(graph, agent) for agent in graph]
    assert names == ["oslo", "1", "(2, 3)", "Z\u00fcrich", "<b>&</b>", "🏥 x"]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["oslo", 7], "name of agent 1 must be no number but its own, found '7'"),
        ([1, "1"], "name of agent 0 must be no number but its own"),
        (["1", 1, "oslo"], "no number but its own, found '1'"),
        (["٣", "oslo"], "no number but its own"),
        ([(1,), "(1,)"], r"another than that of agent 0, found '\(1,\)'"),
        (["a", ""], "name of agent 1 must be one line"),
        (["a", "b\nagent 0: c"], "name of agent 1 must be one line"),
        (["a", "b\x1b[2J"], "name of agent 1 must be one line"),
        (["a", "b‮c"], "name of agent 1 must be one line"),
        (["a", "b" * 101], "name of agent 1 must be one line of 1 to 100"),
        (["a", " b"], "name of agent 1 must be one line"),
    ],
)
def test_labels_that_could_be_mistaken_are_refused(labels: list[object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as refused:
        load_network(nx.path_graph(labels))
    assert str(refused.value).isprintable()


def test_agents_are_found_by_name_or_number() -> None:
    network = load_network(nx.path_graph(["St Mary", "Lyon, north", "Zürich"]))
    assert [network.find_agent(one) for one in ("Zu\u0308rich", "2", 2, "St Mary")] == [2, 2, 2, 0]
    assert look_up_agents(network.agent_names, 'St Mary , "Lyon, north"') == [0, 1]
    with pytest.raises(InvalidArgumentError, match="commas"):
        look_up_agents(network.agent_names, "0\n1")
    for twice in ("1,1", [1, 1], ["Lyon, north", "1"]):
        with pytest.raises(InvalidArgumentError, match="a different agent each time"):
            look_up_agents(network.agent_names, twice)
    with pytest.raises(
        InvalidArgumentError, match=r"--agent must be .* 'st mary': names are St Mary, Lyon"
    ):
        network.find_agent("st mary", argument="--agent")
    for wrong in ("3", "-1", "9" * 5000, "", "nowhere", True):
        with pytest.raises(InvalidArgumentError, match="names are St Mary, Lyon, north, Z"):
            network.find_agent(wrong)
    with pytest.raises(InvalidArgumentError, match=r"a number of an agent, 0 … 2, found 'x'$"):
        load_network("ring:3").find_agent("x")


def test_names_that_are_too_long_are_one_line() -> None:
    with pytest.raises(InvalidArgumentError):
        load_network("ring:" + "9" * 5000)
    with pytest.raises(FileFormatError):
        load_network("x" * 5000 + ".csv")
