"""Numbers of samples: any that floats allow, and the public width of their batches."""

from fractions import Fraction
from typing import Any

import pytest
from scipy import stats

from corn.errors import InvalidArgumentError
from corn.learn.batches import note_batch_size, public_width, require_fitting_samples
from corn.privacy import PrivacyBudget


def make_budget(**changes: Any) -> PrivacyBudget:
    common = {"epsilon": 1, "delta": 1e-5, "num_steps": 100, "clip": 1.0, "unit": "sample"}
    return PrivacyBudget(**{**common, "batch_size": 16, **changes})


def test_any_number_of_samples_that_the_float_proof_covers_is_accepted() -> None:
    for changes in ({}, {"sampling": "passes"}, {"adjacency": "add-remove"}):
        budget = make_budget(samples_per_agent=100, **changes)
        require_fitting_samples(budget, [1, 99, 100, 1600])
    with pytest.raises(InvalidArgumentError, match="found 2,561 of agent 4: raise the batch size"):
        require_fitting_samples(make_budget(sampling_rate=0.1), [2560, 2561], first=3)


def test_the_public_width_is_exceeded_once_in_a_trillion_steps() -> None:
    """By the exact Poisson tail in rational arithmetic, which bounds that of every binomial."""
    size = 5
    width = public_width(size)
    # e⁻⁵ from above: the alternating series, cut after a positive term.
    term, scale = Fraction(1), Fraction(0)
    for k in range(61):
        scale += term
        term = term * -size / (k + 1)
    term, below = Fraction(1), Fraction(0)
    for k in range(width + 1):
        below += term
        term = term * size / (k + 1)
    tail = 1 - scale * below
    assert Fraction(1, 10**14) < tail <= Fraction(1, 10**12)
    for samples in (5, 10, 50, 1000, 10**6):
        assert stats.binom.sf(width, samples, size / samples) <= 1e-12


@pytest.mark.parametrize(
    ("changes", "size", "expected"),
    [
        ({"sampling_rate": 0.1}, 160, None),
        ({"sampling_rate": 0.1}, 79, None),
        ({"sampling_rate": 0.1}, 800, "can exceed the public width"),
        ({"sampling": "passes", "samples_per_agent": 160}, 8000, None),
        ({"sampling": "every-step"}, 1, None),
    ],
)
def test_the_owner_is_told_of_batches_beyond_the_public_width(
    changes: dict[str, Any], size: int, expected: str | None
) -> None:
    note = note_batch_size(make_budget(**changes).query, size)
    assert (note is None) == (expected is None)
    assert expected is None or expected in str(note)
