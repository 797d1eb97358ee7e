"""Secret choices of samples: coins for Poisson sampling, orders of passes, positions in a batch.

Amplification by sampling assumes that nobody else can predict which samples are in a batch. So the
choices of an agent come from a cipher under a secret of its own, not from a generator whose state
could be computed from its outputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from corn.checks import FloatArray, IntArray
from corn.noise.keys import Secret
from corn.noise.stream import encode_fields

COIN_BITS = 53  # coins are multiples of 2⁻⁵³, which float64 represents exactly
_FORMAT = b"corn/choices/1"


@final
class SecretChoices:
    """Choices from two secrets: AES-128 in counter mode, with a key for every address.

    ``coins``, the secret of coins and positions, must be new in every run: amplification assumes
    that the coins of two releases are independent. ``orders`` is kept by the ledger of releases: a
    run that resumes in the middle of a pass must finish the order of that pass, also under a new
    key.
    """

    def __init__(self, coins: Secret, orders: Secret) -> None:
        self._coins = coins
        self._orders = orders

    def __repr__(self) -> str:
        return "SecretChoices(hidden)"

    def draw_coins(self, number: int, sizes: Sequence[int]) -> FloatArray:
        """Return a coin for each sample of all agents in a batch: multiples of 2⁻⁵³ in [0, 1)."""
        # A stream for each agent: the number of its samples must not change another's coins.
        words = [
            _read_words(self._coins, "coins", agent, number, 0, count=size)
            for agent, size in enumerate(sizes)
        ]
        # Shifting drops low bits, so that the rest is exact in float64 and still uniform.
        top = np.concatenate(words) >> np.uint64(64 - COIN_BITS)
        return np.ldexp(top.astype(np.float64), -COIN_BITS)

    def draw_order(self, agent: int, number: int, *, size: int) -> IntArray:
        """Return the order of an agent's samples in a pass, uniform over all permutations."""
        return _permute(self._orders, "order", agent, number, size=size)

    def draw_positions(self, agent: int, number: int, *, size: int) -> IntArray:
        """Return the positions of a batch in the order in which samples take them, uniform too."""
        return _permute(self._coins, "positions", agent, number, size=size)


def _permute(secret: Secret, *address: str | int, size: int) -> IntArray:
    attempt = 0
    while True:
        words = _read_words(secret, *address, attempt, count=size)
        order = np.argsort(words)
        ranked = words[order]
        # Given that all words differ, every order is equally likely. Ties would favour some.
        if not bool((ranked[1:] == ranked[:-1]).any()):
            return order.astype(np.int64)
        attempt += 1


def _read_words(secret: Secret, *address: str | int, count: int) -> NDArray[np.uint64]:
    """Return words of the keystream at an address, which are the encryption of zeros."""
    key = hashlib.blake2b(
        encode_fields(*address), key=secret.reveal(), digest_size=16, person=_FORMAT
    ).digest()
    # A key of its own for each address, so that every counter can start at zero.
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    stream = encryptor.update(bytes(8 * count))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64, copy=False)
