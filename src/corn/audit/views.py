"""Views of an attacker: the messages, the keys it holds, and the noise that stays hidden from it.

Covariances are computed here from the noise weights of the plan, stream by stream: an audit must
not take them from the code that designs, draws or verifies noise.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from corn.checks import FloatArray
from corn.covariance import Decomposition
from corn.errors import InvalidArgumentError
from corn.noise import Owner
from corn.plan import Plan
from corn.topology.graphs import label_agent, look_up_agents

Parts: TypeAlias = tuple[tuple[int, ...], ...]
"""Agents of whose releases a view can read nothing but the sum, for each such sum."""

# Coalitions are compared one by one, up to these limits.
_MOST_COALITIONS, _MOST_WORK = 10**5, 2e9
_ROUNDING = 1e-6  # relative, of precisions that equal their cap


@dataclass(frozen=True)
class View:
    """An eavesdropper who reads every message, together with a coalition that pools its keys.

    >>> View((4, 1)).describe()
    'insiders 1, 4'
    """

    coalition: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "coalition", tuple(sorted(set(self.coalition))))

    def honest(self, num_agents: int) -> list[int]:
        """Return the agents outside the coalition."""
        if self.coalition and not 0 <= self.coalition[0] <= self.coalition[-1] < num_agents:
            raise InvalidArgumentError(
                f"a view must be of agents 0 … {num_agents - 1}, found {self.describe()}"
            )
        honest = [agent for agent in range(num_agents) if agent not in self.coalition]
        if not honest:
            raise InvalidArgumentError("a coalition of all agents leaves no victim")
        return honest

    def describe(self, names: Sequence[str] = ()) -> str:
        """Return the attacker in words, with the names of agents where there are some."""
        if not self.coalition:
            return "eavesdropper"
        who = "insider" if len(self.coalition) == 1 else "insiders"
        return f"{who} {', '.join(label_agent(names, agent) for agent in self.coalition)}"


@dataclass(frozen=True, eq=False)
class StreamWeights:
    """The weights of all streams in all agents' noise, and who owns each stream."""

    weights: FloatArray  # shape (n, streams): agent i's noise is row i times normals of the streams
    owners: tuple[Owner, ...]  # of each stream
    # The owners of masks, which hide all but sums; None where every release is read.
    masks: tuple[Owner, ...] | None = None

    @classmethod
    def of(cls, decomposition: Decomposition) -> StreamWeights:
        """List private streams first, and then those of the seed groups."""
        n = decomposition.num_agents
        columns = [np.diag(np.sqrt(decomposition.private_variance))]
        owners = [Owner((agent,)) for agent in range(n)]
        groups = tuple(Owner(group, k) for k, group in enumerate(decomposition.seed_groups))
        for owner, factor in zip(groups, decomposition.factors, strict=True):
            # Row i of a group's factor is that of its i-th member; others have no part in it.
            column = np.zeros((n, factor.shape[1]))
            column[list(owner.members)] = factor
            columns.append(column)
            owners += [owner] * factor.shape[1]
        masks = groups if decomposition.is_masked else None
        return cls(np.hstack(columns), tuple(owners), masks)

    def held_by(self, coalition: Collection[int]) -> set[Owner]:
        """Return the owners whose keys a coalition has by the plan: those it is a member of."""
        every = (*self.owners, *(self.masks or ()))
        return {owner for owner in every if not set(coalition).isdisjoint(owner.members)}

    def join(self, honest: Collection[int], known: Collection[Owner]) -> Parts:
        """Return the honest agents that masks of unknown owners join; each alone without masks.

        >>> masks = Owner((0, 1), 0), Owner((1, 2), 1), Owner((2, 3), 2)
        >>> StreamWeights(np.eye(4), (), masks).join([0, 1, 3], [masks[1], masks[2]])
        ((0, 1), (3,))
        """
        left = set(honest)
        if self.masks is None:
            return tuple((agent,) for agent in sorted(left))
        graph = nx.Graph()
        graph.add_nodes_from(left)
        hidden = (owner.members for owner in self.masks if owner not in known)
        # The honest members of a group are a path of masks, whoever is between them.
        for group in hidden:
            nx.add_path(graph, filter(left.__contains__, group))
        return tuple(sorted(tuple(sorted(part)) for part in nx.connected_components(graph)))

    def hidden(self, known: Collection[Owner], parts: Parts | None = None) -> FloatArray:
        """Return the covariance of sums over ``parts`` of the noise that known owners do not draw.

        By default each agent is a part.
        """
        # Not subtracted from R: a difference would leave rounding errors where no noise is left.
        is_hidden = [owner not in known for owner in self.owners]
        B = self.weights[:, is_hidden]
        if parts is not None:
            B = sum_parts(B, parts, axis=0)
        return np.asarray(B @ B.T)

    def precision(self, view: View) -> FloatArray:
        """Return [Σ⁻¹]_jj of every agent against a view, shape (n,); 0 for insiders.

        Σ is the covariance of what the view does not know of honest agents' noise, or of the noise
        in their sums under masks. It is ∞ for agents that this noise does not hide.
        """
        n, known = len(self.weights), self.held_by(view.coalition)
        parts = self.join(view.honest(n), known)
        found = np.zeros(n)
        diagonal = np.diag(invert_hidden(self.hidden(known, parts)))
        for part, value in zip(parts, diagonal.tolist(), strict=True):
            found[list(part)] = value
        return found


