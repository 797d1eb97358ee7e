"""Large networks: sparse weights and extreme eigenvalues, compared with dense ones."""

import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from corn.errors import InvalidArgumentError
from corn.topology import Gossip, load_network, measure_network, spectrum
from corn.topology.sparse import find_extremes, sparse_spectrum


@pytest.mark.parametrize(
    ("graph", "weights"),
    [
        *product(
            ["torus:5x6", "ring:30", "er:n=40,p=0.2,seed=1", "path:300"],
            ["metropolis", "lazy", "max-degree"],
        ),
        ("path:1500", "metropolis"),
    ],
)
def test_extremes_are_those_of_all_eigenvalues(graph: str, weights: str) -> None:
    network = load_network(graph, weights=weights)
    expected = np.linalg.eigvalsh(network.mixing_matrix)
    found = find_extremes(network.sparse_matrix)
    np.testing.assert_allclose(found, [expected[0], expected[-2]], atol=1e-7)


@pytest.mark.parametrize("gossip", ["1", "3", "chebyshev:3"])
def test_the_sparse_spectrum_agrees_with_the_dense_one(gossip: str) -> None:
    network = load_network("er:n=40,p=0.2,seed=1", gossip=Gossip.parse(gossip), mixing="gossip")
    dense = spectrum(network.step_matrix)
    found = sparse_spectrum(network.sparse_matrix, network.schedule)
    assert found.second_eigenvalue == pytest.approx(dense.second_eigenvalue, rel=1e-6)
    assert found.mixing_time == dense.mixing_time
    assert found.rank is None


def test_extremes_of_directed_links_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="symmetric"):
        find_extremes(load_network("directed-ring:5", mixing="gossip").sparse_matrix)


def test_a_large_edge_list_loads_without_dense_matrices(tmp_path: Path) -> None:
    """A dense matrix of 20,500 agents would take 3 GB, and is refused where one is needed."""
    n, random = 20_500, np.random.default_rng(1)
    links = {(k, (k + 1) % n) for k in range(n)}
    links |= {(int(i), int(j)) for i, j in random.integers(n, size=(n, 2)) if i != j}
    file = tmp_path / "links.edges"
    file.write_text("".join(f"{i} {j}\n" for i, j in links))
    start = time.process_time()
    network = load_network(file, mixing="gossip")
    measured = measure_network(network)
    assert 0 < measured.spectral_gap < 1
    assert time.process_time() - start < 20
    with pytest.raises(InvalidArgumentError, match="at most 20000 agents"):
        network.mixing_matrix  # noqa: B018
