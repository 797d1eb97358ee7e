"""The strictest promise in outputs: whose it is, what it costs, and which server it implies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from corn.checks import FloatArray
from corn.cli.output import format_count
from corn.covariance.problem import weighting_gain
from corn.privacy import PrivacyBudget
from corn.privacy.rounding import write_exactly

_MOST_LISTED = 5


@dataclass(frozen=True, eq=False)
class StrictestPromise:
    """The agents with the strictest promise, and all caps if they had the next strictest one.

    Attributes:
        agents: those whose promise needs the most noise.
        promise: theirs, in words.
        relaxed: the next strictest promise among the other agents, in words.
        relaxed_caps: the precision caps if ``agents`` had that one, shape (n,).
        weighting_gain: variance of a trusted server's average over that of its best weighted one.
        is_by_sampling: whether all agents have the same ε and δ, and only their sampling differs.
    """

    agents: tuple[int, ...]
    promise: str
    relaxed: str
    relaxed_caps: FloatArray
    strictest_cap: float
    weighting_gain: float
    is_by_sampling: bool

    @property
    def relaxed_floor(self) -> float:
        """The least variance of the average with the next promise, over that with this one."""
        return self.strictest_cap / float(self.relaxed_caps.min())

    @property
    def dropped_floor(self) -> float:
        """The same for the average of the other agents alone."""
        total = len(self.relaxed_caps)
        return self.relaxed_floor * (total / (total - len(self.agents))) ** 2

    def describe(self) -> str:
        """Return the agents, their promise, and what the average would gain without it.

        >>> budget = PrivacyBudget((0.5, 2, 2), 1e-5, num_steps=10, clip=1)
        >>> find_strictest(budget, 3).describe()
        'agent 0: ε = 0.5, δ = 1e-05; the next has ε = 2, δ = 1e-05, with which the least noise
        variance of the average would be 0.0804 × (0.181 × without agent 0)'
        """
        who = list_agents(self.agents)
        text = (
            f"{who}: {self.promise}; the next has {self.relaxed}, with which the least noise "
            f"variance of the average would be {self.relaxed_floor:.3g} ×"
        )
        # The average of fewer agents can have more noise.
        if self.dropped_floor < 1:
            text += f" ({self.dropped_floor:.3g} × without {who})"
        if self.is_by_sampling:
            text += "; --sampling poisson with one --sampling-rate makes all agents equally strict"
        return text


def find_strictest(budget: PrivacyBudget, num_agents: int) -> StrictestPromise | None:
    """Return the strictest promise of a budget, or None if all agents have the same cap."""
    caps = budget.precision_caps(num_agents)
    # By caps, not by ε: δ and sampling decide as well how strict a promise is.
    levels = np.unique(caps)
    if len(levels) == 1:
        return None
    is_strictest = caps == levels[0]
    following = int(np.flatnonzero(caps == levels[1])[0])
    agents = tuple(np.flatnonzero(is_strictest).tolist())
    return StrictestPromise(
        agents=agents,
        promise=_describe_promise(budget, agents[0]),
        relaxed=_describe_promise(budget, following),
        relaxed_caps=np.where(is_strictest, levels[1], caps),
        strictest_cap=float(levels[0]),
        weighting_gain=weighting_gain(caps),
        is_by_sampling=len({(own.epsilon, own.delta) for own in budget.promises}) == 1,
    )


def strictest_facts(budget: PrivacyBudget, num_agents: int) -> list[tuple[str, str]]:
    """Return a line on the strictest promise, for a list of facts; none if promises are equal."""
    strictest = find_strictest(budget, num_agents)
    return [] if strictest is None else [("strictest promise", strictest.describe())]


def describe_server(central_ratio: float, weighted_ratio: float, budget: PrivacyBudget) -> str:
    """Return the noise variance of the average model over a trusted server's, naming the server.

    Where promises differ, one server keeps the strictest for all, and a better one weights agents.

    >>> describe_server(1.2, 1.2, PrivacyBudget(1, 1e-5, num_steps=10, clip=1))
    "1.2 × a trusted server's noise variance in the average model"
    >>> describe_server(1.2, 6.15, PrivacyBudget((0.5, 2), 1e-5, num_steps=10, clip=1))
    '1.2 × the noise variance in the average model of a trusted server that keeps the promise of
    agent 0 for all, and 6.15 × that of one that weights agents by their promises'
    """
    strictest = find_strictest(budget, budget.num_agents or 1)
    if strictest is None:
        return f"{central_ratio:.3g} × a trusted server's noise variance in the average model"
    return (
        f"{central_ratio:.3g} × the noise variance in the average model of a trusted server that "
        f"keeps the promise of {list_agents(strictest.agents)} for all, and "
        f"{weighted_ratio:.3g} × that of one that weights agents by "
        "their promises"
    )


def describe_average(central_ratio: float, weighted_ratio: float, budget: PrivacyBudget) -> str:
    """Return the same for the line "noise in the average" of a list of facts."""
    strictest = find_strictest(budget, budget.num_agents or 1)
    if strictest is None:
        # The reference draws its batches as the agents do, also where the budget counts on fewer
        # samples than they have.
        sampling = " and sampling" if budget.unit == "sample" else ""
        return f"{central_ratio:.4g} × a trusted server's variance, for the same promise{sampling}"
    return (
        f"{central_ratio:.4g} × the variance of a trusted server that keeps the promise of "
        f"{list_agents(strictest.agents)} for all; "
        f"{weighted_ratio:.4g} × that of a server that weights agents by "
        "their promises"
    )


def describe_reference(budget: PrivacyBudget) -> str:
    """Return what the column with ratios to a trusted server means."""
    strictest = find_strictest(budget, budget.num_agents or 1)
    if strictest is None:
        return "noise variance of the average over a trusted server's"
    return (
        "noise variance of the average over that of a trusted server that keeps the promise of "
        f"{list_agents(strictest.agents)} for all; multiply by {strictest.weighting_gain:.3g} for "
        "a server that weights agents by their promises"
    )


def list_agents(agents: Sequence[int]) -> str:
    """Return the numbers of a few agents, and how many there are beyond these.

    >>> list_agents([3]), list_agents(range(8))
    ('agent 3', 'agents 0, 1, 2, 3, 4 and 3 more')
    """
    shown = ", ".join(map(str, agents[:_MOST_LISTED]))
    more = len(agents) - _MOST_LISTED
    return f"agent{'s' if len(agents) > 1 else ''} {shown}" + (f" and {more} more" * (more > 0))


def _describe_promise(budget: PrivacyBudget, agent: int) -> str:
    """Return ε and δ of an agent, and its sampling if that is what makes agents differ."""
    epsilon, delta, query = budget.promises[agent]
    text = f"ε = {write_exactly(epsilon)}, δ = {write_exactly(delta)}"
    if len({promise.query for promise in budget.promises}) > 1:
        if query.sampling_rate is not None:
            text += f", sampling rate {query.sampling_rate:.4g}"
        if query.steps_per_pass is not None:
            text += f", passes of {format_count(query.steps_per_pass, 'step')}"
    return text
