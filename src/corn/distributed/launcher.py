"""Launch of a run on this machine, and the process of one agent: its log, status and signals."""

from __future__ import annotations

import ctypes
import logging
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any, final

import torch

from corn.distributed.agent import run_workload
from corn.distributed.journal import Reports
from corn.distributed.keyring import load_credentials, make_keys
from corn.distributed.logs import LAST_EVENT, PRIVATE_MARK, log_event, writing_log
from corn.distributed.membership import name_agents
from corn.distributed.rendezvous import RefusalError, is_public
from corn.distributed.requirements import Requirements
from corn.distributed.results import AgentResult, Failure, FailureKind, RunStatus, judge_status
from corn.distributed.settings import AgentConfig, RunSettings
from corn.distributed.status import (
    FAILED,
    STATE_NAME,
    AgentState,
    Status,
    serving_status,
    write_state,
)
from corn.distributed.storage import Folders, make_folders, read_model, read_rows
from corn.errors import CornError, StoppedByUserError
from corn.learn.mechanism import Mechanism, Trial
from corn.learn.metrics import Result, Row, measure
from corn.learn.problem import SweepSettings, TrainingProblem
from corn.learn.sweep import Interruption, catch_interruption
from corn.learn.workloads import ProblemSource
from corn.parsing import format_address
from corn.plan import Plan, load_plan
from corn.threads import limit_threads
from corn.topology.graphs import add_names
from corn.transport import StoreHost, StoreLostError
from corn.version import __version__

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_SECONDS_TO_END = 3.0
# Agents are forked from a server that has imported these, so that they start at once.
_PRELOADED = [
    "corn.distributed.launcher",
    "corn.noise.compiled",
    "corn.learn.workloads",
    "sklearn.datasets",
]
_HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A shell and a supervisor may both forward a Ctrl-C: signals within a second are one request.
_SECONDS_OF_ONE_REQUEST = 1.0
_LOCALHOST = "127.0.0.1"
# The longest time that Ctrl-C waits.
_SECONDS_BETWEEN_POLLS = 0.2
_SECONDS_BETWEEN_LINES = 10.0


def protect_process() -> None:
    """Keep this process's memory from others; elsewhere than on Linux only out of core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        # Files in /proc of this process belong to root from now on. Its state in /proc/PID/stat can
        # still be read by all, which is how the launcher finds suspended agents.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)


def without_agent(text: str) -> str:
    """Return the text of a failure without the agent that it begins with.

    >>> without_agent("agent 3 (Lake): a message of agent 2 (Hill) is damaged")
    'a message of agent 2 (Hill) is damaged'
    """
    return re.sub(r"^agent \d+( \(.*?\))?: ", "", text)


@contextmanager
def monitor_agent(config: AgentConfig, reports: Reports, *, to_stderr: bool) -> Iterator[Reports]:
    """Protect an agent's process, write its log, and serve its status if asked to."""
    agent = config.agent
    protect_process()
    # Made now, so that the log has the whole start. A folder that cannot be made is reported to all
    # agents later, where the run needs it.
    with suppress(CornError):
        make_folders(config.out, agent)
    folder = Folders.of_run(config.out).of_agent(agent).private
    status = Status(agent, names=config.names)

    def show(state: AgentState) -> None:
        status.newest = state
        if reports.on_state is not None:
            reports.on_state(state)

    with ExitStack() as stack:
        stack.enter_context(writing_log(folder=folder, to_stderr=to_stderr, names=config.names))
        log_event(agent, "process", f"corn {__version__} starts")
        if config.status is not None:
            address = stack.enter_context(serving_status(config.status, status))
            where = f"http://{format_address(address)}"
            log_event(agent, "status", f"serves its status at {where}/metrics and {where}/healthz")
        try:
            yield replace(reports, on_state=show)
        except BaseException as error:
            if status.newest is not None:
                status.newest = replace(status.newest, phase=FAILED, updated=time.time())
                with suppress(OSError):
                    write_state(folder / STATE_NAME, status.newest)
            text = str(error) if isinstance(error, CornError) else type(error).__name__
            text = without_agent(text)
            log_event(agent, LAST_EVENT, text, level=logging.ERROR, is_private=not is_public(error))
            if to_stderr and isinstance(error, CornError) and not is_public(error):
                raise CornError(f"{PRIVATE_MARK}{error}") from error
            raise


