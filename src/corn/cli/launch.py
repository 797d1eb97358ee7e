"""``corn launch``: run all agents of a plan as processes on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from corn import distributed, learn
from corn.cli.agent import MonitoringOptions, RunOptions, read_source
from corn.cli.learning import (
    MODEL_FILE,
    LearningOptions,
    describe_quality,
    read_consortium,
    refuse_options_of_plan,
    write_run,
)
from corn.cli.options import JsonOption, in_agents, read_configuration
from corn.cli.output import (
    collect_sampling,
    describe_average,
    describe_outcome,
    print_facts,
    print_json,
    print_line,
    print_note,
)
from corn.cli.plan import describe_mixing
from corn.plan import Plan, fingerprint
from corn.privacy.rounding import round_up_range
from corn.topology import load_network

if TYPE_CHECKING:
    from corn.learn.metrics import Quality

EXAMPLE = "corn launch plan.corn --task breast-cancer --step-size 0.5 --out out/run"

# Left out of run.json, which is shared: they reveal other runs, folders and hosts of the owner.
_OWNERS_OPTIONS = ("require", "other_keys", "status")
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
            help="The plan, the consortium file it was made from, or the request for a plan (with "
            "--graph) that agents make together.",
        ),
    ],
    *,
    learning: LearningOptions,
    run: RunOptions,
    keys: Annotated[
        Path | None,
        in_agents(
            envvar="CORN_KEYS",
            help="Folder of keys, ledgers and roster.json; never publish it. Keys are made if it "
            "has none. (Default: PLAN.keys beside the plan or the request.)",
        ),
    ] = None,
    graph: Annotated[
        str | None,
        in_agents(help="The network (for a request only); each agent learns its neighbours in it."),
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
    monitoring: MonitoringOptions,
    json: JsonOption = False,
) -> None:
    """Run all agents of a plan as processes on this machine."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # failures are reported in one line
    consortium = read_consortium(context, plan, learning.data)
    if consortium is None:
        learning.require_public_classes()
    else:
        consortium.load_plan()
        plan = consortium.plan_path
    source = read_source(plan, "graph", graph)
    refuse_options_of_plan(context, source.budget)
    network = None
    if graph is not None and not isinstance(source, Plan):
        network = load_network(graph, gossip=source.gossip, mixing=source.mixing)
    launched = distributed.launch(
        plan if isinstance(source, Plan) else source,
        run.make_workload(
            learning, consortium, (network or cast("Plan", source).network).agent_names
        ),
        out=out,
        settings=run.make_settings(learning, source.budget, consortium),
        keys=keys or plan.with_suffix(".keys"),
        network=network,
        requirements=run.make_requirements(),
        show_private=show_private,
        status=monitoring.address,
    )
    if launched.made_keys:
        print_note(
            f"made keys for all agents in {launched.keys}, which is safe on one machine only; "
            "agents that do not trust each other make their own with corn keys make"
        )
    model = _average_models(launched)
    quality = None
    if model is not None and "test" in launched.problem.parts:
        quality = model.measure(*launched.problem.parts["test"])
    # Scores on an agent's own samples are private.
    is_public = "test" in launched.problem.public_parts
    facts = _facts(read_configuration(context), launched, quality if is_public else None)
    rows = launched.measured.rows
    folders = launched.folders
    write_run(rows, facts, folders.shared, columns=learn.SHARED_COLUMNS)
    if model is not None:
        model.save(folders.shared / MODEL_FILE)
        print_note(f"wrote the model to {folders.shared / MODEL_FILE}: corn export {out}")
    private = _private_facts(launched, None if is_public else quality) if show_private else {}
    # A file apart with mode 0600, never a part of the shared one.
    if private:
        write_run(rows, private, folders.private, is_private=True)
    if json:
        print_json(facts | ({"private": private} if private else {}))
    else:
        classes = None if model is None else model.classes
        shown = describe_quality(quality, classes) if is_public or show_private else []
        _print(launched, facts, private, quality=shown)
    if private:
        print_note(_WARNING)
    # On stderr, as stdout may be published.
    for note in launched.private_notes:
        print_note(f"private, do not publish: {note}")
    print_note(f"publish {folders.shared}, but never {folders.private} or {launched.keys}")
    if not json:
        print_line(_describe_outcome(launched, facts))
    distributed.require_done(
        launched.finished.values(),
        launched.measured.num_steps,
        was_interrupted=launched.was_interrupted,
    )


