"""Mechanisms of training: a mechanism's noise under a budget, and the privacy that it gives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np

from corn import covariance
from corn.checks import FloatArray, require, require_count
from corn.covariance import (
    DEFAULT_THREAT,
    Decomposition,
    Design,
    MechanismLike,
    Objective,
    ThreatModel,
    design,
    read_mechanisms,
)
from corn.covariance.coalitions import worst_precisions
from corn.covariance.design import design_masks
from corn.covariance.problem import weighting_gain
from corn.covariance.threat import EAVESDROPPER
from corn.errors import InvalidArgumentError
from corn.learn.schedule import Schedule
from corn.noise.masks import bound_loss, choose_grid, require_provable
from corn.plan.plan import Plan, meet_caps, require_sound
from corn.privacy import ClippedQuery, PrivacyBudget, account_promises
from corn.privacy.accounting import group_agents
from corn.privacy.budget import describe_queries
from corn.privacy.floats import account_floats, set_aside
from corn.privacy.rounding import round_bound_down, round_up
from corn.topology import Network

# Simulations allow for rounding of [R⁻¹]_ii. Where noise protects somebody, nothing is allowed.
_TOLERANCE = 1e-9
# Noise that is this close to its cap spends as much as noise at the cap, to a tenth of a percent.
_AT_CAP = 1e-3
# A design that exceeds its cap by rounding, by at most this much, is scaled to meet the cap.
_DESIGN_TOLERANCE = 1e-6
# Beyond so many agents noise is designed by a formula, where it has one.
_MOST_DENSE_DESIGN = 2000


@dataclass(frozen=True, eq=False)
class Mechanism:
    """A way to train: noise, clipping and the promise that they keep.

    Made by ``private``, ``central``, ``non_private`` or ``from_plan``. ``noise`` is what each agent
    draws at each step, ``queries`` are clipping and sampling, for all agents or for each, and
    ``budget`` is the promise, which holds against ``threat``; None is none. ``is_central``: a
    trusted server averages, and everybody sees its models alone. Released values are multiples of
    ``grid``. ``counts_floats``: the promise holds in floating point, so that a run with secret keys
    keeps it. ``disagreement_ratio`` is κ of the design. ``later_noise`` takes over from a step on,
    counted from 0; see ``in_phases``.
    """

    name: str
    noise: Decomposition | None = field(default=None, repr=False)
    queries: tuple[ClippedQuery, ...] = ()
    budget: PrivacyBudget | None = None
    threat: ThreatModel = EAVESDROPPER
    is_central: bool = False
    grid: float = 0.0
    counts_floats: bool = False
    disagreement_ratio: float | None = None
    later_noise: tuple[tuple[int, Decomposition], ...] = ()

    def __post_init__(self) -> None:
        # Noise without a promise, or a promise without noise, could not be reported truthfully.
        if (self.budget is None) != (self.noise is None):
            raise InvalidArgumentError(
                f"{self.name!r} must have both noise and the budget it keeps, or neither"
            )
        if self.budget is None:
            return
        # With other clipping the sensitivity is not the one that the noise was designed for.
        if self.queries != self.budget.queries:
            found = describe_queries(self.queries) if self.queries else "no clipping"
            rule = f"as its budget states ({describe_queries(self.budget.queries)})"
            raise InvalidArgumentError(f"{self.name!r} must clip {rule}, found {found}")
        if self.counts_floats:
            require_sound(self.budget)
        # The check reads the noise that will be drawn, not the report of the design.
        precision = self.precision
        caps = self.precision_caps
        tolerance = 0.0 if self.counts_floats else _TOLERANCE
        # Not ``any(precision > …)``: a precision that is NaN must fail the check too.
        if not (precision <= caps * (1 + tolerance)).all():
            worst = int((precision / caps).argmax())
            raise InvalidArgumentError(
                f"the noise of {self.name!r} does not keep its budget against {self.against}: "
                f"[R⁻¹]_ii of agent {worst} is {round_up(precision[worst])}, its cap "
                f"{round_bound_down(caps[worst])}"
            )

    @classmethod
    def private(
        cls,
        name: str,
        noise: Design | Decomposition,
        budget: PrivacyBudget,
        *,
        threat: ThreatModel | None = None,
    ) -> Mechanism:
        """Make a mechanism of decentralised training; raise unless the noise keeps the budget.

        The promise holds against ``threat``, by default that of a design, and for other noise an
        eavesdropper. It holds for real numbers: where noise protects somebody, make a plan.
        """
        shares = noise.decomposition if isinstance(noise, Design) else noise
        caps = budget.precision_caps(shares.num_agents)
        if isinstance(noise, Design):
            if noise.status == "reference":
                raise InvalidArgumentError(
                    f"{noise.mechanism!r} has no guarantee: use Mechanism.central or non_private"
                )
            threat = threat or noise.threat
            max_colluders = _count_colluders(shares, threat)
            worst = float((worst_precisions(shares, max_colluders) / caps).max())
            # A design for these caps may miss them by rounding; one for other caps is refused.
            if 1 < worst <= 1 + _DESIGN_TOLERANCE:
                shares = meet_caps(shares, caps, max_colluders)
        return cls(
            name,
            shares,
            budget.queries,
            budget,
            threat or EAVESDROPPER,
            grid=choose_grid(shares, caps),
            disagreement_ratio=noise.disagreement_ratio if isinstance(noise, Design) else None,
        )

    @classmethod
    def in_phases(
        cls, name: str, phases: Sequence[tuple[int, Design | Decomposition]], budget: PrivacyBudget
    ) -> Mechanism:
        """Make a mechanism whose noise changes, such as with the graph: (number of steps, noise).

        Every phase keeps the caps of the budget, so that the whole run keeps its promise.
        """
        counts = [require_count("the steps of a phase", count) for count, _ in phases]
        rule = f"such that their steps add up to the {budget.num_steps} of the budget"
        require(sum(counts) == budget.num_steps, "phases", rule, counts)
        made = [cls.private(name, noise, budget) for _, noise in phases]
        noises = [own.noise for own in made if own.noise is not None]
        sizes = {noise.num_agents for noise in noises}
        require(len(sizes) == 1, "phases", "for the same number of agents", sorted(sizes))
        return replace(
            made[0],
            threat=min((own.threat for own in made), key=lambda threat: threat.max_colluders),
            grid=min(own.grid for own in made),
            disagreement_ratio=None,
            later_noise=tuple(zip(itertools.accumulate(counts[:-1]), noises[1:], strict=True)),
        )

    def noise_at(self, step: int) -> Decomposition | None:
        """Return the noise of a step, counted from 0."""
        begun = [noise for start, noise in self.later_noise if start <= step]
        return begun[-1] if begun else self.noise

    @classmethod
    def from_plan(cls, plan: Plan, *, name: str | None = None) -> Mechanism:
        """Make a mechanism with a plan's noise, grid, budget and threat."""
        return cls(
            name or plan.mechanism,
            plan.decomposition,
            plan.budget.queries,
            plan.budget,
            plan.threat,
            grid=plan.grid,
            counts_floats=True,
            disagreement_ratio=plan.disagreement_ratio,
        )

    @classmethod
    def central(cls, budget: PrivacyBudget, num_agents: int, *, name: str = "central") -> Mechanism:
        """Make a trusted server that adds N(0, 1/(n² b)) to the average clipped gradient.

        All agents share that noise, so that b is the strictest agent's. The promise holds against
        those who see the server's models, not the agents' messages.
        """
        # The average of equal noise is that noise, with standard deviation 1/(n √b).
        noise_std = 1 / math.sqrt(budget.precision_caps(num_agents).min())
        factor = np.full((num_agents, 1), noise_std / num_agents)
        shares = Decomposition(np.zeros(num_agents), (tuple(range(num_agents)),), (factor,))
        return cls(name, shares, budget.queries, budget, is_central=True)

    @classmethod
    def non_private(cls, *queries: ClippedQuery, name: str = "none") -> Mechanism:
        """Make a mechanism without noise or promise; it clips if ``queries`` are given."""
        return cls(name, None, queries)

    @property
    def clip(self) -> float:
        """C, infinite where nothing is clipped; all agents clip alike."""
        return self.queries[0].clip if self.queries else math.inf

    @property
    def against(self) -> str:
        """The adversary against whom the promise holds, in words."""
        if self.budget is None:
            return "nobody"
        if self.is_central:
            return "those who see the server's models, and none of the agents' messages"
        return self.threat.describe()

    @cached_property
    def precision_caps(self) -> FloatArray:
        """The largest [R⁻¹]_ii that keep the budget, shape (n,); infinite without a budget."""
        if self.budget is None or self.noise is None:
            return np.array([math.inf])
        budget = set_aside(self.budget) if self.counts_floats else self.budget
        return budget.precision_caps(self.noise.num_agents)

    @property
    def _phases(self) -> list[Decomposition]:
        first = [] if self.noise is None else [self.noise]
        return first + [noise for _, noise in self.later_noise]

    @property
    def central_ratio(self) -> float | None:
        """The noise variance of the average over a trusted server's; None without noise.

        The server keeps the strictest agent's promise for all. Of noise in phases it is the mean.
        """
        if self.budget is None or self.noise is None:
            return None
        total = self.noise.total_variance
        if self.later_noise:
            starts = [0, *(start for start, _ in self.later_noise), self.budget.num_steps]
            totals = [each.total_variance for each in self._phases]
            total = float(np.dot(totals, np.diff(starts)) / self.budget.num_steps)
        # 1ᵀR1/n² over 1/(n² min b), the floor of docs/theory.md.
        return total * float(self.precision_caps.min())

    @property
    def weighted_central_ratio(self) -> float | None:
        """The same over a trusted server that weights agents by their promises."""
        ratio = self.central_ratio
        return None if ratio is None else ratio * weighting_gain(self.precision_caps)

    @cached_property
    def precision(self) -> FloatArray:
        """[R⁻¹]_ii of each agent, which determines its ε, shape (n,); ∞ without noise.

        R is the covariance of the noise that the worst coalition without the agent does not know.
        """
        if self.budget is None or self.noise is None:
            return np.array([math.inf])
        if self.is_central:
            # A move by Δ/n under the server's noise is one by Δ under n times that noise.
            total = self.noise.total_variance
            return np.full(self.noise.num_agents, 1 / total if total else math.inf)
        found = [worst_precisions(own, _count_colluders(own, self.threat)) for own in self._phases]
        return np.asarray(np.max(found, axis=0))

    def check_parameters(self, num_parameters: int) -> None:
        """Raise ``InfeasibleError`` if rounding would cost more ε than is set aside for it."""
        if self.budget is not None and self.noise is not None:
            loss = bound_loss(
                self.noise, self.grid, precision_caps=self.precision_caps, budget=self.budget
            )
            require_provable(loss, self.budget, num_parameters)

    def epsilon_spent(self, num_steps: int) -> FloatArray | None:
        """Return ε of each agent after ``num_steps`` at its own δ, shape (n,); None without."""
        if self.noise is None or self.budget is None or not self.queries:
            return None
        if num_steps == 0:
            return np.zeros(self.noise.num_agents)
        precision = self.precision.copy()
        for promise, agents in group_agents(self.budget, self.noise.num_agents).items():
            if promise.query.is_subsampled:
                worst = float(precision[agents].max())
                cap = float(self.precision_caps[agents[0]])
                # All designs for one budget are then counted alike, and once.
                precision[agents] = cap if cap * (1 - _AT_CAP) <= worst <= cap else worst
        found = _count_spent(
            self.budget, tuple(precision.tolist()), num_steps, counts_floats=self.counts_floats
        )
        return np.array(found)


