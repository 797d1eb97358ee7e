"""``corn launch``: run all agents of a plan as processes on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from corn import distributed, learn
from corn.cli.agent import AGENTS, MonitoringOptions, RunOptions, read_source
from corn.cli.config_file import ConfigOption
from corn.cli.learning import LearningOptions, draw_run, refuse_options_of_plan, write_run
from corn.cli.options import (
    JsonOption,
    PlotOption,
)
from corn.cli.output import (
    collect_sampling,
    describe_average,
    describe_outcome,
    print_facts,
    print_json,
    print_line,
    print_note,
    strictest_facts,
)
from corn.cli.plan import describe_mixing
from corn.cli.records import read_configuration
from corn.plan import Plan, fingerprint
from corn.privacy.rounding import round_up, round_up_range
from corn.topology import load_network

EXAMPLE = "corn launch plan.corn --task breast-cancer --step-size 0.5 --out out/run"

# Left out of run.json, which is shared: they reveal other runs, folders and hosts of the owner.
_OWNERS_OPTIONS = ("require", "other_keys", "config_file", "status", "store")
# Under exact sums all agents have one model, which is the average.
_SAME_UNDER_SUMS = ("test_loss_of_average", "test_accuracy_of_average", "consensus_distance")
_WARNING = (
    "private numbers are computed from private data without noise: no ε covers them, and they must "
    "not be published"
)


def launch(
    context: typer.Context,
    plan: Annotated[
        Path,
        typer.Argument(
            help="The plan, or the request for one (with --graph) that agents make together.",
        ),
    ],
    *,
    learning: LearningOptions,
    run: RunOptions,
    keys: Annotated[
        Path | None,
        typer.Option(
            envvar="CORN_KEYS",
            help="Folder of keys, ledgers and roster.json; never publish it. Keys are made if it "
            "has none. (Default: PLAN.keys beside the plan or the request.)",
            rich_help_panel=AGENTS,
        ),
    ] = None,
    agents_per_host: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of agents per host, on several hosts.", rich_help_panel=AGENTS
        ),
    ] = None,
    host: Annotated[
        int, typer.Option(min=0, help="This host's number, from 0.", rich_help_panel=AGENTS)
    ] = 0,
    store: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of the rendezvous, on several hosts; host 0 opens it.",
            rich_help_panel=AGENTS,
        ),
    ] = None,
    rehearse: Annotated[
        int | None,
        typer.Option(
            metavar="SEED",
            help="Draw the noise of corn train --rehearse with this public seed, for comparison. "
            "Protects nothing.",
            rich_help_panel=AGENTS,
        ),
    ] = None,
    graph: Annotated[
        str | None,
        typer.Option(
            help="The network (for a request only); each agent learns its neighbours in it.",
            rich_help_panel=AGENTS,
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the run. Publish its folder shared, never private."),
    ] = Path("out/launch"),
    show_private: Annotated[
        bool,
        typer.Option(
            "--show-private",
            help="Also show training losses and gradient norms, and write them to private. No "
            "noise protects them: only for a user who owns the data of all agents.",
        ),
    ] = False,
    plot: PlotOption = None,
    monitoring: MonitoringOptions,
    config_file: ConfigOption = None,  # noqa: ARG001 - its callback has read it
    json: JsonOption = False,
) -> None:
    """Run all agents of a plan as processes on this machine, linked to their neighbours only."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # failures are reported in one line
    if show_private and agents_per_host is not None:
        raise typer.BadParameter(
            "--show-private needs one machine with the data of all agents; on several hosts the "
            "numbers of each agent are in its folder in private"
        )
    learning.require_public_classes()
    if agents_per_host is not None:
        learning.require_stated_partition()
    source = read_source(plan, context, "graph")
    refuse_options_of_plan(context, source.budget)
    network = None
    if graph is not None and not isinstance(source, Plan):
        network = load_network(
            graph, weights=source.weights, gossip=source.gossip, mixing=source.mixing
        )
    settings = run.make_settings(
        learning,
        batch_size=source.budget.batch_size or learning.batch_size,
        rehearsal_seed=rehearse,
    )
    launched = distributed.launch(
        plan if isinstance(source, Plan) else source,
        run.make_workload(learning),
        out=out,
        settings=settings,
        network=network,
        keys=keys or plan.with_suffix(".keys"),
        placement=distributed.Placement(
            agents_per_host, host, None if store is None else distributed.parse_address(store)
        ),
        requirements=run.make_requirements(),
        # On stderr, as stdout may be published.
        on_total=lambda total: print_note(f"private, do not publish: {total.describe()}"),
        show_table=not json,
        show_private=show_private,
        monitoring=monitoring.make(),
    )
    if launched.made_keys:
        print_note(
            f"made keys for all agents in {launched.keys}, which is safe on one machine only; "
            "agents that do not trust each other make their own with corn keys make"
        )
    facts = _facts(read_configuration(context), launched)
    private = _private_facts(launched) if show_private else {}
    _write(launched, facts, private)
    if plot:
        _draw(launched, plot)
    if json:
        print_json(facts | ({"private": private} if show_private else {}))
    else:
        _print(launched)
    if show_private:
        _print_private(launched, show_facts=not json)
    for note in launched.private_notes:
        print_note(f"private, do not publish: {note}")
    print_note(_describe_sharing(launched))
    if not json:
        _print_outcome(launched)
    distributed.require_done(
        launched.finished.values(),
        launched.measured.num_steps,
        was_interrupted=launched.was_interrupted,
    )


