"""The cost of each sampling for the same promise, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from corn.arrays import FloatArray
from corn.errors import InvalidArgumentError
from corn.privacy.accounting import account_precision
from corn.privacy.budget import PrivacyBudget
from corn.privacy.query import Sampling


@dataclass(frozen=True, eq=False)
class SamplingCost:
    """The noise that one sampling needs, and its ε with the least noise of all samplings.

    Attributes:
        budget: the promise with this sampling, counted exactly.
        noise_std: standard deviation of each agent that draws its noise alone, 1/√b_i, shape (n,),
            or (1,) if all agents have the same promise.
        variance_ratio: noise variance of all agents together, relative to the sampling with the
            least.
        epsilon_at_least: each agent's ε if it samples like this with the noise of the sampling with
            the least, of the shape of ``noise_std``.
    """

    budget: PrivacyBudget
    noise_std: FloatArray
    variance_ratio: float
    epsilon_at_least: FloatArray

    @property
    def sampling(self) -> Sampling:
        """The rule by which samples enter batches."""
        return self.budget.promises[0].query.sampling or "every-step"

    @property
    def mu(self) -> FloatArray | None:
        """μ of each agent's whole run, of the shape of ``noise_std``; None under Poisson sampling.

        There, no single μ describes a run.
        """
        promises = self.budget.promises
        if any(promise.query.is_subsampled for promise in promises):
            return None
        return np.array([self.budget.of_agent(agent).mu for agent in range(len(promises))])


def compare_samplings(budget: PrivacyBudget) -> tuple[SamplingCost, ...]:
    """Return the cost of each sampling that the budget has the numbers for; least noise first.

    A budget for unit ``agent`` has one sampling only. A sampling for which δ is out of range is
    left out.

    >>> budget = PrivacyBudget(
    ...     1, 1e-5, num_steps=1000, clip=1, unit="sample", batch_size=128, samples_per_agent=2800
    ... )
    >>> [(cost.sampling, round(cost.variance_ratio)) for cost in compare_samplings(budget)]
    [('poisson', 1), ('passes', 23), ('every-step', 479)]
    """
    budgets = [own for name in get_args(Sampling) if (own := _with_sampling(budget, name))]
    caps = [own.precision_caps(own.num_agents or 1) for own in budgets]
    ordered = sorted(zip(budgets, caps, strict=True), key=lambda pair: float((1 / pair[1]).sum()))
    least = ordered[0][1]
    return tuple(
        SamplingCost(
            own,
            noise_std=1 / np.sqrt(cap),
            variance_ratio=float((1 / cap).sum() / (1 / least).sum()),
            epsilon_at_least=_account_each(own, least),
        )
        for own, cap in ordered
    )


def _with_sampling(budget: PrivacyBudget, sampling: Sampling) -> PrivacyBudget | None:
    """Return the same promise with another sampling; None if that cannot be counted."""
    if budget.unit == "agent" and sampling != "every-step":
        return None
    samples = budget.samples_per_agent
    if samples is None and budget.sampling_rate is not None:
        # The fewest samples for which batches of this size have at most this rate.
        fewest = tuple(promise.query.least_samples for promise in budget.promises)
        samples = fewest if budget.num_agents else fewest[0]
    if samples is None and sampling != "every-step":
        return None
    is_own = sampling == budget.sampling
    try:
        return replace(
            budget,
            # The paper's bounds do not cover sampling, and would not compare with what does.
            accounting="gdp",
            sampling=sampling,
            sampling_rate=budget.sampling_rate if is_own else None,
            samples_per_agent=budget.samples_per_agent if is_own else samples,
        )
    except InvalidArgumentError:
        # Numerical accounting needs δ within a range; the budget itself was already accepted.
        if is_own:
            raise
        return None


def _account_each(budget: PrivacyBudget, caps: Sequence[float] | FloatArray) -> FloatArray:
    """Return each agent's ε with noise at these caps, whatever it is promised."""
    found: dict[tuple[float, object], float] = {}
    for cap, promise in zip(caps, budget.promises, strict=True):
        if (cap, promise) not in found:
            loss = account_precision([cap], promise.query, num_steps=budget.num_steps)
            found[cap, promise] = float(loss.epsilon(promise.delta)[0])
    return np.array([found[key] for key in zip(caps, budget.promises, strict=True)])
