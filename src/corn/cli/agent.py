"""``corn agent``: run one agent of a workload in this process, for torchrun or on its own."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from corn import distributed, learn
from corn.cli.learning import LEARNING, LearningOptions
from corn.cli.options import JsonOption
from corn.cli.output import print_json, round_up
from corn.distributed.settings import DropoutPolicy
from corn.errors import make_printable
from corn.learn.names import USUAL_BATCH_SIZE
from corn.plan import Plan, fingerprint
from corn.threads import limit_threads

EXAMPLE = (
    "corn agent --plan plan.corn --keys keys --task breast-cancer --agent 2 --agents 20 "
    "--store 10.0.0.1:29500"
)

AGENTS = "Agents"
_PLACE = "Rendezvous (without torchrun)"


@dataclass(frozen=True)
class RunOptions:
    """Options of a run, the same for ``corn agent`` and ``corn launch``."""

    step_size: Annotated[float, typer.Option(help="First step size.", rich_help_panel=LEARNING)] = (
        0.1
    )
    on_dropout: Annotated[
        DropoutPolicy,
        typer.Option(
            help="When an agent is lost, the rest continue on the surviving graph, replan their "
            "noise for it, or stop.",
            rich_help_panel=AGENTS,
        ),
    ] = "continue"
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Seconds without a message after which a neighbour is considered lost.",
            rich_help_panel=AGENTS,
        ),
    ] = 60.0
    checkpoint_every: Annotated[
        int, typer.Option(min=1, help="Steps between checkpoints.", rich_help_panel=AGENTS)
    ] = 100
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the newest step of which every agent has a checkpoint.",
            rich_help_panel=AGENTS,
        ),
    ] = False

    lifetime_epsilon: Annotated[
        float | None,
        typer.Option(
            help="Refuse to start if all releases of an agent's data, under this and other plans, "
            "could exceed this ε.",
            rich_help_panel=AGENTS,
        ),
    ] = None
    lifetime_delta: Annotated[
        float | None,
        typer.Option(help="δ of that total. (Default: the plan's.)", rich_help_panel=AGENTS),
    ] = None
    other_keys: Annotated[
        list[Path] | None,
        typer.Option(
            help="Another folder of keys whose agents of the same numbers have the same data; its "
            "ledgers count to the total. Can be given several times.",
            rich_help_panel=AGENTS,
        ),
    ] = None

    def make_lifetime(self) -> distributed.Lifetime:
        """Return the owner's limit on all releases."""
        return distributed.Lifetime(
            self.lifetime_epsilon, self.lifetime_delta, tuple(self.other_keys or ())
        )

    def make_settings(
        self,
        learning: LearningOptions,
        *,
        batch_size: int | None,
        num_steps: int | None = None,
        seed: int = 0,
        rehearsal_seed: int | None = None,
    ) -> distributed.RunSettings:
        """Return the settings of a run."""
        return distributed.RunSettings(
            learn.make_schedule(self.step_size, learning.choose_schedule()),
            num_steps=num_steps,
            batch_size=batch_size,
            seed=seed,
            on_dropout=self.on_dropout,
            timeout=self.timeout,
            checkpoint_every=self.checkpoint_every,
            resume=self.resume,
            rehearsal_seed=rehearsal_seed,
        )


def agent(
    context: typer.Context,
    *,
    learning: LearningOptions,
    run: RunOptions,
    keys: Annotated[
        Path,
        typer.Option(
            help="Folder of agent-I.key, roster.json and the ledger.", rich_help_panel=AGENTS
        ),
    ],
    plan: Annotated[
        Path | None, typer.Option(help="The plan that all agents hold.", rich_help_panel=AGENTS)
    ] = None,
    request: Annotated[
        Path | None,
        typer.Option(
            help="Instead of a plan: the request for one that agents make together.",
            rich_help_panel=AGENTS,
        ),
    ] = None,
    neighbours: Annotated[
        str | None,
        typer.Option(
            help="With --request: this agent's neighbours, such as 1,4,7.", rich_help_panel=AGENTS
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Fewer steps than planned.", rich_help_panel=LEARNING),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(min=0, help="Seed of the initial models; public.", rich_help_panel=LEARNING),
    ] = 0,
    number: Annotated[
        int | None,
        typer.Option("--agent", min=0, help="This agent's number.", rich_help_panel=_PLACE),
    ] = None,
    agents: Annotated[
        int | None, typer.Option(min=1, help="Number of agents.", rich_help_panel=_PLACE)
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of the rendezvous; agent 0 opens it.", rich_help_panel=_PLACE),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the run: publish shared in it, never private."),
    ] = Path("out"),
    json: JsonOption = False,
) -> None:
    """Run one agent of a workload in this process; under torchrun its number is the rank."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # failures are reported in one line
    if (plan is None) == (request is None):
        raise typer.BadParameter("give either --plan or --request")
    learning.require_public_classes()
    # A batch size that is not given is the plan's; one that is must agree with it.
    source = context.get_parameter_source("batch_size")
    is_given = source is not None and source.name == "COMMANDLINE"
    config = distributed.AgentConfig(
        workload=learning.make_workload(),
        settings=run.make_settings(
            learning,
            batch_size=learning.batch_size if is_given else None,
            num_steps=steps,
            seed=seed,
        ),
        out=out,
        plan=plan,
        request=request,
        neighbours=_parse_numbers(neighbours),
        keys=keys,
        agent=number,
        num_agents=agents,
        store=None if store is None else distributed.parse_address(store),
        default_batch_size=USUAL_BATCH_SIZE,
        lifetime=run.make_lifetime(),
    )
    limit_threads()
    own = os.environ.get("RANK", "") if number is None else str(number)
    # The plan as it was run: its file may have been replaced meanwhile.
    agreed, result = distributed.run_workload(
        config,
        distributed.Reports(
            on_note=lambda text: _print_line(own, text),
            interruption=distributed.listen_for_signals(),
            on_private_note=lambda text: _print_line(own, f"private, do not publish: {text}"),
            on_total=lambda total: _print_line(own, f"private, do not publish: {total.describe()}"),
        ),
    )
    _print_line(own, _describe(result, agreed))
    if json:
        last = result.rows[-1]
        measured = {name: last[name] for name in learn.SHARED_COLUMNS if last[name] == last[name]}
        facts = {
            "plan": fingerprint(agreed).hex(),
            "promise": agreed.budget.describe(),
            "adversary": agreed.threat.describe(),
        }
        print_json({**facts, **result.to_json(), "measured": measured})
    distributed.require_done([result], result.num_steps)


def _describe(result: distributed.AgentResult, plan: Plan) -> str:
    """Return in one line how the run ended, and what was promised against whom."""
    last, why = result.rows[-1], distributed.describe_stop(result.stop)
    lost = "".join(f", without agent {who} from step {s} on" for who, s in result.lost.items())
    return (
        f"{result.status} after {result.num_steps} steps{f' ({why})' if why else ''}{lost}, "
        f"test loss {last['test_loss']:.4g}, {result.seconds_waited:.1f} s waited; ε spent "
        f"{round_up(float(last['epsilon']))} of {plan.budget.describe()}, against "
        f"{plan.threat.describe()}"
    )


def _print_line(agent: str, text: str) -> None:
    sys.stderr.write(f"agent {agent}: {make_printable(text)}\n")


def _parse_numbers(text: str | None) -> tuple[int, ...]:
    try:
        return () if text is None else tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"must be numbers with commas, such as 1,4,7, found {text!r}",
            param_hint="--neighbours",
        ) from error
