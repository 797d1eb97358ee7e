"""A check of the sampler by itself: its batches for data sets of several sizes, without gradients.

An attack on releases shows a fault of the sampler only as far as the canary's gradient shows it.
This check reads the batches: their shape, the weights, how often and where a sample is in them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from corn.arrays import FloatArray, IntArray
from corn.audit.observation import rate_of
from corn.audit.program import Program
from corn.learn.batches import AgentData
from corn.privacy import ClippedQuery

# Two runs show faults of shapes and passes. Frequencies need as many as time allows.
_FEW_RUNS, _MOST_RUNS = 2, 50
_COINS = 2 * 10**7
_NUMBERS = 8
# Longer passes are checked in part.
_MOST_BATCHES = 60


def check_sampler(query: ClippedQuery, *, seed: int, program: Program, alpha: float) -> list[str]:
    """Return what contradicts the sampling of a query, at level 1 − α; none for unit ``agent``.

    Nothing about a batch but the samples in it may depend on the data, not even on their number.
    """
    if query.unit == "agent" or query.batch_size is None:
        return []
    steps = query.steps_per_pass or 1
    if query.sampling == "poisson":
        usual, count = max(query.least_samples, 2), _NUMBERS
        sizes = sorted({1, -(-usual // 2), usual, usual + 1})
    else:
        usual, count = query.batch_size * steps, min(2 * steps, _MOST_BATCHES)
        sizes = sorted({1, usual - query.batch_size, usual - 1, usual, usual + 1} - {0})
        sizes.append(usual + query.batch_size)
    drawn = {m: _Batches.draw(query, m, range(count), _FEW_RUNS, seed, program) for m in sizes}
    problems = _check_shapes(drawn) + _check_weights(drawn, query.batch_size)
    problems += _check_neighbours(drawn, usual if query.sampling == "poisson" else usual - 1)
    if query.sampling == "poisson":
        runs = int(np.clip(_COINS // (_NUMBERS * usual), _FEW_RUNS, _MOST_RUNS)) // 2 * 2
        many = _Batches.draw(query, usual, range(_NUMBERS), runs, seed, program)
        problems += _check_coins(many, rate_of(query), alpha=alpha)
    else:
        problems += _check_passes(drawn, steps, usual)
        problems += _check_orders(drawn[usual + query.batch_size], steps, alpha=alpha)
    return problems


class _Batches:
    """Batches of several runs over one data set, whose rows are known by their numbers.

    Attributes:
        rows: one array (runs, width) for each batch; −1 where the weight is 0.
        weights: of the same shapes.
    """

    def __init__(self, num_samples: int, rows: list[IntArray], weights: list[FloatArray]) -> None:
        self.num_samples, self.rows, self.weights = num_samples, rows, weights

    @classmethod
    def draw(
        cls,
        query: ClippedQuery,
        num_samples: int,
        numbers: Sequence[int],
        num_runs: int,
        seed: int,
        program: Program,
    ) -> _Batches:
        names = torch.arange(num_samples, dtype=torch.float64)
        data = AgentData(names.unsqueeze(1), names, (0, num_samples))
        # Equal coins for data sets of all sizes, so that neighbours can be compared.
        choices = [program.make_choices(seed, run) for run in range(num_runs)]
        sampler = program.make_sampler(query, data, choices)
        rows, weights = [], []
        for number in numbers:
            batch = sampler.draw(number)
            own = batch.weights.double().numpy()
            weights.append(own)
            rows.append(np.where(own > 0, batch.targets.numpy(), -1).astype(np.int64))
        return cls(num_samples, rows, weights)

    def find(self) -> NDArray[np.bool_]:
        """Return which rows are in which batches, shape (numbers, runs, samples)."""
        found = np.zeros((len(self.rows), len(self.rows[0]), self.num_samples), dtype=bool)
        for number, batch in enumerate(self.rows):
            run, place = np.nonzero(batch >= 0)
            found[number, run, batch[run, place]] = True
        return found


def _check_shapes(drawn: dict[int, _Batches]) -> list[str]:
    widths = {size: {own.shape[1] for own in each.rows} for size, each in drawn.items()}
    every = sorted(set.union(*widths.values()))
    if len(every) == 1:
        return []
    return [
        f"the shape of a batch depends on the data: batches of data sets with {min(drawn)} to "
        f"{max(drawn)} samples have {every[0]} to {every[-1]} positions"
    ]


def _check_weights(drawn: dict[int, _Batches], batch_size: int) -> list[str]:
    problems = []
    for each in drawn.values():
        for rows, weights in zip(each.rows, each.weights, strict=True):
            largest = float(weights.max())
            if largest > 1 / batch_size:
                problems.append(
                    f"a sample has weight {largest:g}, where 1/{batch_size} was counted"
                )
            if any(len(set(own[own >= 0])) < (own >= 0).sum() for own in rows):
                problems.append("a sample is twice in one batch")
    return problems[:1]


def _check_neighbours(drawn: dict[int, _Batches], size: int) -> list[str]:
    """Compare batches with equal coins of data sets with and without one last sample."""
    pairs = zip(drawn[size].rows, drawn[size + 1].rows, strict=True) if size in drawn else ()
    for without, with_it in pairs:
        others = np.where(with_it == size, -1, with_it)
        if without.shape != others.shape or not np.array_equal(without, others):
            return ["one sample more moves other samples of a batch to other positions"]
    return []


def _check_passes(drawn: dict[int, _Batches], steps: int, num_slots: int) -> list[str]:
    for size, each in drawn.items():
        found = each.find()
        for start in range(0, len(found), steps):
            times = found[start : start + steps].sum(axis=0)
            if times.max() > 1:
                return [f"a sample is in {times.max()} batches of one pass of {steps}"]
            filled = times.sum(axis=1)
            expected = min(size, num_slots)
            if len(found) >= start + steps and bool((filled != expected).any()):
                return [
                    f"a pass of {steps} batches uses {filled.min()} samples of {size}, where "
                    f"{expected} fit"
                ]
    return []


def _check_orders(drawn: _Batches, steps: int, *, alpha: float) -> list[str]:
    """Compare the samples that two batches of neighbouring passes have in common."""
    found = drawn.find()[steps - 1 : steps + 1]
    # Of a longer pass only a part was drawn.
    if len(found) < 2:
        return []
    taken = found.sum(axis=2)
    values = []
    for run, common in enumerate((found[0] & found[1]).sum(axis=1)):
        law = stats.hypergeom(drawn.num_samples, taken[0, run], taken[1, run])
        values.append(2 * min(law.cdf(common), law.sf(common - 1)))
    is_chance = min(values) >= alpha / len(values)
    return [] if is_chance else ["the orders of two passes are not independent"]


def _check_coins(drawn: _Batches, rate: float, *, alpha: float) -> list[str]:
    """Compare how often samples are taken, alone and together, with independent coins."""
    found = drawn.find()
    numbers, runs, size = found.shape
    half = size // 2
    # Each is a number of independent events, its count and its probability, under one name.
    tests = [
        ("samples are taken with another probability than the plan's", found, rate),
        ("two runs use the same coins", found[:, ::2] & found[:, 1::2], rate**2),
        ("two samples share a coin", found[..., :half] & found[..., half : 2 * half], rate**2),
    ]
    tests += [
        (f"the coins of steps {a} and {b} are not independent", found[a] & found[b], rate**2)
        for a in range(numbers)
        for b in range(a)
    ]
    # Samples are at each position equally often.
    present = np.stack([rows >= 0 for rows in drawn.rows if rows.shape == drawn.rows[0].shape])
    width = present.shape[-1]
    level = alpha / (len(tests) + width)
    problems = [
        name for name, event, p in tests if _p_value(int(event.sum()), event.size, p) < level
    ]
    events = present.shape[0] * runs
    chance = rate * size / width
    # A position is taken in a batch or not: one event for each batch, all independent.
    values = [_p_value(int(k), events, min(chance, 1.0)) for k in present.sum(axis=(0, 1))]
    if min(values) < level:
        problems.append("samples are not at random positions of a batch")
    return problems[:3]


def _p_value(count: int, trials: int, probability: float) -> float:
    """Return twice the smaller tail of the binomial law."""
    law = stats.binom(trials, probability)
    return float(2 * min(law.cdf(count), law.sf(count - 1)))
