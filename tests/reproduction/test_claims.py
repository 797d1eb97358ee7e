"""Verdicts on claims: true ones hold, inverted ones do not, noisy ones are undecided."""

import math

import numpy as np
import pytest

from reproduction.claims import Claim, check_claims, check_panel, check_privacy
from reproduction.figures import Panel, Point
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
    Mechanism,
)
from reproduction.scale import FULL, QUICK

AGAINST_P = Panel("fig4b", "fig4b", "", "p", "test loss", is_random=True)
AGAINST_EPSILON = Panel("fig4a", "fig4a", "", "ε", "test loss", is_random=True)
NOISE = Panel("fig1a", "fig1a", "", "ε", "noise")

# The sparser, the further apart; equal on the complete graph: what the paper describes.
LOSSES = {
    LDP_PAPER: {0.2: 9.0, 0.6: 8.0, 1.0: 7.0},
    DECOR_PAPER: {0.2: 8.0, 0.6: 5.0, 1.0: 3.0},
    CORN_PAPER: {0.2: 5.0, 0.6: 4.0, 1.0: 3.0},
    LDP: {0.2: 7.0, 0.6: 6.0, 1.0: 5.0},
    CORN_ONE_STEP: {0.2: 4.0, 0.6: 3.0, 1.0: 2.5},
    DECOR: {0.2: 3.5, 0.6: 2.8, 1.0: 2.0},
    CORN: {0.2: 3.0, 0.6: 2.5, 1.0: 2.0},
    CORN_DEFAULTS: {0.2: 2.0, 0.6: 1.5, 1.0: 1.2},
    CORN_TWO_INSIDERS: {0.2: 3.2, 0.6: 2.6, 1.0: 2.1},
    CENTRAL: {0.2: 1.0, 0.6: 1.0, 1.0: 1.0},
}
SPREAD = (-0.01, 0.0, 0.01)


def make_points(
    means: dict[Mechanism, dict[float, float]], spread: tuple[float, ...] = SPREAD
) -> list[Point]:
    return [
        Point(mechanism, x, tuple(mean + offset for offset in spread))
        for mechanism, places in means.items()
        for x, mean in places.items()
    ]


def invert(means: dict[Mechanism, dict[float, float]]) -> dict[Mechanism, dict[float, float]]:
    """Reverse every order: the best becomes the worst, along both axes."""
    return {
        mechanism: {x: 10.0 - mean for x, mean in places.items()}
        for mechanism, places in means.items()
    }


def find(claims: list[Claim], statement: str) -> Claim:
    return next(claim for claim in claims if statement in claim.statement)


def test_every_claim_holds_on_data_as_the_paper_describes() -> None:
    claims = check_panel(AGAINST_P, make_points(LOSSES), QUICK)
    assert {claim.verdict for claim in claims} == {"holds"}
    assert len(claims) == 15


def test_no_claim_holds_on_inverted_data() -> None:
    claims = check_panel(AGAINST_P, make_points(invert(LOSSES)), QUICK)
    # Equality on the complete graph is the same both ways round.
    verdicts = {c.statement: c.verdict for c in claims if "nearly equal" not in c.statement}
    assert set(verdicts.values()) == {"does not hold"}
    order = find(claims, "CorN (paper) ≤ DECOR (paper)")
    assert "at 0.2 5 against 2" in order.evidence


def test_a_higher_accuracy_is_better() -> None:
    accuracy = Panel("fig5b", "fig5b", "", "p", "accuracy", lower_is_better=False, is_random=True)
    claims = check_panel(accuracy, make_points(invert(LOSSES)), QUICK)
    assert {claim.verdict for claim in claims} == {"holds"}
    assert find(claims, "CorN (paper) ≥ DECOR (paper)")


@pytest.mark.parametrize("corn", [(1.0, 2.2, 3.0), (1.0, 2.0, 1.4)])
def test_either_order_within_the_interval_is_undecided(corn: tuple[float, ...]) -> None:
    points = [Point(CORN_PAPER, 1.0, corn), Point(DECOR_PAPER, 1.0, (2.0, 1.0, 3.0))]
    claim = find(check_panel(AGAINST_EPSILON, points, QUICK), "CorN (paper) ≤ DECOR")
    assert claim.verdict == "undecided"


@pytest.mark.parametrize("corn", [0.5, 2.0])
def test_one_seed_leaves_every_claim_undecided(corn: float) -> None:
    points = [Point(CORN_PAPER, 1.0, (corn,)), Point(DECOR_PAPER, 1.0, (1.0,))]
    claim = find(check_panel(AGAINST_EPSILON, points, QUICK), "CorN (paper) ≤ DECOR")
    assert claim.verdict == "undecided"
    assert "one seed" in claim.evidence
    everything = check_panel(AGAINST_P, make_points(LOSSES, (0.0,)), QUICK)
    assert {claim.verdict for claim in everything} == {"undecided"}


def test_claims_about_equal_methods_are_rarely_rejected_at_many_places() -> None:
    generator = np.random.default_rng(0)
    rejected = 0
    for _ in range(200):
        points = [
            Point(mechanism, float(x), tuple(generator.normal(5, 1, 10)))
            for mechanism in (CORN_PAPER, DECOR_PAPER)
            for x in range(1, 10)
        ]
        claim = find(check_panel(AGAINST_EPSILON, points, QUICK), "CorN (paper) ≤ DECOR")
        rejected += claim.verdict == "does not hold"
    # One-sided 2.5 % for all places together: five expected of 200.
    assert rejected <= 14


