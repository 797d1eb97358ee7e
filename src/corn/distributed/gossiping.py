"""One agent's part in the mixing rounds of a step, with memory kept link by link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor


@final
class LinkFlows:
    """The rounds of one step at one agent: y_{k+1} = α_k W y_k + (1 − α_k) y_{k−1}.

    Chebyshev rounds (α_k > 1) repeat a part of the change y_k − y_{k−1} of the round before. That
    change is the sum of what arrived over links: f_ij ← (α_k − 1) f_ij + α_k w_ij (y_j − y_i), and
    y_i ← y_i + Σ_j f_ij. Both ends of a link have the same weight, so f_ij = −f_ji and the sum of
    all models stays. If a neighbour is lost in the middle of a step, its flow is forgotten and the
    flows between survivors still cancel: the survivors' average stays from then on, whoever knows
    of the loss. With y_{k−1} as the memory, the exchange with the lost agent would be repeated.

    Args:
        coefficients: α_1 … α_r, with α_1 = 1.
    """

    def __init__(self, coefficients: Sequence[float]) -> None:
        self._coefficients = tuple(coefficients)
        self._round = 0
        self._flows: dict[int, Tensor] = {}

    @torch.no_grad()
    def mix(
        self, values: Tensor, received: Mapping[int, Tensor], weights: Mapping[int, float]
    ) -> Tensor:
        """Return the model after the next round, from the neighbours that were received."""
        alpha = self._coefficients[self._round]
        self._round += 1
        if self._is_plain:
            # Weights may have changed with a loss, so the own weight is what others leave of one.
            mixed = values * (1 - sum(weights.values()))
            for peer, weight in weights.items():
                mixed.add_(received[peer], alpha=weight)
            return mixed
        flows = {}
        for peer, weight in weights.items():
            # A subtraction first: its rounding is the same, with the other sign, at the other end.
            flow = (received[peer] - values).mul_(alpha * weight)
            if peer in self._flows:
                flow.add_(self._flows[peer], alpha=alpha - 1)
            flows[peer] = flow
        self._flows = flows
        return sum(flows.values(), start=values)

    @property
    def _is_plain(self) -> bool:
        return all(alpha == 1 for alpha in self._coefficients)
