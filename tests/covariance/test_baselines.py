"""DECOR and zero-sum noise: the ratio of local noise, and the Laplacian."""

import networkx as nx
import numpy as np
import pytest

from corn.covariance import Decor, ZeroSum
from corn.covariance.baselines import graph_laplacian
from corn.errors import InfeasibleError, InvalidArgumentError
from corn.topology.mixing import graph_of
from tests.covariance.networks import directed, metropolis, paper_design


@pytest.mark.parametrize("mechanism", [ZeroSum(local_share=0), Decor(local_share=0)])
def test_noise_that_cancels_exactly_has_no_guarantee(mechanism: ZeroSum | Decor) -> None:
    with pytest.raises(InfeasibleError, match="no privacy guarantee"):
        paper_design(metropolis(nx.cycle_graph(5)), 1.0, mechanism)


def test_a_local_share_fixes_the_ratio() -> None:
    W = metropolis(nx.cycle_graph(8))
    alone = paper_design(W, 1.0, ZeroSum(local_share=1))
    np.testing.assert_allclose(alone.covariance, np.eye(8), atol=1e-12)
    half = paper_design(W, 1.0, ZeroSum(local_share=0.5))
    assert half.covariance[0, 1] / half.covariance[0, 0] == pytest.approx(-1 / 15)
    assert paper_design(W, 1.0, "zero-sum").value <= half.value
    with pytest.raises(InvalidArgumentError, match="local_share"):
        paper_design(W, 1.0, Decor(local_share=1.5))
    with pytest.raises(InfeasibleError, match="max_noise_std"):
        paper_design(W, 1.0, Decor(local_share=1e-9))


def test_decor_on_a_directed_graph_shares_noise_both_ways() -> None:
    W = directed(7, seed=5)
    links = ((W != 0) | (W.T != 0)) & ~np.eye(7, dtype=bool)
    expected = nx.laplacian_matrix(nx.from_numpy_array(links)).toarray()
    np.testing.assert_array_equal(graph_laplacian(graph_of(W)), expected)
    given = paper_design(W, 1.0, Decor(laplacian=expected))
    assert paper_design(W, 1.0, "decor").value == pytest.approx(given.value)
    with pytest.raises(InvalidArgumentError, match="laplacian"):
        paper_design(W, 1.0, Decor(laplacian=np.eye(3)))
