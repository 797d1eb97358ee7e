"""Each agent's share of the noise, drawn by the agent from the streams that it has keys for.

Agent i adds √θ_i times its private stream and, for each of its seed groups, its row of the group's
factor times the group's streams: line 6 of the paper's algorithm, v = R^{1/2} s, with a factor that
lets each agent draw its own row and nothing else. Sums run in one fixed order (private noise, then
groups and their streams as numbered), term by term in float64. Factors are sparse, because each
nonzero is a stream that an agent must draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, final

import numpy as np

from corn.checks import FloatArray, require, require_in_range, require_length
from corn.covariance.decomposition import Decomposition
from corn.errors import InvalidArgumentError
from corn.noise.keys import Secret
from corn.noise.stream import NoiseSource, NormalArray, Owner, StreamAddress, Terms, encode_fields

# The smallest pivot, relative to the largest. Smaller ones could keep the factor sparser, but the
# error of the elimination grows with the ratio.
_LEAST_PIVOT = 0.01
# Entries this small, relative to the variances, are rounding errors.
_TOLERANCE = 1e-12


def factor_covariance(R: FloatArray) -> FloatArray:
    """Return F, shape (m, streams), with F Fᵀ equal to a positive semidefinite (m, m) matrix.

    It is a Cholesky factor that is sparse where the covariance is, with as many streams as the
    rank: each turn eliminates the agent with the fewest remaining links. An entry of F Fᵀ differs
    from R_ij by at most m·10⁻¹²·√(R_ii R_jj).
    """
    # Relative to the variances, so that agents with little noise are factored as accurately.
    rest = R.copy()
    variance = np.maximum(np.diag(R), np.finfo(float).tiny)
    negligible = _TOLERANCE * np.outer(np.sqrt(variance), np.sqrt(variance))
    columns: list[FloatArray] = []
    while True:
        # Entries below the tolerance are rounding errors: a direction without noise, or no link.
        linked = np.abs(rest) > negligible
        pivots = np.where(np.diag(linked), np.diag(rest) / variance, 0.0)
        if pivots.max() <= 0:
            return np.column_stack(columns) if columns else np.zeros((len(R), 0))
        eligible = np.flatnonzero(pivots >= _LEAST_PIVOT * pivots.max())
        # Minimum degree: eliminating an agent links all its neighbours, so few neighbours mean
        # little fill-in.
        num_links = linked.sum(axis=1)
        pivot = min(eligible, key=lambda agent: (num_links[agent], -pivots[agent]))
        column = np.where(linked[pivot], rest[pivot], 0.0) / np.sqrt(rest[pivot, pivot])
        columns.append(column)
        members = np.flatnonzero(column)
        rest[np.ix_(members, members)] -= np.outer(column[members], column[members])
        # Exactly zero, despite rounding errors of the subtraction: nobody is eliminated twice.
        rest[pivot] = rest[:, pivot] = 0.0


def choose_factors(decomposition: Decomposition) -> Decomposition:
    """Return the same private noise and seed groups, with factors that need fewer streams.

    Each group keeps its members and its covariance. Done once, where the plan is made: the members
    of a group must all draw with the same factor, to the last bit.
    """
    # One stream is as few as can be.
    chosen = (
        factor if factor.shape[1] == 1 else factor_covariance(factor @ factor.T)
        for factor in decomposition.factors
    )
    return Decomposition(decomposition.private_variance, decomposition.seed_groups, tuple(chosen))


def draw_share(
    decomposition: Decomposition,
    agent: int,
    *,
    source: NoiseSource,
    nonce: bytes,
    step: int,
    stop: int,
    out: FloatArray | None = None,
) -> FloatArray:
    """Return agent's noise v_i at a step, coordinates [0, stop), in ``out`` if given."""
    share = np.empty(stop) if out is None else out
    require_length("out", len(share), stop, per="coordinate")
    # The source sums the streams block by block, while values are in the cache.
    source.fill_sum(share, list_terms(decomposition, agent, nonce=nonce, step=step))
    return share


def draw_all_shares(decomposition: Decomposition, **address: Any) -> FloatArray:
    """Return all agents' noise at a step, shape (n, stop): v ~ N(0, R ⊗ I), to simulate.

    Row i is agent i's :func:`draw_share`, which has the other arguments.
    """
    agents = range(decomposition.num_agents)
    return np.stack([draw_share(decomposition, agent, **address) for agent in agents])


