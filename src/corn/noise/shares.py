"""Each agent's share of the noise, drawn by the agent from the streams that it has keys for.

Agent i adds √θ_i times its private stream and, for each of its seed groups, its row of the group's
factor times the group's streams: line 6 of the paper's algorithm, v = R^{1/2} s, with a factor that
lets each agent draw its own row and nothing else. Sums run in one fixed order (private noise, then
groups and their streams as numbered), term by term in float64, so that one agent's draw and a
simulation of all agents agree in every bit (except the sign of a zero).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from corn.arrays import FloatArray
from corn.checks import require, require_in_range
from corn.covariance.decomposition import Decomposition
from corn.errors import InvalidArgumentError
from corn.noise.address import NoiseSource, Owner, StreamAddress

# A part of a stream that stays in the cache while it is added to several shares.
_COORDINATES_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class _Term:
    """A stream, and its weight for each agent: (position among the agents drawn, weight)."""

    owner: Owner
    stream: int
    weights: tuple[tuple[int, float], ...]


def draw_share(
    decomposition: Decomposition,
    agent: int,
    *,
    source: NoiseSource,
    nonce: bytes,
    step: int,
    stop: int,
    start: int = 0,
    out: FloatArray | None = None,
) -> FloatArray:
    """Return agent's noise v_i at a step, coordinates [start, stop): shape (stop − start,).

    Only the agent's private stream and those streams of its own groups are drawn in which its row
    of the factor is not zero. No memory is needed except the result, which is ``out`` if given, and
    a buffer of a few MB that the thread keeps.

    >>> from corn.noise.simulation import SimulationSource
    >>> pair = Decomposition(np.zeros(2), ((0, 1),), (np.array([[1.0], [-1.0]]),))
    >>> at = {"source": SimulationSource(1), "nonce": bytes(32), "step": 0, "stop": 3}
    >>> (draw_share(pair, 0, **at) + draw_share(pair, 1, **at)).tolist()
    [0.0, 0.0, 0.0]
    """
    coordinates = _check_coordinates(start, stop)
    share = np.empty(len(coordinates)) if out is None else out
    if share.shape != (len(coordinates),) or share.dtype != np.float64:
        raise InvalidArgumentError(
            f"out must have shape ({len(coordinates)},) and type float64, found {share.shape} and "
            f"{share.dtype}"
        )
    _draw(share[np.newaxis], decomposition, (agent,), source, nonce, step, coordinates)
    return share


def draw_all_shares(
    decomposition: Decomposition,
    *,
    source: NoiseSource,
    nonce: bytes,
    step: int,
    stop: int,
    start: int = 0,
) -> FloatArray:
    """Return all agents' noise at a step, shape (n, stop − start): v ~ N(0, R ⊗ I), to simulate.

    Row i equals agent i's :func:`draw_share` in every bit, but a stream is drawn once rather than
    once for each member.
    """
    coordinates = _check_coordinates(start, stop)
    agents = tuple(range(decomposition.num_agents))
    shares = np.empty((len(agents), len(coordinates)))
    _draw(shares, decomposition, agents, source, nonce, step, coordinates)
    return shares


def owners(decomposition: Decomposition, agents: Iterable[int]) -> tuple[Owner, ...]:
    """Return the owners of the streams that these agents draw: the keys that they need, no more."""
    drawing = tuple(agents)
    found = [term.owner for term in _terms(decomposition, drawing)]
    if decomposition.is_masked:
        # Masks are no terms of the noise, and have streams all the same.
        found += [
            Owner(group, number)
            for number, group in enumerate(decomposition.seed_groups)
            if not set(drawing).isdisjoint(group)
        ]
    return tuple(dict.fromkeys(found))


def _draw(
    shares: FloatArray,
    decomposition: Decomposition,
    agents: tuple[int, ...],
    source: NoiseSource,
    nonce: bytes,
    step: int,
    coordinates: range,
) -> None:
    """Fill ``shares``, shape (agents, coordinates)."""
    terms = [
        (term.weights, StreamAddress(term.owner, nonce, step, term.stream))
        for term in _terms(decomposition, agents)
    ]
    # A source can sum the streams of one agent block by block, while values are in the cache.
    if len(agents) == 1:
        own = [(weight, address) for ((_, weight),), address in terms]
        source.fill_sum(shares[0], own, start=coordinates.start)
        return
    # For several agents the loops are exchanged, so that each stream is drawn once. The order of
    # the terms of one agent stays the same, and with it every rounding.
    shares[:] = 0
    for weights, address in terms:
        _add_to_many(shares, weights, address, source, coordinates.start)


def _add_to_many(
    shares: FloatArray,
    weights: Sequence[tuple[int, float]],
    address: StreamAddress,
    source: NoiseSource,
    start: int,
) -> None:
    """Draw a stream once and add it to several agents' shares, as ``fill_sum`` would."""
    for first in range(0, shares.shape[1], _COORDINATES_AT_ONCE):
        part = shares[:, first : first + _COORDINATES_AT_ONCE]
        normals, product = np.empty((2, part.shape[1]))
        source.fill(normals, address, start=start + first)
        # Two operations, not a matrix product: BLAS sums in another order and may fuse the two.
        for position, weight in weights:
            np.multiply(normals, weight, product)
            np.add(part[position], product, part[position])


# Cached, because every step draws the same terms. Decompositions are hashed by identity.
@lru_cache(maxsize=16)
def _terms(decomposition: Decomposition, agents: tuple[int, ...]) -> tuple[_Term, ...]:
    """Return the streams that some of ``agents`` draw, in the order in which they are summed."""
    for agent in agents:
        require_in_range("agent", agent, 0, decomposition.num_agents - 1)
    theta = decomposition.private_variance
    terms = [
        _Term(Owner((agent,)), 0, ((position, float(np.sqrt(theta[agent]))),))
        for position, agent in enumerate(agents)
        if theta[agent] > 0
    ]
    if decomposition.is_masked:
        return tuple(terms)  # masks are no normals
    positions = {agent: position for position, agent in enumerate(agents)}
    groups = zip(decomposition.seed_groups, decomposition.factors, strict=True)
    for number, (group, factor) in enumerate(groups):
        rows = [(positions[a], row) for a, row in zip(group, factor, strict=True) if a in positions]
        for stream in range(factor.shape[1]):
            # An agent with weight zero does not draw a stream: in a sparse factor, most of them.
            weights = tuple((at, float(row[stream])) for at, row in rows if row[stream] != 0)
            if weights:
                terms.append(_Term(Owner(group, number), stream, weights))
    return tuple(terms)


def _check_coordinates(start: int, stop: int) -> range:
    require(stop >= start, "stop", f"at least start, which is {start}", stop)
    return range(start, stop)
