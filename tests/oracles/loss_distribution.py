"""Hockey-stick divergences of Poisson sampling in higher precision than the code under test.

One step has a closed form, which is evaluated by mpmath. Two steps are an integral of it. More
steps are composed on a grid of losses, by Fourier transforms of extended precision.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, TypeAlias

import mpmath as mp
import numpy as np
from scipy import fft

Direction: TypeAlias = Literal["remove", "add", "replace"]

Wide: TypeAlias = np.ndarray[Any, np.dtype[np.longdouble]]

DIGITS = 34


def one_step_delta(epsilon: Any, shift: Any, rate: Any, direction: Direction) -> Any:
    """Return δ(ε) of one step; ε may be negative.

    With the sample the output is (1 − p) N(0, 1) + p N(s, 1). ``remove`` compares this with
    N(0, 1), ``add`` the reverse, and ``replace`` with (1 − p) N(0, 1) + p N(−s, 1).
    """
    with mp.workdps(DIGITS):
        s, p, ratio = mp.mpf(shift), mp.mpf(rate), mp.exp(epsilon)
        if direction == "remove":
            if ratio <= 1 - p:
                return 1 - ratio
            x = (mp.log((ratio - 1 + p) / p) + s * s / 2) / s
            return (1 - p - ratio) * mp.ncdf(-x) + p * mp.ncdf(s - x)
        if direction == "add":
            rest = 1 / ratio - 1 + p
            if rest <= 0:
                return mp.mpf(0)
            x = (mp.log(rest / p) + s * s / 2) / s
            return mp.ncdf(x) - ratio * ((1 - p) * mp.ncdf(x) + p * mp.ncdf(x - s))
        # The loss is ε where a u² + (1 − p)(1 − e^ε) u − a e^ε = 0, for u = e^(sx).
        a, b = p * mp.exp(-s * s / 2), (1 - p) * (ratio - 1)
        x = mp.log((b + mp.sqrt(b * b + 4 * a * a * ratio)) / (2 * a)) / s
        present, opposite = p * mp.ncdf(s - x), p * mp.ncdf(-s - x)
        return (1 - p) * mp.ncdf(-x) * (1 - ratio) + present - ratio * opposite


def two_steps_delta(epsilon: float, shift: float, rate: float, direction: Direction) -> float:
    """Return δ(ε) of two steps: the mean of one step's δ at ε minus the loss of the other."""
    with mp.workdps(20):
        s, p = mp.mpf(shift), mp.mpf(rate)

        def loss(x: Any) -> Any:
            present = mp.log(1 - p + p * mp.exp(s * x - s * s / 2))
            if direction == "add":
                return -present
            if direction == "remove":
                return present
            return present - mp.log(1 - p + p * mp.exp(-s * x - s * s / 2))

        def integrand(x: Any) -> Any:
            density = mp.npdf(x)
            if direction != "add":
                density = (1 - p) * density + p * mp.npdf(x - s)
            return density * one_step_delta(epsilon - loss(x), s, p, direction)

        return float(mp.quad(integrand, [*range(-12, 13, 2), 12 + s]))


def compose_on_grid(
    first: int,
    size: int,
    interval: float,
    *,
    shift: float,
    rate: float,
    direction: Direction,
    num_steps: int,
    window: tuple[int, int],
) -> tuple[Wide, np.longdouble]:
    """Return the probabilities of losses after all steps, and that of an infinite loss.

    The grid of one step has the ``size`` losses from ``first`` times ``interval``. Probabilities
    are those of the pessimistic estimate of Doroshenko et al. (arXiv 2207.04380, Algorithm 1). The
    result has the losses from ``window[0]`` to ``window[1]`` times the interval.
    """
    with mp.workdps(DIGITS):
        d = mp.mpf(interval)
        delta = [one_step_delta((first + i) * d, shift, rate, direction) for i in range(size)]
        up, down = mp.expm1(d), mp.expm1(-d)
        differences = [right - left for left, right in pairwise(delta)]
        exact = [1 - delta[0] + differences[0] / up]
        exact += [(right - mp.exp(d) * left) / up for left, right in pairwise(differences)]
        exact.append(differences[-1] / down)
        step = np.array([np.longdouble(mp.nstr(value, 25)) for value in exact])
        infinite = np.longdouble(mp.nstr(delta[-1], 25))
    length = 1 << max(window[1] - window[0], size).bit_length()
    # The mean loss goes to index 0, so that powers of the spectrum turn slowly.
    centre = round(float((np.arange(size) * step).sum()))
    padded = np.zeros(length, dtype=np.longdouble)
    padded[:size] = step
    base, power, left = fft.rfft(np.roll(padded, -centre)), None, num_steps
    # By squaring, whose rounding errors are fewer than those of exponential and logarithm.
    while left:
        if left & 1:
            power = base if power is None else power * base
        base, left = base * base, left >> 1
    total = np.roll(fft.irfft(power, length), -(window[0] - (first + centre) * num_steps))
    lost = -np.expm1(np.longdouble(num_steps) * np.log1p(-infinite))
    return total[: window[1] - window[0] + 1], lost
