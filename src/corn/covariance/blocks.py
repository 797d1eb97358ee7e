"""Disjoint seed groups: the design separates into one small problem per group.

With no seed shared across groups R is block-diagonal, so R⁻¹ is too: the cap binds in each block
on its own, and the problem separates into the same problem on the diagonal blocks of A. Values and
lower bounds add up exactly. That is how very large networks are designed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import scipy.linalg

from corn.arrays import FloatArray
from corn.covariance.decomposition import split_blocks
from corn.covariance.groups import SeedGroups
from corn.covariance.problem import DesignProblem
from corn.covariance.solution import Design, Status
from corn.threads import map_in_workers

# From best to worst: a design is as good as its worst block.
_STATUS_ORDER: tuple[Status, ...] = (
    "optimal",
    "accuracy limit",
    "noise limited",
    "constrained",
    "iteration limit",
)


def design_blocks(
    problem: DesignProblem,
    groups: SeedGroups,
    solve: Callable[[DesignProblem], Design],
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

    covariance = join(1 / cap, lambda block: block.covariance)
    return replace(
        designs[0],
        status=max((block.status for block in designs), key=_STATUS_ORDER.index),
        covariance=covariance,
        precision=join(cap, lambda block: block.precision),
        factor=join(1 / math.sqrt(cap), lambda block: block.factor),
        value=sum(block.value for block in designs),
        lower_bound=sum(block.lower_bound for block in designs),
        iterations=max(block.iterations for block in designs),
        shares=split_blocks(covariance, groups),
    )
