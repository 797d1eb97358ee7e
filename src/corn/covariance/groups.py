"""Disjoint seed groups: who shares a seed with whom, and the design that follows block by block.

With no seed shared across groups R is block-diagonal, so R⁻¹ is too: the cap binds in each block
on its own, and the problem separates into the same problem on the diagonal blocks of A. Values and
lower bounds add up exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import networkx as nx
import numpy as np
import scipy.linalg

from corn.arrays import FloatArray
from corn.covariance.problem import Problem
from corn.covariance.solution import Design, Status
from corn.errors import InvalidArgumentError
from corn.threads import map_in_workers

SeedGroups: TypeAlias = tuple[tuple[int, ...], ...]

# From best to worst: a design is as good as its worst block.
_STATUS_ORDER: tuple[Status, ...] = (
    "optimal",
    "accuracy limit",
    "noise limited",
    "constrained",
    "iteration limit",
)


def split_agents(num_agents: int, num_groups: int) -> SeedGroups:
    """Split agents 0 … n−1 into runs of neighbouring numbers whose sizes differ by at most one.

    >>> split_agents(5, 2)
    ((0, 1, 2), (3, 4))
    """
    if not 1 <= num_groups <= num_agents:
        raise InvalidArgumentError(
            f"the number of seed groups must be in [1, {num_agents}], found {num_groups}"
        )
    parts = np.array_split(np.arange(num_agents), num_groups)
    return tuple(tuple(part.tolist()) for part in parts)


def find_communities(mixing_matrix: FloatArray, *, max_size: int, seed: int = 0) -> SeedGroups:
    """Group agents that are well connected with each other, at most ``max_size`` together.

    Louvain's method on the links of the mixing matrix, weights ignored; a community that is too
    large is searched again on its own, and cut along a breadth-first order where that finds no
    parts.
    """
    if max_size < 1:
        raise InvalidArgumentError(f"max_size must be at least 1, found {max_size}")
    graph: nx.Graph[int] = nx.from_numpy_array((mixing_matrix != 0) | (mixing_matrix.T != 0))
    graph.remove_edges_from(nx.selfloop_edges(graph))
    waiting, groups = [set(graph)], []
    while waiting:
        members = waiting.pop()
        if len(members) <= max_size:
            groups.append(tuple(sorted(members)))
        else:
            waiting.extend(_split_once(graph.subgraph(members), max_size, seed))
    return tuple(sorted(groups))


def check_groups(groups: int | Sequence[Sequence[int]], num_agents: int) -> SeedGroups:
    """Return seed groups as sorted tuples that hold every agent once, or say what is wrong."""
    if isinstance(groups, int):
        return split_agents(num_agents, groups)
    checked = tuple(tuple(sorted(int(agent) for agent in group)) for group in groups)
    seen = [agent for group in checked for agent in group]
    if not all(checked) or sorted(seen) != list(range(num_agents)):
        odd = sorted({a for a in seen if seen.count(a) > 1 or not 0 <= a < num_agents})
        missing = sorted(set(range(num_agents)) - set(seen))
        raise InvalidArgumentError(
            f"seed_groups must hold each of the agents 0 … {num_agents - 1} exactly once and no "
            f"empty group, found repeated or unknown agents {odd[:8]}, missing {missing[:8]}"
        )
    return checked


def design_blocks(
    problem: Problem,
    groups: SeedGroups,
    solve: Callable[[Problem], Design],
    *,
    num_workers: int = 1,
) -> Design:
    """Design each group's block by itself, in parallel, and join the blocks to one design.

    Agents whose noise no one sees (a block of A that is zero) keep LDP noise. The gap is against
    the best block-diagonal covariance for these groups.
    """
    cap = problem.precision_cap
    blocks = [problem.objective_matrix[np.ix_(group, group)] for group in groups]
    seen = [k for k, block in enumerate(blocks) if np.trace(block) > 0]
    problems = [replace(problem, objective_matrix=blocks[k]) for k in seen]
    designs = map_in_workers(solve, problems, num_workers=num_workers)
    solved = dict(zip(seen, designs, strict=True))
    order = np.argsort(np.concatenate(groups))

    def join(unseen: float, part: Callable[[Design], FloatArray | None]) -> FloatArray:
        parts = [
            part(solved[k]) if k in solved else unseen * np.eye(len(group))
            for k, group in enumerate(groups)
        ]
        return np.asarray(scipy.linalg.block_diag(*parts)[np.ix_(order, order)])

    return replace(
        designs[0],
        status=max((block.status for block in designs), key=_STATUS_ORDER.index),
        covariance=join(1 / cap, lambda block: block.covariance),
        precision=join(cap, lambda block: block.precision),
        factor=join(1 / math.sqrt(cap), lambda block: block.factor),
        value=sum(block.value for block in designs),
        lower_bound=sum(block.lower_bound for block in designs),
        iterations=max(block.iterations for block in designs),
        seed_groups=groups,
    )


def _split_once(graph: nx.Graph[int], max_size: int, seed: int) -> list[set[int]]:
    communities = [set(c) for c in nx.community.louvain_communities(graph, seed=seed)]
    if len(communities) > 1:
        return communities
    first = min(graph)
    order = [first, *(child for _, child in nx.bfs_edges(graph, first))]
    return [set(order[i : i + max_size]) for i in range(0, len(order), max_size)]
