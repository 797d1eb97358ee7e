"""A whole run on this machine, or this machine's part of it: keys, a store, agents, one result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from corn.distributed.child import Order
from corn.distributed.folders import Folders
from corn.distributed.keyring import choose_folder, make_keys
from corn.distributed.launcher import Outcome, raise_common_failure, run_agents
from corn.distributed.meeting import host_store
from corn.distributed.membership import name_agents
from corn.distributed.merging import merge_runs
from corn.distributed.planning import PlanningRequest
from corn.distributed.settings import RunSettings
from corn.distributed.status import RunStatus, judge_status
from corn.errors import CornError, InvalidArgumentError
from corn.learn.problem import TrainingProblem
from corn.learn.result import Result
from corn.learn.workloads import Workload
from corn.plan import Plan, load_plan
from corn.topology import Network

_HERE = "127.0.0.1"


@dataclass(frozen=True)
class Placement:
    """Which agents run on this machine: all, unless there are several hosts.

    Attributes:
        agents_per_host: agents 0 … k−1 run on host 0, the next k on host 1, and so on.
        host: this machine's number.
        store: address and port where agents meet; host 0 opens it. None opens one for this machine
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
        """The agents of this machine."""
        size = self.agents_per_host or num_agents
        own = range(self.host * size, min((self.host + 1) * size, num_agents))
        if not own:
            raise InvalidArgumentError(
                f"host {self.host} has no agents: the plan has {num_agents}, and {size} run on each"
            )
        return own


@dataclass(frozen=True, eq=False)
class Launched:
    """What came of a launch.

    Attributes:
        plan: what was run.
        problem: what was trained.
        result: measurements and models, as a simulation gives them, but without what is measured
            on private data unless that was asked for.
        outcome: how each agent ended.
        keys: the folder of keys and ledgers.
        made_keys: whether keys were made for this run.
        is_rehearsal: whether the noise was public, and protected nothing.
        folders: what may be handed out, and what is private.
    """

    plan: Plan
    problem: TrainingProblem
    result: Result
    outcome: Outcome
    keys: Path
    made_keys: bool
    is_rehearsal: bool
    folders: Folders

    @property
    def private_notes(self) -> list[str]:
        """What agents told their owners alone, failures included."""
        return [
            text if text.startswith(f"agent {agent}: ") else f"agent {agent}: {text}"
            for agent, own in self.outcome.endings.items()
            for text in (*own.private_notes, *([own.failure] if own.is_private else []))
        ]

    @property
    def lost(self) -> dict[int, str]:
        """The agents that did not come to the end, why, and since which step."""
        return self.outcome.lost

    @property
    def status(self) -> RunStatus:
        """As of one agent: all steps without all agents are ``partial``."""
        missing = self.lost.keys() | self.outcome.missed.keys()
        return judge_status(all_steps=self.result.status == "complete", lost=missing)


def launch(
    source: Path | PlanningRequest,
    workload: Workload,
    *,
    out: Path,
    settings: RunSettings,
    network: Network | None = None,
    keys: Path | None = None,
    placement: Placement | None = None,
    show_table: bool = True,
    show_private: bool = False,
) -> Launched:
    """Start agents, wait for them, and put together what they measured.

    Args:
        source: a plan's file; or what the agents are to plan together, each of them knowing only
            its neighbours in ``network``.
        workload: what to train.
        out: a folder; ``shared`` in it may be handed out, ``private`` is for the owners of data.
        settings: how to run.
        network: who is linked with whom, where agents plan together.
        keys: the folder of keys and ledgers, by default beside the plan: ``plan.keys``, or
            ``corn.keys`` here without a plan. Made for all agents of one machine if not there.
        placement: which agents run here.
        show_table: show a live table if there is a terminal.
        show_private: show and return what is measured on private data, too. No noise protects it:
            only for a machine whose user owns the data of all agents.

    Raises:
        CornError: no agent came to the end; the line says why.
    """
    place = placement or Placement()
    plan = load_plan(source) if isinstance(source, Path) else None
    known = network if plan is None else plan.network
    if known is None:
        raise InvalidArgumentError("network must be given where agents plan together, found None")
    agents = place.agents(known.num_agents)
    folder = keys or choose_folder(source if isinstance(source, Path) else None)
    is_one_machine = place.agents_per_host is None
    made_keys = not settings.is_rehearsal and make_keys(
        folder, known.num_agents, is_one_machine=is_one_machine
    )
    folders = Folders.of_run(out, is_rehearsal=settings.is_rehearsal)
    folders.make()
    if isinstance(source, PlanningRequest):
        (folders.shared / "request.json").write_text(source.to_text() + "\n", encoding="utf-8")
    problem = workload.build(known.num_agents)
    with_store = None
    if place.store is None or place.host == 0:
        host, port = place.store or (_HERE, 0)
        with_store = host_store(host, port, timeout=settings.timeout)
    address = place.store or (_HERE, 0 if with_store is None else with_store.port)
    orders = [
        Order(
            agent,
            known.num_agents,
            source.resolve() if isinstance(source, Path) else None,
            None if isinstance(source, Path) else source,
            tuple(sorted(known.graph.neighbors(agent))),
            workload,
            settings,
            None if settings.is_rehearsal else folder.resolve(),
            out.resolve(),
            address,
        )
        for agent in agents
    ]
    num_steps = (settings.steps_of(plan) if plan else settings.num_steps) or 0
    outcome = run_agents(
        orders, num_steps=num_steps, show_table=show_table, show_private=show_private
    )
    raise_common_failure(outcome)
    plan, result = gather(plan, problem, outcome, folders, settings, show_private=show_private)
    return Launched(
        plan, problem, result, outcome, folder, made_keys, settings.is_rehearsal, folders
    )


def gather(
    plan: Plan | None,
    problem: TrainingProblem,
    outcome: Outcome,
    folders: Folders,
    settings: RunSettings,
    *,
    show_private: bool = False,
) -> tuple[Plan, Result]:
    """The plan that was run, and one result from what agents left in their folders."""
    if plan is None:
        plan = load_plan(folders.of_agent(min(outcome.finished)).shared / "plan.corn")
    result = merge_runs(
        plan,
        problem,
        {agent: folders.of_agent(agent) for agent in outcome.endings},
        settings=settings,
        notes=describe_notes(outcome, plan.num_agents),
        show_private=show_private,
    )
    if any(own["status"] == "interrupted" for own in outcome.finished.values()):
        result = replace(result, status="interrupted")  # one that was cut off may be ahead
    return plan, result


def describe_notes(outcome: Outcome, num_agents: int) -> list[str]:
    """How many finished, why the rest did not, and what agents noted for all, each text once."""
    speakers: dict[str, list[int]] = {}
    for agent, own in outcome.endings.items():
        for text in own.summary.get("notes", own.notes):
            speakers.setdefault(text, []).append(agent)
    said = [f"{name_agents(agents)}: {text}" for text, agents in speakers.items()]
    return [*_count_finished(outcome, num_agents), *outcome.lost.values(), *said]


def _count_finished(outcome: Outcome, num_agents: int) -> list[str]:
    """Who came to an end, unless all on this machine did."""
    total = len(outcome.endings)
    if len(outcome.finished) == total:
        return []
    here = "" if total == num_agents else " on this host"
    who = name_agents(outcome.finished)
    return [f"only {len(outcome.finished)} of {total} agents{here} finished: {who}"]


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT as a pair.

    >>> parse_address("10.0.0.1:29500")
    ('10.0.0.1', 29500)
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise CornError(f"an address must be HOST:PORT, found {text!r}: try 10.0.0.1:29500")
    return host, int(port)
