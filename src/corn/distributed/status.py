"""How a run ended, in one word: a run without some of its agents is not complete."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, TypeAlias

RunStatus: TypeAlias = Literal["complete", "partial", "interrupted"]


def judge_status(*, all_steps: bool, lost: Collection[int]) -> RunStatus:
    """``complete``: all steps by all agents. ``partial``: all steps, but agents were lost.

    >>> judge_status(all_steps=True, lost=[2])
    'partial'
    """
    if not all_steps:
        return "interrupted"
    return "partial" if lost else "complete"
