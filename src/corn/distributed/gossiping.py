"""One agent's part in the mixing rounds of a step, with memory kept link by link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from corn.topology.gossip import GossipRound


@final
class LinkFlows:
    """The rounds of one step at one agent: y ← y + Σ_j f_ij, summed over its neighbours.

    f_ij ← momentum · f_ij + gain · w_ij (y_j − y_i) is what arrived over a link, and its sum over
    links is the change of y, which Chebyshev rounds repeat in part. Both ends of a link have the
    same weight, so f_ij = −f_ji and the sum of all models stays. If a neighbour is lost in the
    middle of a step, its flow is forgotten and the flows between survivors still cancel: their
    average stays from then on, whoever knows of the loss. With the y before as the memory, the
    exchange with the lost agent would be repeated.

    Args:
        schedule: the rounds.
    """

    def __init__(self, schedule: Sequence[GossipRound]) -> None:
        self._schedule = tuple(schedule)
        self._is_plain = all(each == (0, 1) for each in schedule)
        self._num_done = 0
        self._flows: dict[int, Tensor] = {}

    @torch.no_grad()
    def mix(
        self, values: Tensor, received: Mapping[int, Tensor], weights: Mapping[int, float]
    ) -> Tensor:
        """Return the model after the next round, from the neighbours that were received."""
        momentum, gain = self._schedule[self._num_done]
        self._num_done += 1
        if self._is_plain:
            # Weights may have changed with a loss, so the own weight is what others leave of one.
            mixed = values * (1 - sum(weights.values()))
            for peer, weight in weights.items():
                mixed.add_(received[peer], alpha=weight)
            return mixed
        flows = {}
        for peer, weight in weights.items():
            # A subtraction first: its rounding is the same, with the other sign, at the other end.
            flow = (received[peer] - values).mul_(gain * weight)
            if peer in self._flows:
                flow.add_(self._flows[peer], alpha=momentum)
            flows[peer] = flow
        # A neighbour without a weight in this round is forgotten here, with the flow that it had.
        self._flows = flows
        mixed = values.clone()
        for flow in flows.values():
            mixed.add_(flow)
        return mixed
