"""The privacy of a split against coalitions, by brute force."""

from fractions import Fraction
from itertools import combinations

import numpy as np

from corn.covariance.decomposition import Decomposition


def worst_precision(decomposition: Decomposition, max_colluders: int) -> float:
    """Return the largest [(R^(I))⁻¹]_ii over all coalitions up to this size, one at a time."""
    n = decomposition.num_agents
    worst = 0.0
    for size in range(max_colluders + 1):
        for coalition in combinations(range(n), size):
            honest = [i for i in range(n) if i not in coalition]
            hidden = decomposition.hidden_from(coalition)[np.ix_(honest, honest)]
            worst = max(worst, float(np.diag(np.linalg.inv(hidden)).max()))
    return worst


def exact_worst_precision(decomposition: Decomposition, max_colluders: int) -> Fraction:
    """Return the largest [(R^(I))⁻¹]_ii over coalitions of this size, without any rounding."""
    n = decomposition.num_agents
    worst = Fraction(0)
    for coalition in combinations(range(n), max_colluders):
        hidden = [[Fraction(0)] * n for _ in range(n)]
        for i, variance in enumerate(decomposition.private_variance):
            hidden[i][i] = Fraction(float(variance))
        for group, factor in zip(decomposition.seed_groups, decomposition.factors, strict=True):
            if set(group) & set(coalition):
                continue
            rows = [[Fraction(float(entry)) for entry in row] for row in factor]
            for a, i in enumerate(group):
                for b, j in enumerate(group):
                    hidden[i][j] += sum(
                        (x * y for x, y in zip(rows[a], rows[b], strict=True)), Fraction(0)
                    )
        honest = [i for i in range(n) if i not in coalition]
        worst = max(worst, *(_inverse_entry(hidden, honest, i) for i in honest))
    return worst


def _inverse_entry(matrix: list[list[Fraction]], kept: list[int], last: int) -> Fraction:
    """Return entry (last, last) of the inverse: one over the last pivot of an elimination."""
    order = [i for i in kept if i != last] + [last]
    rows = [[matrix[i][j] for j in order] for i in order]
    for k, pivot in enumerate(rows):
        for row in rows[k + 1 :]:
            ratio = row[k] / pivot[k]
            row[k:] = [x - ratio * y for x, y in zip(row[k:], pivot[k:], strict=True)]
    return 1 / rows[-1][-1]
