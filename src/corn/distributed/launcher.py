"""Launch of a run on this machine, or of this machine's part of it: keys, store, agents, result.

While agents run, their progress is shown as a table or as log lines.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from corn.distributed.keyring import default_key_folder, find_credentials, make_keys
from corn.distributed.logs import LogSettings, log_event, writing_log
from corn.distributed.planning import PlanningRequest
from corn.distributed.processes import AgentProcesses, Note
from corn.distributed.rendezvous import host_store
from corn.distributed.requirements import ReleaseTotal, Requirements, bound_total
from corn.distributed.results import (
    AgentResult,
    RunStatus,
    describe_lost,
    describe_notes,
    find_missed,
    judge_status,
    merge_measurements,
    raise_common_failure,
)
from corn.distributed.settings import AgentConfig, Monitoring, RunSettings
from corn.distributed.state import AgentState, LocalState, Pace
from corn.distributed.storage import Folders
from corn.errors import InvalidArgumentError, StoppedByUserError
from corn.learn.metrics import Result
from corn.learn.problem import TrainingProblem
from corn.learn.sweep import catch_interruption
from corn.learn.workloads import ProblemSource
from corn.plan import Plan, fingerprint, load_plan
from corn.privacy.composition import Expense, PlanTerms
from corn.privacy.rounding import round_up
from corn.topology import Network
from corn.transport import HOST

_COLUMNS = ("agent", "step", "test loss", "ε spent", "neighbours", "MB sent")
_PRIVATE_COLUMNS = ("train loss", "clipped")


@final
class LaunchDisplay:
    """Display of all agents' progress on stderr.

    Args:
        num_steps: the total.
        checkpoint_every: steps between log lines.
        promise: what ε means: unit, clipping and adversary.
        epsilon: the name of ε: that of a simulation is no promise.
        show_table: False writes log lines on a terminal too.
        show_private: show numbers computed from private data without noise in the table, too.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        checkpoint_every: int = 100,
        promise: str = "",
        epsilon: str = "ε",
        show_table: bool = True,
        show_private: bool = False,
    ) -> None:
        console = Console(stderr=True)
        self._num_steps, self._has_table = num_steps, show_table and console.is_terminal
        self._checkpoint_every, self._promise = checkpoint_every, promise
        self._shows_private, self._epsilon = show_private, epsilon
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._pace, self._logged_step, self._num_logged, self._num_ended = Pace(), 0, 0, 0
        self._logged_notes: set[str] = set()

    def __enter__(self) -> LaunchDisplay:
        if self._has_table:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_table:
            self._live.stop()

    @contextmanager
    def logging(self, settings: LogSettings) -> Iterator[None]:
        """Write log lines to stderr while the block lasts, unless there is a table."""
        with writing_log(settings, to_stderr=not self._has_table):
            yield

    def update(
        self,
        states: Mapping[int, AgentState],
        local_states: Mapping[int, LocalState],
        results: Mapping[int, AgentResult],
        news: Sequence[tuple[int, Note]] = (),
    ) -> None:
        """Show the newest figures, and the agents that have ended."""
        if self._has_table:
            table = draw_table(
                states,
                results,
                self._num_steps,
                promise=self._promise,
                epsilon=self._epsilon,
                local_states=local_states if self._shows_private else None,
            )
            self._live.update(table)
            return
        self._log_notes(news)
        # Where no agent has begun, the failure that all have in common is the command's last line.
        if states:
            self._log_ends(results)
        self._log_progress({a: own for a, own in states.items() if a not in results})

    def _log_notes(self, news: Sequence[tuple[int, Note]]) -> None:
        # Agents often note the same event, for example a loss: the first one is enough.
        for agent, note in news[self._num_logged :]:
            if note.text not in self._logged_notes:
                self._logged_notes.add(note.text)
                log_event(
                    agent, "note", note.text, level=logging.WARNING, is_private=note.is_private
                )
        self._num_logged = len(news)

    def _log_ends(self, results: Mapping[int, AgentResult]) -> None:
        for agent, own in list(results.items())[self._num_ended :]:
            if own.failure is not None:
                text = own.failure.describe_publicly(agent).removeprefix(f"agent {agent}: ")
                log_event(agent, "loss", text, level=logging.ERROR)
            else:
                log_event(agent, "end", f"{own.status} after {own.num_steps} steps")
        self._num_ended = len(results)

    def _log_progress(self, running: Mapping[int, AgentState]) -> None:
        """Log one line when the slowest agent that runs passes a checkpoint."""
        step = min((own.step for own in running.values()), default=0)
        pace = self._pace.measure(step, time.monotonic())
        # A launch that resumes begins at a later step.
        reached = step - step % self._checkpoint_every
        if reached <= self._logged_step:
            return
        self._logged_step = reached
        epsilon = max(_spent(own) for own in running.values())
        losses = [own.test_loss for own in running.values() if own.test_loss is not None]
        loss = f", test loss {min(losses):.4g} … {max(losses):.4g}" if losses else ""
        megabytes = sum(own.bytes_sent for own in running.values()) / 1e6
        agents = "1 agent" if len(running) == 1 else f"{len(running)} agents"
        log_event(
            None,
            "checkpoint",
            f"step {step} of {self._num_steps}, {agents}{loss}, {megabytes:.3g} MB "
            f"sent, {pace:.0f} steps per minute, {self._epsilon} spent at most "
            f"{round_up(epsilon)}: {self._promise}",
            fields={
                "step": step,
                "num_steps": self._num_steps,
                "agents": sorted(running),
                "epsilon": epsilon,
                "promise": self._promise,
                "bytes_sent": round(megabytes * 1e6),
                "steps_per_minute": pace,
            },
        )


