"""Releases on the public grid: messages of exact mixing, and how far floats are from real numbers.

An agent releases γ·rint((g + v)/γ): its clipped gradient g and its whole share v of the noise are
added in float64, and only the sum is rounded. For a real v that is post-processing of g + v, so it
is exactly as private. ``docs/floats.md`` bounds the effect of the float64 sum; :func:`bound_loss`
is that bound.

In exact mixing agent i sends m_i = rint((g_i + u_i)/γ + o) + Σ ± z (mod 2^B): with private noise
u_i, a public offset o in [0, 1) for each coordinate and step, and masks z, uniform words from the
keystreams of its seed groups. A group's members h_1 < h_2 < … form a path: h_a adds z_a and
subtracts z_(a−1), so the masks of a group add up to zero in integers modulo 2^B, in any order. The
offset makes the law of the sum on the grid exactly that of a continuous one (docs/theory.md,
"Exact mixing").
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
from corn.errors import InfeasibleError
from corn.noise import normals
from corn.noise.stream import (
    BLOCK_BYTES,
    Keystreams,
    Owner,
    SecureSource,
    StreamAddress,
    check_nonce,
    count_at_once,
    encode_fields,
    list_terms,
    start_keystream,
)
from corn.privacy import PrivacyBudget
from corn.privacy.floats import FloatLoss

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
    top = words >> np.uint32(32 - normals.OFFSET_BITS)
    return np.ldexp(top.astype(np.float64), -normals.OFFSET_BITS)


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
    num_blocks = -(-len(gradient) // normals.VALUES_PER_BLOCK)
    mask_bytes = normals.VALUES_PER_BLOCK * bits // 8
    offset_bytes = normals.VALUES_PER_BLOCK * 4
    terms = list_terms(noise, agent, nonce=nonce, step=step)
    weights = np.array([weight for weight, _ in terms], np.float64)
    shares = [source.start(address, num_blocks * BLOCK_BYTES) for _, address in terms]
    added, subtracted = list_masks(noise, agent, nonce=nonce, step=step)
    masks = [source.start(a, num_blocks * mask_bytes, kind="mask") for a in (*added, *subtracted)]
    num_values = num_blocks * normals.VALUES_PER_BLOCK
    offsets = [start_offset(*offset, num_values)] if noise.is_masked else []
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
        words.view(np.uint32).reshape(len(shares), at_once, normals.WORDS_PER_BLOCK),
        weights,
        fractions.view(np.uint32),
        mask.view(SIGNED[bits]),
        len(added),
    )
    message = np.empty(len(gradient), SIGNED[bits])
    compiled = normals.load_compiled()
    for start in range(0, len(gradient), at_once * normals.VALUES_PER_BLOCK):
        reader.read()
        part = slice(start, start + at_once * normals.VALUES_PER_BLOCK)
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
    scale, write_average = grid / num_agents, normals.load_compiled().write_average
    for start in range(0, len(total), at_once):
        reader.read()
        part = slice(start, start + at_once)
        write_average(average[part], signed[part], words, num_agents, scale)
    return average


# The most that rounding may add to the variance of the average noise, relative to it.
VARIANCE_SHARE = 2.0**-9
_UNIT_ROUNDOFF = 2.0**-53
# A normal exceeds 23 standard deviations, one less than the proof allows, with a probability below
# _FAR. These cases count as failures.
_CELL_DEVIATIONS = 24.0
_FAR = 1e-115
# The least standard deviation of an agent's private noise under masks, in units of γ.
_LEAST_STD = 6.5
# The distance of a sum of grid values from a sampled continuous sum, for up to 10⁹ agents whose
# private noise has that much (docs/floats.md).
_ALIASING = 1e-140


def choose_grid(noise: Decomposition, precision_caps: FloatArray) -> float:
    """Return γ: the largest power of two that costs next to no accuracy; b has shape (n,).

    The error of rounding is uniform, because the noise is far wider than γ, and independent between
    agents: it adds γ²/(12n) to the variance of the average, of which it may be ``VARIANCE_SHARE``.
    A coarser grid hides more of the rounding errors, so the largest γ is taken, but at most an
    eighth of 1/√b_i of every agent, the standard deviation of one that draws alone.
    """
    average = noise.total_variance / noise.num_agents**2
    largest = 0.125 / math.sqrt(float(precision_caps.max()))
    if average > 0:
        largest = min(largest, math.sqrt(12 * noise.num_agents * VARIANCE_SHARE * average))
    return math.ldexp(1.0, math.frexp(largest)[1] - 1)


def check_grid(grid: float) -> float:
    """Return the grid if it is a power of two, by which floats are divided exactly."""
    is_power = math.isfinite(grid) and grid > 0 and math.frexp(grid)[0] == 0.5
    require(is_power, "grid", "a power of two", repr(grid))
    return grid


def bound_loss(
    decomposition: Decomposition, grid: float, *, precision_caps: FloatArray, budget: PrivacyBudget
) -> FloatLoss:
    """Bound the effect of float64 on one coordinate of a step, released by all agents on the grid.

    The bound holds against an eavesdropper and against every coalition whose honest agents keep
    [(R^(I))⁻¹]_ii ≤ b_i, shape (n,), because a coalition observes fewer honest agents and a part of
    their noise. The promises' clipped gradients bound how large a release can be.
    """
    n = decomposition.num_agents
    roots = np.sqrt(precision_caps)
    largest_norm = max(promise.query.largest_norm for promise in budget.promises)
    errors = _bound_errors(decomposition, largest_norm)
    # Stretching a cell by e on both sides multiplies its volume by (1 + 2e/γ) and moves its points
    # by e at most, where the density changes by e√b for each standard deviation.
    deviations = _CELL_DEVIATIONS + grid * float(roots.sum())
    if decomposition.is_masked:
        # Before releases are summed, each has its own private noise, independent of the others'.
        # The sum of release and offset is rounded once.
        # A sum may have all the noise it needs, and one agent too little to hide its own rounding.
        if math.sqrt(float(decomposition.private_variance.min())) < _LEAST_STD * grid:
            return FloatLoss(math.inf, 1.0)
        roots = 1 / np.sqrt(decomposition.private_variance)
        deviations = _CELL_DEVIATIONS + grid * float(roots.max())
        largest = (normals.LARGEST + 1) / roots + largest_norm
        errors = errors + 1.01 * _UNIT_ROUNDOFF * (largest + 2 * grid)
    worst = float(errors.max())
    if worst > grid / 1000 or worst * float(roots.sum()) > 0.5:
        return FloatLoss(math.inf, 1.0)
    log_ratio = float((errors * (2.01 / grid + (deviations + 1) * roots)).sum())
    num_streams = np.count_nonzero(decomposition.private_variance) + sum(
        factor.shape[1] for factor in decomposition.factors
    )
    num_sums = sum(decomposition.count_streams())
    failure = normals.FAILURE * float(num_streams + num_sums) + 4 * n * _FAR
    if decomposition.is_masked:
        failure += _ALIASING
        log_ratio += bound_offset_loss(n, normals.OFFSET_BITS)
    return FloatLoss(log_ratio, failure)


def bound_offset_loss(num_agents: int, bits: int) -> float:
    """Bound |ln| of the ratio of a sum on the grid to a continuous one, by the offset's bits.

    With its offset, a sum of h releases is the density of the continuous sum on a lattice of
    spacing gcd(h, 2^bits)/2^bits ≤ h/2^bits, up to the second derivative in a cell
    (docs/floats.md).
    """
    spacing = math.ldexp(num_agents, -bits)
    noise_std = _LEAST_STD * math.sqrt(num_agents)
    deviations = _CELL_DEVIATIONS + 1 + num_agents / 2 / noise_std
    slope = spacing * deviations / noise_std
    return 1.01 * slope * slope / 24


def count_parameters(loss: FloatLoss, budget: PrivacyBudget) -> int:
    """Return the most parameters for which the budget covers all steps in floating point."""
    return int(min(loss.max_values(budget) / budget.num_steps, 2.0**62))


def require_provable(loss: FloatLoss, budget: PrivacyBudget, num_parameters: int) -> None:
    """Raise ``InfeasibleError`` if a model has too many parameters for the promise to be proved."""
    most = count_parameters(loss, budget)
    if num_parameters <= most:
        return
    raise InfeasibleError(
        f"the promise is proved in floating point for models of up to {most:,} parameters over "
        f"{budget.num_steps} steps, found {num_parameters:,}: plan fewer steps or "
        "agents, or another epsilon of at most 50"
    )


def _bound_errors(decomposition: Decomposition, largest_norm: float) -> FloatArray:
    """Bound |computed − real| of g_i + v_i for each agent, failures aside, shape (n,)."""
    theta = decomposition.private_variance
    weights = np.sqrt(theta)
    variance = theta.copy()
    if not decomposition.is_masked:
        for group, factor in zip(decomposition.seed_groups, decomposition.factors, strict=True):
            weights[list(group)] += np.abs(factor).sum(axis=1)
            variance[list(group)] += (factor**2).sum(axis=1)
    # Each normal is off by normals.ERROR, and its product with a weight is rounded once.
    products = weights * (normals.ERROR + 2 * normals.LARGEST * _UNIT_ROUNDOFF)
    # Partial sums of the streams are normal with at most the variance of the whole. Each of them,
    # and the sum with the gradient, is rounded once.
    counts = np.array(decomposition.count_streams(), dtype=np.float64)
    sums = counts * (normals.LARGEST + 1) * np.sqrt(variance) * _UNIT_ROUNDOFF
    return (products + sums + largest_norm * _UNIT_ROUNDOFF) * 1.01
