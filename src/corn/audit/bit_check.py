"""The attack on low-order bits, against the messages of the program under audit."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor

from corn.audit.low_order_bits import Array, FloatAttacker, Pair, p_value
from corn.audit.observation import query_of
from corn.audit.program import STEP_SIZE, NoiseRecord, Program, ReleaseNumber
from corn.audit.views import StreamWeights
from corn.learn.step import ClippedGradients
from corn.plan import Plan

# Against a plain sum the attack is right in almost every trial at this length (docs/floats.md).
_DIMENSIONS = 1000
_PRACTICE_PAIRS, _PAIRS = 2, 10
_MESSAGES = 60
_DECISIONS = 20  # about each pair


def check_bits(plan: Plan, victim: int, *, seed: int, program: Program, alpha: float) -> list[str]:
    """Return the success of the attack if it is more than the promise allows, at level 1 − α.

    The attacker decides between two gradients of opposite sign, from one message of the victim. It
    knows nothing of other agents' noise: the promise would allow it far more. Where releases are
    summed exactly, it knows the victim's mask and sees the integers under it.
    """
    query = query_of(plan, victim)
    row = StreamWeights.of(plan.decomposition).weights[victim]
    # A program may multiply by weights in the type of messages.
    weights = {float(kind(weight)) for weight in row[row != 0] for kind in (float, np.float32)}
    # √R_jj, because streams are independent standard normals.
    noise_std = float(np.linalg.norm(row))
    draw = _Messages(plan, victim, program)
    generator = np.random.default_rng(seed)
    pairs = [
        _draw_pair(generator, query.contribution, plan.dtype)
        for _ in range(_PRACTICE_PAIRS + _PAIRS)
    ]
    # It practises on pairs and keys of its own, none of which it is judged by.
    attacker = FloatAttacker(
        draw,
        pairs[:_PRACTICE_PAIRS],
        noise_std=noise_std,
        weights=sorted(weights),
        step_size=STEP_SIZE,
        num_messages=_MESSAGES,
        seed=2**32 + seed,
    )
    right = 0
    for number, pair in enumerate(pairs[_PRACTICE_PAIRS:]):
        for truth in (0, 1):
            # Seeds above all of the attacker's own, and different for each pair and truth.
            released = draw(pair[truth], _DECISIONS // 2, 2**33 + 2 * number + truth + 64 * seed)
            right += int(((attacker.score(pair, released) > 0) == truth).sum())
    # Both candidates have full length, so that they differ by 2C whatever the adjacency is.
    cap = float(plan.precision_caps[victim])
    # Without its mask, an agent has only its own noise, which is less than what is promised.
    precision = max(cap, noise_std**-2) if plan.decomposition.is_masked else cap
    mu = 2 * query.contribution * math.sqrt(precision)
    # The best test between N(0, 1) and N(μ, 1) with equal chances is right with Φ(μ/2).
    trials, allowed = _PAIRS * _DECISIONS, float(ndtr(mu / 2))
    if p_value(right, trials, allowed) >= alpha:
        return []
    return [
        f"low-order bits reveal gradients: {right} of {trials} decisions are right, where "
        f"{allowed:.1%} are allowed"
    ]


class _Messages:
    """Releases of known gradients with the attacker's own keys; see ``DrawReleases``."""

    def __init__(self, plan: Plan, victim: int, program: Program) -> None:
        self._plan, self._victim, self._program = plan, victim, program

    def __call__(self, gradient: Array, num: int, seed: int) -> Array:
        at = [ReleaseNumber(0, 0)]
        size = num * len(gradient)
        # One release of num · d coordinates: coordinates are independent, so that they stand for
        # messages.
        record = NoiseRecord(self._plan, at, size, seed=seed, program=self._program)
        noise = torch.from_numpy(record.noise[0, self._victim].reshape(num, -1))
        dtype = torch.float32 if self._plan.dtype == "float32" else torch.float64
        values = torch.from_numpy(gradient).to(dtype).expand(num, 1, -1)
        # Clipping is not attacked here: a factor of 1 leaves the candidate as it is.
        ones = torch.ones(num, 1, dtype=torch.float64)
        found = ClippedGradients(values, ones, ones, ones, torch.zeros(num, 1))
        if self._plan.decomposition.is_masked:
            return self._unmask(found, noise, record)
        model = torch.zeros(len(gradient), dtype=dtype)
        sent = self._program.make_messages(model, found, noise, grid=self._plan.grid)
        released: Array = sent.double().numpy() / -STEP_SIZE
        return released

    def _unmask(self, found: ClippedGradients, noise: Tensor, record: NoiseRecord) -> Array:
        offset = record.offsets[0].reshape(noise.shape)
        mask = np.zeros(noise.shape, f"uint{record.bits}")
        sent = self._program.make_masked_messages(
            found, noise, mask, grid=self._plan.grid, offset=offset
        )
        released: Array = self._program.read_average(
            # The offset is public, but the grid is seen without it.
            sent,
            num_agents=1,
            grid=self._plan.grid,
            offset=np.zeros_like(offset),
        )
        return released


def _draw_pair(generator: np.random.Generator, norm: float, dtype: str) -> Pair:
    g = generator.standard_normal(_DIMENSIONS)
    # Rounded to the type of messages, as a gradient of the model would be.
    g = (g * norm / np.linalg.norm(g)).astype(dtype).astype(np.float64)
    return g, -g
