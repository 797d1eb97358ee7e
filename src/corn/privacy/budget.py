"""The privacy promise of a run, and the largest [R⁻¹]_ii that keeps it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from corn.checks import require_count
from corn.errors import InvalidArgumentError
from corn.privacy import subsampling
from corn.privacy.accountants import Accounting, find_accountant, warn_if_unproved
from corn.privacy.query import Adjacency, ClippedQuery, Unit

LARGEST_EPSILON, _MOST_STEPS = 1e9, 10**15
"""Beyond these no promise means anything, and arithmetic would not be exact."""


@dataclass(frozen=True)
class PrivacyBudget:
    """(ε, δ) for a whole run of ``num_steps`` steps and a named unit of data: see ``ClippedQuery``.

    Against an adversary who sees every message, a run with noise of covariance R, drawn afresh at
    each step, keeps the promise for agent i if [R⁻¹]_ii ≤ ``precision_cap``; with exact accounting,
    only if.

    ``accounting``: ``"gdp"`` is exact; ``"rdp"`` inverts the paper's Theorem 2; ``"paper"`` is its
    eq. (13b), which wastes noise for small ε and warns where it is not proved. With a
    ``sampling_rate`` below 1 only ``"gdp"`` is accepted: the composition is then counted
    numerically, by privacy loss distributions, since the paper has no bound for it.

    >>> budget = PrivacyBudget(epsilon=10, delta=1e-5, num_steps=5000, clip=0.1)
    >>> budget.sensitivity, round(budget.mu, 6), round(budget.precision_cap, 7)
    (0.2, 2.000446, 0.0200089)
    >>> print(budget.describe())
    ε = 10, δ = 1e-05 over 5000 steps for one agent's whole data set (its mini-batch gradient
    is clipped once to 0.1; replace-one adjacency; exact Gaussian DP)
    """

    epsilon: float
    delta: float
    num_steps: int
    clip: float
    unit: Unit = "agent"
    accounting: Accounting = "gdp"
    adjacency: Adjacency = "replace"
    batch_size: int | None = None
    sampling_rate: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= LARGEST_EPSILON:
            raise InvalidArgumentError(
                f"epsilon must be positive, at most {LARGEST_EPSILON:g}, found {self.epsilon}: "
                "try 1 to 10"
            )
        if not 0 < self.delta < 1:
            raise InvalidArgumentError(
                f"delta must be in (0, 1), found {self.delta}: try 1e-5, or less than one over the "
                "number of people"
            )
        require_count("num_steps", self.num_steps)
        if self.num_steps > _MOST_STEPS:
            raise InvalidArgumentError(
                f"num_steps must be at most {_MOST_STEPS:g}, found {self.num_steps:.4g}"
            )
        find_accountant(self.accounting)
        if self.query.is_subsampled:
            self._check_subsampled()
        if self.accounting == "paper":
            warn_if_unproved(self.epsilon, self.delta, stacklevel=3)

    def _check_subsampled(self) -> None:
        if self.accounting != "gdp":
            raise InvalidArgumentError(
                f"accounting must be 'gdp' with sampling_rate={self.sampling_rate:g}, found "
                f"{self.accounting!r}: the paper's bounds do not cover sampling"
            )
        subsampling.require_meaningful(self.delta, num_steps=self.num_steps, query=self.query)

    @cached_property
    def query(self) -> ClippedQuery:
        """What each agent releases at each step."""
        return ClippedQuery(
            self.clip,
            unit=self.unit,
            adjacency=self.adjacency,
            batch_size=self.batch_size,
            sampling_rate=self.sampling_rate,
        )

    @property
    def sensitivity(self) -> float:
        """Δ: how far one step's release moves between neighbouring data sets."""
        return self.query.sensitivity

    @cached_property
    def mu(self) -> float:
        """The Gaussian-DP parameter of the whole run when every [R⁻¹]_ii is at the cap.

        Raises ``InvalidArgumentError`` for a subsampled budget: no single μ describes such a run.
        """
        if self.query.is_subsampled:
            raise InvalidArgumentError(
                f"mu is not defined with sampling_rate={self.sampling_rate:g}: no single μ "
                "describes a subsampled run; use precision_cap"
            )
        return find_accountant(self.accounting).mu_from(self.epsilon, self.delta)

    @cached_property
    def precision_cap(self) -> float:
        """b: the largest [R⁻¹]_ii the budget allows, μ²/(Δ²T) without subsampling.

        Rounded down: accounting for a run at the cap gives an ε of at most ``epsilon``.
        """
        if self.query.is_subsampled:
            return subsampling.calibrate_precision(
                self.epsilon, self.delta, num_steps=self.num_steps, query=self.query
            )
        ratio = self.mu / self.sensitivity
        return ratio * ratio / self.num_steps

    @property
    def independent_noise_std(self) -> float:
        """What every agent would add if it drew its noise alone (LDP): 1/√b."""
        return 1 / math.sqrt(self.precision_cap)

    def describe(self) -> str:
        """Say in one line what is promised, for whose data, and how it is counted."""
        steps = f"{self.num_steps} step" + ("s" if self.num_steps > 1 else "")
        counted = find_accountant(self.accounting).description
        if self.query.is_subsampled:
            counted = "privacy loss distributions"
        promise = f"ε = {self.epsilon:.12g}, δ = {self.delta:.12g} over {steps}"
        return f"{promise} for {self.query.protects} ({self.query.recipe}; {counted})"
