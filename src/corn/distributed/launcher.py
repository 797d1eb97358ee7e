"""Launch of a run on this machine, or of this machine's part of it: keys, store, agents, result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from rich.console import Console
from rich.live import Live
from rich.table import Table

from corn.distributed.journal import Progress
from corn.distributed.keyring import default_key_folder, make_keys
from corn.distributed.lifetime import Lifetime, LifetimeTotal, bound_lifetime
from corn.distributed.planning import PlanningRequest
from corn.distributed.processes import AgentProcesses
from corn.distributed.rendezvous import host_store
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
from corn.distributed.settings import AgentConfig, RunSettings
from corn.distributed.storage import Folders
from corn.errors import InvalidArgumentError, StoppedByUserError
from corn.learn.monitor import catch_interruption
from corn.learn.problem import TrainingProblem
from corn.learn.result import Result
from corn.learn.workloads import ProblemSource
from corn.plan import Plan, fingerprint, load_plan
from corn.privacy.composition import Expense, PlanTerms
from corn.topology import Network

_LOCALHOST = "127.0.0.1"
_SECONDS_BETWEEN_POLLS = 0.2
_COLUMNS = ("agent", "step", "test loss", "ε spent", "neighbours", "MB sent")
_PRIVATE_COLUMNS = ("train loss", "clipped")


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
        seconds_to_start: until every agent had done its first step.
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
    lifetime: Lifetime | None = None,
    on_total: Callable[[LifetimeTotal], None] | None = None,
    show_table: bool = True,
    show_private: bool = False,
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
        lifetime: the owner's limit on all releases of each agent's data, under this and other
            plans.
        on_total: called before agents start with the totals of the agent here that will have
            released most.
        show_table: show a live table if there is a terminal.
        show_private: show and return measurements on private data, too. No noise protects them:
            only for a machine whose user owns the data of all agents.

    Raises:
        CornError: no agent has a result; the message has the reason.
        StoppedByUserError: a person stopped all agents before the first step, or twice.
    """
    place = placement or Placement()
    promised = load_plan(source) if isinstance(source, Path) else source
    plan = promised if isinstance(promised, Plan) else None
    known = network if plan is None else plan.network
    if known is None:
        raise InvalidArgumentError("network must be given where agents plan together, found None")
    agents = place.agents(known.num_agents)
    num_steps = (settings.steps_of(plan) if plan else settings.num_steps) or 0
    # Everything that can fail for a wrong argument has been checked; from here on files are made.
    folder = keys or default_key_folder(source if isinstance(source, Path) else None)
    made_keys = not settings.is_rehearsal and make_keys(
        folder, known.num_agents, is_one_machine=place.agents_per_host is None
    )
    folders = Folders.of_run(out, is_rehearsal=settings.is_rehearsal)
    folders.make()
    if isinstance(source, PlanningRequest):
        (folders.shared / "request.json").write_text(source.to_text() + "\n", encoding="utf-8")
    # Built here too, to fail before processes start, and to measure models at the end.
    problem = workload.build(known.num_agents, agents)
    # The launcher hosts the store, so that it outlasts any agent.
    store, address = None, place.store
    if address is None or place.host == 0:
        host, port = address or (_LOCALHOST, 0)
        store = host_store(host, port, timeout=settings.timeout)
        address = host, store.port
    owners_limit = lifetime or Lifetime()
    if on_total is not None and not settings.is_rehearsal:
        on_total(foresee_total(promised, agents, settings, keys=folder, lifetime=owners_limit))
    # Each agent gets its own neighbours and no more of the graph: with a request instead of a plan
    # this is all that it knows.
    config = AgentConfig(
        workload=workload,
        settings=settings,
        out=out.resolve(),
        plan=source.resolve() if isinstance(source, Path) else None,
        request=None if isinstance(source, Path) else source,
        keys=None if settings.is_rehearsal else folder.resolve(),
        num_agents=known.num_agents,
        store=address,
        opens_store=False,
        lifetime=replace(
            owners_limit,
            other_keys=tuple(other.resolve() for other in owners_limit.other_keys),
        ),
    )
    processes = AgentProcesses(
        {
            agent: replace(
                config, agent=agent, neighbours=tuple(sorted(known.graph.neighbors(agent)))
            )
            for agent in agents
        }
    )
    table = ProgressTable(num_steps, show=show_table, show_private=show_private)
    was_interrupted = _watch(processes, table)
    results = dict(sorted(processes.results.items()))
    raise_common_failure(results)
    if plan is None:
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
    lifetime: Lifetime,
) -> LifetimeTotal:
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
    return bound_lifetime(
        {agent: Expense(own, precisions[agent], 0) for agent, own in terms.items()},
        plan=fingerprint(source).hex() if isinstance(source, Plan) else "",
        keys=keys,
        lifetime=lifetime,
        num_steps=settings.num_steps or source.budget.num_steps,
    )


def _watch(processes: AgentProcesses, table: ProgressTable) -> bool:
    """Run processes until all have ended, none is left behind; return if a person stopped them.

    Ctrl-C requests that all agents stop together after a few more steps; a second one ends them.
    """
    try:
        with catch_interruption() as interruption, table:
            # Ctrl-C is caught before the first process starts, so that none is left behind.
            processes.start()
            while processes.is_running:
                processes.poll(_SECONDS_BETWEEN_POLLS)
                table.update(processes.progress, processes.results)
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


@final
class ProgressTable:
    """Live table of all agents' progress, on stderr; silent unless that is a terminal.

    Args:
        num_steps: the total.
        show: False silences it on a terminal too.
        show_private: show numbers computed from private data without noise, too.
    """

    def __init__(self, num_steps: int, *, show: bool = True, show_private: bool = False) -> None:
        console = Console(stderr=True)
        self._num_steps, self._shown = num_steps, show and console.is_terminal
        self._shows_private = show_private
        self._live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> ProgressTable:
        if self._shown:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._live.stop()

    def update(self, progress: Mapping[int, Progress], results: Mapping[int, AgentResult]) -> None:
        """Show the newest figures, and the agents that have ended."""
        if self._shown:
            table = draw_table(progress, results, self._num_steps, show_private=self._shows_private)
            self._live.update(table)


def draw_table(
    progress: Mapping[int, Progress],
    results: Mapping[int, AgentResult],
    num_steps: int,
    *,
    show_private: bool = False,
) -> Table:
    """Return the table as rich draws it."""
    columns = (*_COLUMNS, *(_PRIVATE_COLUMNS if show_private else ()))
    table = Table(title="train loss and clipped: private, no noise" if show_private else None)
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("")
    for agent in sorted(progress.keys() | results.keys()):
        own, end = progress.get(agent), ""
        figures = [] if own is None else _figures(own, num_steps, show_private=show_private)
        blanks = [""] * (len(columns) - 1 - len(figures))
        if agent in results:
            end = "done" if results[agent].failure is None else "lost"
        table.add_row(str(agent), *figures, *blanks, end)
    return table


def _figures(own: Progress, num_steps: int, *, show_private: bool) -> list[str]:
    private = [f"{own.train_loss:.4g}", f"{own.fraction_clipped:.0%}"]
    return [
        f"{own.step}/{num_steps}",
        "" if math.isnan(own.loss) else f"{own.loss:.4g}",
        f"{own.epsilon:.3g}",
        str(own.neighbours),
        f"{own.bytes_sent / 1e6:.1f}",
        *(private if show_private else []),
    ]
