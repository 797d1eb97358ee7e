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
from numpy.typing import DTypeLike, NDArray

from corn.checks import FloatArray
from corn.covariance.decomposition import Decomposition
from corn.errors import InvalidArgumentError
from corn.noise.normals import OFFSET_BITS, Words, load_compiled
from corn.noise.stream import (
    Owner,
    SecureSource,
    StreamAddress,
    check_nonce,
    encode_fields,
    start_keystream,
    write_keystream,
)
from corn.privacy import PrivacyBudget

MaskBits: TypeAlias = Literal[16, 32, 64]
"""B: messages are integers modulo 2^B."""
MaskWords: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Integers modulo 2^B, shape (d,)."""
Offset: TypeAlias = FloatArray | Words
"""Offsets of the grid: fractions in [0, 1), or words of which the first 24 bits are one."""

WORDS: dict[MaskBits, Any] = {16: np.uint16, 32: np.uint32, 64: np.uint64}
"""The type of messages, by B."""
SIGNED: dict[int, Any] = {16: np.int16, 32: np.int32, 64: np.int64}
"""The signed integers of the same bits."""
# Standard deviations beyond which noise lies with a probability below 10⁻⁷⁰.
_DEVIATIONS = 18.0


def bound_sum(noise: Decomposition, grid: float, budget: PrivacyBudget) -> float:
    """Return the largest coordinate that a sum of all releases can have, in grid units.

    Norms of gradients bound each coordinate. Private noise adds up in squares, and is larger with a
    probability below 10⁻⁷⁰.
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
    most = bound_sum(noise, grid, budget)
    for bits in (16, 32, 64):
        if most < 2 ** (bits - 2):
            return bits
    raise InvalidArgumentError(
        f"the sum of {noise.num_agents} releases must be below 2⁶² grid units, found {most:.3g}: "
        "raise the noise, or lower the clipping norm"
    )


def draw_mask(
    noise: Decomposition,
    agent: int,
    *,
    source: SecureSource,
    nonce: bytes,
    step: int,
    size: int,
    bits: MaskBits,
    out: MaskWords | None = None,
) -> MaskWords:
    """Return the sum of an agent's masks at a step, shape (size,), in ``out`` if it is given."""
    mask = np.empty(size, WORDS[bits]) if out is None else out
    added, subtracted = [], []
    for owner in _owners_of_masks(noise, agent):
        place = owner.members.index(agent)
        # Streams between neighbours on the group's path: the one after the agent, and the one
        # before it with the other sign.
        if place < len(owner.members) - 1:
            added.append(StreamAddress(owner, nonce, step, place))
        if place > 0:
            subtracted.append(StreamAddress(owner, nonce, step, place - 1))
    source.fill_masks(mask, added, subtracted)
    return mask


# Cached, because every step draws the same masks, and a large network has millions of groups.
@lru_cache(maxsize=64)
def _owners_of_masks(noise: Decomposition, agent: int) -> tuple[Owner, ...]:
    members, group_of = noise.memberships
    numbers = group_of[members == agent].tolist()
    return tuple(Owner(noise.seed_groups[number], number) for number in numbers)


def draw_offset(nonce: bytes, step: int, size: int) -> FloatArray:
    """Return the public offset of a step, uniform multiples of 2⁻²⁴ in [0, 1), shape (size,)."""
    words = np.empty(size, np.uint32)
    write_offset(words, nonce, step)
    return np.ldexp((words >> np.uint32(32 - OFFSET_BITS)).astype(np.float64), -OFFSET_BITS)


def write_offset(out: Words, nonce: bytes, step: int) -> None:
    """Write the words of which the first 24 bits are the public offset of a step."""
    data = encode_fields("grid offset", check_nonce(nonce), step)
    key = hashlib.blake2b(data, digest_size=16).digest()
    # A key of its own for each step, so that all of them start at the first word.
    write_keystream(start_keystream(key, len(out)), out.view(np.uint8))


def mask_release(
    noisy: FloatArray, *, grid: float, offset: FloatArray, mask: MaskWords
) -> MaskWords:
    """Return the message of an agent: its noisy gradient on the grid, modulo 2^B, under its mask.

    >>> words = mask_release(
    ...     np.array([-0.6]), grid=0.5, offset=np.zeros(1), mask=np.zeros(1, np.uint16)
    ... )
    >>> words.tolist()  # −1 modulo 2¹⁶
    [65535]
    """
    # Dividing by a power of two is exact, so ``rint`` is the only rounding after the offset.
    units = np.rint(noisy / grid + offset)
    # Through a signed type: conversion of a negative float to an unsigned integer is undefined.
    return units.astype(np.int64).astype(mask.dtype) + mask


def is_possible(total: MaskWords, largest: float) -> bool:
    """Return whether all coordinates can be sums of releases: else masks did not cancel.

    >>> [is_possible(np.array([value], np.uint16), 6.5) for value in (6, 7, 65530, 65529)]
    [True, False, True, False]
    """
    signed = total.view(SIGNED[8 * total.dtype.itemsize])
    # Not by absolute values: the most negative integer has none.
    return bool(signed.max(initial=0) <= largest and signed.min(initial=0) >= -largest)


def read_average(
    total: MaskWords,
    *,
    num_agents: int,
    grid: float,
    offset: Offset,
    dtype: DTypeLike = np.float64,
) -> NDArray[Any]:
    """Return the average of all releases from the sum of all messages modulo 2^B.

    It is computed in float64, and then rounded to ``dtype``.

    >>> read_average(np.array([65534], np.uint16), num_agents=2, grid=0.5, offset=np.zeros(1))
    array([-0.5])
    """
    signed, scale = total.view(SIGNED[8 * total.dtype.itemsize]), grid / num_agents
    if offset.dtype == np.uint32:
        average = np.empty(len(total), dtype)
        load_compiled().write_average(average, signed, offset, num_agents, scale)
        return average
    # The same bits, for audits of many runs.
    return np.asarray((signed - num_agents * offset) * scale, dtype)
