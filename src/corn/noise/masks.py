"""Messages of exact mixing: releases as integers, under masks that cancel in the sum.

Agent i sends m_i = rint((g_i + u_i)/γ + o) + Σ ± z (mod 2^B): its clipped gradient g_i with private
noise u_i, a public offset o in [0, 1) for each coordinate and step, and masks z, uniform words from
the keystreams of its seed groups. A group's members h_1 < h_2 < … form a path: h_a adds z_a and
subtracts z_(a−1), so the masks of a group add up to zero in integers modulo 2^B, in any order.

The offset makes the law of the sum on the grid exactly that of a continuous one (docs/theory.md,
"Exact mixing"). Nothing but the noisy sum of g and u may be rounded, as in :mod:`corn.noise.grid`.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers import CipherContext
from numpy.typing import DTypeLike, NDArray

from corn.checks import FloatArray, require
from corn.covariance.decomposition import Decomposition
from corn.noise.normals import OFFSET_BITS, VALUES_PER_BLOCK, WORDS_PER_BLOCK, load_compiled
from corn.noise.shares import list_terms
from corn.noise.stream import (
    BLOCK_BYTES,
    Keystreams,
    Owner,
    SecureSource,
    StreamAddress,
    check_nonce,
    count_at_once,
    encode_fields,
    start_keystream,
)
from corn.privacy import PrivacyBudget

MaskBits: TypeAlias = Literal[16, 32, 64]
# Messages, of shape (d,), are integers modulo 2^B. By B, their type and the signed one:
MaskWords: TypeAlias = NDArray[np.unsignedinteger[Any]]
WORDS: dict[MaskBits, Any] = {16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED: dict[int, Any] = {16: np.int16, 32: np.int32, 64: np.int64}
# Standard deviations beyond which noise lies with a probability below 10⁻⁷⁰.
_DEVIATIONS = 18.0


def bound_sum(noise: Decomposition, grid: float, budget: PrivacyBudget) -> float:
    """Return the largest coordinate that a sum of all releases can have, in grid units.

    Norms bound gradients. Private noise adds up in squares, and is larger with probability < 10⁻⁷⁰.
    """
    largest = max(promise.query.largest_norm for promise in budget.promises)
    noise_std = math.sqrt(noise.total_variance)
    # Rounding and the offset move each agent's integer by at most one and a half.
    return (noise.num_agents * largest + _DEVIATIONS * noise_std) / grid + 2 * noise.num_agents


def choose_bits(noise: Decomposition, grid: float, budget: PrivacyBudget) -> MaskBits:
    """Return B, for which sums of all releases stay within ±2^(B−2), for any gradients.

    They fill half of all values at most. Masks that do not cancel leave uniform values, so each
    coordinate shows that with a probability of at least one half.
    """
    most, rule = bound_sum(noise, grid, budget), "below 2⁶² grid units"
    require(most < 2**62, "the sum of releases", rule, f"{most:.3g}", advice="raise the noise")
    return next(bits for bits in WORDS if most < 2 ** (bits - 2))


def list_masks(
    noise: Decomposition, agent: int, *, nonce: bytes, step: int
) -> tuple[list[StreamAddress], list[StreamAddress]]:
    """Return the streams of masks that an agent adds at a step, and those that it subtracts."""
    added: list[StreamAddress] = []
    subtracted: list[StreamAddress] = []
    for owner in _owners_of_masks(noise, agent) if noise.is_masked else ():
        place = owner.members.index(agent)
        # Streams between neighbours on the group's path: the one after the agent, and the one
        # before it with the other sign.
        if place < len(owner.members) - 1:
            added.append(StreamAddress(owner, nonce, step, place))
        if place > 0:
            subtracted.append(StreamAddress(owner, nonce, step, place - 1))
    return added, subtracted


# Cached, because every step draws the same masks, and a large network has millions of groups.
@lru_cache(maxsize=64)
def _owners_of_masks(noise: Decomposition, agent: int) -> tuple[Owner, ...]:
    members, group_of = noise.memberships
    numbers = group_of[members == agent].tolist()
    return tuple(Owner(noise.seed_groups[number], number) for number in numbers)


def draw_offset(nonce: bytes, step: int, size: int) -> FloatArray:
    """Return the public offset of a step, uniform multiples of 2⁻²⁴ in [0, 1), shape (size,)."""
    words = np.frombuffer(start_offset(nonce, step, size).update(bytes(4 * size)), "<u4")
    return np.ldexp((words >> np.uint32(32 - OFFSET_BITS)).astype(np.float64), -OFFSET_BITS)


def start_offset(nonce: bytes, step: int, size: int) -> CipherContext:
    """Return the keystream of words of which the first 24 bits are the public offset of a step."""
    data = encode_fields("grid offset", check_nonce(nonce), step)
    # A key of its own for each step, so that all of them start at the first word.
    return start_keystream(hashlib.blake2b(data, digest_size=16).digest(), 4 * size)


def make_message(
    gradient: NDArray[Any],
    factor: float,
    *,
    noise: Decomposition,
    agent: int,
    source: SecureSource,
    nonce: bytes,
    step: int,
    offset: tuple[bytes, int],
    grid: float,
    bits: MaskBits,
) -> MaskWords:
    """Return the message of an agent at a step, from its clipped gradient f·g, shape (d,).

    It is rint((f g + v)/γ + o) plus the masks, with the bits of ``draw_share`` and
    :func:`draw_offset`; ``offset`` is the nonce and the step of o, and without masks o is zero.
    Noise, offset and masks are drawn in parts that stay in a core's cache, and are never stored:
    writing and reading them would take longer than drawing.
    """
    num_blocks = -(-len(gradient) // VALUES_PER_BLOCK)
    mask_bytes = VALUES_PER_BLOCK * bits // 8
    offset_bytes = VALUES_PER_BLOCK * 4
    terms = list_terms(noise, agent, nonce=nonce, step=step)
    weights = np.array([weight for weight, _ in terms], np.float64)
    shares = [source.start(address, num_blocks * BLOCK_BYTES) for _, address in terms]
    added, subtracted = list_masks(noise, agent, nonce=nonce, step=step)
    masks = [
        source.start(address, num_blocks * mask_bytes, kind="mask")
        for address in (*added, *subtracted)
    ]
    offsets = [start_offset(*offset, num_blocks * VALUES_PER_BLOCK)] if noise.is_masked else []
    block_bytes = len(shares) * BLOCK_BYTES + len(masks) * mask_bytes + len(offsets) * offset_bytes
    at_once = count_at_once(block_bytes, num_blocks)
    reader = Keystreams(
        (shares, at_once * BLOCK_BYTES),
        (masks, at_once * mask_bytes),
        (offsets, at_once * offset_bytes),
    )
    words, mask, fractions = reader.pieces
    if not offsets:
        fractions = np.zeros((1, at_once * offset_bytes), np.uint8)
    drawn = (
        words.view(np.uint32).reshape(len(shares), at_once, WORDS_PER_BLOCK),
        weights,
        fractions.view(np.uint32),
        mask.view(SIGNED[bits]),
        len(added),
    )
    message = np.empty(len(gradient), SIGNED[bits])
    compiled = load_compiled()
    for start in range(0, len(gradient), at_once * VALUES_PER_BLOCK):
        reader.read()
        part = slice(start, start + at_once * VALUES_PER_BLOCK)
        compiled.write_message(message[part], gradient[part], *drawn, factor, grid)
    return message.view(WORDS[bits])


def is_possible(total: MaskWords, largest: float) -> bool:
    """Return whether all coordinates can be sums of releases: else masks did not cancel."""
    signed = total.view(SIGNED[8 * total.dtype.itemsize])
    # Not by absolute values: the most negative integer has none.
    return bool(signed.max(initial=0) <= largest and signed.min(initial=0) >= -largest)


def read_average(
    total: MaskWords, *, num_agents: int, grid: float, offset: FloatArray
) -> FloatArray:
    """Return the average of all releases from the sum of all messages modulo 2^B."""
    signed = total.view(SIGNED[8 * total.dtype.itemsize])
    return np.asarray((signed - num_agents * offset) * (grid / num_agents))


def read_total(
    total: MaskWords,
    *,
    num_agents: int,
    grid: float,
    offset: tuple[bytes, int] | None,
    dtype: DTypeLike,
) -> NDArray[Any]:
    """Return :func:`read_average` of a sum, by the nonce and step of the offset, drawn in parts.

    It is computed in float64 and rounded to ``dtype``; None is an offset of zero.
    """
    signed = total.view(SIGNED[8 * total.itemsize])
    average = np.empty(len(total), dtype)
    offsets = [] if offset is None else [start_offset(*offset, len(total))]
    at_once = count_at_once(4, len(total))
    reader = Keystreams((offsets, 4 * at_once))
    words = reader.pieces[0].view(np.uint32) if offsets else np.zeros((1, at_once), np.uint32)
    scale, write_average = grid / num_agents, load_compiled().write_average
    for start in range(0, len(total), at_once):
        reader.read()
        part = slice(start, start + at_once)
        write_average(average[part], signed[part], words, num_agents, scale)
    return average
