"""Noise of rings and tori against one insider, without matrices of n × n numbers.

Every agent shares a seed with the agents at the same hops h from it, and all pairs at ±h have the
same variance τ_h: R = θ I + Σ_h τ_h (I − T_h), where T_h moves by h, is diagonal in the Fourier
basis. All agents are alike, so one insider stands for all n. It knows the streams of its own
pairs, B = (√τ_h (e_0 − e_h))_h, and with Y = R⁻¹, a convolution, what is left to the others is

    M = Y + Y B (I − Bᵀ Y B)⁻¹ Bᵀ Y,

as in `corn.covariance.pair_updates`: n log n for Y and n k² for the diagonal of M with k partners.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import scipy.fft
import scipy.optimize

from corn.arrays import FloatArray, IntArray
from corn.covariance.circulant import horizon_spectrum
from corn.covariance.lattice import LatticeNoise
from corn.covariance.objective import Horizon
from corn.covariance.threat import SPARSE_PARTNERS
from corn.topology import Gossip

Hop: TypeAlias = tuple[int, ...]

_SHARPNESS = (30.0, 100.0, 300.0)  # of the smooth maximum over agents, one search after the other
_ITERATIONS = 60
_FIRST_SHARED = 100.0  # variance of an agent's shared noise over that of its private noise
_LEAST_VARIANCE, _LARGEST_VARIANCE = 1e-16, 1e4  # τ/θ: beyond, K is singular in floating point
_ROUNDING = 1e-12  # relative, of the Fourier transforms


@dataclass(frozen=True, eq=False)
class LatticePairs:
    """Private noise, and noise that each agent shares with the agents at some hops.

    Attributes:
        sides: (n,) of a ring, (rows, columns) of a torus.
        hops: those of the partners of an agent, shape (k, dimensions); with h also −h.
        variances: τ of each hop, shape (k,); the same for h and −h.
        private_variance: θ of every agent.
    """

    sides: tuple[int, ...]
    hops: IntArray
    variances: FloatArray
    private_variance: float = 1.0

    @cached_property
    def eigenvalues(self) -> FloatArray:
        """Those of R, in the shape of the lattice."""
        first_row = np.zeros(self.sides)
        # Each partner adds τ_h on the diagonal and −τ_h at its place; h and −h are partners of
        # their own.
        first_row.flat[0] = self.private_variance + self.variances.sum()
        np.subtract.at(first_row, tuple(self.hops.T), self.variances)
        found = np.asarray(scipy.fft.fftn(first_row).real)
        # Every eigenvalue is at least θ; the transform may round one below it.
        return np.asarray(np.maximum(found, self.private_variance))

    def hidden_precisions(self) -> FloatArray:
        """Return [(R^(0))⁻¹]_ii of agents 1 … n−1 against insider 0, shape (n − 1,)."""
        y = scipy.fft.ifftn(1 / self.eigenvalues).real
        roots, axes = np.sqrt(self.variances), tuple(range(y.ndim))
        # Y e_h is y moved by h, as Y is a convolution.
        moved = np.array([np.roll(y, hop, axis=axes).ravel() for hop in self.hops])
        P = roots[:, None] * (y.ravel() - moved)
        partners = np.ravel_multi_index(tuple(self.hops.T), self.sides)
        K = np.eye(len(roots)) - roots * (P[:, [0]] - P[:, partners])
        x: FloatArray = y.flat[0] + np.einsum("kn,kn->n", P, np.linalg.solve(K, P))
        # Agent 0 is the insider.
        return x[1:]

    def scale(self, factor: float) -> LatticePairs:
        """Return the noise with all variances multiplied."""
        variances, private = factor * self.variances, factor * self.private_variance
        return LatticePairs(self.sides, self.hops, variances, private)


def design_lattice_insider(
    first_row: FloatArray,
    precision_cap: float,
    *,
    objective: Horizon,
    gossip: Gossip,
) -> LatticeNoise:
    """Return noise of pairs against one insider for a first row of ``find_lattice``.

    Pairs are links and up to ``SPARSE_PARTNERS`` more for each agent, half of them near, as on any
    network. Their variances are a local optimum: a handful of numbers, whatever the size.
    """
    a = horizon_spectrum(first_row, objective, gossip)
    hops = choose_hops(first_row, SPARSE_PARTNERS)
    pairs = _search_variances(a, first_row.shape, hops)
    pairs = pairs.scale(float(pairs.hidden_precisions().max()) / precision_cap)
    # Rounding may leave a scaled precision above the cap: repeat until it is on the private side.
    while (excess := float(pairs.hidden_precisions().max()) / precision_cap) > 1:
        pairs = pairs.scale(excess * (1 + _ROUNDING))
    precision = float(pairs.hidden_precisions().max())
    return LatticeNoise(pairs.eigenvalues, insider_precision=precision)


def choose_hops(first_row: FloatArray, num_partners: int) -> list[set[Hop]]:
    """Return the hops to the partners of an agent, {h, −h} together: links, near and far ones."""
    sides = first_row.shape
    links = {tuple(map(int, hop)) for hop in np.argwhere(first_row) if any(hop)}
    links |= {_negate(hop, sides) for hop in links}
    chosen = _take_classes(sorted(links), sides, len(links), set())
    near = _take_classes(
        _walk(links, sides, len(links) + 2 * num_partners), sides, num_partners // 2, links
    )
    taken = links.union(*near)
    n = first_row.size
    # Public and the same everywhere; a few times as many as needed, because some may be taken.
    numbers = [
        int.from_bytes(hashlib.sha256(f"corn hop {n} {k}".encode()).digest()[:8], "big") % n
        for k in range(8 * num_partners)
    ]
    anywhere = [tuple(map(int, np.unravel_index(number, sides))) for number in numbers if number]
    far = _take_classes(anywhere, sides, num_partners - num_partners // 2, taken)
    return chosen + near + far


def _walk(links: set[Hop], sides: tuple[int, ...], least: int) -> list[Hop]:
    """Return hops in the order of the links that they take, nearest first, at least so many."""
    seen: dict[Hop, None] = dict.fromkeys(sorted(links))
    start = (0,) * len(sides)
    front = list(seen)
    while front and len(seen) < least:
        reached = {_add(hop, link, sides) for hop in front for link in links}
        new = reached - seen.keys() - {start}
        front = sorted(new, key=lambda hop: (_squared_length(hop, sides), hop))
        seen |= dict.fromkeys(front)
    return list(seen)


def _take_classes(
    candidates: list[Hop], sides: tuple[int, ...], num_hops: int, taken: set[Hop]
) -> list[set[Hop]]:
    """Return {h, −h} of candidates that are not taken, until they have so many hops."""
    classes: list[set[Hop]] = []
    for hop in candidates:
        if sum(map(len, classes)) >= num_hops:
            break
        both = {hop, _negate(hop, sides)}
        if not both & taken.union(*classes):
            classes.append(both)
    return classes


def _add(hop: Hop, link: Hop, sides: tuple[int, ...]) -> Hop:
    return tuple((x + y) % side for x, y, side in zip(hop, link, sides, strict=True))


def _negate(hop: Hop, sides: tuple[int, ...]) -> Hop:
    return tuple(-x % side for x, side in zip(hop, sides, strict=True))


def _squared_length(hop: Hop, sides: tuple[int, ...]) -> int:
    return sum(min(x, side - x) ** 2 for x, side in zip(hop, sides, strict=True))


def _search_variances(
    a: FloatArray, sides: tuple[int, ...], classes: list[set[Hop]]
) -> LatticePairs:
    """Return pairs with θ = 1 whose energy, after scaling to a cap, is least."""
    hops = np.array([hop for both in classes for hop in sorted(both)])
    which = np.repeat(np.arange(len(classes)), [len(both) for both in classes])

    def make(z: FloatArray) -> LatticePairs:
        variances = np.exp(np.clip(z, np.log(_LEAST_VARIANCE), np.log(_LARGEST_VARIANCE)))
        return LatticePairs(sides, hops, variances[which])

    def cost(z: FloatArray, sharpness: float) -> float:
        pairs = make(z)
        log_x = sharpness * np.log(pairs.hidden_precisions())
        smooth = float(np.logaddexp.reduce(log_x)) / sharpness
        return float(np.log((a * pairs.eigenvalues).sum())) + smooth

    z = np.full(len(classes), np.log(_FIRST_SHARED / len(hops)))
    for sharpness in _SHARPNESS:
        options = {"maxiter": _ITERATIONS}
        found = scipy.optimize.minimize(
            cost, z, args=(sharpness,), method="L-BFGS-B", options=options
        )
        z = found.x
    return make(z)
