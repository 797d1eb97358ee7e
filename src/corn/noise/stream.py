"""Streams of normals from keys, and each agent's share of the noise, a sum of streams.

The address of a stream is its owner, the run, the step and its number. The same address gives the
same values on any machine. So nothing is stored, and the noise of a past step can be drawn again.

**Never release two messages with the noise of one address**: their difference is free of noise. The
release ledger (:mod:`corn.noise.ledger`) prevents that.

Agent i adds √θ_i times its private stream and, for each of its seed groups, its row of the group's
factor times the group's streams: line 6 of the paper's algorithm, v = R^{1/2} s. Sums run in one
fixed order (private noise, then groups and their streams as numbered), term by term in float64.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias, final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from corn.checks import FloatArray, require, require_count, require_in_range, require_length
from corn.covariance.decomposition import Decomposition
from corn.errors import InvalidArgumentError
from corn.noise.keys import Secret
from corn.noise.normals import PAIRS_PER_BLOCK, VALUES_PER_BLOCK, WORDS_PER_BLOCK, load_compiled

NormalArray: TypeAlias = NDArray[np.floating[Any]]

NONCE_BYTES = 32

_LENGTH_BYTES = 4  # part of every address and key: another number would change all of them


@dataclass(frozen=True)
class Owner:
    """The agents that can draw a stream: one agent for private noise, or a seed group.

    ``group`` is the number of the seed group in its decomposition; None for private noise.
    """

    members: tuple[int, ...]
    group: int | None = None

    def __post_init__(self) -> None:
        # One order only: the members are part of the address, so two orders would be two streams.
        is_sorted = list(self.members) == sorted(set(self.members)) and bool(self.members)
        require(is_sorted, "members", "distinct agents in increasing order", self.members)
        is_owned = self.group is not None or len(self.members) == 1
        require(is_owned, "members", "one agent for private noise", self.members)

    def __str__(self) -> str:
        if self.group is None:
            return f"agent {self.members[0]}'s private noise"
        return f"seed group {self.group} of agents {', '.join(map(str, self.members))}"

    @cached_property
    def encoded(self) -> bytes:
        """A byte string that no other owner has."""
        # Members are encoded as one field, so that they cannot be mistaken for a group's number.
        kind = ("private",) if self.group is None else ("group", self.group)
        return encode_fields(*kind, encode_fields(*self.members))


@dataclass(frozen=True)
class StreamAddress:
    """The address of a stream of a run at a step, from 0; the nonce is new for every run.

    ``stream`` is the column of the group's factor; 0 for private noise.
    """

    owner: Owner
    nonce: bytes
    step: int
    stream: int = 0

    def __post_init__(self) -> None:
        check_nonce(self.nonce)
        require_count("step", self.step, least=0, most=(1 << 63) - 1)
        require_count("stream", self.stream, least=0)

    def encode(self, kind: str) -> bytes:
        """Return bytes that no other address, and no other kind of source at this one, has."""
        return encode_fields(kind, self.owner.encoded, self.nonce, self.step, self.stream)


Terms: TypeAlias = Sequence[tuple[float, StreamAddress]]
"""Streams and their weights in a sum."""


class NoiseSource(ABC):
    """A source of streams: secure, simulated, or a wrapper around one of them."""

    def fill(self, out: NormalArray, address: StreamAddress) -> None:
        """Fill ``out``, shape (d,), with the first coordinates of a stream."""
        self.fill_sum(out, [(1.0, address)])

    @abstractmethod
    def fill_sum(self, out: NormalArray, terms: Terms) -> None:
        """Fill ``out`` with a sum of streams, each times its weight, term by term in this order."""


def encode_fields(*fields: bytes | str | int) -> bytes:
    """Join fields, each after its length: the basis of all domain separation in this package.

    Two calls whose fields differ in any place or in number give different bytes, because the result
    can be split again: see :func:`decode_fields`.
    """
    # Without the lengths, moving a byte from one field to the next would give the same address, and
    # with it the same noise.
    parts = [field if isinstance(field, bytes) else str(field).encode() for field in fields]
    return b"".join(len(part).to_bytes(_LENGTH_BYTES, "big") + part for part in parts)


def decode_fields(data: bytes) -> list[bytes] | None:
    """Split a byte string that :func:`encode_fields` made; return None for any other."""
    fields = []
    end = 0
    while end < len(data):
        start = end + _LENGTH_BYTES
        end = start + int.from_bytes(data[end:start], "big")
        if len(data) < end:
            return None
        fields.append(data[start:end])
    return fields


def check_fingerprint(value: bytes, name: str = "plan_fingerprint") -> bytes:
    """Return a plan's fingerprint if it is 32 bytes, or raise."""
    if isinstance(value, bytes) and len(value) == NONCE_BYTES:
        return value
    found = f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__
    raise InvalidArgumentError(f"{name} must be {NONCE_BYTES} bytes, found {found}")


