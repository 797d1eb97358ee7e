"""Advice on training that needs no data: step sizes from the noise and the number of steps."""

from __future__ import annotations

import math

from corn.checks import require_count, require_in_range

USUAL_DISTANCE = 3.0
"""D: the distance from the first model to a good one. It cannot be known without data; on the
built-in tasks 1 to 10 fits the best step sizes."""


def expect_step_size(
    *,
    num_steps: int,
    clip: float,
    num_parameters: int,
    noise_variance: float,
    gradient_variance: float,
    distance: float = USUAL_DISTANCE,
) -> float:
    """Return the step size that minimises the usual bound on the loss of SGD.

    With steps of size η, the average model of T steps ends within D²/(2ηT) + η(s² + d·v)/2 of the
    least loss. The first term is the distance that is left. The second is what the agents' average
    gradient has of chance: s² of samples, and noise of variance v in each of d coordinates. The
    minimum is at η = D/√(T(s² + d·v)). No step should be longer than D, so η is at most D/C. As D
    is a guess, the result is a place to start a search from.

    >>> expect_step_size(
    ...     num_steps=900, clip=1, num_parameters=8, noise_variance=0, gradient_variance=0.25
    ... )
    0.2
    """
    require_count("num_steps", num_steps)
    require_count("num_parameters", num_parameters)
    require_in_range("noise_variance", noise_variance, 0)
    chance = num_steps * (gradient_variance + num_parameters * noise_variance)
    longest = distance / clip
    return min(distance / math.sqrt(chance), longest) if chance > 0 else longest


def bound_gradient_variance(clip: float, num_agents: int, batch_size: int | None) -> float:
    """Return s²: the most that samples add to the variance of the agents' average gradient.

    It is C²/(nB) if each sample is clipped. If the gradient of a whole mini-batch is clipped (no
    ``batch_size``), nothing is known of single samples, and C²/n is the bound.
    """
    return clip**2 / (num_agents * (batch_size or 1))
