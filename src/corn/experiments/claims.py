"""What is said about the results, checked against them: holds, does not hold, or undecided.

A comparison at one place is the mean over seeds of the paired difference (runs of one seed share
batches and noise) with its 95 % confidence interval, widened for the number of places compared
(Bonferroni). A statement about every place **does not hold** if one interval lies wholly on the
wrong side; it **holds** if every interval stays on the right side, or within 1 % of it; otherwise,
and wherever a single seed is all there is, it is **undecided**. Designs are exact: no interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

from corn.experiments.comparison import ROUNDING, TOLERATED, Difference, Lines
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
    MethodSpec,
)
from corn.experiments.scale import Scale
from corn.experiments.studies import Panel, Point
from corn.privacy import ACCOUNTANTS, gaussian

Source: TypeAlias = Literal["paper", "expected", "corn"]
Verdict: TypeAlias = Literal["holds", "does not hold", "undecided"]

_NEAR = 0.05
_SPARSE = 0.4
_ALWAYS_CHECKED = (30.0, 40.0)
"""Values of ε beyond what the paper's proof covers."""


@dataclass(frozen=True)
class Claim:
    """A statement, where it was looked at, and what was found.

    Attributes:
        source: ``paper``; ``expected``, what a reader of its figures would expect though its text
            does not say so; ``corn``, what this project adds.
        panel: the panel's name.
        statement: what is claimed.
        verdict: whether it holds there.
        evidence: the numbers.
    """

    source: Source
    panel: str
    statement: str
    verdict: Verdict
    evidence: str


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


def check_privacy(scale: Scale) -> list[Claim]:
    """Whether the paper's constant keeps the ε it promises, for every ε of the scale and beyond."""
    return [_check_constant(scale, eps) for eps in sorted({*scale.epsilons, *_ALWAYS_CHECKED})]


def find_broken_promises(scale: Scale) -> list[float]:
    """The ε of the scale that the paper's constant does not keep."""
    return [epsilon for epsilon in scale.epsilons if _paper_epsilon(epsilon, scale) > epsilon]


def _paper_epsilon(epsilon: float, scale: Scale) -> float:
    """The exact ε of the noise that eq. (13b) asks for."""
    return gaussian.epsilon_from(ACCOUNTANTS["paper"].mu_from(epsilon, scale.delta), scale.delta)


def _check_constant(scale: Scale, epsilon: float) -> Claim:
    spent = _paper_epsilon(epsilon, scale)
    needed = gaussian.mu_from(epsilon, scale.delta)
    waste = (needed / ACCOUNTANTS["paper"].mu_from(epsilon, scale.delta)) ** 2
    return Claim(
        "paper",
        "accounting",
        f"the noise of eq. (13b) keeps ε = {epsilon:g} at δ = {scale.delta:g}, unit: agent",
        "holds" if spent <= epsilon else "does not hold",
        f"its exact ε is {spent:.4g}; it adds {waste:.3g} × the noise variance that is needed",
    )


def _check_paper(lines: Lines) -> list[Claim | None]:
    if not lines.panel.in_paper:
        return []
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
    """Exact accounting adds less noise, wherever the paper's constant keeps its promise."""
    broken = find_broken_promises(scale) if lines.panel.figure.endswith("a") else []
    kept = {key: point for key, point in lines.points.items() if point.x not in broken}
    where = "everywhere"
    if broken:
        where = f"but for ε = {', '.join(f'{x:g}' for x in broken)}, which eq. (13b) does not keep"
    return _check_order(Lines(lines.panel, kept), CORN_ONE_STEP, CORN_PAPER, "corn", where=where)


def _check_order(
    lines: Lines,
    better: MethodSpec,
    worse: MethodSpec,
    source: Source,
    *,
    where: str = "everywhere",
) -> Claim | None:
    """Whether one method is at least as good as the other at every place."""
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
    """A verdict on "nowhere worse"."""
    if any(difference.is_surely_worse for difference in differences):
        return "does not hold"
    if all(difference.is_surely_no_worse for difference in differences):
        return "holds"
    return "undecided"


def _describe_order(
    lines: Lines, differences: Sequence[Difference], better: MethodSpec, worse: MethodSpec
) -> str:
    finite = [d for d in differences if math.isfinite(d.mean)]
    parts = []
    if finite:
        ratios = [lines.mean(better, d.x) / lines.mean(worse, d.x) for d in finite]
        parts.append(f"ratio {min(ratios):.3g} to {max(ratios):.3g} at {_count(finite, 'place')}")
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
        if d.mean > ROUNDING
    ]
    if any(math.isinf(d.half_width) for d in differences):
        parts.append("one seed")
    return "; ".join(parts)