def sum_parts(values: NDArray[Any], parts: Parts, *, axis: int) -> NDArray[Any]:
    """Add up the values of the agents of each part; words wrap around as sums of messages do."""
    starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    chosen = np.take(values, [agent for part in parts for agent in part], axis=axis)
    # In the type of the values: NumPy would add up small integers in a larger one.
    return np.add.reduceat(chosen, starts, axis=axis, dtype=values.dtype)


def invert_hidden(covariance: FloatArray) -> FloatArray:
    """Return Σ⁻¹; ∞ on the diagonal of agents that have a part in a direction without noise."""
    # Correlations, because agents' variances may differ by many orders and eigenvalues would then
    # be rounded to zero that are not.
    scale = np.sqrt(np.maximum(np.diag(covariance), np.finfo(float).tiny))
    values, vectors = np.linalg.eigh(covariance / np.outer(scale, scale))
    # The rounding error of eigenvalues, as in ``numpy.linalg.matrix_rank``.
    silent = values <= len(values) * np.finfo(float).eps * max(float(values[-1]), 1.0)
    kept = vectors[:, ~silent]
    inverse: FloatArray = (kept / values[~silent]) @ kept.T / np.outer(scale, scale)
    # Entries of eigenvectors that should be zero are of rounding's size, far below this.
    exposed = (np.abs(vectors[:, silent]) > 1e-9).any(axis=1)
    inverse[exposed, exposed] = math.inf
    return inverse


def read_view(text: str, names: Sequence[str]) -> View:
    """Return the view that a text names; ``worst`` is not one view, but one for each victim.

    ``names`` are those of all agents. Insiders are given by name or number.

    >>> read_view("coalition:2,Lake", ["0", "Lake", "2"]), read_view("eavesdropper", [])
    (View(coalition=(1, 2)), View(coalition=()))
    """
    if text == "eavesdropper":
        return View()
    kind, _, insiders = text.partition(":")
    if kind == "coalition" and insiders:
        return View(tuple(look_up_agents(names, insiders, argument="an insider of view")))
    raise InvalidArgumentError(
        f"view must be eavesdropper, coalition:AGENT,AGENT,… or worst, found {text!r}"
    )


def list_worst_views(plan: Plan) -> list[View]:
    """Return, for each agent, the view within the plan's threat that hides it least."""
    streams, n = StreamWeights.of(plan.decomposition), plan.num_agents
    # Without shared seeds insiders know no more than an eavesdropper.
    size = plan.threat.max_colluders if plan.decomposition.seed_groups else 0
    worst, views = np.full(n, -1.0), [View()] * n
    for view in _list_views(n, size):
        # An insider has 0, so that no coalition is the worst of its own members.
        precision = streams.precision(view)
        for agent in np.flatnonzero(precision > worst).tolist():
            worst[agent], views[agent] = precision[agent], view
    return views


def find_smallest_break(plan: Plan) -> tuple[View, int] | None:
    """Return the worst of the smallest coalitions that exceed the promise to some victim, and whom.

    Coalitions are compared in order of their sizes, up to :func:`largest_compared`; None if none of
    these exceeds a promise.
    """
    streams, caps = StreamWeights.of(plan.decomposition), plan.precision_caps
    for size in range(largest_compared(plan) + 1):
        views = _list_views(plan.num_agents, size)
        excess = ((streams.precision(view) / caps, view) for view in views)
        ratios, view = max(excess, key=lambda one: float(one[0].max()))
        if ratios.max() > 1 + _ROUNDING:
            return view, int(ratios.argmax())
    return None


def largest_compared(plan: Plan) -> int:
    """Return the most insiders of coalitions that can all be compared in reasonable time."""
    n = plan.num_agents
    # Without shared seeds insiders know no more than an eavesdropper.
    most = n - 1 if plan.decomposition.seed_groups else 0
    # Each coalition costs one eigendecomposition.
    largest, limit = 0, min(_MOST_COALITIONS, _MOST_WORK / n**3)
    while largest < most and math.comb(n, largest + 1) <= limit:
        largest += 1
    return largest


def _list_views(num_agents: int, size: int) -> Iterator[View]:
    count = math.comb(num_agents, size)
    if count > _MOST_COALITIONS:
        raise InvalidArgumentError(
            f"{count:,} coalitions of {size} among {num_agents} agents are "
            "too many to compare: name one, such as --view coalition:1,4"
        )
    return (View(chosen) for chosen in combinations(range(num_agents), size))
