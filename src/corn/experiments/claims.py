"""What is said about the results, checked against them: holds, does not hold, or undecided.

A comparison at one place is the mean over seeds of the paired difference (runs of one seed share
batches and noise), with its 95 % confidence interval. A statement about every place **holds** if no
mean contradicts it, **does not hold** if one contradicts it by more than its interval, and is
**undecided** in between, or where a single seed contradicts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np

from corn.experiments.methods import (
    CENTRAL,
    CORN,
    CORN_ONE_STEP,
    CORN_PAPER,
    CORN_TWO_INSIDERS,
    DECOR,
    DECOR_PAPER,
    LDP,
    LDP_PAPER,
    PAPER_METHODS,
    Method,
)
from corn.experiments.scale import Scale
from corn.experiments.studies import Panel, Point, confidence_half_width
from corn.privacy import gaussian, paper

Verdict: TypeAlias = Literal["holds", "does not hold", "undecided"]

_ROUNDING = 1e-6
"""Designs are solved to this relative gap."""

_NEAR = 0.05
_FLAT = 0.01
_SPARSE = 0.4


@dataclass(frozen=True)
class Claim:
    """A statement, where it was looked at, and what was found.

    Attributes:
        source: ``paper``, or ``corn`` for what this project adds.
        panel: the panel's name.
        statement: what is claimed.
        verdict: whether it holds there.
        evidence: the numbers.
    """

    source: Literal["paper", "corn"]
    panel: str
    statement: str
    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class Difference:
    """How much worse one is than the other at one place, and the interval's half width."""

    x: float
    mean: float
    half_width: float


@dataclass(frozen=True)
class Lines:
    """The points of a panel by method and place."""

    panel: Panel
    points: Mapping[tuple[str, float], Point]

    @classmethod
    def of(cls, panel: Panel, points: Iterable[Point]) -> Lines:
        """Index points."""
        return cls(panel, {(point.method.name, point.x): point for point in points})

    def places(self, *methods: Method) -> list[float]:
        """Where all of these methods have a point, in order."""
        found = [{x for name, x in self.points if name == method.name} for method in methods]
        return sorted(set.intersection(*found)) if found else []

    def mean(self, method: Method, x: float) -> float:
        """The mean of a method at a place."""
        return self.points[method.name, x].mean

    def excess(self, first: tuple[Method, float], second: tuple[Method, float]) -> Difference:
        """How much worse the first is than the second, paired by seed."""
        sign = 1 if self.panel.lower_is_better else -1
        a, b = (self.points[method.name, x].values for method, x in (first, second))
        if len(a) != len(b):
            return Difference(first[1], sign * float(np.mean(a) - np.mean(b)), np.inf)
        gaps = tuple(sign * (own - other) for own, other in zip(a, b, strict=True))
        unsure = self.panel.is_random and len(gaps) == 1
        half_width = np.inf if unsure else confidence_half_width(gaps)
        return Difference(first[1], float(np.mean(gaps)), half_width)


def check_claims(panels: Sequence[tuple[Panel, Sequence[Point]]], scale: Scale) -> list[Claim]:
    """Check every statement that the panels at hand can decide."""
    claims = [claim for panel, points in panels for claim in check_panel(panel, points, scale)]
    return [*claims, *check_privacy(scale)]


def check_panel(panel: Panel, points: Sequence[Point], scale: Scale) -> list[Claim]:
    """What the paper says about this panel, then what this project adds to it."""
    lines = Lines.of(panel, points)
    claims = [*_check_paper(lines), _check_exact_accounting(lines, scale)]
    # One mixing step is not what the other designs are made for.
    if panel.is_random or not panel.in_paper:
        claims += [
            _check_order(lines, CORN, CORN_ONE_STEP, "corn"),
            _check_order(lines, CORN, DECOR, "corn"),
            _check_order(lines, CORN_TWO_INSIDERS, LDP, "corn"),
            _check_order(lines, CENTRAL, CORN, "corn"),
        ]
    return [claim for claim in claims if claim is not None]


def _check_paper(lines: Lines) -> list[Claim | None]:
    if not lines.panel.in_paper:
        return []
    if lines.panel.figure == "fig2":
        return [_check_groups(lines)]
    return [
        _check_order(lines, CORN_PAPER, DECOR_PAPER, "paper"),
        _check_order(lines, DECOR_PAPER, LDP_PAPER, "paper"),
        *_check_trend(lines),
        *_check_sparse(lines),
    ]