def _check_trend(lines: Lines) -> list[Claim]:
    """Whether every method of the paper gets better along the axis; n is not such an axis.

    The text says so of the correlated ones only.
    """
    if lines.panel.figure == "fig1c":
        return []
    axis = "ε" if lines.panel.figure.endswith("a") else "p"
    return [
        _check_improvement(lines, method, axis)
        for method in PAPER_METHODS
        if len(lines.places(method)) > 1
    ]


def _check_improvement(lines: Lines, method: MethodSpec, axis: str) -> Claim:
    """Better at the end than at the beginning by over 1 %, and surely worse at no step."""
    places = lines.places(method)
    steps = [
        lines.excess((method, right), (method, left), comparisons=len(places))
        for left, right in pairwise(places)
    ]
    whole = lines.excess((method, places[-1]), (method, places[0]))
    verdict: Verdict = "undecided"
    if whole.mean + whole.half_width < -TOLERATED:
        verdict = "holds"
    elif whole.mean - whole.half_width > -TOLERATED:
        verdict = "does not hold"
    worse = [step.x for step in steps if step.is_surely_worse]
    path = " → ".join(f"{lines.mean(method, x):.3g}" for x in places)
    return Claim(
        "expected" if method == LDP_PAPER else "paper",
        lines.panel.name,
        f"{method.label} improves with {axis}, by over {TOLERATED:.0%} in all",
        "does not hold" if worse else verdict,
        path
        + (f"; worse at {axis} = {_list(worse)}" if worse else "")
        + ("; one seed" if math.isinf(whole.half_width) else ""),
    )


def _check_sparse(lines: Lines) -> list[Claim]:
    """Near equality of CorN and DECOR at p = 1, and the largest margin where p ≤ 0.4."""
    if not lines.panel.figure.endswith("b"):
        return []
    places = [
        x
        for x in lines.places(CORN_PAPER, DECOR_PAPER)
        if math.isfinite(lines.mean(CORN_PAPER, x) + lines.mean(DECOR_PAPER, x))
    ]
    claims = [_check_equality(lines)] if 1.0 in places else []
    if places and places[0] <= _SPARSE < places[-1]:
        claims.append(_check_margin(lines, places))
    return claims


def _check_equality(lines: Lines) -> Claim:
    difference = lines.excess((CORN_PAPER, 1.0), (DECOR_PAPER, 1.0))
    verdict: Verdict = "undecided"
    if abs(difference.mean) + difference.half_width <= _NEAR:
        verdict = "holds"
    elif abs(difference.mean) - difference.half_width > _NEAR:
        verdict = "does not hold"
    return Claim(
        "paper",
        lines.panel.name,
        f"CorN and DECOR are nearly equal at p = 1 (within {_NEAR:.0%})",
        verdict,
        f"CorN {lines.mean(CORN_PAPER, 1.0):.4g}, DECOR {lines.mean(DECOR_PAPER, 1.0):.4g}"
        f"{_describe_interval(difference)}",
    )


def _check_margin(lines: Lines, places: Sequence[float]) -> Claim:
    """The absolute margin; that relative to DECOR is stated beside it."""
    sign = 1 if lines.panel.lower_is_better else -1
    margins = {x: sign * (lines.mean(DECOR_PAPER, x) - lines.mean(CORN_PAPER, x)) for x in places}
    best = max((x for x in places if x <= _SPARSE), key=margins.__getitem__)
    rival = max((x for x in places if x > _SPARSE), key=margins.__getitem__)
    lead = lines.margin_lead(best, rival)
    verdict: Verdict = "undecided"
    if margins[best] <= 0 or lead.mean + lead.half_width < 0:
        verdict = "does not hold"
    elif lead.mean - lead.half_width > 0:
        verdict = "holds"
    listed = ", ".join(
        f"{margins[x]:.3g} ({margins[x] / abs(lines.mean(DECOR_PAPER, x)):.0%}) at p = {x:g}"
        for x in places
    )
    return Claim(
        "paper",
        lines.panel.name,
        f"CorN's absolute margin over DECOR is largest where p ≤ {_SPARSE:g}",
        verdict,
        f"margins {listed}" + ("; one seed" if math.isinf(lead.half_width) else ""),
    )


def _check_groups(lines: Lines) -> Claim | None:
    """Figure 2: from one seed for all to a seed for each agent, which is LDP."""
    places = lines.places(CORN_PAPER, LDP_PAPER)
    if len(places) < 2:
        return None
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
        _judge(steps) if abs(last / independent - 1) <= ROUNDING else "does not hold",
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
