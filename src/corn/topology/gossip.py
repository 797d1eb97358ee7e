"""Several rounds of mixing a step: plain (W^r) and Chebyshev-accelerated.

Rounds without new gradients only post-process what the adversary has seen, so they cost
communication but no privacy.
"""

from __future__ import annotations

import numpy as np

from corn.arrays import FloatArray, as_square_matrix
from corn.errors import InvalidArgumentError
from corn.topology.spectrum import disagreement, is_symmetric


def repeat_gossip(mixing_matrix: FloatArray, rounds: int) -> FloatArray:
    """W^rounds: the effect of ``rounds`` plain mixing rounds."""
    W = as_square_matrix(mixing_matrix, name="mixing_matrix")
    _require_rounds(rounds)
    return np.linalg.matrix_power(W, rounds)


def chebyshev_gossip(mixing_matrix: FloatArray, rounds: int) -> FloatArray:
    """T_r(W/σ)/T_r(1/σ): the polynomial in W of degree ``rounds`` that contracts disagreement most.

    σ = ‖W − 11ᵀ/n‖₂ must be below one and W symmetric. Agents run it with the three-term recurrence
    x_{k+1} = 2 (c_k/(σ c_{k+1})) W x_k − (c_{k−1}/c_{k+1}) x_{k−1}, c_k = T_k(1/σ), and no more
    messages than plain gossip. The result preserves averages but may have negative entries.
    """
    W = as_square_matrix(mixing_matrix, name="mixing_matrix")
    _require_rounds(rounds)
    if not is_symmetric(W):
        raise InvalidArgumentError(
            "Chebyshev gossip needs a symmetric mixing matrix: try plain rounds"
        )
    sigma = disagreement(W)
    if not sigma < 1:
        raise InvalidArgumentError(f"Chebyshev gossip needs a W that mixes, found σ₂ = {sigma:g}")
    # Ratios c_{k−1}/c_k instead of c_k itself: T_k(1/σ) overflows when σ is small. Written with
    # a_k = c_{k−1}/(σ c_k), the recurrence also holds in the limit σ = 0, where a_1 = 1, a_k = 1/2.
    previous, current, a = np.eye(len(W)), W, 1.0
    for _ in range(rounds - 1):
        a = 1 / (2 - sigma**2 * a)
        previous, current = current, 2 * a * W @ current - (2 * a - 1) * previous
    return current


def _require_rounds(rounds: int) -> None:
    if rounds < 1:
        raise InvalidArgumentError(f"rounds must be at least 1, found {rounds}")