def run_child(connection: Connection, config: AgentConfig) -> None:
    """Run an agent as a child of the launcher, and report its result or failure."""
    limit_threads()  # of BLAS, as processes share the cores
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the launcher, which forwards it
    interruption = Interruption()
    signal.signal(signal.SIGTERM, lambda *_: setattr(interruption, "requested", True))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_SIGNALS)  # the fork server blocks them
    threading.Thread(target=_listen, args=(connection, interruption), daemon=True).start()
    # Private numbers stay in this process.
    reports = Reports(interruption, on_state=partial(_report, connection))
    try:
        with monitor_agent(config, reports, to_stderr=False) as monitored:
            _, result = run_workload(config, monitored)
    except CornError as error:
        kind: FailureKind = "error"
        if isinstance(error, StoppedByUserError):
            kind = "interrupted"
        elif isinstance(error, RefusalError | StoreLostError):
            kind = "followed"
        failure = Failure(kind, str(error), is_private=not is_public(error))
        _report(connection, AgentResult(config.agent, RunStatus.FAILED, failure=failure))
        sys.exit(1)
    # Models and measurements are in files; rows are partly private.
    _report(connection, replace(result, parameters=torch.empty(0), rows=()))


def _listen(connection: Connection, interruption: Interruption) -> None:
    """Request a stop at any message of the launcher; end with it."""
    try:
        while connection.recv():
            interruption.requested = True
    # The launcher is gone. Training may be inside a long computation: this thread ends the process.
    except (EOFError, OSError):
        os._exit(1)


def _report(connection: Connection, report: object) -> None:
    try:
        connection.send(report)
    except OSError:
        os._exit(1)


def _end_with_parent() -> None:
    """Let the kernel, where it can, end this process with its parent, even while suspended."""
    # The parent is the fork server. It ends with the launcher, unless a child keeps a descriptor
    # open that it inherits for children of its own, which agents do not have.
    server: Any = getattr(forkserver, "_forkserver", None)
    inherited = getattr(server, "_forkserver_alive_fd", None)
    if inherited is not None:
        os.close(inherited)
        server._forkserver_alive_fd = None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def listen_for_signals() -> Interruption:
    """Handle signals to an agent that runs by itself; call it from the main thread.

    The first SIGINT or SIGTERM requests a stop together with the others, a second one ends this
    process, which loses nothing.
    """
    interruption = Interruption()
    began = 0.0

    def handle(number: int, _: object) -> None:
        nonlocal began
        if not interruption.requested:
            interruption.requested = True
            began = time.monotonic()
        elif time.monotonic() > began + _SECONDS_OF_ONE_REQUEST:
            # Without cleaning up, as threads may hold locks. The ledger has all that was sent.
            os._exit(128 + number)

    for number in _HANDLED_SIGNALS:
        signal.signal(number, handle)
    return interruption


