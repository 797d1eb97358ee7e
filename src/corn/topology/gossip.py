"""Gossip: the mixing rounds of a step, plain or Chebyshev-accelerated.

Rounds only post-process messages that the adversary has already observed: they cost messages but no
privacy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, final, get_args

import numpy as np

from corn.checks import FloatArray, as_square_matrix, require_choice, require_count
from corn.errors import InvalidArgumentError
from corn.topology.mixing import is_symmetric

GossipKind: TypeAlias = Literal["plain", "chebyshev"]

_MOST_ROUNDS = 1000


class GossipRound(NamedTuple):
    """One round: y ← y + momentum · (y − the y before) + gain · (W y − y)."""

    momentum: float
    gain: float


@final
@dataclass(frozen=True)
class Gossip:
    """The mixing rounds of one step: ``rounds`` messages over each link, in each direction.

    Plain rounds replace y by W y and compute Wʳ. Chebyshev rounds compute the polynomial of degree
    r in W that preserves the average and leaves the least of the worst disagreement: with λ from
    ``a`` to ``b`` the eigenvalues of a symmetric W other than that of the average, and
    t(λ) = (2λ − a − b)/(b − a), it is T_r(t(W))/T_r(t(1)). Its matrix may have negative entries.

    >>> Gossip.parse("chebyshev:3"), str(Gossip(2))
    (Gossip(rounds=3, kind='chebyshev'), 'plain:2')
    """

    rounds: int = 1
    kind: GossipKind = "plain"

    def __post_init__(self) -> None:
        require_count("rounds", self.rounds, most=_MOST_ROUNDS)
        require_choice("kind", self.kind, get_args(GossipKind))

    @classmethod
    def parse(cls, text: str) -> Gossip:
        """Return the gossip of a text such as ``3``, ``plain:3`` or ``chebyshev:3``."""
        kind, _, rounds = text.strip().rpartition(":")
        # Nine digits, because Python refuses to read integers of thousands of them.
        if kind not in ("", *get_args(GossipKind)) or not rounds.isdecimal() or len(rounds) > 9:
            raise InvalidArgumentError(
                "gossip must be a number of rounds, plain:ROUNDS or chebyshev:ROUNDS, found "
                f"{text[:40]!r}: try 2 or chebyshev:3"
            )
        return cls(int(rounds), "chebyshev" if kind == "chebyshev" else "plain")

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return f"{self.kind}:{self.rounds}"

    def schedule(self, mixing_matrix: FloatArray) -> tuple[GossipRound, ...]:
        """Return the rounds of a step; Chebyshev rounds need a symmetric W that mixes."""
        if self.kind == "plain":
            return (GossipRound(0.0, 1.0),) * self.rounds
        W = as_square_matrix(mixing_matrix, name="mixing_matrix")
        if not is_symmetric(W):
            raise InvalidArgumentError(
                "Chebyshev gossip needs a symmetric mixing matrix: try plain rounds"
            )
        eigenvalues = np.asarray(np.linalg.eigvalsh(W), dtype=np.float64)
        # Without the largest, which is 1 and belongs to the average.
        return accelerate(eigenvalues[:-1], self.rounds)

    def matrix(self, mixing_matrix: FloatArray) -> FloatArray:
        """Return the polynomial of W that a step applies, shape (n, n)."""
        W = as_square_matrix(mixing_matrix, name="mixing_matrix")
        if self.kind == "plain":
            return np.asarray(np.linalg.matrix_power(W, self.rounds))
        return apply_rounds(self.schedule(W), W)

    def count_messages(self, num_steps: int, cooldown_steps: int = 0) -> int:
        """Return the messages of a run over each link, in each direction."""
        return self.rounds * (num_steps + cooldown_steps)

    def describe(self, num_steps: int, cooldown_steps: int) -> str:
        """Return the rounds and messages of a run in one line.

        >>> Gossip(2).describe(300, 10)
        '2 rounds per step, 300 steps and 10 that only mix: 620 messages per link, each way'
        """
        kind = " Chebyshev" if self.kind == "chebyshev" else ""
        rounds = f"{self.rounds}{kind} round{'s' if self.rounds > 1 else ''} per step"
        cooldown = f" and {cooldown_steps:,} that only mix" if cooldown_steps else ", no cool-down"
        messages = self.count_messages(num_steps, cooldown_steps)
        return f"{rounds}, {num_steps:,} steps{cooldown}: {messages:,} messages per link, each way"


ONE_ROUND = Gossip()
"""One mixing round per step, as in the paper."""


def apply_rounds(schedule: Sequence[GossipRound], mixing_matrix: FloatArray) -> FloatArray:
    """Return the polynomial of W that rounds apply, shape (n, n)."""
    change, current = np.zeros_like(mixing_matrix), np.eye(len(mixing_matrix))
    for momentum, gain in schedule:
        change = momentum * change + gain * (mixing_matrix @ current - current)
        current = current + change
    return current


def accelerate(eigenvalues: FloatArray, rounds: int) -> tuple[GossipRound, ...]:
    """Return Chebyshev rounds for a W with these eigenvalues besides the 1 of the average.

    >>> accelerate(np.array([0.5, 0.5]), 1)
    (GossipRound(momentum=0.0, gain=2.0),)
    """
    low, high = float(eigenvalues.min(initial=1.0)), float(eigenvalues.max(initial=-1.0))
    if not len(eigenvalues):
        low = high = 0.0  # a single agent
    # An eigenvalue that is 1 up to rounding belongs to a part of the network that is cut off.
    if high > 1 - 8 * (1 + len(eigenvalues)) * np.finfo(float).eps:
        raise InvalidArgumentError(
            f"Chebyshev gossip needs a W that mixes, found a second eigenvalue of {high:g}"
        )
    centre = (low + high) / 2
    # W' = (W − centre)/(1 − centre) has disagreement eigenvalues from −s to s. With c_k = T_k(1/s),
    # T's recurrence is y_{k+1} = α W' y_k + (1 − α) y_{k−1}, α = 2 c_k/(s c_{k+1}) from the second
    # round on. Its half a replaces c_k, which overflows for small s; the limit s = 0 exists.
    s = (high - low) / 2 / (1 - centre)
    found, a = [GossipRound(0.0, 1 / (1 - centre))], 1.0
    for _ in range(rounds - 1):
        a = 1 / (2 - s**2 * a)
        # α W' y + (1 − α) (the y before) = y + (α − 1)(y − the y before) + α (W y − y)/(1 − centre)
        found.append(GossipRound(2 * a - 1, 2 * a / (1 - centre)))
    return tuple(found)
