"""An address gives one value on any machine and for any length; addresses are independent."""

import hashlib
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st

from corn.errors import InvalidArgumentError
from corn.noise import NoiseSource, Owner, Secret, SecureSource, SimulationSource, StreamAddress
from corn.noise.stream import decode_fields, encode_fields, start_keystream
from tests.noise.test_normals import exact_block

from ..leaks import shows

KEY = Secret(bytes(range(32)))
OWNER = Owner((1, 4), group=2)
ADDRESS = StreamAddress(OWNER, nonce=bytes(32), step=5, stream=3)
SOURCES: list[NoiseSource] = [SecureSource({OWNER: KEY}), SimulationSource(3)]
LENGTH = 70_000

KNOWN = [0x3FF372A9E4E36D8A, 0x3FEAB729C7AF7BCA, 0x3FECBB9756F65A7B, 0xBFFD3153A5073C5D]
KNOWN_DIGEST = "64b4dc39acf6f2e33e781dfe6cb218bf4b2984c439845515fda6c16069c74b16"


def draw(
    source: NoiseSource, address: StreamAddress = ADDRESS, stop: int = 64, dtype: Any = np.float64
) -> Any:
    out = np.empty(stop, dtype)
    source.fill(out, address)
    return out


def digest(values: Any) -> str:
    return hashlib.sha256(values.astype(values.dtype.newbyteorder("<")).tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("source", "dtype"),
    [(SOURCES[0], np.float64), (SOURCES[1], np.float32), (SOURCES[1], np.float64)],
    ids=lambda s: getattr(s, "__name__", type(s).__name__),
)
def test_any_length_gives_the_same_values(source: NoiseSource, dtype: Any) -> None:
    whole = draw(source, stop=LENGTH, dtype=dtype)
    streams = [StreamAddress(OWNER, bytes(32), 5, stream) for stream in range(3)]
    terms = list(zip((0.37, -2.1, 1e-3), streams, strict=True))
    first, *others = (dtype(w) * draw(source, at, stop=LENGTH, dtype=dtype) for w, at in terms)
    expected = sum(others, start=first)
    for stop in (0, 1, 511, 512, 513, 1023, 1024, 1025, 16384, 65535, 65536, 65537, LENGTH):
        part = draw(source, stop=stop, dtype=dtype)
        np.testing.assert_array_equal(part, whole[:stop])
        sums = np.ones(LENGTH, dtype)
        source.fill_sum(sums[:stop], terms)
        np.testing.assert_array_equal(sums, np.where(np.arange(LENGTH) < stop, expected, 1))


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: type(s).__name__)
def test_noncontiguous_memory_is_filled(source: NoiseSource) -> None:
    whole, every_second = draw(source, stop=5000), np.zeros((5000, 2))
    source.fill(every_second[:, 0], ADDRESS)
    source.fill_sum(every_second[:, 1], [(2.0, ADDRESS)])
    np.testing.assert_array_equal(every_second, np.stack([whole, 2 * whole], axis=1))


def test_known_answers_in_every_bit() -> None:
    # Only operations that IEEE 754 rounds in one way: a machine that differs here is not IEEE.
    assert draw(SOURCES[0], stop=4).view(np.uint64).tolist() == KNOWN
    assert digest(draw(SOURCES[0], stop=1 << 20)) == KNOWN_DIGEST


@pytest.mark.parametrize("block", [0, 1])
def test_a_stream_matches_its_specification(block: int) -> None:
    # AES on one counter after the other, and the formula on one pair after the other.
    key = hashlib.blake2b(
        ADDRESS.encode("secure"), key=KEY.reveal(), digest_size=16, person=b"corn/stream/6"
    ).digest()
    first = 2 + 528 * block
    counters = b"".join(number.to_bytes(16, "big") for number in range(first, first + 528))
    data = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(counters)
    words = np.frombuffer(data, dtype="<u4").tolist()
    expected = np.array([[float(z) for z in pair] for pair in exact_block(words, 0.5)])
    found = draw(SOURCES[0], stop=1024 * (block + 1))[1024 * block :]
    np.testing.assert_allclose(found, expected.T.ravel(), rtol=0, atol=1e-14)


