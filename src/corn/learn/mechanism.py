"""Mechanisms of training: a mechanism's noise under a budget, and the privacy that it gives.

``make_mechanisms`` designs them from names, records and users' own functions.
"""

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
from corn.covariance.masks import design_masks
from corn.covariance.problem import weighting_gain
from corn.covariance.threat import EAVESDROPPER
from corn.errors import InvalidArgumentError
from corn.learn.schedule import Schedule
from corn.noise.grid import bound_loss, choose_grid, require_provable
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


@dataclass(frozen=True, eq=False)
class Mechanism:
    """A way to train: noise, clipping and the promise that they keep.

    Made by ``private``, ``central``, ``non_private`` or ``from_plan``. The budget's query decides
    what is clipped: a budget for an agent's whole data cannot be run with samples clipped one by
    one, nor the reverse.

    Attributes:
        name: the name in tables.
        noise: the noise that each agent draws at each step; None for no noise.
        queries: clipping and sampling, one query for all agents or one for each; none for no
            clipping.
        budget: the promise; None without one.
        threat: the adversary against whom the promise holds.
        is_central: whether a trusted server averages, and everybody sees its models alone.
        grid: γ: released values are multiples of it; 0 where agents release nothing.
        counts_floats: whether the promise holds in floating point, so that a run with secret keys
            keeps it; otherwise it holds for real numbers, which suffices for simulations.
        disagreement_ratio: κ of the design or plan that the noise is from; None for other noise.
        later_noise: noise that takes over from a step on, counted from 0; see ``in_phases``.
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
        # ε was counted for this clipping. With another one the sensitivity is not the one that the
        # noise was designed for (docs/theory.md, “Unit”).
        expected = self.budget.queries
        if self.queries != expected:
            raise InvalidArgumentError(
                f"{self.name!r} must clip as its budget states ({describe_queries(expected)}), "
                f"found {describe_queries(self.queries) if self.queries else 'no clipping'}"
            )
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
                f"{round_bound_down(caps[worst])}; "
                "design it for this cap"
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

        The promise holds against ``threat``; by default against the threat that a design was made
        for, and for other noise against an eavesdropper. It holds for real numbers: where noise
        protects somebody, make a plan.
        """
        ratio = None
        shares = noise.decomposition if isinstance(noise, Design) else noise
        caps = budget.precision_caps(shares.num_agents)
        if isinstance(noise, Design):
            if noise.status == "reference":
                raise InvalidArgumentError(
                    f"mechanism {noise.mechanism!r} is a reference without a guarantee against an "
                    "eavesdropper: use Mechanism.central or Mechanism.non_private"
                )
            threat = threat or noise.threat
            ratio = noise.disagreement_ratio
            max_colluders = _count_colluders(shares, threat)
            worst = float((worst_precisions(shares, max_colluders) / caps).max())
            # A design for these caps may miss them by rounding, and is scaled to meet them. A
            # design for other caps is refused.
            if 1 < worst <= 1 + _DESIGN_TOLERANCE:
                shares = meet_caps(shares, caps, max_colluders)
        # Simulations round to the grid too, so that they show its effect on learning.
        return cls(
            name,
            shares,
            budget.queries,
            budget,
            threat or EAVESDROPPER,
            grid=choose_grid(shares, caps),
            disagreement_ratio=ratio,
        )

    @classmethod
    def in_phases(
        cls, name: str, phases: Sequence[tuple[int, Design | Decomposition]], budget: PrivacyBudget
    ) -> Mechanism:
        """Make a mechanism whose noise changes, such as with the graph: (number of steps, noise).

        Every phase keeps the caps of the budget, so that the whole run keeps its promise. Where
        phases have less noise than their budgets allow, ``corn.privacy.compose_expenses`` adds up
        what they really spend.
        """
        counts = [require_count("the steps of a phase", count) for count, _ in phases]
        rule = f"such that their steps add up to the {budget.num_steps} of the budget"
        require(sum(counts) == budget.num_steps, "phases", rule, counts)
        made = [cls.private(name, noise, budget) for _, noise in phases]
        noises = [own.noise for own in made if own.noise is not None]
        sizes = {noise.num_agents for noise in noises}
        require(len(sizes) == 1, "phases", "for the same number of agents", sorted(sizes))
        starts = itertools.accumulate(counts[:-1])
        return replace(
            made[0],
            # Together phases hold against no stronger adversary than the weakest of them.
            threat=min((own.threat for own in made), key=lambda threat: threat.max_colluders),
            grid=min(own.grid for own in made),
            disagreement_ratio=None,
            later_noise=tuple(zip(starts, noises[1:], strict=True)),
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
        # The server's noise is one share that all agents add: the average of equal noise is that
        # noise, with standard deviation 1/(n √b).
        noise_std = 1 / math.sqrt(budget.precision_caps(num_agents).min())
        factor = np.full((num_agents, 1), noise_std / num_agents)
        shares = Decomposition(np.zeros(num_agents), (tuple(range(num_agents)),), (factor,))
        return cls(name, shares, budget.queries, budget, is_central=True)

    @classmethod
    def non_private(cls, *queries: ClippedQuery, name: str = "none") -> Mechanism:
        """Make a mechanism without noise or promise; it clips if ``queries`` are given."""
        return cls(name, None, queries)

    @property
    def query(self) -> ClippedQuery | None:
        """The first agent's query: all agents clip alike, and may differ in their sampling."""
        return self.queries[0] if self.queries else None

    @property
    def clip(self) -> float:
        """C, infinite where nothing is clipped."""
        return math.inf if self.query is None else self.query.clip

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
    def central_ratio(self) -> float | None:
        """The noise variance of the average over a trusted server's; None without noise.

        The server keeps the strictest agent's promise for all. Of noise in phases it is the mean
        over the steps, which is the ratio of the variances summed over the run.
        """
        if self.budget is None or self.noise is None:
            return None
        starts = [0, *(start for start, _ in self.later_noise), self.budget.num_steps]
        totals = [each.total_variance for each in self._phases]
        total = float(np.dot(totals, np.diff(starts)) / self.budget.num_steps)
        # 1ᵀR1/n² over 1/(n² min b), the floor of docs/theory.md.
        return (total if self.later_noise else totals[0]) * float(self.precision_caps.min())

    @property
    def _phases(self) -> list[Decomposition]:
        noises = [self.noise, *(noise for _, noise in self.later_noise)]
        return [noise for noise in noises if noise is not None]

    @property
    def weighted_central_ratio(self) -> float | None:
        """The same over a trusted server that weights agents by their promises."""
        ratio = self.central_ratio
        return None if ratio is None else ratio * weighting_gain(self.precision_caps)

    @cached_property
    def precision(self) -> FloatArray:
        """[R⁻¹]_ii of each agent, which determines its ε, shape (n,); ∞ without noise.

        Against insiders R is the covariance of the noise that the coalition does not know, for the
        worst coalition without the agent.
        """
        if self.budget is None or self.noise is None:
            return np.array([math.inf])
        if self.is_central:
            # One agent moves the average by Δ/n. That under the server's noise is as a move by Δ
            # under n times that noise, whose variance is the sum of all entries.
            total = self.noise.total_variance
            return np.full(self.noise.num_agents, 1 / total if total else math.inf)
        # The phase with the least noise decides.
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
        """Return ε of each agent after ``num_steps`` at its own δ, shape (n,); None without.

        It is exact, whatever accounting the budget was designed with. Under Poisson sampling, where
        each ε takes a while to compute, agents with one promise get the ε of the least protected,
        and those just below their cap the ε at the cap.
        """
        if self.noise is None or self.budget is None or self.query is None:
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
    # Where noise protects somebody, the reported ε includes what floats may add.
    account = account_floats if counts_floats else account_promises
    return tuple(account(np.array(precision), budget, num_steps=num_steps).tolist())


@dataclass(frozen=True, eq=False)
class Trial:
    """A mechanism with a step-size schedule, which a sweep runs once for each seed."""

    mechanism: Mechanism
    schedule: Schedule


def _count_colluders(shares: Decomposition, threat: ThreatModel) -> int:
    """Return the size of the coalitions to check."""
    # Insiders know the seeds they share. Without shared seeds they know no more than an
    # eavesdropper, and checking them one by one would take minutes on a large network.
    return threat.max_colluders if shares.seed_groups else 0


_MOST_DENSE_DESIGN = 2000
"""Agents beyond which rings and tori are designed by Fourier transform, where that is possible."""


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
    ``corn`` is designed against ``threat``, and ``ldp``, which shares no seeds, holds against it
    too; None is the default of ``corn.design``, one insider. ``decor``, ``zero-sum`` and a
    covariance of one's own hold against an eavesdropper only: next to others they say so, and alone
    they refuse insiders. A mapping names mechanisms in tables.
    """
    # All names are checked before the first design, which can take minutes.
    read = read_mechanisms(given, ready=(Mechanism, Design, Decomposition))
    is_alone = len(read) == 1
    return [
        _make(name, each, network, budget, objective, threat, is_alone=is_alone)
        for name, each in read.items()
    ]


def _make(
    name: str,
    given: covariance.Mechanism | Mechanism | Design | Decomposition,
    network: Network,
    budget: PrivacyBudget,
    objective: Objective,
    threat: ThreatModel | None,
    *,
    is_alone: bool,
) -> Mechanism:
    if isinstance(given, Mechanism):
        return replace(given, name=name)
    if isinstance(given, Design | Decomposition):
        return Mechanism.private(name, given, budget, threat=threat)
    if given.name == "unclipped":
        return Mechanism.non_private(name=name)
    if given.name == "none":
        # Clipped like the private mechanisms: the difference to them is then the noise alone.
        return Mechanism.non_private(*budget.queries, name=name)
    if given.name == "central":
        return Mechanism.central(budget, network.num_agents, name=name)
    made = _design_at_scale(given, network, budget, threat)
    if made is None:
        # Noise that pairs of agents cancel is known to either of them: no ε holds against insiders.
        holds = is_alone or given.name in ("corn", "ldp")
        held = threat if holds else EAVESDROPPER
        noise = design(network, budget, mechanism=given, objective=objective, threat=held)
        made = Mechanism.private(name, noise, budget)
    return replace(made, name=name)


def _design_at_scale(
    mechanism: covariance.Mechanism,
    network: Network,
    budget: PrivacyBudget,
    threat: ThreatModel | None,
) -> Mechanism | None:
    """Make a mechanism without matrices of n × n numbers, if the network is large and it can be."""
    n = network.num_agents
    name = mechanism.name
    if n <= _MOST_DENSE_DESIGN:
        return None
    caps = budget.precision_caps(n)
    if name == "ldp":
        # Noise by a formula, of which the bound on all covariances is not asked here.
        # Without shared seeds insiders know no more than an eavesdropper (docs/theory.md,
        # “Insiders”).
        holds = replace(threat or DEFAULT_THREAT, seeds="global")
        return Mechanism.private(name, Decomposition(1 / caps), budget, threat=holds)
    if name == "corn" and network.mixing == "sum":
        # The optimum is a formula, whose record in ``design`` has matrices of n × n.
        held = (threat or DEFAULT_THREAT).resolve(network.graph, "sum")
        groups = held.seed_groups(network.graph, "sum")
        masks = design_masks(caps, groups, held.max_colluders)
        made = Mechanism.private(name, masks, budget, threat=held)
        return replace(made, disagreement_ratio=0.0)
    return None