def _check_exact_accounting(lines: Lines, scale: Scale) -> Claim | None:
    """Exact accounting adds less noise, wherever the paper's constant keeps its promise."""
    unsound = {epsilon for epsilon in scale.epsilons if not _keeps(epsilon, scale.delta)}
    if lines.panel.figure.endswith("a") and unsound:
        kept = {key: point for key, point in lines.points.items() if point.x not in unsound}
        lines = Lines(lines.panel, kept)
    return _check_order(lines, CORN_ONE_STEP, CORN_PAPER, "corn")


def _keeps(epsilon: float, delta: float) -> bool:
    return gaussian.epsilon_from(paper.mu_from(epsilon, delta), delta) <= epsilon


def check_privacy(scale: Scale) -> list[Claim]:
    """Whether the paper's constant keeps the ε it promises, for every ε of the scale."""
    return [_check_constant(scale, epsilon) for epsilon in scale.epsilons]


def _check_constant(scale: Scale, epsilon: float) -> Claim:
    mu = paper.mu_from(epsilon, scale.delta)
    spent = gaussian.epsilon_from(mu, scale.delta)
    waste = (gaussian.mu_from(epsilon, scale.delta) / mu) ** 2
    return Claim(
        "paper",
        "accounting",
        f"the noise of eq. (13b) keeps ε = {epsilon:g} at δ = {scale.delta:g}, unit: agent",
        "holds" if spent <= epsilon else "does not hold",
        f"its exact ε is {spent:.4g}; it adds {waste:.3g} × the noise variance that is needed",
    )


def _check_order(
    lines: Lines, better: Method, worse: Method, source: Literal["paper", "corn"]
) -> Claim | None:
    """Whether one method is at least as good as the other at every place."""
    places = lines.places(better, worse)
    if not places:
        return None
    verdict, where = _judge(
        lines, [lines.excess((better, x), (worse, x)) for x in places], lambda x: (worse, x)
    )
    ratios = [_ratio(lines.mean(better, x), lines.mean(worse, x)) for x in places]
    evidence = f"ratio {min(ratios):.3g} to {max(ratios):.3g} over {len(places)} places"
    relation = "≤" if lines.panel.lower_is_better else "≥"
    return Claim(
        source,
        lines.panel.name,
        f"{better.label} {relation} {worse.label} everywhere",
        verdict,
        evidence + _name_exceptions(lines, where, better, worse),
    )


def _check_trend(lines: Lines) -> list[Claim]:
    """Whether every method of the paper gets better along the axis; n is not such an axis."""
    if lines.panel.figure in ("fig1c", "fig2"):
        return []
    axis = "ε" if lines.panel.figure.endswith("a") else "p"
    return [
        _check_improvement(lines, method, axis)
        for method in PAPER_METHODS
        if len(lines.places(method)) > 1
    ]


def _check_improvement(lines: Lines, method: Method, axis: str) -> Claim:
    places = lines.places(method)
    steps = [lines.excess((method, right), (method, left)) for left, right in pairwise(places)]
    verdict, where = _judge(lines, steps, lambda x: (method, x))
    change = -lines.excess((method, places[-1]), (method, places[0])).mean
    flat = change < _FLAT * abs(lines.mean(method, places[0]))
    worse = ", ".join(f"{difference.x:g}" for difference in where)
    return Claim(
        "paper",
        lines.panel.name,
        f"{method.label} improves with {axis}",
        "does not hold" if flat and verdict == "holds" else verdict,
        " → ".join(f"{lines.mean(method, x):.3g}" for x in places)
        + (f"; worse at {axis} = {worse}" if worse else "; flat" if flat else ""),
    )


def _check_sparse(lines: Lines) -> list[Claim]:
    """Near equality of CorN and DECOR at p = 1, and the largest margin where p ≤ 0.4."""
    if not lines.panel.figure.endswith("b"):
        return []
    places = lines.places(CORN_PAPER, DECOR_PAPER)
    claims = []
    if 1.0 in places:
        claims.append(_check_equality(lines))
    sparse = [x for x in places if x <= _SPARSE]
    dense = [x for x in places if x > _SPARSE]
    if sparse and dense:
        claims.append(_check_margin(lines, sparse, dense))
    return claims