def owners(decomposition: Decomposition, agents: Iterable[int]) -> tuple[Owner, ...]:
    """Return the owners of the streams of noise and masks that some of these agents draw."""
    drawing = set(agents)
    private = [Owner((a,)) for a in sorted(drawing) if decomposition.private_variance[a] > 0]
    groups = enumerate(decomposition.seed_groups)
    shared = [Owner(group, number) for number, group in groups if not drawing.isdisjoint(group)]
    return (*private, *shared)


def list_terms(decomposition: Decomposition, agent: int, *, nonce: bytes, step: int) -> Terms:
    """Return the streams of an agent's noise at a step, with their weights."""
    return [
        (weight, StreamAddress(owner, nonce, step, stream))
        for weight, owner, stream in _terms(decomposition, agent)
    ]


# Cached, because every step draws the same terms. Decompositions are hashed by identity.
@lru_cache(maxsize=1024)
def _terms(decomposition: Decomposition, agent: int) -> tuple[tuple[float, Owner, int], ...]:
    """Return weight, owner and stream of an agent's terms, in the order of their sum."""
    require_in_range("agent", agent, 0, decomposition.num_agents - 1)
    theta = decomposition.private_variance[agent]
    terms = [(float(np.sqrt(theta)), Owner((agent,)), 0)] if theta > 0 else []
    if decomposition.is_masked:
        return tuple(terms)  # masks are no normals
    groups = zip(decomposition.seed_groups, decomposition.factors, strict=True)
    for number, (group, factor) in enumerate(groups):
        if agent in group:
            owner, row = Owner(group, number), factor[group.index(agent)].tolist()
            # An agent with weight zero does not draw a stream: in a sparse factor, most of them.
            terms += [(weight, owner, stream) for stream, weight in enumerate(row) if weight != 0]
    return tuple(terms)


# Values drawn from one state.
_VALUES_PER_STATE = 1 << 14
_PERSON = b"corn/simulation"


@final
class SimulationSource(NoiseSource):
    """NumPy's SFC64 with a state from the address: **protects nothing, never deploy it**.

    It takes the addresses of :class:`corn.noise.stream.SecureSource` and gives other values, also
    in float32. Short streams take a fifth of the secure source's time, because no block has to be
    filled. Draw from it in one thread at a time.
    """

    def __init__(self, seed: int) -> None:
        self._seed = _check_seed(seed)
        self._bits = np.random.SFC64(0)
        self._generator = np.random.Generator(self._bits)

    def fill_sum(self, out: NormalArray, terms: Terms) -> None:
        """Fill ``out`` as :class:`NoiseSource` says."""
        real: Any = out.dtype
        if real not in (np.float32, np.float64):
            raise InvalidArgumentError(f"out must be float32 or float64, found {real}")
        out[:] = 0
        for weight, address in terms:
            prefix = address.encode(f"simulation {self._seed} {real.name}")
            for first in range(0, len(out), _VALUES_PER_STATE):
                self._set_state(prefix, first)
                part = out[first : first + _VALUES_PER_STATE]
                part += real.type(weight) * self._generator.standard_normal(len(part), real)

    def _set_state(self, prefix: bytes, first: int) -> None:
        # A hash, not a counter: states of SFC64 that differ in a few bits give correlated values at
        # first, which NumPy's own seeding avoids by discarding some.
        data = encode_fields(prefix, first)
        digest = hashlib.blake2b(data, digest_size=32, person=_PERSON).digest()
        words = {"state": np.frombuffer(digest, dtype="<u8").astype(np.uint64)}
        none = {"has_uint32": 0, "uinteger": 0}
        self._bits.state = {"bit_generator": "SFC64", "state": words, **none}


def simulated_keys(decomposition: Decomposition, *, seed: int) -> dict[Owner, Secret]:
    """Return all agents' keys from a public seed, which protect nothing, to simulate a network."""
    _check_seed(seed)
    keys = {}
    for owner in owners(decomposition, range(decomposition.num_agents)):
        data = encode_fields("simulated key", seed, owner.encoded)
        keys[owner] = Secret(hashlib.blake2b(data, digest_size=32, person=_PERSON).digest())
    return keys


def _check_seed(seed: int) -> int:
    # Bytes are refused in particular: they would be key material, which this source must not get.
    is_integer = isinstance(seed, int) and not isinstance(seed, bool)
    require(is_integer, "seed", "an integer", type(seed).__name__)
    return seed
