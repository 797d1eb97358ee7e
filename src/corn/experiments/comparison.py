"""Comparisons of two lines of a panel, paired by seed, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from corn.experiments.methods import CORN_PAPER, DECOR_PAPER, MethodSpec
from corn.experiments.studies import Panel, Point, confidence_half_width

ROUNDING = 1e-6
"""The relative gap to which designs are solved: a smaller difference means nothing."""

TOLERATED = 0.01
"""The relative difference up to which two values count as equal."""


@dataclass(frozen=True)
class Difference:
    """The excess of one value over another, positive if the first is worse.

    Attributes:
        x: the place of the comparison.
        mean: the excess relative to the second value; infinite if one of them broke down.
        half_width: half of its confidence interval; infinite if there is one seed only, or if
            another step size might have changed the outcome.
    """

    x: float
    mean: float
    half_width: float

    @property
    def is_surely_worse(self) -> bool:
        """Whether the whole interval is on the wrong side of zero."""
        return self.mean - self.half_width > ROUNDING

    @property
    def is_surely_no_worse(self) -> bool:
        """Whether the whole interval is on the right side of zero, up to ``TOLERATED``."""
        return self.mean + self.half_width <= TOLERATED


@dataclass(frozen=True)
class Lines:
    """The points of a panel by method and place."""

    panel: Panel
    points: Mapping[tuple[str, float], Point]

    @classmethod
    def of(cls, panel: Panel, points: Iterable[Point]) -> Lines:
        """Return the points of a panel, indexed."""
        return cls(panel, {(point.method.name, point.x): point for point in points})

    def places(self, *methods: MethodSpec) -> list[float]:
        """Return the places that all of these methods have, in order."""
        found = [{x for name, x in self.points if name == method.name} for method in methods]
        return sorted(set.intersection(*found))

    def mean(self, method: MethodSpec, x: float) -> float:
        """Return the mean of a method at a place; NaN if every run broke down."""
        return self.points[method.name, x].mean

    def excess(
        self,
        first: tuple[MethodSpec, float],
        second: tuple[MethodSpec, float],
        *,
        comparisons: int = 1,
    ) -> Difference:
        """Return the excess of the first over the second, paired by seed.

        ``comparisons`` widens the interval for the number of comparisons made (Bonferroni). A
        method that broke down is infinitely worse than one that did not. That is certain unless
        another step size, which did not run, might have done better.
        """
        a, b = (self._values(*place) for place in (first, second))
        if not a or not b:
            # Another step size might have survived, unless all of them ran at all seeds.
            is_open = any(self.points[method.name, x].is_open for method, x in (first, second))
            half_width = math.inf if is_open else 0.0
            # If both broke down, the first does not count as better: it is no better than the
            # second.
            return Difference(first[1], math.inf if b or not a else -math.inf, half_width)
        # Runs of one seed share batches and noise, so their difference varies less than either.
        unit = abs(float(np.mean(b))) or 1.0
        gaps = _subtract(a, b, unit if self.panel.lower_is_better else -unit)
        return Difference(first[1], float(np.mean(gaps)), self._half_width(gaps, comparisons))

    def margin_lead(self, better: float, other: float) -> Difference:
        """Return the excess of CorN's absolute margin over DECOR at one place over another."""
        sign = 1.0 if self.panel.lower_is_better else -1.0
        margins = [
            _subtract(self._values(DECOR_PAPER, x), self._values(CORN_PAPER, x), sign)
            for x in (better, other)
        ]
        # The same seeds run at both places, so that margins are paired as well.
        lead = _subtract(margins[0], margins[1], 1.0)
        return Difference(better, float(np.mean(lead)), self._half_width(lead, 1))

    def _values(self, method: MethodSpec, x: float) -> tuple[float, ...]:
        # A loss that is not finite counts as a breakdown.
        values = self.points[method.name, x].values
        return values if all(map(math.isfinite, values)) else ()

    def _half_width(self, gaps: tuple[float, ...], comparisons: int) -> float:
        # One value of a random quantity bounds nothing.
        if self.panel.is_random and len(gaps) < 2:
            return math.inf
        return confidence_half_width(gaps, confidence=1 - 0.05 / comparisons)


def _subtract(
    first: tuple[float, ...], second: tuple[float, ...], unit: float
) -> tuple[float, ...]:
    """Return differences seed by seed in multiples of ``unit``, or of means if counts differ."""
    if len(first) != len(second):
        # Without pairs there is one difference, which ``_half_width`` treats as a single seed.
        return (float(np.mean(first) - np.mean(second)) / unit,)
    return tuple((a - b) / unit for a, b in zip(first, second, strict=True))
