"""Promises of a plan to an agent over the releases that an audit observes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from corn.audit.attacks import ideal_mu
from corn.audit.estimates import ErrorRates
from corn.audit.observation import rate_of
from corn.plan import Plan
from corn.privacy import account_precision, gaussian

# With Poisson sampling the promise is a whole curve δ(ε). It is checked at these δ, and the plan's.
_DELTAS = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.2)


@dataclass(frozen=True)
class Promise:
    """The privacy of one agent's unit over the audited releases.

    Attributes:
        epsilon: ε at ``delta``.
        delta: δ.
        mu: μ of Gaussian DP; None under Poisson sampling, which no single μ describes.
        effective_mu: the same, or under Poisson sampling the μ of the same AUC as the best test.
        participations: the releases that count for one unit; 0 under Poisson sampling.
        points: (ε, δ) that hold together; empty where μ says it all.
    """

    epsilon: float
    delta: float
    mu: float | None
    effective_mu: float
    participations: int
    points: tuple[tuple[float, float], ...] = ()

    def excludes(self, rates: ErrorRates) -> bool:
        """Return whether error rates within these limits are impossible under the promise."""
        if self.mu is not None:
            return rates.bound_mu() > self.mu
        return any(
            bool(
                (
                    # Privacy bounds TPR − e^ε FPR and TNR − e^ε FNR by δ. Upper limits of both
                    # errors make them as small as the trials allow.
                    np.maximum(
                        1 - rates.missed_high - math.exp(epsilon) * rates.false_high,
                        1 - rates.false_high - math.exp(epsilon) * rates.missed_high,
                    )
                    > delta
                ).any()
            )
            for epsilon, delta in self.points
        )


def promise_to(plan: Plan, victim: int, num_releases: int | None = None) -> Promise:
    """Return the promise over some releases; by default over the whole run.

    A sample under Poisson sampling is promised over the whole run what it is promised over one
    release that it takes part in: that is what noise alone can be audited for.
    """
    epsilon, delta, query = plan.budget.of_agent(victim).promise
    # The cap, not the design's own precision: that is what was promised.
    cap, steps = float(plan.precision_caps[victim]), plan.budget.num_steps
    if query.is_subsampled and num_releases is not None:
        loss = account_precision([cap], query, num_steps=num_releases)
        points = tuple((float(loss.epsilon(each)[0]), each) for each in (delta, *_DELTAS))
        shift = query.sensitivity * math.sqrt(cap)
        is_replace = query.adjacency == "replace"
        same = ideal_mu(num_releases, shift, rate_of(query), is_replace=is_replace)
        return Promise(points[0][0], delta, None, same, 0, points)
    if query.is_subsampled:
        mu = query.sensitivity * math.sqrt(cap)
        return Promise(gaussian.epsilon_from(mu, delta), delta, mu, mu, 1)
    counted = query.participations(steps)
    mu = gaussian.mu_from(epsilon, delta)
    if num_releases is None:
        return Promise(epsilon, delta, mu, mu, counted)
    used = query.participations(num_releases)
    # μ² adds up over the releases that use the unit.
    mu *= math.sqrt(used / counted)
    return Promise(gaussian.epsilon_from(mu, delta), delta, mu, mu, used)
