"""What a coalition can learn: an independent check of any split of noise against any insiders."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from corn.arrays import FloatArray
from corn.covariance.decomposition import Decomposition
from corn.errors import InvalidArgumentError
from corn.privacy import ClippedQuery, PrivacyLoss, account_precision, precision_diagonal


@dataclass(frozen=True, eq=False)
class Exposure:
    """The privacy that honest agents keep against a coalition.

    ``loss`` counts the honest agents only, in the order of ``honest``.
    """

    coalition: tuple[int, ...]
    honest: tuple[int, ...]
    loss: PrivacyLoss

    def epsilon(self, delta: float) -> dict[int, float]:
        """Each honest agent's exact ε at this δ against the coalition; ∞ where nothing hides it."""
        values = self.loss.epsilon(delta).tolist()
        return dict(zip(self.honest, values, strict=True))


def expose(
    decomposition: Decomposition,
    coalition: Iterable[int],
    query: ClippedQuery,
    *,
    num_steps: int,
) -> Exposure:
    """Return what ``num_steps`` steps reveal of each honest agent to a coalition that colludes.

    Recomputed from the split itself: the noise the coalition cannot reproduce, and the exact
    accounting of :mod:`corn.privacy`. It shares no code with the solvers.

    >>> pair = np.array([[1.0], [-1.0]])
    >>> shares = Decomposition(np.ones(2), ((0, 1),), (pair,))
    >>> query = ClippedQuery(0.01)
    >>> outside = expose(shares, [], query, num_steps=100).epsilon(1e-5)[0]
    >>> inside = expose(shares, [1], query, num_steps=100).epsilon(1e-5)[0]
    >>> outside < inside
    True
    """
    members = tuple(sorted(set(coalition)))
    honest, precision = hidden_precision(decomposition, members)
    return Exposure(members, honest, account_precision(precision, query, num_steps=num_steps))


def hidden_precision(
    decomposition: Decomposition, coalition: Collection[int]
) -> tuple[tuple[int, ...], FloatArray]:
    """The honest agents, and an upper bound on [(R^(I))⁻¹]_ii of each against a coalition I.

    >>> hidden_precision(Decomposition(np.array([4.0, 1.0])), [1])
    ((0,), array([0.25]))
    """
    honest = tuple(i for i in range(decomposition.num_agents) if i not in coalition)
    if not honest:
        raise InvalidArgumentError("a coalition of all agents leaves nobody to protect")
    hidden = decomposition.hidden_from(coalition)[np.ix_(honest, honest)]
    return honest, precision_diagonal(hidden, num_terms=1 + decomposition.most_streams)
