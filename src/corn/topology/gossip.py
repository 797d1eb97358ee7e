"""Gossip: the mixing rounds of a step, plain or Chebyshev-accelerated.

Rounds only post-process messages that the adversary has already observed: they cost messages but no
privacy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

import numpy as np

from corn.arrays import FloatArray, as_square_matrix
from corn.checks import require_choice, require_count
from corn.errors import InvalidArgumentError
from corn.topology.spectrum import disagreement, is_symmetric

GossipKind: TypeAlias = Literal["plain", "chebyshev"]

_MOST_ROUNDS = 1000


@final
@dataclass(frozen=True)
class Gossip:
    """The mixing rounds of one step: ``rounds`` messages over each link, in each direction.

    Round k computes y_{k+1} = α_k W y_k + (1 − α_k) y_{k−1} from the half step y_1. Plain rounds
    have α_k = 1 and compute Wʳ y_1. Chebyshev rounds compute T_r(W/σ)/T_r(1/σ) y_1 with
    σ = ‖W − 11ᵀ/n‖₂: of all polynomials in W of degree r that preserve the average, the one that
    leaves the least disagreement. Its matrix may have negative entries.

    >>> Gossip.parse("chebyshev:3"), str(Gossip(2))
    (Gossip(rounds=3, kind='chebyshev'), 'plain:2')
    """

    rounds: int = 1
    kind: GossipKind = "plain"

    def __post_init__(self) -> None:
        require_count("rounds", self.rounds, most=_MOST_ROUNDS)
        require_choice("kind", self.kind, get_args(GossipKind))
        # One round is W either way. One name for it keeps the fingerprints of equal plans equal.
        if self.rounds == 1:
            object.__setattr__(self, "kind", "plain")

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

    def coefficients(self, mixing_matrix: FloatArray) -> tuple[float, ...]:
        """Return α_1 … α_r; Chebyshev rounds need a symmetric W that mixes.

        All are from 1 to 2, and α_1 = 1.
        """
        if self.kind == "plain":
            return (1.0,) * self.rounds
        W = as_square_matrix(mixing_matrix, name="mixing_matrix")
        if not is_symmetric(W):
            raise InvalidArgumentError(
                "Chebyshev gossip needs a symmetric mixing matrix: try plain rounds"
            )
        sigma = disagreement(W)
        if not sigma < 1:
            raise InvalidArgumentError(
                f"Chebyshev gossip needs a W that mixes, found σ₂ = {sigma:g}"
            )
        return accelerate(sigma, self.rounds)

    def matrix(self, mixing_matrix: FloatArray) -> FloatArray:
        """Return the polynomial of W that a step applies, shape (n, n)."""
        W = as_square_matrix(mixing_matrix, name="mixing_matrix")
        if self.kind == "plain":
            return np.asarray(np.linalg.matrix_power(W, self.rounds))
        previous = current = np.eye(len(W))
        for alpha in self.coefficients(W):
            previous, current = current, alpha * W @ current + (1 - alpha) * previous
        return current

    def count_messages(self, num_steps: int, cooldown_steps: int = 0) -> int:
        """Return the messages of a run over each link, in each direction."""
        return self.rounds * (num_steps + cooldown_steps)


ONE_ROUND = Gossip()
"""One mixing round per step, as in the paper."""


def accelerate(sigma: float, rounds: int) -> tuple[float, ...]:
    """Return the coefficients of Chebyshev rounds for ‖W − 11ᵀ/n‖₂ = ``sigma`` < 1.

    >>> accelerate(0.0, 3)
    (1.0, 1.0, 1.0)
    """
    # With c_k = T_k(1/σ), T's recurrence is α_k = 2 c_{k−1}/(σ c_k) from the second round on. The
    # ratio a_k = c_{k−1}/(σ c_k) replaces c_k, which overflows for small σ; it exists for σ = 0.
    found, a = [1.0], 1.0
    for _ in range(rounds - 1):
        a = 1 / (2 - sigma**2 * a)
        found.append(2 * a)
    return tuple(found)
