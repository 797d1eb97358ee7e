"""Claims about the results, each with a verdict: holds, does not hold, or undecided.

A comparison at one place is the mean over seeds of the paired difference (runs of one seed share
batches and noise) with its 95 % confidence interval, widened for the number of places compared
(Bonferroni). A claim about every place **does not hold** if one interval lies entirely on the wrong
side of zero. It **holds** if every interval is on the right side, or within 1 % of it. Otherwise,
and if there is a single seed only, it is **undecided**. Designs are exact and have no interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np

from corn.privacy import ACCOUNTANTS, gaussian
from corn.privacy.rounding import round_up, write_exactly
from reproduction.figures import Panel, Point, confidence_half_width
from reproduction.mechanisms import (
    CENTRAL,
    CORN,
    CORN_DEFAULTS,
    CORN_ONE_STEP,
    CORN_PAPER,
    CORN_TWO_INSIDERS,
    DECOR,
    DECOR_PAPER,
    LDP,
    LDP_PAPER,
    PAPER_MECHANISMS,
    Mechanism,
)
from reproduction.scale import Scale

Source: TypeAlias = Literal["paper", "expected", "corn"]
Verdict: TypeAlias = Literal["holds", "does not hold", "undecided"]

_ROUNDING = 1e-6
"""The relative gap to which designs are solved: a smaller difference means nothing."""

_TOLERATED = 0.01
"""The relative difference up to which two values count as equal."""

_NEAR = 0.05
"""The relative difference up to which the paper's "nearly equal" is taken to hold."""

_SPARSE = 0.4
"""The connectivity up to which the paper's "sparse" is taken to hold."""

_ALWAYS_CHECKED = (30.0, 40.0)
"""Values of ε beyond the range that the paper's proof covers."""


@dataclass(frozen=True)
class Claim:
    """A statement about one panel, and whether it holds.

    Attributes:
        source: ``paper`` for the paper's text; ``expected`` for what a reader of its figures would
            expect, although the text does not state it; ``corn`` for this project's own claims.
        panel: the panel's name.
        statement: the statement.
        verdict: whether it holds in this panel.
        evidence: the numbers behind the verdict.
    """

    source: Source
    panel: str
    statement: str
    verdict: Verdict
    evidence: str


def check_claims(panels: Sequence[tuple[Panel, Sequence[Point]]], scale: Scale) -> list[Claim]:
    """Return a verdict on every claim that these panels can decide."""
    claims = [claim for panel, points in panels for claim in check_panel(panel, points, scale)]
    return [*claims, *check_privacy(scale)]


def check_panel(panel: Panel, points: Sequence[Point], scale: Scale) -> list[Claim]:
    """Return the claims about one panel: those of the paper, then those of this project."""
    lines = Lines.of(panel, points)
    claims = [*_check_paper(lines), _check_exact_accounting(lines, scale)]
    # Noise after one mixing step is not the objective of designs for accumulated noise.
    if panel.is_random or not panel.in_paper:
        claims += [
            _check_order(lines, CORN, CORN_ONE_STEP, "corn"),
            _check_order(lines, CORN, DECOR, "corn"),
            _check_order(lines, CORN_TWO_INSIDERS, LDP, "corn"),
            _check_order(lines, CENTRAL, CORN, "corn"),
            _check_order(lines, CORN_DEFAULTS, CORN, "corn"),
            _check_order(lines, CENTRAL, CORN_DEFAULTS, "corn"),
        ]
    return [claim for claim in claims if claim is not None]


def check_privacy(scale: Scale) -> list[Claim]:
    """Return whether the noise of the paper's constant keeps ε, for every ε of the scale."""
    return [_check_constant(scale, eps) for eps in sorted({*scale.epsilons, *_ALWAYS_CHECKED})]


def find_broken_promises(scale: Scale) -> list[float]:
    """Return the ε of the scale that the noise of the paper's constant does not keep."""
    return [epsilon for epsilon in scale.epsilons if _paper_epsilon(epsilon, scale) > epsilon]


def _paper_epsilon(epsilon: float, scale: Scale) -> float:
    """Return the exact ε of the noise that eq. (13b) requires."""
    # Eq. (13b) fixes the noise, and so μ. The exact ε of that μ is what the noise really spends.
    return gaussian.epsilon_from(ACCOUNTANTS["paper"].mu_from(epsilon, scale.delta), scale.delta)


