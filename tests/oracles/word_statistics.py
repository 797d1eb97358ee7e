"""Statistics of many gigabytes of words under masks, for benchmarks and tests of the audit."""

from __future__ import annotations

import math
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from corn.checks import FloatArray
from corn.noise.masks import MaskWords

# Words whose pairs are tested, besides neighbouring coordinates; and the mean of uniform words.
_OTHERS, _MIDDLE = ("next message", "next release"), 32767.5


@final
class WordStatistics:
    """Tests of long streams of words of 16 bits: uniform, and independent of others and of data.

    Words come in blocks of shape (releases, messages, coordinates). All values of a word are
    counted, and pairs of high bytes: of a word with the next coordinate, the next message, the next
    release, and the sign of the gradient in it. Correlations are of whole words.
    """

    def __init__(self) -> None:
        self.num_words = 0
        self._values = np.zeros(1 << 16, np.int64)
        self._pairs = {name: np.zeros(1 << 16, np.int64) for name in ("next coordinate", *_OTHERS)}
        self._signs = np.zeros((2, 1 << 8), np.int64)
        # Sums of products of centred words, and the number of products.
        self._products = {name: np.zeros(2) for name in (*self._pairs, "gradient")}

    def add(self, words: MaskWords, gradients: FloatArray) -> None:
        """Count a block of words, whose gradients, of the same shape, have values ±1."""
        self.num_words += words.size
        self._values += np.bincount(words.ravel(), minlength=1 << 16)
        high = words >> np.uint16(8)
        centred = words.astype(np.float64) - _MIDDLE
        # Axes from the last to the first. No word is in two pairs, or pairs would not be
        # independent.
        for axis, name in zip((2, 1, 0), self._pairs, strict=True):
            first, second = (_take_every_second(high, axis, start) for start in (0, 1))
            joint = first << np.uint16(8) | second
            self._pairs[name] += np.bincount(joint.ravel(), minlength=1 << 16)
            pair = (_take_every_second(centred, axis, start) for start in (0, 1))
            self._multiply(name, *pair)
        for row, sign in enumerate((-1, 1)):
            self._signs[row] += np.bincount(high[gradients == sign], minlength=1 << 8)
        self._multiply("gradient", centred, gradients)

    def _multiply(self, name: str, first: FloatArray, second: FloatArray) -> None:
        self._products[name] += float(np.vdot(first, second)), first.size

    def list_p_values(self) -> dict[str, float]:
        """Return the p-value of each test."""
        found = {"all 2¹⁶ values": _chi_square(self._values)}
        counts = self._values.reshape(1 << 8, 1 << 8)
        found["high byte"], found["low byte"] = (_chi_square(counts.sum(axis=k)) for k in (1, 0))
        for name, table in self._pairs.items():
            found[f"high bytes of a word and the {name}"] = _chi_square(table)
        # Signs have frequencies of their own, so that each row is compared with its sum.
        found["high byte and the sign of the gradient"] = float(
            stats.chi2_contingency(self._signs).pvalue
        )
        variance = ((1 << 32) - 1) / 12  # of a uniform word
        for name, (total, count) in self._products.items():
            scale = math.sqrt(count * variance * (1.0 if name == "gradient" else variance))
            found[f"correlation with the {name}"] = float(2 * stats.norm.sf(abs(total) / scale))
        return found


def _take_every_second(values: NDArray[Any], axis: int, start: int) -> NDArray[Any]:
    return values.take(range(start, values.shape[axis] // 2 * 2, 2), axis=axis)


def _chi_square(counts: NDArray[np.int64]) -> float:
    """Return the p-value of counts whose expectations are equal; small where they fit too well."""
    expected = counts.sum() / counts.size
    square, freedom = ((counts - expected) ** 2).sum() / expected, counts.size - 1
    return float(2 * min(stats.chi2.sf(square, freedom), stats.chi2.cdf(square, freedom)))