@final
class AgentProcesses:
    """The processes of agents on this machine: ``states`` until they end, and then ``results``."""

    def __init__(self, configs: Mapping[int, AgentConfig]) -> None:
        self._configs = dict(configs)
        self._processes: dict[int, ForkServerProcess] = {}
        self._connections: dict[int, Connection] = {}
        self._all_suspended_at = math.inf
        self.states: dict[int, AgentState] = {}
        self.results: dict[int, AgentResult] = {}

    @property
    def is_running(self) -> bool:
        """Whether any agent has not ended yet."""
        return len(self.results) < len(self._configs)

    def start(self) -> None:
        """Start all processes."""
        limit_threads()
        # Set before the fork server starts, from which all agents inherit it.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # failures are reported in one line
        with preloaded_context() as context:
            for agent, config in self._configs.items():
                self._start_one(context, agent, config)

    def poll(self, seconds: float) -> None:
        """Wait at most so long for reports, and take them in."""
        agents = {connection: agent for agent, connection in self._connections.items()}
        # One report per agent and poll: an agent that reports fast cannot hide the others.
        for ready in wait(list(agents), timeout=seconds):
            self._take(agents[ready])  # type: ignore[index]
        self._end_suspended()

    def request_stop(self) -> None:
        """Request that all agents stop together."""
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send("stop")

    def close(self) -> None:
        """End every process that is left: those that notice the closed pipe end by themselves."""
        for connection in self._connections.values():
            connection.close()
        deadline = time.monotonic() + _SECONDS_TO_END
        for process in self._processes.values():
            # One deadline for all: with one each, n hanging agents would take n times as long.
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def _start_one(self, context: ForkServerContext, agent: int, config: AgentConfig) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=run_child, args=(theirs, config), daemon=True)
        process.start()
        # Only the child holds its end now, so that this end reports when the child is gone.
        theirs.close()
        self._processes[agent] = process
        self._connections[agent] = ours

    def _take(self, agent: int) -> None:
        try:
            report = self._connections[agent].recv()
        except (EOFError, OSError):
            del self._connections[agent]
            if agent not in self.results:
                # The pipe closes a moment before the exit code is known.
                self._processes[agent].join(_SECONDS_TO_END)
                code = self._processes[agent].exitcode or 0
                # A signal's number comes with a minus. Real-time signals have no name.
                names = {-own.value: own.name for own in signal.Signals}
                how = f"ended without a report (exit code {code})"
                if code < 0:
                    how = f"ended by {names.get(code, f'signal {-code}')}"
                self._fail(agent, "ended", how)
            return
        if isinstance(report, AgentState):
            self.states[agent] = report
        else:
            self.results[agent] = report

    def _fail(self, agent: int, kind: FailureKind, message: str) -> None:
        failure = Failure(kind, add_names(f"agent {agent}: {message}", self._configs[agent].names))
        self.results[agent] = AgentResult(agent, RunStatus.FAILED, failure=failure)

    def _end_suspended(self) -> None:
        """End suspended processes, once no other is left to time them out."""
        left = [agent for agent in self._configs if agent not in self.results]
        if not left or not all(is_suspended(self._processes[agent].pid) for agent in left):
            self._all_suspended_at = math.inf
            return
        now = time.monotonic()
        self._all_suspended_at = min(now, self._all_suspended_at)
        pause = now - self._all_suspended_at
        for agent in left:
            if pause > self._configs[agent].settings.timeout:
                self._processes[agent].kill()
                self._fail(agent, "suspended", f"was suspended for {pause:.0f} s and then ended")


def is_suspended(pid: int | None) -> bool:
    """Return whether a process was suspended by a signal, as far as the system reports."""
    try:
        # The state is the first field after the command's name, which may itself contain brackets.
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")


