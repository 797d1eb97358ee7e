"""What is proved about a split: every coalition meets the cap, and no split does much better.

The proof needs no solver: for any matrices Y_I with Σ_{I: k unknown} [Y_I Y_Iᵀ]_{H_k} ⪯ A_{H_k} for
every seed group and every agent's private noise,

    Tr(A R) ≥ Σ_I Tr(Y_Iᵀ R^(I) Y_I) ≥ Σ_{I,i} (Y_I)_ii² / [(R^(I))⁻¹]_ii ≥ Σ_{I,i} (Y_I)_ii² / b,

the second step by Cauchy and Schwarz.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from corn.arrays import FloatArray
from corn.covariance.assembly import Assembly
from corn.covariance.decomposition import Decomposition


def relative_pressure(
    A: FloatArray,
    assembly: Assembly,
    *,
    private: FloatArray,
    blocks: Sequence[FloatArray],
    common: bool,
) -> float:
    """The least t with Σ_I Y_I Y_Iᵀ ⪯ t A on every seed group and every agent's private noise.

    ``private`` and ``blocks`` are the diagonal and the group blocks of that sum, each over the
    coalitions that do not know the noise in question. Σ (Y_I)_ii² / (t b) is then a lower bound.
    Near the optimum Y_I = (R^(I))⁻¹ Λ_I^{1/2} makes it tight. Infinite where A is singular on a
    group.
    """
    diagonal = np.diag(A)
    if common:
        pressures = [float(private.sum() / diagonal.sum())]
    else:
        with np.errstate(divide="ignore"):
            pressures = [float((private / diagonal).max())]
    for bucket, block in zip(assembly.buckets, blocks, strict=True):
        pressures.append(_largest_relative_eigenvalue(block, bucket.take(A)))
    return float(np.max(pressures))


def certify(
    A: FloatArray,
    assembly: Assembly,
    decomposition: Decomposition,
    multipliers: FloatArray,
    *,
    common: bool,
) -> float:
    """The lower bound for b = 1 that a split and multipliers λ ≥ 0, shape (coalitions, n), prove.

    It is that of ``relative_pressure`` with Y_I = (R^(I))⁻¹ Λ_I^{1/2}, over all splits on the seed
    groups of the assembly, of which the given one may leave out some. Any λ is valid, so a
    certificate can be checked without trusting whoever made it; what cannot be computed in floating
    point, or a singular split, proves nothing.
    """
    largest = float(multipliers.max(initial=0.0))
    if not 0 < largest < np.inf:
        return 0.0
    weights = multipliers / largest
    theta = decomposition.private_variance
    given = dict(zip(decomposition.seed_groups, decomposition.factors, strict=True))
    empty = [np.zeros((len(group), 1)) for group in assembly.seed_groups]
    factors = [given.get(g, none) for g, none in zip(assembly.seed_groups, empty, strict=True)]
    blocks = assembly.stack([F @ F.T for F in factors])
    private = np.zeros(len(A))
    pressure = [np.zeros_like(block) for block in blocks]
    squares = 0.0
    for number, chunk in enumerate(assembly.chunks):
        try:
            M = np.linalg.inv(assembly.hidden(theta, blocks, number))
        except np.linalg.LinAlgError:
            return 0.0
        # Y Yᵀ is M Λ Mᵀ; rounding leaves an inverse not quite symmetric.
        G = (M * weights[chunk][:, None, :]) @ M.transpose(0, 2, 1)
        private += np.einsum("cii->i", G)
        pulled = assembly.pull_back(G, number)
        pressure = [old + new for old, new in zip(pressure, pulled, strict=True)]
        squares += float((np.diagonal(M, axis1=1, axis2=2) ** 2 * weights[chunk]).sum())
    t = relative_pressure(A, assembly, private=private, blocks=pressure, common=common)
    return squares / t if 0 < t < np.inf and squares < np.inf else 0.0


def _largest_relative_eigenvalue(S: FloatArray, A: FloatArray) -> float:
    """The largest eigenvalue of any block of S relative to its block of A; inf if A is singular."""
    try:
        inverse = np.linalg.inv(np.linalg.cholesky(A))
    except np.linalg.LinAlgError:
        return np.inf
    return float(np.linalg.eigvalsh(inverse @ S @ inverse.transpose(0, 2, 1)).max())


def scale_to_cap(
    theta: FloatArray, factors: Sequence[FloatArray], assembly: Assembly, precision_cap: float
) -> Decomposition:
    """Scale noise so that the worst coalition just meets the cap, by Cholesky, on the safe side."""
    scale = _worst_precision(1.0, theta, factors, assembly) / precision_cap
    while (excess := _worst_precision(scale, theta, factors, assembly) / precision_cap) > 1:
        scale *= excess * (1 + 1e-14)
    placed: dict[int, FloatArray] = {}
    for bucket, stacked in zip(assembly.buckets, factors, strict=True):
        placed |= {int(k): np.sqrt(scale) * F for k, F in zip(bucket.groups, stacked, strict=True)}
    groups = assembly.seed_groups
    return Decomposition(scale * theta, groups, tuple(placed[k] for k in range(len(groups))))


def _worst_precision(
    scale: float, theta: FloatArray, factors: Sequence[FloatArray], assembly: Assembly
) -> float:
    """The largest [(R^(I))⁻¹]_ii at stake, from Cholesky factors: Σ_j (L⁻¹)_ji²."""
    blocks = [scale * F @ F.transpose(0, 2, 1) for F in factors]
    worst = 0.0
    for number, chunk in enumerate(assembly.chunks):
        L = np.linalg.cholesky(assembly.hidden(scale * theta, blocks, number))
        x = np.square(np.linalg.inv(L)).sum(axis=1)
        worst = max(worst, float(x[assembly.coalitions.protected[chunk]].max()))
    return worst
