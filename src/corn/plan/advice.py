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
    distance: float = USUAL_DISTANCE,
) -> float:
    """Return the step size that minimises the usual bound on the loss of SGD.

    With steps of size η, the average model of T steps ends within D²/(2ηT) + η(C² + d·v)/2 of the
    least loss. The first term is the distance that is left. The second comes from gradients of norm
    C and from the noise of the agents' average, which has variance v in each of d coordinates. The
    minimum is at η = D/√(T(C² + d·v)). As D is a guess, it is a place to start a search from.

    >>> round(expect_step_size(num_steps=900, clip=1, num_parameters=8, noise_variance=0), 6)
    0.1
    """
    require_count("num_steps", num_steps)
    require_count("num_parameters", num_parameters)
    require_in_range("noise_variance", noise_variance, 0)
    return distance / math.sqrt(num_steps * (clip**2 + num_parameters * noise_variance))