def _write(
    launched: distributed.LaunchResult, facts: dict[str, object], private: dict[str, object]
) -> None:
    """Write metrics.csv and run.json, shared and private ones apart."""
    rows = launched.measured.rows
    write_run(
        rows,
        facts,
        launched.folders.shared,
        columns=learn.SHARED_COLUMNS,
        is_private=launched.is_rehearsal,
    )
    # A file apart with mode 0600, never a part of the shared one.
    if private:
        write_run(rows, private, launched.folders.private, is_private=True)


def _facts(
    configuration: dict[str, object], launched: distributed.LaunchResult
) -> dict[str, object]:
    """Return the content of run.json: nothing computed from private data without noise."""
    result, plan = launched.measured, launched.plan
    return {
        # Names of folders may describe the owner of the data, and limits its other runs.
        "configuration": {
            name: _strip_folders(value)
            for name, value in configuration.items()
            if name not in _OWNERS_OPTIONS
        },
        "task": launched.problem.task.describe(),
        "plan": fingerprint(plan).hex(),
        "graph": plan.network.source,
        "num_agents": plan.num_agents,
        "promise": _promise(launched),
        "simulation": launched.problem.simulation,
        **collect_sampling(plan.budget),
        "adversary": plan.threat.describe(),
        "central_ratio": plan.central_ratio,
        "weighted_central_ratio": plan.weighted_central_ratio,
        "mixing": plan.network.mixing,
        "gossip": str(plan.network.gossip),
        "cooldown_steps": plan.cooldown_steps,
        "status": launched.status.value,
        "num_steps": result.num_steps,
        "measured": _measured(launched, learn.SHARED_COLUMNS),
        "lost": {str(agent): why for agent, why in launched.lost.items()},
        "notes": list(result.notes),
        "agents": {str(agent): own.to_json() for agent, own in launched.finished.items()},
    }


def _strip_folders(value: object) -> object:
    """Return the value of an option without the folders of a file that it names.

    >>> [_strip_folders(value) for value in (Path("/ward-7/a.csv"), "ward/mine.py:make", 3)]
    ['a.csv', 'mine.py:make', 3]
    """
    return str(value).rpartition("/")[2] if isinstance(value, Path | str) else value


def _private_facts(launched: distributed.LaunchResult) -> dict[str, object]:
    """Return numbers for the owner of all data; times depend on how much data agents have."""
    return {
        "warning": _WARNING,
        "agent_samples": launched.problem.data.sizes,
        "measured": _measured(launched, learn.PRIVATE_COLUMNS),
        "notes": launched.private_notes,
        "seconds_to_start": launched.seconds_to_start,
        "seconds_waited": {
            str(agent): own.seconds_waited for agent, own in launched.finished.items()
        },
    }


def _measured(launched: distributed.LaunchResult, columns: Sequence[str]) -> dict[str, object]:
    """Return the columns of the last measurement that have a value."""
    last = launched.measured.rows[-1]
    # NaN, which is not equal to itself, marks what was not measured.
    return {name: last[name] for name in columns if last[name] == last[name]}


