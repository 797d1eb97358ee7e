"""The privacy of a split against coalitions, by brute force."""

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
