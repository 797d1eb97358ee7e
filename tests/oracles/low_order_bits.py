"""An attacker that identifies gradients by the low-order bits of noisy floating-point messages.

It decides between two candidates g₀ and g₁ for the gradient in a released value s = g + v. It does
not use the source code of the program that releases, only its output: with keys of its own it draws
any number of releases of known gradients. In floating point the values of v lie on lattices (of the
exponent of v, of the larger numbers that were summed, of a weight times the floats). So s − g lies
on a lattice for the true g, up to rounding, and anywhere for another one (Mironov, CCS 2012).

1. Each *view* sorts the differences s − g into cells by their place on some lattice. There are many
   views: powers of two, trailing zero bits, multiples of public weights, float32 and float64.
2. A first batch of its own releases shows how often the true and the wrong candidate fall into each
   cell. The attacker keeps the views in which these frequencies differ.
3. A second batch gives weights to the summed log-likelihood ratios of these views, by Fisher's
   linear discriminant. Views that do not separate are dropped, so that they add no noise.
4. The log-likelihood ratio of ideal Gaussian noise is added. If no view separates, this is all: the
   best test for real numbers, which is right with probability Φ(μ/2). The promise allows this test
   and no better one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Cells: TypeAlias = NDArray[np.int64]
Pair: TypeAlias = tuple[Array, Array]
"""Two candidates g₀ and g₁, shape (d,)."""

_BINS = 16
"""The number of cells for residues, exponents, mantissas and trailing zeros."""
# Binary places by which the largest rounded number exceeds the noise; more count as these.
_MOST_LOST_BITS = 3
_NUM_CELLS = _BINS * _BINS * (_MOST_LOST_BITS + 1)
_GRIDS = range(2, 60)
"""Exponents of ½, relative to the noise's standard deviation. Coarser grids would measure values,
not bits, and values belong to the Gaussian part of the score."""
_FLOAT32_GRIDS = range(12, 36)
_MOST_VIEWS = 12
_LEARNED_FROM = 1 << 19
"""Coordinates of the first batch, on each of which a hundred views are tried."""
_LEAST_Z = 6.0
"""Standard errors by which a view must separate the candidates in the first batch."""
_LEAST_T = 4.5
"""The same in the second batch, in which views are weighed."""
# Veltkamp's constant: it cuts the 53 bits of a float64 into halves whose products are exact.
_SPLITTER = 2.0**27 + 1
_TINY = np.finfo(np.float64).tiny


class DrawReleases(Protocol):
    """Releases of a known gradient with the attacker's own keys."""

    def __call__(self, gradient: Array, num: int, seed: int) -> Array:
        """Return released values g + v as recovered from messages, shape (num, d)."""


BitView: TypeAlias = Callable[[Array, Array, Array], Cells]
"""A rule that sorts differences into cells: (released, candidate, coarseness) → cells.

All have shape (num, d) but the candidate. Cells are below ``_NUM_CELLS``. The coarseness is the
largest number that was rounded on the way to the message.
"""


def sort_by_grid(
    released: Array,
    candidate: Array,
    coarseness: Array,
    *,
    step: float,
    noise_std: float,
    dtype: type[np.floating[Any]],
) -> Cells:
    """Sort by the residue of s − g modulo a power of two, for each exponent of the coarseness.

    ``dtype`` is what s is rounded to first: recovered from a message, it may be off by less than
    one place of that type.
    """
    units = (_round(released, dtype) - candidate) / step  # exact, as the step is a power of two
    return _join(_bin_exponents(coarseness / noise_std), _bin_residues(units - np.rint(units)))


def sort_by_zeros(
    released: Array,
    candidate: Array,
    coarseness: Array,
    *,
    noise_std: float,
    dtype: type[np.floating[Any]],
) -> Cells:
    """Sort by the trailing zero bits of s − g, in units of the last place of a message."""
    places = np.rint((_round(released, dtype) - candidate) / _last_place(coarseness, dtype))
    # Beyond 2⁶² the conversion to integers would overflow.
    whole = np.clip(places, -(2.0**62), 2.0**62).astype(np.int64)
    # x & −x is the lowest set bit; zero has none, and gets the most trailing zeros.
    lowest = np.where(whole == 0, 1 << 62, whole & -whole)
    zeros = np.frexp(lowest.astype(np.float64))[1] - 1
    return _join(_bin_exponents(coarseness / noise_std), np.minimum(zeros, _BINS - 1))