def digests_elsewhere(code: str, **environment: str) -> list[str]:
    """Return digests of long draws in a process with other settings."""
    code += (
        "\nimport tests.noise.test_stream as t\nprint(t.digest(t.draw(t.SOURCES[0], stop=1 << 20)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.split()


def test_every_part_of_an_address_matters() -> None:
    owners = [Owner((1,)), Owner((2,)), Owner((1, 2), 0), Owner((1, 2), 1), Owner((1,), 0)]
    owners += [Owner((12,)), Owner((1, 12), 0), Owner((1, 2), 10), Owner((0, 1, 2), 0)]
    nonces = [bytes(32), bytes(31) + b"\x01"]
    numbers = [0, 1, 10, 11, 2**31, 2**32, 2**63 - 1]
    source = SecureSource(dict.fromkeys(owners, KEY))
    seen = set()
    for parts in itertools.product(owners, nonces, numbers, numbers):
        address = StreamAddress(*parts)
        seen.add(draw(source, address, stop=4).tobytes())
    assert len(seen) == len(owners) * len(nonces) * len(numbers) ** 2


def test_another_key_gives_another_stream() -> None:
    other = SecureSource({OWNER: Secret(bytes(32))})
    assert not np.isin(draw(other), draw(SOURCES[0])).any()


def test_other_types_are_refused() -> None:
    # Float32 noise lies on a coarse lattice, which shows what it was added to.
    for source, dtype in zip(SOURCES, (np.float32, np.float16), strict=True):
        with pytest.raises(InvalidArgumentError, match=f"float64, found {dtype.__name__}"):
            draw(source, dtype=dtype)


def test_longer_streams_than_one_cipher_mode_allows_have_the_same_bytes() -> None:
    short, long = (start_keystream(bytes(16), size) for size in (4000, 1 << 37))
    assert short.update(bytes(4000)) == long.update(bytes(4000))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nonce": bytes(31)}, "nonce must be 32 bytes, found 31 bytes"),
        ({"nonce": "0" * 32}, "nonce must be 32 bytes, found str"),
        ({"step": -1}, "step must be an integer of at least 0"),
        ({"step": 2**63}, "step must be at most"),
        ({"step": 1.5}, "step must be an integer"),
        ({"stream": -1}, "stream must be an integer"),
    ],
)
def test_bad_addresses_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        StreamAddress(**{"owner": OWNER, "nonce": bytes(32), "step": 0, **change})


def test_bad_owners_are_refused() -> None:
    for members, group in [((), 0), ((2, 1), 0), ((1, 1), 0), ((1, 2), None)]:
        with pytest.raises(InvalidArgumentError):
            Owner(members, group)


def test_a_missing_key_is_named() -> None:
    source = SecureSource({OWNER: KEY})
    address = StreamAddress(Owner((0, 3), 7), bytes(32), 0)
    with pytest.raises(InvalidArgumentError, match="no key for seed group 7 of agents 0, 3"):
        draw(source, address)
    address = StreamAddress(Owner((6,)), bytes(32), 0)
    with pytest.raises(InvalidArgumentError, match="no key for agent 6's private noise"):
        draw(source, address)


def test_a_source_does_not_show_its_keys() -> None:
    assert not shows(KEY, repr(vars(SOURCES[0])) + repr(SOURCES[0]))


def test_threads_draw_without_disturbing_each_other() -> None:
    expected = [draw(SOURCES[0], StreamAddress(OWNER, bytes(32), k), stop=LENGTH) for k in range(4)]
    found: list[Any] = [None] * 4

    def work(step: int) -> None:
        address = StreamAddress(OWNER, bytes(32), step)
        for _ in range(5):
            found[step] = draw(SOURCES[0], address, stop=LENGTH)

    threads = [threading.Thread(target=work, args=(step,)) for step in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("seed", [b"key material of thirty-two bytes", KEY, 1.5, True, None])
def test_the_simulation_source_refuses_keys(seed: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="seed must be an integer"):
        SimulationSource(seed)


def test_simulations_differ_by_seed_and_repeat() -> None:
    first, again, other = (draw(SimulationSource(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.isin(first, other).any()


fields = st.lists(
    st.one_of(st.binary(max_size=6), st.text(max_size=4), st.integers(0, 99)), max_size=5
)


@given(first=fields, second=fields)
def test_different_fields_have_different_encodings(first: list[Any], second: list[Any]) -> None:
    def as_bytes(values: list[Any]) -> list[bytes]:
        return [v if isinstance(v, bytes) else str(v).encode() for v in values]

    assert decode_fields(encode_fields(*first)) == as_bytes(first)
    same = encode_fields(*first) == encode_fields(*second)
    assert same == (as_bytes(first) == as_bytes(second))
