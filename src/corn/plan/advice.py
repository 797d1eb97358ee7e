"""Advice on training that needs no data: batches, steps and step sizes from signal against noise.

T steps of size η end within

    D²/(2ηT) + η(s² + d·v)/2

of the least loss of a convex problem (the usual bound for SGD). D is the distance to go, s² the
variance that samples give the agents' average gradient, and v the variance of its noise in each
of d coordinates. With n agents, batches of B of m samples, clip C and Poisson rate p = B/m,

    s² ≤ C²/(nB),    v = ρ/(n² b),    b ≈ (B/C)² arsinh(μ²/(4p²T)),

where ρ is ``central_ratio`` of the noise design, and μ that of the promise. This cap b is the
central limit of T subsampled Gaussian steps (replace adjacency); exact calibration replaces it in
the end. The best η gives an excess of D√((s² + d·v)/T), as long as no step is longer than D, that
is η ≤ D/C. Once p²T is well above μ², neither a larger rate nor more steps lower it, so the
cheapest of the best are proposed. ``docs/advice.md`` compares this with real runs. The model is for
choosing between settings, and its excess is no forecast of a loss.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from corn.checks import require_count
from corn.covariance import ThreatModel, default_objective, design
from corn.errors import InfeasibleError
from corn.privacy import PrivacyBudget, Sampling, Unit, gaussian
from corn.privacy.rounding import write_exactly
from corn.topology import Network

# D, the distance from the first model to a good one, cannot be known without data; on the built-in
# tasks 1 to 10 fits the best step sizes.
USUAL_DISTANCE = 3.0
# C where nothing is known of gradients: a much larger one adds noise without signal.
USUAL_CLIPS: dict[Unit, float] = {"sample": 1.0, "agent": 0.1}
# Under gossip the ratio to a trusted server depends a little on the steps.
_DESIGNED_STEPS = 500
_STEPS = (50, 100, 200, 500, 1000, 2000, 5000)
_SMALLEST_BATCH = 16
# Up to this squared shift of one step the central limit is within a few percent of the exact cap.
_LARGEST_SQUARED_SHIFT = 0.25
# The model is a bound, so settings within a tenth of its best are equally good, and cost decides.
_TOLERANCE = 0.1


@dataclass(frozen=True)
class TrainingScale:
    """Facts that are known without data; all agents draw at the rate for m = ``samples``."""

    num_agents: int
    samples: int
    num_parameters: int
    epsilon: float
    delta: float
    unit: Unit = "sample"
    clip: float = 1.0

    def __post_init__(self) -> None:
        for name in ("num_agents", "samples", "num_parameters"):
            require_count(name, getattr(self, name))
        # Making a budget checks ε, δ, clip and unit.
        self.make_budget(1, 1, sampling="every-step")

    def make_budget(
        self, batch_size: int, num_steps: int, sampling: Sampling | None = None
    ) -> PrivacyBudget:
        """Return the promise for these batches and steps, by default with Poisson sampling."""
        size, samples = (batch_size, self.samples) if self.unit == "sample" else (None, None)
        fields = {"batch_size": size, "samples_per_agent": samples, "sampling": sampling}
        promise: Any = {"num_steps": num_steps, "clip": self.clip, "unit": self.unit, **fields}
        return PrivacyBudget(self.epsilon, self.delta, **promise)


@dataclass(frozen=True)
class Prospect:
    """A choice, the noise of the agents' average that it has, and the bound on the loss."""

    batch_size: int
    num_steps: int
    noise_variance: float
    step_size: float
    excess: float


@dataclass(frozen=True, eq=False)
class Proposal:
    """Settings, exactly calibrated, the approximate ``prospects`` they are chosen from, and ρ."""

    budget: PrivacyBudget
    prospect: Prospect
    central_ratio: float
    prospects: list[Prospect]


