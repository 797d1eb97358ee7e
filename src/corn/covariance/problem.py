"""The design problem as a record: what to minimise, the cap that privacy sets, and the knobs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import numpy as np

from corn.arrays import FloatArray
from corn.errors import InfeasibleError, InvalidArgumentError

DEFAULT_NOISE_RATIO = 32.0
"""Default limit on an agent's noise, in units of the LDP standard deviation 1/√b.

Correlated noise cancels in the average of models, and float32 cancels only what it represents:
noise 32 times as strong as LDP's leaves a rounding error of 32 · 6e-8 = 2e-6 LDP deviations, far
below the noise that privacy demands anyway.
"""

LARGEST_NOISE_RATIO = 3e3
"""Beyond this, float64 itself cannot invert the covariance to a useful accuracy."""


@dataclass(frozen=True, eq=False)
class DesignProblem:
    """Minimise Tr(A R) over R ≻ 0 with [R⁻¹]_ii ≤ b: Problem (13) of the paper, for any A ⪰ 0.

    ``max_noise_std`` bounds √R_ii: ``None`` is 32/√b, ``math.inf`` no limit but float64's own
    (3000/√b). ``ridge`` γ adds γ·(Tr A/n)·I to the matrix that is minimised, never to the matrix
    that value and bound are stated for.
    """

    objective_matrix: FloatArray
    precision_cap: float
    max_noise_std: float | None = None
    ridge: float = 0.0
    tolerance: float = 1e-6
    max_iterations: int = 100

    def __post_init__(self) -> None:
        _require_positive("precision_cap", self.precision_cap)
        _require_positive("tolerance", self.tolerance)
        if not (math.isfinite(self.ridge) and self.ridge >= 0):
            raise InvalidArgumentError(f"ridge must be finite and at least 0, found {self.ridge}")
        if self.max_iterations < 1:
            raise InvalidArgumentError(
                f"max_iterations must be at least 1, found {self.max_iterations}"
            )
        if not np.trace(self.objective_matrix) > 0:
            raise InvalidArgumentError(
                "the objective is zero for every agent, so that any noise is best: check "
                "mixing_matrix and objective"
            )
        self._check_noise_limit()

    def _check_noise_limit(self) -> None:
        limit, ldp_std = self.max_noise_std, 1 / math.sqrt(self.precision_cap)
        if limit is None:
            return
        if math.isnan(limit) or limit < ldp_std * (1 - 1e-12):
            # R_ii ≥ 1/[R⁻¹]_ii ≥ 1/b for every positive definite R.
            raise InfeasibleError(
                f"max_noise_std must be at least 1/√precision_cap = {ldp_std:.6g}, the noise that "
                f"any agent needs under this cap, found {limit}; raise it, or the privacy budget"
            )

    @property
    def num_agents(self) -> int:
        """The number of agents n."""
        return int(self.objective_matrix.shape[0])

    @property
    def variance_ratio_limit(self) -> float:
        """The largest b·R_ii allowed, at least 1."""
        if self.max_noise_std is None:
            return DEFAULT_NOISE_RATIO**2
        ratio = min(self.max_noise_std, LARGEST_NOISE_RATIO / math.sqrt(self.precision_cap))
        return max(1.0, ratio**2 * self.precision_cap)


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, Real):
        raise InvalidArgumentError(
            f"{name} must be one number, the same for all agents, found {type(value).__name__}"
        )
    if not 0 < float(value) < math.inf:
        raise InvalidArgumentError(f"{name} must be finite and positive, found {value}")