def check_nonce(nonce: bytes) -> bytes:
    """Return the nonce of a run if it is 32 bytes, or raise."""
    return check_fingerprint(nonce, "nonce")


BLOCK_BYTES = 4 * WORDS_PER_BLOCK  # of a stream, that give a block of normals
# Galois/Counter Mode takes counters of 32 bits, from 2 on.
_MOST_GCM_BYTES = (1 << 36) - 32
_FIRST_COUNTER = (2).to_bytes(16, "big")
# Part of every key derivation. Any change of the values that a key and an address give must change
# it, so that agents of different versions cannot add noise that does not cancel.
STREAM_FORMAT = "corn/stream/6"
# Words of all streams that are read at once: enough that calls cost little, few enough that words
# stay in a core's cache until they are used.
_BYTES_AT_ONCE = 1 << 20


@final
class SecureSource(NoiseSource):
    """Streams from keys: AES-128 in counter mode, under a key of its own for every address.

    Without the owner's key a stream is indistinguishable from independent normals. The key of a
    stream is BLAKE2b of its address under the owner's key; the counter is the position in the
    stream, from 2. AES-128 is as strong as the X25519 keys that pairs agree on. Any number of
    threads may draw from one source.
    """

    def __init__(self, keys: Mapping[Owner, Secret]) -> None:
        self._keys = dict(keys)

    def __repr__(self) -> str:
        return f"SecureSource(keys of {len(self._keys)} owners)"

    def fill_sum(self, out: NormalArray, terms: Terms) -> None:
        """Fill ``out`` as :class:`NoiseSource` says; needs the keys of all owners."""
        if out.dtype != np.float64:
            raise InvalidArgumentError(f"out must be float64, found {out.dtype}")
        if not terms:
            out[:] = 0
            return
        # Whole blocks, because a block is the unit in which normals are made from words.
        num_blocks = -(-len(out) // VALUES_PER_BLOCK)
        keystreams = [self.start(address, num_blocks * BLOCK_BYTES) for _, address in terms]
        weights = np.array([weight for weight, _ in terms], np.float64)
        at_once = count_at_once(len(terms) * BLOCK_BYTES, num_blocks)
        reader = Keystreams((keystreams, at_once * BLOCK_BYTES))
        words = reader.pieces[0].view(np.uint32).reshape(len(terms), at_once, WORDS_PER_BLOCK)
        sums = np.empty((at_once, 2, PAIRS_PER_BLOCK))
        for start in range(0, len(out), sums.size):
            reader.read()
            part = out[start : start + sums.size]
            blocks = sums[: -(-len(part) // VALUES_PER_BLOCK)]
            load_compiled().sum_blocks(words, 0, weights, blocks)
            part[:] = blocks.reshape(-1)[: len(part)]

    def start(
        self, address: StreamAddress, num_bytes: int, *, kind: str = "secure"
    ) -> CipherContext:
        """Return the keystream of an address, of so many bytes."""
        key = self._keys.get(address.owner)
        if key is None:
            raise InvalidArgumentError(f"this source holds no key for {address.owner}")
        # A key per stream and kind, so that all counters start at zero and no two streams overlap.
        data = address.encode(kind)
        person = STREAM_FORMAT.encode()
        own = hashlib.blake2b(data, key=key.reveal(), digest_size=16, person=person).digest()
        return start_keystream(own, num_bytes)


_ZEROS = bytes(_BYTES_AT_ONCE)


class _Buffer(threading.local):
    """Memory of one thread, kept from draw to draw: new memory would cost as much as drawing."""

    words = np.empty(0, np.uint8)


_BUFFER = _Buffer()


@final
class Keystreams:
    """Keystreams that are read together, piece by piece: the encryption of zeros.

    Each part is some keystreams and the number of bytes that a piece has of each. ``pieces`` are
    those read last, shape (keystreams, bytes), in memory that the next object of this thread takes
    over.
    """

    def __init__(self, *parts: tuple[Sequence[CipherContext], int]) -> None:
        needed = sum(len(keystreams) * num_bytes for keystreams, num_bytes in parts)
        if len(_BUFFER.words) < needed:
            _BUFFER.words = np.empty(needed, np.uint8)
        self.pieces: list[NDArray[np.uint8]] = []
        self._jobs: list[tuple[CipherContext, memoryview, memoryview]] = []
        end = 0
        for keystreams, num_bytes in parts:
            start, end = end, end + len(keystreams) * num_bytes
            piece = _BUFFER.words[start:end].reshape(len(keystreams), num_bytes)
            zeros = memoryview(_ZEROS)[:num_bytes]
            for keystream, own in zip(keystreams, piece, strict=True):
                self._jobs.append((keystream, zeros, own.data))
            self.pieces.append(piece)

    def read(self) -> None:
        """Read the next piece of each keystream."""
        for keystream, zeros, piece in self._jobs:
            keystream.update_into(zeros, piece)


def count_at_once(num_bytes: int, count: int) -> int:
    """Return how many of ``count`` values, each of so many bytes of all streams, a piece has."""
    return min(max(_BYTES_AT_ONCE // max(num_bytes, 1), 1), max(count, 1))


def start_keystream(key: bytes, num_bytes: int) -> CipherContext:
    """Return the cipher whose encryption of zeros is so many bytes of a stream."""
    mode: modes.CTR | modes.GCM = modes.CTR(_FIRST_COUNTER)
    # GCM gives the same bytes. OpenSSL has wider instructions for it than for plain counters, so
    # that it is faster although it computes a tag, which nobody reads.
    if num_bytes <= _MOST_GCM_BYTES:
        mode = modes.GCM(bytes(12))
    return Cipher(algorithms.AES(key), mode).encryptor()


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
            factor = np.column_stack(columns) if columns else np.zeros((len(R), 0))
            # The factor is checked, not the input: an indefinite matrix has none.
            if (np.abs(factor @ factor.T - R) > len(R) * negligible).any():
                raise InvalidArgumentError("covariance must be positive semidefinite")
            return factor
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
    few = (F if F.shape[1] == 1 else factor_covariance(F @ F.T) for F in decomposition.factors)
    return Decomposition(decomposition.private_variance, decomposition.seed_groups, tuple(few))


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
    """Return :func:`draw_share` of each agent, shape (n, stop): v ~ N(0, R ⊗ I), to simulate."""
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
    terms = _terms(decomposition, agent)
    return [(weight, StreamAddress(owner, nonce, step, k)) for weight, owner, k in terms]


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
        _check_seed(seed)
        self._seed = seed
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
        words = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        none = {"has_uint32": 0, "uinteger": 0}
        state: Any = {"bit_generator": "SFC64", "state": {"state": words}, **none}
        self._bits.state = state


def simulated_keys(decomposition: Decomposition, *, seed: int) -> dict[Owner, Secret]:
    """Return all agents' keys from a public seed, which protect nothing, to simulate a network."""
    _check_seed(seed)
    keys = {}
    for owner in owners(decomposition, range(decomposition.num_agents)):
        data = encode_fields("simulated key", seed, owner.encoded)
        keys[owner] = Secret(hashlib.blake2b(data, digest_size=32, person=_PERSON).digest())
    return keys


def _check_seed(seed: int) -> None:
    # Bytes are refused in particular: they would be key material, which this source must not get.
    is_integer = isinstance(seed, int) and not isinstance(seed, bool)
    require(is_integer, "seed", "an integer", type(seed).__name__)