def propose(network: Network, scale: TrainingScale, *, threat: ThreatModel) -> Proposal:
    """Return the cheapest settings that the model expects to be nearly the best."""
    # The ratio is the same for every cap, so none needs to be calibrated for it.
    objective = default_objective(_DESIGNED_STEPS)
    ratio = design(network, 1.0, objective=objective, threat=threat).central_ratio
    prospects = list_prospects(scale, central_ratio=ratio)
    limit = (1 + _TOLERANCE) * min(own.excess for own in prospects)
    within = (own for own in prospects if own.excess <= limit)
    # The fewest gradients that an agent computes, and then the fewest steps.
    chosen = min(within, key=lambda own: (own.batch_size * own.num_steps, own.num_steps))
    settings = (chosen.batch_size, chosen.num_steps)
    budget = scale.make_budget(*settings)
    exact = expect(scale, *settings, precision_cap=budget.precision_cap, central_ratio=ratio)
    return Proposal(budget, exact, ratio, prospects)


def list_prospects(scale: TrainingScale, *, central_ratio: float) -> list[Prospect]:
    """Return the prospects of all usual batches and steps, in order of steps and batches."""
    # Powers of two up to half of the samples, or up to all of very few. A batch that is clipped
    # once is no matter of privacy, whatever its size.
    sizes = [2**k for k in range(40) if _SMALLEST_BATCH <= 2**k <= scale.samples / 2]
    if scale.unit == "agent":
        sizes = [min(scale.samples, 128)]
    mu = gaussian.mu_from(scale.epsilon, scale.delta)
    found = []
    for num_steps, batch_size in itertools.product(_STEPS, sizes or [scale.samples]):
        budget = scale.make_budget(batch_size, num_steps, sampling="every-step")
        if scale.unit == "agent":
            cap = budget.precision_cap
        else:
            # μ² of T steps with rate p is 4p²T sinh(x) for a squared shift x of one step, solved
            # for x (see the module's docstring). Beyond the limit there is too little noise.
            rate = batch_size / scale.samples
            squared_shift = math.asinh(mu**2 / (4 * rate**2 * num_steps))
            if squared_shift > _LARGEST_SQUARED_SHIFT:
                continue
            cap = squared_shift / budget.query.contribution**2
        found.append(
            expect(scale, batch_size, num_steps, precision_cap=cap, central_ratio=central_ratio)
        )
    if not found:
        raise InfeasibleError(
            f"epsilon={write_exactly(scale.epsilon)} is too large for advice on {scale.samples} "
            "samples: the noise would hardly matter; try a smaller epsilon"
        )
    return found


def expect(
    scale: TrainingScale,
    batch_size: int,
    num_steps: int,
    *,
    precision_cap: float,
    central_ratio: float,
) -> Prospect:
    """Return what the model expects of noise with this cap and this ratio to a trusted server's."""
    noise_variance = central_ratio / (scale.num_agents**2 * precision_cap)
    per_sample = batch_size if scale.unit == "sample" else None
    randomness = bound_gradient_variance(scale.clip, scale.num_agents, per_sample)
    randomness += scale.num_parameters * noise_variance
    step_size = expect_step_size(num_steps=num_steps, clip=scale.clip, randomness=randomness)
    excess = USUAL_DISTANCE**2 / (2 * step_size * num_steps) + step_size * randomness / 2
    return Prospect(batch_size, num_steps, noise_variance, step_size, excess)


def expect_step_size(*, num_steps: int, clip: float, randomness: float) -> float:
    """Return the step size that minimises the bound of this module, at most D/C.

    ``randomness`` is s² + d·v. As D is a guess, the result is a place to start a search from.

    >>> expect_step_size(num_steps=900, clip=1, randomness=0.25)
    0.2
    """
    longest = USUAL_DISTANCE / clip
    # Without randomness, only the distance limits a step.
    if randomness == 0:
        return longest
    return min(USUAL_DISTANCE / math.sqrt(num_steps * randomness), longest)


def bound_gradient_variance(clip: float, num_agents: int, batch_size: int | None) -> float:
    """Return s²: the most that samples add to the variance of the agents' average gradient.

    It is C²/(nB) if each sample is clipped, and C²/n if a whole mini-batch is (no ``batch_size``).
    """
    return clip**2 / (num_agents * (batch_size or 1))
