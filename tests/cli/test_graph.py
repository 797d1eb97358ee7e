"""``corn graph`` prints, draws and saves."""

import json
from pathlib import Path

import numpy as np
import pytest

from corn.topology import Gossip, load_network

from .commands import Runner


def test_json_has_the_whole_network(corn: Runner) -> None:
    facts = json.loads(corn("graph", "karate", "--json").stdout)
    assert (facts["num_agents"], facts["num_links"], facts["rank"]) == (34, 78, 34)
    np.testing.assert_allclose(
        facts["mixing_matrix"], load_network("karate", mixing="gossip").mixing_matrix
    )
    assert 0 < facts["spectral_gap"] < 1


def test_table_states_graph_and_weights(corn: Runner) -> None:
    text = corn("graph", "ring:6", "--weights", "lazy").stdout
    assert "6 agents, 6 links: ring:n=6" in text
    assert "lazy" in text
    assert "99% agreement" in text


def test_rounds_of_a_step(corn: Runner) -> None:
    found = json.loads(corn("graph", "path:5", "--gossip", 3, "--json").stdout)
    expected = Gossip(3).matrix(load_network("path:5", mixing="gossip").mixing_matrix)
    np.testing.assert_allclose(found["step_matrix"], expected)
    fast = json.loads(corn("graph", "path:5", "--gossip", "chebyshev:3", "--json").stdout)
    assert fast["gossip"] == "chebyshev:3"
    assert fast["second_singular_value"] < np.linalg.norm(expected - 1 / 5, 2)


@pytest.mark.parametrize(
    "graph", ["er:n=20,p=0.2,seed=1", "directed-ring:5", "path:1", "grid:12x12"]
)
def test_figures_are_written(corn: Runner, tmp_path: Path, graph: str) -> None:
    outcome = corn("graph", graph, "--plot", tmp_path / "new" / "g.png")
    assert outcome.exit_code == 0
    assert (tmp_path / "new" / "g.png").read_bytes().startswith(b"\x89PNG")
    assert "note: wrote" in outcome.stderr


def test_edge_weights_that_are_not_used_are_noted_once(corn: Runner, tmp_path: Path) -> None:
    (tmp_path / "g.edges").write_text("0 1 5\n1 2 1\n2 0 1\n")
    outcome = corn("graph", tmp_path / "g.edges")
    assert outcome.exit_code == 0
    assert outcome.stderr.count("note: ") == 1
    assert "'sinkhorn' does" in outcome.stderr
    assert corn("graph", tmp_path / "g.edges", "--weights", "sinkhorn").stderr == ""


def test_warnings_become_notes(corn: Runner) -> None:
    outcome = corn("graph", "er:n=20,p=0.12,seed=0")
    assert outcome.exit_code == 0
    assert outcome.stderr.startswith("note: p=0.12 is below ln(n)/n")
