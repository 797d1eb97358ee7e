"""Launch of a run on this machine: keys, store, agents, result.

While agents run, their progress is logged.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from corn.distributed.journal import measure_pace
from corn.distributed.keyring import load_credentials, make_keys
from corn.distributed.logs import LogFormat, log_event, writing_log
from corn.distributed.planning import PlanningRequest
from corn.distributed.processes import AgentProcesses
from corn.distributed.rendezvous import host_store
from corn.distributed.requirements import Requirements
from corn.distributed.results import (
    AgentResult,
    RunStatus,
    describe_lost,
    find_missed,
    group_notes,
    judge_status,
    merge_results,
    raise_common_failure,
)
from corn.distributed.settings import AgentConfig, RunSettings
from corn.distributed.status import AgentState
from corn.distributed.storage import Folders
from corn.errors import InvalidArgumentError, StoppedByUserError
from corn.learn.metrics import Result
from corn.learn.problem import TrainingProblem
from corn.learn.sweep import catch_interruption
from corn.learn.workloads import ProblemSource
from corn.plan import Plan, load_plan
from corn.topology import Network

_LOCALHOST = "127.0.0.1"
# The longest time that Ctrl-C waits.
_SECONDS_BETWEEN_POLLS = 0.2
_SECONDS_BETWEEN_LINES = 10.0


@final
class ProgressLog:
    """Log lines of all agents' public notes, ends and progress.

    The first has ``promise``, which says what ε means. ``corn status`` shows the agents one by one.
    """

    def __init__(self, promise: str, *, checkpoint_every: int = 100) -> None:
        self._promise = promise
        self._checkpoint_every = checkpoint_every
        self._pace: deque[tuple[float, int]] = deque()
        self._last_line = time.monotonic()
        self._logged_step = 0
        self._num_logged = 0
        self._num_ended = 0
        self._logged_notes: set[str] = set()

    def update(self, processes: AgentProcesses) -> None:
        """Log what is new."""
        # Agents often note the same event, for example a loss: the first one is enough.
        for note in processes.news[self._num_logged :]:
            if note.text not in self._logged_notes and not note.is_private:
                self._logged_notes.add(note.text)
                log_event(note.agent, "note", note.text, level=logging.WARNING)
        self._num_logged = len(processes.news)
        states, results = processes.states, processes.results
        # Where no agent has begun, the failure that all have in common is the command's last line.
        for agent, own in list(results.items())[self._num_ended :] if states else ():
            if own.failure is not None:
                text = own.failure.describe_publicly(agent).removeprefix(f"agent {agent}: ")
                log_event(agent, "loss", text, level=logging.ERROR)
            else:
                log_event(agent, "end", f"{own.status} after {own.num_steps} steps")
            self._num_ended += 1
        running = [own for agent, own in states.items() if agent not in results]
        # Once agents have begun: a launch that fails has one line.
        if running and self._promise:
            log_event(None, "start", self._promise)
            self._promise = ""
        if running:
            self._log_progress(running)

    def _log_progress(self, running: list[AgentState]) -> None:
        """Log one line when the slowest agent that runs passes a checkpoint, or takes long."""
        slowest, now = min(running, key=lambda own: own.step), time.monotonic()
        pace = measure_pace(self._pace, slowest.step, now)
        # A launch that resumes begins at a later step.
        reached = slowest.step - slowest.step % self._checkpoint_every
        if reached <= self._logged_step and now < self._last_line + _SECONDS_BETWEEN_LINES:
            return
        self._logged_step = reached
        self._last_line = now
        state = replace(
            slowest,
            epsilon=max(own.epsilon for own in running),
            bytes_sent=sum(own.bytes_sent for own in running),
            steps_per_minute=pace,
        )
        log_event(
            None,
            "checkpoint",
            f"{state.describe()}, {len(running)} of {state.num_agents} agents",
            fields=state.fields | {"agents": sorted(own.agent for own in running)},
        )


@dataclass(frozen=True, eq=False)
class LaunchResult:
    """The result of a launch.

    ``measured`` has measurements and models as a simulation gives them, but no measurements on
    private data unless those were asked for. ``was_interrupted`` is a stop by a person here.
    """

    plan: Plan
    problem: TrainingProblem
    agents: Mapping[int, AgentResult]
    measured: Result
    folders: Folders
    keys: Path
    made_keys: bool = False
    seconds_to_start: float = 0.0
    was_interrupted: bool = False

    @property
    def finished(self) -> dict[int, AgentResult]:
        """The agents that have a result."""
        return {agent: own for agent, own in self.agents.items() if own.failure is None}

    @property
    def lost(self) -> dict[int, str]:
        """The agents without a result, why, and since which step."""
        return describe_lost(self.agents)

    @property
    def status(self) -> RunStatus:
        """The status of the run: all steps without all agents are ``partial``."""
        # An agent that was cut off has a result, but the others lost it.
        missing = self.lost.keys() | find_missed(self.agents).keys()
        return judge_status(all_steps=self.measured.status == "complete", lost=missing)

    @property
    def private_notes(self) -> list[str]:
        """Notes of agents for their owners alone, failures and totals of releases included."""
        notes = {agent: list(own.private_notes) for agent, own in self.agents.items()}
        for agent, own in self.agents.items():
            if own.total is not None:
                notes[agent].append(own.total.describe())
            if own.failure is not None and own.failure.is_private:
                notes[agent].append(own.failure.message.removeprefix(f"agent {agent}: "))
        return group_notes(notes)


def launch(
    source: Path | PlanningRequest,
    workload: ProblemSource,
    *,
    out: Path,
    settings: RunSettings,
    keys: Path,
    network: Network | None = None,
    requirements: Requirements | None = None,
    show_private: bool = False,
    log_format: LogFormat = "text",
    status: tuple[str, int] | None = None,
) -> LaunchResult:
    """Start agents, wait for them, and merge their measurements.

    Args:
        source: a plan's file; or a request for a plan that the agents make together, each of them
            knowing only its neighbours in ``network``.
        workload: what to train.
        out: a folder; ``shared`` in it may be published, ``private`` is for the owners of data.
        settings: how to run.
        keys: the folder of keys and ledgers. Keys are made for all agents if it has none.
        network: the links between agents, where they plan together.
        requirements: the owner's, of the plan and of all releases of each agent's data.
        show_private: return measurements on private data, too. No noise protects them: only for a
            machine whose user owns the data of all agents.
        log_format: of the lines of all logs.
        status: address and port of status servers. Agent i serves its status at the port plus i.

    Raises:
        CornError: no agent has a result; the message has the reason.
        StoppedByUserError: a person stopped all agents before the first step, or twice.
    """
    required = requirements or Requirements()
    promised = load_plan(source) if isinstance(source, Path) else source
    plan = promised if isinstance(promised, Plan) else None
    known = network if plan is None else plan.network
    if known is None:
        raise InvalidArgumentError("network must be given where agents plan together, found None")
    agents = range(known.num_agents)
    # Once for each promise: under Poisson sampling a check takes a second.
    for agent in {promised.budget.of_agent(each): each for each in agents}.values():
        required.check(promised, agent)
    # Everything that can fail for a wrong argument has been checked; from here on files are made.
    names = tuple(known.agent_names) if known.has_names else ()
    made_keys = make_keys(keys, known.num_agents, names)
    # An agent without its key could not even tell the others, which would wait for it.
    credentials = [load_credentials(keys, agent, known.num_agents) for agent in agents]
    folders = Folders.of_run(out)
    folders.make()
    if isinstance(source, PlanningRequest):
        (folders.shared / "request.json").write_text(source.to_text() + "\n", encoding="utf-8")
    # Built here too, to fail before processes start, and to measure models at the end.
    problem = workload.build(known.num_agents, agents).judge(promised.budget)
    promise = f"{promised.budget.describe()}, against {promised.threat.describe()}"
    if problem.simulation:
        promise = f"simulated: {promise}; {problem.simulation}"
    roster = credentials[0].roster
    # The launcher hosts the store, so that it outlasts any agent. It proves the key of the agent
    # at whose address others would look for the store.
    store = host_store((_LOCALHOST, 0), credentials[roster.store_host])
    with closing(store), writing_log(log_format, names=names):
        processes = AgentProcesses(
            {
                agent: AgentConfig(
                    workload=workload,
                    settings=settings,
                    out=out.resolve(),
                    agent=agent,
                    plan=source.resolve() if isinstance(source, Path) else None,
                    request=None if isinstance(source, Path) else source,
                    # All that it knows of the graph, where there is no plan.
                    neighbours=tuple(sorted(known.graph.neighbors(agent))),
                    keys=keys.resolve(),
                    num_agents=known.num_agents,
                    names=names,
                    store=(_LOCALHOST, store.port),
                    opens_store=False,
                    requirements=replace(
                        required, other_keys=tuple(one.resolve() for one in required.other_keys)
                    ),
                    log_format=log_format,
                    status=None if status is None else (status[0], status[1] + agent),
                )
                for agent in agents
            }
        )
        progress = ProgressLog(
            f"{promise}; roster {roster.fingerprint.hex()}",
            checkpoint_every=settings.checkpoint_every,
        )
        was_interrupted = _watch(processes, progress)
    results = dict(sorted(processes.results.items()))
    # Before anything is merged: without one result there is nothing to measure.
    raise_common_failure(results)
    if plan is None:
        # All agents compared the fingerprint of the plan that they made, so any copy will do.
        first = min(agent for agent, own in results.items() if own.failure is None)
        plan = load_plan(folders.of_agent(first).shared / "plan.corn")
    return LaunchResult(
        plan=plan,
        problem=problem,
        agents=results,
        measured=merge_results(
            plan, problem, results, folders, settings, show_private=show_private
        ),
        folders=folders,
        keys=keys,
        made_keys=made_keys,
        seconds_to_start=processes.seconds_to_start,
        was_interrupted=was_interrupted,
    )


def _watch(processes: AgentProcesses, progress: ProgressLog) -> bool:
    """Run processes until all have ended, none is left behind; return if a person stopped them.

    Ctrl-C requests that all agents stop together after a few more steps; a second one ends them.
    """
    try:
        with catch_interruption() as interruption:
            # Ctrl-C is caught before the first process starts, so that none is left behind.
            processes.start()
            while processes.is_running:
                processes.poll(_SECONDS_BETWEEN_POLLS)
                progress.update(processes)
                if interruption.requested:
                    processes.request_stop()
    except KeyboardInterrupt as error:
        # Agents have written files and spent budget by now, which the user must know.
        raise StoppedByUserError(
            "ended by a second signal; ledgers count all releases, and --resume continues from the "
            "newest checkpoint that all agents have"
        ) from error
    else:
        return interruption.requested
    finally:
        processes.close()
