"""The Hessian of the dual function, by a short sum of exponentials instead of an n⁴ formula.

With S = (D A D)^{1/2} = Q diag(s) Qᵀ, the dual function ψ(λ) = Tr S − bΣλ/2 is concave, and

    −2 λ_i λ_j ∂²ψ/∂λ_i∂λ_j = P_ij = Σ_kl Q_ik Q_il Q_jk Q_jl · s_k s_l / (s_k + s_l).

Written out, P costs n⁴. But 1/(s_k + s_l) = ∫ exp(−t s_k) exp(−t s_l) dt separates, so that

    P = ∫ B_t ∘ B_t dt,    B_t = Q diag(s e^{−ts}) Qᵀ,

and on a logarithmic grid of t a handful of products gives P to a few per cent: enough for a Newton
step, which only steers. The certificate never sees P.
"""

from __future__ import annotations

import math

import numpy as np
import scipy.linalg

from corn.arrays import FloatArray

_LOG_STEP = 1.8  # of the grid of t; the quadrature error of 1/x is then about 2 %
_FIRST_NODE = 0.15  # times the smallest time scale, 1/s_max
_LAST_NODE = 1.5  # times the largest, 1/s_min
_SMALLEST_ROOT = 1e-9  # a share of the largest; roots below it cannot steer anything
_NEGLIGIBLE = 1e-2  # of a node's largest column; B ∘ B sees the fourth power of it


def dual_curvature(vectors: FloatArray, roots: FloatArray) -> FloatArray:
    """Return P, positive semidefinite; only its upper triangle is filled.

    ``vectors`` Q has shape (n, n), ``roots`` s shape (n,), ascending and not all zero. Single
    precision halves the time and is far more accurate than the quadrature.
    """
    n, largest = len(roots), float(roots[-1])
    s = roots / largest
    nodes, weights = _quadrature(s)
    Q = np.asfortranarray(vectors, dtype=np.float32)
    P = np.zeros((n, n), dtype=np.float32, order="F")
    B = np.zeros_like(P)
    for t, weight in zip(nodes, weights, strict=True):
        column = weight**0.25 * np.sqrt(s * np.exp(-t * s))
        # It rises and falls with s once, and s ascends: what matters is one slice of columns.
        kept = np.flatnonzero(column > _NEGLIGIBLE * column.max())
        window = slice(kept[0], kept[-1] + 1)
        scaled = Q[:, window] * column[window].astype(np.float32)
        B = scipy.linalg.blas.ssyrk(1.0, scaled, beta=0.0, c=B, overwrite_c=1)
        B *= B
        P += B
    result: FloatArray = P.astype(np.float64)
    result *= largest
    return result


def _quadrature(roots: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return nodes t and weights w with Σ w e^{−tx} ≈ 1/x for x any sum of two roots, largest 1."""
    smallest = float(roots[roots > _SMALLEST_ROOT][0])
    count = 2 + math.floor(math.log(_LAST_NODE / (_FIRST_NODE * smallest)) / _LOG_STEP)
    nodes = _FIRST_NODE * np.exp(_LOG_STEP * np.arange(count))
    weights = _LOG_STEP * nodes
    # The nodes left out below the first form a geometric series in which e^{−tx} is about the same.
    weights[0] /= 1 - math.exp(-_LOG_STEP)
    return nodes, weights
