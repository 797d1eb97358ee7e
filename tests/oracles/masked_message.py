"""The message of an agent behind a server, from keys and nonces: a second implementation.

It shares no code with ``corn.noise``: keys, ciphers and hashes are those of ``cryptography`` and
``hashlib``, and Box–Muller uses NumPy's logarithm, sine and cosine. Those differ from the exact
ones by 10⁻¹⁵, which moves a number to another point of the grid with a probability of 10⁻¹⁴.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from corn.checks import FloatArray
from corn.plan import Plan, fingerprint

Words = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Round:
    """The address of a round.

    Attributes:
        whole: the plan of all agents.
        own: the plan of the agents that take part, numbered from 0 in their order.
        nonces: the contribution of each agent that takes part, by its number in the plan of all.
    """

    whole: Plan
    own: Plan
    nonces: Mapping[int, bytes]

    @property
    def run(self) -> bytes:
        """The nonce of the run."""
        parts = [part for agent in sorted(self.nonces) for part in (agent, self.nonces[agent])]
        data = _join("run nonce", fingerprint(self.whole), *parts)
        return hashlib.blake2b(data, digest_size=32).digest()

    @property
    def private_variance(self) -> float:
        """θ = 1/((m − q) b), by the closed form for m agents of which q collude."""
        m = len(self.nonces)
        honest = m - min(self.whole.threat.max_colluders, m - 1)
        return 1 / (honest * float(self.whole.precision_caps.min()))


def draw_private_noise(at: Round, agent: int, secret: bytes, size: int) -> FloatArray:
    """Return the private noise of an agent in a round, shape (size,)."""
    place = sorted(at.nonces).index(agent)
    key = _derive(at, secret, "private noise", place)
    blocks = -(-size // 1024)
    words = _draw(at, key, "secure", _join("private", _join(place)), 4 * 2112 * blocks)
    # 512 pairs, each of an upper and a lower word for u and for the angle, and 64 spare words.
    u, angle, u_low, angle_low = (
        part.astype(np.uint32) for part in _split(words.view("<u4").reshape(blocks, 2112))
    )
    radius = np.sqrt(-2 * np.log((u + (u_low + 0.5) * 2.0**-32) * 2.0**-32))
    quarter = (angle << np.uint32(2)).view(np.int32) * 2.0**-33 + angle_low * 2.0**-63
    cosine = np.where(angle >> 31 == 1, -1, 1) * np.cos(np.pi * quarter) * radius
    sine = np.sin(np.pi * quarter) * radius
    is_exchanged = (angle >> 30) & 1 == 1
    pair = (np.where(is_exchanged, sine, cosine), np.where(is_exchanged, cosine, sine))
    normals = np.concatenate(pair, axis=1).ravel()[:size]
    return np.asarray(np.sqrt(at.private_variance) * normals)


def draw_mask(
    at: Round, agent: int, secret: bytes, public_keys: Mapping[int, bytes], size: int
) -> Words:
    """Return the sum of an agent's masks in a round, modulo 2¹⁶."""
    agents = sorted(at.nonces)
    place, mask = agents.index(agent), np.zeros(size, np.uint16)
    for number, (low, high) in enumerate(at.own.decomposition.seed_groups):
        if place not in (low, high):
            continue
        first, second = (public_keys[agents[each]] for each in (low, high))
        other = X25519PublicKey.from_public_bytes((second if place == low else first)[:32])
        shared = X25519PrivateKey.from_private_bytes(secret).exchange(other)
        owner = _join("group", number, _join(low, high))
        key = _derive(at, shared, "pair", low, high, first, second)
        words = _draw(at, _derive(at, key, "group noise", owner), "mask", owner, 2 * size)
        mask = mask + words.view("<u2") if place == low else mask - words.view("<u2")
    return mask


def draw_offset(offset_seed: bytes, size: int) -> FloatArray:
    """Return an agent's public offset of the grid, in [0, 1)."""
    key = hashlib.blake2b(_join("grid offset", offset_seed, 0), digest_size=16).digest()
    words = np.frombuffer(_encrypt(key, 2, 4 * size), "<u4")
    return np.asarray((words >> np.uint32(8)) * 2.0**-24)


def recompute_message(at: Round, noisy: FloatArray, *, mask: Words, offset_seed: bytes) -> Words:
    """Return the integers that an agent sends for a noisy update."""
    units = np.rint(noisy / at.own.grid + draw_offset(offset_seed, len(noisy)))
    return np.asarray((units.astype(np.int64) + mask) % 2**16, np.uint16)


def _split(words: NDArray[Any]) -> list[NDArray[Any]]:
    return [words[:, 512 * k : 512 * (k + 1)] for k in range(4)]


def _join(*fields: bytes | str | int) -> bytes:
    parts = [field if isinstance(field, bytes) else str(field).encode() for field in fields]
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _derive(at: Round, root: bytes, *fields: bytes | str | int) -> bytes:
    info = _join("corn 1", *fields)
    return HKDF(algorithm=SHA256(), length=32, salt=fingerprint(at.own), info=info).derive(root)


def _draw(at: Round, key: bytes, kind: str, owner: bytes, num_bytes: int) -> NDArray[np.uint8]:
    data = _join(kind, owner, at.run, 0, 0)
    own = hashlib.blake2b(data, key=key, digest_size=16, person=b"corn/stream/6").digest()
    return np.frombuffer(_encrypt(own, 2, num_bytes), np.uint8)


def _encrypt(key: bytes, counter: int, num_bytes: int) -> bytes:
    mode = modes.CTR(counter.to_bytes(16, "big"))
    return Cipher(algorithms.AES(key), mode).encryptor().update(bytes(num_bytes))