def _check_equality(lines: Lines) -> Claim:
    difference = lines.excess((CORN_PAPER, 1.0), (DECOR_PAPER, 1.0))
    corn, decor = lines.mean(CORN_PAPER, 1.0), lines.mean(DECOR_PAPER, 1.0)
    near = abs(difference.mean) <= _NEAR * abs(decor)
    surely_not = abs(difference.mean) - difference.half_width > _NEAR * abs(decor)
    verdict: Verdict = "holds" if near else "does not hold" if surely_not else "undecided"
    return Claim(
        "paper",
        lines.panel.name,
        f"CorN and DECOR are nearly equal at p = 1 (within {_NEAR:.0%})",
        verdict,
        f"CorN {corn:.4g}, DECOR {decor:.4g}{_describe_interval(difference)}",
    )


def _check_margin(lines: Lines, sparse: Sequence[float], dense: Sequence[float]) -> Claim:
    margins = {x: lines.excess((DECOR_PAPER, x), (CORN_PAPER, x)) for x in (*sparse, *dense)}
    best = max(sparse, key=lambda x: margins[x].mean)
    rival = max(dense, key=lambda x: margins[x].mean)
    lead = margins[best].mean - margins[rival].mean
    doubt = float(np.hypot(margins[best].half_width, margins[rival].half_width))
    verdict: Verdict = "holds" if lead >= 0 else "does not hold" if -lead > doubt else "undecided"
    listed = ", ".join(f"p = {x:g}: {margins[x].mean:.3g}" for x in sorted(margins))
    return Claim(
        "paper",
        lines.panel.name,
        f"CorN's margin over DECOR is largest where p ≤ {_SPARSE:g}",
        verdict,
        f"margins {listed}",
    )


def _check_groups(lines: Lines) -> Claim:
    """Figure 2: from one seed for all to a seed for each agent, which is LDP."""
    places = lines.places(CORN_PAPER, LDP_PAPER)
    first, last = (lines.mean(CORN_PAPER, x) for x in (places[0], places[-1]))
    steps = [
        lines.excess((CORN_PAPER, left), (CORN_PAPER, right)) for left, right in pairwise(places)
    ]
    verdict, where = _judge(lines, steps, lambda x: (CORN_PAPER, x))
    ends_at_ldp = abs(last / lines.mean(LDP_PAPER, places[-1]) - 1) <= _ROUNDING
    fewer = ", ".join(f"{difference.x:g}" for difference in where)
    return Claim(
        "paper",
        lines.panel.name,
        "noise grows with the number of seed groups, and is LDP's at one group per agent",
        verdict if ends_at_ldp else "does not hold",
        f"{first:.4g} at m = 1, {last:.4g} at m = {places[-1]:g} "
        f"(LDP {lines.mean(LDP_PAPER, places[-1]):.4g})"
        + (f"; less at m + 1 than at m = {fewer}" if fewer else ""),
    )


def _judge(
    lines: Lines, excesses: Sequence[Difference], reference: Callable[[float], tuple[Method, float]]
) -> tuple[Verdict, list[Difference]]:
    """A verdict on "no excess is positive", and the places that contradict it."""
    against = [
        difference
        for difference in excesses
        if difference.mean > _ROUNDING * abs(lines.mean(*reference(difference.x)))
    ]
    surely = [difference for difference in against if difference.mean > difference.half_width]
    return ("does not hold" if surely else "undecided" if against else "holds"), against


def _name_exceptions(
    lines: Lines, where: Sequence[Difference], better: Method, worse: Method
) -> str:
    if not where:
        return ""
    named = "; ".join(
        f"at {difference.x:g} {lines.mean(better, difference.x):.4g} against "
        f"{lines.mean(worse, difference.x):.4g}{_describe_interval(difference)}"
        for difference in where
    )
    return f"; not {named}"


def _describe_interval(difference: Difference) -> str:
    if difference.half_width == 0:
        return ""
    if not np.isfinite(difference.half_width):
        return " (one seed)"
    return f" (difference {difference.mean:.2g} ± {difference.half_width:.2g})"


def _ratio(value: float, reference: float) -> float:
    return value / reference if reference else float(np.inf)
