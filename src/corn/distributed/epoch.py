"""The plan in force and who it is for: the whole network at first, survivors after a new plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

from corn.distributed.half_step import Noise
from corn.plan import Plan, fingerprint

PREFIX_BYTES = 8


@final
@dataclass(frozen=True, eq=False)
class Epoch:
    """A plan and what one agent draws under it.

    Attributes:
        plan: its agents are numbered 0 … m−1.
        members: the number that each of them had at the start of the run.
        noise: this agent's share.
    """

    plan: Plan
    members: tuple[int, ...]
    noise: Noise

    @cached_property
    def prefix(self) -> bytes:
        """What stands for the plan in headers."""
        return fingerprint(self.plan)[:PREFIX_BYTES]

    def weights_of(self, agent: int) -> dict[int, tuple[float, float]]:
        """(w_ij, w_ji) for every other member j, by the numbers at the start of the run."""
        W, own = self.plan.network.mixing_matrix, self.members.index(agent)
        return {
            member: (float(W[own, place]), float(W[place, own]))
            for place, member in enumerate(self.members)
            if member != agent
        }