# A sweep measures all mechanisms at the same steps, and a search repeats the sweep.
@lru_cache(maxsize=4096)
def _count_spent(
    budget: PrivacyBudget, precision: tuple[float, ...], num_steps: int, *, counts_floats: bool
) -> tuple[float, ...]:
    account = account_floats if counts_floats else account_promises
    return tuple(account(np.array(precision), budget, num_steps=num_steps).tolist())


@dataclass(frozen=True, eq=False)
class Trial:
    """A mechanism with a step-size schedule, which a sweep runs once for each seed."""

    mechanism: Mechanism
    schedule: Schedule


def _count_colluders(shares: Decomposition, threat: ThreatModel) -> int:
    """Return the size of the coalitions to check."""
    # Without shared seeds insiders know no more than an eavesdropper, which takes no search.
    return threat.max_colluders if shares.seed_groups else 0


TrainedWith: TypeAlias = MechanismLike | Mechanism | Design | Decomposition
"""A mechanism by name, record or function, or one whose noise is designed already."""


def make_mechanisms(
    given: str | Sequence[TrainedWith] | Mapping[str, TrainedWith],
    network: Network,
    budget: PrivacyBudget,
    *,
    objective: Objective,
    threat: ThreatModel | None = None,
) -> list[Mechanism]:
    """Make mechanisms of training, each designed for the budget under one objective.

    ``none`` clips but has no noise; ``unclipped`` has neither; ``central`` trusts a server.
    ``corn`` and ``ldp`` hold against ``threat``, by default that of ``corn.design``, one insider.
    Others hold against an eavesdropper only: next to others they say so, and alone they refuse
    insiders. A mapping names mechanisms in tables.
    """
    read = read_mechanisms(given, ready=(Mechanism, Design, Decomposition))

    def make(own: covariance.Mechanism | Mechanism | Design | Decomposition) -> Mechanism:
        if isinstance(own, Mechanism):
            return own
        if isinstance(own, Design | Decomposition):
            return Mechanism.private("", own, budget, threat=threat)
        kind = own.name
        if kind in ("none", "unclipped"):
            # Clipped like the private mechanisms: the difference to them is then the noise alone.
            return Mechanism.non_private(*(budget.queries if kind == "none" else ()))
        if kind == "central":
            return Mechanism.central(budget, network.num_agents)
        is_formula = kind == "ldp" or (kind == "corn" and network.mixing == "sum")
        if is_formula and network.num_agents > _MOST_DENSE_DESIGN:
            return _design_at_scale(kind, network, budget, threat or DEFAULT_THREAT)
        # Noise that pairs of agents cancel is known to either of them: no ε holds against insiders.
        held = threat if len(read) == 1 or kind in ("corn", "ldp") else EAVESDROPPER
        noise = design(network, budget, mechanism=own, objective=objective, threat=held)
        return Mechanism.private("", noise, budget)

    return [replace(make(own), name=name) for name, own in read.items()]


def _design_at_scale(
    kind: str, network: Network, budget: PrivacyBudget, threat: ThreatModel
) -> Mechanism:
    """Make ``corn`` of exact sums or ``ldp`` by their formulas, without matrices of n × n."""
    caps = budget.precision_caps(network.num_agents)
    if kind == "ldp":
        held = replace(threat, seeds="global")
        return Mechanism.private(kind, Decomposition(1 / caps), budget, threat=held)
    held = threat.resolve(network.graph, "sum")
    masks = design_masks(caps, held.seed_groups(network.graph, "sum"), held.max_colluders)
    return replace(Mechanism.private(kind, masks, budget, threat=held), disagreement_ratio=0.0)
