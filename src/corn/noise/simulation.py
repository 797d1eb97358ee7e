"""Streams for simulations, from a public seed: fast for short vectors, never secret."""

from __future__ import annotations

import hashlib
from typing import Any, final

import numpy as np

from corn.checks import require
from corn.covariance.decomposition import Decomposition
from corn.errors import InvalidArgumentError
from corn.noise.address import (
    NoiseSource,
    NormalArray,
    Owner,
    Terms,
    check_range,
    encode_fields,
    find_overlap,
)
from corn.noise.keys import Secret
from corn.noise.shares import owners

# Values drawn from one state. More would make ranges that start late slow, fewer would make hashing
# the larger part of the time.
_VALUES_PER_STATE = 1 << 14
_PERSON = b"corn/simulation"


@final
class SimulationSource(NoiseSource):
    """NumPy's SFC64 with a state from the address: **protects nothing, never deploy it**.

    It takes the addresses of :class:`corn.noise.stream.SecureSource` and gives other values, also
    in float32. A stream of a few coordinates takes a fifth of the secure source's time, because no
    block has to be filled; from about ten thousand the secure source is faster. Draw from it in one
    thread at a time.

    >>> from corn.noise.address import StreamAddress
    >>> source = SimulationSource(seed=1)
    >>> values = np.empty(3, np.float64)
    >>> source.fill(values, StreamAddress(Owner((0,)), nonce=bytes(32), step=0))
    >>> np.isfinite(values).all()
    np.True_
    """

    def __init__(self, seed: int) -> None:
        self._seed = _check_seed(seed)
        self._bits = np.random.SFC64(0)
        self._generator = np.random.Generator(self._bits)

    def fill_sum(self, out: NormalArray, terms: Terms, *, start: int = 0) -> None:
        """Fill ``out`` as :class:`NoiseSource` says."""
        stop = check_range(out, start)
        real: Any = out.dtype
        if real not in (np.float32, np.float64):
            raise InvalidArgumentError(f"out must be float32 or float64, found {real}")
        if not terms:
            out[:] = 0
        for number, (weight, address) in enumerate(terms):
            prefix = address.encode(f"simulation {self._seed} {real.name}")
            # NumPy's ziggurat uses a varying number of bits per value, so drawing starts at the
            # last coordinate before the range whose state is known.
            for first in range(start - start % _VALUES_PER_STATE, stop, _VALUES_PER_STATE):
                self._set_state(prefix, first)
                values = np.empty(min(_VALUES_PER_STATE, stop - first), real)
                self._generator.standard_normal(dtype=real, out=values)
                values *= real.type(weight)
                found, wanted = find_overlap(values, first, out, start)
                if number == 0:
                    wanted[:] = found
                else:
                    wanted += found

    def _set_state(self, prefix: bytes, first: int) -> None:
        # A hash, not a counter: states of SFC64 that differ in a few bits give correlated values at
        # first, which NumPy's own seeding avoids by discarding some.
        data = encode_fields(prefix, first)
        digest = hashlib.blake2b(data, digest_size=32, person=_PERSON).digest()
        words = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        self._bits.state = {
            "bit_generator": "SFC64",
            "state": {"state": words},
            "has_uint32": 0,
            "uinteger": 0,
        }


def simulated_keys(decomposition: Decomposition, *, seed: int) -> dict[Owner, Secret]:
    """Return all agents' keys from a seed, for a secure source that simulates the whole network.

    With the same keys a deployment draws the same bits. The seed is public, so these keys protect
    nothing.
    """
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
