"""Noise of rings and tori without matrices of n × n numbers, for a million agents.

All agents are alike, so every matrix is diagonal in the Fourier basis of the ring or torus, and the
eigenvalues of R are all that a simulation needs. Rehearsals and plans, in which each agent draws
its own share, need `corn.covariance.design`.

Against an eavesdropper R = (Tr A^{1/2}/(n b)) · A^{-1/2} is optimal, and (Tr A^{1/2})²/(n b) is its
value.

Against one insider, every agent shares a seed with the agents at the same hops h from it, and all
pairs at ±h have the same variance τ_h: R = θ I + Σ_h τ_h (I − T_h), where T_h moves by h. One
insider stands for all n. It knows the streams of its own pairs, B = (√τ_h (e_0 − e_h))_h, and with
Y = R⁻¹, a convolution, what is left to the others is

    M = Y + Y B (I − Bᵀ Y B)⁻¹ Bᵀ Y,

as in `corn.covariance.low_rank`: n log n for Y and n k² for the diagonal of M with k partners.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import scipy.fft
import scipy.optimize
from numpy.typing import ArrayLike, NDArray

from corn.checks import FloatArray, IntArray, require, require_positive
from corn.covariance.baselines import RatioFamily, search_ratio
from corn.covariance.objective import ONE_STEP, Horizon
from corn.covariance.problem import DEFAULT_NOISE_RATIO
from corn.covariance.threat import SPARSE_PARTNERS, SeedGroups
from corn.topology.gossip import ONE_ROUND, Gossip, accelerate, apply_to_eigenvalues
from corn.topology.mixing import STOCHASTIC_TOLERANCE
from corn.topology.network import Mixing
from corn.topology.sparse import lattice_eigenvalues

# Of log t in [log 10⁻¹², 0]: far more than float64 can tell apart, at no cost.
_BISECTIONS = 100


def design_lattice(
    first_row: ArrayLike,
    precision_cap: float,
    *,
    objective: Horizon = ONE_STEP,
    gossip: Gossip = ONE_ROUND,
    noise_ratio: float = DEFAULT_NOISE_RATIO,
) -> LatticeNoise:
    """Return the design for W_ij = first_row[(j − i) mod n], in O(n log n).

    On a torus of r × c agents ``first_row`` has shape (r, c), and j − i is taken in each direction.

    A directed circulant is as good as any: A is symmetric either way. All agents have one promise:
    with different ones they are not alike, and `design` must be used. Privacy holds exactly as for
    `design`: the mean of the eigenvalues of R⁻¹ is its diagonal, and is at most b. ``gossip`` are
    the mixing rounds of a step, and ``noise_ratio`` limits an agent's noise in units of LDP's.

    >>> ring = np.zeros(20); ring[[0, 1, -1]] = 1 / 3
    >>> noise = design_lattice(ring, 1.0)
    >>> round(float((horizon_spectrum(ring, ONE_STEP, ONE_ROUND) * noise.eigenvalues).sum()), 6)
    4.60252
    """
    row = np.array(first_row, dtype=np.float64)
    is_row = row.ndim >= 1 and row.size > 0 and bool(np.isfinite(row).all())
    require(is_row, "first_row", "one or more finite numbers", f"shape {row.shape}")
    require_positive("precision_cap", precision_cap)
    # Eigenvalues of R⁻¹ are proportional to √a; of mean 1 they have the diagonal of the cap b = 1.
    root = np.sqrt(horizon_spectrum(row, objective, gossip))
    theta = _blend(root / root.mean(), noise_ratio**2)
    return LatticeNoise(_scale_to_mean(1 / theta, precision_cap))


def horizon_spectrum(row: FloatArray, objective: Horizon, gossip: Gossip) -> FloatArray:
    """Return the eigenvalues of A; W is normal, so it has the moduli of those of W alone."""
    w = gossip_spectrum(row, gossip)
    largest = float(np.abs(w).max())
    require(
        objective.contraction * largest < 1,
        "first_row",
        "without an eigenvalue that this horizon does not discount",
        f"one of modulus {largest:.6g}",
        advice="use weights that sum to 1",
    )
    a = objective.weigh_disagreement(w)
    if objective.disagreement_weight != 1:
        a = np.where(_mean_modes(row, gossip.rounds), objective.average_energy, a)
    return a


def gossip_spectrum(row: FloatArray, gossip: Gossip) -> NDArray[np.complex128]:
    """Return the eigenvalues of the polynomial of W that a step applies."""
    w = scipy.fft.fftn(row)
    if gossip.kind == "plain":
        return np.asarray(w**gossip.rounds)
    is_symmetric = bool((np.abs(w.imag) <= 1e-12).all())
    require(is_symmetric, "first_row", "symmetric for Chebyshev rounds", row.ravel()[:5])
    # The first Fourier mode is the average, which the polynomial must leave alone.
    return apply_to_eigenvalues(accelerate(w.real.ravel()[1:], gossip.rounds), w)


def _mean_modes(row: FloatArray, rounds: int) -> NDArray[np.bool_]:
    """Return which Fourier modes are averages of connected parts; the first always is."""
    total = float(row.sum())
    is_stochastic = bool((row >= 0).all()) and abs(total - 1) <= STOCHASTIC_TOLERANCE
    require(is_stochastic, "first_row", "weights that sum to 1", f"a sum of {total:.9g}")
    # The hops of r rounds are the sums of r hops. Agents that they lead to from one another form a
    # part, whose average are the modes k with k·h a whole number of turns for each of these hops.
    sides = row.shape
    hops = np.argwhere(row)
    apart = np.vstack([rounds * hops[:1], np.diff(hops, axis=0)])
    modes = np.indices(sides, sparse=True)
    found = np.ones(sides, dtype=bool)
    for hop in np.unique(apart % sides, axis=0):
        # Turns in units of 1/n: whole numbers, without rounding.
        turns = sum(modes[k] * int(hop[k]) * (row.size // side) for k, side in enumerate(sides))
        found &= turns % row.size == 0
    return found


def _blend(theta: FloatArray, variance_limit: float) -> FloatArray:
    """Blend the eigenvalues of R⁻¹, of mean 1, with 1 until R_ii, the mean of 1/θ, is allowed.

    As in `limit_noise`: the mean of the eigenvalues, and with it the privacy, stays as it is.
    """
    if theta.min() > 0 and (1 / theta).mean() <= variance_limit:
        return theta
    low, high = np.log(1e-12), 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        t = np.exp(middle)
        fits = (1 / ((1 - t) * theta + t)).mean() <= variance_limit
        low, high = (low, middle) if fits else (middle, high)
    return np.asarray((1 - np.exp(high)) * theta + np.exp(high))


def _scale_to_mean(eigenvalues: FloatArray, precision_cap: float) -> FloatArray:
    """Scale the eigenvalues of R until the mean of their inverses is at most the cap."""
    r = eigenvalues / precision_cap
    # Division rounds either way: repeat until the mean is on the private side.
    while (excess := float((1 / r).mean()) / precision_cap) > 1:
        r = r * (excess * (1 + np.finfo(np.float64).eps))
    return r


@dataclass(frozen=True, eq=False)
class LatticeNoise:
    """Noise whose covariance is the same from every agent of a ring or torus.

    Attributes:
        eigenvalues: of R, in the order of the discrete Fourier transform, shape (n,) on a ring and
            (rows, columns) on a torus.
        insider_precision: [(R^(c))⁻¹]_ii of the agent that one insider c, any agent of the network,
            learns most about; None for noise against an eavesdropper.
    """

    eigenvalues: FloatArray
    insider_precision: float | None = None

    def __post_init__(self) -> None:
        found = f"from {self.eigenvalues.min():.6g}"
        require(bool(self.eigenvalues.min() > 0), "eigenvalues", "positive", found)

    @property
    def num_agents(self) -> int:
        """The number of agents n."""
        return self.eigenvalues.size

    @property
    def seed_groups(self) -> SeedGroups:
        """One group of all: a simulation of a covariance says nothing about insiders."""
        return (tuple(range(self.num_agents)),)

    @property
    def covariance(self) -> FloatArray:
        """R, shape (n, n): for comparisons, as its size is what this class avoids."""
        n, sides = self.num_agents, self.eigenvalues.shape
        # Row i of R is the convolution of the i-th unit vector with the first row.
        modes = np.eye(n).reshape(n, *sides)
        axes = tuple(range(1, modes.ndim))
        found = scipy.fft.ifftn(scipy.fft.fftn(modes, axes=axes) * self.eigenvalues, axes=axes)
        return np.asarray(found.real.reshape(n, n))

    @property
    def total_variance(self) -> float:
        """1ᵀR1: n times the eigenvalue of the average."""
        return float(self.eigenvalues.flat[0]) * self.num_agents

    @property
    def precision_diagonal(self) -> FloatArray:
        """[R⁻¹]_ii of each agent, shape (n,): the mean of the inverse eigenvalues.

        Of noise against an insider, it is that of what the insider does not know.
        """
        known = self.insider_precision
        precision = float((1 / self.eigenvalues).mean()) if known is None else known
        return np.full(self.num_agents, precision)


def design_lattice_pairs(
    first_row: FloatArray,
    precision_cap: float,
    *,
    objective: Horizon,
    gossip: Gossip,
    mixing: Mixing = "gossip",
) -> LatticeNoise:
    """Return DECOR's best noise, R = c (I + r L), for a first row of ``find_lattice``."""
    links = np.where(first_row > 0, 1.0, 0.0)
    links.flat[0] = 0.0
    degree = links.sum()
    # The adjacency of a lattice is a convolution, so its transform has the eigenvalues.
    laplacian = degree - lattice_eigenvalues(links).real
    # An exact sum mixes as weights of 1/n do.
    weights = first_row if mixing == "gossip" else np.full_like(first_row, 1 / first_row.size)
    a = horizon_spectrum(weights, objective, gossip)
    family = RatioFamily(
        slack=np.ones(1),
        limits=np.array([DEFAULT_NOISE_RATIO**2]),
        degrees=np.array([degree]),
        eigenvalues=laplacian.ravel(),
        # Fourier modes have the same weight at every agent, so that one row stands for all.
        squared_vectors=np.full((1, first_row.size), 1 / first_row.size),
        traces=(float(a.sum()), float((a * laplacian).sum())),
    )
    ratio, scale, _ = search_ratio(family)
    return LatticeNoise(scale / precision_cap * (1 + ratio * np.maximum(laplacian, 0.0)))


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
        _list_nearest(sides, len(links) + 4 * num_partners), sides, num_partners // 2, links
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


def _list_nearest(sides: tuple[int, ...], count: int) -> list[Hop]:
    """Return the shortest hops around the lattice, without that to the agent itself."""
    # An axis has as many as wanted, whatever the others have, so that few need to be sorted.
    reach = [np.arange(-min(count, side // 2), min(count, side // 2) + 1) for side in sides]
    moves = np.stack(np.meshgrid(*reach, indexing="ij"), axis=-1).reshape(-1, len(sides))
    order = np.lexsort((*moves.T, np.square(moves).sum(axis=1)))[1 : 1 + 2 * count]
    # Half way around, both directions lead to the same agent.
    return list(dict.fromkeys(tuple((moves[k] % sides).tolist()) for k in order))


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


def _negate(hop: Hop, sides: tuple[int, ...]) -> Hop:
    return tuple(-x % side for x, side in zip(hop, sides, strict=True))


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
