"""The methods of a comparison: which noise is added to what, and what privacy that gives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from corn.arrays import FloatArray, as_symmetric_matrix
from corn.covariance import Decomposition, Design, ThreatModel
from corn.covariance.threat import EAVESDROPPER
from corn.errors import InvalidArgumentError
from corn.learn.schedule import Schedule
from corn.noise import factor_covariance
from corn.noise.grid import bound_loss, choose_grid, require_provable
from corn.plan.plan import Plan, coalition_precisions, meet_cap, require_sound
from corn.privacy import ClippedQuery, PrivacyBudget, account_precision
from corn.privacy.floats import account_floats, set_aside

_TOLERANCE, _DESIGN_TOLERANCE = 1e-9, 1e-6


@dataclass(frozen=True, eq=False)
class Method:
    """One way to train: made by ``private``, ``central`` or ``non_private``.

    What is clipped follows from the query, which the budget made: a budget for an agent's whole
    data cannot be run with samples clipped one by one, nor the other way round.

    Attributes:
        name: what tables call it.
        noise: who draws what at each step; None for no noise.
        query: what is clipped, and how; None for no clipping.
        budget: the promise; None where there is none.
        threat: who the promise holds against.
        is_central: a trusted server averages, and its models are all that anyone sees.
        grid: γ, which releases are multiples of; 0 where nothing is released by agents.
        counts_floats: whether the promise holds in floating point, so that a run with secret keys
            keeps it; otherwise it is one of real numbers, for simulations.
    """

    name: str
    noise: Decomposition | None = field(default=None, repr=False)
    query: ClippedQuery | None = None
    budget: PrivacyBudget | None = None
    threat: ThreatModel = EAVESDROPPER
    is_central: bool = False
    grid: float = 0.0
    counts_floats: bool = False

    def __post_init__(self) -> None:
        if (self.budget is None) != (self.noise is None):
            raise InvalidArgumentError(
                f"{self.name!r} must have both noise and the budget it keeps, or neither"
            )
        if self.budget is None:
            return
        if self.query != self.budget.query:
            raise InvalidArgumentError(
                f"{self.name!r} must clip as its budget says ({self.budget.query.recipe}), found "
                f"{'no clipping' if self.query is None else self.query.recipe}"
            )
        worst, cap = float(self.precision.max()), self.precision_cap
        if self.counts_floats:
            require_sound(self.budget)
        tolerance = 0.0 if self.counts_floats else _TOLERANCE
        if not worst <= cap * (1 + tolerance):
            raise InvalidArgumentError(
                f"the noise of {self.name!r} does not keep its budget against {self.against}: the "
                f"largest [R⁻¹]_ii is {worst:.6g}, the cap {cap:.6g}; design it for this cap"
            )

    @classmethod
    def private(
        cls,
        name: str,
        noise: Design | Decomposition | ArrayLike,
        budget: PrivacyBudget,
        *,
        threat: ThreatModel | None = None,
        counts_floats: bool = False,
    ) -> Method:
        """Decentralised training with this noise; refused unless it keeps the budget.

        The promise holds against the threat that a design was made for, or the one given, or else
        someone outside who sees every message.
        """
        if threat is None:
            threat = noise.threat if isinstance(noise, Design) else EAVESDROPPER
        shares, max_colluders = _shares_of(noise), threat.max_colluders
        if isinstance(noise, Design):
            worst = max(float(p.max()) for *_, p in coalition_precisions(shares, max_colluders))
            cap = (set_aside(budget) if counts_floats else budget).precision_cap
            # A design for this cap may miss it by rounding; one for another cap is refused.
            if cap < worst <= cap * (1 + _DESIGN_TOLERANCE):
                shares = meet_cap(shares, cap, max_colluders)
        grid = choose_grid(shares, budget.precision_cap)
        return cls(
            name, shares, budget.query, budget, threat, grid=grid, counts_floats=counts_floats
        )

    @classmethod
    def from_plan(cls, plan: Plan, *, name: str | None = None) -> Method:
        """Training as a plan says: its noise, grid and budget, against whom it was made."""
        return cls(
            name or plan.mechanism,
            plan.decomposition,
            plan.budget.query,
            plan.budget,
            plan.threat,
            grid=plan.grid,
            counts_floats=True,
        )

    @classmethod
    def central(cls, budget: PrivacyBudget, num_agents: int, *, name: str = "central") -> Method:
        """A trusted server adds N(0, 1/(n² b)) to the average of the agents' clipped gradients.

        The promise holds against those who see the server's models, not the agents' messages.
        """
        factor = np.full((num_agents, 1), budget.independent_noise_std / num_agents)
        shares = Decomposition(np.zeros(num_agents), (tuple(range(num_agents)),), (factor,))
        return cls(name, shares, budget.query, budget, is_central=True)

    @classmethod
    def non_private(cls, query: ClippedQuery | None = None, *, name: str = "none") -> Method:
        """No noise and so no promise; clipped as others are where ``query`` is theirs."""
        return cls(name, None, query)

    @property
    def clip(self) -> float:
        """C, infinite where nothing is clipped."""
        return math.inf if self.query is None else self.query.clip

    @property
    def against(self) -> str:
        """Who the promise holds against, in words."""
        if self.budget is None:
            return "nobody"
        if self.is_central:
            return "those who see the server's models, and none of the agents' messages"
        return self.threat.describe()

    @cached_property
    def precision_cap(self) -> float:
        """The largest [R⁻¹]_ii that keeps the budget; infinite without one."""
        if self.budget is None:
            return math.inf
        budget = set_aside(self.budget) if self.counts_floats else self.budget
        return budget.precision_cap

    @cached_property
    def precision(self) -> FloatArray:
        """[R⁻¹]_ii of each agent, by which privacy is counted, shape (n,); ∞ without noise.

        Against insiders: of the noise that the worst coalition without the agent does not know.
        """
        if self.budget is None or self.noise is None:
            return np.array([math.inf])
        if self.is_central:
            # The average moves by Δ/n under the average noise: as one agent's gradient by Δ under n
            # times that noise.
            total = float(self.noise.covariance.sum())
            return np.full(self.noise.num_agents, 1 / total if total else math.inf)
        worst = np.zeros(self.noise.num_agents)
        coalitions = coalition_precisions(self.noise, self.threat.max_colluders)
        for _, honest, precision in coalitions:
            worst[list(honest)] = np.maximum(worst[list(honest)], precision)
        return worst

    def check_parameters(self, num_parameters: int) -> None:
        """Raise ``InfeasibleError`` where floats would take more than is set aside for them."""
        if self.budget is not None and self.noise is not None:
            loss = bound_loss(
                self.noise, self.grid, precision_cap=self.precision_cap, query=self.budget.query
            )
            require_provable(loss, self.budget, num_parameters)

    def epsilon_spent(self, num_steps: int) -> FloatArray | None:
        """ε of each agent after so many steps at the budget's δ, shape (n,); None if not private.

        Exact, whatever accounting the budget was designed with. Under Poisson sampling, where each
        takes seconds to compute, all agents get the ε of the least protected.
        """
        if self.noise is None or self.budget is None or self.query is None:
            return None
        if num_steps == 0:
            return np.zeros(self.noise.num_agents)
        precision = self.precision
        if self.query.is_subsampled:
            precision = np.full(self.noise.num_agents, precision.max())
        if self.counts_floats:
            return account_floats(precision, self.budget, num_steps=num_steps)
        loss = account_precision(precision, self.query, num_steps=num_steps)
        return loss.epsilon(self.budget.delta)


@dataclass(frozen=True, eq=False)
class Trial:
    """A method with a step size: what a sweep runs once for each seed."""

    method: Method
    schedule: Schedule

    def describe(self) -> str:
        """Name and step size."""
        return f"{self.method.name}, step size {self.schedule.describe()}"


def _shares_of(noise: Design | Decomposition | ArrayLike) -> Decomposition:
    if isinstance(noise, Decomposition):
        return noise
    if isinstance(noise, Design):
        if noise.status == "reference":
            raise InvalidArgumentError(
                f"mechanism {noise.mechanism!r} is a reference without a guarantee against an "
                "eavesdropper: use Method.central or Method.non_private"
            )
        return noise.decomposition
    R = as_symmetric_matrix(noise, name="noise")
    return Decomposition(np.zeros(len(R)), (tuple(range(len(R))),), (factor_covariance(R),))