def draw_table(
    states: Mapping[int, AgentState],
    results: Mapping[int, AgentResult],
    num_steps: int,
    *,
    promise: str = "",
    epsilon: str = "ε",
    local_states: Mapping[int, LocalState] | None = None,
) -> Table:
    """Return the table as rich draws it, with what ε means below it.

    With ``local_states`` it also shows private numbers.
    """
    show_private = local_states is not None
    columns = (*_COLUMNS, *(_PRIVATE_COLUMNS if show_private else ()))
    table = Table(
        title="train loss and clipped: private, no noise" if show_private else None,
        # As text: rich would take brackets for markup.
        caption=Text(f"{epsilon}: {promise}") if promise else None,
    )
    for name in columns:
        table.add_column(name.replace("ε", epsilon), justify="right")
    table.add_column("")
    for agent in sorted(states.keys() | results.keys()):
        figures = [""] * (len(columns) - 1)
        if agent in states:
            local = None if local_states is None else local_states[agent]
            figures = _figures(states[agent], local, num_steps)
        end = ""
        if agent in results:
            end = "done" if results[agent].failure is None else "lost"
        table.add_row(str(agent), *figures, end)
    return table


def _figures(state: AgentState, local: LocalState | None, num_steps: int) -> list[str]:
    figures = [
        f"{state.step}/{num_steps}",
        "" if state.test_loss is None else f"{state.test_loss:.4g}",
        round_up(_spent(state), 3),
        str(len(state.neighbours)),
        f"{state.bytes_sent / 1e6:.1f}",
    ]
    if local is not None:
        clipped = local.fraction_clipped
        figures += [f"{local.train_loss:.4g}", "" if math.isnan(clipped) else f"{clipped:.0%}"]
    return figures


def _spent(state: AgentState) -> float:
    # A rehearsal protects nothing.
    return math.inf if state.epsilon is None else state.epsilon


_LOCALHOST = "127.0.0.1"
# The longest time that Ctrl-C or a refresh of the table waits.
_SECONDS_BETWEEN_POLLS = 0.2


@dataclass(frozen=True)
class Placement:
    """The agents of this machine: all, unless there are several hosts.

    Attributes:
        agents_per_host: agents 0 … k−1 run on host 0, the next k on host 1, and so on.
        host: this machine's number.
        store: address and port of the rendezvous; host 0 opens it. None opens one for this machine
            alone, on any free port.
    """

    agents_per_host: int | None = None
    host: int = 0
    store: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        if self.agents_per_host is not None and self.store is None:
            raise InvalidArgumentError(
                "store must be given as HOST:PORT where agents run on several hosts, found None"
            )

    def agents(self, num_agents: int) -> range:
        """Return the agents of this machine."""
        size = self.agents_per_host or num_agents
        own = range(self.host * size, min((self.host + 1) * size, num_agents))
        if not own:
            raise InvalidArgumentError(
                f"host {self.host} has no agents: the plan has {num_agents}, and {size} run on each"
            )
        return own


