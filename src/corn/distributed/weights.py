"""Mixing weights while agents are lost: symmetric without a coordinator, as both ends know enough.

On a link both ends see both headers of a step, so whatever is computed from those two alone is the
same at both ends. Let an agent be *aware* if it knows of a loss that the plan does not account for:

- neither is aware: the plan's weight;
- both are: Metropolis, 1/(1 + max of the two degrees announced), on the surviving graph;
- one is: the lesser of these, so that what an agent keeps for itself is never negative.

What is left of one is the agent's own weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Standing:
    """What one end of a link announced: how many neighbours it has, whether it is aware."""

    degree: int
    is_aware: bool


def weigh_neighbours(
    planned: Mapping[int, tuple[float, float]], own: Standing, others: Mapping[int, Standing]
) -> dict[int, float]:
    """The weight of each neighbour heard from; one minus their sum is the agent's own.

    Args:
        planned: (w_ij, w_ji) of every neighbour j, by the plan.
        own: what this agent announced in its message.
        others: what each neighbour announced in its own.

    >>> calm, alarmed = Standing(2, is_aware=False), Standing(1, is_aware=True)
    >>> weigh_neighbours({1: (0.4, 0.4), 2: (0.4, 0.4)}, calm, {1: calm, 2: alarmed})
    {1: 0.4, 2: 0.3333333333333333}
    """
    return {j: _weigh(*planned[j], own, other) for j, other in others.items()}


def _weigh(planned: float, mirrored: float, own: Standing, other: Standing) -> float:
    if not own.is_aware and not other.is_aware:
        return planned
    metropolis = 1 / (1 + max(own.degree, other.degree))
    if own.is_aware and other.is_aware:
        return metropolis
    return min(planned, mirrored, metropolis)
