"""Agents as processes: each with its own data and keys, linked to its neighbours, nothing central.

- ``run_agent``: one agent in this process, with your own model, loss and data.
- ``launch``: all agents of a plan on this machine.
- ``python -m corn.distributed.agent``: one agent of a workload, for torchrun.

Names are imported when first used, as torch takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corn.distributed.agent_run import AgentResult as AgentResult
    from corn.distributed.agent_run import Reports as Reports
    from corn.distributed.launching import Launched as Launched
    from corn.distributed.launching import Placement as Placement
    from corn.distributed.launching import launch as launch
    from corn.distributed.launching import parse_address as parse_address
    from corn.distributed.loop import LEDGER_SPENT as LEDGER_SPENT
    from corn.distributed.meeting import Meeting as Meeting
    from corn.distributed.meeting import join as join
    from corn.distributed.planning import PlanningRequest as PlanningRequest
    from corn.distributed.running import run_agent as run_agent
    from corn.distributed.settings import RunSettings as RunSettings

_HOMES = {
    "Launched": "corn.distributed.launching",
    "Placement": "corn.distributed.launching",
    "launch": "corn.distributed.launching",
    "parse_address": "corn.distributed.launching",
    "LEDGER_SPENT": "corn.distributed.loop",
    "Meeting": "corn.distributed.meeting",
    "join": "corn.distributed.meeting",
    "PlanningRequest": "corn.distributed.planning",
    "AgentResult": "corn.distributed.agent_run",
    "Reports": "corn.distributed.agent_run",
    "run_agent": "corn.distributed.running",
    "RunSettings": "corn.distributed.settings",
}

__all__ = sorted(_HOMES)  # one list of names is enough


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