def _check_constant(scale: Scale, epsilon: float) -> Claim:
    spent = _paper_epsilon(epsilon, scale)
    # Noise variance is proportional to 1 / μ².
    needed = gaussian.mu_from(epsilon, scale.delta)
    waste = (needed / ACCOUNTANTS["paper"].mu_from(epsilon, scale.delta)) ** 2
    return Claim(
        "paper",
        "accounting",
        f"the noise of eq. (13b) keeps ε = {write_exactly(epsilon)} at δ = "
        f"{write_exactly(scale.delta)}, unit: agent",
        "holds" if spent <= epsilon else "does not hold",
        f"its exact ε is {round_up(spent, 4)}; it adds {waste:.3g} × the noise variance that "
        "is needed",
    )


def _check_paper(lines: Lines) -> list[Claim | None]:
    if not lines.panel.in_paper:
        return []
    # Figure 2 varies the seed groups of CorN: its claim is about growth, not an order.
    if lines.panel.figure == "fig2":
        return [_check_groups(lines)]
    return [
        _check_order(lines, CORN_PAPER, DECOR_PAPER, "paper"),
        _check_order(lines, DECOR_PAPER, LDP_PAPER, "paper"),
        _check_order(lines, CORN_PAPER, LDP_PAPER, "paper"),
        *_check_trend(lines),
        *_check_sparse(lines),
    ]


def _check_exact_accounting(lines: Lines, scale: Scale) -> Claim | None:
    """Return whether exact accounting is at least as good where the paper's constant keeps ε.

    Where it does not keep ε, it adds less noise than its budget needs, and wins for that reason.
    """
    # In other panels x is not an ε.
    broken = find_broken_promises(scale) if lines.panel.figure.endswith("a") else []
    kept = {key: point for key, point in lines.points.items() if point.x not in broken}
    where = "everywhere"
    if broken:
        where = (
            f"but for ε = {', '.join(map(write_exactly, broken))}, which eq. (13b) does not keep"
        )
    return _check_order(Lines(lines.panel, kept), CORN_ONE_STEP, CORN_PAPER, "corn", where=where)


def _check_order(
    lines: Lines,
    better: Mechanism,
    worse: Mechanism,
    source: Source,
    *,
    where: str = "everywhere",
) -> Claim | None:
    """Return whether one mechanism is at least as good as another at every place."""
    # A reproduction of some lines may lack one of the two: then there is no claim.
    places = lines.places(better, worse)
    if not places:
        return None
    differences = [lines.excess((better, x), (worse, x), comparisons=len(places)) for x in places]
    relation = "≤" if lines.panel.lower_is_better else "≥"
    return Claim(
        source,
        lines.panel.name,
        f"{better.label} {relation} {worse.label} {where}",
        _judge(differences),
        _describe_order(lines, differences, better, worse),
    )


def _judge(differences: Sequence[Difference]) -> Verdict:
    """Return the verdict on "nowhere worse"."""
    # One certain exception refutes “everywhere”; to confirm it, every place must be certain.
    return _decide(
        holds=all(difference.is_surely_no_worse for difference in differences),
        fails=any(difference.is_surely_worse for difference in differences),
    )


def _decide(*, holds: bool, fails: bool) -> Verdict:
    """Return the verdict of two certain findings; a counterexample comes first."""
    return "does not hold" if fails else "holds" if holds else "undecided"


def _describe_order(
    lines: Lines, differences: Sequence[Difference], better: Mechanism, worse: Mechanism
) -> str:
    finite = [d for d in differences if math.isfinite(d.mean)]
    parts = []
    if finite:
        ratios = [lines.mean(better, d.x) / lines.mean(worse, d.x) for d in finite]
        parts.append(f"ratio {min(ratios):.3g} to {max(ratios):.3g} at {_count(finite, 'place')}")
        # Equal to three digits, as the evidence prints them.
        equal = [d for d, ratio in zip(finite, ratios, strict=True) if abs(ratio - 1) < 1e-3]
        if equal:
            parts.append(f"equal at {_list(d.x for d in equal)}")
    parts += [
        f"{(better if d.mean > 0 else worse).label} broke down at {d.x:g}"
        for d in differences
        if not math.isfinite(d.mean)
    ]
    parts += [
        f"at {d.x:g} {lines.mean(better, d.x):.4g} against {lines.mean(worse, d.x):.4g}"
        f"{_describe_interval(d)}"
        for d in finite
        if d.mean > _ROUNDING
    ]
    if any(math.isinf(d.half_width) for d in differences):
        parts.append("one seed")
    return "; ".join(parts)