def _average_models(launched: distributed.LaunchResult) -> learn.TrainedModel | None:
    """Return the average of the agents' final models; None if there is none that predicts."""
    models = launched.measured.parameters[0]
    finished = models[models.isfinite().all(dim=1)]
    if not len(finished):
        return None
    promise = learn.ModelPromise.of_plan(launched.plan, simulation=launched.problem.simulation)
    # Relative to the first, so that the average of equal models is that model to the bit.
    average = finished[0] + (finished - finished[0]).mean(dim=0)
    return learn.TrainedModel.from_problem(launched.problem, average, promise)


def _facts(
    configuration: dict[str, object],
    launched: distributed.LaunchResult,
    quality: Quality | None,
) -> dict[str, object]:
    """Return the content of run.json: nothing computed from private data without noise."""
    result = launched.measured
    plan = launched.plan
    simulation = launched.problem.simulation
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
        "names": plan.network.agent_names,
        "promise": f"{'simulated: ' if simulation else ''}{plan.budget.describe()}",
        "simulation": simulation,
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
        "test_quality": None if quality is None else asdict(quality),
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


def _private_facts(
    launched: distributed.LaunchResult, quality: Quality | None
) -> dict[str, object]:
    """Return numbers for the owner of all data; times depend on how much data agents have."""
    return {
        "warning": _WARNING,
        "agent_samples": launched.problem.data.sizes,
        "measured": _measured(launched, learn.PRIVATE_COLUMNS),
        "test_quality": None if quality is None else asdict(quality),
        "notes": launched.private_notes,
        "seconds_to_start": launched.seconds_to_start,
    }


def _measured(launched: distributed.LaunchResult, columns: Sequence[str]) -> dict[str, Any]:
    """Return the columns of the last measurement that have a value."""
    last = launched.measured.rows[-1]
    # NaN, which is not equal to itself, marks what was not measured.
    return {name: last[name] for name in columns if last[name] == last[name]}


def _print(
    launched: distributed.LaunchResult,
    facts: dict[str, Any],
    private: dict[str, Any],
    *,
    quality: list[tuple[str, str]],
) -> None:
    plan = launched.plan
    last = launched.measured.rows[-1]
    names = plan.network.agent_names
    hidden = _SAME_UNDER_SUMS if plan.network.mixing == "sum" else ()
    scores = {
        name.replace("_", " "): f"{value:.4g}"
        for name, value in facts["measured"].items()
        if name.startswith(("test_", "consensus")) and name not in hidden
    }
    spent = round_up_range([last["epsilon_least"], last["epsilon"]])
    print_facts(
        f"{facts['task']}, {plan.num_agents} agents on {plan.network.source}",
        [
            ("promise", facts["promise"]),
            ("against", facts["adversary"]),
            ("noise in the average", describe_average(plan)),
            ("steps", f"{facts['num_steps']} ({launched.status})"),
            *scores.items(),
            *(quality if facts["test_quality"] else []),
            ("mixing", describe_mixing(plan)),
            (
                f"{'simulated ' if facts['simulation'] else ''}ε spent",
                f"{spent} ({last['unit']}), the range over agents",
            ),
            ("agents lost", ", ".join(names[agent] for agent in launched.lost) or "none"),
        ],
    )
    for note in facts["notes"]:
        print_note(note)
    if facts["simulation"] not in ("", *facts["notes"]):
        print_note(f"simulated ε: {facts['simulation']}")
    if private:
        measured = {
            name.replace("_", " "): f"{value:.4g}" for name, value in private["measured"].items()
        }
        samples = ", ".join(map(str, private["agent_samples"]))
        lines = [*measured.items(), *(quality if private["test_quality"] else [])]
        print_facts("private: do not publish", [*lines, ("agent samples", samples)])


def _describe_outcome(launched: distributed.LaunchResult, facts: dict[str, Any]) -> str | None:
    """Return the last line: what was reached, and at which privacy."""
    plan = launched.plan
    last = launched.measured.rows[-1]
    return describe_outcome(
        facts["measured"],
        last["epsilon"] if plan.budget.is_uniform else [last["epsilon_least"], last["epsilon"]],
        plan.budget,
        plan.threat,
        (plan.central_ratio, plan.weighted_central_ratio),
        is_simulated=bool(facts["simulation"]),
    )