@contextmanager
def preloaded_context() -> Iterator[ForkServerContext]:
    """Yield a context whose processes are forked from one that has imported all that agents need.

    That process blocks SIGINT and SIGTERM, as with it the agents would end, which stop together.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    main = sys.modules["__main__"]
    # Children would run this program's main script again.
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        resource_tracker.ensure_running()  # its own start would unblock signals again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield context
    finally:
        sys.modules["__main__"] = main


@final
class ProgressLog:
    """Log lines of the progress of all agents, the first of which has ``promise``."""

    def __init__(self, promise: str) -> None:
        self._promise = promise
        self._last_line = time.monotonic()

    def update(self, processes: AgentProcesses) -> None:
        """Log one line every few seconds."""
        states = processes.states
        running = [own for agent, own in states.items() if agent not in processes.results]
        if not running:
            return
        # Once agents have begun: a launch that fails has one line.
        if self._promise:
            log_event(None, "start", self._promise)
            self._promise = ""
        if time.monotonic() < self._last_line + _SECONDS_BETWEEN_LINES:
            return
        self._last_line = time.monotonic()
        slowest = min(running, key=lambda own: own.step)
        state = replace(
            slowest,
            epsilon=max(own.epsilon for own in running),
            bytes_sent=sum(own.bytes_sent for own in running),
            # Also those that only their neighbours know of.
            lost={agent: step for own in running for agent, step in own.lost.items()},
        )
        text = f"{state.describe()}, {len(running)} of {state.num_agents} agents"
        log_event(None, "checkpoint", text)


def raise_common_failure(results: Mapping[int, AgentResult]) -> None:
    """Raise, if no agent has a result, the failure of the first that has a reason of its own."""
    failures = {agent: own.failure for agent, own in results.items() if own.failure is not None}
    if len(failures) < len(results):
        return
    # An agent that followed another's refusal has nothing of its own to report.
    causes = {a: own for a, own in failures.items() if own.kind != "followed"}
    failure = next(iter((causes or failures).values()))
    is_stopped = any(own.kind == "interrupted" for own in failures.values())
    raise (StoppedByUserError if is_stopped else CornError)(failure.message)


def describe_lost(results: Mapping[int, AgentResult]) -> dict[int, str]:
    """Return why each agent without a result has none; anyone may read it."""
    failed = {agent: own.failure for agent, own in sorted(results.items()) if own.failure}
    hidden = "failed, and reported the reason to its owner"
    return {
        agent: f"agent {agent}: {hidden}" if failure.is_private else failure.message
        for agent, failure in failed.items()
    }


def describe_notes(results: Mapping[int, AgentResult]) -> list[str]:
    """Return why agents have no result, and the notes of all, each once."""
    notes = group_notes({agent: own.notes for agent, own in results.items()})
    return [*describe_lost(results).values(), *notes]


def group_notes(notes: Mapping[int, Iterable[str]]) -> list[str]:
    """Return the notes of all agents, each text once with the agents that made it."""
    authors: dict[str, list[int]] = {}
    for agent, texts in notes.items():
        for text in texts:
            authors.setdefault(text, []).append(agent)
    return [f"{name_agents(agents)}: {text}" for text, agents in authors.items()]


def merge_results(
    plan: Plan,
    problem: TrainingProblem,
    results: Mapping[int, AgentResult],
    run: Folders,
    settings: RunSettings,
) -> Result:
    """Measure the models that agents shared on public data, as a simulation would.

    A step's row is of the agents that measured it, with the ε of the one that spent most.
    """
    names = plan.network.agent_names
    folders = {agent: run.of_agent(agent) for agent in sorted(results)}
    # Tables list the steps at which there is a model; all models are measured anew here.
    tables = {agent: read_rows(own.shared / "metrics.csv") for agent, own in folders.items()}
    steps = sorted({step for table in tables.values() for step in table})
    sweep = SweepSettings(settings.steps_of(plan), dtype=plan.dtype)
    _, parts = problem.place(sweep)
    parts = {name: part for name, part in parts.items() if name in problem.public_parts}
    trial = Trial(Mechanism.from_plan(plan), settings.schedule)
    size = problem.task.num_parameters
    # Agents that are not there any more have no final model.
    final = torch.full((1, plan.num_agents, size), math.nan, dtype=sweep.torch_dtype)
    rows: list[Row] = []
    for step in steps:
        present = [agent for agent in folders if step in tables[agent]]
        shared = [read_model(folders[agent].shared, step, plan, size) for agent in present]
        models = torch.stack(shared)
        if step == steps[-1]:
            final[0, present] = models
        (row,) = measure(
            problem.task,
            models.view(1, len(present), 1, -1),
            (trial,),
            seeds=(settings.seed,),
            step=step,
            parts=parts,
            statistics=None,
            # The noise was secret, whatever the data was.
            is_simulated=False,
        )
        # ε is by releases, which only each agent's ledger knows.
        spent = [float(tables[agent][step]["epsilon"]) for agent in present]
        rows.append(row | {"epsilon": max(spent), "epsilon_least": min(spent)})
    # An agent that was cut off may have measured a later step than those that stopped.
    last = max(steps, default=0)
    is_interrupted = any(own.status is RunStatus.INTERRUPTED for own in results.values())
    is_complete = last == settings.steps_of(plan) and not is_interrupted
    return Result(
        trials=(trial,),
        seeds=(settings.seed,),
        parameters=final,
        rows=tuple(rows),
        num_steps=last,
        status="complete" if is_complete else "interrupted",
        notes=tuple(add_names(text, names) for text in describe_notes(results)),
        simulation=problem.simulation,
    )


@dataclass(frozen=True, eq=False)
class LaunchResult:
    """The result of a launch; ``was_interrupted`` by a person here.

    ``measured`` has measurements and models as a simulation gives them, but none on private data.
    """

    plan: Plan
    problem: TrainingProblem
    agents: Mapping[int, AgentResult]
    measured: Result
    folders: Folders
    keys: Path
    made_keys: bool = False
    was_interrupted: bool = False

    @property
    def finished(self) -> dict[int, AgentResult]:
        """The agents that have a result."""
        return {agent: own for agent, own in self.agents.items() if own.failure is None}

    @property
    def lost(self) -> dict[int, str]:
        """The agents without a result, and why."""
        names = self.plan.network.agent_names
        return {a: add_names(text, names) for a, text in describe_lost(self.agents).items()}

    @property
    def status(self) -> RunStatus:
        """The status of the run: all steps without all agents are ``partial``."""
        # An agent that was cut off has a result, but the others lost it.
        missing = {*self.lost}.union(*(own.lost for own in self.agents.values()))
        return judge_status(all_steps=self.measured.status == "complete", lost=missing)

    @property
    def private_notes(self) -> list[str]:
        """Notes of agents for their owners alone, failures and totals of releases included."""
        notes = {agent: list(own.private_notes) for agent, own in self.agents.items()}
        for agent, own in self.agents.items():
            if own.total is not None:
                notes[agent].append(own.total.describe())
            if own.failure is not None and own.failure.is_private:
                notes[agent].append(without_agent(own.failure.message))
        return [add_names(text, self.plan.network.agent_names) for text in group_notes(notes)]


def launch(
    source: Path,
    workload: ProblemSource,
    *,
    out: Path,
    settings: RunSettings,
    keys: Path,
    requirements: Requirements | None = None,
    status: tuple[str, int] | None = None,
) -> LaunchResult:
    """Start agents, wait for them, and merge their measurements.

    Args:
        source: a plan's file.
        workload: the data and the model to train.
        out: a folder; ``shared`` in it may be published, ``private`` is for the owners of data.
        settings: the settings of the run.
        keys: the folder of keys and ledgers. Keys are made for all agents if it has none.
        requirements: the owner's requirements of the plan and of all releases of each agent's data.
        status: address and port of status servers. Agent i serves its status at the port plus i.

    Raises:
        CornError: no agent has a result; the message has the reason.
        StoppedByUserError: a person stopped all agents before the first step, or twice.
    """
    required = requirements or Requirements()
    plan = load_plan(source)
    agents = range(plan.num_agents)
    # Once for each promise: under Poisson sampling a check takes a second.
    for agent in {plan.budget.of_agent(each): each for each in agents}.values():
        required.check(plan, agent)
    # Everything that can fail for a wrong argument has been checked; from here on files are made.
    names = tuple(plan.network.agent_names) if plan.network.has_names else ()
    made_keys = make_keys(keys, plan.num_agents, names)
    # An agent without its key could not even tell the others, which would wait for it.
    credentials = [load_credentials(keys, agent, plan.num_agents) for agent in agents]
    folders = Folders.of_run(out)
    folders.make()
    # Built here too, to fail before processes start, and to measure models at the end.
    problem = workload.build(plan.num_agents, agents).judge(plan.budget)
    promise = f"{plan.budget.describe()}, against {plan.threat.describe()}"
    if problem.simulation:
        promise = f"simulated: {promise}; {problem.simulation}"
    roster = credentials[0].roster
    # The launcher hosts the store, so that it outlasts any agent. It proves the key of the agent
    # at whose address others would look for the store.
    store = StoreHost((_LOCALHOST, 0), credentials[roster.store_host])
    others = tuple(folder.resolve() for folder in required.other_keys)
    with closing(store), writing_log(names=names):
        configs = {
            agent: AgentConfig(
                workload=workload,
                settings=settings,
                out=out.resolve(),
                agent=agent,
                source=source.resolve(),
                keys=keys.resolve(),
                num_agents=plan.num_agents,
                names=names,
                store=(_LOCALHOST, store.port),
                opens_store=False,
                requirements=replace(required, other_keys=others),
                status=None if status is None else (status[0], status[1] + agent),
            )
            for agent in agents
        }
        processes = AgentProcesses(configs)
        progress = ProgressLog(f"{promise}; roster {roster.fingerprint.hex()}")
        was_interrupted = _watch(processes, progress)
    results = dict(sorted(processes.results.items()))
    # Before anything is merged: without one result there is nothing to measure.
    raise_common_failure(results)
    measured = merge_results(plan, problem, results, folders, settings)
    return LaunchResult(plan, problem, results, measured, folders, keys, made_keys, was_interrupted)


def _watch(processes: AgentProcesses, progress: ProgressLog) -> bool:
    """Run processes until they end, at a second Ctrl-C at once; return if a person stopped them."""
    try:
        with catch_interruption() as interruption:
            # Ctrl-C is caught before the first process starts, so that none is left behind.
            processes.start()
            has_asked = False  # all agents to stop together, after a few more steps
            while processes.is_running:
                processes.poll(_SECONDS_BETWEEN_POLLS)
                progress.update(processes)
                if interruption.requested and not has_asked:
                    has_asked = True
                    processes.request_stop()
    except KeyboardInterrupt as error:
        raise StoppedByUserError(
            "ended by a second signal; ledgers count all releases, and --resume continues from the "
            "newest checkpoint that all agents have"
        ) from error
    else:
        return interruption.requested
    finally:
        processes.close()
