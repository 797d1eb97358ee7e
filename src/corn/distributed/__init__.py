"""Agents as processes, each with its own data and keys, linked to its neighbours, nothing central.

Begin with ``agent``, which reads from top to bottom: before the first step come ``rendezvous``,
``planning``, ``keyring`` and ``requirements``; a step is in ``rounds``, with ``exchange`` and
``summing``; ``membership``, ``recovery`` and ``rejoin`` are for lost agents.

Names are imported when first used, as torch takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corn.distributed.agent import run_agent as run_agent
    from corn.distributed.agent import run_workload as run_workload
    from corn.distributed.journal import Reports as Reports
    from corn.distributed.keyring import load_credentials as load_credentials
    from corn.distributed.keyring import make_keys as make_keys
    from corn.distributed.launcher import LaunchResult as LaunchResult
    from corn.distributed.launcher import launch as launch
    from corn.distributed.launcher import listen_for_signals as listen_for_signals
    from corn.distributed.launcher import monitor_agent as monitor_agent
    from corn.distributed.own_loop import make_private as make_private
    from corn.distributed.planning import PlanningRequest as PlanningRequest
    from corn.distributed.planning import read_request as read_request
    from corn.distributed.rendezvous import Rendezvous as Rendezvous
    from corn.distributed.rendezvous import join as join
    from corn.distributed.requirements import Requirements as Requirements
    from corn.distributed.results import AgentResult as AgentResult
    from corn.distributed.results import require_done as require_done
    from corn.distributed.settings import AgentConfig as AgentConfig
    from corn.distributed.settings import RunSettings as RunSettings

_NAMES = {
    "agent": ["run_agent", "run_workload"],
    "journal": ["Reports"],
    "keyring": ["load_credentials", "make_keys"],
    "launcher": ["LaunchResult", "launch", "listen_for_signals", "monitor_agent"],
    "own_loop": ["make_private"],
    "planning": ["PlanningRequest", "read_request"],
    "rendezvous": ["Rendezvous", "join"],
    "requirements": ["Requirements"],
    "results": ["AgentResult", "require_done"],
    "settings": ["AgentConfig", "RunSettings"],
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"corn.distributed.{_MODULES[name]}"), name)
