"""Agents as processes, each with its own data and keys, linked to its neighbours, nothing central.

- ``run_agent``: one agent in this process, with your own model, loss and data.
- ``launch``: all agents of a plan on this machine.
- ``corn agent``: one agent of a workload, for torchrun.

In the order in which things happen: ``settings``, ``launcher`` and ``processes`` lead to ``agent``,
which reads from top to bottom. ``startup`` is all before the first step: rendezvous, plan, keys,
agreement, links. ``steps`` has the rounds of training, ``dropout`` the losses and returns of
agents, ``records`` the journal, the files and the result of a run. ``status`` has the log, the
state and the status server of an agent.

Names are imported when first used, as torch takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corn.distributed.agent import run_agent as run_agent
    from corn.distributed.agent import run_workload as run_workload
    from corn.distributed.launcher import LaunchResult as LaunchResult
    from corn.distributed.launcher import Placement as Placement
    from corn.distributed.launcher import launch as launch
    from corn.distributed.processes import listen_for_signals as listen_for_signals
    from corn.distributed.records.journal import Reports as Reports
    from corn.distributed.records.results import AgentResult as AgentResult
    from corn.distributed.records.results import RunStatus as RunStatus
    from corn.distributed.records.results import describe_stop as describe_stop
    from corn.distributed.records.results import require_done as require_done
    from corn.distributed.settings import AgentConfig as AgentConfig
    from corn.distributed.settings import Monitoring as Monitoring
    from corn.distributed.settings import RunSettings as RunSettings
    from corn.distributed.settings import parse_address as parse_address
    from corn.distributed.startup.joining import join as join
    from corn.distributed.startup.keyring import make_keys as make_keys
    from corn.distributed.startup.planning import PlanningRequest as PlanningRequest
    from corn.distributed.startup.planning import read_request as read_request
    from corn.distributed.startup.rendezvous import Rendezvous as Rendezvous
    from corn.distributed.startup.requirements import ReleaseTotal as ReleaseTotal
    from corn.distributed.startup.requirements import RequirementError as RequirementError
    from corn.distributed.startup.requirements import Requirements as Requirements
    from corn.distributed.status.monitor import monitor_agent as monitor_agent
    from corn.distributed.steps.messages import StopReason as StopReason

_MODULES = {
    "AgentConfig": "settings",
    "AgentResult": "records.results",
    "LaunchResult": "launcher",
    "Requirements": "startup.requirements",
    "RequirementError": "startup.requirements",
    "ReleaseTotal": "startup.requirements",
    "Monitoring": "settings",
    "Placement": "launcher",
    "PlanningRequest": "startup.planning",
    "Rendezvous": "startup.rendezvous",
    "Reports": "records.journal",
    "RunSettings": "settings",
    "RunStatus": "records.results",
    "StopReason": "steps.messages",
    "describe_stop": "records.results",
    "join": "startup.joining",
    "launch": "launcher",
    "listen_for_signals": "processes",
    "make_keys": "startup.keyring",
    "monitor_agent": "status.monitor",
    "parse_address": "settings",
    "read_request": "startup.planning",
    "require_done": "records.results",
    "run_agent": "agent",
    "run_workload": "agent",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"corn.distributed.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
