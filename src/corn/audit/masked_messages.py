"""Messages of exact sums: what a view reads of them, and whether all the rest is uniform.

Under masks a view can read one sum for each part of the agents that unknown masks join, and nothing
else. Whatever is less than such a sum must be uniform modulo 2^B: single messages, incomplete sums,
and differences of messages of two steps, in which masks that were used twice would cancel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from scipy import stats

from corn.arrays import FloatArray
from corn.audit.noise_check import check_noise
from corn.audit.program import NoiseRecord, Program
from corn.audit.views import Parts, StreamWeights, View, sum_parts
from corn.learn.step import ClippedGradients
from corn.noise.masks import MaskWords
from corn.plan import Plan

# Combinations of agents with random signs, for each release.
_COMBINATIONS = 8
# Releases before each one with which it is compared.
_EARLIER = 3
# Words that each cell of a test has on average, at least, and bits of a word that are compared.
_WORDS_PER_CELL, _MOST_BITS = 50, 8
# Noise beyond this many standard deviations has a probability below 10⁻³².
_DEVIATIONS = 12.0


@dataclass(frozen=True)
class MessageCheck:
    """The tests of messages under masks, which need no victim.

    Attributes:
        bits: B, of a word of a message.
        num_words: the words of each test of uniformity.
        num_tests: the number of these tests.
        p_value: the smallest p-value of them, times their number.
        problems: what contradicts the plan.
    """

    bits: int
    num_words: int
    num_tests: int
    p_value: float
    problems: tuple[str, ...]


@final
class MaskedMessages:
    """The messages of all agents without gradients, as they travel.

    Attributes:
        words: shape (releases, n, size).
    """

    def __init__(self, plan: Plan, record: NoiseRecord, program: Program) -> None:
        self._plan, self._record, self._program = plan, record, program
        zeros = no_gradients(record.noise.shape[-1])
        self.words: MaskWords = np.stack(
            [
                np.concatenate(
                    [
                        self.send(zeros, noise[np.newaxis], mask[np.newaxis], offset)
                        for noise, mask in zip(noises, masks, strict=True)
                    ]
                )
                for noises, masks, offset in zip(
                    record.noise, record.masks, record.offsets, strict=True
                )
            ]
        )

    def send(
        self, gradients: ClippedGradients, noise: FloatArray, mask: MaskWords, offset: FloatArray
    ) -> MaskWords:
        """Return messages of one agent by the code that agents run, shape (trials, d)."""
        drawn = torch.from_numpy(np.ascontiguousarray(noise))
        offsets = offset.reshape(noise.shape)
        return self._program.make_masked_messages(
            gradients, drawn, mask, grid=self._plan.grid, offset=offsets
        )

    def unmask(self, words: MaskWords, mask: MaskWords, offset: FloatArray) -> FloatArray:
        """Return the releases in messages whose masks are all known, as nobody else can."""
        return self._program.read_average(
            words - mask, num_agents=1, grid=self._plan.grid, offset=offset
        )

    @property
    def released(self) -> FloatArray:
        """The releases of all agents, shape (releases, n, size)."""
        offsets = self._record.offsets[:, np.newaxis]
        return self.unmask(self.words, self._record.masks, offsets)

    def read(self, view: View, parts: Parts) -> FloatArray:
        """Return the sums of releases that a view reads, shape (releases, parts, size).

        The view removes the masks that it can draw and adds up the messages of each part.
        """
        unmasked = self.words - self._record.draw_known_masks(view.coalition)
        totals = sum_parts(unmasked, parts, axis=1)
        averages = [
            self._program.read_average(
                totals[:, k],
                num_agents=len(part),
                grid=self._plan.grid,
                offset=self._record.offsets,
            )
            for k, part in enumerate(parts)
        ]
        sums = [len(part) * average for part, average in zip(parts, averages, strict=True)]
        return np.stack(sums, axis=1)

    def check(self, *, seed: int, alpha: float) -> MessageCheck:
        """Test messages, offsets and complete sums; two tests at level 1 − α each."""
        parts = StreamWeights.of(self._plan.decomposition).join(range(self._plan.num_agents), ())
        names, values = [], []
        for name, words in self._list_uniform(parts, seed):
            names.append(name)
            values.append(uniform_p_value(words))
        p = min(1.0, min(values) * len(values))
        problems = [*self._check_modulus(), *self._check_sums(parts, alpha)]
        if p < alpha:
            problems.append(f"{names[int(np.argmin(values))]} is not uniform: p = {p:.2g}")
        bits = 8 * self.words.dtype.itemsize
        return MessageCheck(bits, self.words.shape[-1], len(values), p, tuple(problems))

    def _list_uniform(self, parts: Parts, seed: int) -> Iterator[tuple[str, MaskWords]]:
        """Yield what must be uniform, with its name: everything but the sums of whole parts."""
        # An agent that no mask joins to others sends its release as it is.
        joined = [part for part in parts if len(part) > 1]
        generator = np.random.default_rng(seed)
        # Without it, sums on the grid have almost the law of a continuous sum: δ changes too
        # little for any attacker to show. So the offset itself is tested. That messages
        # contain it shows in the mean of their sums.
        offsets = np.floor(np.ldexp(self._record.offsets % 1.0, 32)).astype(np.uint32)
        for r, words in enumerate(self.words):
            yield f"the public offset of release {r}", offsets[r]
            # The first release and those before: repeated masks cancel in the difference.
            earlier = sorted({0, *range(max(0, r - _EARLIER), r)} - {r})
            for other in earlier:
                name = f"the difference of the public offsets of releases {other} and {r}"
                yield name, offsets[r] - offsets[other]
            for agent in (agent for part in joined for agent in part):
                yield f"the message of agent {agent} in release {r}", words[agent]
                for other in earlier:
                    name = f"the difference of agent {agent}'s messages in releases {other} and {r}"
                    yield name, words[agent] - self.words[other, agent]
            for _ in range(_COMBINATIONS if joined else 0):
                signs = _draw_signs(generator, joined, len(words))
                text = " ".join(f"{'+' if s > 0 else '−'} m_{k}" for k, s in enumerate(signs) if s)
                plus = words[signs > 0].sum(axis=0, dtype=words.dtype)
                minus = words[signs < 0].sum(axis=0, dtype=words.dtype)
                yield f"the sum {text} of messages in release {r}", plus - minus

    def _check_sums(self, parts: Parts, alpha: float) -> list[str]:
        """Compare the sums of whole parts with the private noise of their agents."""
        sums = self.read(View(), parts)
        sizes = np.array([len(part) for part in parts])
        # Rounding to the grid adds an independent uniform error for each agent.
        covariance = StreamWeights.of(self._plan.decomposition).hidden((), parts)
        covariance = covariance + np.diag(sizes * self._plan.grid**2 / 12)
        if not check_noise(sums, covariance, alpha=alpha):
            return []
        found, expected = sums.var(axis=(0, 2)), np.diag(covariance)
        worst = int(np.argmax(np.abs(np.log(np.maximum(found, 1e-300) / expected))))
        agents = "all agents" if len(parts) == 1 else f"agents {', '.join(map(str, parts[worst]))}"
        return [
            f"the sum of {agents} is not the plan's: mean {sums[:, worst].mean():.4g} instead of "
            f"0, variance {found[worst]:.4g} instead of {expected[worst]:.4g}, or two releases are "
            "correlated"
        ]

    def _check_modulus(self) -> list[str]:
        plan = self._plan
        norms = sum(plan.budget.of_agent(k).query.largest_norm for k in range(plan.num_agents))
        noise_std = math.sqrt(StreamWeights.of(plan.decomposition).covariance.sum())
        # Offset and rounding move each agent's integer by up to one and a half.
        most = (norms + _DEVIATIONS * noise_std) / plan.grid + 1.5 * plan.num_agents
        bits = 8 * self.words.dtype.itemsize
        if most < 2 ** (bits - 1):
            return []
        return [
            f"messages of {bits} bits are too short: the sum of all releases can reach "
            f"±{math.ceil(most):,} grid units, and wraps around beyond ±{2 ** (bits - 1):,}"
        ]


def uniform_p_value(words: MaskWords) -> float:
    """Return the p-value of words that are uniform: χ² of their high bits, and of their low bits.

    Both tests share the level.
    """
    num_bits = int(np.clip(math.log2(len(words) / _WORDS_PER_CELL), 1, _MOST_BITS))
    cells, shift = 2**num_bits, 8 * words.dtype.itemsize - num_bits
    counts = [
        np.bincount(some.astype(np.int64), minlength=cells)
        for some in (words >> shift, words & (cells - 1))
    ]
    expected = len(words) / cells
    square = [float(((count - expected) ** 2).sum()) / expected for count in counts]
    return min(1.0, 2 * float(stats.chi2.sf(max(square), cells - 1)))


def no_gradients(size: int) -> ClippedGradients:
    """Return the clipped gradients of one trial whose data has no gradient."""
    return ClippedGradients(
        values=torch.zeros(1, 1, size),
        factors=torch.ones(1, 1, dtype=torch.float64),
        norms=torch.zeros(1, 1),
        fraction_clipped=torch.zeros(1, 1),
        num_broken=torch.zeros(1, 1),
    )


def _draw_signs(
    generator: np.random.Generator, joined: list[tuple[int, ...]], num_agents: int
) -> FloatArray:
    """Return signs −1, 0 or 1 of all agents, which differ within some part."""
    signs = np.zeros(num_agents)
    # The same sign for all of a part would be its sum, which a view may read.
    while all(len(set(signs[list(part)])) == 1 for part in joined):
        for part in joined:
            signs[list(part)] = generator.integers(-1, 2, len(part))
    return signs
