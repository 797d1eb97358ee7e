"""Does this noise keep that promise? Checked agent by agent, from the covariance itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from corn.arrays import FloatArray
from corn.errors import InvalidArgumentError
from corn.privacy.budget import PrivacyBudget
from corn.privacy.precision import precision_diagonal


@dataclass(frozen=True, eq=False)
class BudgetCheck:
    """Every agent's [R⁻¹]_ii, shape (n,), beside the cap, and who is within it, shape (n,)."""

    precision: FloatArray
    precision_cap: float
    met: NDArray[np.bool_]

    @property
    def passed(self) -> bool:
        """Whether the budget is met for all agents."""
        return bool(self.met.all())

    @property
    def worst_agent(self) -> int:
        """The least protected agent."""
        return int(self.precision.argmax())

    def describe(self) -> str:
        """Say in one line how the least protected agent stands to the cap."""
        worst = float(self.precision[self.worst_agent])
        verdict = "met for all" if self.passed else f"broken for {np.count_nonzero(~self.met)} of"
        return (
            f"{verdict} {self.precision.size} agents: the largest [R⁻¹]_ii is {worst:.6g} (agent "
            f"{self.worst_agent}), the cap {self.precision_cap:.6g}"
        )


def check_budget(
    covariance: ArrayLike, budget: PrivacyBudget, *, relative_tolerance: float = 1e-9
) -> BudgetCheck:
    """Check that noise of this covariance, drawn afresh at each step, meets the budget.

    The diagonal is rounded up and the cap down. A design that was scaled to the cap meets it to
    within rounding, for which ``relative_tolerance`` makes room.

    >>> budget = PrivacyBudget(10, 1e-5, num_steps=5000, clip=0.1)
    >>> print(check_budget([[60.0, 0.0], [0.0, 40.0]], budget).describe())
    broken for 1 of 2 agents: the largest [R⁻¹]_ii is 0.025 (agent 1), the cap 0.0200089
    """
    if not 0 <= relative_tolerance < 1:
        raise InvalidArgumentError(
            f"relative_tolerance must be in [0, 1), found {relative_tolerance}"
        )
    precision = precision_diagonal(covariance)
    cap = budget.precision_cap
    return BudgetCheck(precision, cap, precision <= cap * (1 + relative_tolerance))
