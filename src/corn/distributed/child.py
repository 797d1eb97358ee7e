"""An agent as a child of the launcher: obeys it, reports to it, and does not outlive it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from corn.distributed.agent_run import AgentResult, Reports
from corn.distributed.checkpoint import find_paid
from corn.distributed.folders import Folders, append_private_note, make_folders
from corn.distributed.handshake import is_public
from corn.distributed.links import find_address
from corn.distributed.meeting import Meeting, join_store
from corn.distributed.planning import PlanningRequest, plan_together
from corn.distributed.running import preparing, run_problem
from corn.distributed.settings import RunSettings
from corn.errors import CornError
from corn.learn.monitor import Interruption
from corn.learn.workloads import Workload, select_agent
from corn.plan import Plan, load_plan, save_plan
from corn.threads import limit_threads

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Order:
    """What the launcher tells an agent to do.

    Attributes:
        agent: its number.
        num_agents: n.
        plan: the plan's file; or
        request: what to plan together with the others, and
        neighbours: whom this agent is linked to, all it knows of the graph.
        workload: what to train.
        settings: how.
        keys: the folder of keys.
        out: the folder of the run.
        store: where agents meet.
    """

    agent: int
    num_agents: int
    plan: Path | None
    request: PlanningRequest | None
    neighbours: tuple[int, ...]
    workload: Workload
    settings: RunSettings
    keys: Path | None
    out: Path
    store: tuple[str, int]


def run_child(connection: Connection, order: Order) -> None:
    """The whole life of the process: run the agent, report how it ended."""
    limit_threads()
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the launcher, which asks us
    interruption = Interruption()
    signal.signal(signal.SIGTERM, lambda *_: setattr(interruption, "requested", True))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # which the forkserver is deaf to
    threading.Thread(target=_listen, args=(connection, interruption), daemon=True).start()
    reports = Reports(
        lambda progress: _tell(connection, "progress", progress),
        lambda text: _tell(connection, "note", text),
        interruption,
        lambda text: _tell(connection, "private note", text),
    )
    try:
        result = follow(order, reports)
    except CornError as error:
        _keep_failure(order, str(error))
        _tell(connection, "failed", (str(error), not is_public(error)))
        sys.exit(1)
    _tell(connection, "done", summarize(result))


def follow(order: Order, reports: Reports) -> AgentResult:
    """Carry out an order in this process."""
    timeout, where = order.settings.timeout, order.store
    interruption = reports.interruption
    store = join_store(*where, agent=order.agent, timeout=timeout, interruption=interruption)
    meeting = Meeting(
        store,
        order.agent,
        order.num_agents,
        timeout=timeout,
        address=find_address(*where),
        interruption=interruption,
    )
    with preparing(meeting):
        plan, settings = find_plan(
            meeting, order.plan, order.request, order.neighbours, order.settings, order.out
        )
        problem = order.workload.build(order.num_agents)
    return run_problem(
        plan,
        select_agent(problem, order.agent),
        meeting=meeting,
        cohort=problem.data,
        keys=order.keys,
        out=order.out,
        settings=settings,
        reports=reports,
        data=order.workload.describe(problem),
    )


def find_plan(
    meeting: Meeting,
    path: Path | None,
    request: PlanningRequest | None,
    neighbours: tuple[int, ...],
    settings: RunSettings,
    out: Path,
) -> tuple[Plan, RunSettings]:
    """The plan of a file, or the one that agents make together; that one is shared in ``out``."""
    if path is not None:
        return load_plan(path), settings
    if request is None:
        raise CornError("neither a plan nor a request for one was given")
    folders = make_folders(out, meeting.agent, is_rehearsal=settings.is_rehearsal)
    plan, seed = plan_together(meeting, request, neighbours)
    if not any(find_paid(folders.private)):  # an earlier run's plan stays, as that run does
        save_plan(plan, folders.shared / "plan.corn")
    return plan, settings.with_seed(seed)


def summarize(result: AgentResult) -> dict[str, Any]:
    """How an agent ended, as plain data; all but the time that it waited may be handed out."""
    return {
        "agent": result.agent,
        "first_step": result.first_step,
        "num_steps": result.num_steps,
        "status": result.status,
        "stop": result.stop,
        "lost": {str(agent): step for agent, step in result.lost.items()},
        "notes": list(result.notes),
        # How often it was waited for tells how long an agent computed, and so of its data.
        "traffic": {
            str(peer): {name: value for name, value in vars(own).items() if name != "waits"}
            for peer, own in result.traffic.items()
        },
        "seconds_waited": result.seconds_waited,
    }


def _keep_failure(order: Order, text: str) -> None:
    """Leave the reason with the owner: others may hear only that there is one."""
    folders = Folders.of_run(order.out).of_agent(order.agent)
    with suppress(OSError):  # there may be no folder yet, or no space, which may be the reason
        append_private_note(folders.private, text)


def _listen(connection: Connection, interruption: Interruption) -> None:
    """Any word of the launcher means stop; its silence for ever means that it is gone."""
    try:
        while connection.recv():
            interruption.requested = True
    except (EOFError, OSError):
        os._exit(1)


def _tell(connection: Connection, kind: str, content: object) -> None:
    try:
        connection.send((kind, content))
    except OSError:
        os._exit(1)


def _die_with_parent() -> None:
    """Also when stopped, and so unable to listen: the kernel sees to it where it can.

    The parent is the server that forks agents. It ends with the launcher, but for a descriptor that
    every child inherits for children of its own, which agents do not have.
    """
    server: Any = getattr(forkserver, "_forkserver", None)
    inherited = getattr(server, "_forkserver_alive_fd", None)
    if inherited is not None:
        os.close(inherited)
        server._forkserver_alive_fd = None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