def sort_by_multiple(
    released: Array,
    candidate: Array,
    coarseness: Array,
    *,
    weight: float,
    dtype: type[np.floating[Any]],
) -> Cells:
    """Sort by the distance of s − g from the nearest weight times a float, per mantissa of s − g.

    The products of a weight with all floats, rounded, leave out some floats and meet others twice.
    """
    v = _round(_round(released, dtype) - candidate, dtype)
    z = _round(v / weight, dtype)
    # Where v is weight · z rounded, |v − weight · z| is at most half a place of v: residues
    # cluster.
    residues = _subtract_product(v, z, weight) / (weight * _last_place(z, dtype))
    mantissas, exponents = np.frexp(np.abs(v))
    bins = np.clip(((mantissas - 0.5) * 2 * _BINS).astype(np.int64), 0, _BINS - 1)
    lost_bits = np.clip(np.frexp(coarseness)[1] - exponents, 0, _MOST_LOST_BITS)
    return _join(lost_bits * _BINS + bins, _bin_residues(residues))


@final
class FloatAttacker:
    """Decides which of two gradients a release contains; see the module.

    Args:
        draw: releases with the attacker's own keys.
        pairs: candidates to practise on, at least one pair.
        noise_std: the standard deviation of the noise that the attacker cannot predict.
        weights: public numbers by which noise may have been multiplied.
        model: x, a number or shape (d,), where messages are x − η s.
        step_size: η.
        num_messages: own releases of each candidate of each pair, in each of the two batches.
        seed: of the attacker's own keys.
    """

    def __init__(
        self,
        draw: DrawReleases,
        pairs: Sequence[Pair],
        *,
        noise_std: float,
        weights: Sequence[float] = (),
        model: Array | float = 0.0,
        step_size: float = 1.0,
        num_messages: int = 100,
        seed: int = 0,
    ) -> None:
        self._noise_std, self._offset = noise_std, np.asarray(model, np.float64) / step_size
        first, second = (
            [
                (pair, draw(pair[truth], num_messages, seed + 4 * number + 2 * batch + truth))
                for number, pair in enumerate(pairs)
                for truth in (0, 1)
            ]
            for batch in (0, 1)
        )
        # Views are chosen on the first batch and weighed on the second. One batch for both would
        # prefer views that fit its chance.
        self._views, self._tables = self._learn(first, _list_views(noise_std, weights))
        scores = [self._compare(pair, released) for pair, released in second]
        # Releases alternate between truth 0 and truth 1, hence every second one.
        self._weights = _discriminate(np.concatenate(scores[::2]), np.concatenate(scores[1::2]))

    @property
    def views(self) -> tuple[BitView, ...]:
        """The views that separate the candidates: none if only the Gaussian test remains."""
        used = zip(self._views, self._weights, strict=True)
        return tuple(view for view, weight in used if weight != 0)

    def score(self, pair: Pair, released: Array, predicted: Array | float = 0.0) -> Array:
        """Return log-likelihood ratios, positive for g₁, shape (num,); those of steps add up.

        ``released`` has shape (num, d); ``predicted`` is the expectation of the noise, given the
        attacker's seeds and all other messages.
        """
        return self.score_bits(pair, released) + self.score_values(pair, released, predicted)

    def score_bits(self, pair: Pair, released: Array) -> Array:
        """Return the part of the score that lattices give."""
        return self._compare(pair, released) @ self._weights

    def score_values(self, pair: Pair, released: Array, predicted: Array | float = 0.0) -> Array:
        """Return the part of the score that ideal Gaussian noise would give."""
        centred = released - predicted - (pair[0] + pair[1]) / 2
        return np.asarray(centred @ (pair[1] - pair[0]) / self._noise_std**2, np.float64)

    def _learn(
        self, batch: Sequence[tuple[Pair, Array]], views: Sequence[BitView]
    ) -> tuple[list[BitView], list[Array]]:
        """Find the views that separate best, and their log-likelihood ratios of true to wrong."""
        found: list[tuple[float, BitView, Array]] = []
        num_rows = max(1, _LEARNED_FROM // (len(batch) * len(batch[0][0][0])))
        for view in views:
            counts = np.zeros((2, _NUM_CELLS))
            for number, (pair, messages) in enumerate(batch):
                truth, released = number % 2, messages[:num_rows]
                for is_wrong, candidate in enumerate((pair[truth], pair[1 - truth])):
                    cells = view(released, candidate, self._measure_coarseness(released))
                    counts[is_wrong] += np.bincount(cells.ravel(), minlength=_NUM_CELLS)
            total = counts.sum(axis=0)
            seen = total > 0
            # Two samples of equal size: χ² = Σ (a − b)²/(a + b), approximately normal for many
            # cells.
            chi_square = float(((counts[0] - counts[1])[seen] ** 2 / total[seen]).sum())
            freedom = max(int(seen.sum()) - 1, 1)
            if (chi_square - freedom) / np.sqrt(2 * freedom) > _LEAST_Z:
                # One count more in every cell: an empty one would have an infinite ratio.
                shares = (counts + 1) / (counts + 1).sum(axis=1, keepdims=True)
                found.append((chi_square, view, np.log(shares[0] / shares[1])))
        found.sort(key=lambda one: -one[0])
        best = found[:_MOST_VIEWS]
        return [view for _, view, _ in best], [table for _, _, table in best]

    def _compare(self, pair: Pair, released: Array) -> Array:
        """Score each view by itself, shape (num, views)."""
        scores = np.zeros((len(released), len(self._views)))
        coarseness = self._measure_coarseness(released)
        for number, (view, table) in enumerate(zip(self._views, self._tables, strict=True)):
            # Evidence that s − g₁ is on the lattice, minus evidence that s − g₀ is.
            for candidate, sign in zip(pair, (-1, 1), strict=True):
                cells = view(released, candidate, coarseness)
                scores[:, number] += sign * table[cells].sum(axis=1)
        return scores

    def _measure_coarseness(self, released: Array) -> Array:
        """Return the larger of s and the message x − η s, on the scale of s: both are rounded."""
        return np.asarray(np.maximum(np.abs(released), np.abs(self._offset - released)))


def _list_views(noise_std: float, weights: Sequence[float]) -> list[BitView]:
    # Lattices of floats have steps that are powers of two, whatever the deviation is.
    unit = 2.0 ** np.floor(np.log2(noise_std))
    types = (np.float32, np.float64)
    views: list[BitView] = [
        partial(sort_by_zeros, noise_std=noise_std, dtype=dtype) for dtype in types
    ]
    for dtype, exponents in ((np.float64, _GRIDS), (np.float32, _FLOAT32_GRIDS)):
        views += [
            partial(sort_by_grid, step=unit * 2.0**-k, noise_std=noise_std, dtype=dtype)
            for k in exponents
        ]
    sizes = sorted({abs(weight) for weight in weights if weight != 0})
    return views + [
        partial(sort_by_multiple, weight=size, dtype=dtype) for size in sizes for dtype in types
    ]


def _discriminate(zeros: Array, ones: Array) -> Array:
    """Compute Fisher's linear discriminant: weights that make a log-likelihood ratio of scores."""
    weights = np.zeros(zeros.shape[1])
    gap = ones.mean(axis=0) - zeros.mean(axis=0)
    variance = (zeros.var(axis=0) + ones.var(axis=0)) / 2 + _TINY
    # Positive gaps only: a view that points the wrong way in the second batch learned chance.
    kept = np.flatnonzero(gap > _LEAST_T * np.sqrt(2 * variance / len(zeros)))
    if kept.size:
        # Scaled, and with a ridge: neighbouring grids carry nearly the same information.
        scale = np.sqrt(variance[kept])
        centred = np.concatenate([own - own.mean(axis=0) for own in (zeros, ones)])[:, kept] / scale
        correlation = centred.T @ centred / len(centred) + 1e-2 * np.eye(kept.size)
        weights[kept] = np.linalg.solve(correlation, gap[kept] / scale) / scale
    return weights


def _round(values: Array, dtype: type[np.floating[Any]]) -> Array:
    return values.astype(dtype).astype(np.float64)


def _last_place(values: Array, dtype: type[np.floating[Any]]) -> Array:
    """Return the unit in the last place of each value in this type; subnormals do not matter."""
    # |x| = m 2^e with m in [½, 1) and nmant + 1 significant bits: the last place is 2^(e − nmant −
    # 1).
    exponents = np.frexp(np.maximum(np.abs(values), 1e-30))[1]
    return np.asarray(np.ldexp(1.0, exponents - np.finfo(dtype).nmant - 1), np.float64)


def _bin_exponents(values: Array) -> Cells:
    """Number the binary exponents from 2⁻¹³ to 2²."""
    return np.clip(np.frexp(np.abs(values))[1].astype(np.int64) + 12, 0, _BINS - 1)


def _bin_residues(residues: Array) -> Cells:
    """Number bins of [−½, ½]; one has its middle at 0, where residues of lattices are."""
    return np.floor(residues * _BINS + 0.5).astype(np.int64) % _BINS


def _join(first: Any, second: Any) -> Cells:
    return np.asarray(first * _BINS + second, np.int64)


def _subtract_product(v: Array, z: Array, weight: float) -> Array:
    """Compute v − z·w without rounding the product (Dekker), which would hide the residue."""
    product = z * weight
    z_high, w_high = _split(z), _split(np.array(weight))
    z_low, w_low = z - z_high, weight - w_high
    error = ((z_high * w_high - product) + z_high * w_low + z_low * w_high) + z_low * w_low
    return (v - product) - error


def _split(values: Array) -> Array:
    # Not simplified: the rounding of each operation makes the upper half (Dekker 1971).
    scaled = values * _SPLITTER
    return np.asarray(scaled - (scaled - values), np.float64)
