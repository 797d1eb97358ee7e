"""The mixing of all agents' models in a simulation: a dense product, or sparse products per round.

A sparse product costs as much as the graph has links, and never forms the power of W that several
rounds apply.
"""

from __future__ import annotations

import warnings
from typing import final

import numpy as np
import torch
from torch import Tensor

from corn.topology import Network
from corn.topology.mixing import SparseMatrix

# An entry of a sparse matrix takes about as long as this many entries of a dense one.
_SPARSE_COST = 12


@final
class Mixer:
    """The rounds of a step, for models of all agents.

    ``is_sparse`` is whether products run over links; by default, whether they then take less time.
    """

    def __init__(
        self,
        network: Network,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        is_sparse: bool | None = None,
    ) -> None:
        self._is_sum = network.mixing == "sum"
        W, rounds = network.sparse_matrix, network.schedule
        if is_sparse is None and not self._is_sum:
            is_sparse = _SPARSE_COST * W.nnz * len(rounds) < network.num_agents**2
        # The dense matrix has all rounds of a step in it, so that none is left to repeat.
        self._rounds = rounds if is_sparse else rounds[:0]
        if self._is_sum:
            return
        matrix = (
            to_sparse_tensor(W) if is_sparse else torch.from_numpy(np.array(network.step_matrix))
        )
        self._matrix = matrix.to(device=device, dtype=dtype)

    def mix(self, models: Tensor) -> Tensor:
        """Return the models after a step's rounds, shape (seeds, agents, values)."""
        if self._is_sum:
            return models.mean(dim=1, keepdim=True).expand_as(models).contiguous()
        if not self._rounds:
            return torch.matmul(self._matrix, models)
        # Torch multiplies a sparse matrix with matrices only, so seeds are taken one by one.
        return torch.stack([self._mix_one(own) for own in models])

    def _mix_one(self, models: Tensor) -> Tensor:
        current, change = models, None
        for momentum, gain in self._rounds:
            mixed: Tensor = self._matrix @ current
            # A plain round x ← W x. It also forgets the change of earlier Chebyshev rounds.
            if gain == 1 and not momentum:
                current, change = mixed, None
                continue
            # x ← x + m_k (x − the x before) + g_k (W x − x): docs/theory.md, “Chebyshev rounds”.
            moved = mixed.sub_(current).mul_(gain)
            # The first Chebyshev round has no momentum, so that a change is known from then on.
            change = moved if change is None else moved.add_(change, alpha=momentum)
            current = current + change
        return current


def to_sparse_tensor(matrix: SparseMatrix) -> Tensor:
    """Return a sparse matrix as torch's, in float64."""
    with warnings.catch_warnings():
        # Torch warns that sparse rows are new. Products with them are all that is needed here.
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse_csr_tensor(
            torch.from_numpy(matrix.indptr.astype(np.int64)),
            torch.from_numpy(matrix.indices.astype(np.int64)),
            torch.from_numpy(np.array(matrix.data, dtype=np.float64)),
            size=matrix.shape,
            check_invariants=False,
        )