@dataclass(frozen=True, eq=False)
class LaunchResult:
    """The result of a launch.

    Attributes:
        plan: what was run.
        problem: what was trained.
        agents: the result of each agent on this machine.
        measured: measurements and models, as a simulation gives them, but without measurements on
            private data unless those were asked for.
        folders: what may be published, and what is private.
        keys: the folder of keys and ledgers.
        made_keys: whether keys were made for this run.
        is_rehearsal: whether the noise was public, and protected nothing.
        seconds_to_start: until every agent had begun to train.
        was_interrupted: whether a person stopped the run here.
    """

    plan: Plan
    problem: TrainingProblem
    agents: Mapping[int, AgentResult]
    measured: Result
    folders: Folders
    keys: Path
    made_keys: bool = False
    is_rehearsal: bool = False
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
        # Agents on other hosts are missing from the results here, but their neighbours noticed.
        missing = self.lost.keys() | find_missed(self.agents).keys()
        return judge_status(all_steps=self.measured.status == "complete", lost=missing)

    @property
    def is_simulated(self) -> bool:
        """Whether ε is no promise, because of public noise or by how the data was dealt out."""
        return self.is_rehearsal or bool(self.problem.simulation)

    @property
    def private_notes(self) -> list[str]:
        """Notes of agents for their owners alone, failures included."""
        notes = []
        for agent, own in self.agents.items():
            notes += [f"agent {agent}: {text}" for text in own.private_notes]
            if own.failure is not None and own.failure.is_private:
                notes.append(own.failure.describe(agent))
        return notes


def launch(
    source: Path | PlanningRequest,
    workload: ProblemSource,
    *,
    out: Path,
    settings: RunSettings,
    network: Network | None = None,
    keys: Path | None = None,
    placement: Placement | None = None,
    requirements: Requirements | None = None,
    on_total: Callable[[ReleaseTotal], None] | None = None,
    show_table: bool = True,
    show_private: bool = False,
    monitoring: Monitoring | None = None,
) -> LaunchResult:
    """Start agents, wait for them, and merge their measurements.

    Args:
        source: a plan's file; or a request for a plan that the agents make together, each of them
            knowing only its neighbours in ``network``.
        workload: what to train.
        out: a folder; ``shared`` in it may be published, ``private`` is for the owners of data.
        settings: of the run.
        network: the links between agents, where they plan together.
        keys: the folder of keys and ledgers, by default beside the plan: ``plan.keys``, or
            ``corn.keys`` here without a plan. Made for all agents of one machine if not there.
        placement: which agents run here.
        requirements: the owner's, of the plan and of all releases of each agent's data.
        on_total: called before agents start with the totals of the agent here that will have
            released most.
        show_table: show a live table if there is a terminal; log lines are written otherwise.
        show_private: show and return measurements on private data, too. No noise protects them:
            only for a machine whose user owns the data of all agents.
        monitoring: log and status server. Agent i serves its status at the given port plus i.

    Raises:
        CornError: no agent has a result; the message has the reason.
        StoppedByUserError: a person stopped all agents before the first step, or twice.
    """
    place, monitored = placement or Placement(), monitoring or Monitoring()
    promised = load_plan(source) if isinstance(source, Path) else source
    plan = promised if isinstance(promised, Plan) else None
    known = network if plan is None else plan.network
    if known is None:
        raise InvalidArgumentError("network must be given where agents plan together, found None")
    agents = place.agents(known.num_agents)
    # A request may leave the number of steps to its budget.
    num_steps = settings.steps_of(plan) if plan else settings.num_steps or promised.budget.num_steps
    required = requirements or Requirements()
    # Once for each promise: under Poisson sampling a check takes a second.
    for agent in {promised.budget.of_agent(each): each for each in agents}.values():
        required.check(promised, agent, is_rehearsal=settings.is_rehearsal)
    # Everything that can fail for a wrong argument has been checked; from here on files are made.
    folder = keys or default_key_folder(source if isinstance(source, Path) else None)
    made_keys = not settings.is_rehearsal and make_keys(
        folder, known.num_agents, is_one_machine=place.agents_per_host is None
    )
    # An agent without its key could not even tell the others, which would wait for it.
    credentials = {
        agent: find_credentials(settings, folder, agent, known.num_agents) for agent in agents
    }
    folders = Folders.of_run(out, is_rehearsal=settings.is_rehearsal)
    folders.make()
    if isinstance(source, PlanningRequest):
        (folders.shared / "request.json").write_text(source.to_text() + "\n", encoding="utf-8")
    # Built here too, to fail before processes start, and to measure models at the end.
    problem = workload.build(known.num_agents, agents).judge(promised.budget)
    total = None
    if on_total is not None and not settings.is_rehearsal:
        total = foresee_total(promised, agents, settings, keys=folder, requirements=required)
    # The launcher hosts the store, so that it outlasts any agent.
    store, address = None, place.store
    if address is None or place.host == 0:
        host, port = address or (_LOCALHOST, 0)
        # It proves the key of agent 0, which runs on this machine too.
        store = host_store((host, port), credentials[HOST])
        address = host, store.port
    if on_total is not None and total is not None:
        on_total(total)
    # Each agent gets its own neighbours and no more of the graph: with a request instead of a plan
    # this is all that it knows.
    config = AgentConfig(
        workload=workload,
        settings=settings,
        out=out.resolve(),
        agent=agents[0],
        plan=source.resolve() if isinstance(source, Path) else None,
        request=None if isinstance(source, Path) else source,
        keys=None if settings.is_rehearsal else folder.resolve(),
        num_agents=known.num_agents,
        store=address,
        opens_store=False,
        requirements=replace(
            required,
            other_keys=tuple(other.resolve() for other in required.other_keys),
        ),
    )
    processes = AgentProcesses(
        {
            agent: replace(
                config,
                agent=agent,
                neighbours=tuple(sorted(known.graph.neighbors(agent))),
                monitoring=monitored.of_agent(agent),
            )
            for agent in agents
        }
    )
    display = LaunchDisplay(
        num_steps,
        checkpoint_every=settings.checkpoint_every,
        promise=describe_promise(promised, settings, problem.simulation),
        epsilon="simulated ε" if problem.simulation else "ε",
        show_table=show_table,
        show_private=show_private,
    )
    try:
        with display.logging(monitored.log):
            was_interrupted = _watch(processes, display)
    finally:
        # Its port would otherwise stay taken as long as this process lasts.
        if store is not None:
            store.close()
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
        keys=folder,
        made_keys=made_keys,
        is_rehearsal=settings.is_rehearsal,
        seconds_to_start=processes.seconds_to_start,
        was_interrupted=was_interrupted,
    )


