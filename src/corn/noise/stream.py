"""Normal streams from keys: what agents deploy, and what a simulation can draw bit for bit too."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from typing import final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from corn.errors import InvalidArgumentError
from corn.noise.address import (
    NoiseSource,
    Owner,
    StreamAddress,
    check_range,
    find_overlap,
    write_or_add,
)
from corn.noise.fast import find_compiled
from corn.noise.normals import (
    NUM_BUFFERS,
    PAIRS_PER_BLOCK,
    VALUES_PER_BLOCK,
    NormalArray,
    Words,
    precision_of,
    transform_words,
)
from corn.noise.secret import Secret

# Enough for calls to cost little against the work, few enough for a core's cache.
_BLOCKS_AT_ONCE = 128
_WORD_BYTES = 4
_CIPHER_BLOCK_BYTES = 16
_PERSON = b"corn/stream/1"


@final
class SecureSource(NoiseSource):
    """Streams from keys: AES-256 in counter mode, under a key of its own for every address.

    Without the owner's key a stream cannot be told from independent normals. The key of a stream is
    BLAKE2b of its address (the type of its values included) under the owner's key; the counter is
    the place within the stream. Of the ciphers at hand AES-CTR made 7.0 GB/s on one core, ChaCha20
    3.3. Any number of threads may draw from one source.

    >>> owner = Owner((0,))
    >>> source = SecureSource({owner: Secret(bytes(32))})
    >>> address = StreamAddress(owner, nonce=bytes(32), step=7)
    >>> whole, part = np.empty(4, np.float32), np.empty(2, np.float32)
    >>> source.fill(whole, address)
    >>> source.fill(part, address, start=1)
    >>> bool((part == whole[1:3]).all())
    True
    """

    def __init__(self, keys: Mapping[Owner, Secret]) -> None:
        self._keys = dict(keys)

    def __repr__(self) -> str:
        return f"SecureSource(keys of {len(self._keys)} owners)"

    def draw(
        self, out: NormalArray, weight: float | None, address: StreamAddress, start: int
    ) -> None:
        """See :class:`corn.noise.address.NoiseSource`; needs the key of the address's owner."""
        stop = check_range(out, start)
        precision = precision_of(out.dtype)
        shape = (precision.words_per_pair, PAIRS_PER_BLOCK)
        first, last = start // VALUES_PER_BLOCK, -(-stop // VALUES_PER_BLOCK)
        key = self._stream_key(address, precision.real.name)
        encryptor = _start_keystream(key, first_word=first * shape[0] * shape[1])
        for block in range(first, last, _BLOCKS_AT_ONCE):
            num_blocks = min(last - block, _BLOCKS_AT_ONCE)
            words = _WORKSPACE.read_words(encryptor, (num_blocks, *shape))
            _WORKSPACE.write(words, block * VALUES_PER_BLOCK - start, out, weight)

    def _stream_key(self, address: StreamAddress, kind: str) -> bytes:
        key = self._keys.get(address.owner)
        if key is None:
            raise InvalidArgumentError(f"this source holds no key for {address.owner}")
        data = address.encode(kind)
        return hashlib.blake2b(data, key=key.reveal(), digest_size=32, person=_PERSON).digest()


class _Workspace(threading.local):
    """A thread's buffers, kept from draw to draw: new memory would cost as much as drawing."""

    def __init__(self) -> None:
        num_pairs = _BLOCKS_AT_ONCE * PAIRS_PER_BLOCK
        num_bytes = 4 * num_pairs * _WORD_BYTES
        self._zeros = memoryview(bytes(num_bytes))
        # The extra bytes are what cryptography 42 asks for.
        self._keystream = bytearray(num_bytes + _CIPHER_BLOCK_BYTES)
        shape = (NUM_BUFFERS, _BLOCKS_AT_ONCE, PAIRS_PER_BLOCK)
        self._buffers = {name: np.empty(shape, name) for name in ("float32", "float64")}
        shape = (_BLOCKS_AT_ONCE, 2, PAIRS_PER_BLOCK)
        self._normals = {name: np.empty(shape, name) for name in ("float32", "float64")}

    def read_words(self, encryptor: CipherContext, shape: tuple[int, int, int]) -> Words:
        """The next words of a keystream, which is what zeros are encrypted to."""
        num_words = shape[0] * shape[1] * shape[2]
        encryptor.update_into(self._zeros[: num_words * _WORD_BYTES], self._keystream)
        words = np.frombuffer(self._keystream, dtype="<u4", count=num_words)
        return words.astype(np.uint32, copy=False).reshape(shape)

    def write(self, words: Words, first: int, out: NormalArray, weight: float | None) -> None:
        """Write the normals of blocks of words to ``out`` from ``first``, or add them, weighted.

        Those that lie outside of ``out``, before it where ``first`` is negative, are left out.
        """
        compiled, size = find_compiled(), len(words) * VALUES_PER_BLOCK
        is_inside = 0 <= first <= len(out) - size and out.flags.c_contiguous
        if compiled and is_inside:
            blocks = out[first : first + size].reshape(-1, 2, PAIRS_PER_BLOCK)
            if weight is None:
                compiled.transform_words(words, blocks)
            else:
                compiled.add_normals(words, blocks, weight)
            return
        normals = self._normals[out.dtype.name][: len(words)]
        if compiled:
            compiled.transform_words(words, normals)
        else:
            buffers = self._buffers[out.dtype.name][:, : len(words)]
            transform_words(words, normals, buffers=buffers)
        write_or_add(*find_overlap(normals.reshape(-1), first, out, 0), weight)


_WORKSPACE = _Workspace()


def _start_keystream(key: bytes, *, first_word: int) -> CipherContext:
    # Blocks of normals are whole blocks of the cipher, so that a block can be started anywhere.
    counter = first_word * _WORD_BYTES // _CIPHER_BLOCK_BYTES
    mode = modes.CTR(counter.to_bytes(_CIPHER_BLOCK_BYTES, "big"))
    return Cipher(algorithms.AES(key), mode).encryptor()