def _draw(launched: distributed.LaunchResult, path: Path) -> None:
    """Draw the columns that may be published."""
    (trial,) = launched.measured.trials
    simulated = "simulated " if launched.is_simulated else ""
    rows = launched.measured.rows
    measured = [
        name for name in learn.SHARED_COLUMNS if any(row[name] == row[name] for row in rows)
    ]
    draw_run(
        [{name: row[name] for name in measured} for row in rows],
        {trial.mechanism.name: trial.schedule.describe()},
        title=f"{launched.problem.task.describe()}: {simulated}{launched.plan.describe()}",
        path=path,
    )


def _promise(launched: distributed.LaunchResult) -> str:
    if launched.is_rehearsal:
        return "rehearsal: protects nothing"
    simulated = "simulated: " if launched.is_simulated else ""
    return f"{simulated}{launched.plan.budget.describe()}"


def _describe_spent(launched: distributed.LaunchResult) -> str:
    last = launched.measured.rows[-1]
    if launched.plan.budget.is_uniform:
        return f"{round_up(float(last['epsilon']))} ({last['unit']}), of the agent that spent most"
    spent = round_up_range([last["epsilon_least"], last["epsilon"]])
    return f"{spent} ({last['unit']}), each agent by its own promise"


def _print(launched: distributed.LaunchResult) -> None:
    result, plan, last = launched.measured, launched.plan, launched.measured.rows[-1]
    is_sum = plan.network.mixing == "sum"
    measured = {
        "test loss" if is_sum else "test loss, agents' own models": "test_loss",
        "test loss, average model": "test_loss_of_average",
        "test accuracy" if is_sum else "test accuracy, agents' own": "test_accuracy",
        "test accuracy, average model": "test_accuracy_of_average",
        "disagreement": "consensus_distance",
    }
    print_facts(
        f"{launched.problem.task.describe()}, {plan.num_agents} agents on {plan.network.source}",
        [
            ("promise", _promise(launched)),
            *strictest_facts(plan.budget, plan.num_agents),
            ("against", plan.threat.describe()),
            (
                "noise in the average",
                describe_average(plan.central_ratio, plan.weighted_central_ratio, plan.budget),
            ),
            ("steps", f"{result.num_steps} ({launched.status})"),
            *(
                (what, f"{last[name]:.4g}")
                for what, name in measured.items()
                if last[name] == last[name] and not (is_sum and name in _SAME_UNDER_SUMS)
            ),
            ("mixing", describe_mixing(plan)),
            (
                "simulated ε spent" if launched.is_simulated else "ε spent",
                _describe_spent(launched),
            ),
            ("agents lost", ", ".join(map(str, launched.lost)) or "none"),
        ],
    )
    for note in result.notes:
        print_note(note)
    if launched.problem.simulation not in ("", *result.notes):
        print_note(f"simulated ε: {launched.problem.simulation}")


def _print_outcome(launched: distributed.LaunchResult) -> None:
    """Print the last line: what was reached, and at which privacy."""
    plan, last = launched.plan, launched.measured.rows[-1]
    spent = last["epsilon"] if plan.budget.is_uniform else [last["epsilon_least"], last["epsilon"]]
    print_line(
        describe_outcome(
            _measured(launched, learn.SHARED_COLUMNS),
            spent,
            plan.budget,
            threat=plan.threat,
            central_ratio=plan.central_ratio,
            weighted_ratio=plan.weighted_central_ratio,
            is_simulated=launched.is_simulated,
        )
    )


def _print_private(launched: distributed.LaunchResult, *, show_facts: bool) -> None:
    """Print the private numbers, with a warning."""
    if show_facts:
        measured = _measured(launched, learn.PRIVATE_COLUMNS)
        print_facts(
            "private: do not publish",
            [
                *((name.replace("_", " "), f"{value:.4g}") for name, value in measured.items()),
                ("agent samples", ", ".join(map(str, launched.problem.data.sizes))),
            ],
        )
    print_note(_WARNING)


def _describe_sharing(launched: distributed.LaunchResult) -> str:
    if launched.is_rehearsal:
        return f"a rehearsal protects nothing: publish nothing of {launched.folders.private}"
    shared, private = launched.folders.shared, launched.folders.private
    return f"publish {shared}, but never {private} or {launched.keys}"