def _check_trend(lines: Lines) -> list[Claim]:
    """Return whether each mechanism of the paper improves along the axis ε or p."""
    # No trend is claimed along the number of agents.
    if lines.panel.figure == "fig1c":
        return []
    axis = "ε" if lines.panel.figure.endswith("a") else "p"
    return [
        _check_improvement(lines, mechanism, axis)
        for mechanism in PAPER_MECHANISMS
        if len(lines.places(mechanism)) > 1
    ]


def _check_improvement(lines: Lines, mechanism: Mechanism, axis: str) -> Claim:
    """Return whether a mechanism is over 1 % better at the end, and at no step certainly worse."""
    places = lines.places(mechanism)
    steps = [
        lines.excess((mechanism, right), (mechanism, left), comparisons=len(places))
        for left, right in pairwise(places)
    ]
    # From the first place to the last is a single comparison: no Bonferroni correction.
    whole = lines.excess((mechanism, places[-1]), (mechanism, places[0]))
    improves = whole.mean + whole.half_width < -_TOLERATED
    stays = whole.mean - whole.half_width > -_TOLERATED
    worse = [step.x for step in steps if step.is_surely_worse]
    path = " → ".join(f"{lines.mean(mechanism, x):.3g}" for x in places)
    return Claim(
        # The paper's text states it of the correlated mechanisms only.
        "expected" if mechanism == LDP_PAPER else "paper",
        lines.panel.name,
        f"{mechanism.label} improves with {axis}, by over {_TOLERATED:.0%} in all",
        _decide(holds=improves, fails=stays or bool(worse)),
        path
        + (f"; worse at {axis} = {_list(worse)}" if worse else "")
        + ("; one seed" if math.isinf(whole.half_width) else ""),
    )


def _check_sparse(lines: Lines) -> list[Claim]:
    """Return whether CorN and DECOR are nearly equal at p = 1 and furthest apart at p ≤ 0.4."""
    if not lines.panel.figure.endswith("b"):
        return []
    places = [
        x
        for x in lines.places(CORN_PAPER, DECOR_PAPER)
        if math.isfinite(lines.mean(CORN_PAPER, x) + lines.mean(DECOR_PAPER, x))
    ]
    claims = [_check_equality(lines)] if 1.0 in places else []
    # A comparison of sparse and dense graphs needs at least one of each.
    if places and places[0] <= _SPARSE < places[-1]:
        claims.append(_check_margin(lines, places))
    return claims


def _check_equality(lines: Lines) -> Claim:
    difference = lines.excess((CORN_PAPER, 1.0), (DECOR_PAPER, 1.0))
    distance, half_width = abs(difference.mean), difference.half_width
    return Claim(
        "paper",
        lines.panel.name,
        f"CorN and DECOR are nearly equal at p = 1 (within {_NEAR:.0%})",
        # The whole interval inside ±5 % is equality; the whole interval outside is a difference.
        _decide(holds=distance + half_width <= _NEAR, fails=distance - half_width > _NEAR),
        f"CorN {lines.mean(CORN_PAPER, 1.0):.4g}, DECOR {lines.mean(DECOR_PAPER, 1.0):.4g}"
        f"{_describe_interval(difference)}",
    )


