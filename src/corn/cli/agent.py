"""``corn agent``: run one agent of a plan in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import typer

from corn import distributed, learn
from corn.cli.learning import LearningOptions, read_consortium, refuse_options_of_plan
from corn.cli.options import JSON, REQUIRED, argument, in_agents, in_learning, option
from corn.cli.output import print_json
from corn.distributed.settings import DropoutPolicy
from corn.learn.consortium import Consortium
from corn.noise import load_roster
from corn.parsing import DEFAULT_PORT, parse_address
from corn.plan import Plan, fingerprint, load_plan
from corn.privacy import PrivacyBudget
from corn.threads import limit_threads
from corn.topology.graphs import look_up_agents

in_place = partial(option, panel="Rendezvous")


@dataclass(frozen=True)
class RunOptions:
    """Options of a run, the same for ``corn agent`` and ``corn launch``."""

    step_size: float = in_learning("First step size.", default=0.1)
    on_dropout: DropoutPolicy | None = in_agents(
        "After a lost agent, replan for the others or stop. (Default: replan where seeds allow it.)"
    )
    timeout: float = in_agents(
        "Seconds without a message after which a neighbour is considered lost.",
        default=60.0,
        min=0.1,
    )
    resume: bool = in_agents(
        "Continue from the newest step of which every agent has a checkpoint.", default=False
    )
    status: str | None = option(
        "HOST:PORT to serve /healthz and /metrics (Prometheus) at. With corn launch, agent I uses "
        "PORT + I.",
        panel="Monitoring",
    )
    device: str = in_learning(
        "Device of torch for gradients, such as cuda:0. Noise and messages stay on the CPU.",
        default="cpu",
    )
    require: list[str] | None = in_agents(
        "Refuse to start unless the plan meets this: unit, adjacency, insiders (at least), steps, "
        "epsilon, and total-epsilon of all plans (at most), both at delta (1e-5 unless given). Can "
        "be given several times.",
        metavar="NAME=VALUE",
    )
    other_keys: list[Path] | None = in_agents(
        "Another folder of keys for the same data, whose ledgers count towards the total. Can be "
        "given several times.",
        envvar="CORN_OTHER_KEYS",
    )

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

    @property
    def status_address(self) -> tuple[str, int] | None:
        """The address at which the status is served; None for none."""
        return None if self.status is None else parse_address(self.status)

    def make_settings(
        self, learning: LearningOptions, budget: PrivacyBudget, consortium: Consortium | None = None
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


def read_plan(
    context: typer.Context, path: Path, learning: LearningOptions
) -> tuple[Plan, Path, Consortium | None]:
    """Return the plan of a run, its file, and the consortium if the path is that of one."""
    # Before anything is read: the list of classes of private data must not become the model's
    # shape.
    consortium = read_consortium(context, path, learning.data)
    if consortium is None:
        learning.require_public_classes()
    else:
        consortium.load_plan()
        path = consortium.plan_path
    plan = load_plan(path)
    refuse_options_of_plan(context, plan.budget)
    return plan, path, consortium


def agent(
    context: typer.Context,
    plan: Path = argument(
        "The plan, or the request for one (with --neighbours), that all agents hold."
    ),
    *,
    learning: LearningOptions,
    run: RunOptions,
    keys: Path = in_agents(
        "Folder of agent-I.key, roster.json and the ledger.", default=REQUIRED, envvar="CORN_KEYS"
    ),
    neighbours: str | None = in_agents(
        "This agent's neighbours, such as 1,4,7, by name or number as in roster.json (for a "
        "request only)."
    ),
    name: str = in_place(
        "This agent's name in the plan or the consortium file, or its number.",
        default=REQUIRED,
        flag="--agent",
    ),
    store: str | None = in_place(
        "HOST:PORT of the rendezvous; the first agent that accepts connections opens it. (Default: "
        "that of the consortium file.)"
    ),
    wait: float = in_place(
        "Seconds within which all agents must have started.", default=600.0, min=0.1
    ),
    listen: str | None = in_place(
        "ADDRESS:PORT at which neighbours connect. (Default: the port of the roster's address, or "
        f"{DEFAULT_PORT}, at the address that leads to the store.)"
    ),
    advertise: str | None = in_place(
        "HOST:PORT under which neighbours reach --listen, behind NAT or in a container."
    ),
    rejoin: bool = in_place("Join a run under way that lost this agent.", default=False),
    out: Path = option(
        "Folder of the run. Publish its folder shared, never private.", default=Path("out")
    ),
    json: bool = JSON,
) -> None:
    """Run one agent of a plan in this process."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # failures are reported in one line
    if plan.suffix != ".toml":
        learning.require_stated_partition()
    source: Path | distributed.PlanningRequest
    if neighbours is None:
        made, source, consortium = read_plan(context, plan, learning)
        names, budget = made.network.agent_names, made.budget
    else:
        learning.require_public_classes()
        source, consortium = distributed.read_request(plan), None
        refuse_options_of_plan(context, source.budget)
        # A request does not say how many agents there are, but all of them have a public key.
        names, budget = load_roster(keys / "roster.json").names, source.budget
    number = look_up_agents(names, [name], argument="--agent")[0]
    if consortium is not None:
        store = store or consortium.store
        # The roster may have been made from an earlier file, with another address.
        advertise = advertise or consortium.sites[number].address
        # Behind NAT the address that others use is no address of this host: --listen has that.
        listen = listen or consortium.sites[number].address
    if store is None:
        raise typer.BadParameter("give HOST:PORT of the rendezvous", param_hint="--store")
    config = distributed.AgentConfig(
        workload=run.make_workload(learning, consortium, names),
        settings=run.make_settings(learning, budget, consortium),
        out=out,
        source=source,
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
        status=run.status_address,
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
