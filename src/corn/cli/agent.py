"""``corn agent``: run one agent of a plan in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from corn import distributed, learn
from corn.cli.learning import (
    LearningOptions,
    read_consortium,
    refuse_options_of_plan,
)
from corn.cli.options import JsonOption, in_agents, in_learning
from corn.cli.output import print_json
from corn.distributed.settings import DropoutPolicy
from corn.errors import FileFormatError
from corn.learn.consortium import Consortium
from corn.noise import load_roster
from corn.parsing import DEFAULT_PORT, parse_address
from corn.plan import Plan, fingerprint, load_plan
from corn.privacy import PrivacyBudget
from corn.threads import limit_threads
from corn.topology.graphs import look_up_agents

in_place = partial(typer.Option, rich_help_panel="Rendezvous")
in_monitoring = partial(typer.Option, rich_help_panel="Monitoring")


@dataclass(frozen=True)
class MonitoringOptions:
    """The status server of an agent."""

    status: Annotated[
        str | None,
        in_monitoring(
            help="HOST:PORT to serve /healthz and /metrics (Prometheus) at. With corn launch, "
            "agent I uses PORT + I."
        ),
    ] = None

    @property
    def address(self) -> tuple[str, int] | None:
        """The address at which the status is served; None for none."""
        return None if self.status is None else parse_address(self.status)


EXAMPLE = "corn agent plan.corn --keys keys --task breast-cancer --agent 2 --store 10.0.0.1:29500"


@dataclass(frozen=True)
class RunOptions:
    """Options of a run, the same for ``corn agent`` and ``corn launch``."""

    step_size: Annotated[float, in_learning(help="First step size.")] = 0.1
    on_dropout: Annotated[
        DropoutPolicy | None,
        in_agents(
            help="When an agent is lost, the rest replan their noise for the surviving graph, or "
            "stop. (Default: replan where the seeds allow it, else stop.)"
        ),
    ] = None
    timeout: Annotated[
        float,
        in_agents(
            min=0.1, help="Seconds without a message after which a neighbour is considered lost."
        ),
    ] = 60.0
    resume: Annotated[
        bool,
        in_agents(
            "--resume", help="Continue from the newest step of which every agent has a checkpoint."
        ),
    ] = False

    device: Annotated[
        str,
        in_learning(
            help="Device of torch for gradients, such as cuda:0. Noise and messages stay on the "
            "CPU. Agents may have different ones."
        ),
    ] = "cpu"
    require: Annotated[
        list[str] | None,
        in_agents(
            metavar="NAME=VALUE",
            help="Refuse to start unless the plan meets this: unit, adjacency, insiders (at "
            "least), steps (at most), epsilon (at most), and total-epsilon (at most, of all "
            "releases of an agent's data under this and other plans), both at delta (1e-5 unless "
            "given). Can be given several times.",
        ),
    ] = None
    other_keys: Annotated[
        list[Path] | None,
        in_agents(
            envvar="CORN_OTHER_KEYS",
            help="Another folder of keys whose agents of the same numbers have the same data; its "
            "ledgers count towards the total. Can be given several times.",
        ),
    ] = None

    def make_workload(
        self, learning: LearningOptions, consortium: Consortium | None, names: Sequence[str]
    ) -> learn.Workload | learn.FileWorkload:
        """Return the workload of agents with these names on this run's device."""
        if consortium is not None and learning.data is not None:
            return replace(consortium.make_workload(learning.data), device=self.device)
        return replace(learning.make_workload(names), device=self.device)

    def make_requirements(self) -> distributed.Requirements:
        """Return the owner's requirements."""
        return distributed.Requirements.parse(self.require or (), other_keys=self.other_keys or ())

    def make_settings(
        self,
        learning: LearningOptions,
        budget: PrivacyBudget,
        consortium: Consortium | None = None,
    ) -> distributed.RunSettings:
        """Return the settings of a run."""
        agreed = None if consortium is None else consortium.training
        return distributed.RunSettings(
            learning.make_schedule(self.step_size if consortium is None else consortium.step_size),
            batch_size=budget.batch_size or (agreed or learning).batch_size,
            on_dropout=self.on_dropout,
            timeout=self.timeout,
            resume=self.resume,
        )


def read_source(path: Path, option: str, given: object) -> Plan | distributed.PlanningRequest:
    """Return the plan of a file, or the request for one, which needs ``option``.

    Raises:
        BadParameter: the option is missing for a request, or given with a plan.
        FileFormatError: the file is neither.
    """
    source: Plan | distributed.PlanningRequest
    try:
        source = load_plan(path)
    except FileFormatError as error:
        try:
            source = distributed.read_request(path)
        except FileFormatError:
            raise error from None
    if isinstance(source, Plan) == (given is not None):
        kind = "a plan, which decides this: omit the option"
        if given is None:
            kind = "a request for a plan, which needs this option"
        raise typer.BadParameter(f"{path} is {kind}", param_hint=f"--{option}")
    return source