def test_a_method_that_broke_down_is_worse() -> None:
    points = [Point(DECOR_PAPER, 3.0, (1.0, 1.1)), Point(CORN_PAPER, 3.0, ())]
    claim = find(check_panel(AGAINST_EPSILON, points, QUICK), "CorN (paper) ≤ DECOR")
    assert claim.verdict == "does not hold"
    assert "CorN (paper) broke down at 3" in claim.evidence
    points = [Point(DECOR_PAPER, 3.0, ()), Point(CORN_PAPER, 3.0, (1.0, 1.1))]
    claim = find(check_panel(AGAINST_EPSILON, points, QUICK), "CorN (paper) ≤ DECOR")
    assert claim.verdict == "holds"
    assert "DECOR (paper) broke down at 3" in claim.evidence
    not_a_number = [Point(DECOR_PAPER, 3.0, (1.0,)), Point(CORN_PAPER, 3.0, (math.nan,))]
    claim = find(check_panel(NOISE, not_a_number, QUICK), "CorN (paper) ≤ DECOR")
    assert claim.verdict == "does not hold"


def test_a_breakdown_that_another_step_size_might_avoid_is_undecided() -> None:
    values = (1.0, 1.1)
    for ours, theirs in (((), values), (values, ()), ((), ())):
        points = [
            Point(DECOR_PAPER, 3.0, theirs, is_open=not theirs),
            Point(CORN_PAPER, 3.0, ours, is_open=not ours),
        ]
        claim = find(check_panel(AGAINST_EPSILON, points, QUICK), "CorN (paper) ≤ DECOR")
        assert claim.verdict == "undecided"
        assert "broke down at 3" in claim.evidence


def test_exact_values_decide_without_seeds() -> None:
    points = [Point(CORN_PAPER, 1.0, (2.0,)), Point(DECOR_PAPER, 1.0, (1.0,))]
    claim = find(check_panel(NOISE, points, QUICK), "CorN (paper) ≤ DECOR")
    assert claim.verdict == "does not hold"


def test_paired_seeds_decide_what_unpaired_ones_could_not() -> None:
    shared = (0.0, 10.0, 20.0)
    points = [
        Point(CORN_PAPER, 1.0, tuple(luck + 1 for luck in shared)),
        Point(DECOR_PAPER, 1.0, shared),
    ]
    claim = find(check_panel(AGAINST_EPSILON, points, QUICK), "CorN (paper) ≤ DECOR")
    assert claim.verdict == "does not hold"


@pytest.mark.parametrize(
    ("changed", "statement"),
    [
        # A flat line, margins that are largest on a dense graph or of the wrong sign, and unequal
        # values on the complete graph.
        ({LDP_PAPER: {0.2: 2.0, 1.0: 1.999}}, "LDP (paper) improves"),
        ({DECOR_PAPER: {0.2: 5.1, 0.6: 9.0, 1.0: 3.0}}, "margin"),
        ({CORN_PAPER: {0.2: 8.1, 0.6: 7.0, 1.0: 4.0}}, "margin"),
        ({DECOR_PAPER: {0.2: 8.0, 0.6: 5.0, 1.0: 4.0}}, "nearly equal"),
    ],
)
def test_one_line_that_differs_refutes_its_claim(
    changed: dict[Mechanism, dict[float, float]], statement: str
) -> None:
    claim = find(check_panel(AGAINST_P, make_points(LOSSES | changed), QUICK), statement)
    assert claim.verdict == "does not hold"


@pytest.mark.parametrize("last", [7.0, 6.0])
def test_one_seed_group_per_agent_must_equal_ldp(last: float) -> None:
    panel = Panel("fig2", "fig2", "", "m", "noise")
    values: dict[Mechanism, dict[float, float]] = {
        CORN_PAPER: {1.0: 3.0, 2.0: 5.0, 3.0: last},
        LDP_PAPER: dict.fromkeys((1.0, 2.0, 3.0), 7.0),
    }
    (claim,) = check_panel(panel, make_points(values, (0.0,)), QUICK)
    assert claim.verdict == ("holds" if last == 7.0 else "does not hold")


def test_the_papers_constant_fails_at_epsilon_forty_only() -> None:
    claims = check_privacy(FULL)
    assert [claim.verdict for claim in claims] == ["holds"] * 8 + ["does not hold"]
    assert "keeps ε = 40" in check_privacy(QUICK)[-1].statement
    assert "27.93" in claims[-2].evidence
    assert "41.77" in claims[-1].evidence


def test_places_where_the_paper_adds_too_little_noise_are_not_compared() -> None:
    """At ε = 40 the paper's constant adds less noise than its ε needs."""
    points = [
        Point(mechanism, x, (value,))
        for mechanism, values in ((CORN_PAPER, (4.0, 1.0)), (CORN_ONE_STEP, (2.0, 1.1)))
        for x, value in zip((10.0, 40.0), values, strict=True)
    ]
    claims = check_claims([(NOISE, points)], FULL)
    claim = find(claims, "CorN, one step ≤ CorN (paper)")
    assert claim.verdict == "holds"
    assert "at 1 place" in claim.evidence
    assert "but for ε = 40" in claim.statement
