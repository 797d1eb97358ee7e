"""The noise of a simulated run that insiders draw with their own keys."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from corn.audit.program import select_known
from corn.audit.views import View
from corn.covariance import Decomposition
from corn.learn.perturbation import simulation_nonce
from corn.noise import SecureSource, draw_all_shares, simulated_keys


@final
class KnownNoise:
    """The part of every step's noise that a coalition knows, in a run with keys of a seed.

    Args:
        decomposition: the noise of all agents.
        view: the coalition.
        seed: of the run.
    """

    def __init__(self, decomposition: Decomposition, view: View, *, seed: int) -> None:
        keys = {
            owner: key
            for owner, key in simulated_keys(decomposition, seed=seed).items()
            # A coalition has the key of every group that any of its members belongs to.
            if not set(view.coalition).isdisjoint(owner.members)
        }
        self._known = select_known(decomposition, keys)
        # The nonce is public: all agents of the run agree on it.
        self._source, self._nonce = SecureSource(keys), simulation_nonce(seed)

    def draw(self, step: int, num_parameters: int) -> Tensor:
        """Return the known noise of a step, shape (n, d)."""
        drawn = draw_all_shares(
            self._known, source=self._source, nonce=self._nonce, step=step, stop=num_parameters
        )
        return torch.from_numpy(drawn)