def agent(
    context: typer.Context,
    plan: Annotated[
        Path,
        typer.Argument(
            help="The plan, or the request for one (with --neighbours), that all agents hold.",
        ),
    ],
    *,
    learning: LearningOptions,
    run: RunOptions,
    keys: Annotated[
        Path,
        in_agents(envvar="CORN_KEYS", help="Folder of agent-I.key, roster.json and the ledger."),
    ],
    neighbours: Annotated[
        str | None,
        in_agents(
            help="This agent's neighbours, such as 1,4,7, by name or number as in roster.json "
            "(for a request only)."
        ),
    ] = None,
    name: Annotated[
        str,
        in_place(
            "--agent", help="This agent's name in the plan or the consortium file, or its number."
        ),
    ],
    store: Annotated[
        str | None,
        in_place(
            help="HOST:PORT of the rendezvous; the first agent that accepts connections opens it. "
            "(Default: that of the consortium file.)"
        ),
    ] = None,
    wait: Annotated[
        float,
        in_place(min=0.1, help="Seconds within which all agents must have started."),
    ] = 600.0,
    listen: Annotated[
        str | None,
        in_place(
            help=f"ADDRESS:PORT at which neighbours connect. (Default: the port of the roster's "
            f"address, or {DEFAULT_PORT}, at the address that leads to the store; on the loopback "
            "address any free port.)"
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        in_place(
            help="HOST:PORT under which neighbours reach --listen, behind NAT or in a container."
        ),
    ] = None,
    rejoin: Annotated[
        bool,
        in_place("--rejoin", help="Join a run under way that lost this agent."),
    ] = False,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the run. Publish its folder shared, never private."),
    ] = Path("out"),
    monitoring: MonitoringOptions,
    json: JsonOption = False,
) -> None:
    """Run one agent of a plan in this process."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # failures are reported in one line
    # Before anything is read: the list of classes of private data must not become the model's
    # shape.
    consortium = read_consortium(context, plan, learning.data)
    if consortium is None:
        learning.require_public_classes()
        learning.require_stated_partition()
    else:
        consortium.load_plan()
        plan = consortium.plan_path
    source = read_source(plan, "neighbours", neighbours)
    # A request does not say how many agents there are, but all of them have a public key.
    names = (
        source.network.agent_names
        if isinstance(source, Plan)
        else load_roster(keys / "roster.json").names
    )
    number = look_up_agents(names, [name], argument="--agent")[0]
    if consortium is not None:
        store = store or consortium.store
        # The roster may have been made from an earlier file, with another address.
        advertise = advertise or consortium.sites[number].address
        # Behind NAT the address that others use is no address of this host: --listen has that.
        listen = listen or consortium.sites[number].address
    if store is None:
        raise typer.BadParameter("give HOST:PORT of the rendezvous", param_hint="--store")
    refuse_options_of_plan(context, source.budget)
    config = distributed.AgentConfig(
        workload=run.make_workload(learning, consortium, names),
        settings=run.make_settings(learning, source.budget, consortium),
        out=out,
        source=plan if isinstance(source, Plan) else source,
        neighbours=tuple(look_up_agents(names, neighbours or [], argument="--neighbours")),
        keys=keys,
        agent=number,
        num_agents=len(names),
        names=tuple(names),
        store=parse_address(store, default_port=DEFAULT_PORT),
        requirements=run.make_requirements(),
        wait=wait,
        listen=_read_address(listen),
        advertise=_read_address(advertise),
        rejoins=rejoin,
        status=monitoring.address,
    )
    # Several agents often share a machine, and their threads would slow each other down.
    limit_threads()
    # Here, in the main thread: Python allows signal handlers nowhere else.
    reports = distributed.Reports(distributed.listen_for_signals())
    with distributed.monitor_agent(config, reports, to_stderr=True) as monitored:
        # The plan as it was run: its file may have been replaced meanwhile.
        agreed, result = distributed.run_workload(config, monitored)
    if json:
        # NaN, which is not equal to itself, marks what was not measured or is private.
        measured = {name: value for name, value in result.measured.items() if value == value}
        facts = {
            "plan": fingerprint(agreed).hex(),
            "promise": f"{'simulated: ' if result.simulation else ''}{agreed.budget.describe()}",
            "simulation": result.simulation,
            "adversary": agreed.threat.describe(),
        }
        print_json({**facts, **result.to_json(), "measured": measured})
    # Last, so that the result is printed before the exit code says that the run was cut short.
    distributed.require_done([result], result.num_steps)


def _read_address(text: str | None) -> tuple[str, int] | None:
    return None if text is None else parse_address(text, default_port=DEFAULT_PORT)