def _check_margin(lines: Lines, places: Sequence[float]) -> Claim:
    """Return whether the absolute margin is largest on sparse graphs; evidence has the relative."""
    sign = 1 if lines.panel.lower_is_better else -1
    margins = {x: sign * (lines.mean(DECOR_PAPER, x) - lines.mean(CORN_PAPER, x)) for x in places}
    # The largest margin of sparse graphs against the largest of dense ones.
    best = max((x for x in places if x <= _SPARSE), key=margins.__getitem__)
    rival = max((x for x in places if x > _SPARSE), key=margins.__getitem__)
    lead = lines.margin_lead(best, rival)
    fails = margins[best] <= 0 or lead.mean + lead.half_width < 0
    listed = ", ".join(
        f"{margins[x]:.3g} ({margins[x] / abs(lines.mean(DECOR_PAPER, x)):.0%}) at p = {x:g}"
        for x in places
    )
    return Claim(
        "paper",
        lines.panel.name,
        f"CorN's absolute margin over DECOR is largest where p ≤ {_SPARSE:g}",
        _decide(holds=lead.mean - lead.half_width > 0, fails=fails),
        f"margins {listed}" + ("; one seed" if math.isinf(lead.half_width) else ""),
    )


def _check_groups(lines: Lines) -> Claim | None:
    """Return whether noise grows from one seed group to one per agent, which is LDP."""
    places = lines.places(CORN_PAPER, LDP_PAPER)
    if len(places) < 2:
        return None
    # Fewer groups first: where their noise is less than their right neighbour's, the excess is
    # negative.
    steps = [
        lines.excess((CORN_PAPER, left), (CORN_PAPER, right)) for left, right in pairwise(places)
    ]
    first, last = (lines.mean(CORN_PAPER, x) for x in (places[0], places[-1]))
    independent = lines.mean(LDP_PAPER, places[-1])
    fewer = [step.x for step in steps if step.is_surely_worse]
    return Claim(
        "expected",
        lines.panel.name,
        "noise grows with the number of seed groups, and is LDP's at one group per agent",
        # A group of one agent shares nothing: CorN must equal LDP up to the solver's gap.
        _judge(steps) if abs(last / independent - 1) <= _ROUNDING else "does not hold",
        f"{first:.4g} at m = {places[0]:g}, {last:.4g} at m = {places[-1]:g} "
        f"(LDP {independent:.4g})" + (f"; falls after m = {_list(fewer)}" if fewer else ""),
    )


def _describe_interval(difference: Difference) -> str:
    if difference.half_width == 0 or math.isinf(difference.half_width):
        return ""
    return f" ({difference.mean:+.2%} ± {difference.half_width:.2%})"


def _list(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items)} {noun}" + ("" if len(items) == 1 else "s")


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
        return self.mean - self.half_width > _ROUNDING

    @property
    def is_surely_no_worse(self) -> bool:
        """Whether the whole interval is on the right side of zero, up to ``_TOLERATED``."""
        return self.mean + self.half_width <= _TOLERATED


@dataclass(frozen=True)
class Lines:
    """The points of a panel by mechanism and place."""

    panel: Panel
    points: Mapping[tuple[str, float], Point]

    @classmethod
    def of(cls, panel: Panel, points: Iterable[Point]) -> Lines:
        """Return the points of a panel, indexed."""
        return cls(panel, {(point.mechanism.name, point.x): point for point in points})

    def places(self, *mechanisms: Mechanism) -> list[float]:
        """Return the places that all of these mechanisms have, in order."""
        found = [{x for name, x in self.points if name == one.name} for one in mechanisms]
        return sorted(set.intersection(*found))

    def mean(self, mechanism: Mechanism, x: float) -> float:
        """Return the mean of a mechanism at a place; NaN if every run broke down."""
        return self.points[mechanism.name, x].mean

    def excess(
        self,
        first: tuple[Mechanism, float],
        second: tuple[Mechanism, float],
        *,
        comparisons: int = 1,
    ) -> Difference:
        """Return the excess of the first over the second, paired by seed.

        ``comparisons`` widens the interval for the number of comparisons made (Bonferroni). A
        mechanism that broke down is infinitely worse than one that did not. That is certain unless
        another step size, which did not run, might have done better.
        """
        a, b = (self._values(*place) for place in (first, second))
        if not a or not b:
            # Another step size might have survived, unless all of them ran at all seeds.
            is_open = any(self.points[one.name, x].is_open for one, x in (first, second))
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

    def _values(self, mechanism: Mechanism, x: float) -> tuple[float, ...]:
        # A loss that is not finite counts as a breakdown.
        values = self.points[mechanism.name, x].values
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
