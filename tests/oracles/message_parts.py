"""A message of exact mixing from its single parts: the oracle of ``make_message``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from corn.checks import FloatArray
from corn.covariance import Decomposition
from corn.learn.perturbation import DrawnNoise
from corn.noise import SecureSource, draw_share
from corn.noise.masks import WORDS, MaskBits, MaskWords, draw_offset, list_masks


def draw_mask(
    noise: Decomposition,
    agent: int,
    *,
    source: SecureSource,
    nonce: bytes,
    step: int,
    size: int,
    bits: MaskBits,
) -> MaskWords:
    """Return the sum of an agent's masks at a step, shape (size,)."""
    mask: MaskWords = np.zeros(size, WORDS[bits])
    for sign, addresses in zip(
        (1, -1), list_masks(noise, agent, nonce=nonce, step=step), strict=True
    ):
        for address in addresses:
            stream = source.start(address, mask.nbytes, kind="mask").update(bytes(mask.nbytes))
            words = np.frombuffer(stream, mask.dtype)
            mask = mask + words if sign > 0 else mask - words
    return mask


def mask_release(
    noisy: FloatArray, *, grid: float, offset: FloatArray, mask: MaskWords
) -> MaskWords:
    """Return the message of a noisy gradient: on the grid, modulo 2^B, under a mask."""
    # Through a signed type: conversion of a negative float to an unsigned integer is undefined.
    return np.rint(noisy / grid + offset).astype(np.int64).astype(mask.dtype) + mask


@dataclass(frozen=True)
class MessageParts:
    """The parts of an agent's message, each of which a test may replace with a faulty one.

    ``make_message`` stands in for that of ``DrawnNoise``.
    """

    draw_share: Callable[..., FloatArray] = draw_share
    draw_mask: Callable[..., MaskWords] = draw_mask
    draw_offset: Callable[[bytes, int, int], FloatArray] = draw_offset
    release: Callable[..., MaskWords] | None = None

    def make_message(self, drawn: DrawnNoise, gradient: Tensor, factor: Tensor) -> MaskWords:
        own, size = drawn.share, len(gradient)
        plan = own.plan
        at: dict[str, Any] = {"source": own.source, "nonce": own.nonce, "step": drawn.step}
        clipped = gradient.double().numpy() * float(factor)
        noise = self.draw_share(plan.decomposition, own.agent, **at, stop=size)
        given: dict[str, Any] = {
            "grid": plan.grid,
            "offset": self.draw_offset(own.nonce, drawn.step, size),
            "mask": self.draw_mask(
                plan.decomposition, own.agent, **at, size=size, bits=plan.mask_bits
            ),
        }
        if self.release is not None:
            return self.release(clipped, noise, **given)
        return mask_release(clipped + noise, **given)