def foresee_total(
    source: Plan | PlanningRequest,
    agents: Iterable[int],
    settings: RunSettings,
    *,
    keys: Path,
    requirements: Requirements,
) -> ReleaseTotal:
    """Return the totals of the agent that will have released most after a run, or a little more.

    Agents that make their plan together get noise of at most the budget's precision.
    """
    colluders, budget = source.threat.max_colluders, source.budget
    terms = {agent: PlanTerms(budget.of_agent(agent), colluders) for agent in agents}
    if isinstance(source, Plan):
        precisions = {agent: float(source.precision_caps[agent]) for agent in terms}
    else:
        # The promises of several agents are often the same, and a cap can take a second to find.
        caps = {own: own.precision_cap for own in set(terms.values())}
        precisions = {agent: caps[own] for agent, own in terms.items()}
    return bound_total(
        {agent: Expense(own, precisions[agent], 0) for agent, own in terms.items()},
        plan=fingerprint(source).hex() if isinstance(source, Plan) else "",
        keys=keys,
        requirements=requirements,
        num_steps=settings.num_steps or source.budget.num_steps,
    )


def describe_promise(
    source: Plan | PlanningRequest, settings: RunSettings, simulation: str = ""
) -> str:
    """Return what the ε of a run means: unit, clipping and adversary, and why it is simulated."""
    if settings.is_rehearsal:
        return "rehearsal, which protects nothing"
    promise = f"{source.budget.describe()}, against {source.threat.describe()}"
    return f"simulated: {promise}; {simulation}" if simulation else promise


def _watch(processes: AgentProcesses, display: LaunchDisplay) -> bool:
    """Run processes until all have ended, none is left behind; return if a person stopped them.

    Ctrl-C requests that all agents stop together after a few more steps; a second one ends them.
    """
    try:
        with catch_interruption() as interruption, display:
            # Ctrl-C is caught before the first process starts, so that none is left behind.
            processes.start()
            while processes.is_running:
                processes.poll(_SECONDS_BETWEEN_POLLS)
                display.update(
                    processes.states, processes.local_states, processes.results, processes.news
                )
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


def merge_results(
    plan: Plan,
    problem: TrainingProblem,
    results: Mapping[int, AgentResult],
    folders: Folders,
    settings: RunSettings,
    *,
    show_private: bool = False,
) -> Result:
    """Return one result of measurements from the files of all agents."""
    merged = merge_measurements(
        plan,
        problem,
        {agent: folders.of_agent(agent) for agent in results},
        settings=settings,
        notes=describe_notes(results, plan.num_agents),
        show_private=show_private,
    )
    # An agent that was cut off may have measured a later step than those that stopped.
    if any(own.status is RunStatus.INTERRUPTED for own in results.values()):
        return replace(merged, status="interrupted")
    return merged
