"""Each agent's share of the noise, drawn by itself from the streams it has keys for.

Agent i adds √θ_i times its private stream and, for each of its seed groups, its row of the group's
factor times the group's streams: line 6 of the paper's algorithm, v = R^{1/2} s, with a factor that
lets each agent draw its own row and nothing else. Sums run in one fixed order (private noise, then
groups and their streams as numbered), term by term in the type asked for, so that one agent's draw
and a simulation of all agents agree in every bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import DTypeLike

from corn.covariance.decomposition import Decomposition
from corn.errors import InvalidArgumentError
from corn.noise.address import NoiseSource, Owner, StreamAddress
from corn.noise.normals import NormalArray, precision_of

_COORDINATES_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class _Term:
    """A stream, and how much of it each agent adds: (position among the agents drawn, weight)."""

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
    dtype: DTypeLike = np.float32,
) -> NormalArray:
    """Agent's noise v_i at a step, coordinates [start, stop): shape (stop − start,).

    Asks the source only for the agent's private stream and for streams of its own groups in which
    its row of the factor is not zero. Needs no memory but the result and two short buffers.

    >>> from corn.noise.simulation import SimulationSource
    >>> pair = Decomposition(np.zeros(2), ((0, 1),), (np.array([[1.0], [-1.0]]),))
    >>> at = {"source": SimulationSource(1), "nonce": bytes(32), "step": 0, "stop": 3}
    >>> (draw_share(pair, 0, **at) + draw_share(pair, 1, **at)).tolist()
    [0.0, 0.0, 0.0]
    """
    shares = _draw(decomposition, (agent,), source, nonce, step, range(start, stop), dtype)
    return shares.reshape(-1)


def draw_all_shares(
    decomposition: Decomposition,
    *,
    source: NoiseSource,
    nonce: bytes,
    step: int,
    stop: int,
    start: int = 0,
    dtype: DTypeLike = np.float32,
) -> NormalArray:
    """All agents' noise at a step, shape (n, stop − start), for simulations: v ~ N(0, R ⊗ I).

    Row i equals agent i's :func:`draw_share` in every bit, but a stream is drawn once rather than
    once for each member.
    """
    agents = tuple(range(decomposition.num_agents))
    return _draw(decomposition, agents, source, nonce, step, range(start, stop), dtype)


def owners(decomposition: Decomposition, agents: Iterable[int]) -> tuple[Owner, ...]:
    """Whose streams these agents draw: the keys they need, no more."""
    return tuple(dict.fromkeys(term.owner for term in _terms(decomposition, tuple(agents))))


def _draw(
    decomposition: Decomposition,
    agents: tuple[int, ...],
    source: NoiseSource,
    nonce: bytes,
    step: int,
    coordinates: range,
    dtype: DTypeLike,
) -> NormalArray:
    if coordinates.stop < coordinates.start:
        raise InvalidArgumentError(
            f"stop must be at least start, found {coordinates.stop} < {coordinates.start}"
        )
    real = precision_of(dtype).real
    terms = _terms(decomposition, agents)
    shares = np.zeros((len(agents), len(coordinates)), real)
    for first in range(0, len(coordinates), _COORDINATES_AT_ONCE):
        part = shares[:, first : first + _COORDINATES_AT_ONCE]
        normals, product = np.empty((2, part.shape[1]), real)
        for term in terms:
            address = StreamAddress(term.owner, nonce, step, term.stream)
            source.fill(normals, address, start=coordinates.start + first)
            # Two operations, not a matrix product: BLAS sums in an order of its own.
            for position, weight in term.weights:
                np.multiply(normals, np.array(weight, real), product)
                np.add(part[position], product, part[position])
    return shares


@lru_cache(maxsize=16)
def _terms(decomposition: Decomposition, agents: tuple[int, ...]) -> tuple[_Term, ...]:
    """The streams that some of ``agents`` draw, in the order in which they are summed."""
    _check_agents(agents, decomposition.num_agents)
    theta = decomposition.private_variance
    terms = [
        _Term(Owner((agent,)), 0, ((position, float(np.sqrt(theta[agent]))),))
        for position, agent in enumerate(agents)
        if theta[agent] > 0
    ]
    positions = {agent: position for position, agent in enumerate(agents)}
    groups = zip(decomposition.seed_groups, decomposition.factors, strict=True)
    for number, (group, factor) in enumerate(groups):
        rows = [(positions[a], row) for a, row in zip(group, factor, strict=True) if a in positions]
        for stream in range(factor.shape[1]):
            weights = tuple((at, float(row[stream])) for at, row in rows if row[stream] != 0)
            if weights:
                terms.append(_Term(Owner(group, number), stream, weights))
    return tuple(terms)


def _check_agents(agents: Sequence[int], num_agents: int) -> None:
    for agent in agents:
        if not 0 <= agent < num_agents:
            raise InvalidArgumentError(f"agent must be in 0 … {num_agents - 1}, found {agent}")
