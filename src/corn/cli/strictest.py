"""The strictest promise in outputs: whose it is, and what it costs the other agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from corn.arrays import FloatArray
from corn.cli.output import format_count
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
    """

    agents: tuple[int, ...]
    promise: str
    relaxed: str
    relaxed_caps: FloatArray

    def describe(self) -> str:
        """Return the agents and their promise.

        >>> budget = PrivacyBudget((0.5, 2, 2), 1e-5, num_steps=10, clip=1)
        >>> find_strictest(budget, 3).describe()
        'agent 0: ε = 0.5, δ = 1e-05; the next has ε = 2, δ = 1e-05'
        """
        return f"{list_agents(self.agents)}: {self.promise}; the next has {self.relaxed}"


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
    )


def strictest_facts(budget: PrivacyBudget, num_agents: int) -> list[tuple[str, str]]:
    """Return a line on the strictest promise, for a list of facts; none if promises are equal."""
    strictest = find_strictest(budget, num_agents)
    return [] if strictest is None else [("strictest promise", strictest.describe())]


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
