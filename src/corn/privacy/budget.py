"""The privacy budget of a run, and the largest [R⁻¹]_ii that keeps it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from corn.checks import require, require_count
from corn.errors import InvalidArgumentError
from corn.privacy import subsampling
from corn.privacy.accountants import Accounting, find_accountant, require_exact, warn_if_unproved
from corn.privacy.query import Adjacency, ClippedQuery, Unit

# Beyond these no promise has a meaning, and arithmetic would not be exact.
LARGEST_EPSILON = 1e9
_MOST_STEPS = 10**15


@dataclass(frozen=True)
class PrivacyBudget:
    """A promise of (ε, δ) for a run of ``num_steps`` steps and a unit of data (``ClippedQuery``).

    Against an adversary who observes every message, a run with noise of covariance R, drawn afresh
    at each step, keeps the promise for agent i if [R⁻¹]_ii ≤ ``precision_cap``. With exact
    accounting this is also necessary.

    ``accounting``: ``"gdp"`` is exact; ``"rdp"`` inverts the paper's Theorem 2; ``"paper"`` is its
    eq. (13b), which wastes noise for small ε and warns where it is not proved. With a
    ``sampling_rate`` below 1 only ``"gdp"`` is accepted: the composition is then computed
    numerically, by privacy loss distributions, because the paper has no bound for it.

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
        require(
            0 < self.epsilon <= LARGEST_EPSILON,
            "epsilon",
            f"positive, at most {LARGEST_EPSILON:g}",
            self.epsilon,
            advice="try 1 to 10",
        )
        require(
            0 < self.delta < 1,
            "delta",
            "in (0, 1)",
            self.delta,
            advice="try 1e-5, or less than one over the number of people",
        )
        require_count("num_steps", self.num_steps, most=_MOST_STEPS)
        find_accountant(self.accounting)
        # Making the query checks clip, unit, adjacency, batch size and sampling rate.
        if self.query.is_subsampled:
            require_exact(self.accounting)
            subsampling.require_meaningful(self.delta, num_steps=self.num_steps, query=self.query)
        if self.accounting == "paper":
            warn_if_unproved(self.epsilon, self.delta, stacklevel=3)

    @cached_property
    def query(self) -> ClippedQuery:
        """The clipped gradient that each agent releases at each step."""
        return ClippedQuery(
            self.clip,
            unit=self.unit,
            adjacency=self.adjacency,
            batch_size=self.batch_size,
            sampling_rate=self.sampling_rate,
        )

    @property
    def sensitivity(self) -> float:
        """Δ: the largest distance between the releases of neighbouring data sets at one step."""
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
        """b: the largest [R⁻¹]_ii that the budget allows, μ²/(Δ²T) without subsampling.

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
        """The standard deviation of an agent that draws its noise alone (LDP): 1/√b."""
        return 1 / math.sqrt(self.precision_cap)

    def describe(self) -> str:
        """Return one line with the promise, the protected data and the accounting."""
        steps = f"{self.num_steps} step" + ("s" if self.num_steps > 1 else "")
        counted = find_accountant(self.accounting).description
        if self.query.is_subsampled:
            counted = "privacy loss distributions"
        promise = f"ε = {self.epsilon:.12g}, δ = {self.delta:.12g} over {steps}"
        return f"{promise} for {self.query.protects} ({self.query.recipe}; {counted})"
