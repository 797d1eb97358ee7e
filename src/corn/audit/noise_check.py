"""A check of drawn noise against the plan's covariance, over agents and releases together.

Noise that differs from the plan need not hurt privacy: a share with the wrong sign may only fail to
cancel. It is still a fault, and this check needs no canary to find it.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from corn.arrays import FloatArray

# Relative. Directions with less cannot be told from rounding, and are left out of the test.
_LEAST_VARIANCE = 1e-9


def check_noise(noise: FloatArray, covariance: FloatArray, *, alpha: float) -> list[str]:
    """Return what contradicts v ~ N(0, R), independent between releases, at level 1 − α.

    Noise is multiplied by R^{-1/2}. Its means, variances and correlations over agents and releases
    are then those of independent standard normals, whose exact tests share α.

    Args:
        noise: shape (releases, n, trials).
        covariance: R, shape (n, n).
        alpha: the probability of an alarm if the noise is right.
    """
    trials = noise.shape[-1]
    values, vectors = np.linalg.eigh(covariance)
    kept = values > _LEAST_VARIANCE * values[-1]
    root = vectors[:, kept] / np.sqrt(values[kept])
    # Shape (releases · directions, trials): independent standard normals if the noise is right.
    white = np.einsum("nk,rnt->rkt", root, noise).reshape(-1, trials)
    size = len(white)
    # Bonferroni over all means, variances and pairs, across releases too: reused noise shows there.
    each = alpha / (size + size + math.comb(size, 2))
    gram = white @ white.T / trials
    mean = stats.norm.sf(np.abs(white.mean(axis=1)) * math.sqrt(trials)) * 2
    # A sum of squares of standard normals is χ² with as many degrees of freedom.
    square = np.diag(gram) * trials
    spread = 2 * np.minimum(stats.chi2.sf(square, trials), stats.chi2.cdf(square, trials))
    # Noise that is missing altogether has no correlations.
    scale = np.sqrt(np.maximum(np.diag(gram), np.finfo(float).tiny))
    off = np.clip((gram / np.outer(scale, scale))[np.triu_indices(size, 1)], -1, 1)
    with np.errstate(divide="ignore"):
        # Means are known to be zero, so that r √((N − 1)/(1 − r²)) is Student's t with N − 1
        # degrees.
        t = np.abs(off) * np.sqrt((trials - 1) / (1 - off**2))
    link = 2 * stats.t.sf(t, trials - 1)
    if min(mean.min(), spread.min(), link.min(initial=1.0)) >= each:
        return []
    return [_name_largest(noise, covariance)]


def _name_largest(noise: FloatArray, covariance: FloatArray) -> str:
    """Return the entry of the covariance over agents and releases that is furthest off."""
    releases, n, trials = noise.shape
    flat = noise.reshape(-1, trials)
    expected = np.kron(np.eye(releases), covariance)
    found = flat @ flat.T / trials
    # Var(x_i x_j) = R_ii R_jj + R_ij² for normals (Isserlis).
    variances = np.outer(np.diag(expected), np.diag(expected)) + expected**2
    error = np.abs(found - expected) / np.sqrt(np.maximum(variances, 1e-300) / trials)
    i, j = sorted(np.unravel_index(int(error.argmax()), error.shape))
    (first, a), (second, b) = divmod(int(i), n), divmod(int(j), n)
    if first != second:
        return (
            f"the noise of releases {first} and {second} is correlated: covariance "
            f"{found[i, j]:.4g} of agents {a} and {b} instead of 0"
        )
    what = f"variance of agent {a}" if a == b else f"covariance of agents {a} and {b}"
    return (
        f"the noise is not the plan's: {what} is {found[i, j]:.4g} instead of {expected[i, j]:.4g}"
    )
